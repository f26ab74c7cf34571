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
from patchproof.masking import Copies, Engine, Evaluator, evaluating, label_range, require_classes
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
        masks = self.masks.keep(images.device)
        keep = torch.ones_like(masks[:1]).expand(len(images), -1, -1, -1)
        for _ in range(2):
            with evaluating(classifier):
                salience = grad_cam(classifier, images, labels, keep=keep)
            hidden = torch.einsum("bhw,nhw->bn", salience, (~masks[:, 0]).float())
            keep = keep & masks[hidden.argmax(dim=1)]
        return keep[None]


@dataclass
class Searcher:
    """Starts the searches of a strategy. It keeps its evaluator from batch to batch, and with it the chunk that memory
    has allowed so far."""

    engine: Engine = field(default_factory=Engine)
    evaluator: Evaluator | None = field(default=None, repr=False)

    @contextmanager
    def among(self, keep: Tensor, classifier: Classifier, images: Tensor, labels: Tensor) -> Iterator[Search]:
        """A search whose classifier is in eval mode, and in the mode it was in afterwards."""
        if self.evaluator is None or self.evaluator.classifier is not classifier:
            self.evaluator = Evaluator(classifier, self.engine)
        self.evaluator.refresh()
        with evaluating(classifier):
            yield Search(self.evaluator, images, labels, keep)


@dataclass(frozen=True)
class Search:
    """Cross-entropy of masked copies, (image × mask) chunks at a time, through the evaluator of certification."""

    evaluator: Evaluator
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
        def cross_entropy(logits: Tensor, rows: slice) -> Tensor:
            require_classes(self.label_range, int(logits.shape[1]))
            return functional.cross_entropy(logits, self.labels[copies.image[rows]], reduction="none")

        return self.evaluator.evaluate(self.images, self.keep, copies, cross_entropy)

    @cached_property
    def label_range(self) -> tuple[int, int] | None:
        return label_range(self.labels)

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
    """greedy: Algorithm A1 of the paper, the 3×3 masks narrowing the search among the 6×6 ones: 25 passes.

    Copies: x ⊙ M1 ⊙ m3 and x ⊙ M11 ⊙ m6. Where M11 lies inside M1, x ⊙ M11 ⊙ M1 is x ⊙ M1, whose loss is known; that
    saves the 26th pass.
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
            coarse = search.every(torch.arange(len(self.coarse)))
            alone = search.losses(coarse, coarse)
            # M1: the worst 3×3 mask on x.
            M1 = alone.argmax(dim=1, keepdim=True)
            # M11: the worst of M1's 6×6 children on x.
            M11 = self._worst_child(search, M1)
            # m3: the worst 3×3 mask on x ⊙ M11; M1 itself gives x ⊙ M1 where M11 lies inside it.
            known = self.inside.to(M1.device)[M1, M11 - len(self.coarse)] & (coarse == M1)
            losses = search.losses(M11.expand_as(coarse), coarse, where=~known)
            m3 = torch.where(known, alone, losses).argmax(dim=1, keepdim=True)
            # m6: the worst of m3's 6×6 children on x ⊙ M11.
            m6 = self._worst_child(search, m3, given=M11)
        return torch.stack([keep[M1[:, 0]] & keep[m3[:, 0]], keep[M11[:, 0]] & keep[m6[:, 0]]])

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
