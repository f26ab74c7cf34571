"""The tables and figures of results/, from the certifications found there."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from evidence_records import Result, pick
from matplotlib.axes import Axes
from scipy import stats

from patchproof.recipes import recipes
from patchproof.records import Rate
from patchproof.report._figures import draw, error_line
from patchproof.report._tables import Column, Table
from patchproof.training import STRATEGIES

FAMILIES = {"resnet": "ResNet", "vit": "ViT-B", "convnext": "ConvNeXt"}
ORDER = list(STRATEGIES)


def cell(results: Sequence[Result], **wanted: object) -> str | None:
    """`82.1 ±1.2`: the rate and half of its exact 95% interval; `*` for a part of the images."""
    found = pick(results, **wanted)
    if not found:
        return None
    rate = found[0].certified
    return rate_text(rate) + ("*" if rate.n < found[0].available else "")


def rate_text(rate: Rate) -> str:
    low, high = rate.interval
    return f"{100 * rate.rate:.1f} ±{50 * (high - low):.1f}"


def setting_columns(patches: Sequence[str], masks: Sequence[int]) -> list[tuple[str, int]]:
    return [(patch, count) for count in masks for patch in patches]


CONDITIONS = {
    "imagenette": "Up to three runs shared the GPU at a time, so times are upper bounds.",
}
"""What the records cannot know about how an experiment was run."""


def notes(results: Sequence[Result]) -> tuple[str, ...]:
    """Hardware, time, passes, seeds, and what the star means."""
    if not results:
        return ()
    devices = sorted({r.device for r in results} | {r.training.device for r in results if r.training})
    trained = [r.training.seconds for r in results if r.training]
    words = [f"Hardware: {', '.join(devices)}."]
    if trained:
        words.append(f"Training took {min(trained) / 60:.1f} to {max(trained) / 60:.1f} minutes a run.")
    for masks in sorted({r.masks for r in results}):
        some = [r for r in results if r.masks == masks]
        passes, seconds = [r.passes for r in some], [r.seconds for r in some]
        words.append(
            f"{masks}×{masks} masks: {min(passes):.0f} to {max(passes):.0f} passes an image, "
            f"{min(seconds):.0f} to {max(seconds):.0f} s a certification."
        )
    words += [CONDITIONS[name] for name in sorted({r.experiment for r in results}) if name in CONDITIONS]
    words.append(f"Seeds: {', '.join(str(s) for s in sorted({r.seed for r in results}))}.")
    parts = sorted({r.certified.n for r in results if r.certified.n < r.available})
    if parts:
        listed = ", ".join(f"{n:,}" for n in parts)
        words.append(f"* an evenly spread part of the images: {listed} of {results[0].available:,}.")
    return (" ".join(words),)


def strategies_table(
    key: str, title: str, results: list[Result], settings: Sequence[tuple[str, int]], *, main: tuple[str, int]
) -> Table:
    """A row a strategy; percent of images, with half the width of the exact 95% interval. The other accuracies are
    those at the `main` setting."""
    rows = []
    for strategy in [s for s in ORDER if pick(results, strategy=s)] + sorted(
        {r.strategy for r in results} - set(ORDER)
    ):
        own = pick(results, strategy=strategy, seed=0)
        base = pick(own, patch=main[0], masks=main[1])
        cost = own[0].training
        rows.append(
            (
                strategy,
                cost.forwards + cost.backwards if cost else None,
                cost.seconds / 60 if cost else None,
                rate_text(base[0].rates["undefended"]) if base else None,
                rate_text(base[0].rates["defended"]) if base else None,
                *(cell(own, patch=patch, masks=masks) for patch, masks in settings),
            )
        )
    columns = (
        Column("strategy"),
        Column("extra passes"),
        Column("minutes"),
        Column("undefended"),
        Column(f"defended ({main[1]}×{main[1]}, {main[0]})"),
        *(Column(f"{masks}×{masks} {patch}", group="certified") for patch, masks in settings),
    )
    return Table(key, title, columns, tuple(rows), notes(results))


def seeds_table(results: list[Result]) -> Table:
    """Mean over the seeds, and from the lowest to the highest."""
    rows = []
    for strategy in ORDER:
        for masks in (3, 6):
            some = pick(results, strategy=strategy, masks=masks, patch="3%")
            if len(some) > 1:
                rates = [100 * r.certified.rate for r in some]
                rows.append(
                    (
                        strategy,
                        f"{masks}×{masks}",
                        len(some),
                        statistics.mean(rates),
                        f"{min(rates):.1f}–{max(rates):.1f}",
                    )
                )
    columns = (
        Column("strategy"),
        Column("masks"),
        Column("seeds"),
        Column("certified at 3%, mean (%)"),
        Column("lowest–highest"),
    )
    shown = [r for r in results if r.patch == "3%" and r.masks in (3, 6) and r.strategy in {row[0] for row in rows}]
    return Table("imagenette-seeds", "ImageNette: spread over seeds", columns, tuple(rows), notes(shown))


def headline_table(results: list[Result]) -> Table:
    """Certified at 3% in short: the mean over seeds, and from the lowest to the highest where there are several."""
    rows = []
    for strategy in [s for s in ORDER if pick(results, strategy=s, patch="3%")]:
        some = pick(results, strategy=strategy, patch="3%")
        base = pick(some, masks=3)
        if base:
            clean = statistics.mean(100 * r.rates["undefended"].rate for r in base)
            proven = [spread(pick(some, masks=masks)) for masks in (3, 6)]
            rows.append((strategy, len(base), base[0].training.forwards if base[0].training else 0, clean, *proven))
    names = ("fine-tuned on", "seeds", "extra passes", "undefended", "certified, 3×3 masks", "certified, 6×6 masks")
    words = "Percent of the validation images, any patch of 3% of the image; with several seeds mean (lowest–highest)."
    shown = [r for r in pick(results, patch="3%") if r.masks in (3, 6)]
    return Table("headline", "ImageNette", tuple(map(Column, names)), tuple(rows), (words, *notes(shown)))


def spread(results: Sequence[Result]) -> str | None:
    """`82.4 (81.7–83.2)`, with a star for a part of the images."""
    if not results:
        return None
    rates = [100 * r.certified.rate for r in results]
    between = f" ({min(rates):.1f}–{max(rates):.1f})" if len(rates) > 1 else ""
    return f"{statistics.mean(rates):.1f}{between}{'*' if results[0].certified.n < results[0].available else ''}"


def rivals_table(results: list[Result]) -> Table:
    """`greedy` against the others on the same images: how many only one of the two certifies, and the exact McNemar
    test that this is chance."""
    rows = []
    for masks in (3, 6):
        greedy = pick(results, strategy="greedy", seed=0, patch="3%", masks=masks)
        for strategy in [s for s in ORDER if s != "greedy"]:
            for rival in pick(results, strategy=strategy, seed=0, patch="3%", masks=masks) if greedy else []:
                rows.append((strategy, f"{masks}×{masks}", *paired(greedy[0], rival)))
    columns = (
        Column("greedy against"),
        Column("masks"),
        Column("images"),
        Column("only greedy certifies"),
        Column("only the other does"),
        Column("difference (points)"),
        Column("p"),
    )
    shown = pick(results, patch="3%", seed=0)
    words = "Seed 0 of each; p is the exact two-sided McNemar test over images, which says nothing about other seeds."
    found = notes([r for r in shown if r.masks in (3, 6)])
    return Table(
        "imagenette-rivals", "ImageNette at 3%: greedy against the others", columns, tuple(rows), (words, *found)
    )


def paired(one: Result, other: Result) -> tuple[int, int, int, float, str]:
    common = one.images & other.images
    only, lost = len((one.proven - other.proven) & common), len((other.proven - one.proven) & common)
    chance = stats.binomtest(only, only + lost).pvalue if only + lost else 1.0
    return len(common), only, lost, 100 * (only - lost) / len(common), f"{chance:.1g}"


def paper_table(results: list[Result]) -> Table:
    """Certified accuracy at 3%: ours on another network beside the paper's three."""
    rows = []
    for strategy in [s for s in ORDER if pick(results, strategy=s, patch="3%", seed=0)]:
        for masks in (3, 6):
            ours = cell(pick(results, strategy=strategy, seed=0), patch="3%", masks=masks)
            theirs = [paper_cell(family, strategy, masks) for family in FAMILIES]
            if ours:
                rows.append((strategy, f"{masks}×{masks}", ours, *theirs))
    columns = (
        Column("strategy"),
        Column("masks"),
        Column("ours, EfficientNet-lite0"),
        *(Column(f"paper, {name}") for name in FAMILIES.values()),
    )
    shown = [r for r in pick(results, patch="3%", seed=0) if r.masks in (3, 6)]
    title = "ImageNette at 3%, beside the paper's networks"
    return Table("imagenette-paper", title, columns, tuple(rows), notes(shown))


