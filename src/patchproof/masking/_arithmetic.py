"""One forward pass, in exactly the arithmetic asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from patchproof.masking._images import explained, fill_colour, show
from patchproof.models import Core, only_prepares
from patchproof.types import CheckError, Classifier, Precision

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Allow or forbid TF32 in matrix products and convolutions within this context."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = allowed
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before


@contextmanager
def evaluating(classifier: Classifier) -> Iterator[None]:
    """Put the classifier in eval mode within this context; afterwards every module is in the mode it was in."""
    modules = classifier.modules() if isinstance(classifier, nn.Module) else ()
    changed = [module for module in modules if module.training]
    for module in changed:
        module.training = False
    try:
        yield
    finally:
        for module in changed:
            module.training = True


@dataclass(frozen=True)
class Network:
    """F in one arithmetic: (images, keep) -> float32 logits; without `keep`, nothing is hidden."""

    classifier: Classifier
    precision: Precision
    autocast: torch.dtype | None
    gradients: bool

    def __call__(self, images: Tensor, keep: Tensor | None) -> Tensor:
        with self._arithmetic(images):
            return show(self.classifier, images, keep).float()

    def of(self, images: Tensor, *, prepare: bool) -> Callable[[Tensor, Tensor | None], Tensor]:
        """Return (rows, keep) -> logits of images[rows]. With `prepare`, what the classifier does to images before its
        network sees them (normalising) is done once, not again for every masked copy."""
        outer: Any = self.classifier
        if not (prepare and only_prepares(outer)):
            return lambda rows, keep: self(images[rows], keep)
        with self._arithmetic(images), explained(images):
            fill, ready = outer.prepared(fill_colour(outer, images)[None])[0], outer.prepared(images)
        inner = replace(self, classifier=Core(outer, outer.module, lambda images: images, fill))
        return lambda rows, keep: inner(ready[rows], keep)

    @contextmanager
    def _arithmetic(self, images: Tensor) -> Iterator[None]:
        autocast = torch.autocast(images.device.type, dtype=self.autocast, enabled=self.autocast is not None)
        with nullcontext() if self.gradients else torch.inference_mode(), tf32(self.precision != "fp32"), autocast:
            yield


def network(
    classifier: Classifier, *, precision: Precision = "fp32", compiled: bool = False, gradients: bool = False
) -> Network:
    """Return F in eval mode, computed in `precision`, for any number of batches until the classifier changes.

    float32 means float32 (cuDNN would use TF32 by default). bf16 and fp16 run on a copy of the network in that type if
    the classifier offers one (`lowered`), which avoids autocast's casts: on an H200 1.2 to 1.5 times as fast for
    transformers, ConvNeXt and BiT (docs/decisions/0007-engine.md). With `gradients`, images that require them get them.
    """
    for name, module in classifier.named_modules() if isinstance(classifier, nn.Module) else ():
        if module.training:
            where = f" (its module {name})" if name else ""
            raise CheckError(f"the classifier is in training mode{where}; call classifier.eval() first")
    dtype = AUTOCAST.get(precision)
    lower = getattr(classifier, "lowered", None) if dtype is not None or compiled else None
    lowered = None if lower is None else lower(dtype or torch.float32, compiled=compiled)
    return Network(lowered or classifier, precision, dtype if lowered is None else None, gradients)
