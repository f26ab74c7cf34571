"""How far a small sample underrates the largest change of a margin: the tail that the safety factor of τ has to cover.

    python benchmarks/tau_tail.py --model tf_efficientnet_lite0 --weights zoo --dataset VAL --output tau-tail.json

The changes between each precision and float32 are measured on many masked copies (3% patch, 6×6 masks). Then samples
like those that τ could be measured on are drawn 200 times, and the largest change of all copies is divided by what the
sample shows: its own largest change, or the mean of its largest hundredth.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import patchproof as pp
from patchproof.data import iterate_batches
from patchproof.masking import as_images, margin_changes, network
from patchproof.models import ImageClassifier, load_classifier
from patchproof.runs import preprocessing_for
from patchproof.types import Precision

DRAWS, CHUNK, SAMPLES = 200, 512, (512, 2048)
SHOWN: dict[str, Callable[[Tensor], Tensor]] = {
    "largest": lambda changes: changes.amax(),
    "mean of the largest hundredth": lambda changes: changes.topk(len(changes) // 100).values.mean(),
}


def changes(classifier: ImageClassifier, images: Tensor, copies: int, precisions: list[Precision]) -> dict[str, Tensor]:
    """|change of the margin| of random images under random pairs of masks, by precision."""
    masks = pp.covering_masks(pp.PatchThreat.square(image_size=classifier.input_size, percent=3), per_axis=6)
    keep, generator = masks.keep(images.device), torch.Generator().manual_seed(0)
    image = torch.randint(len(images), (copies,), generator=generator).to(images.device)
    first, second = torch.randint(len(masks), (2, copies), generator=generator).to(images.device)

    def logits(precision: Precision) -> Tensor:
        one_pass = network(classifier, precision=precision)
        parts = zip(image.split(CHUNK), first.split(CHUNK), second.split(CHUNK), strict=True)
        return torch.cat([one_pass(images[i], keep[a] & keep[b]) for i, a, b in parts])

    exact = logits("fp32")
    return {precision: margin_changes(logits(precision), exact).cpu() for precision in precisions}


def underrated(found: Tensor) -> dict[str, dict[str, float]]:
    """Largest of all over what a sample shows: the median and the worst of the draws."""
    generator, rows = torch.Generator().manual_seed(1), {}
    for size in SAMPLES:
        draws = [found[torch.randperm(len(found), generator=generator)[:size]] for _ in range(DRAWS)]
        for name, shown in SHOWN.items():
            ratios = found.amax() / torch.stack([shown(draw) for draw in draws])
            rows[f"{name} of {size}"] = {"median": float(ratios.median()), "worst": float(ratios.amax())}
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="small")
    parser.add_argument("--weights", required=True)
    parser.add_argument("--dataset", default="fashion-mini")
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--copies", type=int, default=16384)
    parser.add_argument("--precisions", nargs="+", default=["bf16"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, default=None)
    arguments = parser.parse_args()
    source = pp.open_dataset(arguments.dataset)
    classifier = load_classifier(arguments.model, arguments.weights).to(arguments.device).eval()
    how = preprocessing_for(classifier, source.low_resolution, classifier.input_size)
    batches = iterate_batches(source, how, range(min(arguments.images, len(source))), batch_size=100)
    images = as_images(torch.cat([batch.images for batch in batches]), arguments.device)
    report = {
        precision: {"copies": len(found), "largest": float(found.amax()), "underrated_by": underrated(found)}
        for precision, found in changes(classifier, images, arguments.copies, arguments.precisions).items()
    }
    print(json.dumps(report, indent=2))
    if arguments.output:
        arguments.output.write_text(json.dumps({arguments.model: report}, indent=2) + "\n")


if __name__ == "__main__":
    main()
