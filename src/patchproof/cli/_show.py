"""How results look in a terminal."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import rich.console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from patchproof.geometry import size_words
from patchproof.runs import ACCURACIES, ATTACK_ACCURACIES, Rate, Record, Tally

if TYPE_CHECKING:
    from patchproof.training.loop import StepReport, Trainer

SECONDS_BETWEEN_LINES = 30.0

MEANING = {
    "undefended": "clean images, classifier alone",
    "undefended_attacked": "attacked, classifier alone",
    "defended": "clean images, defended",
    "attacked": "attacked, defended",
    "certified": "under any such patch, provably",
}
DETECTION = {
    "attacked": "attacked: right, or an alarm",
    "certified": "right or an alarm under any such patch, provably",
}


class Console(rich.console.Console):
    """Rich's, but a string shows its control characters and its bytes that are no text as `\\x1b` and `\\udcff`.

    File names, class names and what a checkpoint says of itself may come from anybody.
    """

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str("\n".join(map(visible, text.split("\n"))), **options)


def visible(text: str) -> str:
    """`text` in characters that can be shown on one line."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def percent(rate: float) -> str:
    return f"{100 * rate:.1f}%"


def interval_text(rate: Rate) -> str:
    low, high = rate.interval
    return f"{100 * low:.1f}–{percent(high)}"


def threat_words(data: str, defense: Any) -> str:
    masks = getattr(defense, "masks", None)
    words = "" if masks is None else f", {len(masks.axes[0])}×{len(masks.axes[1])} masks"
    return (
        f"{defense.classifier.architecture} on {data}, {defense.name} ({defense.guarantee}): one patch of "
        f"{size_words(*defense.threat.patch_sizes)} pixels anywhere on {size_words(defense.threat.image_size)}{words}"
    )


def new_table(*columns: str, numbers: Sequence[str] = (), title: str | None = None, **options: Any) -> Table:
    """An empty table; the columns that are `numbers` are right-aligned and never wrapped."""
    table = Table(header_style="bold", title=escape(title) if title else None, title_justify="left", **options)
    for name in columns:
        number = name in numbers
        table.add_column(name, justify="right" if number else "left", no_wrap=number, overflow="fold")
    return table


def results_table(results: Mapping[str, Any], *, title: str) -> Table:
    """The accuracies of a results.json, each as k of n with its interval."""
    meaning = MEANING | (DETECTION if results["guarantee"] == "detection" else {})
    numbers = "images", "rate", "95% interval"
    table = new_table("accuracy", *numbers, "of what", numbers=numbers, title=title)
    for name in ATTACK_ACCURACIES if "broken" in results else ACCURACIES:
        rate = Rate(results[name]["k"], results[name]["n"])
        if rate.n:
            style = "bold green" if name == "certified" else None
            cells = name.replace("_", " "), f"{rate.k} of {rate.n}", percent(rate.rate), interval_text(rate)
            table.add_row(*cells, f"[dim]{meaning[name]}[/]", style=style)
    return table


class Bar:
    """How far, how long, how much longer, and what has been found so far; without a terminal, a line now and then."""

    def __init__(self, console: Console, verb: str, *, shown: bool = True) -> None:
        self.console, self.in_lines = console, shown and not console.is_terminal
        self.last_line, self.total = time.monotonic(), 0
        self.progress = Progress(
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
        self.task = self.progress.add_task(verb, total=None, words="")

    def begin(self, done: int, total: int) -> None:
        self.total = total
        self.progress.reset(self.task, total=total, completed=done, words="")

    def at(self, done: int, words: str) -> None:
        self.progress.update(self.task, completed=done, words=words)
        if self.in_lines and time.monotonic() - self.last_line > SECONDS_BETWEEN_LINES:
            self.console.print(f"{done}/{self.total}  {words}", highlight=False)
            self.last_line = time.monotonic()


class RunBar(Bar):
    """The accuracies of a certification or an attack so far."""

    tally: Tally

    def start(self, tally: Tally, total: int) -> None:
        self.tally = tally
        self.begin(tally.done, total)

    def add(self, record: Record) -> None:
        rates = self.tally.rates().items()
        self.at(self.tally.done, " · ".join(f"{name} {percent(rate.rate)}" for name, rate in rates if rate.n))


class TrainingBar(Bar):
    """Epoch, loss, images per second, and how much of the time the search takes."""

    trainer: Trainer
    loss: float | None = None
    search = images = 0.0

    def start(self, trainer: Trainer) -> None:
        self.trainer, self.began = trainer, time.monotonic()
        self.begin(trainer.step, trainer.total_steps)

    def add(self, report: StepReport) -> None:
        self.search += report.search_seconds
        self.images += report.images * self.trainer.accelerator.num_processes
        self.loss = report.loss if self.loss is None else 0.95 * self.loss + 0.05 * report.loss
        elapsed = time.monotonic() - self.began  # waiting for images included
        words = (
            f"epoch {report.epoch + 1}/{self.trainer.plan.epochs} · loss {self.loss:.3f} · "
            f"{self.images / elapsed:.0f} images/s · search {100 * self.search / elapsed:.0f}% of the time"
        )
        self.at(report.step, words)
