"""The paper's strategies (§4.1): masks chosen blindly, by salience, or by what they do to the loss.

"Worst" is the largest cross-entropy under the current classifier, per image, ties to the lowest mask index.
Searches run in eval mode without gradients and leave the classifier as it was.
"""

from __future__ import annotations

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
from patchproof.types import Classifier, InputError

CUTOUT_SHARE = 128 / 224
"""Side of a Cutout square as a share of the image's side (PatchCleanser: 128 at 224)."""

Visible = Bool[Tensor, "b 1 h w"]


@dataclass(frozen=True)
class Search:
    """A batch, and the cross-entropy of its masked copies through the evaluator of certification."""

    evaluator: Evaluator
    images: Float[Tensor, "b c h w"]
    labels: Int64[Tensor, " b"]

    def losses(
        self,
        keep: Bool[Tensor, "n 1 h w"],
        first: Int64[Tensor, "b k"],
        second: Int64[Tensor, "b k"],
        *,
        where: Bool[Tensor, "b k"] | None = None,
    ) -> Float[Tensor, "b k"]:
        """ℓ(F(x_b ⊙ m_first ⊙ m_second), y_b); −∞, without a pass, where not asked for."""
        if where is None:  # nothing to wait for the device for
            rows = torch.arange(len(first), device=first.device)[:, None].expand_as(first)
            return self._evaluated(keep, Copies(rows.flatten(), first.flatten(), second.flatten())).view_as(first)
        rows, columns = torch.nonzero(where, as_tuple=True)
        found = self._evaluated(keep, Copies(rows, first[rows, columns], second[rows, columns]))
        return found.new_full(first.shape, -torch.inf).index_put((rows, columns), found)

    def _evaluated(self, keep: Bool[Tensor, "n 1 h w"], copies: Copies) -> Float[Tensor, " j"]:
        def cross_entropy(logits: Tensor, rows: slice) -> Tensor:
            require_classes(self.label_range, int(logits.shape[1]))
            return functional.cross_entropy(logits, self.labels[copies.image[rows]], reduction="none")

        return self.evaluator.evaluate(self.images, keep, copies, cross_entropy)

    @cached_property
    def label_range(self) -> tuple[int, int] | None:
        return label_range(self.labels)

    def every(self, count: int) -> Int64[Tensor, "b count"]:
        """0, …, count − 1 for each image."""
        return torch.arange(count, device=self.images.device).expand(len(self.images), -1)


@dataclass
class Named:
    """A strategy of `STRATEGIES`: no memory, images of one size, one copy for each of its mask sets.

    `forwards` and `backwards` are its extra passes per image. The evaluator is kept from batch to batch, and with it
    the chunk that memory has allowed so far.
    """

    mask_sets: tuple[MaskSet, ...]
    generator: torch.Generator
    engine: Engine
    evaluator: Evaluator | None = field(default=None, init=False, repr=False)

    @property
    def forwards(self) -> int:
        return 0

    @property
    def backwards(self) -> int:
        return 0

    def __call__(
        self,
        classifier: Classifier,
        images: Float[Tensor, "b c h w"],
        labels: Int64[Tensor, " b"],
        *,
        indices: Int64[Tensor, " b"] | None = None,
        epoch: int = 0,
    ) -> Bool[Tensor, "copies b 1 h w"]:
        size, expected = tuple(images.shape[-2:]), self.mask_sets[0].image_size
        if size != expected:
            raise InputError(f"the images are {size}, the strategy is for {expected}")
        if self.evaluator is None or self.evaluator.classifier is not classifier:
            self.evaluator = Evaluator(classifier, self.engine)
        self.evaluator.refresh()
        search = Search(self.evaluator, images, labels)
        classes = getattr(classifier, "num_classes", None)
        if isinstance(classes, int):
            require_classes(search.label_range, classes)
        with evaluating(classifier):
            return self.copies(search)

    def copies(self, search: Search) -> Bool[Tensor, "copies b 1 h w"]:
        return torch.stack([self.copy(search, masks) for masks in self.mask_sets])

    def copy(self, search: Search, masks: MaskSet) -> Visible:
        """What stays visible of each image in the copy that these masks are for."""
        raise NotImplementedError


class NoMasks(Named):
    """Everything stays visible."""

    def copy(self, search: Search, masks: MaskSet) -> Visible:
        return torch.ones_like(search.images[:, :1], dtype=torch.bool)


