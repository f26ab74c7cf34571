"""One forward pass, in the arithmetic asked for and no other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from patchproof.masking._images import explained, fill_colour, show
from patchproof.models import Core, only_prepares
from patchproof.types import CheckError, Classifier, Precision

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Allow TF32 in products and convolutions here, or forbid it; afterwards as before."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = allowed
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before


@contextmanager
def evaluating(classifier: Classifier) -> Iterator[None]:
    """In eval mode here, and afterwards every module in the mode it was in."""
    modules = list(classifier.modules()) if isinstance(classifier, nn.Module) else []
    before = [module.training for module in modules]
    for module in modules:
        module.training = False
    try:
        yield
    finally:
        for module, training in zip(modules, before, strict=True):
            module.training = training


@dataclass(frozen=True)
class Network:
    """F in one arithmetic: (images, keep) -> float32 logits; `keep` None shows everything."""

    classifier: Classifier
    precision: Precision
    autocast: torch.dtype | None
    gradients: bool

    def __call__(self, images: Tensor, keep: Tensor | None) -> Tensor:
        with self._arithmetic(images):
            return show(self.classifier, images, keep).float()

    def of(self, images: Tensor) -> Callable[[Tensor, Tensor | None], Tensor]:
        """(rows, keep) -> logits of images[rows]: what the classifier does to images before its network sees them is
        done once, not again for every masked copy."""
        inner: Any = self.classifier
        ready = images
        if only_prepares(inner):
            with self._arithmetic(images), explained(images):
                inner, ready = Core(inner, fill_colour(inner, images)), inner.prepared(images)

        def copies(rows: Tensor, keep: Tensor | None) -> Tensor:
            with self._arithmetic(images):
                return show(inner, ready[rows], keep).float()

        return copies

    @contextmanager
    def _arithmetic(self, images: Tensor) -> Iterator[None]:
        autocast = torch.autocast(images.device.type, dtype=self.autocast, enabled=self.autocast is not None)
        with nullcontext() if self.gradients else torch.inference_mode(), tf32(self.precision != "fp32"), autocast:
            yield


def network(
    classifier: Classifier, *, precision: Precision = "fp32", compiled: bool = False, gradients: bool = False
) -> Network:
    """F in eval mode, computed in `precision`, for many batches: good until the classifier changes.

    float32 means float32 (cuDNN would use TF32 by default). bf16 and fp16 run on a copy of the network in that type
    where the classifier offers one (`lowered`), which avoids autocast's casts: on an H200 1.2 to 1.5 times as fast for
    transformers, ConvNeXt and BiT (docs/decisions/0007-engine.md). With `gradients`, images that require them get them.
    """
    training = (
        [name for name, m in classifier.named_modules() if m.training] if isinstance(classifier, nn.Module) else []
    )
    if training:
        count = f"{len(training)} module{'' if len(training) == 1 else 's'}"
        raise CheckError(
            f"the classifier is in training mode ({count}, e.g. {training[0] or 'itself'}), so its answers change; "
            "call classifier.eval() first"
        )
    dtype = AUTOCAST.get(precision)
    offered = getattr(classifier, "lowered", None) if dtype is not None or compiled else None
    lowered = None if offered is None else offered(dtype or torch.float32, compiled=compiled)
    return Network(lowered or classifier, precision, dtype if lowered is None else None, gradients)
