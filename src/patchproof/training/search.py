"""The paper's strategies (§4.1): masks chosen at random, by salience, or by their effect on the loss.

The worst mask of an image has the largest cross-entropy under the current classifier; ties go to the lowest index.
Searches run in eval mode without gradients and leave the classifier as it was.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn
from torch.nn import functional

from patchproof.geometry import Fields, MaskSet, inside
from patchproof.masking import (
    Copies,
    Engine,
    Evaluator,
    evaluating,
    label_range,
    require_batch,
    require_classes,
    require_labels,
)
from patchproof.settings import Ablation, Checked, GutoutTarget, Upsampling
from patchproof.training.gradcam import grad_cam, named_layer
from patchproof.types import Classifier, InputError

Images = Float[Tensor, "b c h w"]
Labels = Int64[Tensor, " b"]
Visible = Bool[Tensor, "b 1 h w"]
VisibleCopies = Bool[Tensor, "copies b 1 h w"]
Mask = Int64[Tensor, "b 1"]
"""One mask per image."""
Masks = Int64[Tensor, "b k"]
"""Several masks per image; −1 where an image has fewer."""
Losses = Float[Tensor, "b k"]


@dataclass(frozen=True)
class Search:
    """A batch of images, and the cross-entropy of its masked copies under the current classifier."""

    evaluator: Evaluator
    images: Images
    labels: Labels
    indices: Int64[Tensor, " b"] | None = None
    epoch: int = 0
    mirrored: Bool[Tensor, "b 1"] | None = None
    """For `memory`: images that are mirrored, compared with what is remembered."""
    full: bool = True
    """For `memory`: try all masks, not only those remembered as worst."""

    def losses(
        self, keep: Bool[Tensor, "n 1 h w"], first: Masks, second: Masks, *, where: Bool[Tensor, "b k"] | None = None
    ) -> Losses:
        """ℓ(F(x_b ⊙ m_first ⊙ m_second), y_b); −∞, without a pass, where `where` is False."""
        if where is None:  # torch.nonzero would wait for the device
            rows = torch.arange(len(first), device=first.device)[:, None].expand_as(first)
            copies = Copies(rows.flatten(), first.flatten(), second.flatten())
        else:
            rows, columns = torch.nonzero(where, as_tuple=True)
            copies = Copies(rows, first[rows, columns], second[rows, columns])

        def cross_entropy(logits: Tensor, part: Tensor | slice) -> Tensor:
            require_classes(self.label_range, int(logits.shape[1]))
            return functional.cross_entropy(logits, self.labels[copies.image[part]], reduction="none")

        found = self.evaluator.evaluate(self.images, keep, copies, cross_entropy)
        if where is None:
            return found.view_as(first)
        return found.new_full(first.shape, -torch.inf).index_put((rows, columns), found)

    @cached_property
    def label_range(self) -> tuple[int, int] | None:
        return label_range(self.labels)

    def every(self, count: int) -> Masks:
        """0, …, count − 1 for each image."""
        return torch.arange(count, device=self.images.device).expand(len(self.images), -1)


@dataclass
class BuiltIn(Checked):
    """Base class of the strategies in `STRATEGIES`: one image size, and one copy for each of its mask sets.

    `forwards` and `backwards` are its extra passes per image. The evaluator is kept from batch to batch, because its
    chunk is what memory has allowed so far.
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
        self, classifier: Classifier, images: Images, labels: Labels, *, indices: Labels | None = None, epoch: int = 0
    ) -> VisibleCopies:
        require_batch(images, self.mask_sets[0].image_size)  # augmented pixels may be rounded to above 1
        require_labels(labels, len(images), classes=getattr(classifier, "num_classes", None))
        if self.evaluator is None or self.evaluator.classifier is not classifier:
            self.evaluator = Evaluator(classifier, self.engine)
        self.evaluator.refresh()
        with evaluating(classifier), self.evaluator.unchanged():
            return self.copies(Search(self.evaluator, images, labels, indices, epoch))

    def copies(self, search: Search) -> VisibleCopies:
        return torch.stack([self.copy(search, masks) for masks in self.mask_sets])

    def copy(self, search: Search, masks: MaskSet) -> Visible:
        """Return what stays visible of each image in the copy for this mask set."""
        raise NotImplementedError


class NoMasks(BuiltIn):
    """none: everything stays visible."""

    def copy(self, search: Search, masks: MaskSet) -> Visible:
        return torch.ones_like(search.images[:, :1], dtype=torch.bool)


