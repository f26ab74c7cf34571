"""Attack certified images in earnest: double masking must hold, and two defences broken on purpose must fall.

    python scripts/campaign.py --weights runs/demo/greedy/checkpoint-last --limit 100 --output campaign.json

The broken ones show that the attack has teeth. One leaves out a mask, so that patches at some places are hidden by
none; the other answers by the paper's wording ("none or more than one disagreed case: majority"). Each certifies images
by the usual check, and is attacked until `--enough` of them break. Images come in a random order, the same for a seed.

Each defence is a run of its own in a folder beside the output (campaign/double-masking), with patches that broke a
certificate in `broken/INDEX`; a campaign that was stopped goes on when it is begun again. Exit code 1 if a certified
image of double masking breaks, or if a broken defence does not.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar, get_args

import torch
from torch import Tensor

import patchproof as pp
from patchproof.defenses import Assessment
from patchproof.geometry import parse_patches, parse_size
from patchproof.masking import Evaluator
from patchproof.models import checkpoint_architecture, match_labels
from patchproof.runs import Record, dump_json, read_run, write_atomically
from patchproof.types import PatchproofError, Precision

DOUBLE_MASKING, MASK_REMOVED, LITERAL_RULE = "double masking", "mask removed", "literal rule"
CHOSEN: dict[str, Any] = {"target": "defended", "only_certified": True}
FLAGS = [field for field in fields(pp.AttackPlan) if field.name not in CHOSEN]


class MaskRemoved(pp.PatchCleanser):
    """Double masking with a mask set that need not cover the threat: its certificates mean nothing."""

    name: ClassVar[str] = MASK_REMOVED

    def __post_init__(self) -> None:
        """Nothing is checked."""
        object.__setattr__(self, "evaluator", Evaluator(self.classifier, self.engine))


class LiteralRule(pp.PatchCleanser):
    """Double masking that throws a confirmed label away when two copies confirm it, as the paper's wording has it."""

    name: ClassVar[str] = LITERAL_RULE

    def predict(self, images: Tensor) -> Tensor:
        table = self.pairs(images).two_mask_labels()
        first = table.diagonal(dim1=1, dim2=2)
        majority = torch.tensor([min(labels, key=lambda y: (-labels.count(y), y)) for labels in first.tolist()])
        confirmed = (table == first[:, :, None]).all(dim=2) & (first != majority[:, None])
        winner = first.gather(1, confirmed.int().argmax(dim=1, keepdim=True))[:, 0]
        return torch.where(confirmed.sum(dim=1) == 1, winner, majority).to(images.device)

    def assess(self, images: Tensor, labels: Tensor | None = None) -> Assessment:
        predictions = self.predict(images)
        return Assessment(predictions, self.certify(images, predictions if labels is None else labels))


def without_mask(masks: pp.MaskSet, number: int) -> pp.MaskSet:
    return pp.MaskSet(masks.image_size, masks.rects[:number] + masks.rects[number + 1 :])


