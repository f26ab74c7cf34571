"""The tables and figures of results/, from the certifications found there."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from evidence_records import Attacked, Onslaught, Result, pick

from patchproof.report import Cell, Column, Table
from patchproof.runs import ATTACK_ACCURACIES, Rate
from patchproof.training import STRATEGIES

ORDER = [
    *STRATEGIES,
    "greedy-head",
    "greedy-averaged",
    "children",
    "children-half",
    "memory8",
    "memory32",
    "share",
    "pair",
    "three",
    "student",
]
TITLES = {
    "imagenette": "ImageNette",
    "imagenette-one-epoch": "ImageNette, one epoch",
    "imagenette-stronger": "ImageNette, memory and what was made of it",
    "fashion-memory": "Fashion-MNIST, memory against greedy",
    "cifar10-memory": "CIFAR-10 at 32 pixels, memory against greedy",
    "demo": "The networks of make demo",
    "cifar10": "CIFAR-10",
}


def cell(results: Sequence[Result], *, star: str = "*", name: str = "certified", **wanted: object) -> str | None:
    """`82.1 ±1.2`: the rate and half of its exact 95% interval; a star for a part of the images."""
    found = pick(results, **wanted)
    if not found:
        return None
    rate = found[0].rates[name]
    return rate_text(rate) + (star if rate.n < found[0].available else "")


def rate_text(rate: Rate) -> str:
    low, high = rate.interval
    return f"{100 * rate.rate:.1f} ±{50 * (high - low):.1f}"


def setting_columns(patches: Sequence[str], masks: Sequence[int]) -> list[tuple[str, int]]:
    return [(patch, count) for count in masks for patch in patches]


BESIDE = "One thread per run, beside other work on two cores, so times are upper bounds."
SHARED = "Up to ten runs shared the GPU at a time, so times are upper bounds and not to be compared."
CONDITIONS = dict.fromkeys(("imagenette", "imagenette-one-epoch", "cifar10", "imagenet"), SHARED) | {
    "fashion": BESIDE,
    "cifar10-memory": BESIDE,
    "fashion-memory": "Beside other work on two cores, so times are upper bounds.",
}
"""What the records cannot know about how an experiment was run."""


def notes(results: Sequence[Result], *, star: bool = True, timed: bool = True) -> tuple[str, ...]:
    """Hardware, time, passes, seeds, and what the star means, where there is one. Not `timed`: without the time of
    certifications, where the machine had other work, more for some runs than for others."""
    if not results:
        return ()
    devices = sorted({r.device for r in results} | {r.training.manifest["device"] for r in results if r.training})
    trained = [r.training.seconds or 0.0 for r in results if r.training]
    words = [f"Hardware: {', '.join(devices)}.".replace(" 1 threads", " 1 thread")]
    if trained:
        words.append(f"Training took {min(trained) / 60:.1f} to {max(trained) / 60:.1f} minutes per run.")
    for masks in sorted({r.masks for r in results}):
        some = [r for r in results if r.masks == masks]
        passes, seconds = _between([r.passes for r in some]), _between([r.seconds for r in some])
        taken = f", {seconds} s per certification" if timed else ""
        words.append(f"{masks}×{masks} masks: {passes} passes per image{taken}.")
    words += sorted({CONDITIONS[r.experiment] for r in results if r.experiment in CONDITIONS})
    words.append(f"Seeds: {', '.join(str(s) for s in sorted({r.seed for r in results}))}.")
    parts = [r for r in results if r.certified.n < r.available]
    if parts and star:
        sizes = sorted({r.certified.n for r in parts})
        listed = [_part(size, [r for r in parts if r.certified.n == size], alone=len(sizes) == 1) for size in sizes]
        words.append(f"* an evenly spread part of the images: {', '.join(listed)} of {results[0].available:,}.")
    return (" ".join(words),)


def _part(size: int, results: Sequence[Result], *, alone: bool) -> str:
    """`2,000 (14px, 35px with 6×6 masks)`."""
    if alone:
        return f"{size:,}"
    masks = sorted({r.masks for r in results})
    sets = [f"{', '.join(sorted({r.patch for r in results if r.masks == m}))} with {m}×{m} masks" for m in masks]
    return f"{size:,} ({'; '.join(sets)})"


def _between(values: Sequence[float]) -> str:
    low, high = f"{min(values):.0f}", f"{max(values):.0f}"
    return low if low == high else f"{low} to {high}"


def strategies_table(
    key: str, title: str, results: list[Result], settings: Sequence[tuple[str, int]], *, main: tuple[str, int]
) -> Table:
    """One row per strategy; percent of images, with half the width of the exact 95% interval. The other accuracies are
    those at the `main` setting."""
    results = pick(results, seed=0)
    rows = []
    for strategy in [s for s in ORDER if pick(results, strategy=s)] + sorted(
        {r.strategy for r in results} - set(ORDER)
    ):
        own = pick(results, strategy=strategy)
        base = pick(own, patch=main[0], masks=main[1])
        cost = own[0].training
        rows.append(
            (
                strategy,
                cost.search_passes if cost else None,
                *(cell(base, name=name) for name in ("undefended", "defended")),
                *(cell(own, patch=patch, masks=masks) for patch, masks in settings),
            )
        )
    columns = (
        Column("strategy"),
        Column("extra passes"),
        Column("undefended"),
        Column(f"defended ({main[1]}×{main[1]}, {main[0]})"),
        *(Column(f"{masks}×{masks} {patch}", group="certified") for patch, masks in settings),
    )
    return Table(key, title, columns, tuple(rows), notes(results))


def spread(results: Sequence[Result]) -> str | None:
    """`82.4 (81.7–83.2)` for several seeds, `82.1 ±1.2` for one, with a star for a part of the images."""
    if not results:
        return None
    star = "*" if any(r.certified.n < r.available for r in results) else ""
    if len(results) == 1:
        return rate_text(results[0].certified) + star
    rates = [100 * r.certified.rate for r in results]
    return f"{statistics.mean(rates):.1f} ({min(rates):.1f}–{max(rates):.1f}){star}"


def seeds_and_strategies_table(key: str, title: str, results: list[Result], words: str) -> Table:
    """For one patch, in short: the mean over seeds, and from the lowest to the highest where there are several."""
    rows = []
    for strategy in [s for s in ORDER if pick(results, strategy=s)]:
        some = pick(results, strategy=strategy)
        base = pick(some, masks=3)
        if base:
            clean = [statistics.mean(100 * r.rates[name].rate for r in base) for name in ("undefended", "defended")]
            sets = [pick(some, masks=masks) for masks in (3, 6)]
            fewer = f" (6×6: {len(sets[1])})" if sets[1] and len(sets[1]) != len(base) else ""
            passes = base[0].training.search_passes if base[0].training else 0
            rows.append((strategy, f"{len(base)}{fewer}", passes, *clean, *map(spread, sets)))
    names = (
        "fine-tuned on",
        "seeds",
        "extra passes",
        "undefended",
        "defended",
        "certified, 3×3",
        "certified, 6×6",
    )
    words += " Defended with 3×3 masks; for one seed ± half of the 95% interval, for several the mean (lowest–highest)."
    shown = [r for r in results if r.masks in (3, 6)]
    return Table(key, title, tuple(map(Column, names)), tuple(rows), (words, *notes(shown)))


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
        Column("certified, 7 times its side in the input (as usual)"),
        Column("certified, all it can touch in the input"),
    )
    return Table("cifar10-native", "CIFAR-10: what the usual number leaves out", columns, tuple(rows), notes(results))


def sandwich_table(key: str, title: str, runs: Sequence[Attacked]) -> Table:
    """certified ≤ robust ≤ attacked ≤ defended, by strategy and mask set."""
    rows: list[tuple[Cell, ...]] = []
    for run in sorted(runs, key=lambda r: (ORDER.index(r.strategy), r.masks)):
        shares = [rate_text(run.rates[name]) for name in ATTACK_ACCURACIES]
        rows.append((run.strategy, f"{run.masks}×{run.masks}", run.rates["certified"].n, *shares, run.broken))
    names = ("strategy", "masks", "images", "undefended", "… attacked", "defended", "… attacked", "certified")
    columns = (*map(Column, names), Column("certified and broken"))
    words = _effort_notes(runs)
    passes, images = sum(r.passes for r in runs), sum(r.rates["certified"].n for r in runs)
    answers, minutes = sum(r.queries for r in runs), sum(r.seconds for r in runs) / 60
    words.append(f"{passes / images:,.0f} passes and {answers / images:,.0f} answers per image, {minutes:.0f} minutes.")
    return Table(key, title, columns, tuple(rows), (" ".join(words),))


def _effort_notes(runs: Sequence[Attacked] | Sequence[Onslaught]) -> list[str]:
    words = [f"Hardware: {', '.join(sorted({r.device for r in runs}))}."]
    words += [SHARED] if any(r.device.startswith("cuda") for r in runs) else []
    words += [f"{plan} for each objective." for plan in sorted({r.plan for r in runs})]
    words += [f"Gradients in {', '.join(sorted({r.precision for r in runs}))}."]
    return [*words, f"Seed {', '.join(sorted({str(r.seed) for r in runs}))}."]


def campaign_table(found: Sequence[Onslaught]) -> Table:
    """Certified images attacked and broken, by network and defence."""
    rows = [
        (o.network, o.setting, o.defense, o.seen, o.tried, o.broken, f"{o.passes / o.tried:,.0f}", o.seconds / 60)
        for o in found
    ]
    names = (
        "network",
        "patch",
        "defence",
        "images",
        "certified and attacked",
        "broken",
        "passes per attacked image",
        "minutes",
    )
    words = [
        *_effort_notes(found),
        "A broken defence is attacked until enough of its images fall, or for a quarter of the time.",
    ]
    title = "Certified images under attack"
    return Table("campaign", title, tuple(map(Column, names)), tuple(rows), (" ".join(words),))


def demo_masks_table(results: list[Result]) -> Table:
    """Certified by the networks of `make demo`, with other mask sets than they were trained on too."""
    masks = sorted({r.masks for r in results})
    rows = [(s, *(cell(results, strategy=s, masks=m, star="") for m in masks)) for s in ("cutout", "greedy")]
    columns = (Column("strategy"), *(Column(f"{m}×{m}", group="certified") for m in masks))
    beside = notes(results, star=False, timed=False)[0]
    words = f"n = {results[0].certified.n} of {results[0].available:,} test images. {beside}"
    return Table("demo-masks", "The networks of make demo, any 5×5 patch", columns, tuple(rows), (words,))


def demo_table(results: list[Result]) -> Table:
    """What `make demo` prints."""
    rows = []
    chosen = [r for r in results if r.masks in (3, 6)]
    shown = sorted(chosen, key=lambda r: (ORDER.index(r.strategy), r.masks))
    for r in shown:
        low, high = r.certified.interval
        shares = [f"{100 * r.rates[name].rate:.1f}%" for name in ("undefended", "defended", "certified")]
        rows.append((r.strategy, f"{r.masks}×{r.masks} masks", *shares, f"{100 * low:.1f}–{100 * high:.1f}%"))
    names = ("fine-tuned on", "certified with", "undefended", "defended", "certified", "95% interval")
    words = f"n = {results[0].certified.n}. {notes(shown, star=False)[0]}"
    return Table("demo", "make demo: Fashion-MNIST, any 5×5 patch", tuple(map(Column, names)), tuple(rows), (words,))
