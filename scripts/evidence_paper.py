"""The paper's numbers beside ours."""

from __future__ import annotations

from collections.abc import Sequence

from evidence_records import Result, paired, pick
from evidence_tables import ORDER, TITLES, cell, notes

from patchproof.recipes import recipes
from patchproof.report import Column, Table

FAMILIES = {"resnet": "ResNet", "vit": "ViT-B", "convnext": "ConvNeXt"}
OURS_AND_THEIRS = (Column("ours, EfficientNet-lite0"), *(Column(f"paper, {name}") for name in FAMILIES.values()))
WHAT = {"certified": "certified", "defended": "clean images with the defence"}


def paper_table(
    key: str, experiment: str, results: list[Result], *, patches: Sequence[str], name: str = "certified"
) -> Table:
    """Ours on another network beside the paper's three: certified accuracy, or clean images with the defence."""
    shown = [r for r in pick(results, seed=0, native=False) if r.masks in (3, 6) and r.patch in patches]
    rows = []

    def shown_patch(patch: str) -> tuple[str, ...]:
        return (patch,) if len(patches) > 1 else ()

    for patch in patches:
        for strategy in [s for s in ORDER if pick(shown, strategy=s, patch=patch)]:
            for masks in (3, 6):
                ours = cell(shown, name=name, strategy=strategy, patch=patch, masks=masks)
                theirs = [paper_cell(experiment, family, strategy, patch, masks, name) for family in FAMILIES]
                if ours:
                    rows.append((*shown_patch(patch), strategy, f"{masks}×{masks}", ours, *theirs))
    columns = (*map(Column, (*shown_patch("patch"), "strategy", "masks")), *OURS_AND_THEIRS)
    title = f"{TITLES[experiment]} at {', '.join(patches)}: {WHAT[name]}, beside the paper's networks"
    return Table(key, title, columns, tuple(rows), notes(shown))


def gap_table(results: list[Result]) -> Table:
    """How far `greedy` is above `cutout`, patch by patch: ours on the same images, the paper's two rates subtracted."""
    patches = ("1%", "2%", "3%")
    shown = [r for r in pick(results, seed=0, native=False) if r.masks in (3, 6) and r.patch in patches]
    rows = []
    for masks in (3, 6):
        for patch in patches:
            both = [pick(shown, strategy=s, patch=patch, masks=masks) for s in ("greedy", "cutout")]
            if all(both):
                pair = paired(both[0][0], both[1][0])
                theirs = [paper_gap(family, patch, masks) for family in FAMILIES]
                ours = f"{pair.points:.1f} ±{pair.half_width:.1f}"
                rows.append((f"{masks}×{masks}", patch, pair.images, ours, *theirs))
    columns = (Column("masks"), Column("patch"), Column("our images"), *OURS_AND_THEIRS)
    title = "ImageNette: certified by greedy, above cutout (points)"
    some = [r for r in shown if r.strategy in ("cutout", "greedy")]
    words = "± half of the 95% interval of the difference on the same images (normal approximation)."
    return Table("imagenette-gap", title, columns, tuple(rows), (words, *notes(some, star=False)))


def paper_gap(family: str, patch: str, masks: int) -> float | None:
    greedy, cutout = (paper_cell("imagenette", family, s, patch, masks, "certified") for s in ("greedy", "cutout"))
    return None if greedy is None or cutout is None else round(greedy - cutout, 1)


def paper_cell(dataset: str, family: str, strategy: str, patch: str, masks: int, name: str) -> float | None:
    """What the paper's table says; its clean accuracy is that of the defended classifier."""
    recipe = recipes().get(f"{dataset}-{family}-{strategy}")
    found = [getattr(e, name) for e in recipe.expectations if (e.patch, e.masks) == (patch, masks)] if recipe else []
    return next((rate for rate in found if rate is not None), None)


def paper_values() -> dict[str, str]:
    """Numbers for sentences: `paper/cifar10-resnet-greedy/35px/3` is what the paper certifies, in percent."""
    return {
        f"paper/{name}/{e.patch}/{e.masks}": f"{e.certified:.1f}%"
        for name, recipe in recipes().items()
        for e in recipe.expectations
        if e.certified is not None
    }
