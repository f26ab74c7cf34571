"""The paper's numbers beside ours."""

from __future__ import annotations

from collections.abc import Sequence

from evidence_records import Result, paired, pick
from evidence_tables import ORDER, TITLES, cell, notes

from patchproof.recipes import recipes
from patchproof.report._tables import Column, Table

FAMILIES = {"resnet": "ResNet", "vit": "ViT-B", "convnext": "ConvNeXt"}
NETWORKS = (Column("ours, EfficientNet-lite0"), *(Column(f"paper, {name}") for name in FAMILIES.values()))


def paper_table(experiment: str, results: list[Result], *, patches: Sequence[str], key: str = "paper") -> Table:
    """Certified accuracy: ours on another network beside the paper's three."""
    shown = [r for r in pick(results, seed=0, native=False) if r.masks in (3, 6) and r.patch in patches]
    rows = []

    def shown_patch(patch: str) -> tuple[str, ...]:
        return (patch,) if len(patches) > 1 else ()

    for patch in patches:
        for strategy in [s for s in ORDER if pick(shown, strategy=s, patch=patch)]:
            for masks in (3, 6):
                ours = cell(shown, strategy=strategy, patch=patch, masks=masks)
                theirs = [paper_cell(experiment, family, strategy, patch, masks) for family in FAMILIES]
                if ours:
                    rows.append((*shown_patch(patch), strategy, f"{masks}×{masks}", ours, *theirs))
    columns = (
        *map(Column, shown_patch("patch")),
        Column("strategy"),
        Column("masks"),
        *NETWORKS,
    )
    title = f"{TITLES[experiment]} at {' and '.join(patches)}, beside the paper's networks"
    return Table(f"{experiment}-{key}", title, columns, tuple(rows), notes(shown))


def gap_table(results: list[Result]) -> Table:
    """How far `greedy` is above `cutout`, patch by patch: ours on the same images, the paper's two rates subtracted."""
    shown = [r for r in pick(results, seed=0, native=False) if r.masks in (3, 6) and r.strategy in ("cutout", "greedy")]
    rows = []
    for masks in (3, 6):
        for patch in ("1%", "2%", "3%"):
            both = [pick(shown, strategy=s, patch=patch, masks=masks) for s in ("greedy", "cutout")]
            if all(both):
                theirs = [paper_gap(family, patch, masks) for family in FAMILIES]
                rows.append((f"{masks}×{masks}", patch, paired(both[0][0], both[1][0])[3], *theirs))
    columns = (Column("masks"), Column("patch"), *NETWORKS)
    some = [r for r in shown if r.patch in ("1%", "2%", "3%")]
    title = "ImageNette: certified by greedy, above cutout (points)"
    return Table("imagenette-gap", title, columns, tuple(rows), notes(some, star=False))


def paper_gap(family: str, patch: str, masks: int) -> float | None:
    greedy, cutout = (paper_cell("imagenette", family, s, patch, masks) for s in ("greedy", "cutout"))
    return None if greedy is None or cutout is None else round(greedy - cutout, 1)


def paper_cell(dataset: str, family: str, strategy: str, patch: str, masks: int) -> float | None:
    recipe = recipes().get(f"{dataset}-{family}-{strategy}")
    found = [e.certified for e in recipe.expectations if (e.patch, e.masks) == (patch, masks)] if recipe else []
    return found[0] if found else None


def paper_values() -> dict[str, str]:
    """Numbers for sentences: `paper/cifar10-resnet-greedy/35px/3` is what the paper certifies, in percent."""
    return {
        f"paper/{name}/{e.patch}/{e.masks}": f"{e.certified:.1f}%"
        for name, recipe in recipes().items()
        for e in recipe.expectations
        if e.certified is not None
    }
