"""Cost of a certification, an attack or a training before it is begun, from a few timed passes or steps."""

from __future__ import annotations

import copy
import math
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from statistics import median
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from patchproof.attacks import AttackPlan, attack_in_turn
from patchproof.attacks.gradient import CANDIDATES
from patchproof.data import as_source
from patchproof.defenses import defense as named_defense
from patchproof.geometry import PatchThreat, all_places, covering_masks, parse_patches
from patchproof.masking import Copies, Engine, Evaluator, Measured, free_memory, masks_for
from patchproof.runs._attack import attacks_on
from patchproof.runs._measure import engine_of, generated_images
from patchproof.runs._train import train
from patchproof.training import Plan
from patchproof.training.search import Memory
from patchproof.types import InputError

if TYPE_CHECKING:
    from patchproof.training.loop import StepReport, Trainer

TIMED, TIMED_SECONDS, COPIES = 2, 0.5, 64
"""Fewest batches to time, seconds after which no more are timed, and most copies per batch."""

TIMED_STEPS, ENOUGH_SECONDS = 4, 20.0
"""Training steps that are timed, and seconds after which fewer are enough; the first of several does not count."""


@dataclass(frozen=True)
class Cost:
    """Passes and seconds, from the fewest (every image fails at once) to the most (all images are certified)."""

    images: int
    masks: int
    """0 for a defence without masks."""
    fewest_passes: int
    most_passes: int
    passes_per_second: float
    fewest_seconds: float
    most_seconds: float
    table_bytes: int
    """Memory for the tables of masks and images."""
    peak_bytes: int | None
    """Memory for everything else, as far as the timed passes show it; None if unknown."""
    attack_seconds: float = 0.0
    """Extra time for attacks if every image withstands them all."""


def estimate_cost(defense: Any, images: int, plan: AttackPlan | None = None) -> Cost | None:
    """Time a few passes over a generated image; None for a defence without `classifier` or `most_passes`."""
    if getattr(defense, "classifier", None) is None or not hasattr(defense, "most_passes"):
        return None
    image = generated_images(1, defense)
    masks, most = getattr(defense, "masks", None), images * defense.most_passes
    if masks is None:
        count = needed = 0
        fewest = images * getattr(defense, "fewest_passes", defense.most_passes)
        ready, label = _prepared(defense, image)

        def timed() -> int:
            return int(ready.certify(image, label).forwards)  # in the defence's own passes; waits for the device
    else:
        require_memory(defense)
        count, needed = len(masks), defense.table_bytes(masks) if hasattr(defense, "table_bytes") else 0
        fewest = images * count
        evaluator = Evaluator(defense.classifier, Engine(batch_size=engine_of(defense).batch_size))
        keep = masks_for(defense.classifier, defense.threat, per_axis=3).keep(image.device)
        evaluator.evaluate(image, keep, Copies.unmasked(1), lambda logits, _: logits)  # settles the chunk
        zeros = torch.zeros(min(COPIES, evaluator.chunk), dtype=torch.int64)

        def timed() -> int:
            return len(evaluator.evaluate(image, keep, Copies(zeros, zeros, zeros), lambda logits, _: logits).cpu())

    seconds = least_seconds(timed)
    times = 1 / seconds, fewest * seconds, most * seconds
    attacking = 0.0 if plan is None else images * seconds_of_attack(defense, image, plan)
    return Cost(images, count, fewest, most, *times, needed, peak_memory(image.device), attacking)


def least_seconds(passes: Callable[[], int]) -> float:
    """Seconds per pass in the fastest of several calls, each of which returns its number of passes.

    The first call may have things to set up, and other work on the machine only ever adds time.
    """
    found, began = list[float](), time.perf_counter()
    while len(found) < TIMED or time.perf_counter() - began < TIMED_SECONDS:
        before = time.perf_counter()
        count = passes()
        found.append((time.perf_counter() - before) / count)
    return min(found)


