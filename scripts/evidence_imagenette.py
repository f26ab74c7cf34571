"""ImageNette's tables: the paper's claim, and what stands against chance."""

from __future__ import annotations

from evidence_records import Result, paired, pick
from evidence_tables import ORDER, notes, rate_text, spread

from patchproof.report import Column, Picture, Table, draw_errors, drawing, percent_axis, series_style

ROUND_PASSES = (10, 30, 100, 300)


def seeds_table(results: list[Result]) -> Table:
    """Mean over the seeds, and from the lowest to the highest."""
    rows = []
    for strategy in ORDER:
        for masks in (3, 6):
            some = pick(results, strategy=strategy, masks=masks, patch="3%")
            if len(some) > 1:
                rows.append(
                    (
                        strategy,
                        f"{masks}×{masks}",
                        len(some),
                        spread(some),
                    )
                )
    columns = (
        Column("strategy"),
        Column("masks"),
        Column("seeds"),
        Column("certified at 3%, mean (lowest–highest)"),
    )
    shown = [r for r in results if r.patch == "3%" and r.masks in (3, 6) and r.strategy in {row[0] for row in rows}]
    return Table("imagenette-seeds", "ImageNette: spread over seeds", columns, tuple(rows), notes(shown))


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
    found = notes([r for r in shown if r.masks in (3, 6)], star=False)
    return Table(
        "imagenette-rivals", "ImageNette at 3%: greedy against the others", columns, tuple(rows), (words, *found)
    )


def masks_table(results: list[Result]) -> Table:
    """The curve in numbers, with what it costs."""
    rows = []
    for strategy in ("cutout", "greedy"):
        for r in sorted(pick(results, strategy=strategy, seed=0, patch="3%"), key=lambda r: r.masks):
            star = "*" if r.certified.n < r.available else ""
            rows.append((strategy, f"{r.masks}×{r.masks}", rate_text(r.certified) + star, r.passes))
    columns = (
        Column("strategy"),
        Column("masks"),
        Column("certified at 3%"),
        Column("passes per image"),
    )
    chosen = [r for r in results if r.strategy in ("cutout", "greedy") and r.patch == "3%" and r.seed == 0]
    return Table("imagenette-masks", "ImageNette: more masks", columns, tuple(rows), notes(chosen))


def curves(results: list[Result]) -> list[Picture]:
    """What more masks per axis bring, and what they cost, for `cutout` and `greedy` at 3%."""
    lines = {
        s: sorted(pick(results, strategy=s, seed=0, patch="3%"), key=lambda r: r.masks) for s in ("cutout", "greedy")
    }
    lines = {strategy: found for strategy, found in lines.items() if len(found) > 2}
    if not lines:
        return []
    every = [r for some in lines.values() for r in some]
    n = " or ".join(f"{n:,}" for n in sorted({r.certified.n for r in every}))

    title, brings = f"ImageNette: certified, n = {n}", "Certified accuracy against masks per axis"
    alt = f"{brings} for cutout and greedy, with 95% intervals."
    with drawing("imagenette-masks", title, alt) as (certified, axes):
        at = sorted({r.masks for r in every})
        series = {s: [next((r.certified for r in some if r.masks == m), None) for m in at] for s, some in lines.items()}
        draw_errors(axes, series)
        percent_axis(axes, series)
        axes.set_xticks(range(len(at)), [str(masks) for masks in at])
        axes.set(xlabel="masks per axis", ylabel="certified at 3% (% of images)")
    alt = "Passes per image against masks per axis for cutout and greedy, on a logarithmic scale."
    with drawing("imagenette-cost", "ImageNette: passes with early exit", alt) as (cost, axes):
        for number, (strategy, some) in enumerate(lines.items()):
            axes.plot([r.masks for r in some], [r.passes for r in some], label=strategy, **series_style(number))
        axes.set_yscale("log")
        axes.set_yticks(ROUND_PASSES, [str(passes) for passes in ROUND_PASSES])
        axes.minorticks_off()
        axes.set(xlabel="masks per axis", ylabel="passes per image")
        axes.set_xticks(at)
    return [certified, cost]