class Cutout(BuiltIn):
    """cutout (PC-Cutout): two 128×128 squares (at 224), each centred on a uniformly drawn pixel."""

    def copy(self, search: Search, masks: MaskSet) -> Visible:
        device, count = search.images.device, len(search.images)
        height, width = (round(128 / 224 * length) for length in masks.image_size)
        top, left = (torch.randint(n, (2, count), generator=self.generator) for n in masks.image_size)
        corners = top - height // 2, left - width // 2
        squares = torch.stack([*corners, torch.full_like(top, height), torch.full_like(left, width)], dim=2)
        return ~inside(squares.transpose(0, 1).to(device), masks.image_size)


@dataclass
class RandomView(BuiltIn):
    """column4 and others: random views of ablation smoothing, which show only a band or block that wraps around."""

    ablation: Ablation = "column"
    band: int = 4
    views: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self.mask_sets = self.mask_sets[:1] * self.views
        self.fields = Fields.bands(self.mask_sets[0].image_size, self.ablation, self.band)

    def copy(self, search: Search, masks: MaskSet) -> Visible:
        def drawn(seen: Bool[Tensor, "n pixels"]) -> Bool[Tensor, "b pixels"]:
            chosen = torch.randint(len(seen), (len(search.images),), generator=self.generator)
            return seen[chosen].to(search.images.device)

        return (drawn(self.fields.rows)[:, :, None] & drawn(self.fields.columns)[:, None, :])[:, None]


class RandomMasks(BuiltIn):
    """rand_k×k: two masks of the set, drawn independently and uniformly."""

    def copy(self, search: Search, masks: MaskSet) -> Visible:
        chosen = torch.randint(len(masks), (2, len(search.images)), generator=self.generator).to(search.images.device)
        return masks.keep(search.images.device)[chosen].all(dim=0)


@dataclass
class Gutout(BuiltIn):
    """gutout_k×k: twice, hide the mask position with the most Grad-CAM salience (Choi et al. 2020).

    Salience is that of the class predicted for what is still visible. With the target `label` it is that of the true
    label, and then the position of the hole tells the network the label (docs/training.md).
    """

    target: GutoutTarget = "predicted"
    layer: str | None = None
    upsampling: Upsampling = "bilinear"

    @property
    def forwards(self) -> int:
        return 2 * len(self.mask_sets)

    backwards = forwards

    def copy(self, search: Search, masks: MaskSet) -> Visible:
        every = masks.keep(search.images.device)
        keep = torch.ones_like(every[:1]).expand(len(search.images), -1, -1, -1)
        classifier: Any = search.evaluator.classifier
        labels = search.labels if self.target == "label" else None
        layer = None if self.layer is None else named_layer(classifier, self.layer)
        for _ in range(2):
            salience = grad_cam(classifier, search.images, labels, keep=keep, layer=layer, upsampling=self.upsampling)
            hidden = torch.einsum("bhw,nhw->bn", salience, (~every[:, 0]).float())
            keep = keep & every[hidden.argmax(dim=1)]
        return keep


class Greedy(BuiltIn):
    """greedy_k×k: the worst first mask, then the worst other mask given the first: 2k² − 1 passes."""

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


