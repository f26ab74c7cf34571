"""Masking strategies: which masked copies of a batch a classifier is trained on (the paper's §4.1).

A strategy only chooses; `loop.py` applies what it chose. "Worst" is the largest cross-entropy under the current
classifier, image by image, ties to the lowest mask index. Searches run in eval mode without gradients and leave the
classifier as it was.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations_with_replacement
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn
from torch.nn import functional

from patchproof.geometry import MaskSet, PatchThreat, covering_masks
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
from patchproof.types import Classifier, InputError, Size

CUTOUT_SHARE = 128 / 224
"""Side of a Cutout square as a share of the image's side (PatchCleanser: 128 at 224)."""

TRAINING_PERCENT = 3.0
"""The paper trains with the masks of the 3% patch (100 and 69 pixels at 224), whatever patch it certifies."""

MaskPair = tuple[MaskSet, MaskSet]
"""A coarse and a fine mask set: 3×3 and 6×6 in the paper."""


@runtime_checkable
class MaskingStrategy(Protocol):
    """Looks at a batch and the current classifier, and says what stays visible in each copy to train on."""

    @property
    def forwards(self) -> int:
        """Extra forward passes an image."""
        ...

    @property
    def backwards(self) -> int:
        """Extra backward passes an image."""
        ...

    def __call__(
        self, classifier: Classifier, images: Float[Tensor, "b c h w"], labels: Int64[Tensor, " b"]
    ) -> Bool[Tensor, "copies b 1 h w"]: ...


def training_masks(image_size: Size) -> MaskPair:
    """The 3×3 and 6×6 sets of the 3% patch at this size: 100 and 69 pixels at 224, 12 and 8 at 28."""
    threat = PatchThreat.square(image_size=image_size, percent=TRAINING_PERCENT)
    return covering_masks(threat, per_axis=3), covering_masks(threat, per_axis=6)


def masking_strategy(
    name: str,
    *,
    image_size: Size,
    generator: torch.Generator,
    masks: MaskPair | None = None,
    engine: Engine | None = None,
) -> MaskingStrategy:
    """The strategy of that name (`STRATEGIES`); all its randomness comes from `generator`."""
    require_strategy(name)
    pair = masks or training_masks(image_size)
    if any(m.image_size != image_size for m in pair):
        raise InputError(f"the masks are for images of {[m.image_size for m in pair]}, not {image_size}")
    return Checked(STRATEGIES[name].build(Ingredients(image_size, pair, generator, engine or Engine())), image_size)


def require_strategy(name: str) -> None:
    """Refuse an unknown name, naming the nearest known one."""
    if name not in STRATEGIES:
        near = difflib.get_close_matches(name, STRATEGIES, n=1)
        hint = f"did you mean `{near[0]}`?" if near else f"known are {', '.join(STRATEGIES)}"
        raise InputError(f"unknown masking strategy `{name}`; {hint}")


@dataclass(frozen=True)
class Ingredients:
    """What a strategy can be made of."""

    image_size: Size
    masks: MaskPair
    generator: torch.Generator
    engine: Engine


@dataclass(frozen=True)
class Checked:
    """Any strategy, its input and its answer checked: images of the right size, a bool for each pixel of each copy."""

    strategy: MaskingStrategy
    image_size: Size

    @property
    def forwards(self) -> int:
        return self.strategy.forwards

    @property
    def backwards(self) -> int:
        return self.strategy.backwards

    def __call__(
        self, classifier: Classifier, images: Float[Tensor, "b c h w"], labels: Int64[Tensor, " b"]
    ) -> Bool[Tensor, "copies b 1 h w"]:
        size = tuple(images.shape[-2:])
        if size != self.image_size:
            raise InputError(f"the images are {size}, the strategy is for {self.image_size}")
        classes = getattr(classifier, "num_classes", None)
        if isinstance(classes, int):
            require_classes(label_range(labels), classes)
        keep = self.strategy(classifier, images, labels)
        if keep.dtype != torch.bool or keep.shape[1:] != (len(images), 1, *self.image_size):
            raise InputError(
                f"a strategy must return booleans of shape (copies, {len(images)}, 1, h, w), not {keep.shape}"
            )
        return keep


# --- without looking at the classifier ---------------------------------------------------------------------------


@dataclass(frozen=True)
class NoMasks:
    """Everything stays visible."""

    image_size: Size
    forwards: int = 0
    backwards: int = 0

    def __call__(
        self, classifier: Classifier, images: Float[Tensor, "b c h w"], labels: Int64[Tensor, " b"]
    ) -> Bool[Tensor, "copies b 1 h w"]:
        return torch.ones(1, len(images), 1, *self.image_size, dtype=torch.bool, device=images.device)


