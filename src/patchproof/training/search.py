"""The paper's strategies (§4.1): masks chosen blindly, by salience, or by what they do to the loss.

"Worst" is the largest cross-entropy under the current classifier, per image, ties to the lowest mask index.
Searches run in eval mode without gradients and leave the classifier as it was.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import combinations_with_replacement
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn
from torch.nn import functional

from patchproof.geometry import Fields, MaskSet
from patchproof.masking import Copies, Engine, Evaluator, evaluating, label_range, require_classes
from patchproof.settings import Ablation, GutoutTarget, Upsampling
from patchproof.training.gradcam import grad_cam, named_layer
from patchproof.types import Classifier, InputError, require_kinds

CUTOUT_SHARE = 128 / 224
"""Side of a Cutout square as a share of the image's side (PatchCleanser: 128 at 224)."""

Visible = Bool[Tensor, "b 1 h w"]
Masks = Int64[Tensor, "b 1"]
"""A mask for each image."""


@dataclass(frozen=True)
class Search:
    """A batch, and the cross-entropy of its masked copies through the evaluator of certification."""

    evaluator: Evaluator
    images: Float[Tensor, "b c h w"]
    labels: Int64[Tensor, " b"]
    indices: Int64[Tensor, " b"] | None = None
    epoch: int = 0

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
        def cross_entropy(logits: Tensor, rows: Tensor | slice) -> Tensor:
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
        search = Search(self.evaluator, images, labels, indices, epoch)
        classes = getattr(classifier, "num_classes", None)
        if isinstance(classes, int):
            require_classes(search.label_range, classes)
        with evaluating(classifier), self.evaluator.unchanged():
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


@dataclass
class RandomView(Named):
    """Random views of ablation smoothing: `band` columns, rows or both (a block), which wrap around, and no more."""

    ablation: Ablation = "column"
    band: int = 4
    views: int = 1

    def __post_init__(self) -> None:
        self.mask_sets = self.mask_sets[:1] * self.views
        self.fields = Fields.bands(self.mask_sets[0].image_size, self.ablation, self.band)

    def copy(self, search: Search, masks: MaskSet) -> Visible:
        rows, columns = (
            seen[torch.randint(len(seen), (len(search.images),), generator=self.generator)].to(search.images.device)
            for seen in (self.fields.rows, self.fields.columns)
        )
        return (rows[:, :, None] & columns[:, None, :])[:, None]


class RandomMasks(Named):
    """rand_k×k: two masks of the set, drawn independently and uniformly."""

    def copy(self, search: Search, masks: MaskSet) -> Visible:
        chosen = torch.randint(len(masks), (2, len(search.images)), generator=self.generator).to(search.images.device)
        return masks.keep(search.images.device)[chosen].all(dim=0)


