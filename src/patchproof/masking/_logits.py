"""What is read off logits: the label, and by how much it leads."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from patchproof.types import InputError


def top_two(logits: Float[Tensor, "j classes"]) -> tuple[Int64[Tensor, " j"], Float[Tensor, " j"]]:
    """The label (ties: the smallest) and the gap to the runner-up."""
    label = logits.argmax(dim=1)
    return label, label_margin(logits, label)


def label_margin(logits: Float[Tensor, "j *k classes"], labels: Int64[Tensor, " j"]) -> Float[Tensor, " j *k"]:
    """Logit of the label minus the largest other one: negative when another label wins."""
    index = labels.view(-1, *[1] * (logits.ndim - 1)).expand(*logits.shape[:-1], 1)
    rest = logits.scatter(-1, index, -torch.inf).amax(dim=-1)
    return logits.gather(-1, index)[..., 0] - rest


def label_range(labels: Int64[Tensor, " b"]) -> tuple[int, int] | None:
    """The smallest and the largest label, read once so that checks need no further synchronisation."""
    if not len(labels):
        return None
    smallest, largest = torch.stack(labels.aminmax()).tolist()
    return smallest, largest


def require_classes(labels: tuple[int, int] | None, classes: int) -> None:
    """Refuse labels that are no output of the classifier."""
    if labels is not None and not 0 <= labels[0] <= labels[1] < classes:
        raise InputError(
            f"labels run from {labels[0]} to {labels[1]}, but the classifier has the outputs 0 to {classes - 1}"
        )
