"""What eviction costs in text: distance from the full cache under given text, and hidden facts that are still found."""

from kvpatch.evaluation.fidelity import Fidelity, fidelity
from kvpatch.evaluation.needles import found, found_later

__all__ = ["Fidelity", "fidelity", "found", "found_later"]
