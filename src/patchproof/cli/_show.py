"""How results look in a terminal."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from patchproof.cli._terminal import Console
from patchproof.records import ACCURACIES, Rate, Record, Tally

if TYPE_CHECKING:
    from patchproof.training.loop import StepReport, Trainer

SECONDS_BETWEEN_LINES = 30.0


def percent(rate: float) -> str:
    return f"{100 * rate:.1f}%"


def interval_text(rate: Rate) -> str:
    low, high = rate.interval
    return f"{100 * low:.1f}–{percent(high)}"


def _bar(console: Console, *, shown: bool) -> Progress:
    """How far, how long, how much longer, and what has been found so far; nothing without a terminal."""
    return Progress(
        TextColumn("[bold]{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(elapsed_when_finished=False),
        TextColumn("{task.fields[words]}"),
        console=console,
        disable=not (shown and console.is_terminal),
    )


class RunProgress:
    """A bar with time left and the accuracies so far; without a terminal, a line now and then."""

    def __init__(self, console: Console, *, total: int, tally: Tally, verb: str = "certify") -> None:
        self.console, self.total, self.tally = console, total, tally
        self.last_line = time.monotonic()
        self.bar = _bar(console, shown=True)
        self.task = self.bar.add_task(verb, total=total, completed=tally.done, words="")

    def add(self, records: Sequence[Record]) -> None:
        """Count them, and show what has been counted by now."""
        self.tally.add(records)
        words = " · ".join(f"{name} {percent(rate.rate)}" for name, rate in self.tally.rates().items() if rate.n)
        self.bar.update(self.task, completed=self.tally.done, words=words)
        if not self.console.is_terminal and time.monotonic() - self.last_line > SECONDS_BETWEEN_LINES:
            self.console.print(f"{self.tally.done}/{self.total}  {words}")
            self.last_line = time.monotonic()


@contextmanager
def run_progress(console: Console, *, total: int, tally: Tally, verb: str = "certify") -> Iterator[RunProgress]:
    progress = RunProgress(console, total=total, tally=tally, verb=verb)
    with progress.bar:
        yield progress


class TrainingProgress:
    """Epoch, loss, images a second, how much of the time the search takes, and what is left."""

    def __init__(self, console: Console, trainer: Trainer, *, shown: bool) -> None:
        self.console, self.trainer, self.shown = console, trainer, shown
        self.search = self.images = 0.0
        self.began = time.monotonic()
        self.loss: float | None = None
        self.last_line = time.monotonic()
        self.bar = _bar(console, shown=shown)
        self.task = self.bar.add_task("train", total=trainer.total_steps, completed=trainer.step, words="")

    def add(self, report: StepReport) -> None:
        self.search += report.search_seconds
        self.images += report.images * self.trainer.accelerator.num_processes
        self.loss = report.loss if self.loss is None else 0.95 * self.loss + 0.05 * report.loss
        self.bar.update(self.task, completed=report.step, words=self._text(report))
        if self.shown and not self.console.is_terminal and time.monotonic() - self.last_line > SECONDS_BETWEEN_LINES:
            self.console.print(f"{report.step}/{self.trainer.total_steps}  {self._text(report)}", highlight=False)
            self.last_line = time.monotonic()

    def _text(self, report: StepReport) -> str:
        elapsed = time.monotonic() - self.began  # waiting for images included
        rate, share = self.images / elapsed, self.search / elapsed
        return (
            f"epoch {report.epoch + 1}/{self.trainer.plan.epochs} · loss {self.loss:.3f} · {rate:.0f} images/s · "
            f"search {100 * share:.0f}% of the time"
        )


@contextmanager
def training_progress(console: Console, trainer: Trainer, *, shown: bool) -> Iterator[TrainingProgress]:
    progress = TrainingProgress(console, trainer, shown=shown)
    with progress.bar:
        yield progress


MEANING = {
    "undefended": "clean images, classifier alone",
    "undefended_attacked": "attacked, classifier alone",
    "defended": "clean images, double masking",
    "attacked": "attacked, double masking",
    "certified": "under any such patch, provably",
}


def results_table(results: Mapping[str, Any], *, title: str, names: Sequence[str] = ACCURACIES) -> Table:
    table = Table(title=title, title_justify="left", header_style="bold")
    table.add_column("accuracy")
    for name in ("images", "rate", "95% interval"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("of what", style="dim")
    for name in names:
        rate = Rate(results[name]["k"], results[name]["n"])
        if not rate.n:
            continue
        style = "bold green" if name == "certified" else None
        counts = f"{rate.k} of {rate.n}"
        table.add_row(
            name.replace("_", " "), counts, percent(rate.rate), interval_text(rate), MEANING[name], style=style
        )
    return table
