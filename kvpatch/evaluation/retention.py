"""Which tokens each policy holds at which step, of one sample of a run; kept in the run's folder and drawn from there.

retention.npz holds `sample` (its id), `prompt` (tokens of it), `ways` [k, 2] (policy and budget as text) and for way i
`held_i`: [steps, tokens] uint8, the share of layers and KV heads that hold the token after the step, 255 for all.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from kvpatch.evaluation.fidelity import distinct
from kvpatch.evaluation.forcing import Script
from kvpatch.evaluation.reading import Reading, Way
from kvpatch.evaluation.samples import Sample

FILE, ALL = "retention.npz", 255


@dataclass
class Retention:
    """What was held of one sample.

    sample: its id.   prompt: its tokens.   held: (policy, budget as text) to [steps, tokens] uint8.
    """

    sample: str
    prompt: int
    held: dict[tuple[str, str], np.ndarray] = field(default_factory=dict)

    def save(self, folder: Path) -> None:
        """Write it into a run's folder, in place of an older one or not at all."""
        partial = folder / f".{FILE}.partial"
        arrays = {f"held_{place}": one for place, one in enumerate(self.held.values())}
        ways = np.array(list(self.held), dtype=str).reshape(-1, 2)
        try:
            with partial.open("wb") as file:
                np.savez_compressed(file, sample=self.sample, prompt=self.prompt, ways=ways, **arrays)
            os.replace(partial, folder / FILE)
        finally:
            partial.unlink(missing_ok=True)

    @classmethod
    def load(cls, folder: Path) -> "Retention | None":
        """From a run's folder; None where it holds none.

        Raises:
            ValueError: naming the file, where it can't be read.
        """
        path = folder / FILE
        if not path.exists():
            return None
        try:
            with np.load(path) as found:
                ways = [tuple(way) for way in found["ways"].tolist()]
                held = {way: found[f"held_{place}"] for place, way in enumerate(ways)}
                return cls(str(found["sample"]), int(found["prompt"]), held)
        except Exception as error:  # a zip file can be broken in many ways
            raise ValueError(f"{path} can't be read: {error}") from None


def note(folder: Path, handle, tokenizer, sample: Sample, tokens: list[int], ways: list[Way]) -> None:
    """Write what each way that evicts holds of a sample, unless the folder holds another sample's.

    Args:
        tokens: continuation that every way is fed.
    """
    found = Retention.load(folder) or Retention(sample.id, len(sample.prompt_ids))
    missing = [way for way in ways if way.budget is not None and (way.name, way.text) not in found.held]
    if found.sample != sample.id or not missing:
        return
    found.held |= recorded(handle, tokenizer, sample, tokens, missing)
    folder.mkdir(parents=True, exist_ok=True)
    found.save(folder)


def recorded(handle, tokenizer, sample: Sample, tokens: list[int], ways: list[Way]) -> dict[tuple, np.ndarray]:
    """(name, text) of each way to [steps, tokens] uint8, as in the file; the last token is not fed."""
    last, found = len(sample.prompt_ids) + len(tokens) - 1, {}
    with Reading.of(handle, tokenizer, [sample], ways) as reading:
        script = Script(reading.ids.shape[1], 0, [tokens])
        for way in ways:
            steps: list[np.ndarray] = []

            def look(cache, steps=steps, policy=way.policy) -> None:
                if cache.phase == "decode" and cache.step > len(steps):
                    steps.append(shares(distinct(cache, policy)[:, 0], last))

            reading.generate(way.policy, way.budget, len(tokens), script, after=look)
            found[way.name, way.text] = np.stack(steps)
    return found


def shares(positions: Tensor, tokens: int) -> np.ndarray:
    """[tokens] uint8: how many of the sets [layers, heads, slots] hold each token, 255 for all; -1 is an empty slot."""
    sets = positions.shape[0] * positions.shape[1]
    counts = torch.bincount(positions[positions >= 0].long().cpu(), minlength=tokens)
    return (counts * ALL / sets).round().to(torch.uint8).numpy()


def draw_retention(found: Retention, path: Path) -> Path:
    """A panel for each way, tokens by steps: black where all layers and heads hold a token, white where none does.

    Raises:
        ModuleNotFoundError: without matplotlib, naming the extra that brings it.
    """
    from kvpatch.evaluation.drawing import PANELS, figure_of, saved

    columns = min(len(found.held), PANELS)
    figure, panels = figure_of(len(found.held), columns, 2.6, 3.0, sharex=True, sharey=True)
    for place, (axes, ((name, text), held)) in enumerate(zip(panels, found.held.items(), strict=True)):
        steps, tokens = held.shape
        extent = (0.5, steps + 0.5, tokens - 0.5, -0.5)
        image = axes.imshow(held.T / ALL, cmap="Greys", vmin=0, vmax=1, aspect="auto", extent=extent)
        axes.axhline(found.prompt - 0.5, color="#D55E00", linewidth=0.8)
        axes.set_title(f"{name}, {text}", fontsize="small")
        axes.tick_params(labelsize=7)
        if place >= len(found.held) - columns:
            axes.set_xlabel("decode step", fontsize="small")
            axes.tick_params(labelbottom=True)
        if place % columns == 0:
            axes.set_ylabel("position", fontsize="small")
    figure.colorbar(image, ax=list(panels), label="share of layers and KV heads that hold it", shrink=0.8)
    return saved(figure, f"Held by step (the line is the prompt's end): {found.sample}", path)
