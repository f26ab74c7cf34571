"""One forward pass, in the arithmetic asked for and no other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from jaxtyping import Float
from torch import Tensor, nn

from patchproof.types import CheckError, Classifier, Precision

Pass = Callable[[Tensor], Tensor]
"""Logits of a batch."""

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


def forward(
    classifier: Classifier,
    images: Float[Tensor, "b c h w"],
    *,
    precision: Precision = "fp32",
    compiled: bool = False,
) -> Tensor:
    """Logits in float32, computed in `precision`, without gradients, by a classifier in eval mode.

    float32 means float32 (cuDNN would use TF32 by default). bf16 and fp16 run on a copy of the network in that type
    where the classifier offers one (`lowered`), which spares the casts of autocast: on an H200 1.2 to 1.5 times as
    fast for transformers, ConvNeXt and BiT (docs/decisions/0007-engine.md). What the classifier answers is not checked
    here but by `checks`, which says in words what is wrong with it.
    """
    return passing(classifier, precision=precision, compiled=compiled)(images)


def passing(
    classifier: Classifier, *, precision: Precision = "fp32", compiled: bool = False, gradients: bool = False
) -> Pass:
    """`forward` for many batches: the mode is checked and the fast form brought up to date here, once for all of them.

    Good until the classifier changes. For a network of 300 modules that takes milliseconds, as long as a small batch
    does on a fast GPU. With `gradients`, images that ask for theirs get them.
    """
    _require_eval(classifier)
    dtype = AUTOCAST.get(precision)
    lowered = _lowered(classifier, dtype, compiled=compiled)

    def one_pass(images: Tensor) -> Tensor:
        autocast = torch.autocast(images.device.type, dtype=dtype, enabled=dtype is not None and lowered is None)
        with nullcontext() if gradients else torch.inference_mode(), tf32(precision != "fp32"), autocast:
            return (lowered or classifier)(images).float()

    return one_pass


def _require_eval(classifier: Classifier) -> None:
    if isinstance(classifier, nn.Module) and any(m.training for m in classifier.modules()):
        raise CheckError("the classifier is in training mode, so its answers change; call classifier.eval() first")


def _lowered(classifier: Classifier, dtype: torch.dtype | None, *, compiled: bool) -> Pass | None:
    """The classifier's own fast form; None if it has none, or none is asked for."""
    offered = getattr(classifier, "lowered", None)
    if offered is None or (dtype is None and not compiled):
        return None
    return offered(dtype or torch.float32, compiled=compiled)
