"""The benchmark's rows: figures add up, bytes are the tensors' own, what is slow shows where it is."""

import os
import subprocess
import sys
import time

import pytest
import torch
from factories import llama, tiny
from rich.console import Console

import kvpatch
from kvpatch import scoring
from kvpatch.bench import peers, report
from kvpatch.bench.disturbance import Others
from kvpatch.bench.record import append_rows, read_rows
from kvpatch.bench.runner import COLUMNS, Cell, run_cell
from kvpatch.bench.variants import Workload, cache_bytes, parameter_bytes


class Words:
    """A tokenizer of the size of tiny models' vocabulary."""

    def __call__(self, text, add_special_tokens=False):
        class Encoded:
            input_ids = [2 + sum(map(ord, word)) % 90 for word in text.split()]

        return Encoded


@pytest.fixture(scope="module")
def base():
    model = llama(dtype=torch.float32)
    model.generation_config.eos_token_id = None
    return model


def measured(base, named, batch=2, prompt=60, steps=20, rounds=2, compile=False) -> dict[str, dict]:
    cell = Cell(torch.get_num_threads(), "float32", batch, prompt)
    work = Workload(prompt, steps, 12, 1e9, 4, 8, compile)
    rows = run_cell(base, Words(), cell, named, work, rounds, stream_gib=0.01)
    return {row["variant"]: row for row in rows}


def test_figures_add_up_and_bytes_are_those_of_the_tensors(base):
    rows = measured(base, [("dynamic", None), ("full", None), ("inertia", kvpatch.Budget(20))])
    output = base.generate(
        torch.ones(2, 60, dtype=torch.int64), max_new_tokens=20, return_dict_in_generate=True, do_sample=False
    )
    cache = output["cache"] if "cache" in output else output["past_key_values"]
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert rows["dynamic"]["peak_cache_bytes"] == held
    per_token = held // (2 * 79)
    assert cache_bytes(base, 1) == per_token
    assert rows["inertia"]["held"] == 20
    for name, row in rows.items():
        assert list(row) == COLUMNS
        assert row["decode_tok_per_s"] == pytest.approx(2e3 / row["p50_ms"])
        assert row["whole_tok_per_s"] == pytest.approx(2 * row["new_tokens"] / row["whole_s"])
        assert row["prefill_tok_per_s"] == pytest.approx(2 * 60 / (row["first_token_ms"] / 1e3))
        assert row["bytes_per_step"] == int(parameter_bytes(base) + 2 * row["held"] * per_token), name
        assert row["gb_per_s"] == pytest.approx(row["bytes_per_step"] / row["p50_ms"] / 1e6)
        assert row["share_of_stream"] == pytest.approx(row["gb_per_s"] / row["stream_gb_per_s"])
        assert row["steps"] == 2 * (20 - 1 - 4)
        assert row["p20_ms"] <= row["p50_ms"] <= row["p80_ms"]
    weights = sum(tensor.nbytes for tensor in {id(p): p for p in base.parameters()}.values())
    assert parameter_bytes(base) == weights - base.get_input_embeddings().weight.nbytes


def test_windows_are_counted_in_bytes():
    model = tiny("mistral", sliding_window=16, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    rows = measured(model, [("dynamic", None), ("full", None)])
    more = {"max_new_tokens": 20, "return_dict_in_generate": True, "do_sample": False, "pad_token_id": 0}
    output = model.generate(torch.ones(2, 60, dtype=torch.int64), **more)
    cache = output["cache"] if "cache" in output else output["past_key_values"]
    assert rows["dynamic"]["peak_cache_bytes"] == sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert rows["full"]["held"] == 15


def test_a_peer_that_stops_is_named(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", "raise SystemExit(7)"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    process.wait()
    process.stdin, process.stdout = open(tmp_path / "in", "w"), open(os.devnull)
    with pytest.raises(peers.PeerError, match="peer kvpress tova stopped with exit code 7"):
        peers.Guest("kvpress tova", process).ask(do="generate", tokens=3)


def test_a_sleep_planted_in_scoring_shows_in_the_rows_that_score(base, monkeypatch):
    original = scoring.scorer("attention")

    def sleepy(scene):
        time.sleep(0.01)
        return original.score(scene)

    monkeypatch.setitem(scoring._SCORERS, "attention", original._replace(score=sleepy))
    budget = kvpatch.Budget(20)
    named = [("full", None), ("inertia", budget), ("inertia-lazy", budget), ("score-free", budget)]
    rows = measured(base, named, rounds=1)
    asleep = 3 * 10.0  # layers, milliseconds
    for name in ("full", "score-free"):
        assert rows[name]["p80_ms"] < asleep
    assert rows["inertia"]["p20_ms"] > asleep
    assert rows["inertia-lazy"]["p50_ms"] < asleep < rows["inertia-lazy"]["p80_ms"]
    assert rows["inertia-lazy"]["refused"] == "spread"  # and it says so


def test_compiling_is_counted_apart_and_pays_after_some_tokens(base):
    rows = measured(base, [("dynamic", None), ("full", None)], compile=True)
    full = rows["full"]
    assert full["compiles"] == 2 and full["timed_compiles"] == 0 and full["compile_seconds"] > 0
    even = full["break_even_tokens"]
    saved = (rows["dynamic"]["p50_ms"] - full["p50_ms"]) / 1e3
    assert even is None if saved <= 0 else even == pytest.approx(full["compile_seconds"] / saved)
    assert rows["dynamic"]["compiles"] == 0 and rows["dynamic"]["break_even_tokens"] is None
    assert not hasattr(base, "_kvpatch")


def test_rows_survive_the_csv_and_are_shown_and_drawn(base, tmp_path):
    pytest.importorskip("matplotlib", reason="plots need the extra `plot`")
    rows = []
    for batch in (1, 2):
        rows += measured(base, [("dynamic", None), ("inertia", kvpatch.Budget(20))], batch=batch, rounds=1).values()
    append_rows(tmp_path / "bench.csv", rows)
    back = read_rows(tmp_path / "bench.csv")
    assert [row["variant"] for row in back] == [row["variant"] for row in rows]
    console = Console(record=True, width=200)
    report.show(console, rows)
    assert "inertia 20 tokens" in console.export_text()
    drawn = report.plot(rows, tmp_path / "plots")
    assert {path.name for path in drawn} == {"batch.png", "roofline.png"}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)


def test_what_disturbs_is_named():
    busy = Others()
    busy.total, busy.foreign, busy.stolen = 10.0, 4.0, 1.0
    told = busy.told([30.0, 20.0])
    assert "40%" in told and "10%" in told and "20.0 to 30.0 GB/s" in told
    assert "nothing seen" in Others().told([30.0, 29.0])


def test_other_columns_do_not_get_into_a_record(tmp_path):
    append_rows(tmp_path / "a.csv", [{"one": 1, "two": 2.5}])
    with pytest.raises(ValueError, match="three"):
        append_rows(tmp_path / "a.csv", [{"one": 1, "three": 3}])


def test_work_of_another_process_is_seen():
    command = [sys.executable, "-c", "while True: pass"]
    seen = Others()
    with subprocess.Popen(command) as process:
        with seen:
            time.sleep(1.0)
        process.kill()
    assert seen.foreign > 0.3  # of the second
    own = Others()
    with own:
        end = time.process_time() + 1.0
        while time.process_time() < end:
            pass
    assert own.total > 0.9 * 1.0
    assert own.foreign < own.total - 0.9  # what this process did is not another's
