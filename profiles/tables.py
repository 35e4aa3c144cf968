"""Write the README's tables from the records beside this file.

    python profiles/tables.py            # rewrite README.md
    python profiles/tables.py --check    # exit 1 if it would change

A table stands between `<!-- table: NAME -->` and `<!-- end -->`. Of several records of one row the last counts.
"""

import csv
import inspect
import re
from pathlib import Path
from typing import Annotated

import typer

from kvpatch.profiles._shared import markdown

HERE = Path(__file__).parent
README = HERE.parent / "README.md"
MARK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def records(name: str, key: tuple[str, ...]) -> list[dict]:
    """Rows of a CSV file, the last of each key, in the order of their first appearance; none if it is not there."""
    path = HERE / f"{name}.csv"
    if not path.is_file():
        return []
    last: dict[tuple, dict] = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            last[tuple(row.get(part) for part in key)] = row
    return list(last.values())


def bench() -> str:
    """Speed of decode steps."""
    head = [
        "batch, precision, way",
        "ms a step",
        "tok/s",
        "over static",
        "over dynamic",
        "GB/s",
        "read share",
        "peak MiB",
    ]
    rows = [
        [
            f"{row['batch']}, {row['dtype']}, {row['variant']}" + (" (refused)" if row["refused"] else ""),
            f"{float(row['p50_ms']):.1f}",
            f"{float(row['decode_tok_per_s']):.1f}",
            ratio(row["paired_over_static"]),
            ratio(row["paired_over_dynamic"]),
            f"{float(row['gb_per_s']):.1f}",
            f"{float(row['share_of_stream']):.2f}",
            f"{float(row['peak_cache_bytes']) / 2**20:.0f}",
        ]
        for row in records("bench", ("batch", "dtype", "variant", "prompt", "budget"))
    ]
    return markdown(head, rows)


# Why kvpress keeps other entries.
DIFFERENCES = {
    "snapkv": "kvpress pools zeros in beside the prompt's ends",
    "pyramidkv": "kvpress spreads the budget and the window from another height",
    "adakv": "as `snapkv`",
    "criticalkv": "kvpress counts the window in the half that goes by the score alone",
    "h2o": "kvpress divides by the queries that could see an entry, and protects nothing",
}
# Kernel and variant of `kernels.csv`: what the README calls it.
KERNELS = {
    ("attend", "SCORES=False VNORM=False"): "attend, plain step",
    ("attend", "SCORES=True VNORM=False"): "attend, scoring step",
    ("attend", "SCORES=True VNORM=True"): "attend, scoring step, vnorm",
    ("settle", "SCORES=False SCORER= APPLIES=False"): "settle, plain step",
    ("settle", "SCORES=True SCORER=attention APPLIES=True"): "settle, scoring step",
    ("pooled", "APPLIES=True BLOCK_M=16"): "pooled (after FlashAttention)",
    ("choose", ""): "choose",
}


def kernels() -> str:
    """What the compiler makes of the kernels at one shape."""
    targets = ("80", "90", "100")
    head = ["registers, shared memory", *(f"sm_{target}" for target in targets), "local memory", "16-byte loads"]
    found: dict[str, dict[str, dict]] = {}
    for row in records("kernels", ("architecture", "dtype", "queries", "head_size", "kernel", "does")):
        name = KERNELS.get((row["kernel"], row["does"]))
        if name and (row["dtype"], row["queries"], row["head_size"]) == ("bfloat16", "4", "128"):
            found.setdefault(name, {})[row["architecture"]] = row
    rows = [
        [
            name,
            *(f"{of[target]['registers']}, {int(of[target]['shared']) / 1024:.0f} KiB" for target in targets),
            str(sum(int(row["spills"]) for row in of.values())),
            of["90"]["loads_16"],
        ]
        for name, of in sorted(found.items())
    ]
    return markdown(head, rows)


def api() -> str:
    """Public names with the first line of their docstrings."""
    import kvpatch
    from kvpatch import attention, compat, evaluation

    rows = []
    for module, prefix in ((kvpatch, ""), (attention, "attention."), (compat, "compat."), (evaluation, "evaluation.")):
        for name in sorted(module.__all__, key=str.lower):
            rows.append([f"`{prefix}{name}`", inspect.getdoc(getattr(module, name)).split("\n")[0]])
    return markdown(["name", "what it is"], rows, figures=False)


