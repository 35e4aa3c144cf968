"""Draw the README's picture from bench.csv: the last row of each way.

    python profiles/plots.py

Needs matplotlib (the extra `plot`).
"""

import json
from pathlib import Path

from tables import records

from kvpatch.bench import report

HERE = Path(__file__).resolve().parent
WAYS = ("dynamic", "static", "full", "inertia-lazy", "kvpress tova-16")


def main() -> None:
    """Write batch.png and roofline.png beside this file."""
    rows = []
    for row in records("bench", ("batch", "dtype", "variant", "prompt", "budget")):
        if row["variant"] in WAYS:
            numbers = {}
            for name, text in row.items():
                try:
                    numbers[name] = json.loads(text)
                except ValueError:
                    numbers[name] = text
            rows.append(numbers)
    for path in report.plot(rows, HERE):
        print(path.name)


if __name__ == "__main__":
    main()
