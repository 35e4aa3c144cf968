"""The check of a GPU: what it says at toy size on a CPU, and how its parts, its time limit and its files behave."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import typer
from rich.console import Console
from typer.testing import CliRunner

from kvpatch.bench.record import PROVENANCE, Clock, read_columns, read_rows
from kvpatch.profiling import gpu_check, models, roofline, runner_checks, timing
from kvpatch.profiling.model_runs import out_of_memory
from kvpatch.profiling.models import Place
from kvpatch.profiling.parts import (
    CHECK_COLUMNS,
    FIGURE_COLUMNS,
    NO_TIME,
    CheckFailed,
    Deadline,
    Figure,
    Part,
    Record,
    Runner,
    Skipped,
    require,
)

WHERE = dict(zip(PROVENANCE, ("a device", "2", "5", "0", "abc", 1), strict=True))


def called(out, *more: str) -> subprocess.CompletedProcess:
    command = [
        sys.executable,
        "-m",
        "kvpatch.profiling.gpu_check",
        "--device",
        "cpu",
        "--small",
        "--out",
        str(out),
        *more,
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)  # the command sees to it itself
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """The folder of a whole run, and what it printed."""
    out = tmp_path_factory.mktemp("gpu") / "new"
    done = called(out)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return out, done.stdout


def test_at_toy_size_every_check_holds_or_needs_cuda(toy):
    out, _ = toy
    rows = read_rows(out / "checks.csv")
    assert read_columns(out / "checks.csv") == list(CHECK_COLUMNS)
    assert [row["name"] for row in rows if row["status"] == "failed"] == []
    skipped = {row["name"]: row["detail"] for row in rows if row["status"] == "skipped"}
    assert {"no copy of the cache", "waits of the host"} <= set(skipped)
    for name, detail in skipped.items():
        assert "CUDA" in detail, (name, detail)
    fine = [row["name"] for row in rows if row["status"] == "ok"]
    for what in (
        "back ends",
        "whole steps",
        "operator",
        "tokens",
        "logits",
        "a runner",
        "two models",
        "nothing is made",
    ):
        assert any(name.startswith(what) for name in fine), what
    assert all(row["device"] and row["torch"] == torch.__version__ for row in rows)


def test_at_toy_size_there_are_figures_without_targets_and_a_picture(toy):
    out, printed = toy
    rows = read_rows(out / "figures.csv")
    assert read_columns(out / "figures.csv") == list(FIGURE_COLUMNS)
    names = {row["name"] for row in rows}
    assert "toy copy bandwidth" in names and any(name.startswith("toy Llama-3.1-8B, batch 1") for name in names)
    assert all(float(row["value"]) > 0 and not row["target"] for row in rows)
    assert (out / "roofline.png").read_bytes().startswith(b"\x89PNG")
    assert "Summary" in "\n".join(printed.splitlines()[-8:])


def test_a_second_run_adds_rows(toy):
    out, _ = toy
    before = [len(read_rows(out / name)) for name in ("checks.csv", "figures.csv")]
    done = called(out, "--only", "copy bandwidth")
    assert done.returncode == 0, done.stderr[-2000:]
    assert [len(read_rows(out / name)) for name in ("checks.csv", "figures.csv")] == [count + 1 for count in before]


class FakeClock:
    """Goes on when a part says so."""

    def __init__(self):
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def runner_in(folder, clock, seconds=60.0, **more) -> Runner:
    return Runner(Record(folder, WHERE), Deadline(seconds, clock), **more)


def test_what_no_longer_fits_is_skipped_and_shorter_parts_still_run(tmp_path):
    clock = FakeClock()

    def taking(seconds):
        def run():
            clock.now += seconds
            return "done"

        return run

    parts = [Part("first", taking(40), 30), Part("long", taking(30), 30), Part("short", taking(1), 5)]
    told = []
    runner = runner_in(tmp_path, clock, say=lambda name, status, *_: told.append((name, status)))
    assert runner.run(parts) == []
    rows = {row["name"]: row for row in read_rows(tmp_path / "checks.csv")}
    assert told == [("first", "ok"), ("long", "skipped"), ("short", "ok")]
    assert rows["long"]["detail"] == NO_TIME and rows["short"]["status"] == "ok"
    assert runner.failures == 0


def test_a_part_that_fails_is_written_with_its_traceback_and_stops_no_other(tmp_path):
    def wrong():
        require(1 + 1 == 3, "one and one must be three")

    def skips():
        raise Skipped("there is no CUDA here")

    tidied = []
    runner = runner_in(tmp_path, FakeClock(), tidy=lambda: tidied.append(1))
    assert runner.run([Part("wrong", wrong, 1), Part("skips", skips, 1), Part("right", lambda: "seen", 1)]) == []
    rows = {row["name"]: row for row in read_rows(tmp_path / "checks.csv")}
    assert rows["wrong"]["status"] == "failed"
    assert rows["wrong"]["detail"].startswith("Traceback") and "one and one must be three" in rows["wrong"]["detail"]
    assert "in wrong" in rows["wrong"]["detail"]
    assert (rows["skips"]["status"], rows["skips"]["detail"]) == ("skipped", "there is no CUDA here")
    assert (rows["right"]["status"], rows["right"]["detail"]) == ("ok", "seen")
    assert runner.failures == 1 and len(tidied) == 3


def test_every_row_is_on_disk_before_the_next_thing_happens(tmp_path):
    figures, checks = tmp_path / "figures.csv", tmp_path / "checks.csv"

    def numbers():
        yield Figure("one", 1.5, "GB/s", "a detail", least=1.0, moved=7)
        assert [row["name"] for row in read_rows(figures)] == ["one"]
        yield Figure("two", 2.0, "", most=1.0)
        assert [row["name"] for row in read_rows(figures)] == ["one", "two"]
        raise CheckFailed("and then something breaks")

    def later():
        assert [row["name"] for row in read_rows(checks)] == ["figures"]
        return "seen"

    runner = runner_in(tmp_path, FakeClock())
    runner.run([Part("figures", numbers, 1), Part("later", later, 1)])
    rows = read_rows(figures)
    assert [(row["value"], row["target"], row["met"], row["bytes"]) for row in rows] == [
        ("1.5", ">= 1", "yes", "7"),
        ("2", "<= 1", "no", ""),
    ]
    assert [row["status"] for row in read_rows(checks)] == ["failed", "ok"]
    assert all(row["commit"] == "abc" for row in rows)


def test_a_device_that_no_longer_answers_leaves_the_rest_to_another_process(tmp_path):
    def breaks():
        raise RuntimeError("an illegal memory access was encountered")

    parts = [Part("fine", lambda: "seen", 1), Part("breaks", breaks, 1), Part("left", lambda: "seen", 1)]
    left = runner_in(tmp_path, FakeClock(), healthy=lambda: False).run(parts)
    assert left == parts[2:]
    assert [row["name"] for row in read_rows(tmp_path / "checks.csv")] == ["fine", "breaks"]
    assert gpu_check.chosen(parts, [], after="breaks") == left


def test_parts_are_chosen_by_what_their_names_hold():
    parts = [Part(name, lambda: "", 1) for name in ("tokens: llama", "figures: copy", "figures: llama")]
    names = [[part.name for part in gpu_check.chosen(parts, only)] for only in ([], ["checks"], ["llama", "copy"])]
    assert names[0] == names[2] == [part.name for part in parts] and names[1] == ["tokens: llama"]
    with pytest.raises(typer.BadParameter, match="figures: copy"):
        gpu_check.chosen(parts, ["mistral"])


def test_the_new_process_is_told_where_to_go_on_and_what_failed(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(os, "execv", lambda program, arguments: seen.append(arguments))
    parts = [Part(name, lambda: "", 1) for name in ("one", "two", "three")]
    gpu_check._start_anew(Console(quiet=True), tmp_path, "cuda", False, 90.0, ["t"], parts[2:], parts, 2)
    (arguments,) = seen
    told = dict(zip(arguments[3::2], arguments[4::2], strict=True))
    expected = {"--out": str(tmp_path), "--device": "cuda", "--minutes": "1.500", "--only": "t", "--after": "two"}
    assert told == expected | {"--failures": "2"}


def invoked(monkeypatch, out, *arguments: str):
    """The command in this process, which has imported everything."""
    app = typer.Typer()
    app.command()(gpu_check.check)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    return CliRunner().invoke(app, ["--out", str(out), *arguments])


def test_a_failed_part_gives_exit_code_1_and_a_missed_target_does_not(tmp_path, monkeypatch):
    def missed():
        yield Figure("slow", 1.0, "GB/s", least=2.0)

    def wrong():
        raise ValueError("something is wrong")

    fine = [Part("slow", missed, 1)]
    for parts, code in ((fine, 0), ([Part("wrong", wrong, 1), *fine], 1)):
        monkeypatch.setattr(gpu_check, "all_parts", lambda place, deadline, parts=parts: parts)
        done = invoked(monkeypatch, tmp_path, "--device", "cpu", "--small")
        assert done.exit_code == code, done.output
    assert "something is wrong" in done.output
    assert [row["status"] for row in read_rows(tmp_path / "checks.csv")] == ["ok", "failed", "ok"]


@pytest.mark.parametrize(
    "arguments, told",
    [
        (["--device", "cpu"], "--small"),
        (["--device", "tpu"], "cuda or cpu"),
        (["--device", "cpu", "--small", "--only", "no such part"], "no such part"),
    ],
)
def test_bad_usage_is_told_and_gives_exit_code_2(tmp_path, monkeypatch, arguments, told):
    done = invoked(monkeypatch, tmp_path, *arguments)
    assert done.exit_code == 2 and told in done.output


def test_a_folder_with_other_columns_is_refused_and_left_alone(tmp_path, monkeypatch):
    (tmp_path / "checks.csv").write_text("other,columns\n")
    done = invoked(monkeypatch, tmp_path, "--device", "cpu", "--small")
    assert done.exit_code == 2 and "other columns" in done.output
    assert (tmp_path / "checks.csv").read_text() == "other,columns\n"


@pytest.mark.parametrize("small", [True, False])
def test_parts_have_names_of_their_own_and_come_checks_first(small):
    place = Place(torch.device("cuda" if not small else "cpu"), small)
    parts = gpu_check.all_parts(place, Deadline(1.0))
    names = [part.name for part in parts]
    assert len(set(names)) == len(names)
    first_figure = next(index for index, name in enumerate(names) if name.startswith("figures"))
    assert any(name.startswith("tokens") for name in names[:first_figure])
    assert all(part.seconds > 0 for part in parts)
    assert names.index("figures: copy bandwidth") == first_figure


def test_steps_are_timed_by_whole_blocks_whenever_the_host_sees_them():
    steady = Clock()
    steady.times = [float(place) for place in range(models.whole_runs(30) + 1)]
    assert models.whole_runs(30) == 34
    assert models.step_seconds(steady, 1) == [1.0, 1.0]
    blocks = Clock()  # blocks of four tokens come together
    blocks.times = [0.0, 1.0, 2.0, *(2.0 + 4.0 * (1 + place // 4) for place in range(32))]
    assert models.step_seconds(blocks, 1) == [1.0, 1.0]


def test_overlapping_kernels_count_once_as_busy():
    assert timing.busy([(5.0, 7.0), (0.0, 2.0), (1.0, 3.0), (1.5, 2.0)]) == (5.0, 7.0)
    assert timing.busy([]) == (0.0, 0.0)


def test_only_calls_that_make_the_host_wait_are_counted():
    names = ["cudaStreamSynchronize", "aten::mm", "cudaLaunchKernel", "cudaEventSynchronize", "cudaEventRecord"]
    assert runner_checks.synchronisations(names) == 2


def test_an_error_that_came_of_too_little_memory_is_known():
    try:
        try:
            raise torch.OutOfMemoryError("no memory")
        finally:
            raise RuntimeError("the capture is invalid")
    except RuntimeError as error:
        assert out_of_memory(error)
    assert not out_of_memory(RuntimeError("something else"))


def test_the_last_row_of_a_name_is_drawn_and_the_copy_is_the_ceiling():
    def row(name, value, moved="", unit="GB/s"):
        return {"name": name, "value": value, "unit": unit, "bytes": moved}

    rows = [
        row("copy bandwidth", "4000"),
        row("plain decode kernel, batch 1", "10", "100"),
        row("plain decode kernel, batch 1", "20", "100"),
        row("Llama, batch 1, tova: rate", "30", "50"),
        row("Llama, batch 1, static: rate", "31", "60"),
        row("speed", "1", "", "tok/s"),
        row("missing", "", "7"),
    ]
    found, ceiling = roofline.points(rows)
    expected = {"Llama, tova": [(50.0, 30.0)], "Llama, static": [(60.0, 31.0)], "plain decode kernel": [(100.0, 20.0)]}
    assert found == expected and ceiling == 4000.0


def test_models_of_real_shapes_are_made_in_their_dtype_and_where_they_belong():
    place = SimpleNamespace(device=torch.device("meta"), small=False)
    for name, billions in (("Llama-3.1-8B", 8.03), ("Qwen2.5-7B", 7.62)):
        model = models.large(name, place)
        assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
        assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
        count = sum(parameter.numel() for parameter in model.parameters())
        assert count / 1e9 == pytest.approx(billions, abs=0.01)