def ratio(text: str) -> str:
    """A ratio with one digit behind the point."""
    return f"{float(text):.1f}x" if text else "-"


def cold() -> str:
    """First call with an empty compile cache."""
    head = ["first call, empty compile cache", "compile s", "graphs", "first call s", "second call s"]
    found = records("cold", ("repetition", "commit"))
    if not found:
        return markdown(head, [])
    row = sorted(found, key=lambda one: float(one["compile_seconds"]))[len(found) // 2]
    cells = [f"median of {len(found)}", f"{float(row['compile_seconds']):.1f}", row["graphs"]]
    return markdown(
        head, [[*cells, f"{float(row['first_call_seconds']):.1f}", f"{float(row['second_call_seconds']):.1f}"]]
    )


def long() -> str:
    """One long generation."""
    head = ["policy", "new tokens", "early ms a step", "late ms a step", "cache MiB", "RSS growth MiB", "recompiles"]
    rows = [
        [
            row["variant"],
            row["new_tokens"],
            f"{float(row['early_p50_ms']):.1f}",
            f"{float(row['late_p50_ms']):.1f}",
            f"{float(row['cache_bytes']) / 2**20:.1f}",
            f"{(float(row['rss_bytes_end']) - float(row['rss_bytes'])) / 2**20:.1f}",
            row["recompiles"],
        ]
        for row in records("long", ("variant", "new_tokens"))
    ]
    return markdown(head, rows)


def hits(name: str) -> str:
    """Needles found per policy, with the interval."""
    rows = [
        [
            row["policy"],
            f"{row['hits']} of {row['n']}",
            f"{float(row['wilson_low']):.2f} to {float(row['wilson_high']):.2f}",
            row["lost_hits"],
        ]
        for row in records(name, ("policy", "prompt", "n"))
    ]
    return markdown(["policy", "found", "95 % interval", "lost"], rows)


def kl() -> str:
    """Divergence from the full cache."""
    rows = [
        [
            row["policy"],
            f"{float(row['kl_mean_nats']):.3f}",
            f"{float(row['kl_p95_nats']):.3f}",
            f"{float(row['top1_agreement']):.1%}",
            f"{float(row['lost_mass']):.1%}",
        ]
        for row in records("quality_fidelity", ("policy", "prompt", "forced"))
    ]
    return markdown(["policy", "mean KL, nats", "95th percentile", "same first token", "lost attention"], rows)


def overlap() -> str:
    """Entries that kvpress keeps too."""
    found: dict[str, list[dict]] = {}
    for row in records("peers/overlap", ("method", "prompt", "budget", "seed", "layer")):
        found.setdefault(row["method"], []).append(row)
    rows = []
    for name, layers in found.items():
        shares = [float(row["jaccard"]) for row in layers]
        rows.append([f"`{name}`", f"{sum(shares) / len(shares):.3f}", f"{min(shares):.3f}", DIFFERENCES.get(name, "")])
    return markdown(["method", "Jaccard, mean over layers", "least layer", "what differs"], rows)


def policies() -> str:
    """What each policy does: the rows of `kvpatch list`."""
    from kvpatch.cli.inspect import policy_rows

    found = policy_rows()
    rows = [
        [
            f"`{row['policy']}`",
            *list(row.values())[1:-1],
            row["arXiv"] and f"[{row['arXiv']}](https://arxiv.org/abs/{row['arXiv']})",
        ]
        for row in found
    ]
    return markdown(list(found[0]), rows, figures=False)


TABLES = {
    "policies": policies,
    "overlap": overlap,
    "bench": bench,
    "api": api,
    "cold": cold,
    "long": long,
    "needle": lambda: hits("quality_needle"),
    "after": lambda: hits("quality_after"),
    "kl": kl,
    "kernels": kernels,
}


def written(text: str) -> str:
    """The text with every table made anew."""
    return MARK.sub(lambda match: match[1] + "\n" + TABLES[match[2]]() + "\n" + match[3], text)


def main(check: Annotated[bool, typer.Option(help="Only say whether the README is up to date.")] = False) -> None:
    """Write the README's tables."""
    text = README.read_text()
    if check:
        raise typer.Exit(int(written(text) != text))
    README.write_text(written(text))


if __name__ == "__main__":
    typer.run(main)
