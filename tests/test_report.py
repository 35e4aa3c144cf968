"""What follows from a run's lines, and how it is shown."""

import html.parser
import json

import pytest
from typer.testing import CliRunner

import kvpatch
from kvpatch.evaluation import comparing, plots, report, summary, tables
from kvpatch.evaluation.runs import Line, Run

DEPTHS = (0.0, 0.5, 1.0)


def line(sample: int, policy: str, score: float | None, budget: str = "10%", task="niah", **more) -> Line:
    budget, held = ("full", None) if policy == "full" else (budget, 10)
    given = {"task": task, "length": 128, "sample": f"s{sample}", "prompt_id": f"p{sample}", "prompt_tokens": 100}
    given |= {"references": ("7",), "prediction": f"said by {policy}", "facts": {"depth": DEPTHS[sample % 3]}}
    return Line(policy=policy, budget=budget, held=held, score=score, **given | more)


FULL = [line(n, "full", score) for n, score in enumerate((1, 1, 1, 0.5))]
SMALL = [line(n, "tova", score) for n, score in enumerate((1, 0, 1, 1))]


def cell(lines, policy: str, measure="score", task="niah") -> dict:
    found = summary.summary_of(lines, (), ())["cells"]
    (row,) = [row for row in found if (row["policy"], row["measure"], row["task"]) == (policy, measure, task)]
    return row


def test_a_cell_is_the_mean_and_what_it_differs_from_the_full_caches():
    full, small = cell(FULL + SMALL, "full"), cell(FULL + SMALL, "tova")
    assert (full["n"], full["mean"], full["difference"], full["pairs"]) == (4, 0.875, None, None)
    assert (small["mean"], small["full_mean"], small["difference"]) == (0.75, 0.875, -0.125)
    assert small["difference_low"] <= -0.125 <= small["difference_high"]
    assert (small["kept_of"], small["kept"]) == (3, pytest.approx(2 / 3))  # two of the three that the full cache solves
    assert small["share"] == 0.1 and full["share"] == 1.0 and small["question_aware"] is True


def test_only_the_same_prompts_are_paired():
    small = cell(FULL[:2] + SMALL, "tova")
    assert (small["n"], small["pairs"], small["unpaired"]) == (4, 2, 2)
    assert (small["mean"], small["full_mean"], small["difference"]) == (0.75, 1.0, -0.5)
    alone = cell(SMALL, "tova")
    assert (alone["pairs"], alone["difference"], alone["full_mean"]) == (0, None, None)


def test_of_one_keys_lines_the_last_counts():
    assert cell([*FULL, *SMALL, line(1, "tova", 1)], "tova")["mean"] == 1.0
    assert cell([*FULL, *SMALL, line(1, "tova", 1)], "tova")["n"] == 4


def test_cells_are_grey_where_the_full_cache_fails_too():
    low = [line(n, "full", score) for n, score in enumerate((0, 0.5, 0, 0))]
    assert cell(low + SMALL, "tova")["grey"] and cell(low + SMALL, "full")["grey"]
    enough = [line(n, "full", score) for n, score in enumerate((0, 0.5, 0.3, 0))]
    assert not cell(enough + SMALL, "tova")["grey"]
    assert not cell(SMALL, "tova")["grey"]


def test_the_overall_mean_is_that_of_the_tasks():
    lines = [*FULL, *SMALL, line(0, "full", 1, task="vt"), line(0, "tova", 0, task="vt")]
    lines += [line(0, "full", 1, task="other"), line(0, "tova", 1, task="other")]
    rows = {row["policy"]: row for row in summary.overall(lines, ("niah", "vt"))}
    assert rows["tova"]["mean"] == pytest.approx((75 + 0) / 2)
    assert rows["full"]["mean"] == pytest.approx((87.5 + 100) / 2)
    assert rows["tova"]["tasks"] == ["niah", "vt"] and rows["tova"]["n"] == 5
    assert rows["tova"]["difference"] == pytest.approx((-12.5 - 100) / 2)


def test_two_policies_are_compared_on_the_prompts_of_both():
    others = [line(n, "best", score) for n, score in enumerate((1, 1, 1, 1, 1))]
    (row,) = summary.compare(FULL + SMALL + others, "best", "tova")
    assert (row["pairs"], row["unpaired"], row["difference"]) == (4, 1, 0.25)
    sure = [line(n, "best", 1) for n in range(20)] + [line(n, "tova", 0) for n in range(20)]
    (row,) = summary.compare(sure, "best", "tova")
    assert row["disjoint"] and row["nonzero"] and row["difference"] == 1
    with pytest.raises(ValueError, match="no line of policy 'bset'"):
        summary.compare(sure, "bset", "tova")