@dataclass(frozen=True)
class Cutout:
    """PC-Cutout: two squares of 128×128 (at 224), each centred on a pixel drawn uniformly; they may leave the image."""

    image_size: Size
    generator: torch.Generator
    squares: int = 2
    forwards: int = 0
    backwards: int = 0

    def __call__(
        self, classifier: Classifier, images: Float[Tensor, "b c h w"], labels: Int64[Tensor, " b"]
    ) -> Bool[Tensor, "copies b 1 h w"]:
        rows, columns = (self._hidden(len(images), length).to(images.device) for length in self.image_size)
        hidden = (rows[..., :, None] & columns[..., None, :]).any(dim=0)
        return ~hidden[None, :, None]

    def _hidden(self, count: int, length: int) -> Bool[Tensor, "squares b n"]:
        """Which pixels of one axis each square hides: [centre − side//2, … + side)."""
        side = round(CUTOUT_SHARE * length)
        centre = torch.randint(length, (self.squares, count, 1), generator=self.generator)
        offset = torch.arange(length) - (centre - side // 2)
        return (offset >= 0) & (offset < side)


@dataclass(frozen=True)
class RandomMasks:
    """rand_k×k: two masks of the set, drawn independently and uniformly."""

    masks: MaskSet
    generator: torch.Generator
    forwards: int = 0
    backwards: int = 0

    def __call__(
        self, classifier: Classifier, images: Float[Tensor, "b c h w"], labels: Int64[Tensor, " b"]
    ) -> Bool[Tensor, "copies b 1 h w"]:
        chosen = torch.randint(len(self.masks), (2, len(images)), generator=self.generator).to(images.device)
        keep = self.masks.keep(images.device)
        return (keep[chosen[0]] & keep[chosen[1]])[None]


# --- guided by the classifier --------------------------------------------------------------------------------------


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


@dataclass(frozen=True)
class Search:
    """Cross-entropy of masked copies, (image × mask) chunks at a time, through the engine of certification."""

    runner: Runner
    images: Float[Tensor, "b c h w"]
    labels: Int64[Tensor, " b"]
    keep: Bool[Tensor, "n 1 h w"]

    @classmethod
    @contextmanager
    def among(
        cls, keep: Tensor, classifier: Classifier, images: Tensor, labels: Tensor, *, engine: Engine
    ) -> Iterator[Search]:
        """A search whose classifier is in eval mode, and in the mode it was in afterwards."""
        with evaluating(classifier):
            yield cls(Runner(classifier, engine), images, labels, keep)

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
    engine: Engine = field(default_factory=Engine)

    backwards: int = 0

    @property
    def forwards(self) -> int:
        return 2 * len(self.masks) - 1

    def __call__(
        self, classifier: Classifier, images: Float[Tensor, "b c h w"], labels: Int64[Tensor, " b"]
    ) -> Bool[Tensor, "copies b 1 h w"]:
        keep = self.masks.keep(images.device)
        with Search.among(keep, classifier, images, labels, engine=self.engine) as search:
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
    engine: Engine = field(default_factory=Engine)

    backwards: int = 0

    @property
    def forwards(self) -> int:
        return len(self.masks) * (len(self.masks) + 1) // 2

    def __call__(
        self, classifier: Classifier, images: Float[Tensor, "b c h w"], labels: Int64[Tensor, " b"]
    ) -> Bool[Tensor, "copies b 1 h w"]:
        keep = self.masks.keep(images.device)
        pairs = torch.tensor(list(combinations_with_replacement(range(len(self.masks)), 2)), device=images.device)
        with Search.among(keep, classifier, images, labels, engine=self.engine) as search:
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
    engine: Engine = field(default_factory=Engine)
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
        with Search.among(keep, classifier, images, labels, engine=self.engine) as search:
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


@dataclass(frozen=True)
class Both:
    """The copies of two strategies together."""

    strategies: tuple[MaskingStrategy, MaskingStrategy]

    @property
    def forwards(self) -> int:
        return sum(strategy.forwards for strategy in self.strategies)

    @property
    def backwards(self) -> int:
        return sum(strategy.backwards for strategy in self.strategies)

    def __call__(
        self, classifier: Classifier, images: Float[Tensor, "b c h w"], labels: Int64[Tensor, " b"]
    ) -> Bool[Tensor, "copies b 1 h w"]:
        return torch.cat([strategy(classifier, images, labels) for strategy in self.strategies])


@dataclass(frozen=True)
class Entry:
    """A strategy by name: what it does in words, and how it is made."""

    words: str
    build: Callable[[Ingredients], MaskingStrategy]


def _random(masks: MaskSet, of: Ingredients) -> RandomMasks:
    return RandomMasks(masks, of.generator)


STRATEGIES: dict[str, Entry] = {
    "none": Entry("the images as they are", lambda of: NoMasks(of.image_size)),
    "cutout": Entry("two squares of 128/224 of the side, anywhere", lambda of: Cutout(of.image_size, of.generator)),
    "rand3x3": Entry("two random 3×3 masks", lambda of: _random(of.masks[0], of)),
    "rand6x6": Entry("two random 6×6 masks", lambda of: _random(of.masks[1], of)),
    "rand": Entry(
        "a copy of rand3x3 and one of rand6x6", lambda of: Both((_random(of.masks[0], of), _random(of.masks[1], of)))
    ),
    "gutout3x3": Entry("the two most salient 3×3 masks (Grad-CAM)", lambda of: Gutout(of.masks[0])),
    "gutout6x6": Entry("the two most salient 6×6 masks (Grad-CAM)", lambda of: Gutout(of.masks[1])),
    "gutout": Entry(
        "a copy of gutout3x3 and one of gutout6x6", lambda of: Both((Gutout(of.masks[0]), Gutout(of.masks[1])))
    ),
    "greedy3x3": Entry("the worst 3×3 mask, then the worst second one", lambda of: Greedy(of.masks[0], of.engine)),
    "greedy6x6": Entry("the worst 6×6 mask, then the worst second one", lambda of: Greedy(of.masks[1], of.engine)),
    "greedy": Entry(
        "multi-size greedy: 3×3 narrowing down 6×6 (Algorithm A1)", lambda of: MultiSizeGreedy(*of.masks, of.engine)
    ),
    "grid3x3": Entry("the worst of all pairs of 3×3 masks", lambda of: Grid(of.masks[0], of.engine)),
    "grid6x6": Entry("the worst of all pairs of 6×6 masks", lambda of: Grid(of.masks[1], of.engine)),
}
