"""What a certification, an attack or a training will cost, before it is begun: from a few timed passes or steps."""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, takewhile
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from patchproof.attacks import AttackPlan, attack_in_turn
from patchproof.attacks.gradient import CANDIDATES
from patchproof.data import as_source
from patchproof.defenses import defense as named_defense
from patchproof.geometry import MaskSet, PatchThreat, all_places, covering_masks, parse_patches
from patchproof.masking import Copies, Engine, Evaluator, Measured, masks_for
from patchproof.runs._attack import attacks_on
from patchproof.runs._measure import generated_images
from patchproof.runs._train import train
from patchproof.training import Plan
from patchproof.training.search import Memory
from patchproof.types import InputError

if TYPE_CHECKING:
    from patchproof.training.loop import StepReport, Trainer

BYTES_PER_PAIR = 24
"""Of a mask set: two masks and the table of pairs."""

BYTES_PER_UNION = 200
"""The same where pairs may hide the same pixels, and are compared."""

BYTES_PER_CELL = 75
"""Of an image: a cell of its table, its place in the order, and the copy to evaluate."""

TIMED, TIMED_SECONDS, COPIES = 2, 0.5, 64
"""Batches that are timed, of at most so many copies each: so many at least, and for so long."""

TIMED_STEPS, ENOUGH_SECONDS = 4, 20.0
"""Steps that are timed, fewer where they take longer; the first of several does not count."""


@dataclass(frozen=True)
class Cost:
    """Passes from the fewest, where every image fails at once, to the most, where all are certified; `masks` is 0 for a
    defence that has none."""

    images: int
    masks: int
    fewest_passes: int
    most_passes: int
    passes_per_second: float
    fewest_seconds: float
    most_seconds: float
    table_bytes: int
    """Of the tables of masks and images."""
    peak_bytes: int | None
    """Of everything else, network and passes included, as far as the timed passes show it; None where unknown."""
    attack_seconds: float = 0.0
    """Of attacks, where every image withstands them all."""


def estimate_cost(defense: Any, images: int, plan: AttackPlan | None = None) -> Cost | None:
    """From a few timed passes over a generated image; None for a defence without a classifier."""
    if getattr(defense, "classifier", None) is None:
        return None
    image = generated_images(1, defense)
    masks, most = getattr(defense, "masks", None), images * defense.most_passes
    if masks is None:
        count = needed = 0
        fewest = images * getattr(defense, "fewest_passes", defense.most_passes)
        ready, label = _prepared(defense, image)

        def timed() -> int:
            return int(ready.certify(image, label).forwards)  # whatever a pass is to it; waits for the device
    else:
        require_memory(defense)
        count, needed = len(masks), table_bytes(masks, in_pairs=defense.most_passes > len(masks))
        fewest, engine = images * count, getattr(defense, "engine", None) or Engine()
        evaluator = Evaluator(defense.classifier, Engine(batch_size=engine.batch_size))
        keep = masks_for(defense.classifier, defense.threat, per_axis=3).keep(image.device)
        evaluator.evaluate(image, keep, Copies.unmasked(1), lambda logits, _: logits)  # settles the chunk
        zeros = torch.zeros(min(COPIES, evaluator.chunk), dtype=torch.int64)

        def timed() -> int:
            return len(evaluator.evaluate(image, keep, Copies(zeros, zeros, zeros), lambda logits, _: logits).cpu())

    seconds = least_seconds(timed)
    times = 1 / seconds, fewest * seconds, most * seconds
    cost = Cost(images, count, fewest, most, *times, needed, peak_memory(image.device))
    return cost if plan is None else replace(cost, attack_seconds=images * seconds_of_attack(defense, image, plan))


def least_seconds(passes: Callable[[], int]) -> float:
    """Of one pass, by calls that say how many they made. The first call may have things to settle, and other work on
    the machine comes in bursts and only ever adds: so neither the first nor the mean counts, but the shortest."""
    found, began = list[float](), time.perf_counter()
    while len(found) < TIMED or time.perf_counter() - began < TIMED_SECONDS:
        before = time.perf_counter()
        count = passes()
        found.append((time.perf_counter() - before) / count)
    return min(found)


