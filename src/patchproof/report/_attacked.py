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


TARGETS = {"undefended_attacked": "undefended", "attacked": "defended"}
"""An accuracy under attack, and the clean one that it cannot exceed."""


def attacked_rates(run: CertifyRun) -> dict[str, Rate]:
    """All five over the same images: one that was not attacked counts as its clean answer, which keeps upper bounds
    upper bounds. A target that was not attacked at all has no rate."""
    found = Tally(ATTACK_ACCURACIES).add(run.attacks).rates()
    for name, clean in TARGETS.items():
        answers = [getattr(r, clean) if getattr(r, name) is None else getattr(r, name) for r in run.attacks]
        found[name] = Rate(sum(map(bool, answers)), len(answers)) if found[name].n else Rate(0, 0)
    return found


def attacked_runs(runs: Sequence[CertifyRun]) -> list[CertifyRun]:
    return [run for run in runs if run.attacks]


def attack_notices(run: CertifyRun) -> list[str]:
    """What must be said first: certificates that broke, and records without a word about attacks."""
    silent = len(run.good) - len(run.attacks)
    if not run.attacks or not silent:
        return _broken_notice(run)
    words = count_words(silent, "record says", "records say")
    return [*_broken_notice(run), f"{words} nothing about attacks; the accuracies under attack leave them out"]


def _broken_notice(run: CertifyRun) -> list[str]:
    broken = [str(record.index) for record in run.attacks if record.broken]
    if not broken:
        return []
    which = shortened(", ".join(broken), 60)
    words = count_words(len(broken), "certified image was", "certified images were")
    return [f"{words} broken by a patch, which a certificate rules out: image {which}; see broken/ in the run's folder"]


def attack_table(runs: Sequence[CertifyRun]) -> Table:
    """All five accuracies, how many certificates broke, and what was tried: of one run below each other, of several a
    row each."""
    rows = [_row(run) for run in runs]
    heads = ("run", *NAMES.values(), "certified but broken", "attacked copies")
    notes = ("Rates with exact 95% intervals.", *(note for run in runs for note in _untried(run)))
    if len(rows) > 1:
        return Table("attacked", "Under attack", tuple(map(Column, heads)), tuple(rows), notes)
    pairs = tuple(zip(heads[1:], rows[0][1:], strict=True))
    return Table("attacked", "Under attack", (Column("what"), Column("images")), pairs, notes)


def _row(run: CertifyRun) -> tuple[Cell, ...]:
    rates = attacked_rates(run)
    found = [rates[name] if rates[name].n else None for name in ATTACK_ACCURACIES]
    passes = sum(record.passes for record in run.attacks)
    return run.name, *found, sum(record.broken for record in run.attacks), passes


def _untried(run: CertifyRun) -> list[str]:
    tried, n = sum(record.attacked is not None for record in run.attacks), len(run.attacks)
    if not 0 < tried < n:
        return []
    return [f"{run.name}: {tried:,} of {n:,} images were attacked behind the defence; the others count as clean."]


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

    n = ", ".join(f"{total:,}" for total in sorted({len(run.attacks) for run in runs}))
    alt = f"Five accuracies of {len(runs)} attacked runs with 95% intervals, n = {n}; a band holds what is robust."
    title = f"Robust accuracy lies in the band, n = {n}"
    return draw("attacked", title, alt, plot, height=1.9 + 0.6 * len(runs))


def changed(run: CertifyRun) -> list[AttackRecord]:
    """The images whose right defended answer a patch changed, certified ones first."""
    fell = (r for r in run.attacks if r.place is not None and (r.defended or r.broken))
    return sorted(fell, key=lambda r: (not r.broken, r.index))
