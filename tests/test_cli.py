"""The command line as a person meets it."""

import re

from typer.testing import CliRunner

from kvpatch import cli


def test_the_demo_shows_each_way_beside_the_unpatched_model(monkeypatch):
    monkeypatch.setattr(cli, "OPERATING_POINTS", ("full", "inertia-lazy"))
    result = CliRunner().invoke(
        cli.app, ["demo", "--length", "400", "--new-tokens", "24", "--budget", "0.2"], env={"COLUMNS": "160"}
    )
    assert result.exit_code == 0, result.output
    rows = {line.split("│")[1].strip(): line.split("│") for line in result.output.splitlines() if line.count("│") > 5}
    assert {"generate, unpatched", "full", "inertia-lazy"} <= set(rows)
    answer = re.search(r"Right answer: (\d{7})", result.output)[1]
    for name in ("generate, unpatched", "full"):
        assert answer in rows[name][2] and rows[name][3].strip() == "yes"
    held = {name: float(row[6]) for name, row in rows.items() if name in ("full", "inertia-lazy")}
    assert held["inertia-lazy"] < 0.5 * held["full"]


def test_a_budget_that_is_no_share_is_refused_by_name():
    result = CliRunner().invoke(cli.app, ["demo", "--budget", "1.5"])
    assert result.exit_code == 2
    assert "--budget" in result.output and "1.5" in result.output


def test_help_lists_the_commands():
    result = CliRunner().invoke(cli.app, ["--help"])
    assert result.exit_code == 0 and "demo" in result.output
