"""Slow, plain-Python versions of the algorithms, written from the definitions and sharing no code with the package."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations_with_replacement
from typing import Any

import torch
from torch import Tensor, nn

from patchproof.geometry import MaskSet, PatchThreat, Rect
from patchproof.masking import Measured


def measured(tau: float = 0.0, tau_fp32: float = 1e-9, **engine: Any) -> Measured:
    """An engine whose τ is known: hardly more than 0 where arithmetic is exact."""
    return Measured(tau=tau, tau_fp32=tau_fp32, **engine)


def hide(image: Tensor, rects: Sequence[Rect], fill: Sequence[float]) -> Tensor:
    """x ⊙ m, one rectangle at a time."""
    masked = image.clone()
    for rect in rects:
        for channel, colour in zip(masked, fill, strict=True):
            channel[rect.top : rect.top + rect.height, rect.left : rect.left + rect.width] = colour
    return masked


def logits_under(classifier: Any, image: Tensor, rects: Sequence[Rect]) -> list[float]:
    """F(x ⊙ m), by the classifier's own way to hide pixels if it has one."""
    masked = hide(image, rects, getattr(classifier, "fill", [0.5] * len(image)))[None]
    keep = hide(torch.ones(1, *image.shape[1:]), rects, [0.0])[None] > 0
    with torch.no_grad():
        logits = classifier.masked(masked, keep) if hasattr(classifier, "masked") else classifier(masked)
    return logits[0].tolist()


def argmax(values: Sequence[float]) -> int:
    return max(range(len(values)), key=lambda i: (values[i], -i))


def margin_of(values: Sequence[float], label: int) -> float:
    return values[label] - max(v for i, v in enumerate(values) if i != label)


def two_mask_logits(classifier: Callable[[Tensor], Tensor], image: Tensor, masks: MaskSet) -> list[list[list[float]]]:
    return [[logits_under(classifier, image, (*a, *b)) for b in masks.parts] for a in masks.parts]


def certify(table: list[list[list[float]]], label: int, *, tau: float = 0.0) -> tuple[bool, float]:
    """Whether every two-mask copy is right with a positive margin of at least tau, and the smallest margin."""
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


def predict_or_alarm(labels: Sequence[int]) -> int:
    """The label that all one-mask copies share, else −1."""
    return labels[0] if len(set(labels)) == 1 else -1


def all_patches(image_size: tuple[int, int], patch: tuple[int, int]) -> list[Rect]:
    rows, columns = image_size[0] - patch[0] + 1, image_size[1] - patch[1] + 1
    return [Rect(r, c, *patch) for r in range(rows) for c in range(columns)]


CLEAN, PATCHED, FILL = 0.25, 1.0, 0.5


class Adversary:
    """Predicts `label` if the patch is hidden, otherwise the label that `scheme` gives for the hidden pixels.

    It sees which pixels are hidden (they have the fill colour) and whether a patch pixel is visible, so it can choose
    the label of each masked copy as an all-knowing adversary would.
    """

    fill = (FILL,)

    def __init__(self, label: int, scheme: Callable[[Tensor], int]):
        self.label, self.scheme = label, scheme

    def __call__(self, images: Tensor) -> Tensor:
        logits = torch.zeros(len(images), 3)
        for logit, image in zip(logits, images[:, 0], strict=True):
            logit[self.scheme(image == FILL) if bool((image == PATCHED).any()) else self.label] = 1.0
        return logits


def random_scheme(seed: int, labels: Sequence[int]) -> Callable[[Tensor], int]:
    """An arbitrary but fixed label for every set of hidden pixels."""
    answers: dict[bytes, int] = {}
    generator = torch.Generator().manual_seed(seed)

    def answer(hidden: Tensor) -> int:
        drawn = labels[int(torch.randint(len(labels), (), generator=generator))]
        return answers.setdefault(hidden.numpy().tobytes(), drawn)

    return answer


