"""Policies under other libraries' names."""

import dataclasses

import pytest
import torch
from factories import llama, prompts, run

import kvpatch
from kvpatch import compat
from kvpatch.compression.rule import PRESETS


@dataclasses.dataclass
class SnapKVPress:
    """As kvpress has it."""

    compression_ratio: float = 0.0
    window_size: int = 64
    kernel_size: int = 5


class AdaKVPress:
    def __init__(self, press, alpha_safeguard=0.2):
        self.press, self.alpha_safeguard = press, alpha_safeguard


def rule_of(press, /, **arguments):
    return compat.from_kvpress(press, **arguments)["policy"].prefill


def test_names_and_arguments_are_kvpress_own():
    found = compat.from_kvpress("SnapKVPress", compression_ratio=0.75, window_size=16, kernel_size=7)
    assert found["policy"].prefill == PRESETS["snapkv"].replace(window=16, recent=16, width=7)
    assert found["policy"].grows and found["budget"].tokens(1000) == 250 and found["budget"].tokens(8) == 2
    assert rule_of("SnapKVPress").window == 64 and rule_of("SnapKVPress").recent == 64  # kvpress's default
    assert not compat.from_kvpress("KnormPress")["budget"].evicts
    assert rule_of("PyramidKVPress").allocation == "pyramid"
    assert rule_of("ExpectedAttentionPress", compression_ratio=0.5) == PRESETS["expected-attention"]
    assert rule_of("StreamingLLMPress", n_sink=2).sinks == 2
    assert rule_of("RandomPress", seed=7).seed == 7
    for name in ("TOVAPress", "KnormPress", "KeyDiffPress"):
        assert rule_of(name) in PRESETS.values()


def test_nested_presses_are_opened():
    ada = compat.from_kvpress("AdaKVPress", press="SnapKVPress", compression_ratio=0.5, alpha_safeguard=0.3)
    assert ada["policy"].prefill.allocation == "adaptive" and ada["policy"].prefill.floor == 0.3
    assert ada["policy"].prefill.window == 64 and ada["budget"].tokens(100) == 50
    both = rule_of("CriticalAdaKVPress", press="SnapKVPress", first_stage_ratio=0.25, alpha_safeguard=0.1)
    assert (both.critical, both.allocation, both.floor) == (0.25, "adaptive", 0.1)
    given = compat.from_kvpress(AdaKVPress(SnapKVPress(0.5, window_size=8)))
    assert given["policy"].prefill == PRESETS["snapkv"].replace(
        name="adakv", window=8, recent=8, allocation="adaptive", floor=0.2
    )
    assert given["budget"].tokens(100) == 50


def test_decoding_presses_evict_at_every_step():
    found = compat.from_kvpress("DecodingPress", base_press="TOVAPress", target_size=300, compression_interval=16)
    assert found["policy"].name == "tova" and found["budget"].tokens(1000) == 300


def test_an_inner_presss_own_arguments_reach_it():
    found = compat.from_kvpress("AdaKVPress", press="ExpectedAttentionPress", epsilon=0.0)
    assert found["policy"].prefill.score == "expected-attention"

    class StreamingLLMPress:
        def __init__(self, n_sink):
            self.n_sink, self.compression_ratio = n_sink, 0.0

    found = compat.from_kvpress("DecodingPress", base_press=StreamingLLMPress(16), target_size=64)
    assert found["policy"].sinks == 16


def test_a_model_is_patched_by_it():
    model = llama(dtype=torch.float32)
    batch = {"input_ids": torch.tensor(prompts((40,))), "attention_mask": torch.ones(1, 40, dtype=torch.int64)}
    given = compat.from_kvpress("SnapKVPress", compression_ratio=0.5, window_size=4)
    with kvpatch.patched(model, **given, compile=False) as handle:
        run(model, batch, max_new_tokens=3)
        assert handle.stats.held == 20 + 2


@pytest.mark.parametrize(
    ("press", "arguments", "error", "words"),
    [
        ("SnapKvPress", {}, ValueError, ("'SnapKvPress'", "SnapKVPress")),
        ("SnapKVPress", {"window": 3}, TypeError, ("SnapKVPress", "'window'")),
        ("SnapKVPress", {"compression_ratio": 1.0}, ValueError, ("compression_ratio", "1.0")),
        ("PyramidKVPress", {"beta": 10}, ValueError, ("beta=10", "beta=20")),
        ("AdaKVPress", {"press": "AdaKVPress"}, ValueError, ("'AdaKVPress'", "SnapKVPress")),
        (
            "DecodingPress",
            {"base_press": "PyramidKVPress"},
            ValueError,
            ("base_press", "'PyramidKVPress'", "TOVAPress"),
        ),
        ("DecodingPress", {"size": 3}, TypeError, ("'size'",)),
    ],
)
def test_what_has_no_counterpart_is_named(press, arguments, error, words):
    with pytest.raises(error) as raised:
        compat.from_kvpress(press, **arguments)
    assert all(word in str(raised.value) for word in words)


def test_a_decoding_press_around_a_window_of_queries_cuts_when_its_target_and_its_interval_are_full():
    given = {"base_press": "SnapKVPress", "target_size": 100, "compression_interval": 20, "window_size": 16}
    with pytest.raises(TypeError, match="window_size"):
        compat.from_kvpress("DecodingPress", **given)
    del given["window_size"]
    found = compat.from_kvpress("DecodingPress", **given)
    policy = found["policy"]
    assert policy.bounded and policy.prefill.score == "snapkv" and policy.prefill.window == 64
    assert found["budget"].tokens(10**6) == 120 and policy.leaving(120) == 20
    with pytest.raises(ValueError, match="compression_interval=200 with target_size=100"):
        compat.from_kvpress("DecodingPress", **given | {"compression_interval": 200})
