"""Fine-tune a classifier on masked copies, in memory."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64, UInt8
from torch import Tensor, nn
from torch.nn import functional

from patchproof.masking import fill_colour, occlude
from patchproof.training.strategies import MaskingStrategy
from patchproof.types import CheckError


@dataclass(frozen=True)
class Schedule:
    """SGD with momentum 0.9, learning rate warmed up over the first steps and brought to zero along a cosine."""

    epochs: int
    learning_rate: float
    batch_size: int = 64
    weight_decay: float = 5e-4

    def rate(self, progress: float) -> float:
        """Learning rate after a share of the training."""
        warm = 0.1
        if progress < warm:
            return self.learning_rate * progress / warm
        cosine = torch.cos(torch.tensor(torch.pi * (progress - warm) / (1 - warm)))
        return self.learning_rate * 0.5 * (1 + float(cosine))


@dataclass(frozen=True)
class EpochReport:
    """What one pass over the data did."""

    epoch: int
    loss: float
    seconds: float


def masked_loss(
    classifier: nn.Module, images: Tensor, labels: Tensor, keep: Bool[Tensor, "copies b 1 h w"]
) -> Float[Tensor, ""]:
    """Mean cross-entropy over the masked copies; the clean image is not in it."""
    copies = occlude(images.expand(len(keep), -1, -1, -1, -1), keep, fill_colour(classifier, images))
    return functional.cross_entropy(classifier(copies.flatten(0, 1)), labels.repeat(len(keep)))


def fit(
    classifier: nn.Module,
    pixels: UInt8[Tensor, "n c h w"],
    labels: Int64[Tensor, "n"],
    strategy: MaskingStrategy,
    *,
    schedule: Schedule,
    generator: torch.Generator,
) -> Iterator[EpochReport]:
    """Train in place, one report an epoch; the classifier is left in eval mode."""
    optimizer = torch.optim.SGD(
        classifier.parameters(), lr=0.0, momentum=0.9, weight_decay=schedule.weight_decay, nesterov=True
    )
    steps = -(-len(pixels) // schedule.batch_size)
    for epoch in range(schedule.epochs):
        started, losses = time.monotonic(), []
        for step, chosen in enumerate(torch.randperm(len(pixels), generator=generator).split(schedule.batch_size)):
            images, targets = pixels[chosen].float() / 255, labels[chosen]
            keep = strategy(classifier.eval(), images, targets)
            loss = masked_loss(classifier.train(), images, targets, keep)
            if not torch.isfinite(loss):
                raise CheckError(
                    f"the loss is {float(loss)} in epoch {epoch + 1}, step {step + 1}; lower the learning rate"
                )
            for group in optimizer.param_groups:
                group["lr"] = schedule.rate((epoch * steps + step) / (schedule.epochs * steps))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
        classifier.eval()
        yield EpochReport(epoch + 1, sum(losses) / len(losses), time.monotonic() - started)
