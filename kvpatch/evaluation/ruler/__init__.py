"""RULER's thirteen tasks (arXiv 2404.06654), with the wording of NVIDIA/RULER's scripts/data/synthetic."""

from kvpatch.evaluation.ruler.documents import QA
from kvpatch.evaluation.ruler.frequencies import CommonWords, FrequentWords
from kvpatch.evaluation.ruler.needles import Needles
from kvpatch.evaluation.ruler.tracking import Tracking
from kvpatch.evaluation.samples import Task

TASKS: tuple[Task, ...] = (
    Needles("niah_single_1", "noise"),
    Needles("niah_single_2", "essay"),
    Needles("niah_single_3", "essay", value_kind="uuids"),
    Needles("niah_multikey_1", "essay", keys=4),
    Needles("niah_multikey_2", "needles"),
    Needles("niah_multikey_3", "needles", key_kind="uuids", value_kind="uuids"),
    Needles("niah_multivalue", "essay", values=4),
    Needles("niah_multiquery", "essay", keys=4, asked=4),
    Tracking("vt"),
    CommonWords("cwe"),
    FrequentWords("fwe"),
    QA("qa_1", "squad"),
    QA("qa_2", "hotpotqa"),
)

__all__ = ["TASKS", "CommonWords", "FrequentWords", "Needles", "QA", "Tracking"]