def paper_cell(family: str, strategy: str, masks: int) -> float | None:
    recipe = recipes().get(f"imagenette-{family}-{strategy}")
    found = [e.certified for e in recipe.expectations if (e.patch, e.masks) == ("3%", masks)] if recipe else []
    return found[0] if found else None


def grid_table(key: str, title: str, results: list[Result]) -> Table:
    """Patches by mask sets, for one network."""
    masks = sorted({r.masks for r in results})
    patches = sorted({r.patch for r in results}, key=lambda p: float(p.rstrip("%px")))
    rows = [(patch, *(cell(results, patch=patch, masks=m) for m in masks)) for patch in patches]
    base = results[0].rates
    first = f"Undefended {rate_text(base['undefended'])}."
    columns = (Column("patch"), *(Column(f"{m}×{m}", group="certified") for m in masks))
    return Table(key, title, columns, tuple(rows), (f"{first} {notes(results)[0]}",))


def native_table(results: list[Result]) -> Table:
    """The patch of the literature beside the one a camera sees: 14 and 35 pixels of the input, 2×2 and 5×5 native."""
    pairs = (("14px", "2px", "2×2"), ("35px", "5px", "5×5"))
    rows = []
    for strategy in [s for s in ORDER if pick(results, strategy=s)]:
        for masks in (3, 6):
            for usual, native, words in pairs:
                own = pick(results, strategy=strategy, masks=masks)
                rows.append(
                    (
                        strategy,
                        f"{masks}×{masks}",
                        words,
                        cell(own, patch=usual, native=False),
                        cell(own, patch=native, native=True),
                    )
                )
    columns = (
        Column("strategy"),
        Column("masks"),
        Column("native patch"),
        Column("certified, as usually counted (7 times the side)"),
        Column("certified, its true footprint"),
    )
    return Table("cifar10-native", "CIFAR-10: what the usual number leaves out", columns, tuple(rows), notes(results))


