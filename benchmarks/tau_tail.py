"""How far a small sample underrates the largest change of a margin: the safety factor of τ has to cover that tail.

    python benchmarks/tau_tail.py --model tf_efficientnet_lite0 --weights zoo --dataset VAL --output tau-tail.json

The changes between each precision and float32 are measured on many masked copies (3% patch, 6×6 masks). Then samples
of the sizes that τ is measured on are drawn 200 times. The largest change of all copies is divided by the estimate from
each sample: its own largest change, or the mean of its largest hundredth.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import torch
from common import DEVICE, open_images, paper_masks, parser, write
from torch import Tensor

from patchproof.masking import margin_changes, network
from patchproof.models import ImageClassifier, load_classifier
from patchproof.types import Precision

DRAWS, CHUNK, SAMPLES = 200, 512, (512, 2048)
ESTIMATES: dict[str, Callable[[Tensor], Tensor]] = {
    "largest": lambda changes: changes.amax(),
    "mean of the largest hundredth": lambda changes: changes.topk(len(changes) // 100).values.mean(),
}


def changes(classifier: ImageClassifier, images: Tensor, copies: int, precisions: list[Precision]) -> dict[str, Tensor]:
    """|change of the margin| of random images under random pairs of masks, by precision."""
    masks = paper_masks(classifier)
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
    """The largest change of all over each estimate: the median and the worst of the draws."""
    generator, rows = torch.Generator().manual_seed(1), {}
    for size in SAMPLES:
        draws = [found[torch.randperm(len(found), generator=generator)[:size]] for _ in range(DRAWS)]
        for name, estimate in ESTIMATES.items():
            ratios = found.amax() / torch.stack([estimate(draw) for draw in draws])
            rows[f"{name} of {size}"] = {"median": float(ratios.median()), "worst": float(ratios.amax())}
    return rows


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--model", default="small")
    flags.add_argument("--weights", required=True)
    flags.add_argument("--dataset", default="fashion-mini")
    flags.add_argument("--precisions", nargs="+", default=["bf16"])
    flags.add_argument("--device", default=DEVICE)
    arguments = flags.parse_args()
    classifier = load_classifier(arguments.model, arguments.weights).to(arguments.device)
    images, _ = open_images(classifier, arguments.dataset, 1000, arguments.device)
    report = {
        precision: {"copies": len(found), "largest": float(found.amax()), "underrated_by": underrated(found)}
        for precision, found in changes(classifier, images, 16384, arguments.precisions).items()
    }
    print(json.dumps(report, indent=2))
    write({arguments.model: report}, arguments.output)


if __name__ == "__main__":
    main()
