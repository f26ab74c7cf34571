"""Training runs: how loss and validation accuracies went, and what each strategy cost."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from patchproof.report._figures import COLOURS, LINES, Picture, draw, error_line, percent_axis
from patchproof.report._runs import Epoch, TrainRun
from patchproof.report._tables import Column, Table
from patchproof.report._text import shortened

POINTS = 120
"""Of a loss curve: each is the mean over as many steps as it takes."""


def training_table(runs: Sequence[TrainRun]) -> Table:
    heads = ("run", "strategy", "extra passes an image", "steps", "epochs", "seconds", "best epoch")
    columns = (*map(Column, heads), Column("undefended"), Column("certified"))
    rows = []
    for run in runs:
        best = run.best
        found = (best.epoch, best.undefended, best.certified) if best else (None, None, None)
        steps = run.losses[-1][0] if run.losses else 0
        cost = run.search_passes, steps, len(run.epochs), run.seconds
        rows.append((run.name, run.strategy or "unknown", *cost, *found))
    note = "Accuracies on the validation images at the best epoch, 3×3 masks, with exact 95% intervals."
    return Table("training", "Training", columns, tuple(rows), (note,))


def training_pictures(runs: Sequence[TrainRun]) -> list[Picture]:
    found = [
        _loss_picture([run for run in runs if run.losses]),
        _validation_picture([run for run in runs if run.epochs], "certified"),
        _validation_picture([run for run in runs if run.epochs], "undefended"),
    ]
    return [picture for picture in found if picture is not None]


def line_name(run: TrainRun) -> str:
    strategy = run.strategy
    return shortened(f"{run.name} ({strategy})" if strategy and strategy not in run.name else run.name, 40)


def _loss_picture(runs: Sequence[TrainRun]) -> Picture | None:
    if not runs:
        return None

    def plot(axes: Axes) -> None:
        for number, run in enumerate(runs):
            steps, low, mean, high = smoothed(run.losses)
            colour = COLOURS[number % len(COLOURS)]
            axes.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)
            axes.plot(steps, mean, color=colour, linestyle=LINES[number % len(LINES)], label=line_name(run))
        axes.set(xlabel="optimiser step", ylabel="loss on masked copies (nats)")

    steps = ", ".join(f"{len(run.losses):,}" for run in runs)
    alt = f"Training loss of {len(runs)} runs ({steps} steps); the band holds 80% of the steps around each point."
    counts = ", ".join(f"{count:,}" for count in sorted({len(run.losses) for run in runs}))
    title = f"Training loss, n = {shortened(counts, 24)} steps, 80% of them in the band"
    return draw("loss", title, alt, plot, height=3.0 + 0.16 * len(runs))


def smoothed(losses: Sequence[tuple[int, float]]) -> tuple[list[float], list[float], list[float], list[float]]:
    """Step, 10%, mean and 90% of the losses of neighbouring steps, in at most POINTS groups."""
    groups = np.array_split(np.array(losses, dtype=np.float64), min(POINTS, len(losses)))
    steps = [float(group[:, 0].mean()) for group in groups]
    low, high = ([float(np.percentile(group[:, 1], q)) for group in groups] for q in (10, 90))
    return steps, low, [float(group[:, 1].mean()) for group in groups], high


def _validation_picture(runs: Sequence[TrainRun], name: str) -> Picture | None:
    if not runs:
        return None

    def plot(axes: Axes) -> None:
        for number, run in enumerate(runs):
            rates = [getattr(epoch, name) for epoch in run.epochs]
            error_line(
                axes, [float(e.epoch) for e in run.epochs], rates, label=line_name(run), number=number, of=len(runs)
            )
        last = max(epoch.epoch for run in runs for epoch in run.epochs)
        axes.set(xlabel="epoch", ylabel=f"{name} (% of validation images)", xlim=(0.5, last + 0.5))
        percent_axis(axes, (getattr(epoch, name) for run in runs for epoch in run.epochs))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))

    n = ", ".join(f"{total:,}" for total in sorted({_size(epoch, name) for run in runs for epoch in run.epochs}))
    alt = f"{name.capitalize()} accuracy on validation images after each epoch of {len(runs)} runs, 95% intervals."
    title = f"Validation, {name}, n = {n}"
    return draw(f"validation-{name}", title, alt, plot, height=3.0 + 0.16 * len(runs))


def _size(epoch: Epoch, name: str) -> int:
    return int(getattr(epoch, name).n)
