"""Every back end does to a layer's slots what the packed one does, whatever the scorer, the coupling and the pool."""

import pytest
import torch
from test_flash import installed

from kvpatch import attention, backends, scoring, slots
from kvpatch.attention import flash
from kvpatch.policy import Policy
from kvpatch.ranking import Blend

ROWS, GROUPS, QUERIES, WIDTH, CAPACITY, READ = 3, 2, 3, 32, 128, 100
SITE = attention.Site(torch.device("cpu"), torch.bfloat16, QUERIES, WIDTH)


def sharpest(scene):
    """A scorer of one's own that reads the weights: each slot's largest one."""
    return scene.weights.amax(2)


scoring.register_scorer("sharpest", sharpest, uses_attention=True, replace=True)


def layer(policy: Policy, dtype: torch.dtype) -> tuple[slots.LayerSlots, tuple]:
    """One layer's slots in the middle of a generation, a row of them done, and what a step brings."""
    generator = torch.Generator().manual_seed(4)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    own = GROUPS if policy.coupling == "per_head" else 1
    length = torch.tensor([READ, 61, 40])[:, None].expand(ROWS, own).clone()
    of_layer = slots.LayerSlots(
        keys=normal(ROWS, GROUPS, CAPACITY, WIDTH),
        values=normal(ROWS, GROUPS, CAPACITY, WIDTH),
        utility=torch.rand(len(policy.rankings), ROWS, own, CAPACITY, generator=generator),
        positions=torch.stack([torch.randperm(CAPACITY, generator=generator) for _ in range(ROWS * own)]).view(
            ROWS, own, CAPACITY
        ),
        free=torch.tensor([7, 60, 3])[:, None].expand(ROWS, own).clone(),
        length=length,
        newest=torch.full((ROWS,), CAPACITY),
        active=torch.tensor([True, True, False]),
        index=torch.arange(READ),
        heads=torch.tensor([one.head_weights(1, GROUPS * QUERIES) or [1.0] * 6 for one in policy.rankings]).view(
            -1, GROUPS, QUERIES
        ),
        attend=None,
    )
    step = (normal(ROWS, GROUPS * QUERIES, 1, WIDTH), normal(ROWS, GROUPS, 1, WIDTH), normal(ROWS, GROUPS, 1, WIDTH))
    return of_layer, step


def after(name: str, policy: Policy, dtype: torch.dtype, scores: bool = True) -> dict[str, torch.Tensor]:
    of_layer, step = layer(policy, dtype)
    scorers = tuple(scoring.scorer(ranking.scorer) for ranking in policy.rankings)
    scored = tuple(range(len(scorers))) if scores else ()
    output = backends.backend(name, SITE).attend(policy, scorers, scored, None)(of_layer, *step, WIDTH**-0.5)
    return {"output": output, "keys": of_layer.keys, "values": of_layer.values, "utility": of_layer.utility}


POLICIES = {
    "the paper's": Policy(),
    "max": Policy(head_pool="max", aggregation="cumulative"),
    "rms, a ranking a head": Policy(head_pool="rms", coupling="per_head", aggregation="single"),
    "one update a step": Policy(coupling="uniform"),
    "vnorm": Policy(scorer="vnorm"),
    "entropy": Policy(scorer="entropy", coupling="per_layer"),
    "keydiff": Policy(scorer="keydiff"),
    "recency": Policy(scorer="recency", aggregation="single"),
    "own": Policy(scorer="sharpest", head_pool="max"),
    "chosen heads": Policy(score_heads=((1, 0), (1, 4)), aggregation="peak"),
    "two rankings": Policy(blend=Blend(score_heads=((1, 2), (1, 3)), head_pool="max")),
    "two rankings, one of keys": Policy(scorer="vnorm", blend=Blend(scorer="keydiff", aggregation="single")),
}


@pytest.mark.parametrize("scores", [True, False], ids=["scoring", "plain"])
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize(
    ("name", "dtype"), [("triton", torch.float32), ("triton", torch.bfloat16), ("flash", torch.bfloat16)]
)
def test_a_layers_step_leaves_what_the_packed_one_leaves(name, policy, dtype, scores):
    expected = after("packed", policy, dtype, scores)
    backends.backend.cache_clear()
    flash._function.cache_clear()
    with installed(2):
        found = after(name, policy, dtype, scores)
    backends.backend.cache_clear()
    flash._function.cache_clear()
    going = slice(0, 2)  # the row that is done: zeros or anything, and no trace
    # bfloat16 weights meet the values rounded, and in another order.
    loose = {"rtol": 2e-5, "atol": 2e-6} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 1e-2}
    torch.testing.assert_close(found["output"][going], expected["output"][going], **loose)
    for side in ("keys", "values"):
        assert torch.equal(found[side][going], expected[side][going])
    # Packed logits are rounded to bfloat16 before the softmax; the kernels' are not.
    close = {"rtol": 1e-4, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 3e-2, "atol": 1e-3}
    torch.testing.assert_close(found["utility"], expected["utility"], **close)
    before = layer(policy, dtype)[0].utility
    assert torch.equal(found["utility"][:, 2], before[:, 2]), "a row that is done keeps its utility"
    assert scores == (not torch.equal(found["utility"], before))


def test_a_function_under_a_kernels_name_is_not_taken_for_the_kernel():
    original = scoring.scorer("attention")
    scoring.register_scorer("attention", sharpest, uses_attention=True, replace=True)
    try:
        packed, fused = (after(name, Policy(), torch.float32)["utility"] for name in ("packed", "triton"))
    finally:
        scoring.register_scorer(*original[:2], uses_attention=True, replace=True)
    torch.testing.assert_close(fused, packed, rtol=1e-4, atol=1e-6)
    assert not torch.allclose(fused, after("packed", Policy(), torch.float32)["utility"])