def test_measures_have_cells_of_their_own():
    lines = [
        line(n, policy, None, task="fidelity", prediction=None, measures={"kl": kl * (n + 1)})
        for n in range(3)
        for policy, kl in (("full", 0.0), ("tova", 0.2))
    ]
    row = cell(lines, "tova", "kl", "fidelity")
    assert (row["mean"], row["difference"], row["kept"]) == (pytest.approx(0.4), pytest.approx(0.4), None)
    assert row["question_aware"] is None


def test_what_is_unknown_is_null_and_not_nan():
    text = json.dumps(summary.summary_of([*FULL[:1], *SMALL], ("niah",), [{"task": "cwe", "length": 1, "reason": "x"}]))
    assert "NaN" not in text and json.loads(text)["refused"][0]["task"] == "cwe"


# ---- how it is shown ---------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path) -> Run:
    found = Run(tmp_path / "one")
    bad = line(9, "tova", 0, prediction="<script>alert(1)</script>", references=("<b>",))
    curve = [0.0, 0.0, *(0.1 * n for n in range(30))]
    more = [
        line(n, policy, None, task="fidelity", prediction=None, measures={"kl": 0.1}, series={"kl": curve}, facts={})
        for n in range(3)
        for policy in ("full", "tova")
    ]
    found.add([*FULL, *SMALL, bad, *[line(n, "tova", 0.5, budget="5%") for n in range(4)], *more])
    found.write("config.yaml", "model: demo\nseed: 3\n")
    found.write("environment.json", json.dumps({"commit": "0123456789", "torch": "2.13"}))
    refused = [{"task": "cwe", "length": 128, "reason": "it needs 899 tokens"}]
    found.write("metrics.json", json.dumps(summary.summarise(found, ("niah",), refused)))
    return found


