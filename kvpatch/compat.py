"""Policies under the names and arguments of other libraries, so that their users can switch.

kvpatch.patch(model, **kvpatch.compat.from_kvpress("SnapKVPress", compression_ratio=0.5))
"""

import dataclasses
from collections.abc import Callable

from kvpatch.budget import Budget
from kvpatch.compression.rule import PRESETS, Prefill
from kvpatch.policy import Policy, resolve

__all__ = ["from_kvpress", "list_presses"]


def from_kvpress(press, /, **arguments) -> dict:
    """What `patch` is to be given for one of kvpress's presses.

    Where kvpress differs from a method's paper, this is the paper's: `profiles/peers/kvpress_overlap.py` measures by
    how much. A `DecodingPress` compresses every so many steps. Around a press that ranks by the newest query or none,
    one entry goes at every step here, so that its target is never exceeded; around one that looks at a window of
    queries the cut comes when its target and its interval are full, and at the prompt's end.

    Args:
        press: a press's name, such as "SnapKVPress", or a press itself (kvpress need not be installed for names).
        **arguments: the press's own, such as compression_ratio=0.5; a nested press may be a press, or a name whose own
            arguments stand beside it.

    Returns:
        "policy" and "budget".

    Raises:
        ValueError: for an unknown press, naming those that are known, or a setting that has no counterpart.
        TypeError: for an unknown argument.
    """
    name, given = _opened(press)
    given |= arguments
    if name == "DecodingPress":
        return _decoding(given)
    rule, ratio = _rule(name, given)
    if not 0.0 <= ratio < 1.0:
        raise ValueError(f"compression_ratio must be in [0, 1), got {ratio!r}")
    policy = Policy(rule.name, prefill=rule, grows=True, coupling="per_head")
    return {"policy": policy, "budget": Budget(1.0 - ratio, min_budget=1) if ratio else Budget(None)}


def list_presses() -> list[str]:
    """Names that `from_kvpress` knows."""
    return sorted([*_PLAIN, *_AROUND, "DecodingPress"])


def _opened(press) -> tuple[str, dict]:
    """A press's name, and its arguments if it is one already."""
    if isinstance(press, str):
        return press, {}
    if dataclasses.is_dataclass(press):
        return type(press).__name__, {field.name: getattr(press, field.name) for field in dataclasses.fields(press)}
    return type(press).__name__, {name: value for name, value in vars(press).items() if not name.startswith("_")}


def _only(given: dict, name: str, value, why: str) -> None:
    """One setting alone has a counterpart."""
    found = given.pop(name, value)
    if found != value:
        raise ValueError(f"{name}={found!r} has no counterpart ({why}): use {name}={value!r}")


def _snapkv(given: dict) -> Prefill:
    window = given.pop("window_size", 64)
    return PRESETS["snapkv"].replace(window=window, recent=window, width=given.pop("kernel_size", 5))


def _pyramidkv(given: dict) -> Prefill:
    _only(given, "beta", 20, "the pyramid's slope is the paper's")
    return _snapkv(given).replace(name="pyramidkv", allocation="pyramid")


def _expected_attention(given: dict) -> Prefill:
    _only(given, "n_future_positions", 512, "the paper's")
    _only(given, "n_sink", 4, "the paper's")
    _only(given, "use_covariance", True, "the paper's")
    _only(given, "use_vnorm", True, "the paper's")
    _only(given, "epsilon", 0.0, "the paper's")
    return PRESETS["expected-attention"]


_PLAIN: dict[str, Callable[[dict], Prefill]] = {
    "SnapKVPress": _snapkv,
    "PyramidKVPress": _pyramidkv,
    "ExpectedAttentionPress": _expected_attention,
    "KVzipPress": lambda given: PRESETS["kvzip"].replace(sinks=given.pop("n_sink", 4)),
    "TOVAPress": lambda given: PRESETS["tova"],
    "KnormPress": lambda given: PRESETS["knorm"],
    "KeyDiffPress": lambda given: PRESETS["keydiff"],
    "RandomPress": lambda given: PRESETS["random"].replace(seed=given.pop("seed", None) or 0),
    "StreamingLLMPress": lambda given: PRESETS["streaming-llm"].replace(sinks=given.pop("n_sink", 4)),
    "ObservedAttentionPress": lambda given: PRESETS["h2o"].replace(recent=0),
}


