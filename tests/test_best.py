"""The policy "best": profiles of a model, and what happens without one."""

import dataclasses
import json
import subprocess
import sys
import warnings

import pytest
import torch
from factories import left_padded, prompts, run, tiny

import kvpatch
from kvpatch import best
from kvpatch.policy import resolve
from kvpatch.ranking import Blend

POLICY = resolve(
    "inertia", name="best", refresh=4, sinks=1, blend=Blend(score_heads=((2, 1), (0, 3)), share=0.6, least=0.01)
)


@pytest.fixture
def user_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("KVPATCH_CACHE", str(tmp_path))
    return tmp_path / "profiles"


def profile_of(model, policy=POLICY, **measured) -> best.Profile:
    return best.Profile(best.identity(model), policy, {"seed": 3, **measured})


def test_a_profile_is_read_as_it_was_written(tmp_path):
    for policy in (POLICY, resolve("inertia", name="best"), resolve("tova", name="best", recent=0.25)):
        written = profile_of(tiny("llama"), policy, kept=[0.5, 1.0])
        written.write(tmp_path / "new" / "x.toml")
        read = best.Profile.read(tmp_path / "new" / "x.toml")
        assert (read.model, read.policy, read.measured) == (written.model, policy, written.measured)


def test_a_profile_in_the_users_folder_is_found_for_its_model_only(user_folder):
    model, other = tiny("llama"), tiny("llama", seed=1)
    profile_of(model).write(user_folder / best.file_name(model))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with kvpatch.patched(model, "best", budget=8, compile=False) as handle:
            assert handle.policy == POLICY and kvpatch.explain(handle.model).policy.startswith("best (profile llama-")
    with pytest.warns(UserWarning, match="kvpatch calibrate"):
        handle = kvpatch.patch(other, "best", budget=8, compile=False)
    assert handle.policy == resolve("inertia", name="best")
    assert "inertia" in kvpatch.explain(handle.model).policy
    kvpatch.unpatch(other)


def test_a_profile_that_only_mentions_the_weights_is_another_models(user_folder):
    model, other = tiny("llama"), tiny("llama", layers=2)
    mentioned = profile_of(other, like=best.identity(model)["fingerprint"])
    mentioned.write(user_folder / best.file_name(other))
    assert best.find(model) is None and best.find(other).policy == POLICY


def test_best_says_what_its_policy_says(user_folder):
    model, rows = tiny("llama"), left_padded(prompts((26, 17)))
    profile_of(model).write(user_folder / best.file_name(model))
    said = []
    for policy in ("best", POLICY):
        with kvpatch.patched(model, policy, budget=8, compile=False) as handle:
            said.append((run(model, rows), handle.retained()))
    assert torch.equal(said[0][0], said[1][0]) and torch.equal(said[0][1], said[1][1])
    with kvpatch.patched(model, "inertia", budget=8, compile=False) as handle:
        run(model, rows)
        assert not torch.equal(handle.retained(), said[0][1])


def test_fields_given_beside_best_replace_its_own(user_folder):
    model = tiny("llama")
    profile_of(model).write(user_folder / best.file_name(model))
    with kvpatch.patched(model, "best", budget=8, refresh=1, compile=False) as handle:
        assert handle.policy == POLICY.replace(refresh=1)


def test_a_named_profile_is_taken_and_says_if_it_is_for_other_weights(tmp_path):
    model, other = tiny("llama"), tiny("llama", seed=1)
    profile_of(other).write(tmp_path / "mine.toml")
    with kvpatch.patched(model, "best", budget=8, profile=tmp_path / "mine.toml", compile=False) as handle:
        assert handle.policy == POLICY and "other weights" in kvpatch.explain(handle.model).policy
    with kvpatch.patched(other, "best", budget=8, profile=str(tmp_path / "mine.toml"), compile=False) as handle:
        assert "other weights" not in kvpatch.explain(handle.model).policy


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("x = [", "not one of this version"),
        ("[policy]\n", r"no table \[model\]"),
        ("[model]\n", r"no table \[policy\]"),
        ("[model]\n[policy]\nalpah = 0.3\n", "alpah"),
        ("[model]\n[policy]\nalpha = 3\n", "alpha"),
        ("[model]\n[policy]\n[blend]\nshare = 2\n", "share"),
    ],
)
def test_a_bad_profile_is_named_with_what_is_wrong(tmp_path, content, message):
    path = tmp_path / "bad.toml"
    path.write_text(content)
    model = tiny("llama")
    with pytest.raises(best.ProfileError, match=message) as caught:
        kvpatch.patch(model, "best", budget=8, profile=path)
    assert str(path) in str(caught.value)
    assert "generate" not in model.__dict__


def test_a_missing_profile_or_one_of_another_shape_is_refused(tmp_path):
    model = tiny("llama")
    with pytest.raises(best.ProfileError, match="can't be read"):
        kvpatch.patch(model, "best", budget=8, profile=tmp_path / "none.toml")
    profile_of(tiny("llama", layers=2)).write(tmp_path / "other.toml")
    with pytest.raises(best.ProfileError, match="layers=2.*layers=3"):
        kvpatch.patch(model, "best", budget=8, profile=tmp_path / "other.toml")
    with pytest.raises(ValueError, match="for policy 'best'"):
        kvpatch.patch(model, "tova", budget=8, profile=tmp_path / "other.toml")


def test_the_fingerprint_is_that_of_the_weights_in_any_dtype_and_with_more_tokens():
    model = tiny("llama", dtype=torch.float32)
    found = best.identity(model)
    assert best.identity(tiny("llama", dtype=torch.float32).to(torch.bfloat16)) == found
    assert best.identity(tiny("llama", seed=1, dtype=torch.float32))["fingerprint"] != found["fingerprint"]
    longer = tiny("llama", dtype=torch.float32)
    longer.resize_token_embeddings(120)
    assert best.identity(longer) == found


def test_every_field_of_a_policy_and_a_blend_can_be_kept(tmp_path):
    blend = Blend("attention", "max", "all", ((1, 2), (2, 0, 0.25)), "peak", 0.9, "zero", 0.3, 0.2, 5, 0.7)
    untouched = [field.name for field in dataclasses.fields(Blend) if getattr(blend, field.name) == field.default]
    assert untouched == ["scorer", "score_layers"]  # what score_heads needs
    policy = kvpatch.Policy(
        "best",
        True,
        "vnorm",
        "rms",
        (0, 2),
        "all",
        "cumulative",
        0.5,
        "uniform",
        "once",
        2,
        0.1,
        3,
        True,
        "zero",
        blend,
        7,
        kvpatch.Prefill("mine", "cake", 8, 3, "max", 1, 0.5, "uniform", 0.25, 0.5, True, None, 2, 3),
        True,
        0.25,
    )
    default = kvpatch.Policy()
    same = [f.name for f in dataclasses.fields(policy) if getattr(policy, f.name) == getattr(default, f.name)]
    assert same == ["evicts", "score_heads", "compact"]  # what a blend that evicts can't change
    profile_of(tiny("llama"), policy).write(tmp_path / "x.toml")
    assert best.Profile.read(tmp_path / "x.toml").policy == policy


SHIPPED = """
import json
from kvpatch import best
print(json.dumps([path.name for path in best._known()]))
"""


def test_what_is_shipped_can_be_read():
    done = subprocess.run([sys.executable, "-c", SHIPPED], capture_output=True, text=True, check=True)
    for name in json.loads(done.stdout.splitlines()[-1]):
        found = [path for path in best._known() if path.name == name]
        assert best.Profile.read(found[0]).policy.name == "best"
