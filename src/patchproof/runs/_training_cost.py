"""What a training will cost, before it is begun: from a few of its own steps."""

from __future__ import annotations

import copy
import time
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any

from torch import nn

from patchproof.data import as_source
from patchproof.defenses import defense
from patchproof.geometry import PatchThreat, parse_patches
from patchproof.runs._cost import estimate_cost, peak_memory
from patchproof.runs._train import train
from patchproof.training import Plan
from patchproof.training.search import Memory

if TYPE_CHECKING:
    from patchproof.training.loop import StepReport, Trainer

TIMED_STEPS, ENOUGH_SECONDS = 4, 20.0
"""Steps that are timed, fewer where they take longer; the first of several does not count."""


class _EnoughError(Exception):
    pass


@dataclass(frozen=True)
class TrainingCost:
    """Validation after each epoch takes from the fewest seconds, where every image fails at once, to the most, where
    all are certified."""

    epochs: int
    steps: int
    seconds_per_step: float
    validation_images: int
    fewest_seconds: float
    most_seconds: float
    peak_bytes: int | None


def estimate_training(
    classifier: nn.Module, data: Any, plan: Plan, *, validation: Any = None, **options: Any
) -> TrainingCost:
    """From timed steps of a copy of the classifier; options as in `train`. Nothing is written."""
    trainers: list[Trainer] = []
    moments: list[float] = []
    searches: list[float] = []

    def started(trainer: Trainer) -> None:
        trainers.append(trainer)
        moments.append(time.perf_counter())

    def stepped(report: StepReport) -> None:
        moments.append(time.perf_counter())
        searches.append(report.search_seconds)
        if len(moments) > TIMED_STEPS or moments[-1] - moments[0] > ENOUGH_SECONDS:
            raise _EnoughError

    with suppress(_EnoughError):
        train(copy.deepcopy(classifier), data, plan, on_start=started, on_step=stepped, **options)
    trainer, times = trainers[0], [after - before for before, after in pairwise(moments)]
    step, size = median(times[1:] or times), trainer.classifier.input_size
    if isinstance(trainer.strategy, Memory):  # the first epoch, of which these steps are, searches most
        step -= median(searches[1:] or searches) * trainer.strategy.saved(plan.epochs)
    threat = PatchThreat(size, parse_patches(plan.mask_patch, size))
    images = 0 if validation is None else min(plan.validation_images, len(as_source(validation)))
    check = estimate_cost(defense("patchcleanser", trainer.classifier.eval(), threat), images)
    assert check is not None  # the defence has masks and a classifier
    steps, epochs = trainer.total_steps, plan.epochs
    fewest, most = (steps * step + epochs * each for each in (check.fewest_seconds, check.most_seconds))
    return TrainingCost(epochs, steps, step, images, fewest, most, peak_memory(trainer.accelerator.device))