def schemes(masks: MaskSet, label: int) -> Iterator[Callable[[Tensor], int]]:
    """Random labels; always the same wrong label; the wrong label for copies that hide the pixels of one mask."""
    wrong = (label + 1) % 3
    yield from (random_scheme(seed, (0, 1, 2)) for seed in range(8))
    yield from (random_scheme(seed, (label, wrong)) for seed in range(8))
    yield lambda hidden: wrong
    for decoy in ~masks.keep()[:, 0]:
        yield lambda hidden, decoy=decoy: wrong if bool((hidden | ~decoy).all()) else label


def patched_everywhere(threat: PatchThreat) -> Tensor:
    """A clean image with a patch at every position, or two at every two, one image for each."""
    every = combinations_with_replacement(all_patches(threat.image_size, threat.patch_sizes[0]), threat.patches)
    clean = torch.full((1, *threat.image_size), CLEAN)
    return torch.stack([hide(clean, rects, [PATCHED]) for rects in every])


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


class ExactMasking(ExactClassifier):
    """A classifier that handles hidden pixels itself: each of them adds to the logits. They must be filled already."""

    def masked(self, images: Tensor, keep: Tensor) -> Tensor:
        require_filled(self, images, keep)
        return self(images) + (~keep).sum(dim=(1, 2, 3))[:, None] * torch.arange(len(self.bias)).sub(1).float()


def require_filled(classifier: Any, images: Tensor, keep: Tensor) -> None:
    filled = torch.tensor(classifier.fill)[:, None, None].expand_as(images)
    assert torch.equal(torch.where(keep, filled, images), filled), "hidden pixels are shown"


def cross_entropy(values: Sequence[float], label: int) -> float:
    return float(torch.nn.functional.cross_entropy(torch.tensor([values]), torch.tensor([label])))


def greedy(loss: Callable[[Sequence[Rect]], float], masks: MaskSet) -> tuple[Rect, Rect]:
    """Worst first mask; worst second one among the others."""
    first = masks.rects[argmax([loss([m]) for m in masks.rects])]
    others = [m for m in masks.rects if m != first]
    return first, others[argmax([loss([first, m]) for m in others])]


def grid(loss: Callable[[Sequence[Rect]], float], masks: MaskSet) -> tuple[Rect, Rect]:
    """Worst of all unordered pairs."""
    pairs = [(a, b) for i, a in enumerate(masks.rects) for b in masks.rects[i:]]
    return pairs[argmax([loss(pair) for pair in pairs])]


def multi_size_greedy(
    loss: Callable[[Sequence[Rect]], float], coarse: MaskSet, fine: MaskSet
) -> tuple[tuple[Rect, Rect], tuple[Rect, Rect]]:
    """Algorithm A1 with every loss computed anew, where `loss` is the running maximum that the paper intends."""

    def worst_child(parent: Rect, given: Sequence[Rect]) -> Rect:
        children = [fine.rects[i] for i in fine.children(parent)]
        return children[argmax([loss([*given, c]) for c in children])]

    big1 = coarse.rects[argmax([loss([m]) for m in coarse.rects])]
    small1 = worst_child(big1, [])
    big2 = coarse.rects[argmax([loss([small1, m]) for m in coarse.rects])]
    small2 = worst_child(big2, [small1])
    return (big1, big2), (small1, small2)


