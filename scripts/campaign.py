"""Attack certified images in earnest: double masking must hold, and two defences broken on purpose must fall.

    python scripts/campaign.py --weights runs/demo/greedy/checkpoint-last --minutes 20 --output campaign.json

The broken ones show that the attack has teeth. One leaves out a mask, so that patches at some places are hidden by
none; the other answers by the paper's wording ("none or more than one disagreed case: majority"). Each certifies images
by the usual check, and gets a quarter of the time, or less if `--enough` of them break sooner; double masking gets the
rest. Images come in a random order, the same for a seed, so that those reached in the time are a fair sample. The
counts are written after every batch. They depend on the machine's speed; with `--limit 40 --minutes 600` on a CPU they
do not. Exit code 1 if a certified image of double masking breaks, or if a broken defence does not. Such an image is
kept, with its patch and both label tables, in a folder beside the output (`campaign-broken/INDEX`).
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from patchproof.attacks import Attacked, AttackPlan, attack_in_turn, defended_attacks
from patchproof.attacks.gradient import PlaceSearch
from patchproof.cli._breaks import save_break
from patchproof.cli._manifest import manifest
from patchproof.cli._setup import Setup, checked, sample_pixels
from patchproof.cli._show import SECONDS_BETWEEN_LINES
from patchproof.cli.certify import Run
from patchproof.config import AttackConfig
from patchproof.data import iterate_batches
from patchproof.defenses import PatchCleanser
from patchproof.defenses.patchcleanser import majority_label
from patchproof.evaluation import Break
from patchproof.geometry import MaskSet
from patchproof.masking import as_images, two_mask_labels
from patchproof.records import AttackRecord, dump_json, write_atomically
from patchproof.types import PatchproofError, Precision

DOUBLE_MASKING = "double masking"
Batches = Iterable[tuple[list[int], Tensor, Tensor]]
"""(indices, images, labels)."""


class MaskRemoved(PatchCleanser):
    """Double masking with a mask set that need not cover the threat: its certificates mean nothing."""

    def __post_init__(self) -> None:
        """Nothing is checked."""


class LiteralRule(PatchCleanser):
    """Double masking that throws a confirmed label away when two copies confirm it, as the paper's wording has it."""

    def predict(self, images: Tensor) -> Tensor:
        table = two_mask_labels(self.classifier, images, self.masks, engine=self.engine)
        first = table.diagonal(dim1=1, dim2=2)
        majority = majority_label(first)
        confirmed = (table == first[:, :, None]).all(dim=2) & (first != majority[:, None])
        winner = first.gather(1, confirmed.int().argmax(dim=1, keepdim=True))[:, 0]
        return torch.where(confirmed.sum(dim=1) == 1, winner, majority)


def without_mask(masks: MaskSet, number: int) -> MaskSet:
    return MaskSet(masks.image_size, masks.rects[:number] + masks.rects[number + 1 :])


