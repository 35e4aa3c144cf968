"""What a patched model does, in words and numbers."""

from dataclasses import asdict, dataclass

import torch

from kvpatch.prefill import prefill_kernel
from kvpatch.schedule import Schedule
from kvpatch.slots import round_up


@dataclass(frozen=True)
class Explanation:
    """Paths of a patched model; printed by str(), plain by `to_dict()`.

    host_loop: what a generate call may ask for that transformers' own loop has to run, and what runs inside it.
    bytes_per_token: keys and values of one held token over all layers.
    bytes_per_row: what a row's keys and values come to, the free slot and rounding included; for a share of the prompt,
        of 1,000 prompt tokens.   growth: what comes on top, in words.
    """

    model: str
    architecture: str
    policy: str
    budget: str
    backend: str
    backend_reason: str
    loop: str
    loop_reason: str
    prefill: str
    host_loop: dict[str, str]
    layers: list[str]
    bytes_per_token: int
    bytes_per_row: int | None
    bytes_per_row_of: str
    growth: str = ""

    @classmethod
    def of(cls, handle) -> "Explanation":
        """The explanation of a handle's model."""
        model, policy, parts = handle.model, handle.policy, handle.parts
        scoring = {index for ranking in policy.rankings for index in ranking.scoring_layers(len(parts.layers))}
        scores = policy.trims and handle.budget.evicts
        kinds = [
            f"layer {index}: {handle.backend}, "
            + ("scores on scoring steps" if scores and index in scoring else "never scores")
            for index in range(len(parts.layers))
        ]
        first = parts.attentions[0]
        heads = model.config.num_key_value_heads
        per_token = 2 * len(parts.layers) * heads * first.head_dim * torch.empty((), dtype=model.dtype).element_size()
        tokens = handle.budget.tokens(1000)
        fixed = isinstance(handle.budget.value, int)
        return cls(
            model=type(model).__name__,
            architecture=handle.architecture.name,
            policy=policy.name if handle.policy_origin is None else f"{policy.name} ({handle.policy_origin})",
            budget=str(handle.budget),
            backend=handle.backend,
            backend_reason=handle.backend_reason,
            **_loop(handle),
            prefill=f"the model's own forward ({prefill_kernel(model)}), {_cut(policy)}",
            host_loop=_by_token(handle)
            | {
                "num_beams": "the same steps inside transformers' beam search",
                "output_hidden_states": "the model's own layers over the slots, uncompiled",
                "inputs_embeds": "the model's own layers over the slots, uncompiled",
            },
            layers=kinds,
            bytes_per_token=per_token,
            bytes_per_row=None if tokens is None else round_up(tokens + 1) * per_token,
            bytes_per_row_of="any prompt" if fixed else "a prompt of 1,000 tokens",
            growth=""
            if policy.bounded or not policy.evicts
            else ", and all that is generated: the budget does not bound it",
        )

    def to_dict(self) -> dict:
        """Plain values."""
        return asdict(self)

    def __str__(self) -> str:
        alike = len({line.split(": ", 1)[1] for line in self.layers}) == 1
        layers = [f"all {len(self.layers)} layers: {self.layers[0].split(': ', 1)[1]}"] if alike else self.layers
        promised = (
            "grows with every token: nothing is evicted"
            if self.bytes_per_row is None
            else f"{self.bytes_per_row / 2**20:.1f} MiB a row for {self.bytes_per_row_of}{self.growth}"
        )
        return "\n".join(
            (
                f"{self.model} ({self.architecture}), policy {self.policy}, budget {self.budget}",
                f"prefill    {self.prefill}",
                f"attention  {self.backend}: {self.backend_reason}",
                *(f"           {line}" for line in layers),
                f"loop       {self.loop}: {self.loop_reason}",
                *(f"           with {name}: {what}" for name, what in self.host_loop.items()),
                f"cache      {promised} ({self.bytes_per_token:,} bytes a token)",
            )
        )


def _cut(policy) -> str:
    """What becomes of the prompt, in words."""
    if policy.prefill is None:
        return "then one full-length first step"
    if policy.prefill.needs.repeat:
        return f"then the model repeats it, for {policy.prefill.name!r} to cut it before anything is decoded"
    again = "" if policy.interval is None else ", and again whenever the budget is full"
    return f"then it is cut by {policy.prefill.name!r}, before anything is decoded{again}"


def _loop(handle) -> dict[str, str]:
    """How steps are started, and why so."""
    made = "compiled steps" if handle.compile else "eager steps"
    layer = "one decoder layer compiled and reused" if handle.compile else handle.uncompiled_because
    why = handle.uncaptured_because
    if why is not None:
        return {"loop": f"{made}, host loop", "loop_reason": f"{layer}; no CUDA graphs: {why}"}
    group = Schedule.of(handle.policy, handle.budget.evicts).group.kinds
    return {
        "loop": f"{made}, CUDA graphs of {len(group)} steps, {sum(group)} of them scoring",
        "loop_reason": f"{layer}; the host looks at the tokens of a graph while the next one runs",
    }


def _by_token(handle) -> dict[str, str]:
    """What of a call makes the host look at every token, where it need not otherwise."""
    if handle.uncaptured_because is not None:
        return {}
    return {
        "a processor or criterion in Python, or output_scores": "CUDA graphs of single steps, the host after each",
    }
