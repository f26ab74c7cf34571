"""Gradients of a loss over masked copies, in passes of a bounded number of copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from patchproof.masking._arithmetic import Network, tf32
from patchproof.masking._objective import Aim, Views
from patchproof.settings import Engine
from patchproof.types import InputError


@dataclass(frozen=True)
class GradientPasses:
    """Passes with gradients of at most `size` copies; with `fixed`, of few sizes."""

    networks: Callable[..., Network]
    views: Views
    engine: Engine
    size: int
    fixed: bool

    def gradient(self, images: Tensor, labels: Tensor, aim: Aim, loss: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
        """Return the loss of each candidate and its gradient in the pixels.

        The loss compares copies with each other. So if they do not fit into one pass, all logits come first, then the
        loss and its slope in them, then each pass again to carry that slope back to the pixels.
        """
        image, slot = torch.nonzero(aim.used, as_tuple=True)
        gradient = torch.zeros_like(images)
        chunks = list(zip(image.split(self.size), slot.split(self.size), strict=True))
        kept = self.traced(images, image, aim.view[image, slot]) if len(chunks) == 1 else None
        with torch.no_grad():
            logits = kept[1] if kept else torch.cat([self.logits(images[i], aim.view[i, s]) for i, s in chunks])
        with torch.enable_grad():
            table = logits.new_zeros(*aim.used.shape, logits.shape[1])
            table[image, slot] = logits.detach()
            table.requires_grad_()
            value = loss(table, labels, aim)
            (slope,) = torch.autograd.grad(value.sum(), table)
        for i, s in chunks:
            copies, answers = kept or self.traced(images, i, aim.view[i, s])
            with tf32(self.engine.fast != "fp32"):
                carried = carry(answers, copies, slope[i, s])
            # The copies of an image are adjacent: a product with 0 and 1 adds them in one fixed order.
            rows = torch.arange(int(i[0]), int(i[-1]) + 1, device=i.device)
            sums = (rows[:, None] == i).to(carried) @ carried.flatten(1)
            gradient[rows] += sums.unflatten(1, carried.shape[1:])
        return value.detach(), gradient

    def traced(self, images: Tensor, image: Tensor, view: Tensor) -> tuple[Tensor, Tensor]:
        """Return copies of images[image], and their logits with the graph to carry a slope back to the copies."""
        with torch.enable_grad():
            copies = images[image].requires_grad_()
            return copies, self.logits(copies, view)

    def logits(self, copies: Tensor, view: Tensor) -> Tensor:
        count, keep = len(copies), self.views.shown(view)
        if self.fixed:  # a quarter, a half or the whole of the largest size
            sizes = [max(1, self.size // part) for part in (4, 2, 1)]
            missing = min(size for size in sizes if size >= count) - count
            again = torch.full((missing,), count - 1, device=copies.device)
            copies, keep = torch.cat([copies, copies[again].detach()]), torch.cat([keep, keep[again]])
        compiled = self.engine.compile is True and copies.requires_grad and len(copies) == self.size
        return self.networks(compiled=compiled)(copies, keep)[:count]


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
