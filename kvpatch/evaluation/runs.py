"""One run, one folder: its configuration, what every sample gave, and what follows from that.

config.yaml         every key, as it was run
environment.json    versions, commit, device, threads
predictions.jsonl   a line per sample, policy and budget; written as they come, so a run can be taken up again
metrics.json        cells with their intervals (`kvpatch.evaluation.summary`)
plots/*.png         report.html
"""

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

CONFIG, ENVIRONMENT, PREDICTIONS, METRICS = "config.yaml", "environment.json", "predictions.jsonl", "metrics.json"


@dataclass(frozen=True)
class Line:
    """What one policy made of one sample.

    Attributes:
        task, length, sample: of the `Sample`; sample is its id.
        prompt_id: follows from the tokens that were fed.
        policy, budget: as they were asked for, the budget as text ("10%", "128", "full").
        held: tokens that may be held between steps, None without a limit.
        prompt_tokens: length of the prompt, without pads.
        references: texts that the prediction is held against.
        prediction: text of the answer, None where there is no answer but measures.
        tokens: new tokens of the answer, its end included.
        score: 0 to 1, None where there is no answer.
        measures: name to number; "kl" in nats, "top1" and "lost_mass" as shares, ...
        series: name to numbers by place in the text.
        facts: of the sample.
    """

    task: str
    length: int
    sample: str
    prompt_id: str
    policy: str
    budget: str
    held: int | None
    prompt_tokens: int
    references: tuple[str, ...] = ()
    prediction: str | None = None
    tokens: int = 0
    score: float | None = None
    measures: dict[str, float] = field(default_factory=dict)
    series: dict[str, list[float]] = field(default_factory=dict)
    facts: dict = field(default_factory=dict)

    @property
    def key(self) -> tuple:
        """What is run once."""
        return self.task, self.length, self.prompt_id, self.policy, self.budget


class Run:
    """A run's folder.

    Args:
        folder: made if it is not there.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def predictions(self) -> Path:
        return self.folder / PREDICTIONS

    def lines(self) -> Iterator[Line]:
        """Everything that was written; a last line that was cut off is left out.

        Raises:
            ValueError: for any other line that can't be read, naming file and line.
        """
        if not self.predictions.exists():
            return
        with self.predictions.open("rb") as file:
            for number, raw in enumerate(file, 1):
                if not raw.endswith(b"\n"):
                    return
                yield _line(raw, self.predictions, number)

    def repair(self) -> None:
        """Take a line that was cut off back, so that the next one begins on its own."""
        if not self.predictions.exists():
            return
        with self.predictions.open("rb+") as file:
            content = file.read()
            file.truncate(content.rfind(b"\n") + 1)

    def add(self, lines: list[Line]) -> None:
        """Append lines, all of them on the disk when this returns.

        Raises:
            OSError: if they can't be written, such as on a full disk; what was complete before stays readable.
        """
        content = "".join(json.dumps(asdict(line), ensure_ascii=False, allow_nan=False) + "\n" for line in lines)
        before = self.predictions.stat().st_size if self.predictions.exists() else 0
        try:
            with self.predictions.open("ab") as file:
                file.write(content.encode())
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            if self.predictions.exists():
                os.truncate(self.predictions, before)
            raise

    def write(self, name: str, content: str) -> None:
        """A whole file of the folder, in place of an older one or not at all."""
        target, partial = self.folder / name, self.folder / f".{name}.partial"
        try:
            partial.write_text(content, encoding="utf-8")
            os.replace(partial, target)
        finally:
            partial.unlink(missing_ok=True)

    def read_json(self, name: str) -> dict | None:
        """A JSON file of the folder, None where there is none.

        Raises:
            ValueError: naming the file, where it can't be read.
        """
        path = self.folder / name
        if not path.exists():
            return None
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is not JSON: {error}") from None


def _line(raw: bytes, path: Path, number: int) -> Line:
    try:
        given = json.loads(raw)
        given["references"] = tuple(given["references"])
        return Line(**given)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path}, line {number} is not a prediction of this version: {error}") from None
