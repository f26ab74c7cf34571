"""Masks chosen by what they do to the classifier: the most salient ones, and the worst ones.

"Worst" is the largest cross-entropy under the current classifier, image by image, ties to the lowest mask index.
Searches run in eval mode without gradients and leave the classifier as it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations_with_replacement

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn
from torch.nn import functional

from patchproof.geometry import MaskSet
from patchproof.masking import (
    Copies,
    Engine,
    Runner,
    evaluating,
    fill_colour,
    label_range,
    occlude,
    require_classes,
)
from patchproof.training.gradcam import grad_cam
from patchproof.types import Classifier


@dataclass(frozen=True)
class Gutout:
    """gutout_k×k: twice, hide the mask position with the most Grad-CAM salience (Choi et al. 2020)."""

    masks: MaskSet
    forwards: int = 2
    backwards: int = 2

    def __call__(
        self, classifier: Classifier, images: Float[Tensor, "b c h w"], labels: Int64[Tensor, " b"]
    ) -> Bool[Tensor, "copies b 1 h w"]:
        masks, fill = self.masks.keep(images.device), fill_colour(classifier, images)
        keep = torch.ones_like(masks[:1]).expand(len(images), -1, -1, -1)
        for _ in range(2):
            keep = keep & masks[self._most_salient(classifier, occlude(images, keep, fill), labels, masks)]
        return keep[None]

    def _most_salient(
        self, classifier: Classifier, images: Tensor, labels: Tensor, masks: Bool[Tensor, "n 1 h w"]
    ) -> Int64[Tensor, " b"]:
        with evaluating(classifier):
            salience = grad_cam(classifier, images, labels)
        return torch.einsum("bhw,nhw->bn", salience, (~masks[:, 0]).float()).argmax(dim=1)


@dataclass
class Searcher:
    """Starts the searches of a strategy. It keeps its runner from batch to batch, and with it the chunk that memory has
    allowed so far."""

    engine: Engine = field(default_factory=Engine)
    runner: Runner | None = field(default=None, repr=False)

    @contextmanager
    def among(self, keep: Tensor, classifier: Classifier, images: Tensor, labels: Tensor) -> Iterator[Search]:
        """A search whose classifier is in eval mode, and in the mode it was in afterwards."""
        if self.runner is None or self.runner.classifier is not classifier:
            self.runner = Runner(classifier, self.engine)
        self.runner.refresh()
        with evaluating(classifier):
            yield Search(self.runner, images, labels, keep)


@dataclass(frozen=True)
class Search:
    """Cross-entropy of masked copies, (image × mask) chunks at a time, through the engine of certification."""

    runner: Runner
    images: Float[Tensor, "b c h w"]
    labels: Int64[Tensor, " b"]
    keep: Bool[Tensor, "n 1 h w"]

    def losses(
        self, first: Int64[Tensor, "b k"], second: Int64[Tensor, "b k"], *, where: Bool[Tensor, "b k"] | None = None
    ) -> Float[Tensor, "b k"]:
        """ℓ(F(x_b ⊙ m_first ⊙ m_second), y_b); −∞, without a pass, where not asked for."""
        if where is None:  # nothing to wait for the device for
            rows = torch.arange(len(first), device=first.device)[:, None].expand_as(first)
            return self._evaluated(Copies(rows.flatten(), first.flatten(), second.flatten())).view_as(first)
        rows, columns = torch.nonzero(where, as_tuple=True)
        found = self._evaluated(Copies(rows, first[rows, columns], second[rows, columns]))
        return found.new_full(first.shape, -torch.inf).index_put((rows, columns), found)

    def _evaluated(self, copies: Copies) -> Float[Tensor, " j"]:
        return self.runner.evaluate(self.images, self.keep, copies, self._cross_entropy)

    @cached_property
    def range(self) -> tuple[int, int] | None:
        return label_range(self.labels)

    def _cross_entropy(self, logits: Tensor, image: Tensor) -> Tensor:
        require_classes(self.range, int(logits.shape[1]))
        return functional.cross_entropy(logits, self.labels[image], reduction="none")

    def every(self, masks: Int64[Tensor, " k"]) -> Int64[Tensor, "b k"]:
        return masks.to(self.images.device).expand(len(self.images), -1)


@dataclass(frozen=True)
class Greedy:
    """greedy_k×k: the worst first mask, then the worst second one given the first (another one): 2k² − 1 passes."""

    masks: MaskSet
    searcher: Searcher = field(default_factory=Searcher)
    backwards: int = 0

    @property
    def forwards(self) -> int:
        return 2 * len(self.masks) - 1

    def __call__(
        self, classifier: Classifier, images: Float[Tensor, "b c h w"], labels: Int64[Tensor, " b"]
    ) -> Bool[Tensor, "copies b 1 h w"]:
        keep = self.masks.keep(images.device)
        with self.searcher.among(keep, classifier, images, labels) as search:
            every = search.every(torch.arange(len(self.masks)))
            first = search.losses(every, every).argmax(dim=1, keepdim=True)
            others = all_but(first, len(self.masks))
            if not others.shape[1]:
                return keep[first[:, 0]][None]
            second = others.gather(1, search.losses(first.expand_as(others), others).argmax(dim=1, keepdim=True))
        return (keep[first[:, 0]] & keep[second[:, 0]])[None]


def all_but(chosen: Int64[Tensor, "b 1"], count: int) -> Int64[Tensor, "b others"]:
    """0, …, count − 1 without the chosen one, in order."""
    others = torch.arange(count - 1, device=chosen.device)
    return others + (others >= chosen).long()


@dataclass(frozen=True)
class Grid:
    """grid_k×k: the worst of all unordered pairs of masks, a mask with itself included."""

    masks: MaskSet
    searcher: Searcher = field(default_factory=Searcher)
    backwards: int = 0

    @property
    def forwards(self) -> int:
        return len(self.masks) * (len(self.masks) + 1) // 2

    def __call__(
        self, classifier: Classifier, images: Float[Tensor, "b c h w"], labels: Int64[Tensor, " b"]
    ) -> Bool[Tensor, "copies b 1 h w"]:
        keep = self.masks.keep(images.device)
        pairs = torch.tensor(list(combinations_with_replacement(range(len(self.masks)), 2)), device=images.device)
        with self.searcher.among(keep, classifier, images, labels) as search:
            worst = pairs[search.losses(search.every(pairs[:, 0]), search.every(pairs[:, 1])).argmax(dim=1)]
        return (keep[worst[:, 0]] & keep[worst[:, 1]])[None]


@dataclass(frozen=True)
class MultiSizeGreedy:
    """greedy: Algorithm A1 of the paper, the coarse masks narrowing the search among the fine ones: 25 passes.

    M1 = worst coarse mask; M11 = worst of its children; then, with M11 in place, m3 = worst coarse mask and m6 = worst
    of its children. Copies: x ⊙ M1 ⊙ m3 and x ⊙ M11 ⊙ m6. Where M11 lies inside M1, x ⊙ M11 ⊙ M1 is x ⊙ M1, whose loss
    is known; that saves the 26th pass.
    """

    coarse: MaskSet
    fine: MaskSet
    searcher: Searcher = field(default_factory=Searcher)
    backwards: int = 0

    def __post_init__(self) -> None:
        _ = self.children  # a pair of sets without children is refused here and not in the middle of training

    @cached_property
    def children(self) -> list[tuple[int, ...]]:
        """For each coarse mask the fine ones that cover it; of one patch's 3×3 and 6×6 sets, four."""
        return [self.fine.children(rect) for rect in self.coarse.rects]

    @cached_property
    def inside(self) -> Bool[Tensor, "coarse fine"]:
        """Which fine masks lie inside which coarse ones."""
        return torch.tensor([[c.contains(f) for f in self.fine.rects] for c in self.coarse.rects])

    @property
    def forwards(self) -> int:
        """At most: masks at odd places can have fewer children than others."""
        known = all(self.inside[parent, list(children)].all() for parent, children in enumerate(self.children))
        return 2 * (len(self.coarse) + max(map(len, self.children))) - int(known)

    def __call__(
        self, classifier: Classifier, images: Float[Tensor, "b c h w"], labels: Int64[Tensor, " b"]
    ) -> Bool[Tensor, "copies b 1 h w"]:
        # Fine masks follow the coarse ones in `keep`, so mask i of the fine set is len(coarse) + i there.
        keep = torch.cat([self.coarse.keep(images.device), self.fine.keep(images.device)])
        with self.searcher.among(keep, classifier, images, labels) as search:
            every = search.every(torch.arange(len(self.coarse)))
            alone = search.losses(every, every)
            big1 = alone.argmax(dim=1, keepdim=True)
            small1 = self._worst_child(search, big1)
            big2 = self._second_coarse(search, alone, big1, small1)
            small2 = self._worst_child(search, big2, given=small1)
        pairs = ((big1, big2), (small1, small2))
        return torch.stack([keep[first[:, 0]] & keep[second[:, 0]] for first, second in pairs])

    def _worst_child(
        self, search: Search, parent: Int64[Tensor, "b 1"], *, given: Int64[Tensor, "b 1"] | None = None
    ) -> Int64[Tensor, "b 1"]:
        """The parent's child of largest loss, with the mask `given` in place if there is one."""
        rows = [torch.tensor(c) + len(self.coarse) for c in self.children]
        masks = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1).to(parent.device)[parent[:, 0]]
        first = masks if given is None else given.expand_as(masks)
        ragged = len(set(map(len, self.children))) > 1
        losses = search.losses(first, masks, where=masks >= 0 if ragged else None)
        return masks.gather(1, losses.argmax(dim=1, keepdim=True))

    def _second_coarse(
        self,
        search: Search,
        alone: Float[Tensor, "b n"],
        big1: Int64[Tensor, "b 1"],
        small1: Int64[Tensor, "b 1"],
    ) -> Int64[Tensor, "b 1"]:
        """The worst coarse mask on x ⊙ M11; with M1 that is x ⊙ M1 itself where M11 is inside M1."""
        every = search.every(torch.arange(len(self.coarse)))
        inside = self.inside.to(big1.device)[big1, small1 - len(self.coarse)]
        known = inside & (every == big1)
        losses = search.losses(small1.expand_as(every), every, where=~known)
        return torch.where(known, alone, losses).argmax(dim=1, keepdim=True)