def curve(results: list[Result]) -> list[Any]:
    """Certified accuracy at 3% against masks an axis, for `cutout` and `greedy`."""
    chosen = [s for s in ("cutout", "greedy") if len(pick(results, strategy=s, seed=0, patch="3%")) > 2]

    def plot(axes: Axes) -> None:
        for number, strategy in enumerate(chosen):
            some = sorted(pick(results, strategy=strategy, seed=0, patch="3%"), key=lambda r: r.masks)
            error_line(
                axes,
                [float(r.masks) for r in some],
                [r.certified for r in some],
                label=strategy,
                number=number,
                of=len(chosen),
            )
        axes.set(xlabel="masks per axis", ylabel="certified at 3% (% of images)")

    ns = sorted({r.certified.n for r in results if r.patch == "3%" and r.strategy in chosen})
    title = f"ImageNette, n = {', '.join(f'{n:,}' for n in ns)}"
    words = "Certified accuracy against masks per axis, with 95% intervals."
    return [draw("imagenette-masks", title, words, plot)] if chosen else []


def build(results: list[Result]) -> tuple[list[Table], list[Any]]:
    tables: list[Table] = []
    pictures = []
    nette = pick(results, experiment="imagenette")
    if nette:
        settings = setting_columns(("1%", "2%", "3%"), (3, 6))
        shown = [r for r in nette if r.masks in (3, 6)]
        tables.append(strategies_table("imagenette", "ImageNette, EfficientNet-lite0", shown, settings, main=("3%", 3)))
        tables += [
            headline_table(nette),
            seeds_table(nette),
            rivals_table(nette),
            paper_table(nette),
            masks_table(nette),
        ]
        pictures += curve(nette)
    cifar = pick(results, experiment="cifar10")
    if cifar:
        settings = setting_columns(("14px", "35px"), (3, 6))
        usual = pick(cifar, native=False)
        tables += [
            strategies_table("cifar10", "CIFAR-10 at 224", usual, settings, main=("35px", 3)),
            native_table(cifar),
        ]
    demo = pick(results, experiment="demo")
    if demo:
        tables.append(demo_table(demo))
    net = pick(results, experiment="imagenet")
    if net:
        tables.append(grid_table("imagenet", "ImageNet, 1,000 validation images, pretrained as it is", net))
    return tables, pictures


def masks_table(results: list[Result]) -> Table:
    """The curve in numbers, with what it costs."""
    rows = []
    for strategy in ("cutout", "greedy"):
        for r in sorted(pick(results, strategy=strategy, seed=0, patch="3%"), key=lambda r: r.masks):
            star = "*" if r.certified.n < r.available else ""
            rows.append((strategy, f"{r.masks}×{r.masks}", rate_text(r.certified) + star, r.passes, r.seconds))
    columns = (
        Column("strategy"),
        Column("masks"),
        Column("certified at 3%"),
        Column("passes an image"),
        Column("seconds"),
    )
    chosen = [r for r in results if r.strategy in ("cutout", "greedy") and r.patch == "3%" and r.seed == 0]
    return Table("imagenette-masks", "ImageNette: more masks", columns, tuple(rows), notes(chosen))


def demo_table(results: list[Result]) -> Table:
    """What `make demo` prints."""
    rows = []
    for r in sorted(results, key=lambda r: (ORDER.index(r.strategy), r.masks)):
        low, high = r.certified.interval
        shares = [f"{100 * r.rates[name].rate:.1f}%" for name in ("undefended", "defended", "certified")]
        rows.append((r.strategy, f"{r.masks}×{r.masks} masks", *shares, f"{100 * low:.1f}–{100 * high:.1f}%"))
    names = ("fine-tuned on", "certified with", "undefended", "defended", "certified", "95% interval")
    n, minutes = results[0].certified.n, sum(r.seconds for r in results) / 60
    words = f"n = {n}, seed 0, {results[0].device}; certifying took {minutes:.1f} minutes."
    return Table("demo", "`make demo`: Fashion-MNIST, any 5×5 patch", tuple(map(Column, names)), tuple(rows), (words,))