class Links(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.found, self.tags = [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.found += [value for name, value in attributes if name in ("src", "href")]


def test_the_page_needs_nothing_else_and_runs_nothing(run):
    metrics = run.read_json("metrics.json")
    drawn = plots.draw_all(run, metrics, run.lines())
    (run.folder / "plots" / "stranger.png").write_bytes(b"of another program")
    path = report.write(run, tables.alone(run, metrics), drawn)
    text = path.read_text()
    links = Links()
    links.feed(text)
    assert links.found and all(link.startswith("data:image/png;base64,") for link in links.found)
    assert len(links.found) == len(drawn)
    assert "script" not in links.tags and "&lt;script&gt;" in text and "&lt;b&gt;" in text
    assert "Kept of what the full cache solves" in text and "67 [21, 94]" in text  # two of three
    assert "<td>0.50</td>" in text  # an answer that is half right stands among the wrong ones
    assert "it needs 899 tokens" in text and "question_aware" in text and "2.13" in text and "seed: 3" in text


def test_pictures_show_something_and_are_small(run):
    from matplotlib import image

    names = set()
    for path in plots.draw_all(run, run.read_json("metrics.json"), run.lines()):
        pixels = image.imread(path)
        assert pixels.shape[0] > 150 and pixels.shape[1] > 200 and pixels[..., :3].std() > 0.02
        assert path.stat().st_size < 150_000
        names.add(path.stem)
    assert {"quality_ruler", "needles_niah", "kl_fidelity_128"} <= names


def test_a_policy_looks_the_same_in_all_pictures():
    first = plots.styles(["full", "tova", "inertia"])
    second = plots.styles(["inertia", "tova", "full", "mine"])
    assert first == {name: second[name] for name in first}
    looks = [tuple(sorted((key, str(value)) for key, value in look.items())) for look in second.values()]
    assert len(set(looks)) == 4
    every = plots.styles(["full", *kvpatch.list_policies(), "mine", "yours"])
    assert all(every[name] == first[name] for name in first)
    assert len({tuple(sorted((key, str(value)) for key, value in look.items())) for look in every.values()}) == len(
        every
    )


def test_markdown_tables_line_up_and_hold_every_way(run):
    (merged,) = tables.merge([run])
    text = tables.markdown(tables.tables_of(merged))
    block = []
    for row in text.splitlines():
        if row.startswith("|"):
            block.append(row)
        elif block:
            assert len({len(one) for one in block}) == 1 and len({one.count("|") for one in block}) == 1
            block = []
    assert "demo, commit 012345678" in text
    for part in ("60.0", "50.0", "87.5", "tova", "full", "n = "):  # three of five; a half; the full cache
        assert part in text


def rows_of(table: tables.Table) -> dict[tuple[str, str], list[str]]:
    return {(row[0].text, row[1].text): [cell.text for cell in row[2:]] for row in table.rows}


def test_two_policies_stand_beside_each_other_with_a_verdict():
    names = {"score": "vt, 128 tokens", "kl": "fidelity, kl (nats), 128 tokens", "top1": "fidelity, top1, 128 tokens"}
    lines = [line(n, policy, n % 10 < hits, task="vt") for n in range(40) for policy, hits in (("a", 9), ("b", 1))]
    lines += [line(n, policy, n % 2, "5%", task="vt") for n in range(40) for policy in ("a", "b")]
    more = {"task": "fidelity", "prediction": None}
    for n in range(20):
        lines.append(line(n, "a", None, measures={"kl": 0.3 + n / 10, "top1": 0.4}, **more))
        lines.append(line(n, "b", None, measures={"kl": 0.2 + n / 10, "top1": 0.5}, **more))
    merged = tables.Merged("runs", summary.summary_of(lines, (), ()), [], lines)
    rows = rows_of(comparing.comparison(merged, "a", "b"))
    assert set(rows) == {(names["score"], "10%"), (names["score"], "5%"), (names["kl"], "10%"), (names["top1"], "10%")}
    n, a, b, difference, verdict = rows[names["score"], "10%"]
    assert (n, a.split()[0], b.split()[0], difference.split()[0], verdict) == (
        "40",
        "90.0",
        "10.0",
        "+80.0",
        "clearly better",
    )
    assert rows[names["score"], "5%"][-2:] == ["+0.0 (+0.0 to +0.0)", "-"]
    # The difference is the same everywhere though the texts differ by far more: worse, but not clearly.
    assert rows[names["kl"], "10%"][3:] == ["+0.1 (+0.1 to +0.1)", "worse"]
    assert rows[names["top1"], "10%"][-1] == "clearly worse"
    turned = rows_of(comparing.comparison(merged, "b", "a"))
    assert turned[names["kl"], "10%"][-1] == "better" and turned[names["score"], "10%"][-1] == "clearly worse"


def test_what_is_kept_is_counted_where_the_full_cache_is_right():
    (table,) = comparing.kept(tables.Merged("runs", summary.summary_of(FULL + SMALL, (), ()), [], FULL + SMALL))
    assert rows_of(table) == {("niah", "10%"): ["3", "67 [21, 94]"]}
    alone = tables.Merged("runs", summary.summary_of(SMALL, (), ()), [], SMALL)
    assert comparing.kept(alone) == []


def test_of_two_runs_the_newer_counts(run, tmp_path):
    newer = Run(tmp_path / "two")
    newer.add([line(n, "tova", 0) for n in range(4)])
    newer.write("config.yaml", "model: demo\nseed: 3\n")
    newer.write("environment.json", json.dumps({"commit": "0123456789"}))
    (merged,) = tables.merge([newer, run])
    rows = {(row["policy"], row["budget"]): row["mean"] for row in merged.metrics["cells"] if row["task"] == "niah"}
    assert rows["tova", "10%"] == 0.0 and rows["tova", "5%"] == 0.5 and rows["full", "full"] == 0.875
    assert any("two" in note and "one" in note for note in merged.replaced)
    other = Run(tmp_path / "three")
    other.add(FULL)
    other.write("config.yaml", "model: demo\nseed: 4\n")
    assert len(tables.merge([run, other])) == 2


def test_the_command_prints_and_writes(run, tmp_path):
    from kvpatch.cli import app

    shown = CliRunner().invoke(app, ["report", str(run.folder)], env={"COLUMNS": "200"})
    assert shown.exit_code == 0, shown.output
    assert "niah" in shown.output and "60.0" in shown.output and "[low, high]" in shown.output
    target = tmp_path / "tables.md"
    done = CliRunner().invoke(app, ["report", str(run.folder), "--markdown", str(target), "--html"])
    assert done.exit_code == 0 and "| policy" in target.read_text() and (run.folder / "report.html").exists()
    both = CliRunner().invoke(app, ["report", str(run.folder), "--compare", "tova,full"], env={"COLUMNS": "200"})
    assert both.exit_code == 0 and "tova against full" in both.output and "Kept of what" in both.output
    one = CliRunner().invoke(app, ["report", str(run.folder), "--compare", "tova"])
    assert one.exit_code == 2 and "'tova'" in one.output
    unknown = CliRunner().invoke(app, ["report", str(run.folder), "--compare", "tova,bset"])
    assert unknown.exit_code == 1 and "bset" in unknown.output and "tova" in unknown.output
    nothing = CliRunner().invoke(app, ["report", str(tmp_path)], env={"COLUMNS": "300"})
    assert nothing.exit_code == 2 and "holds no run" in nothing.output
    run.predictions.write_text("{}\n")
    broken = CliRunner().invoke(app, ["report", str(run.folder)], env={"COLUMNS": "300"})
    assert broken.exit_code == 1 and "line 1" in broken.output