class Grid(BuiltIn):
    """grid_k×k: the worst of all unordered pairs of masks, including pairs of a mask with itself."""

    @property
    def forwards(self) -> int:
        return sum(len(masks) * (len(masks) + 1) // 2 for masks in self.mask_sets)

    def copy(self, search: Search, masks: MaskSet) -> Visible:
        keep = masks.keep(search.images.device)
        pairs = torch.combinations(torch.arange(len(masks), device=keep.device), with_replacement=True)
        first, second = pairs.T[:, search.every(len(pairs))]
        worst = pairs[search.losses(keep, first, second).argmax(dim=1)]
        return keep[worst[:, 0]] & keep[worst[:, 1]]


@dataclass
class MultiSizeGreedy(BuiltIn):
    """greedy: Algorithm A1 of the paper, where 3×3 masks narrow down the search among 6×6 masks.

    The copies are x ⊙ M1 ⊙ m3 and x ⊙ M11 ⊙ m6. With four children per mask that is 26 passes; if M11 lies inside M1,
    as in the paper's sets, the loss of x ⊙ M11 ⊙ M1 is that of x ⊙ M1, which is known: 25.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.coarse, self.fine = self.mask_sets
        self.made: dict[torch.device, Tensor] = {}
        # Fine masks are numbered after the coarse ones: mask i of the fine set is len(coarse) + i.
        every = (*self.coarse.blocks, *self.fine.blocks)
        self.inside = torch.tensor([[parent.contains(block) for block in every] for parent in self.coarse.blocks])
        # The fine masks that cover each coarse one: four in the paper's sets; −1 where it has fewer than others.
        children = [torch.tensor(self.fine.children(rect)) + len(self.coarse) for rect in self.coarse.blocks]
        self.children = nn.utils.rnn.pad_sequence(children, batch_first=True, padding_value=-1)
        self.ragged = bool((self.children < 0).any())
        self.nested = all(bool(self.inside[parent, found].all()) for parent, found in enumerate(children))

    @property
    def forwards(self) -> int:
        """Most passes per image; masks of unusual sizes may have fewer children than others."""
        return 2 * (len(self.coarse) + self.children.shape[1]) - int(self.nested)

    def copies(self, search: Search) -> VisibleCopies:
        return self.rounds(search)[0]

    def rounds(self, search: Search) -> tuple[Bool[Tensor, "2 b 1 h w"], Mask, Float[Tensor, "b 1"]]:
        """Algorithm A1: return the two copies, and m6 with its loss."""
        device = search.images.device
        keep, children, coarse = self.keep(device), self.children.to(device), search.every(len(self.coarse))
        # M1: the worst 3×3 mask on x.
        M1, loss = self.worst(search, 0, coarse)
        # M11: the worst of M1's 6×6 children on x.
        M11, _ = self.worst(search, 1, children[M1[:, 0]])
        # m3: the worst 3×3 mask on x ⊙ M11, where the loss of M1 is known if M11 lies inside it.
        known = torch.where(self.inside.to(device)[M1, M11] & (coarse == M1), loss, torch.nan)
        m3, _ = self.worst(search, 2, coarse, given=M11, known=known)
        # m6: the worst of m3's 6×6 children on x ⊙ M11.
        m6, loss = self.worst(search, 3, children[m3[:, 0]], given=M11)
        return torch.stack([keep[M1[:, 0]] & keep[m3[:, 0]], keep[M11[:, 0]] & keep[m6[:, 0]]]), m6, loss

    def keep(self, device: torch.device) -> Bool[Tensor, "n 1 h w"]:
        if device not in self.made:
            self.made[device] = torch.cat([self.coarse.keep(device), self.fine.keep(device)])
        return self.made[device]

    def worst(
        self, search: Search, turn: int, masks: Masks, *, given: Mask | None = None, known: Losses | None = None
    ) -> tuple[Mask, Float[Tensor, "b 1"]]:
        """Return the mask of largest loss in round `turn`, and that loss; with `given`, both masks hide pixels."""
        losses = self.losses(search, turn, masks, given, known)
        worst = losses.argmax(dim=1, keepdim=True)
        return masks.gather(1, worst), losses.gather(1, worst)

    def losses(self, search: Search, turn: int, masks: Masks, given: Mask | None, known: Losses | None) -> Losses:
        """The loss of each mask; those that are `known` (not NaN) take no pass."""
        keep, first = self.keep(masks.device), masks if given is None else given.expand_as(masks)
        if known is not None:
            return torch.where(known.isnan(), search.losses(keep, first, masks, where=known.isnan()), known)
        return search.losses(keep, first, masks, where=masks >= 0 if self.ragged else None)


@dataclass
class Memory(MultiSizeGreedy):
    """memory: `greedy` that remembers, for each image, the last loss of every mask it tried in each of the four rounds.

    An image is searched in full when it is first seen, and every `refresh` epochs. Otherwise round i tries only the
    `tries[i]` masks with the largest remembered losses; masks never tried come first. Losses given M11 are remembered
    whatever M11 was at the time. If the last round has one try, it takes no pass: that mask is part of a copy to learn
    from, so the training step reports its loss (`observe`). `mirrored` is set before a call to the images (b) that
    augmentation has mirrored.
    """

    tries: tuple[int, int, int, int] = (2, 2, 2, 2)
    refresh: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.tries) < 1:
            raise InputError(f"tries must be at least 1 in each round, not {self.tries}")
        if self.refresh < 0:
            raise InputError(f"refresh must be 0 (try all masks only in the first epoch) or more, not {self.refresh}")
        # By image: the loss of every mask alone, then of every mask given M11; NaN: never tried. The last column takes
        # losses that are not needed: of masks −1, and training losses of masks that the search has tried.
        self.table = torch.zeros(0, 2 * (len(self.coarse) + len(self.fine)) + 1)
        self.untried: Int64[Tensor, " b"] | None = None
        self.mirrored: Bool[Tensor, " b"] | None = None
        # The mask at the same place of the mirrored image.
        widths = [(len(masks), len(masks.axes[1])) for masks in self.mask_sets]
        places = [torch.arange(count).view(-1, width).flip(1).flatten() for count, width in widths]
        self.opposite = torch.cat([places[0], places[1] + len(self.coarse)])

    @property
    def forwards(self) -> int:
        """Most passes per image that was searched before."""
        most = (len(self.coarse), self.children.shape[1]) * 2
        passes = [min(pair) for pair in zip(self.tries, most, strict=True)]
        return min(super().forwards, sum(passes) - (passes[3] == 1))

    def saved(self, epochs: int) -> float:
        """Share of the passes of `greedy` that training for this many epochs saves."""
        full = math.ceil(epochs / self.refresh) if self.refresh else 1
        return (1 - full / epochs) * (1 - self.forwards / super().forwards)

    def copies(self, search: Search) -> VisibleCopies:
        self.untried = None
        if search.indices is None:  # images without an index cannot be remembered
            return super().copies(search)
        missing = max(0, int(search.indices.max()) + 1 - len(self.table))
        self.table = functional.pad(self.table.to(search.images.device), (0, 0, 0, missing), value=torch.nan)
        new = self.table[search.indices, 0].isnan()
        if self.refresh and search.epoch % self.refresh == 0:
            new = torch.ones_like(new)
        mirrored = torch.zeros_like(new) if self.mirrored is None else self.mirrored.to(new.device)
        keep = torch.ones_like(search.images[:, :1], dtype=torch.bool).repeat(2, 1, 1, 1, 1)
        self.untried = torch.full_like(search.indices, -1)
        for full in (True, False):
            rows = torch.nonzero(new == full)[:, 0]
            if len(rows):
                batch = search.images[rows], search.labels[rows], search.indices[rows]
                part = Search(search.evaluator, *batch, mirrored=mirrored[rows, None], full=full)
                keep[:, rows], m6, loss = self.rounds(part)
                self.untried[rows] = torch.where(loss.isnan(), self.columns(part, 3, m6), -1)[:, 0]
        return keep

    def worst(
        self, search: Search, turn: int, masks: Masks, *, given: Mask | None = None, known: Losses | None = None
    ) -> tuple[Mask, Float[Tensor, "b 1"]]:
        """The mask of largest loss among all masks, or among those remembered as worst."""
        if not search.full and search.indices is not None:
            losses = self.table[search.indices[:, None], self.columns(search, turn, masks)].nan_to_num(torch.inf)
            order = losses.where(masks >= 0, -torch.inf).argsort(dim=1, descending=True, stable=True)
            tried = order[:, : self.tries[turn]].sort(dim=1).values  # ties go to the lowest mask again
            masks, known = masks.gather(1, tried), None if known is None else known.gather(1, tried)
            if turn == 3 and self.tries[turn] == 1:
                return masks, torch.full_like(masks, torch.nan, dtype=losses.dtype)
        return super().worst(search, turn, masks, given=given, known=known)

    def losses(self, search: Search, turn: int, masks: Masks, given: Mask | None, known: Losses | None) -> Losses:
        losses = super().losses(search, turn, masks, given, known)
        if search.indices is not None:
            self.table[search.indices[:, None], self.columns(search, turn, masks)] = losses
        return losses

    def columns(self, search: Search, turn: int, masks: Masks) -> Masks:
        """Columns of the table for these masks, or for their mirror images; masks −1 have the last column."""
        assert search.mirrored is not None
        own = torch.where(search.mirrored, self.opposite.to(masks.device)[masks], masks)
        return torch.where(masks >= 0, own + len(self.opposite) * (turn // 2), -1)

    def observe(self, losses: Float[Tensor, "2 b"], *, indices: Labels) -> None:
        """Remember the training loss of x ⊙ M11 ⊙ m6 for images where the search did not try m6."""
        if self.untried is not None:
            self.table[indices, self.untried] = losses[1].to(self.table.dtype)

    def describe(self) -> dict[str, Any]:
        return {"tries": list(self.tries), "refresh": self.refresh}

    def state_dict(self) -> dict[str, Tensor]:
        return {"losses": self.table}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.table = state["losses"].clone()
