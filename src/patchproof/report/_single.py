"""What a report says about one certification."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes

from patchproof.records import ACCURACIES, Rate
from patchproof.report._figures import COLOURS, INK, Picture, draw, error_bars, errors, percents
from patchproof.report._lineage import Training
from patchproof.report._measures import Histogram, by_class, histogram, margins, quantiles
from patchproof.report._runs import CertifyRun
from patchproof.report._tables import Cell, Column, Table
from patchproof.report._text import duration, printable, shortened

MEANING = {
    "undefended": "clean images, the classifier alone",
    "defended": "clean images, through double masking",
    "certified": "under any such patch, provably",
}
MOST_CLASSES = 40
"""So many classes can be told apart in one figure; of more, the distribution is shown."""

INTERVALS = "Brackets and bands are exact (Clopper–Pearson) 95% intervals."
MARGIN = (
    "The margin is the smallest lead of the label's logit over the runner-up among all pairs of masks. Negative: some "
    "pair makes the classifier answer another label."
)
EARLY = "An image is given up at its first failure, so the margin of one not certified bounds the smallest from above."


def accuracy_table(run: CertifyRun) -> Table:
    columns = (Column("accuracy"), Column("images"), Column("rate (95% interval)"), Column("of what"))
    rows: list[tuple[Cell, ...]] = []
    for name, rate in run.rates.items():
        rows.append((name, f"{rate.k:,} of {rate.n:,}", rate, MEANING[name]))
    return Table("accuracies", "Three accuracies", columns, tuple(rows))


def class_table(run: CertifyRun) -> Table:
    columns = (Column("class"), Column("images"), *(Column(name) for name in reversed(ACCURACIES)))
    rows: list[tuple[Cell, ...]] = []
    for label, found in by_class(run.good).items():
        rows.append((run.class_name(label), found["certified"].n, *(found[name] for name in reversed(ACCURACIES))))
    return Table("classes", "Accuracies by class", columns, tuple(rows), ("With exact 95% intervals.",))


def ends(table: Table, count: int) -> Table:
    """The rows with the lowest and with the highest certified accuracy, if there are more than twice as many."""
    if len(table.rows) <= 2 * count:
        return table
    ordered = sorted(table.rows, key=_certified_share)
    note = f"The {count} lowest and the {count} highest of {len(table.rows):,} classes; tables/{table.key}.csv has all."
    rows = (*ordered[:count], *ordered[-count:])
    return Table(table.key, table.title, table.columns, rows, (*table.notes, note))


def _certified_share(row: Sequence[object]) -> float:
    return next(cell.rate for cell in row if isinstance(cell, Rate))


def margin_table(run: CertifyRun) -> Table:
    heads = ("images", "smallest", "5%", "median", "95%", "largest")
    columns = (Column("margin (logits)"), *(Column(head, digits=3) for head in heads))
    rows = []
    for words, certified in (("certified", True), ("not certified", False)):
        values = margins(run.good, certified=certified)
        rows.append((words, len(values), *quantiles(values)))
    unknown = sum(record.margin is None for record in run.good)
    notes = (f"{unknown:,} images have no margin: the classifier answered NaN.",) if unknown else ()
    return Table("margins", "Margins", columns, tuple(rows), notes)


def cost_table(run: CertifyRun) -> Table:
    passes = [float(record.forwards) for record in run.good]
    smallest, _, median, high, largest = quantiles(passes)
    most = len(run.facts.masks.unions) if run.facts.masks is not None else None
    values: list[tuple[str, str]] = [("masked passes, all images", f"{int(sum(passes)):,}")]
    if passes:
        values += [
            ("masked passes an image, mean", f"{sum(passes) / len(passes):,.1f}"),
            ("median", f"{median:,.0f}"),
            ("from, to", f"{smallest:,.0f} to {largest:,.0f}"),
            ("95% of images take at most", f"{high:,.0f}"),
        ]
    if most is not None:
        values.append(("different masked copies of an image", f"{most:,}"))
    if run.seconds is not None:
        values.append(("time", duration(run.seconds)))
        if run.seconds and passes:
            values.append(("images a second", f"{len(passes) / run.seconds:,.1f}"))
    return Table("cost", "Cost", (Column("what"), Column("how much")), tuple(values))


def settings_table(run: CertifyRun, training: Training) -> Table:
    facts = run.facts
    tau = "unknown" if facts.tau is None else f"{facts.tau:.3g} logits (float32)"
    size = "unknown" if facts.masks is None else "×".join(map(str, facts.masks.image_size))
    rows = (
        ("data set", facts.dataset),
        ("architecture", facts.architecture),
        ("weights", facts.weights or "unknown"),
        ("trained on the masks of", training.strategy or "no training run is known"),
        ("network input", f"{size} pixels"),
        ("patch", facts.patch_words),
        ("masks", facts.masks_words),
        ("a label counts when it leads by τ", tau),
        ("precision", facts.precision),
        ("device", facts.device),
        ("folder", str(run.folder)),
    )
    return Table("settings", "Made with", (Column("what"), Column("value")), tuple(map(_printable_row, rows)))


def _printable_row(row: tuple[str, str]) -> tuple[str, str]:
    return row[0], printable(row[1])


def class_picture(run: CertifyRun) -> Picture:
    found = by_class(run.good)
    if len(found) > MOST_CLASSES:
        return _ranked_classes(run, [rates["certified"] for rates in found.values()])
    names = [f"{shortened(run.class_name(label), 24)} (n = {r['certified'].n})" for label, r in found.items()]

    def plot(axes: Axes) -> None:
        places = list(range(len(names)))
        for number, (name, fill) in enumerate({"certified": COLOURS[0], "defended": "none"}.items()):
            rates = [r[name] for r in found.values()]
            axes.errorbar(
                percents(rates),
                [place + 0.16 * (1 - 2 * number) for place in places],
                xerr=errors(rates),
                fmt="os"[number],
                markerfacecolor=fill,
                color=COLOURS[number],
                capsize=2,
                elinewidth=1,
                label=name,
            )
        axes.set_yticks(places, names)
        axes.set(xlabel="images of the class (%)", xlim=(-2, 102), ylim=(len(names) - 0.4, -0.6))

    alt = f"Certified and defended accuracy of {len(names)} classes with 95% intervals, n = {len(run.good):,}."
    return draw("classes", f"Accuracy by class, n = {len(run.good):,}", alt, plot, height=1.2 + 0.27 * len(names))


def _ranked_classes(run: CertifyRun, rates: list[Rate]) -> Picture:
    ordered = sorted(rates, key=lambda rate: (rate.rate, rate.n))

    def plot(axes: Axes) -> None:
        ranks = list(range(1, len(ordered) + 1))
        low, high = ([100 * rate.interval[end] for rate in ordered] for end in (0, 1))
        axes.fill_between(ranks, low, high, step="mid", color=COLOURS[0], alpha=0.25, linewidth=0, label="95% interval")
        axes.step(ranks, percents(ordered), where="mid", color=COLOURS[0], label="certified")
        axes.set(xlabel="classes, from the lowest to the highest", ylabel="certified (% of the class)", ylim=(-2, 102))

    alt = f"Certified accuracy of {len(ordered)} classes in rising order with 95% intervals."
    title = f"Certified accuracy of {len(ordered):,} classes, n = {len(run.good):,}"
    return draw("classes", title, alt, plot)


def margin_picture(run: CertifyRun) -> Picture | None:
    groups = [margins(run.good, certified=True), margins(run.good, certified=False)]
    found = histogram(groups, n=len(run.good))
    if found is None:
        return None

    def plot(axes: Axes) -> None:
        for number, words in enumerate(("certified", "not certified")):
            label = f"{words} (n = {len(groups[number]):,})"
            error_bars(axes, found.edges, found.shares[number], label=label, number=number)
        axes.axvline(0, color=INK, linewidth=1, linestyle=":")
        axes.set(xlabel=f"margin (logits){_clipping(found)}", ylabel=f"images (% of {len(run.good):,})")

    alt = f"Histogram of margins of {len(groups[0]):,} certified and {len(groups[1]):,} other images."
    return draw("margins", f"Margins, n = {len(run.good):,}", alt, plot)


def cost_picture(run: CertifyRun) -> Picture | None:
    groups = [[float(r.forwards) for r in run.good if bool(r.certified) == kind] for kind in (True, False)]
    found = histogram(groups, n=len(run.good))
    if found is None:
        return None

    def plot(axes: Axes) -> None:
        for number, words in enumerate(("certified", "not certified")):
            label = f"{words} (n = {len(groups[number]):,})"
            error_bars(axes, found.edges, found.shares[number], label=label, number=number)
        axes.set(xlabel=f"masked passes an image{_clipping(found)}", ylabel=f"images (% of {len(run.good):,})")

    alt = f"Histogram of the passes that {len(run.good):,} images took."
    return draw("cost", f"Passes an image, n = {len(run.good):,}", alt, plot)


def _clipping(found: Histogram) -> str:
    return f"; {found.clipped:,} beyond the ends in the end bins" if found.clipped else ""