class Cutout(Named):
    """PC-Cutout: two squares of 128×128 (at 224), each centred on a pixel drawn uniformly; they may leave the image."""

    def copy(self, search: Search, masks: MaskSet) -> Visible:
        def hidden(length: int) -> Bool[Tensor, "squares b n"]:
            """Pixels of one axis that each square hides: [centre − side//2, … + side)."""
            side = round(CUTOUT_SHARE * length)
            centre = torch.randint(length, (2, len(search.images), 1), generator=self.generator)
            offset = torch.arange(length) - (centre - side // 2)
            return ((offset >= 0) & (offset < side)).to(search.images.device)

        rows, columns = map(hidden, masks.image_size)
        return ~(rows[..., :, None] & columns[..., None, :]).any(dim=0)[:, None]


class RandomMasks(Named):
    """rand_k×k: two masks of the set, drawn independently and uniformly."""

    def copy(self, search: Search, masks: MaskSet) -> Visible:
        chosen = torch.randint(len(masks), (2, len(search.images)), generator=self.generator).to(search.images.device)
        return masks.keep(search.images.device)[chosen].all(dim=0)


class Gutout(Named):
    """gutout_k×k: twice, hide the mask position with the most Grad-CAM salience (Choi et al. 2020)."""

    @property
    def forwards(self) -> int:
        return 2 * len(self.mask_sets)

    backwards = forwards

    def copy(self, search: Search, masks: MaskSet) -> Visible:
        every = masks.keep(search.images.device)
        keep = torch.ones_like(every[:1]).expand(len(search.images), -1, -1, -1)
        for _ in range(2):
            salience = grad_cam(search.evaluator.classifier, search.images, search.labels, keep=keep)
            hidden = torch.einsum("bhw,nhw->bn", salience, (~every[:, 0]).float())
            keep = keep & every[hidden.argmax(dim=1)]
        return keep


class Greedy(Named):
    """greedy_k×k: the worst first mask, then the worst second one given the first (another one): 2k² − 1 passes."""

    @property
    def forwards(self) -> int:
        return sum(2 * len(masks) - 1 for masks in self.mask_sets)

    def copy(self, search: Search, masks: MaskSet) -> Visible:
        keep, every = masks.keep(search.images.device), search.every(len(masks))
        first = search.losses(keep, every, every).argmax(dim=1, keepdim=True)
        if len(masks) == 1:
            return keep[first[:, 0]]
        others = every[:, :-1] + (every[:, :-1] >= first)  # all but the first, in order
        second = others.gather(1, search.losses(keep, first.expand_as(others), others).argmax(dim=1, keepdim=True))
        return keep[first[:, 0]] & keep[second[:, 0]]


class Grid(Named):
    """grid_k×k: the worst of all unordered pairs of masks, a mask with itself included."""

    @property
    def forwards(self) -> int:
        return sum(len(masks) * (len(masks) + 1) // 2 for masks in self.mask_sets)

    def copy(self, search: Search, masks: MaskSet) -> Visible:
        keep = masks.keep(search.images.device)
        pairs = torch.tensor(list(combinations_with_replacement(range(len(masks)), 2)), device=keep.device)
        first, second = pairs.T[:, search.every(len(pairs))]
        worst = pairs[search.losses(keep, first, second).argmax(dim=1)]
        return keep[worst[:, 0]] & keep[worst[:, 1]]


@dataclass
class MultiSizeGreedy(Named):
    """greedy: Algorithm A1 of the paper, the 3×3 masks narrowing the search among the 6×6 ones: 25 passes.

    Copies: x ⊙ M1 ⊙ m3 and x ⊙ M11 ⊙ m6. Where M11 lies inside M1, x ⊙ M11 ⊙ M1 is x ⊙ M1, whose loss is known; that
    saves the 26th pass.
    """

    def __post_init__(self) -> None:
        self.coarse, self.fine = self.mask_sets
        # For each coarse mask the fine ones that cover it; of one patch's 3×3 and 6×6 sets, four.
        self.children = [self.fine.children(rect) for rect in self.coarse.blocks]
        # [coarse, fine]: which fine masks lie inside which coarse ones.
        self.inside = torch.tensor([[c.contains(f) for f in self.fine.blocks] for c in self.coarse.blocks])

    @property
    def forwards(self) -> int:
        """At most: masks at odd places can have fewer children than others."""
        known = all(self.inside[parent, list(children)].all() for parent, children in enumerate(self.children))
        return 2 * (len(self.coarse) + max(map(len, self.children))) - int(known)

    def copies(self, search: Search) -> Bool[Tensor, "copies b 1 h w"]:
        # Fine masks follow the coarse ones in `keep`, so mask i of the fine set is len(coarse) + i there.
        device = search.images.device
        keep, coarse = torch.cat([self.coarse.keep(device), self.fine.keep(device)]), search.every(len(self.coarse))
        alone = search.losses(keep, coarse, coarse)
        # M1: the worst 3×3 mask on x.
        M1 = alone.argmax(dim=1, keepdim=True)
        # M11: the worst of M1's 6×6 children on x.
        M11 = self._worst_child(search, keep, M1)
        # m3: the worst 3×3 mask on x ⊙ M11; M1 itself gives x ⊙ M1 where M11 lies inside it.
        known = self.inside.to(device)[M1, M11 - len(self.coarse)] & (coarse == M1)
        losses = search.losses(keep, M11.expand_as(coarse), coarse, where=~known)
        m3 = torch.where(known, alone, losses).argmax(dim=1, keepdim=True)
        # m6: the worst of m3's 6×6 children on x ⊙ M11.
        m6 = self._worst_child(search, keep, m3, given=M11)
        return torch.stack([keep[M1[:, 0]] & keep[m3[:, 0]], keep[M11[:, 0]] & keep[m6[:, 0]]])

    def _worst_child(
        self, search: Search, keep: Tensor, parent: Int64[Tensor, "b 1"], *, given: Int64[Tensor, "b 1"] | None = None
    ) -> Int64[Tensor, "b 1"]:
        """The parent's child of largest loss, with the mask `given` in place if there is one."""
        rows = [torch.tensor(c) + len(self.coarse) for c in self.children]
        masks = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1).to(parent.device)[parent[:, 0]]
        first = masks if given is None else given.expand_as(masks)
        ragged = len(set(map(len, self.children))) > 1
        losses = search.losses(keep, first, masks, where=masks >= 0 if ragged else None)
        return masks.gather(1, losses.argmax(dim=1, keepdim=True))
