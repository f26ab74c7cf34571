"""Accuracy under attack beside what is certified: robust accuracy lies between the two."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes

from patchproof.records import ATTACK_ACCURACIES, AttackRecord, Rate, Tally
from patchproof.report._figures import COLOURS, MARKERS, Picture, draw, errors, percents
from patchproof.report._runs import CertifyRun
from patchproof.report._tables import Cell, Column, Table
from patchproof.report._text import count_words, shortened

NAMES = {
    "undefended": "undefended",
    "undefended_attacked": "undefended, attacked",
    "defended": "defended",
    "attacked": "defended, attacked",
    "certified": "certified",
}
WORDS = (
    "What no tried patch changed is an upper bound on the accuracy under every patch, what is certified a lower one: "
    "robust accuracy lies between them. A patch that was not found proves nothing."
)
CHANGED = "The place of the patch that changed the defended answer is blank on the right; its pixels are not kept."


def attacked_rates(run: CertifyRun) -> dict[str, Rate]:
    return Tally(ATTACK_ACCURACIES).add(run.good).rates()


def attacked_runs(runs: Sequence[CertifyRun]) -> list[CertifyRun]:
    return [run for run in runs if run.attacks]


def broken_notice(run: CertifyRun) -> list[str]:
    broken = [str(record.index) for record in run.attacks if record.broken]
    if not broken:
        return []
    which = shortened(", ".join(broken), 60)
    words = count_words(len(broken), "certified image was", "certified images were")
    return [f"{words} broken by a patch, which a certificate rules out: image {which}; see broken/ in the run's folder"]


def attack_table(runs: Sequence[CertifyRun]) -> Table:
    """A row a run; all five accuracies, what was tried, and how many certificates broke."""
    rows: list[tuple[Cell, ...]] = []
    for run in runs:
        rates = attacked_rates(run)
        found = [rates[name] if rates[name].n else None for name in ATTACK_ACCURACIES]
        passes = sum(record.passes for record in run.attacks)
        rows.append((run.name, *found, sum(record.broken for record in run.attacks), passes))
    columns = (Column("run"), *map(Column, NAMES.values()), Column("certified but broken"), Column("attacked copies"))
    return Table("attacked", "Under attack", columns, tuple(rows), ("Rates with exact 95% intervals.",))


def bounds_picture(runs: Sequence[CertifyRun]) -> Picture:
    """For each run the accuracies as points on a line; the band from certified to attacked holds robust accuracy."""
    found = [attacked_rates(run) for run in runs]

    def plot(axes: Axes) -> None:
        for place, rates in enumerate(found):
            if rates["attacked"].n:
                low, high = 100 * rates["certified"].rate, 100 * rates["attacked"].rate
                axes.fill_betweenx([place - 0.34, place + 0.34], low, high, color=COLOURS[0], alpha=0.18, linewidth=0)
        for number, (name, words) in enumerate(NAMES.items()):
            shown = [(place, rates[name]) for place, rates in enumerate(found) if rates[name].n]
            aside = 0.12 * (number - 2)
            axes.errorbar(
                percents([rate for _, rate in shown]),
                [place + aside for place, _ in shown],
                xerr=errors([rate for _, rate in shown]),
                fmt=MARKERS[number],
                color=COLOURS[number],
                markerfacecolor="none" if name.endswith("attacked") else COLOURS[number],
                capsize=2,
                elinewidth=1,
                label=words,
            )
        axes.set_yticks(range(len(runs)), [shortened(run.name, 24) for run in runs])
        axes.set(xlabel="images (%)", xlim=(-2, 102), ylim=(len(runs) - 0.4, -0.6))

    n = ", ".join(f"{total:,}" for total in sorted({len(run.good) for run in runs}))
    alt = f"Five accuracies of {len(runs)} attacked runs with 95% intervals, n = {n}; a band holds what is robust."
    title = f"Robust accuracy lies in the band, n = {n}"
    return draw("attacked", title, alt, plot, height=1.9 + 0.6 * len(runs))


def changed(run: CertifyRun) -> list[AttackRecord]:
    """The images whose defended answer a patch changed."""
    return [record for record in run.attacks if record.place is not None]
