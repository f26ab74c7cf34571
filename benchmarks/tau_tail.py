"""How far a small sample underrates the largest change of a gap: the tail that the safety factor of τ has to cover.

    python benchmarks/tau_tail.py --weights CHECKPOINT --output benchmarks/results/tau-tail-cpu.json

The changes between bf16 and float32 are measured on many masked copies of the embedded test images. Then samples like
those that τ could be measured on are drawn 400 times, and the largest change of all copies is divided by the sample's.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch

import patchproof as pp
from patchproof.data import iterate_batches
from patchproof.masking import as_images, label_margin, network, top_two
from patchproof.models import ImageClassifier
from patchproof.runs import preprocessing_for

ROUNDS, DRAWS, CHUNK = 12, 400, 250


def changes(classifier: ImageClassifier, images: torch.Tensor, per_axis: int) -> torch.Tensor:
    """|change of the gap| of every image (columns) under a random pair of masks, in several rounds (rows)."""
    masks = pp.covering_masks(pp.PatchThreat.square(image_size=classifier.input_size, percent=3), per_axis=per_axis)
    keep, generator = masks.keep(), torch.Generator().manual_seed(0)
    fast_pass, sure_pass = network(classifier, precision="bf16"), network(classifier)
    rounds = []
    for _ in range(ROUNDS):
        first, second = torch.randint(len(masks), (2, len(images)), generator=generator)
        copies = list(zip(images.split(CHUNK), (keep[first] & keep[second]).split(CHUNK), strict=True))
        label, gap = top_two(torch.cat([fast_pass(*part) for part in copies]))
        sure = torch.cat([sure_pass(*part) for part in copies])
        rounds.append((gap - label_margin(sure, label)).abs())
    return torch.stack(rounds)


def underrated(found: torch.Tensor) -> dict[str, dict[str, float]]:
    """Largest of all over largest of the sample: the median and the worst of the draws."""
    generator, flat = torch.Generator().manual_seed(1), found.flatten()

    def copies(count: int) -> torch.Tensor:
        return flat[torch.randint(len(flat), (count,), generator=generator)].amax()

    def few_images() -> torch.Tensor:
        return found[:4, torch.randperm(found.shape[1], generator=generator)[:32]].amax()

    samples: dict[str, Callable[[], torch.Tensor]] = {
        "4 copies of each of 32 images": few_images,
        "128 copies of different images": lambda: copies(128),
        "512 copies of different images": lambda: copies(512),
    }
    ratios = {name: flat.amax() / torch.stack([draw() for _ in range(DRAWS)]) for name, draw in samples.items()}
    return {name: {"median": float(r.median()), "worst": float(r.amax())} for name, r in ratios.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, required=True, help="checkpoint folder of a network for fashion-mini")
    parser.add_argument("--output", type=Path, default=None)
    arguments = parser.parse_args()
    source = pp.open_dataset("fashion-mini")
    classifier = pp.load_checkpoint(arguments.weights)
    preprocessing = preprocessing_for(classifier, source.low_resolution, classifier.input_size)
    batches = iterate_batches(source, preprocessing, range(len(source)), batch_size=100)
    images = as_images(torch.cat([batch.images for batch in batches]), "cpu")
    report = {}
    for per_axis in (3, 6):
        found = changes(classifier, images, per_axis)
        report[f"{per_axis}x{per_axis}"] = {
            "copies": found.numel(),
            "largest": float(found.amax()),
            "underrated_by": underrated(found),
        }
    print(json.dumps(report, indent=2))
    if arguments.output:
        arguments.output.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