def _adaptive(rule: Prefill, given: dict) -> Prefill:
    return rule.replace(name="adakv", allocation="adaptive", floor=given.pop("alpha_safeguard", 0.2))


def _critical(rule: Prefill, given: dict) -> Prefill:
    _only(given, "epsilon", 1e-4, "the paper's")
    return rule.replace(name="criticalkv", critical=given.pop("first_stage_ratio", 0.5))


# Presses around another one: what they make of its rule, and which arguments are theirs.
_AROUND: dict[str, tuple[Callable[[Prefill, dict], Prefill], tuple[str, ...]]] = {
    "AdaKVPress": (_adaptive, ("alpha_safeguard",)),
    "CriticalKVPress": (_critical, ("epsilon", "first_stage_ratio")),
    "CriticalAdaKVPress": (
        lambda rule, given: _adaptive(_critical(rule, given), given),
        ("alpha_safeguard", "epsilon", "first_stage_ratio"),
    ),
}


def _rule(name: str, given: dict) -> tuple[Prefill, float]:
    """The rule and the share that goes; what is left of the arguments is unknown."""
    if name in _AROUND:
        inner_name, inner_given = _opened(given.pop("press", "SnapKVPress"))
        if inner_name not in _PLAIN:
            raise ValueError(f"press must be one of {', '.join(sorted(_PLAIN))}, got {inner_name!r}")
        change, names = _AROUND[name]
        own = {key: given.pop(key) for key in names if key in given}
        rule, ratio = _rule(inner_name, inner_given | given)
        rule = change(rule, own)
        given = own
    elif name in _PLAIN:
        ratio = given.pop("compression_ratio", 0.0)
        rule = _PLAIN[name](given)
    else:
        raise ValueError(f"press must be one of {', '.join(list_presses())}, got {name!r}")
    if given:
        raise TypeError(f"{name} has no argument {', '.join(map(repr, given))}")
    return rule, ratio


# What a press does at every step: the policy, and which of its arguments is which of the policy's fields.
_STEPS = {
    "TOVAPress": ("tova", {}),
    "KnormPress": ("knorm", {}),
    "KeyDiffPress": ("keydiff", {}),
    "RandomPress": ("random", {"seed": "seed"}),
    "StreamingLLMPress": ("streaming-llm", {"n_sink": "sinks"}),
}
_AGAIN = ("SnapKVPress", "CriticalKVPress")  # by the last queries, whenever the budget is full


def _decoding(given: dict) -> dict:
    base, own = _opened(given.pop("base_press", "TOVAPress"))
    if base not in (*_STEPS, *_AGAIN):
        raise ValueError(f"base_press must be one of {', '.join(sorted((*_STEPS, *_AGAIN)))}, got {base!r}")
    target, interval = given.pop("target_size", 2048), given.pop("compression_interval", 512)
    given.pop("hidden_states_buffer_size", None)
    if given:
        raise TypeError(f"DecodingPress has no argument {', '.join(map(repr, given))}")
    if base in _AGAIN:
        if interval > target:
            raise ValueError(
                f"compression_interval={interval!r} with target_size={target!r}: at most as many tokens may leave at "
                "once as stay; use compression_interval <= target_size"
            )
        rule, _ = _rule(base, own)
        policy = Policy(rule.name, prefill=rule, grows=True, interval=interval, coupling="per_head")
        return {"policy": policy, "budget": Budget(target + interval)}
    policy, fields = _STEPS[base]
    own.pop("compression_ratio", None)
    unknown = [name for name in own if name not in fields]
    if unknown:
        raise TypeError(f"{base} has no argument {', '.join(map(repr, unknown))}")
    changed = {fields[name]: value for name, value in own.items() if value is not None}
    return {"policy": resolve(policy, **changed), "budget": Budget(target)}