@dataclass
class Gutout(Named):
    """gutout_k×k: twice, hide the mask position with the most Grad-CAM salience (Choi et al. 2020).

    The evidence is that for the class predicted for what is still visible. With the target `label` it is that for the
    true label: then the place of the hole tells the network which label it is (docs/training.md).
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
        self.made: dict[torch.device, Tensor] = {}
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
        return self.rounds(search, partial(self.worst, search))[0]

    def rounds(
        self, search: Search, worst: Callable[..., tuple[Masks, Tensor]]
    ) -> tuple[Bool[Tensor, "2 b 1 h w"], Masks, Float[Tensor, "b 1"]]:
        """The copies; and m6 with its loss."""
        device = search.images.device
        keep, coarse = self.keep(device), search.every(len(self.coarse))
        # M1: the worst 3×3 mask on x.
        M1, loss = worst(0, coarse)
        # M11: the worst of M1's 6×6 children on x.
        M11, _ = worst(1, self.children_of(M1))
        # m3: the worst 3×3 mask on x ⊙ M11; M1 itself gives x ⊙ M1 where M11 lies inside it.
        known = self.inside.to(device)[M1, M11 - len(self.coarse)] & (coarse == M1)
        m3, _ = worst(2, coarse, given=M11, known=torch.where(known, loss, torch.nan))
        # m6: the worst of m3's 6×6 children on x ⊙ M11.
        m6, loss = worst(3, self.children_of(m3), given=M11)
        return torch.stack([keep[M1[:, 0]] & keep[m3[:, 0]], keep[M11[:, 0]] & keep[m6[:, 0]]]), m6, loss

    def keep(self, device: torch.device) -> Bool[Tensor, "n 1 h w"]:
        """Fine masks follow the coarse ones, so mask i of the fine set is len(coarse) + i here."""
        if device not in self.made:
            self.made[device] = torch.cat([self.coarse.keep(device), self.fine.keep(device)])
        return self.made[device]

    def children_of(self, parent: Masks) -> Int64[Tensor, "b k"]:
        """The fine masks that cover each coarse one; −1 where it has fewer of them than others."""
        rows = [torch.tensor(c) + len(self.coarse) for c in self.children]
        return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1).to(parent.device)[parent[:, 0]]

    def worst(
        self,
        search: Search,
        turn: int,
        masks: Int64[Tensor, "b k"],
        *,
        given: Masks | None = None,
        known: Float[Tensor, "b k"] | None = None,
    ) -> tuple[Masks, Float[Tensor, "b 1"]]:
        """The mask of largest loss in round `turn`, with the mask `given` in place if there is one; and that loss."""
        losses = self.losses(search, masks, given, known)
        worst = losses.argmax(dim=1, keepdim=True)
        return masks.gather(1, worst), losses.gather(1, worst)

    def losses(
        self, search: Search, masks: Int64[Tensor, "b k"], given: Masks | None, known: Float[Tensor, "b k"] | None
    ) -> Float[Tensor, "b k"]:
        """Losses that are `known` (not NaN) take no pass."""
        keep, first = self.keep(masks.device), masks if given is None else given.expand_as(masks)
        if known is not None:
            return torch.where(known.isnan(), search.losses(keep, first, masks, where=known.isnan()), known)
        ragged = len(set(map(len, self.children))) > 1
        return search.losses(keep, first, masks, where=masks >= 0 if ragged else None)


@dataclass
class Memory(MultiSizeGreedy):
    """memory: `greedy` that remembers, for each image, the last loss of every mask it tried in each of the four rounds.

    An image is searched in full when it is first seen, and every `refresh` epochs. Otherwise each round tries again
    those masks whose remembered losses are largest, as many as `tries` says; masks never tried come first. Losses given
    M11 are remembered whatever M11 was at the time. With one try the last round takes no pass: the mask is part of a
    copy that is learned from, and the training step tells its loss (`observe`). `mirrored` says before a call which of
    its images are mirrored.
    """

    tries: tuple[int, int, int, int] = (2, 2, 2, 2)
    refresh: int = 0

    def __post_init__(self) -> None:
        require_kinds(Memory, {"tries": self.tries, "refresh": self.refresh})
        super().__post_init__()
        if min(self.tries) < 1:
            raise InputError(f"tries must be at least 1 in each round, not {self.tries}")
        if self.refresh < 0:
            raise InputError(f"refresh must be 0 (look at all masks in the first epoch alone) or more: {self.refresh}")
        # By image: the loss of every mask alone, then of every mask given M11; NaN: never tried. The last column takes
        # what is of no use: masks −1, and training losses of masks that the search has tried.
        self.table = torch.zeros(0, 2 * (len(self.coarse) + len(self.fine)) + 1)
        self.untried: Int64[Tensor, " b"] | None = None
        self.mirrored: Bool[Tensor, " b"] | None = None
        # The mask at the same place of the mirrored image.
        widths = [(len(masks), len(masks.axes[1])) for masks in self.mask_sets]
        places = [torch.arange(count).view(-1, width).flip(1).flatten() for count, width in widths]
        self.opposite = torch.cat([places[0], places[1] + len(self.coarse)])

    @property
    def forwards(self) -> int:
        """At most, of an image searched before."""
        most = (len(self.coarse), max(map(len, self.children))) * 2
        passes = [min(pair) for pair in zip(self.tries, most, strict=True)]
        return min(super().forwards, sum(passes) - (passes[3] == 1))

    def saved(self, epochs: int) -> float:
        """Share of the passes of `greedy` that so many epochs save."""
        full = math.ceil(epochs / self.refresh) if self.refresh else 1
        return (1 - full / epochs) * (1 - self.forwards / super().forwards)

    def copies(self, search: Search) -> Bool[Tensor, "copies b 1 h w"]:
        if search.indices is None:  # nothing to remember by
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
                some = Search(search.evaluator, search.images[rows], search.labels[rows], search.indices[rows])
                columns = partial(self.columns, mirrored[rows, None])
                keep[:, rows], m6, loss = self.rounds(some, partial(self.remembered, some, columns, full=full))
                self.untried[rows] = torch.where(loss.isnan(), columns(3, m6), -1)[:, 0]
        return keep

    def remembered(
        self,
        search: Search,
        columns: Callable[[int, Tensor], Tensor],
        turn: int,
        masks: Int64[Tensor, "b k"],
        *,
        full: bool,
        given: Masks | None = None,
        known: Float[Tensor, "b k"] | None = None,
    ) -> tuple[Masks, Float[Tensor, "b 1"]]:
        """`worst` among all masks, or among those remembered as worst; either way, their losses are remembered."""
        assert search.indices is not None
        images = search.indices[:, None]
        if not full:
            losses = self.table[images, columns(turn, masks)].nan_to_num(torch.inf)
            order = losses.where(masks >= 0, -torch.inf).argsort(dim=1, descending=True, stable=True)
            tried = order[:, : self.tries[turn]].sort(dim=1).values  # ties go to the lowest mask again
            masks, known = masks.gather(1, tried), None if known is None else known.gather(1, tried)
            if turn == 3 and self.tries[turn] == 1:
                return masks, torch.full_like(masks, torch.nan, dtype=losses.dtype)
        losses = self.losses(search, masks, given, known)
        self.table[images, columns(turn, masks)] = losses
        worst = losses.argmax(dim=1, keepdim=True)
        return masks.gather(1, worst), losses.gather(1, worst)

    def columns(self, mirrored: Bool[Tensor, "b 1"], turn: int, masks: Int64[Tensor, "b k"]) -> Int64[Tensor, "b k"]:
        """Where the table holds these masks, for a mirrored image as their mirror images; masks −1 in its last
        column."""
        own = torch.where(mirrored, self.opposite.to(masks.device)[masks], masks)
        return torch.where(masks >= 0, own + len(self.opposite) * (turn // 2), -1)

    def observe(self, losses: Float[Tensor, "2 b"], *, indices: Int64[Tensor, " b"]) -> None:
        """The losses of the copies in the training step: that of x ⊙ M11 ⊙ m6 where the search did not try it."""
        if self.untried is not None:
            self.table[indices, self.untried] = losses[1].to(self.table.dtype)

    def describe(self) -> dict[str, Any]:
        return {"tries": list(self.tries), "refresh": self.refresh}

    def state_dict(self) -> dict[str, Tensor]:
        return {"losses": self.table}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.table = state["losses"].clone()
