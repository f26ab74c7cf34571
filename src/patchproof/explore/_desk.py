"""What can be done on the page, without the page: each step from one scene to the next, and what it shows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from jaxtyping import UInt8
from torch import Tensor

from patchproof.explore import _draw as draw
from patchproof.explore._explorer import Choice, Explorer
from patchproof.explore._patch import noise, paste, place
from patchproof.explore._table import PairTable
from patchproof.explore._words import explain, meaning, record_words, verdict
from patchproof.geometry import Rect
from patchproof.types import InputError

PAGE = 12
"""Images to pick from at a time."""

NOISE, PICTURE, UNDEFENDED, DEFENDED = PATCH_KINDS = (
    "noise",
    "a picture",
    "optimised against the classifier",
    "optimised against the defence",
)


@dataclass(frozen=True, eq=False)
class Scene:
    """What one visitor looks at: an image with its table, and the patch on it."""

    pixels: UInt8[Tensor, "3 h w"]
    table: PairTable
    words: str
    patch: UInt8[Tensor, "3 p q"]
    index: int | None = None
    cell: tuple[int, int] = (0, 0)
    top: int = 0
    left: int = 0

    @property
    def rect(self) -> Rect:
        return Rect(self.top, self.left, int(self.patch.shape[1]), int(self.patch.shape[2]))

    @property
    def patched(self) -> Tensor:
        return place(self.pixels, self.patch, top=self.top, left=self.left)

    def moved(self, top: int, left: int) -> Scene:
        """The patch at this place, or the nearest one inside the image."""
        height, width = self.pixels.shape[1:]
        return replace(
            self,
            top=max(0, min(int(top), height - self.patch.shape[1])),
            left=max(0, min(int(left), width - self.patch.shape[2])),
        )


class Desk:
    """What the controls do: each method takes what the visitor set and returns what the page shows."""

    def __init__(self, explorer: Explorer) -> None:
        self.explorer = explorer
        self.patch_size = explorer.defense.threat.patch_sizes[0]

    def page_of(self, kind: str, number: int, scene: Scene | None) -> tuple[str, int, int]:
        """The cards of a page of this kind of image, the page's number and how many there are."""
        images = self.explorer.images
        choices = images.of_kind(kind) if images else ()
        pages = max(1, -(-len(choices) // PAGE))
        number = max(1, min(int(number or 1), pages))
        shown = choices[(number - 1) * PAGE : number * PAGE]
        return draw.cards(self.explorer, shown, scene.index if scene else None), number, pages

    def choice(self, index: int) -> Choice:
        images = self.explorer.images
        found = [c for c in images.choices if c.index == index] if images else []
        if not found:
            raise InputError(f"there is no image {index} on offer")
        return found[0]

    def pick(self, choice: Choice, before: Scene | None) -> Scene:
        pixels = self.explorer.pixels(choice)
        words = record_words(choice.record, self.explorer.names) if choice.record else ""
        return self._scene(pixels, choice.label, words, before, index=choice.index)

    def own(self, file: str, before: Scene | None) -> Scene:
        words = f"Your image {Path(file).name}. Its label is not known, so margins are about the defended answer."
        return self._scene(self.explorer.own(Path(file)), None, words, before)

    def _scene(
        self, pixels: Tensor, label: int | None, words: str, before: Scene | None, *, index: int | None = None
    ) -> Scene:
        table = self.explorer.table(pixels, label)
        height, width = self.patch_size
        middle = (pixels.shape[1] - height) // 2, (pixels.shape[2] - width) // 2
        patch = before.patch if before else noise(self.patch_size, torch.Generator().manual_seed(0))
        top, left = (before.top, before.left) if before else middle
        return Scene(pixels, table, words, patch, index, table.weakest, top, left)

    def with_patch(self, scene: Scene, kind: str, *, size: int, seed: int, steps: int, file: str | None) -> Scene:
        """Another patch in the same place, as far as it fits there."""
        height, width = self.explorer.defense.threat.patch_sizes[size]
        if kind == PICTURE:
            if file is None:
                raise InputError("drop in a picture for the patch first")
            patch = paste(self.explorer.picture(Path(file)), (height, width))
        else:
            patch = noise((height, width), torch.Generator().manual_seed(seed))
        placed = replace(scene, patch=patch).moved(scene.top, scene.left)
        if kind in (UNDEFENDED, DEFENDED):
            found = self.explorer.optimised(
                scene.pixels, placed.rect, scene.table.label, defended=kind == DEFENDED, steps=steps, seed=seed
            )
            placed = replace(placed, patch=found)
        return placed

    def table_view(self, scene: Scene) -> tuple[str, str, str]:
        """Verdict, heat map and the chosen masked copy."""
        explorer, table = self.explorer, scene.table
        found = draw.message(verdict(table, explorer.names, explorer.defense.threat), kind="plain")
        words = draw.message(scene.words, kind="plain")
        heat = draw.heat_map(table, explorer.names, scene.cell)
        return words + found, heat, draw.masked_copy(explorer, scene.pixels, table, *scene.cell)

    def patch_view(self, scene: Scene) -> tuple[str, str, str]:
        """The patched image, the answer in words, and the two rounds."""
        explorer, patched = self.explorer, scene.patched
        rounds = explorer.rounds(patched)
        told = draw.message(explain(rounds, explorer.names), kind="plain")
        told += draw.message(meaning(rounds, scene.table, explorer.names), kind="plain")
        return draw.patched_view(patched, scene.rect), told, draw.rounds_view(explorer, patched, rounds)