def _prepared(defense: Any, image: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """The defence with some τ, since any takes as long, and its label for the image."""
    label = defense.predict(image).clamp(min=0)  # an alarm is no label
    if hasattr(defense, "with_engine"):
        defense = defense.with_engine(Measured(tau=0.0, tau_fp32=1.0, batch_size=defense.chunk))
    return defense, label


def table_bytes(masks: MaskSet, *, in_pairs: bool) -> int:
    count, (height, width) = len(masks), masks.image_size
    pairs = (BYTES_PER_PAIR if masks.alike else BYTES_PER_UNION) * count * (count + 1) // 2
    cells = BYTES_PER_CELL * (masks.union_count if in_pairs else count)
    return count * height * width + pairs * in_pairs + cells


def require_memory(defense: Any) -> None:
    """Refuse masks whose tables need more than the memory that is free, and name the most per axis that fit."""
    free, masks = free_memory(), getattr(defense, "masks", None)
    if free is None or masks is None or not hasattr(defense, "most_passes"):
        return
    threat, needs = defense.threat, partial(table_bytes, in_pairs=defense.most_passes > len(masks))
    needed = needs(masks)
    if needed <= free:
        return
    numbers = range(1, max(threat.image_size) + 1)
    fits = takewhile(lambda number: needs(covering_masks(threat, per_axis=number)) <= free, numbers)
    raise InputError(
        f"{len(masks):,} masks make up to {defense.most_passes:,} masked copies of an image, whose tables take "
        f"{needed / 1e9:.1f} GB; {free / 1e9:.1f} GB are free; per_axis {max(fits, default=0)} is the most that fits"
    )


def free_memory() -> int | None:
    """Bytes that this machine can still give; None where it does not say."""
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None


def peak_memory(device: torch.device) -> int | None:
    """Most bytes that were in use so far, on a GPU or by this process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        import resource
    except ImportError:  # Windows
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def seconds_of_attack(defense: Any, image: torch.Tensor, plan: AttackPlan) -> float:
    """Of an image that withstands: the shortest second step of each attack in its first round, times rounds and
    steps."""
    defense, label = _prepared(defense, image)
    starts, places = min(plan.restarts, CANDIDATES), plan.places
    if plan.place_search == "exhaustive":
        places = len(all_places(defense.threat)) ** defense.threat.patches
    at_once, moments, step = min(places, CANDIDATES // starts), list[float](), 0.0
    first = replace(plan, steps=2, restarts=starts, places=at_once, place_search="grid")

    def stepped(*_: int) -> None:
        if image.is_cuda:
            torch.cuda.synchronize(image.device)
        moments.append(time.perf_counter())

    for attacks in attacks_on(defense, first, stepped):
        for attack in attacks:
            attack.target = SimpleNamespace(predict=lambda images: label.expand(len(images)))  # that no patch moves
            moments.clear()
            began = time.perf_counter()
            while not moments or time.perf_counter() - began < TIMED_SECONDS:
                attack_in_turn([attack], image, label, seed=0, indices=[0])
            step += min(after - before for before, after in zip(moments[::2], moments[1::2], strict=True))
    rounds = -(-places // at_once) * -(-plan.restarts // starts)
    return rounds * plan.steps * step


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
    reports: list[StepReport] = []
    moments: list[float] = []

    def started(trainer: Trainer) -> None:
        trainers.append(trainer)
        moments.append(time.perf_counter())

    def stepped(report: StepReport) -> None:
        reports.append(report)
        moments.append(time.perf_counter())
        if len(reports) == TIMED_STEPS or moments[-1] - moments[0] > ENOUGH_SECONDS:
            raise _EnoughError

    with suppress(_EnoughError):
        train(copy.deepcopy(classifier), data, plan, on_start=started, on_step=stepped, **options)
    trainer, times = trainers[0], [after - before for before, after in pairwise(moments)]
    step, size = median(times[1:] or times), trainer.classifier.input_size
    searches = [report.search_seconds for report in reports]
    if isinstance(trainer.strategy, Memory):  # the first epoch, of which these steps are, searches most
        step -= median(searches[1:] or searches) * trainer.strategy.saved(plan.epochs)
    threat = PatchThreat(size, parse_patches(plan.mask_patch, size))
    images = 0 if validation is None else min(plan.validation_images, len(as_source(validation)))
    check = estimate_cost(named_defense("patchcleanser", trainer.classifier.eval(), threat), images)
    assert check is not None  # the defence has masks and a classifier
    steps, epochs = trainer.total_steps, plan.epochs
    fewest, most = (steps * step + epochs * each for each in (check.fewest_seconds, check.most_seconds))
    return TrainingCost(epochs, steps, step, images, fewest, most, peak_memory(trainer.accelerator.device))
