"""Slots in pages: what each page holds, what attention over them says, and that heads have what they need, no more."""

import pytest
import torch
from factories import left_padded, llama, prompts, run
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import OUTPUT, QUIET, UNTIMED, assert_close, divided, make, shapes
from test_triton import wanted

import kvpatch
from kvpatch import pages
from kvpatch.attention import packed, reference, triton
from kvpatch.pages import Map, Pages

pytestmark = QUIET
counts_of_heads = st.lists(st.integers(1, 200), min_size=1, max_size=5)


@given(counts_of_heads, st.integers(1, 90), st.integers(0, 70))
def test_each_head_has_a_place_for_every_slot_and_a_step_reads_the_pages_that_it_needs(counts, room, more):
    """Also where the pages were made for more, and for heads in another order."""
    own = Pages([count + more for count in reversed(counts)], room, torch.device("cpu"))
    own.assign(counts, room)
    table = own.map.table.tolist()
    needed = [-(-(count + room) // pages.SIZE) for count in counts]
    assert own.assigned == sum(needed) and (more or own.total == max(2, own.assigned))
    taken = {}
    for head, count in enumerate(counts):
        for slot in range(count + room):
            page = table[head][slot // pages.SIZE]
            assert own.map.head[page] == head and own.map.start[page] == slot // pages.SIZE * pages.SIZE
            assert taken.setdefault((page, slot % pages.SIZE), (head, slot)) == (head, slot)
            step = max(1, slot - count + 1)  # the first that meets it
            assert page < own.read(step)
    assert own.read(1) == max(2, sum(-(-(count + 1) // pages.SIZE) for count in counts))
    assert own.read(room) == max(2, own.assigned)
    assert (own.map.start[own.assigned :] > 10**9).all()  # nobody's: no head comes so far
    assert own.fits(counts, room) and not own.fits([count + pages.SIZE * own.total for count in counts], room)


def test_too_few_pages_are_refused():
    with pytest.raises(ValueError, match=r"room must leave at most 4 pages for heads of \[40, 70\], got 3"):
        Pages([40, 40], 3, torch.device("cpu")).assign([40, 70], 3)


@given(st.integers(1, 2), counts_of_heads, st.integers(1, 40), st.integers(0, 9))
def test_pages_hold_what_the_order_says_and_keep_it_where_they_grow(batch, counts, room, seed):
    generator = torch.Generator().manual_seed(seed)
    source = torch.randn(batch, len(counts), max(counts) + 9, 3, generator=generator)
    order = torch.rand(batch, len(counts), source.shape[2], generator=generator).argsort(-1)[..., : max(counts)]

    def expect(held, own):
        for row in range(batch):
            for head, count in enumerate(counts):
                for slot in range(count):
                    page = own.map.table[head, slot // pages.SIZE]
                    found = held[row, page, slot % pages.SIZE]
                    assert torch.equal(found, source[row, head, order[row, head, slot]])

    own = Pages(counts, room, source.device)
    held = pages.gather(source, order, own.map)
    expect(held, own)
    more = Pages(counts, room + 50, source.device)
    grown = torch.zeros(batch, more.total, pages.SIZE, 3)
    pages.scatter(held, own, grown, more)
    expect(grown, more)


def in_pages(step, size, generator):
    """The step's keys and values in pages that lie anyhow, and their map; nothing but the step's garbage elsewhere."""
    batch, groups, capacity, width = step.keys.shape
    needed = [-(-int(one) // size) for one in step.length.expand(batch, groups).amax(0)]
    total = sum(needed) + 1
    places = iter(torch.randperm(total, generator=generator).tolist())
    head, start = torch.zeros(total, dtype=torch.int64), torch.full((total,), 10**9)
    table = torch.zeros(groups, total, dtype=torch.int64)
    sides = (step.keys.cpu(), step.values.cpu())
    padded = [torch.cat((side, side[:, :, -1:].expand(-1, -1, size, -1)), 2) for side in sides]
    held = [side[:, :1, :1].expand(batch, total, size, width).clone() for side in padded]
    for group, count in enumerate(needed):
        for number in range(count):
            page = next(places)
            head[page], start[page], table[group, number] = group, number * size, page
            for side, whole in zip(held, padded, strict=True):
                side[:, page] = whole[:, group, number * size : (number + 1) * size]
    device = step.q.device
    return *(side.to(device) for side in held), Map(head.to(device), start.to(device), table.to(device))


@settings(max_examples=12, **UNTIMED)
@given(shapes, st.sampled_from([4, 16]), st.booleans(), st.integers(0, 99))
@pytest.mark.usefixtures("poisoned")
def test_kernels_read_and_write_pages_as_they_do_slots(case, size, split, seed):
    step = make(case | {"window": 0})
    keys, values, layout = in_pages(step, size, torch.Generator().manual_seed(seed))
    with divided(case, split, step.n):
        places = (layout.table, step.free, step.length, step.active)
        out = triton.attend_pages(step.q, step.k, step.v, keys, values, *places, step.scale)
    assert_close(out, wanted(step)[0], *OUTPUT[step.q.dtype])
    batch, groups = step.k.shape[:2]
    free = step.free.expand(batch, groups)
    for row in range(batch):
        for group in range(groups):
            page, place = layout.table[group, free[row, group] // size], free[row, group] % size
            for side, new in ((keys, step.k), (values, step.v)):
                assert torch.equal(side[row, page, place], new[row, group, 0]) == bool(step.active[row])


@settings(max_examples=20, **UNTIMED)
@given(shapes, st.sampled_from([4, 16]), st.integers(0, 99))
def test_attention_over_pages_is_that_over_slots(case, size, seed):
    step = make(case | {"window": 0, "dtype": torch.float32, "inactive": False})
    step.keys, step.values = step.keys.clamp(-9, 9).double(), step.values.clamp(-9, 9).double()  # garbage is finite
    step.q, step.k, step.v = step.q.double(), step.k.double(), step.v.double()
    keys, values, layout = in_pages(step, size, torch.Generator().manual_seed(seed))
    batch, groups = step.k.shape[:2]
    for row, free in enumerate(step.free.expand(batch, groups).tolist()):
        for group, slot in enumerate(free):
            page = layout.table[group, slot // size]
            keys[row, page, slot % size], values[row, page, slot % size] = step.k[row, group, 0], step.v[row, group, 0]
    expected = wanted(step)[0]
    index = torch.arange(len(layout.head), device=step.q.device)
    for decode in (packed.decode_pages, reference.decode_pages):
        out = decode(step.q, keys, values, layout, step.length, index, step.scale)
        assert_close(out, expected, 1e-10, 1e-10)


def uneven(**more) -> kvpatch.Policy:
    """Layers and heads of very unlike budgets."""
    table = ((12, 1), (3, 3), (1, 4))
    rule = kvpatch.Prefill("by table", window=4, recent=4, allocation="table", table=table)
    return kvpatch.Policy("mine", prefill=rule, grows=True, coupling="per_head", **more)


def bytes_of_pages(model, counts, room, batch=1) -> int:
    """Keys and values of those pages, in the model's float64."""
    number = sum(-(-(count + room) // pages.SIZE) for layer in counts for count in layer)
    return 2 * batch * number * pages.SIZE * model.config.head_dim * 8


def test_a_head_takes_the_bytes_of_what_it_holds():
    """Also where rows differ, where it grows, and when the next prompt shares its budget out otherwise."""
    model, new = llama(), 90
    batch, more = left_padded(prompts((400, 310))), {"do_sample": False, "eos_token_id": None, "max_new_tokens": new}
    with kvpatch.patched(model, uneven(), budget=100, compile=False) as handle:
        told = kvpatch.SlotCache(model.config, uneven(), budget=100, max_new_tokens=new)
        expected = model.generate(**batch, **more, **{handle.keyword: told})
        held = (told.retained() >= 0).sum(-1)  # [layers, rows, heads]
        counts = (held.amax(1) - new + 1).tolist()
        assert len({count for layer in counts for count in layer}) > 3 and max(map(max, counts)) > 250
        current = told.current
        assert sum(one.nbytes for one in (*current.keys, *current.values)) == bytes_of_pages(model, counts, new, 2)
        assert told.used_bytes == 2 * int(held.sum()) * model.config.head_dim * 8
        cells = [count for layer in counts for count in layer]
        assert told.held_after(new - 1) == sum(cells) / len(cells) + new - 1
        assert told.used_bytes < told.nbytes < 2 * 2 * 6 * current.capacity * model.config.head_dim * 8
        own = kvpatch.SlotCache(model.config, uneven(), budget=100)  # which has to grow
        with torch.no_grad():
            logits = model(batch["input_ids"][:1], **{handle.keyword: own}).logits[:, -1]
            said = []
            for _ in range(new):
                said.append(logits.argmax(-1))
                logits = model(said[-1][:, None], **{handle.keyword: own}).logits[:, -1]
        assert torch.equal(torch.cat(said), expected[0, -new:])
        assert len(own.current.keys[0]) == 1 and own.current.room > new
        for lengths in ((50, 31), (200, 120), (400, 310)):  # over the buffers of the call before
            again = left_padded(prompts(lengths))
            fresh = kvpatch.SlotCache(model.config, uneven(), budget=100)
            alone = model.generate(**again, **more, **{handle.keyword: fresh})
            assert torch.equal(model.generate(**again, **more), alone)


@pytest.mark.parametrize("size", [5, 64])
@pytest.mark.parametrize("backend", ["packed", "reference", "triton"])
def test_text_does_not_depend_on_where_the_slots_lie(backend, size, monkeypatch):
    model = llama(dtype=torch.float32, query_groups=3)
    batch, more = left_padded(prompts((60, 41))), {"max_new_tokens": 12}
    beams = {"num_beams": 3} if backend == "packed" else {}

    def said(backend):
        with kvpatch.patched(model, uneven(), budget=16, compile=False, backend=backend):
            return run(model, batch, **more, **beams)

    expected = said("packed")
    monkeypatch.setattr(pages, "SIZE", size)
    assert torch.equal(said(backend), expected)


def test_buffers_of_a_longer_prompt_serve_a_shorter_one_that_grows():
    """Beams do not say how far they will go, so room is made as they come."""
    model, more = llama(), {"num_beams": 2, "max_new_tokens": 40}
    batches = [{"input_ids": torch.tensor(prompts((length,)))} for length in (300, 50)]
    with kvpatch.patched(model, uneven(), budget=12, compile=False) as handle:
        alone = []
        for batch in batches:
            handle.free()
            alone.append(run(model, batch, **more))
        handle.free()
        for batch, tokens in zip(batches, alone, strict=True):
            assert torch.equal(run(model, batch, **more), tokens)


def test_a_row_that_ends_with_nothing_in_a_head_disturbs_no_other():
    model, batch = llama(layers=2), left_padded(prompts((40, 31)))
    rule = kvpatch.Prefill("bare", recent=0, allocation="table", table=((4, 0), (1, 1)))
    policy = kvpatch.Policy("mine", prefill=rule, grows=True, coupling="per_head")
    for backend in ("packed", "reference"):
        with kvpatch.patched(model, policy, budget=8, compile=False, backend=backend):
            first = int(run(model, batch, max_new_tokens=1)[0, -1])
            seen = model.generate(
                **batch,
                max_new_tokens=6,
                do_sample=False,
                eos_token_id=first,
                pad_token_id=0,
                output_logits=True,
                return_dict_in_generate=True,
            )
        assert torch.stack(seen.logits).isfinite().all()


def test_a_model_of_one_kv_head_reads_on_into_the_next_page():
    """A single page is a size of one, which compiled code takes for a constant."""
    model, batch = llama(kv_heads=1, dtype=torch.float32), {"input_ids": torch.tensor(prompts((60,)))}
    tokens = []
    for compile in (False, True):
        with kvpatch.patched(model, "pyramidkv", budget=34, compile=compile):
            tokens.append(run(model, batch, max_new_tokens=40))
    assert torch.equal(*tokens)


def test_prompts_of_any_length_share_their_graphs_and_steps_are_repeated(played):
    model = llama(dtype=torch.float32)
    budget, more = kvpatch.Budget(0.25, min_budget=16), {"max_new_tokens": 40}
    batches = [{"input_ids": torch.tensor(prompts((length,)))} for length in (60, 600, 500)]
    with kvpatch.patched(model, uneven(), budget=budget, compile=False):
        expected = [run(model, batch, **more) for batch in batches]
    with kvpatch.patched(model, uneven(), budget=budget) as handle:
        read = set()
        for batch, tokens in zip(batches, expected, strict=True):
            played.clear()
            assert torch.equal(run(model, batch, **more), tokens)
            assert len(played) == 38  # all steps but the recorded one
            read.add(tuple(one.total for one in handle._cache.current.pages))
        assert len(read) > 1 and handle.stats.recompiles == 0
