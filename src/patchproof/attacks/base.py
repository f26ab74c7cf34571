"""The base class of attacks, whose results are checked before they are believed, and running several of them."""

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
from patchproof.masking import Evaluator, require_images
from patchproof.types import CheckError, InputError


@runtime_checkable
class Target(Protocol):
    """What is attacked, and the judge of every attack: any defence, or a classifier alone."""

    def predict(self, images: Float[Tensor, "b c h w"]) -> Int64[Tensor, " b"]: ...


@dataclass(frozen=True)
class Undefended:
    """A classifier without a defence: predict(x) = F(x)."""

    evaluator: Evaluator

    def predict(self, images: Float[Tensor, "b c h w"]) -> Int64[Tensor, " b"]:
        return self.evaluator.labels(images)


@dataclass(frozen=True)
class Patched:
    """An attack's proposal: image b carries a patch at `places[b]`, or two patches at the two locations there.

    `passes` counts the masked copies that the classifier evaluated, `queries` the predictions of the target.
    """

    images: Float[Tensor, "b c h w"]
    places: tuple[Rects, ...]
    passes: Int64[Tensor, " b"]
    queries: Int64[Tensor, " b"]


@dataclass(frozen=True)
class Attacked(Patched):
    """A proposal within the threat, with the target's predictions for it and whether they break it."""

    predictions: Int64[Tensor, " b"]
    broken: Bool[Tensor, " b"]


class Attack(ABC):
    """An attack on a target: a subclass writes `search`, and calling the attack checks what it returns.

    `search` works on copies, so it cannot change what its result is compared with; predictions come from the target.
    """

    def __init__(self, target: Target, threat: PatchThreat) -> None:
        self.target, self.threat = target, threat

    @abstractmethod
    def search(
        self, images: Float[Tensor, "b c h w"], labels: Int64[Tensor, " b"], generators: Sequence[torch.Generator]
    ) -> Patched:
        """Return the strongest patch found for each image; randomness for image b comes from `generators[b]` alone."""

    @final
    def __call__(
        self, images: Float[Tensor, "b c h w"], labels: Int64[Tensor, " b"], *, generators: Sequence[torch.Generator]
    ) -> Attacked:
        """Search, check the result, and ask the target; a search cannot exchange the target or the threat."""
        target, threat, name = self.target, self.threat, type(self).__name__
        require_images(images, threat.image_size)
        if len(generators) != len(images):
            raise InputError(f"{len(images)} images need as many generators, not {len(generators)}")
        found = self.search(images.clone(), labels.clone(), generators)
        if not isinstance(found, Patched):
            raise CheckError(f"{name}.search must return attacks.Patched(…), not {type(found).__name__}")
        check_patched(images, found, threat, name=name)
        patched = found.images.detach().clone()
        predictions = answers(target, patched)
        broken = wrong_answers(target, predictions, labels)
        return Attacked(patched, found.places, found.passes, found.queries + 1, predictions, broken)


def wrong_answers(target: Target, predictions: Int64[Tensor, " b"], labels: Int64[Tensor, " b"]) -> Bool[Tensor, " b"]:
    """True for a wrong label; an alarm (−1) of a target that guarantees detection is no wrong answer."""
    wrong = predictions != labels
    return wrong & (predictions >= 0) if getattr(target, "guarantee", None) == "detection" else wrong


def answers(target: Target, images: Float[Tensor, "b c h w"]) -> Int64[Tensor, " b"]:
    """Return the target's predictions for a copy of the images, so that it cannot change them."""
    found = target.predict(images.clone())
    if not isinstance(found, Tensor) or found.shape != (len(images),):
        got = f"shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        raise CheckError(f"{type(target).__name__}.predict returned {got} for {len(images)} images")
    return found


def check_patched(images: Float[Tensor, "b c h w"], found: Patched, threat: PatchThreat, *, name: str) -> None:
    """Check x′ ∈ 𝓐_𝓡(x): finite, in [0, 1], equal to x outside one rectangle of 𝓡 (or two); name a violation."""
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
        where, rects = f"{name}, image {number} of the batch", rects_of(place)
        if len(rects) > threat.patches:
            raise CheckError(f"{where}: {len(rects)} patches, the threat is {threat.words}")
        for rect in rects:
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
    """Return a generator for this (seed, image, turn) alone, so that no draw depends on the rest of the batch."""
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
    """Run the attacks one after the other, each on the images not yet broken; return the last patch tried on each.

    An image that is answered wrongly as it is counts as broken: a patch may also leave all pixels as they are.
    """
    if not attacks:
        raise InputError("there is no attack to run; name at least one, or call pp.attack(…), which has its own")
    target, threat = attacks[0].target, attacks[0].threat
    corner = Rect(0, 0, *threat.patch_sizes[0])
    places: list[Rects] = [corner if threat.patches == 1 else (corner, corner)] * len(images)
    patched, passes, queries = images.clone(), torch.zeros_like(labels), torch.ones_like(labels)
    predictions = answers(target, images).clone()
    broken = wrong_answers(target, predictions, labels)
    for turn, attack in enumerate(attacks):
        rows = torch.nonzero(~broken)[:, 0]
        if not len(rows):
            break
        generators = [image_generator(seed, indices[row], turn=turn) for row in rows.tolist()]
        found = Attack.__call__(attack, images[rows], labels[rows], generators=generators)  # with its checks
        for row, place in zip(rows.tolist(), found.places, strict=True):
            places[row] = place
        patched[rows], predictions[rows], broken[rows] = found.images, found.predictions, found.broken
        passes[rows] += found.passes
        queries[rows] += found.queries
    return Attacked(patched, tuple(places), passes, queries, predictions, broken)
