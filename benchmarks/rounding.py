"""Which weights of EfficientNet-lite0 cost fp16 its exactness, and what keeping the sum of each kernel gains.

    python benchmarks/rounding.py --dataset VAL --output benchmarks/results/rounding.json

VAL is a folder of class folders. Some weights are rounded to fp16, everything is computed in float32, and the standard
deviation of the change of a logit over masked copies (3% patch, 6×6 masks) is noted.
"""

from __future__ import annotations

import argparse
import copy
import json
from pathlib import Path

import torch
from torch import Tensor, nn

import patchproof as pp
from patchproof.data import iterate_batches, spread_indices
from patchproof.masking import as_images, network
from patchproof.models import ImageClassifier, load_classifier, rounded
from patchproof.runs import preprocessing_for


def kind(part: nn.Module) -> str | None:
    """Which kind of weights a layer has."""
    if isinstance(part, nn.Conv2d):
        return "first" if part.in_channels == 3 else "depthwise" if part.groups > 1 else "pointwise"
    return "last" if isinstance(part, nn.Linear) else None


def with_rounded(classifier: ImageClassifier, kinds: set[str], *, keep_sums: bool) -> ImageClassifier:
    changed = copy.deepcopy(classifier)
    for part in changed.modules():
        if kind(part) in kinds:
            weight: Tensor = part.weight  # type: ignore[assignment]
            cast = rounded(weight.data, torch.float16) if keep_sums and weight.ndim == 4 else weight.data
            weight.data = cast.to(torch.float16).float()
    return changed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", required=True)
    parser.add_argument("--images", type=int, default=192)
    parser.add_argument("--output", type=Path, default=None)
    arguments = parser.parse_args()
    source, classifier = pp.open_dataset(arguments.dataset), load_classifier("tf_efficientnet_lite0", "zoo").eval()
    how = preprocessing_for(classifier, source.low_resolution, classifier.input_size)
    batches = iterate_batches(source, how, spread_indices(source, arguments.images), batch_size=64)
    images = as_images(torch.cat([batch.images for batch in batches]), "cpu")
    masks = pp.covering_masks(pp.PatchThreat.square(image_size=classifier.input_size, percent=3), per_axis=6)
    first, second = torch.randint(len(masks), (2, len(images)), generator=torch.Generator().manual_seed(0))
    keep = masks.keep()[first] & masks.keep()[second]

    def logits(changed: ImageClassifier) -> Tensor:
        one_pass = network(changed)
        return torch.cat([one_pass(*part) for part in zip(images.split(32), keep.split(32), strict=True)])

    exact, report = logits(classifier), {}
    every = {"depthwise", "pointwise", "first", "last"}
    for name in ("depthwise", "pointwise", "first", "last", "all"):
        kinds = every if name == "all" else {name}
        ways = {"plain": False, "sums kept": True}
        report[name] = {
            way: float((logits(with_rounded(classifier, kinds, keep_sums=keep_sums)) - exact).std())
            for way, keep_sums in ways.items()
        }
        print(name, report[name], flush=True)
    if arguments.output:
        arguments.output.write_text(json.dumps({"images": len(images), "logit change": report}, indent=2) + "\n")


if __name__ == "__main__":
    main()