class Remembering:
    """`memory` from its definition: a dictionary from (image, given M11?, mask) to the loss last seen."""

    def __init__(self, coarse: MaskSet, fine: MaskSet, *, tries: Sequence[int], refresh: int):
        self.coarse, self.fine, self.tries, self.refresh = coarse, fine, tries, refresh
        self.seen: dict[tuple[int, bool, Rect], float] = {}
        self.untried: dict[int, Rect] = {}
        self.full_passes = 2 * len(coarse)

    def search(
        self, image: int, loss: Callable[[Sequence[Rect]], float], epoch: int
    ) -> tuple[tuple[tuple[Rect, Rect], tuple[Rect, Rect]], int]:
        """The two copies, and how many passes finding them took."""
        full = (image, False, self.coarse.rects[0]) not in self.seen or (self.refresh and epoch % self.refresh == 0)
        spent = 0
        self.untried.pop(image, None)

        def worst(turn: int, masks: Sequence[Rect], given: Sequence[Rect], free: Rect | None = None) -> Rect:
            nonlocal spent
            key = [(image, bool(given), mask) for mask in masks]
            order = sorted(range(len(masks)), key=lambda i: (-self.seen.get(key[i], float("inf")), i))
            tried = range(len(masks)) if full else sorted(order[: self.tries[turn]])
            if turn == 3 and not full and self.tries[3] == 1:
                self.untried[image] = masks[order[0]]
                return masks[order[0]]
            for i in tried:
                self.seen[key[i]] = loss([*given, masks[i]])
                spent += masks[i] != free
            return masks[max(tried, key=lambda i: (self.seen[key[i]], -i))]

        def children(parent: Rect) -> list[Rect]:
            return [self.fine.rects[i] for i in self.fine.children(parent)]

        big1 = worst(0, self.coarse.rects, [])
        small1 = worst(1, children(big1), [])
        inside = big1.contains(small1)
        big2 = worst(2, self.coarse.rects, [small1], free=big1 if inside else None)
        small2 = worst(3, children(big2), [small1])
        self.full_passes = 2 * len(self.coarse) + len(children(big1)) + len(children(big2)) - inside
        return ((big1, big2), (small1, small2)), spent

    def observe(self, images: Sequence[int], losses: Sequence[float]) -> None:
        for image, loss in zip(images, losses, strict=True):
            if image in self.untried:
                self.seen[image, True, self.untried[image]] = loss


class Curved:
    """A smooth, non-linear classifier that weighs every pixel differently, so that a wrong gradient shows."""

    fill = (0.25, 0.75)

    def __init__(self, size, classes, generator):
        self.inner = torch.randn(5, 2, *size, generator=generator)
        self.outer = torch.randn(classes, 5, generator=generator)

    def __call__(self, images):
        return torch.einsum("bchw,dchw->bd", images, self.inner).tanh() @ self.outer.T


class CurvedMasking(Curved):
    """A classifier that handles hidden pixels itself: the fewer are visible, the more each counts."""

    def masked(self, images, keep):
        require_filled(self, images.detach(), keep)
        return self(images / keep.float().mean(dim=(1, 2, 3), keepdim=True))


def interval_margins(classifier: Any, lower: Tensor, upper: Tensor, label: int) -> Tensor:
    """Lower bounds of logit_y − logit_c over all images between `lower` and `upper`, layer by layer on whole maps."""

    def between(layer: nn.Module, lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
        if not isinstance(layer, nn.Conv2d | nn.Linear):  # monotone in each value
            both = torch.stack([layer(lower), layer(upper)])
            return both.amin(dim=0), both.amax(dim=0)
        call, bias = torch.func.functional_call, torch.zeros(len(layer.weight)).to(lower)
        positive, negative = {"weight": layer.weight.clamp(min=0)}, {"weight": layer.weight.clamp(max=0), "bias": bias}
        ends = (lower, upper), (upper, lower)
        low, high = (call(layer, positive, (near,)) + call(layer, negative, (far,)) for near, far in ends)
        return low, high

    mean, std = (values.to(lower.dtype).view(-1, 1, 1) for values in (classifier.mean, classifier.std))
    lower, upper = (lower - mean) / std, (upper - mean) / std
    layers = [part for part in classifier.module.modules() if not isinstance(part, nn.Sequential)]
    for layer in layers[:-1]:
        lower, upper = between(layer, lower, upper)
    difference = layers[-1].weight[label] - layers[-1].weight
    bias = layers[-1].bias[label] - layers[-1].bias
    return lower @ difference.clamp(min=0).T + upper @ difference.clamp(max=0).T + bias
