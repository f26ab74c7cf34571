"""Which strategy trained the weights that a run certified."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from patchproof.models import checkpoint_sha256
from patchproof.report._facts import look
from patchproof.report._lines import json_object
from patchproof.report._runs import CertifyRun, TrainRun, search_passes
from patchproof.report._text import printable
from patchproof.types import PatchproofError

CHECKPOINTS = ("checkpoint-last", "checkpoint-best")


@dataclass(frozen=True)
class Training:
    """How a classifier was trained: the strategy, and how many extra passes an image it takes.

    Where no training run is known, `strategy` is None and `label` is the name of the first run with these weights.
    """

    label: str
    strategy: str | None = None
    passes: int | None = None
    doubt: str | None = None


def find_trainings(runs: Sequence[CertifyRun], trained: Sequence[TrainRun]) -> list[Training]:
    """For each run, how its weights were trained, as far as that can be found out."""
    digests: dict[Path, str | None] = {}
    names: dict[str, str] = {}
    found = []
    for run in runs:
        training = _find(run, trained, digests)
        if training.strategy is None and run.facts.weights_sha256 is not None:
            # Runs of the same weights share a row, under the name of the first of them.
            training = replace(training, label=names.setdefault(run.facts.weights_sha256, training.label))
        found.append(training)
    return found


def _find(run: CertifyRun, trained: Sequence[TrainRun], digests: dict[Path, str | None]) -> Training:
    """The training run whose checkpoint holds the very weights of `run`, else the one its settings point at."""
    doubtful: Training | None = None
    for checkpoint, named in _candidates(run, trained):
        manifest = _train_manifest(checkpoint.parent)
        strategy = look(manifest, "identity", "plan", "strategy")
        if not isinstance(strategy, str):
            continue
        if checkpoint not in digests:
            digests[checkpoint] = _sha256(checkpoint)
        found = Training(printable(strategy), strategy, search_passes(manifest))
        if digests[checkpoint] == run.facts.weights_sha256 is not None:
            return found
        if named and doubtful is None:
            doubtful = replace(found, doubt=_doubt(checkpoint, strategy))
    return doubtful or Training(run.name, doubt=_unknown(run))


def _candidates(run: CertifyRun, trained: Sequence[TrainRun]) -> Iterator[tuple[Path, bool]]:
    """Checkpoints that may be the run's, and whether its settings name them: where they say, seen from here or from
    above the run; beside the run, as recipes leave them; and those of the training runs at hand."""
    folder = run.folder.resolve()
    if run.facts.weights is not None:
        named = Path(run.facts.weights).expanduser()
        yield from [(parent / named, True) for parent in (Path.cwd(), *folder.parents)]
    for place in (folder.parent, *(train.folder.resolve() for train in trained)):
        yield from [(place / name, False) for name in CHECKPOINTS]


def _sha256(checkpoint: Path) -> str | None:
    """Of the weights there; if they are gone, what a finished training wrote down of its last ones."""
    try:
        return checkpoint_sha256(checkpoint)
    except (PatchproofError, OSError):
        results = json_object(checkpoint.parent / "results.json") if checkpoint.name == CHECKPOINTS[0] else None
        noted = look(results or {}, "weights_sha256")
        return noted if isinstance(noted, str) else None


def _train_manifest(folder: Path) -> Mapping[str, Any]:
    manifest = json_object(folder / "manifest.json") or {}
    return manifest if manifest.get("command") == "train" else {}


def _doubt(checkpoint: Path, strategy: str) -> str:
    place = printable(str(checkpoint))
    return (
        f"it is shown as `{printable(strategy)}`, the strategy of the training run around {place}, but the weights "
        "there are gone or not those of the run: trained further, or loaded at another --image-size"
    )


def _unknown(run: CertifyRun) -> str:
    weights = f" `{printable(run.facts.weights)}`" if run.facts.weights else ""
    return f"its weights{weights} lead to no training run, so its strategy is not known; it goes by a folder's name"
