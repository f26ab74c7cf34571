"""Slow, plain-Python versions of the algorithms, written from the definitions and sharing no code with the package."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from patchproof.geometry import MaskSet, Rect


def hide(image: Tensor, rects: Sequence[Rect], fill: Sequence[float]) -> Tensor:
    """x ⊙ m, one pixel at a time."""
    masked = image.clone()
    for rect in rects:
        for row in range(rect.top, rect.top + rect.height):
            for column in range(rect.left, rect.left + rect.width):
                for channel in range(len(masked)):
                    masked[channel, row, column] = fill[channel]
    return masked


def logits_of(classifier: Callable[[Tensor], Tensor], image: Tensor) -> list[float]:
    return classifier(image[None])[0].tolist()


def argmax(values: Sequence[float]) -> int:
    return max(range(len(values)), key=lambda i: (values[i], -i))


def margin_of(values: Sequence[float], label: int) -> float:
    return values[label] - max(v for i, v in enumerate(values) if i != label)


def two_mask_logits(classifier: Callable[[Tensor], Tensor], image: Tensor, masks: MaskSet) -> list[list[list[float]]]:
    fill = getattr(classifier, "fill", [0.5] * len(image))
    return [[logits_of(classifier, hide(image, (a, b), fill)) for b in masks.rects] for a in masks.rects]


def certify(table: list[list[list[float]]], label: int, *, tau: float = 0.0) -> tuple[bool, float]:
    """(is every two-mask copy right, not by a tie and by at least tau; the smallest margin over all of them)."""
    cells = [cell for row in table for cell in row]
    certified = all(argmax(c) == label and margin_of(c, label) >= tau and margin_of(c, label) > 0 for c in cells)
    return certified, min(margin_of(c, label) for c in cells)


def predict(first: Sequence[int], second: Callable[[int], Sequence[int]]) -> int:
    """Algorithm 1: the first disagreeing copy, in mask order, that its second round confirms; else the majority."""
    votes = Counter(first)
    majority = min(label for label, count in votes.items() if count == max(votes.values()))
    for mask, label in enumerate(first):
        if label != majority and all(other == label for other in second(mask)):
            return label
    return majority


def predict_as_printed(first: Sequence[int], second: Callable[[int], Sequence[int]]) -> int:
    """The paper's wording taken literally ("none or more than one disagreed case → majority"): unsound."""
    votes = Counter(first)
    majority = min(label for label, count in votes.items() if count == max(votes.values()))
    confirmed = [own for m, own in enumerate(first) if own != majority and all(o == own for o in second(m))]
    return confirmed[0] if len(confirmed) == 1 else majority


def all_patches(image_size: tuple[int, int], patch: tuple[int, int]) -> list[Rect]:
    rows, columns = image_size[0] - patch[0] + 1, image_size[1] - patch[1] + 1
    return [Rect(r, c, *patch) for r in range(rows) for c in range(columns)]


class ExactClassifier:
    """Integer weights on quarter-valued pixels: float32 arithmetic without rounding, so equal means equal."""

    def __init__(self, image_size: tuple[int, int], classes: int, generator: torch.Generator, channels: int = 2):
        shape = (classes, channels, *image_size)
        self.weight = torch.randint(-3, 4, shape, generator=generator).float()
        self.bias = torch.randint(-4, 5, (classes,), generator=generator).float()
        self.fill = (0.25, 0.75)[:channels]
        self.calls = 0

    def __call__(self, images: Tensor) -> Tensor:
        self.calls += len(images)
        return torch.einsum("bchw,kchw->bk", images, self.weight) + self.bias


def cross_entropy(values: Sequence[float], label: int) -> float:
    return float(torch.nn.functional.cross_entropy(torch.tensor([values]), torch.tensor([label])))


def _argmax_first(losses: Sequence[float]) -> int:
    return max(range(len(losses)), key=lambda i: (losses[i], -i))


def greedy(loss: Callable[[Sequence[Rect]], float], masks: MaskSet) -> tuple[Rect, Rect]:
    """Worst first mask; worst second one among the others."""
    first = masks.rects[_argmax_first([loss([m]) for m in masks.rects])]
    others = [m for m in masks.rects if m != first]
    return first, others[_argmax_first([loss([first, m]) for m in others])]


def grid(loss: Callable[[Sequence[Rect]], float], masks: MaskSet) -> tuple[Rect, Rect]:
    """Worst of all unordered pairs."""
    pairs = [(a, b) for i, a in enumerate(masks.rects) for b in masks.rects[i:]]
    return pairs[_argmax_first([loss(pair) for pair in pairs])]


def multi_size_greedy(
    loss: Callable[[Sequence[Rect]], float], coarse: MaskSet, fine: MaskSet
) -> tuple[tuple[Rect, Rect], tuple[Rect, Rect]]:
    """Algorithm A1, every loss computed anew, `loss` read as the running maximum it was meant to be."""

    def worst_child(parent: Rect, given: Sequence[Rect]) -> Rect:
        children = [fine.rects[i] for i in fine.children(parent)]
        return children[_argmax_first([loss([*given, c]) for c in children])]

    big1 = coarse.rects[_argmax_first([loss([m]) for m in coarse.rects])]
    small1 = worst_child(big1, [])
    big2 = coarse.rects[_argmax_first([loss([small1, m]) for m in coarse.rects])]
    small2 = worst_child(big2, [small1])
    return (big1, big2), (small1, small2)


class Curved:
    """Smooth, not linear, different in every pixel: a wrong gradient shows."""

    fill = (0.25, 0.75)

    def __init__(self, size, classes, generator):
        self.inner = torch.randn(5, 2, *size, generator=generator)
        self.outer = torch.randn(classes, 5, generator=generator)

    def __call__(self, images):
        return torch.einsum("bchw,dchw->bd", images, self.inner).tanh() @ self.outer.T
