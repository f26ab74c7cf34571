"""What an attack is: it returns patched images, and nothing it returns is believed before it has been checked.

Attacks run in turn on a batch: each on the images that the ones before could not break.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, final, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from patchproof.geometry import PatchThreat, Rect, Rects, rects_of, size_words
from patchproof.masking import Evaluator
from patchproof.types import CheckError, InputError


@runtime_checkable
class Target(Protocol):
    """What is attacked, and the judge of every attack: any defence, or a classifier alone."""

    def predict(self, images: Float[Tensor, "b c h w"]) -> Int64[Tensor, " b"]: ...


@dataclass(frozen=True)
class Undefended:
    """predict(x) = F(x)."""

    evaluator: Evaluator

    def predict(self, images: Float[Tensor, "b c h w"]) -> Int64[Tensor, " b"]:
        return self.evaluator.labels(images)


@dataclass(frozen=True)
class Patched:
    """What an attack proposes: image b carries a patch at `places[b]`, or each of two at one of these.

    `passes` counts the masked copies that the classifier saw on the way, `queries` how often the target was asked.
    """

    images: Float[Tensor, "b c h w"]
    places: tuple[Rects, ...]
    passes: Int64[Tensor, " b"]
    queries: Int64[Tensor, " b"]


@dataclass(frozen=True)
class Attacked(Patched):
    """A proposal within the threat, with the target's answers to it; `labels` are the right ones."""

    labels: Int64[Tensor, " b"]
    predictions: Int64[Tensor, " b"]
    broken: Bool[Tensor, " b"]


class Attack(ABC):
    """A subclass writes `search`. Calling it hands the result on only if each image carries a patch of the threat.

    `search` works on copies, so it cannot move the images that its result is compared with; and the answers come from
    the target itself, never from the attack.
    """

    def __init__(self, target: Target, threat: PatchThreat) -> None:
        self.target, self.threat = target, threat

    @abstractmethod
    def search(
        self,
        images: Float[Tensor, "b c h w"],
        labels: Int64[Tensor, " b"],
        generators: Sequence[torch.Generator],
    ) -> Patched:
        """The strongest patch found for each image; everything random about image b is drawn from `generators[b]`."""

    @final
    def __call__(
        self,
        images: Float[Tensor, "b c h w"],
        labels: Int64[Tensor, " b"],
        *,
        generators: Sequence[torch.Generator],
    ) -> Attacked:
        """Search, check, and ask the target: the target and the threat of before the search."""
        target, threat, name = self.target, self.threat, type(self).__name__
        if tuple(images.shape[-2:]) != threat.image_size:
            raise InputError(f"the images are {tuple(images.shape[-2:])}, the threat is for {threat.image_size}")
        if not bool(((images >= 0) & (images <= 1)).all()):
            raise InputError("images must be in [0, 1] and finite; divide 0-255 values by 255")
        if len(generators) != len(images):
            raise InputError(f"{len(images)} images need as many generators, not {len(generators)}")
        found = self.search(images.clone(), labels.clone(), generators)
        if not isinstance(found, Patched):
            raise CheckError(f"{name}.search must return attacks.Patched(…), not {type(found).__name__}")
        check_patched(images, found, threat, name=name)
        patched = found.images.detach().clone()
        predictions = answers(target, patched)
        broken = wrong_answers(target, predictions, labels)
        return Attacked(patched, found.places, found.passes, found.queries + 1, labels, predictions, broken)


def wrong_answers(target: Target, predictions: Int64[Tensor, " b"], labels: Int64[Tensor, " b"]) -> Bool[Tensor, " b"]:
    """Which answers are not what the target promises: the label, or for detection the label or an alarm (−1)."""
    wrong = predictions != labels
    return wrong & (predictions >= 0) if getattr(target, "guarantee", None) == "detection" else wrong


def answers(target: Target, images: Float[Tensor, "b c h w"]) -> Int64[Tensor, " b"]:
    """What the target answers to a copy of the images, which stay as they are whatever it does."""
    found = target.predict(images.clone())
    if not isinstance(found, Tensor) or found.shape != (len(images),):
        got = f"shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        raise CheckError(f"{type(target).__name__}.predict returned {got} for {len(images)} images")
    return found