def _prepared(defense: Any, image: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """Return the defence with an arbitrary τ, which does not change its speed, and its label for the image."""
    label = defense.predict(image).clamp(min=0)  # −1, an alarm, is not a label
    if hasattr(defense, "with_engine"):
        defense = defense.with_engine(Measured(tau=0.0, tau_fp32=1.0, batch_size=defense.chunk))
    return defense, label


def require_memory(defense: Any) -> None:
    """Refuse masks whose tables need more than the free memory, and name the most masks per axis that fit."""
    free, masks = free_memory(), getattr(defense, "masks", None)
    if free is None or masks is None or not (hasattr(defense, "table_bytes") and hasattr(defense, "most_passes")):
        return
    needed = defense.table_bytes(masks)
    if needed <= free:
        return
    fits = 0
    for per_axis in range(1, max(defense.threat.image_size) + 1):
        if defense.table_bytes(covering_masks(defense.threat, per_axis=per_axis)) > free:
            break
        fits = per_axis
    raise InputError(
        f"{len(masks):,} masks make up to {defense.most_passes:,} masked copies of an image, whose tables take "
        f"{needed / 1e9:.1f} GB; {free / 1e9:.1f} GB are free; per_axis {fits} is the most that fits"
    )


def peak_memory(device: torch.device) -> int | None:
    """Most bytes in use so far, on the GPU or else by this process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        import resource
    except ImportError:  # Windows
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def seconds_of_attack(defense: Any, image: torch.Tensor, plan: AttackPlan) -> float:
    """Seconds to attack one image that withstands every attack: the fastest timed step × steps × rounds, summed."""
    defense, label = _prepared(defense, image)
    restarts, places = min(plan.restarts, CANDIDATES), plan.places
    if plan.place_search == "exhaustive":
        places = len(all_places(defense.threat)) ** defense.threat.patches
    at_once = min(places, CANDIDATES // restarts)
    rounds = math.ceil(places / at_once) * math.ceil(plan.restarts / restarts)
    one_round = replace(plan, steps=2, restarts=restarts, places=at_once, place_search="grid")
    moments, seconds = list[float](), 0.0

    def stepped(*_: int) -> None:
        if image.is_cuda:
            torch.cuda.synchronize(image.device)
        moments.append(time.perf_counter())

    for attack in chain(*attacks_on(defense, one_round, stepped)):
        attack.target = SimpleNamespace(predict=lambda images: label.expand(len(images)))  # no patch changes the label
        moments.clear()
        began = time.perf_counter()
        while not moments or time.perf_counter() - began < TIMED_SECONDS:
            attack_in_turn([attack], image, label, seed=0, indices=[0])
        step = min(after - before for before, after in zip(moments[::2], moments[1::2], strict=True))
        seconds += rounds * plan.steps * step
    return seconds


class _EnoughError(Exception):
    pass


@dataclass(frozen=True)
class TrainingCost:
    """Seconds from the fewest (every validation image fails at once) to the most (all of them are certified)."""

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
    """Time a few steps of a copy of the classifier; `options` are those of `train`. Nothing is written."""
    trainers: list[Trainer] = []
    searches: list[float] = []
    moments: list[float] = []

    def started(trainer: Trainer) -> None:
        trainers.append(trainer)
        moments.append(time.perf_counter())

    def stepped(report: StepReport) -> None:
        searches.append(report.search_seconds)
        moments.append(time.perf_counter())
        if len(searches) == TIMED_STEPS or moments[-1] - moments[0] > ENOUGH_SECONDS:
            raise _EnoughError

    with suppress(_EnoughError):
        train(copy.deepcopy(classifier), data, plan, on_start=started, on_step=stepped, **options)
    (trainer,), times = trainers, [after - before for before, after in pairwise(moments)]
    step = median(times[1:] or times)
    if isinstance(trainer.strategy, Memory):  # these steps are of the first epoch, which searches most
        step -= median(searches[1:] or searches) * trainer.strategy.saved(plan.epochs)
    size = trainer.classifier.input_size
    threat = PatchThreat(size, parse_patches(plan.mask_patch, size))
    images = 0 if validation is None else min(plan.validation_images, len(as_source(validation)))
    check = estimate_cost(named_defense(plan.validate_with, trainer.classifier.eval(), threat), images)
    assert check is not None  # the package's own defences have both
    training = trainer.total_steps * step
    return TrainingCost(
        plan.epochs,
        trainer.total_steps,
        step,
        images,
        training + plan.epochs * check.fewest_seconds,
        training + plan.epochs * check.most_seconds,
        peak_memory(trainer.accelerator.device),
    )