def broken_defenses(true: pp.PatchCleanser) -> dict[str, pp.PatchCleanser]:
    """The central mask removed; the paper's literal rule."""
    fewer = without_mask(true.masks, len(true.masks) // 2)
    return {
        MASK_REMOVED: MaskRemoved(true.classifier, fewer, true.threat, engine=true.engine),
        LITERAL_RULE: LiteralRule(true.classifier, true.masks, true.threat, engine=true.engine),
    }


class Enough(Exception):
    """So many certificates have fallen; what was found is on disk."""


def attacked(defense: Any, data: Any, plan: pp.AttackPlan, folder: Path, *, enough: float) -> Any:
    """Attack the images this defence certifies, and read the run back."""
    broken = 0

    def count(record: Record) -> None:
        nonlocal broken
        broken += record.broken
        if broken >= enough:
            raise Enough

    with contextlib.suppress(Enough):
        pp.attack(defense, data, plan, folder=folder, resume=True, on_record=count)
    return read_run(folder)


def tally(run: Any, order: list[int]) -> dict[str, Any]:
    """How many certified images were attacked and how many fell; `order` has their places in the data set."""
    tried = [record for record in run.attacks if record.attack.attacked is not None]
    return {
        "seen": len(run.good),
        "tried": len(tried),
        "broken": sum(record.broken for record in tried),
        "passes": sum(record.attack.passes for record in tried),
        "queries": sum(record.attack.queries for record in tried),
        "seconds": run.seconds,
        "indices": [order[record.index] for record in tried],
        "breaks": [
            {
                "index": order[record.index],
                "label": record.label,
                "answer": record.attack.attacked_label,
                "place": record.attack.place,
            }
            for record in tried
            if record.broken
        ],
    }


def run_campaign(arguments: argparse.Namespace) -> dict[str, Any]:
    source = pp.open_dataset(arguments.dataset, data_dir=arguments.data_dir)
    classifier = pp.load_classifier(
        arguments.model or checkpoint_architecture(Path(arguments.weights)) or "small",
        arguments.weights,
        num_classes=len(source.class_names) if arguments.weights == "random" else None,
        input_size=parse_size(arguments.image_size) if arguments.image_size else None,
    ).to(arguments.device)
    threat = pp.PatchThreat(classifier.input_size, parse_patches(arguments.patch, classifier.input_size))
    engine = pp.Engine(precision=arguments.precision, compile=arguments.compile)
    true = pp.defense("patchcleanser", classifier, threat, per_axis=arguments.masks, engine=engine)
    plan = pp.AttackPlan(**CHOSEN, **{field.name: getattr(arguments, field.name) for field in FLAGS})
    generator, classes = torch.Generator().manual_seed(plan.seed), match_labels(source.class_names, classifier)
    order = torch.randperm(len(source), generator=generator)[: arguments.limit].tolist()
    data = [(source.load(index), classes[source.labels[index]]) for index in order]
    folder = arguments.output.with_suffix("")
    found: dict[str, Any] = {}
    for name, defense in (broken_defenses(true) | {DOUBLE_MASKING: true}).items():
        enough = math.inf if name == DOUBLE_MASKING else arguments.enough
        run = attacked(defense, data, plan, folder / name.replace(" ", "-"), enough=enough)
        found[name] = tally(run, order)
        words = "{seen} images, {tried} certified and attacked, {broken} broken, {passes} passes, {seconds:.0f} s"
        print(f"{name}: {words.format(**found[name])}", flush=True)
    config = {name: str(value) if isinstance(value, Path) else value for name, value in vars(arguments).items()}
    found["manifest"] = {**run.manifest, "command": "campaign", "config": config}
    write_atomically(arguments.output, dump_json(found))
    return found


def parse_arguments(tokens: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", required=True)
    parser.add_argument("--model", help="default: the checkpoint's")
    parser.add_argument("--image-size", help="default: what the model was built for")
    parser.add_argument("--dataset", default="fashion-mini")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--limit", type=int, default=100, help="images to certify and attack")
    parser.add_argument("--patch", default="3%")
    parser.add_argument("--masks", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", default="fp32", choices=get_args(Precision))
    parser.add_argument("--compile", action="store_true")
    for field in FLAGS:
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default)
    parser.add_argument("--enough", type=int, default=5, help="broken certificates of a broken defence")
    parser.add_argument("--output", type=Path, default=Path("campaign.json"))
    return parser.parse_args(tokens)


def main(tokens: list[str] | None = None) -> int:
    arguments = parse_arguments(tokens)
    try:
        found = run_campaign(arguments)
    except (PatchproofError, OSError) as error:
        sys.exit(f"campaign: {error}")
    toothless = [name for name in (MASK_REMOVED, LITERAL_RULE) if not found[name]["broken"]]
    for name in toothless:
        print(f"{name}: nothing was broken, so this campaign says little; give it more images, steps or places")
    if found[DOUBLE_MASKING]["broken"]:
        print(f"{DOUBLE_MASKING}: certified images were broken; see {arguments.output.with_suffix('')}")
    return 1 if toothless or found[DOUBLE_MASKING]["broken"] else 0


if __name__ == "__main__":
    sys.exit(main())