def check_patched(images: Float[Tensor, "b c h w"], found: Patched, threat: PatchThreat, *, name: str) -> None:
    """x′ ∈ 𝓐_𝓡(x): finite, in [0, 1], equal to x outside one rectangle of 𝓡, or two. The first violation is named."""
    patched, image = found.images, Rect(0, 0, *threat.image_size)
    got, wanted = ((tuple(x.shape), x.dtype, x.device) for x in (patched, images))
    if got != wanted:
        raise CheckError(f"{name} returned {got} for images of shape, type and device {wanted}")
    if len(found.places) != len(images):
        raise CheckError(f"{name} names {len(found.places)} places for {len(images)} images; each has one")
    if any(getattr(counts, "shape", None) != (len(images),) for counts in (found.passes, found.queries)):
        raise CheckError(f"{name} must count passes and queries in one tensor each, with {len(images)} numbers")
    if not bool(((patched >= 0) & (patched <= 1)).all()):
        low, high = float(patched.min()), float(patched.max())
        raise CheckError(f"{name} returned pixels in [{low:g}, {high:g}]; images are finite and in [0, 1]")
    changed = (patched != images).any(dim=1)
    for number, (outside, place) in enumerate(zip(changed, found.places, strict=True)):
        where = f"{name}, image {number} of the batch"
        if len(rects_of(place)) > threat.patches:
            raise CheckError(f"{where}: {len(rects_of(place))} patches, the threat is {threat.words}")
        for rect in rects_of(place):
            if (rect.height, rect.width) not in threat.patch_sizes:
                allowed = size_words(*threat.patch_sizes)
                raise CheckError(f"{where}: a patch of {rect.height}×{rect.width} pixels, allowed is {allowed}")
            if not image.contains(rect):
                raise CheckError(f"{where}: {rect} is not inside the image of {image.height}×{image.width}")
            outside[rect.top : rect.bottom, rect.left : rect.right] = False
        if bool(outside.any()):
            row, column = torch.nonzero(outside)[0].tolist()
            raise CheckError(
                f"{where}: {int(outside.sum())} pixels outside {place} were changed, e.g. row {row}, column {column}"
            )


def image_generator(seed: int, index: int, *, turn: int = 0) -> torch.Generator:
    """A stream of its own for every (seed, image, turn), so that no draw depends on the other images of a batch."""
    digest = hashlib.sha256(f"{seed}/{index}/{turn}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def attack_in_turn(
    attacks: Sequence[Attack],
    images: Float[Tensor, "b c h w"],
    labels: Int64[Tensor, " b"],
    *,
    seed: int,
    indices: Sequence[int],
) -> Attacked:
    """The strongest patch that any of the attacks found for each image.

    An image that is answered wrongly as it is counts as broken: a patch may also leave all pixels as they are.
    """
    if not attacks:
        raise InputError("there is no attack to run; name at least one, or call pp.attack(…), which has its own")
    first, none = attacks[0], torch.zeros_like(labels)
    corner = Rect(0, 0, *first.threat.patch_sizes[0])
    places: list[Rects] = [corner if first.threat.patches == 1 else (corner, corner)] * len(images)
    predictions = answers(first.target, images)
    wrong = wrong_answers(first.target, predictions, labels)
    found = Attacked(images.clone(), tuple(places), none, none + 1, labels, predictions, wrong)
    for turn, attack in enumerate(attacks):
        rows = torch.nonzero(~found.broken)[:, 0]
        if not len(rows):
            break
        generators = [image_generator(seed, indices[row], turn=turn) for row in rows.tolist()]
        now = Attack.__call__(attack, images[rows], labels[rows], generators=generators)  # with its checks
        for row, place in zip(rows.tolist(), now.places, strict=True):
            places[row] = place
        found = Attacked(
            found.images.index_copy(0, rows, now.images),
            tuple(places),
            found.passes.index_add(0, rows, now.passes),
            found.queries.index_add(0, rows, now.queries),
            labels,
            found.predictions.index_copy(0, rows, now.predictions),
            found.broken.index_copy(0, rows, now.broken),
        )
    return found
