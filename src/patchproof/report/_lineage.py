"""Which strategy trained the weights that a run certified."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from patchproof.models import checkpoint_sha256
from patchproof.runs._reading import StoredCertification, StoredTraining, find_weights, printable, read_run
from patchproof.types import PatchproofError


@dataclass(frozen=True)
class Lineage:
    """How a run's weights were trained: the strategy, and how many extra passes per image it takes.

    Where no training is known, `strategy` is None and `label` is the name of the first run with these weights.
    """

    label: str
    strategy: str | None = None
    passes: int | None = None
    doubt: str | None = None


def find_lineages(runs: Sequence[StoredCertification], trainings: Sequence[StoredTraining]) -> list[Lineage]:
    """For each run the training whose checkpoint holds its very weights, else the one that its settings point at."""
    known: dict[Path, tuple[StoredTraining | None, str | None]] = {}
    labels: dict[str, str] = {}
    found = []
    for run in runs:
        label = labels.setdefault(run.weights_sha256 or run.name, run.name)
        weights = f" `{printable(run.weights)}`" if run.weights else ""
        lineage = Lineage(label, doubt=f"no training is known for its weights{weights}; it goes by a folder's name")
        for checkpoint, named in find_weights(run, trainings):
            if checkpoint not in known:
                known[checkpoint] = _trained(checkpoint)
            training, sha256 = known[checkpoint]
            if training is not None and sha256 == run.weights_sha256 is not None:
                lineage = Lineage(training.strategy, training.strategy, training.search_passes)
                break
            if training is not None and named and lineage.strategy is None:
                doubt = (
                    f"it is shown as `{training.strategy}`, the strategy of the training around "
                    f"{printable(str(checkpoint))}, but the weights there are gone or not those of the run"
                )
                lineage = Lineage(training.strategy, training.strategy, training.search_passes, doubt)
        found.append(lineage)
    return found


def _trained(checkpoint: Path) -> tuple[StoredTraining | None, str | None]:
    """The training around a checkpoint, and the sha256 of its weights; of weights that are gone, what was noted."""
    try:
        training = read_run(checkpoint.parent) if (checkpoint.parent / "manifest.json").is_file() else None
    except (PatchproofError, OSError):
        return None, None
    if not isinstance(training, StoredTraining):
        return None, None
    try:
        return training, checkpoint_sha256(checkpoint)
    except (PatchproofError, OSError):
        return training, training.weights_sha256 if checkpoint.name == "checkpoint-last" else None
