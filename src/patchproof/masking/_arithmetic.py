"""One forward pass, in the arithmetic asked for and no other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn

from patchproof.masking._images import show
from patchproof.types import CheckError, Classifier, Precision

Network = Callable[[Tensor, Tensor | None], Tensor]
"""(images, keep) -> float32 logits; `keep` None shows everything."""

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
        raise CheckError(
            f"the classifier is in training mode ({len(training)} modules, e.g. {training[0] or 'itself'}), so its "
            "answers change; call classifier.eval() first"
        )
    dtype = AUTOCAST.get(precision)
    offered = getattr(classifier, "lowered", None) if dtype is not None or compiled else None
    lowered = None if offered is None else offered(dtype or torch.float32, compiled=compiled)

    def one_pass(images: Tensor, keep: Tensor | None) -> Tensor:
        autocast = torch.autocast(images.device.type, dtype=dtype, enabled=dtype is not None and lowered is None)
        with nullcontext() if gradients else torch.inference_mode(), tf32(precision != "fp32"), autocast:
            return show(lowered or classifier, images, keep).float()

    return one_pass
