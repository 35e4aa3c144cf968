"""A run as one HTML page that needs nothing else, and as tables on a terminal."""

import base64
import json
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable
from rich.text import Text

from kvpatch.evaluation import comparing, tables
from kvpatch.evaluation.runs import ENVIRONMENT, Line, Run

PAGE = "report.html"
EXAMPLES = 3  # wrong answers shown of each policy and budget
VISIBLE = (
    "Every prompt, with its question and the opening of the answer, was read before anything was evicted, by all "
    "policies alike (question_aware: true); where the question is asked late, the cache had been cut long before."
)

_TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{{ title }}</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; margin: .5rem 0; }
caption { text-align: left; font-weight: 600; padding: .4rem 0; }
th, td { border-bottom: 1px solid #ccc; padding: .2rem .7rem; text-align: right; font-variant-numeric: tabular-nums; }
th:first-child, td:first-child { text-align: left; }
td.grey { color: #999; font-style: italic; }
td.text { text-align: left; font-family: monospace; white-space: pre-wrap; }
.note { color: #555; font-size: 13px; margin: .1rem 0; }
.wide { overflow-x: auto; }
img { max-width: 100%; }
pre { background: #f5f5f5; padding: .7rem; overflow-x: auto; }
</style>
</head>
<body>
<h1>{{ title }}</h1>
<p>{{ visible }}</p>
{% for one in tables %}
<div class="wide"><table>
<caption>{{ one.title }}</caption>
<tr>{% for name in one.head %}<th scope="col">{{ name }}</th>{% endfor %}</tr>
{% for row in one.rows %}
<tr>{% for cell in row %}<td{% if cell.grey %} class="grey"{% endif %}>{{ cell.text }}</td>{% endfor %}</tr>
{% endfor %}
</table></div>
{% for note in one.notes %}<p class="note">{{ note }}</p>{% endfor %}
{% endfor %}
{% if refused %}
<h2>Left out</h2>
<ul>{% for one in refused %}<li>{{ one.task }} at {{ one.length }}: {{ one.reason }}</li>{% endfor %}</ul>
{% endif %}
{% for name, data in pictures %}<p><img alt="{{ name }}" src="data:image/png;base64,{{ data }}"></p>{% endfor %}
{% if examples %}
<h2>Some wrong answers</h2>
<div class="wide"><table>
<tr><th>task</th><th>policy</th><th>score</th><th>expected</th><th>said</th></tr>
{% for one in examples %}
<tr><td>{{ one.task }}, {{ one.length }}</td><td>{{ one.policy }} {{ one.budget }}</td>
<td>{{ "%.2f" | format(one.score) }}</td>
<td class="text">{{ one.references | join(" | ") }}</td><td class="text">{{ one.prediction }}</td></tr>
{% endfor %}
</table></div>
{% endif %}
<h2>What was run</h2>
<pre>{{ config }}</pre>
<pre>{{ environment }}</pre>
</body>
</html>
"""


def page(run: Run, merged: tables.Merged, pictures: list[Path]) -> str:
    """The HTML of a run: tables, pictures, examples, and what was run.

    Args:
        merged: the run's own metrics, from `tables.alone` or `tables.merge`.
        pictures: PNG files, from `plots.draw_all`.

    Raises:
        ValueError: for a file of the run that can't be read, naming it.
    """
    import jinja2

    template = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(_TEMPLATE)
    return template.render(
        title=f"kvpatch eval: {run.folder.name}",
        visible=VISIBLE,
        tables=[*tables.tables_of(merged), *comparing.kept(merged)],
        refused=merged.metrics["refused"],
        pictures=[(path.stem, base64.b64encode(path.read_bytes()).decode()) for path in pictures],
        examples=wrong(merged.lines),
        config="\n".join(f"{key}: {value}" for key, value in tables.config_of(run).items()),
        environment=json.dumps(run.read_json(ENVIRONMENT) or {}, indent=1),
    )


def wrong(lines: list[Line]) -> list[Line]:
    """The first few answers of each policy and budget that are not wholly right."""
    counts: dict[tuple[str, str], int] = {}
    found = []
    for line in lines:
        way = line.policy, line.budget
        if line.score is not None and line.score < 1 and counts.get(way, 0) < EXAMPLES:
            counts[way] = counts.get(way, 0) + 1
            found.append(line)
    return sorted(found, key=lambda line: (line.policy, line.budget))


def write(run: Run, merged: tables.Merged, pictures: list[Path]) -> Path:
    """Write the run's report.html; arguments as of `page`."""
    run.write(PAGE, page(run, merged, pictures))
    return run.folder / PAGE


def show(console: Console, found: list[tables.Table], notes: list[str]) -> None:
    """Print tables, and notes below them."""
    for table in found:
        shown = RichTable(*map(escape, table.head))
        for row in table.rows:
            shown.add_row(*(Text(text, style="dim italic" if grey else "") for text, grey in row))
        console.print(Text(table.title, style="bold"))
        console.print(shown)
        for note in table.notes:
            console.print(Text(note, style="dim"))
    for note in notes:
        console.print(Text(note))
