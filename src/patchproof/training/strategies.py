"""Masking strategies by name: which masked copies of a batch a classifier is trained on (the paper's §4.1).

A strategy only chooses masks, and `loop.py` trains on them. The paper's strategies are implemented in `search.py`.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from patchproof.geometry import MaskSet, PatchThreat, covering_masks, whole_size
from patchproof.masking import Engine
from patchproof.training import search
from patchproof.types import Classifier, InputError, Size, kind_of, typed

MaskPair = tuple[MaskSet, MaskSet]
"""A coarse and a fine mask set: 3×3 and 6×6 in the paper."""


@runtime_checkable
class MaskingStrategy(Protocol):
    """Given a batch and the current classifier, returns what stays visible in each copy to train on.

    A training calls it with the classifier in eval mode, and changes it to train mode for the step. `classifier` is the
    ImageClassifier, which takes images in [0, 1], around the network that is trained; this is `classifier.module`.
    `indices` are the positions of the images in the training data. Optional members:

    - `state_dict()` and `load_state_dict(state)`: the strategy's memory as tensors and JSON values by name. It is saved
      with every checkpoint. If there are several processes, their changes are merged after every step;
    - `observe(losses, indices=…)`: called after each step with the cross-entropy of each copy (copies b);
    - `mirrored`: set before each call to the images (b) that augmentation has mirrored, or None;
    - `forwards` and `backwards`: extra passes per image.
    """

    def __call__(
        self,
        classifier: Classifier,
        images: Float[Tensor, "b c h w"],
        labels: Int64[Tensor, " b"],
        *,
        indices: Int64[Tensor, " b"] | None = None,
        epoch: int = 0,
    ) -> Bool[Tensor, "copies b 1 h w"]: ...


@dataclass(frozen=True)
class StrategyEntry:
    """A strategy by name: a description, its constructor, and the mask sets that it makes a copy for."""

    words: str
    kind: Callable[..., search.BuiltIn]
    sets: Literal["3x3", "6x6", "both"] = "3x3"

    @property
    def options(self) -> list[str]:
        """The names of its own options."""
        return [name for name in inspect.signature(self.kind).parameters if name not in search.BuiltIn.__match_args__]


VIEW = re.compile(r"(column|row|block)([1-9]\d{0,4})")


def _view(kind: Any, band: int) -> StrategyEntry:
    shown = "block" if kind == "block" else f"band of {kind}s"
    words = f"one random {shown} {band} wide, wrapping around, and nothing else"
    return StrategyEntry(words, partial(search.RandomView, ablation=kind, band=band))


STRATEGIES = {
    "none": StrategyEntry("the images as they are", search.NoMasks),
    "cutout": StrategyEntry("two squares of 128/224 of the side, anywhere", search.Cutout),
    "rand3x3": StrategyEntry("two random 3×3 masks", search.RandomMasks),
    "rand6x6": StrategyEntry("two random 6×6 masks", search.RandomMasks, "6x6"),
    "rand": StrategyEntry("a copy of rand3x3 and one of rand6x6", search.RandomMasks, "both"),
    "gutout3x3": StrategyEntry("the two most salient 3×3 masks (Grad-CAM)", search.Gutout),
    "gutout6x6": StrategyEntry("the two most salient 6×6 masks (Grad-CAM)", search.Gutout, "6x6"),
    "gutout": StrategyEntry("a copy of gutout3x3 and one of gutout6x6", search.Gutout, "both"),
    "greedy3x3": StrategyEntry("the worst 3×3 mask, then the worst second one", search.Greedy),
    "greedy6x6": StrategyEntry("the worst 6×6 mask, then the worst second one", search.Greedy, "6x6"),
    "greedy": StrategyEntry("multi-size greedy: 3×3 narrowing down 6×6 (Algorithm A1)", search.MultiSizeGreedy, "both"),
    "memory": StrategyEntry("greedy, later only the masks remembered as worst of each image", search.Memory, "both"),
    "grid3x3": StrategyEntry("the worst of all pairs of 3×3 masks", search.Grid),
    "grid6x6": StrategyEntry("the worst of all pairs of 6×6 masks", search.Grid, "6x6"),
    "column4": _view("column", 4),
    "row4": _view("row", 4),
    "block12": _view("block", 12),
}
"""Strategies by name. Views of any width have a name, too, e.g. `column8`."""


@typed
def masking_strategy(
    name: str,
    *,
    image_size: Size,
    generator: torch.Generator,
    masks: MaskPair | None = None,
    engine: Engine | None = None,
    **options: Any,
) -> search.BuiltIn:
    """Build a strategy by name (`STRATEGIES`); all its randomness comes from `generator`.

    `options` are those of the strategy, e.g. `tries=(2, 2, 2, 2)` and `refresh=0` for `memory`.
    """
    entry = strategy_entry(name)
    size = whole_size(image_size, "image_size")
    pair = masks or training_masks(size)
    if any(m.image_size != size for m in pair):
        raise InputError(f"the masks are for images of {[m.image_size for m in pair]}, not {size}")
    sets = {"3x3": pair[:1], "6x6": pair[1:], "both": pair}[entry.sets]
    unknown = [option for option in options if option not in entry.options]
    if unknown:
        raise InputError(f"`{name}` has no option `{unknown[0]}`; it has {', '.join(entry.options) or 'none'}")
    return entry.kind(sets, generator, engine or Engine(), **options)


def strategy_entry(name: str) -> StrategyEntry:
    """The strategy of this name; an unknown name is refused, and the nearest known one suggested."""
    if view := VIEW.fullmatch(name):
        return _view(view[1], int(view[2]))
    if name not in STRATEGIES:
        near = difflib.get_close_matches(name, STRATEGIES, n=1)
        hint = f"did you mean `{near[0]}`?" if near else f"known are {', '.join(STRATEGIES)}"
        raise InputError(f"unknown masking strategy `{name}`; {hint}")
    return STRATEGIES[name]


def training_masks(image_size: Size) -> MaskPair:
    """The 3×3 and 6×6 sets of the 3% patch, with which the paper trains for all patches: 100 and 69 pixels at 224."""
    threat = PatchThreat.square(image_size=image_size, percent=3.0)
    return covering_masks(threat, per_axis=3), covering_masks(threat, per_axis=6)


def checked(keep: Any, images: Float[Tensor, "b c h w"]) -> Bool[Tensor, "copies b 1 h w"]:
    """Return what a strategy returned, or refuse it if it is not one boolean per pixel of each copy."""
    expected = len(images), 1, *images.shape[-2:]
    right = isinstance(keep, Tensor) and keep.dtype == torch.bool and keep.shape[1:] == expected and len(keep) > 0
    if not right:
        wanted = f"booleans of shape (copies ≥ 1, {len(images)}, 1, h, w)"
        raise InputError(f"a strategy must return {wanted}, not {kind_of(keep)}")
    return keep.to(images.device)
