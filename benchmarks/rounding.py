"""Find which weights of EfficientNet-lite0 make fp16 inexact, and the gain of keeping the sum of each kernel.

    python benchmarks/rounding.py --dataset VAL --output benchmarks/results/rounding.json

VAL is a folder of class folders. Some weights are rounded to fp16, everything is computed in float32, and the result is
the standard deviation of the change of a logit over masked copies (3% patch, 6×6 masks).
"""

from __future__ import annotations

import copy

import torch
from common import open_images, paper_masks, parser, write
from torch import Tensor, nn

from patchproof.masking import network
from patchproof.models import ImageClassifier, load_classifier, rounded

KINDS = ("depthwise", "pointwise", "first", "last")


def kind(part: nn.Module) -> str | None:
    """Which of these kinds of weights a layer has, if any."""
    if isinstance(part, nn.Conv2d) and part.in_channels == 3:
        return "first"
    if isinstance(part, nn.Conv2d):
        return "depthwise" if part.groups > 1 else "pointwise"
    return "last" if isinstance(part, nn.Linear) else None


def with_rounded(classifier: ImageClassifier, kinds: tuple[str, ...], *, keep_sums: bool) -> ImageClassifier:
    changed = copy.deepcopy(classifier)
    for part in changed.modules():
        if kind(part) in kinds:
            weight: Tensor = part.weight  # type: ignore[assignment]
            cast = rounded(weight.data, torch.float16) if keep_sums and weight.ndim == 4 else weight.data
            weight.data = cast.to(torch.float16).float()
    return changed


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--dataset", required=True)
    arguments = flags.parse_args()
    classifier = load_classifier("tf_efficientnet_lite0", "zoo")
    images, _ = open_images(classifier, arguments.dataset, 192, "cpu")
    masks = paper_masks(classifier)
    first, second = torch.randint(len(masks), (2, len(images)), generator=torch.Generator().manual_seed(0))
    keep = masks.keep()[first] & masks.keep()[second]

    def logits(changed: ImageClassifier) -> Tensor:
        one_pass = network(changed)
        return torch.cat([one_pass(*part) for part in zip(images.split(32), keep.split(32), strict=True)])

    exact, changes = logits(classifier), {}
    for name in (*KINDS, "all"):
        kinds = KINDS if name == "all" else (name,)
        changes[name] = {
            way: float((logits(with_rounded(classifier, kinds, keep_sums=keep_sums)) - exact).std())
            for way, keep_sums in (("plain", False), ("sums kept", True))
        }
        print(name, changes[name], flush=True)
    write({"images": len(images), "logit change": changes}, arguments.output)


if __name__ == "__main__":
    main()