def broken_defenses(true: PatchCleanser) -> dict[str, PatchCleanser]:
    """The central mask removed; the paper's literal rule."""
    fewer = without_mask(true.masks, len(true.masks) // 2)
    return {
        "mask removed": MaskRemoved(true.classifier, fewer, true.threat, engine=true.engine),
        "literal rule": LiteralRule(true.classifier, true.masks, true.threat, engine=true.engine),
    }


@dataclass
class Tally:
    """How many certified images were attacked and how many fell."""

    seen: int = 0
    tried: int = 0
    broken: int = 0
    passes: int = 0
    queries: int = 0
    seconds: float = 0.0
    indices: list[int] = field(default_factory=list)
    """The images that were certified and attacked."""
    breaks: list[dict[str, Any]] = field(default_factory=list)


def forget(_index: int, _found: Attacked, _image: Tensor) -> None:
    """That a defence broken on purpose breaks is not worth a folder."""


def attack_certified(
    defense: PatchCleanser,
    batches: Batches,
    *,
    plan: AttackPlan,
    seed: int = 0,
    seconds: float = float("inf"),
    enough: int | None = None,
    note: Callable[[Tally], None] = lambda _tally: None,
    keep: Callable[[int, Attacked, Tensor], None] = forget,
) -> Tally:
    """Attack the images this defence certifies until the time is over, the images are, or `enough` are broken; `note`
    is told after every batch, and `keep` of every image that broke."""
    tally, started = Tally(), time.monotonic()
    attacks = defended_attacks(
        defense.classifier, defense, defense.threat, defense.masks, plan=plan, engine=defense.engine
    )
    for indices, images, labels in batches:
        rows = torch.nonzero(defense.certify(images, labels).certified)[:, 0]
        tally.seen += len(indices)
        if len(rows):
            chosen = [indices[row] for row in rows.tolist()]
            found = attack_in_turn(attacks, images[rows], labels[rows], seed=seed, indices=chosen)
            _count(tally, found, chosen)
            for row in torch.nonzero(found.broken)[:, 0].tolist():
                keep(chosen[row], found[row], images[rows][row])
        tally.seconds = round(time.monotonic() - started, 1)
        note(tally)
        if tally.seconds > seconds or (enough is not None and tally.broken >= enough):
            break
    return tally


def _count(tally: Tally, found: Attacked, indices: list[int]) -> None:
    tally.tried += len(indices)
    tally.indices += indices
    tally.broken += int(found.broken.sum())
    tally.passes += int(found.passes.sum())
    tally.queries += int(found.queries.sum())
    for row in torch.nonzero(found.broken)[:, 0].tolist():
        answers = {"index": indices[row], "label": int(found.labels[row]), "answer": int(found.predictions[row])}
        tally.breaks.append(answers | {"place": list(asdict(found.places[row]).values())})


def image_batches(run: Run, setup: Setup, size: int, *, seed: int) -> Iterator[tuple[list[int], Tensor, Tensor]]:
    order = torch.randperm(len(run.indices), generator=torch.Generator().manual_seed(seed)).tolist()
    shuffled = [run.indices[i] for i in order]
    for batch in iterate_batches(run.source, setup.preprocessing, shuffled, batch_size=size, skip_bad=True):
        if batch.indices:
            labels = run.classes[batch.labels].to(setup.device)
            yield batch.indices, as_images(batch.images, setup.device), labels


def parse_arguments(tokens: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("weights", "model", "dataset", "patch", "device", "image_size"):
        parser.add_argument(f"--{name.replace('_', '-')}", default=getattr(AttackConfig(), name))
    parser.add_argument("--precision", default=AttackConfig().precision, choices=get_args(Precision))
    parser.add_argument("--place-search", default=AttackConfig().place_search, choices=get_args(PlaceSearch))
    for name in ("masks", "steps", "restarts", "places", "seed"):
        parser.add_argument(f"--{name}", type=int, default=getattr(AttackConfig(), name))
    parser.add_argument("--step-size", type=float, default=AttackConfig().step_size)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--enough", type=int, default=5)
    parser.add_argument("--images-at-once", type=int, default=16)
    parser.add_argument("--output", type=Path, default=Path("campaign.json"))
    arguments = parser.parse_args(tokens)
    if not (arguments.minutes > 0 and math.isfinite(arguments.minutes)):
        parser.error(f"--minutes must be a positive number, not {arguments.minutes}")
    return arguments


@dataclass
class Report:
    """What is written: the settings, what was attacked, and the counts so far."""

    output: Path
    content: dict[str, Any]
    said: float = 0.0

    def note(self, name: str, tally: Tally, *, done: bool = False) -> None:
        self.content[name] = asdict(tally)
        write_atomically(self.output, dump_json(self.content))
        if done or time.monotonic() - self.said > SECONDS_BETWEEN_LINES:
            print(
                f"{name}: {tally.seen} images, {tally.tried} certified and attacked, {tally.broken} broken, "
                f"{tally.passes} passes, {tally.seconds:.0f} s",
                file=sys.stdout if done else sys.stderr,
                flush=True,
            )
            self.said = time.monotonic()


def broken_folder(arguments: argparse.Namespace) -> Path:
    return arguments.output.with_name(f"{arguments.output.stem}-broken")


def run_campaign(arguments: argparse.Namespace) -> dict[str, Any]:
    own = {name: getattr(arguments, name) for name in ("minutes", "enough", "images_at_once")}
    flags = {name: value for name, value in vars(arguments).items() if name not in own and name != "output"}
    config = AttackConfig(**flags, target="defended", only_certified=True)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    plan = AttackPlan(config.steps, config.restarts, config.places, config.step_size, config.place_search)
    run, end = Run.begin(config), time.monotonic() + 60 * arguments.minutes
    setup, drift = checked(run.setup, sample_pixels(run.source, run.setup, run.indices))
    made_with = manifest(config, setup, run.source, run.indices, drift) | {"command": "campaign"}
    report = Report(arguments.output, {"title": run.title, "campaign": own, "manifest": made_with})

    def keep(index: int, found: Attacked, image: Tensor) -> None:
        place = found.places[0]
        record = AttackRecord(
            index,
            run.source.path(index),
            int(found.labels),
            certified=True,
            attacked=False,
            place=(place.top, place.left, place.height, place.width),
            attacked_label=int(found.predictions),
        )
        save_break(broken_folder(arguments), Break(record, image, found.images[0]), setup)

    def attack(name: str, defense: PatchCleanser, seconds: float, enough: int | None = None) -> None:
        batches = image_batches(run, setup, arguments.images_at_once, seed=config.seed)
        tally = attack_certified(
            defense,
            batches,
            plan=plan,
            seed=config.seed,
            seconds=seconds,
            enough=enough,
            note=lambda tally: report.note(name, tally),
            keep=keep if name == DOUBLE_MASKING else forget,
        )
        report.note(name, tally, done=True)

    for name, defense in broken_defenses(setup.defense).items():
        attack(name, defense, 15 * arguments.minutes, arguments.enough)
    attack(DOUBLE_MASKING, setup.defense, end - time.monotonic())
    return report.content


def main(tokens: list[str] | None = None) -> int:
    arguments = parse_arguments(tokens)
    try:
        results = run_campaign(arguments)
    except (PatchproofError, OSError) as error:
        sys.exit(f"campaign: {error}")
    toothless = [name for name in ("mask removed", "literal rule") if not results[name]["broken"]]
    for name in toothless:
        print(f"{name}: nothing was broken, so this campaign says little; give it more time, steps or places")
    if results[DOUBLE_MASKING]["broken"]:
        print(f"{DOUBLE_MASKING}: certified images were broken; see {arguments.output} and {broken_folder(arguments)}")
    return 1 if toothless or results[DOUBLE_MASKING]["broken"] else 0


if __name__ == "__main__":
    sys.exit(main())
