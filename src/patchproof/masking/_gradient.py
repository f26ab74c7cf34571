"""Gradients of a loss over masked copies, in passes of a bounded number of copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from patchproof.masking._arithmetic import tf32
from patchproof.masking._objective import Aim
from patchproof.types import InputError


def pixel_gradients(
    forward: Callable[[Tensor, Tensor], Tensor],
    images: Tensor,
    labels: Tensor,
    aim: Aim,
    loss: Callable[[Tensor, Tensor, Aim], Tensor],
    *,
    size: int,
    exact: bool,
) -> tuple[Tensor, Tensor]:
    """Return the loss of each candidate and its gradient in the pixels; forward(copies, view) gives logits.

    The loss compares copies with each other. So if they do not fit into one pass of `size`, all logits come first, then
    the loss and its slope in them, then each pass again to carry that slope back to the pixels: `exact`, without TF32.
    """
    image, slot = torch.nonzero(aim.used, as_tuple=True)
    gradient = torch.zeros_like(images)
    chunks = list(zip(image.split(size), slot.split(size), strict=True))

    def traced(i: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        """Copies, and their logits with the graph to carry a slope back to the copies."""
        with torch.enable_grad():
            copies = images[i].requires_grad_()
            return copies, forward(copies, aim.view[i, s])

    kept = traced(image, slot) if len(chunks) == 1 else None
    with torch.no_grad():
        logits = kept[1] if kept else torch.cat([forward(images[i], aim.view[i, s]) for i, s in chunks])
    with torch.enable_grad():
        table = logits.new_zeros(*aim.used.shape, logits.shape[1])
        table[image, slot] = logits.detach()
        table.requires_grad_()
        value = loss(table, labels, aim)
        (slope,) = torch.autograd.grad(value.sum(), table)
    for i, s in chunks:
        copies, answers = kept or traced(i, s)
        with tf32(not exact):
            carried = carry(answers, copies, slope[i, s])
        # The copies of an image are adjacent: a product with 0 and 1 adds them in one fixed order.
        rows = torch.arange(int(i[0]), int(i[-1]) + 1, device=i.device)
        sums = (rows[:, None] == i).to(carried) @ carried.flatten(1)
        gradient[rows] += sums.unflatten(1, carried.shape[1:])
    return value.detach(), gradient


def groups(passes: Sequence[int], size: int) -> list[int]:
    """Return how many consecutive candidates share a pass of `size` copies; one with more copies is alone."""
    found: list[int] = []
    held = 0
    for count in passes:
        if not found or held + count > size:
            found.append(0)
            held = 0
        found[-1] += 1
        held += count
    return found


def carry(logits: Tensor, copies: Tensor, slope: Tensor) -> Tensor:
    """Carry the slope in the logits back to the pixels of each copy, scaled by a power of two to be near 1 on the way.

    Where a network is sure, the slope of its cross-entropy is too small for fp16. A pixel whose slope overflows gets 0.
    """
    exponent = slope.abs().amax(dim=1, keepdim=True).frexp().exponent.clamp(-100, 100)  # float32 holds 2^±100
    size = torch.ldexp(torch.ones_like(slope[:, :1]), exponent)
    carried = None
    if logits.requires_grad:
        (carried,) = torch.autograd.grad(logits, copies, slope / size, allow_unused=True)
    if carried is None:
        raise InputError(
            "the classifier passes no gradient to its input, so a gradient attack cannot use it; "
            "leave out torch.no_grad and detach, or write an attack that needs no gradient"
        )
    return (carried * size[:, :, None, None]).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
