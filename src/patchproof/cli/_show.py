"""How results look in a terminal."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import rich.console
from rich.markup import escape
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text

from patchproof.cli._process import STOP
from patchproof.types import visible

if TYPE_CHECKING:
    from accelerate import Accelerator

    from patchproof.runs import Rate, Record, Tally
    from patchproof.training.loop import StepReport, Trainer

SECONDS_BETWEEN_LINES = 30.0

MEANING = {
    "undefended": ("clean, classifier alone", "clean images"),
    "undefended_attacked": ("", "attacked images"),
    "defended": ("clean, defended", "clean images"),
    "attacked": ("", "attacked images"),
    "certified": ("any such patch, provably", "any such patch"),
}
"""What each accuracy is about, for a certification, and shorter for the wider table of an attack: it has 80 columns."""
DETECTION = {"attacked": ("", "right or alarm"), "certified": ("right or an alarm, provably", "right or alarm")}


class Console(rich.console.Console):
    """Rich's console, which shows control characters and undecodable bytes of a string as `\\x1b` and `\\udcff`.

    File names, class names and the description of a checkpoint may come from anybody. While all consoles are `silent`,
    standard error shows nothing.
    """

    silent: ClassVar[bool] = False

    def __init__(self, **options: Any) -> None:
        options.setdefault("quiet", self.silent and options.get("stderr", False))
        super().__init__(**options)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str("\n".join(map(visible, text.split("\n"))), **options)

    def plain(self, text: str) -> None:
        """Print text as it is: not wrapped, without markup and colours."""
        self.print(text, markup=False, emoji=False, highlight=False, soft_wrap=True)

    def note(self, text: str, kind: str = "note", style: str = "yellow") -> None:
        self.print(f"[{style}]{kind}:[/] {escape(text)}", highlight=False, soft_wrap=True)


def print_json(value: Any) -> None:
    """Print one line for programs on standard output."""
    sys.stdout.write(json.dumps(value, allow_nan=False) + "\n")
    sys.stdout.flush()  # whoever reads it may be waiting for this line


def percent(rate: float) -> str:
    return f"{100 * rate:.1f}%"


def interval_text(rate: Rate) -> str:
    low, high = rate.interval
    return f"{100 * low:.1f}–{percent(high)}"


def clock(seconds: float) -> str:
    """0:07:32; from two days on, `88 days`."""
    minutes, rest = divmod(round(seconds), 60)
    days = minutes / 60 / 24
    return f"{days:,.0f} days" if days >= 2 else f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def new_table(*columns: str, numbers: Sequence[str] = (), title: str | None = None, **options: Any) -> Table:
    """An empty table; the columns in `numbers` are right-aligned and never wrapped."""
    table = Table(header_style="bold", title=escape(title) if title else None, title_justify="left", **options)
    for name in columns:
        number = name in numbers
        table.add_column(name, justify="right" if number else "left", no_wrap=number, overflow="fold")
    return table


def table_values(table: Table) -> list[dict[str, str]]:
    """The rows of a table for programs: column -> text."""
    heads = [str(column.header) for column in table.columns]
    cells = [[Text.from_markup(str(cell)).plain for cell in column.cells] for column in table.columns]
    return [dict(zip(heads, row, strict=True)) for row in zip(*cells, strict=True)]


def print_table(console: Console, table: Table) -> None:
    """Print a table; if it is too wide, print each row as its first cell and, indented below, the others."""
    if console.measure(table, options=console.options.update(width=1000)).maximum <= console.width:
        console.print(table)
        return
    if table.title:
        console.print(table.title, style="italic", soft_wrap=True, highlight=False)
    for row in table_values(table):
        name, *others = row.items()
        values = [" ".join(filter(None, (head, text))) for head, text in others if text]
        console.print(f"[bold]{escape(name[1])}[/]", soft_wrap=True, highlight=False)
        console.print(Padding(escape(" · ".join(values)), (0, 0, 0, 2)), highlight=False)
    if table.caption:
        console.print(table.caption)


def remarks_text(remarks: Sequence[str]) -> Text | None:
    """Remarks about the network, as the caption of a table."""
    return Text("; ".join(map(visible, remarks)), style="bold yellow not italic", justify="left") if remarks else None


def results_table(results: Mapping[str, Any], *, title: str) -> Table:
    """The accuracies of a results.json, each as k of n with its interval."""
    from patchproof.runs import ACCURACIES, ATTACK_ACCURACIES, Rate

    attacked = "broken" in results
    meaning = MEANING | DETECTION if results["guarantee"] == "detection" else MEANING
    numbers = "images", "rate", "95% interval"
    table = new_table("accuracy", *numbers, "of what", numbers=numbers, title=title)
    table.caption = remarks_text(results["remarks"])
    for name in ATTACK_ACCURACIES if attacked else ACCURACIES:
        rate = Rate(results[name]["k"], results[name]["n"])
        if rate.n:
            style = "bold green" if name == "certified" else None
            cells = name.replace("_", " "), f"{rate.k} of {rate.n}", percent(rate.rate), interval_text(rate)
            table.add_row(*cells, f"[dim]{meaning[name][attacked]}[/]", style=style)
    return table


class Bar:
    """A progress bar with the time passed, the time left and some words; without a terminal, a line every 30 seconds.

    If the line is too narrow, only the words are cut.
    """

    def __init__(self, console: Console, verb: str, *, shown: bool = True) -> None:
        self.console, self.shown = console, shown
        self.in_lines = shown and not console.is_terminal
        self.began = self.last_line = self.moment = self.burst = time.monotonic()
        self.done = self.before = self.total = 0
        self.words = ""
        whole = Column(no_wrap=True)
        self.progress = Progress(
            TextColumn("[bold]{task.description}", table_column=whole),
            BarColumn(bar_width=10, table_column=whole),
            MofNCompleteColumn(table_column=whole),
            TimeElapsedColumn(table_column=whole),
            TextColumn("left", table_column=whole),
            TimeRemainingColumn(elapsed_when_finished=False, table_column=whole),
            TextColumn("{task.fields[words]}", table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)),
            expand=True,
            console=console,
            disable=not (shown and console.is_terminal),
        )
        self.task = self.progress.add_task(verb, total=None, words="")

    def begin(self, done: int, total: int) -> None:
        self.done = self.before = done
        self.total, self.began = total, time.monotonic()
        self.progress.reset(self.task, total=total, completed=done, words="")

    def say(self, words: str) -> None:
        """Say what is being done before the first image."""
        self.progress.update(self.task, words=words)
        if self.in_lines:
            self.console.plain(words)

    def at(self, done: int, words: str) -> None:
        """Show that so much is done. The records of a batch come all at once, so a line is about the batches before."""
        now, finished = time.monotonic(), self.done - self.before
        new_batch = now - self.moment > 1
        whole_batches = (new_batch or now - self.burst > 1) and (finished or self.words)
        if new_batch:
            self.burst = now
        if self.in_lines and whole_batches and now - self.last_line > SECONDS_BETWEEN_LINES:
            passed = self.moment - self.began
            left = f", {clock(passed / finished * (self.total - self.done))} left" if finished else ""
            self.console.plain(f"{self.done}/{self.total}  {clock(passed)}{left}  {self.words}")
            self.last_line = now
        self.done, self.moment, self.words = done, now, words
        self.progress.update(self.task, completed=done, words=words)


class RunBar(Bar):
    """The accuracies of a certification or an attack so far."""

    tally: Tally
    rates, round = "", 0

    def start(self, tally: Tally, total: int) -> None:
        self.tally = tally
        self.begin(tally.done, total)
        if self.shown and tally.done == total:
            self.console.plain(f"finished already: {total} of {total} images")

    def add(self, record: Record) -> None:
        found = reversed(self.tally.rates().items())
        self.rates = " · ".join(f"{name.replace('_', ' ')} {percent(r.rate)}" for name, r in found if r.n)
        self.round = 0
        self.at(self.tally.done, self.rates)

    def step(self, step: int, steps: int) -> None:
        """Show a step of an attack on the next images; each round tries other locations, or another kind of attack."""
        self.round += step == 1
        self.at(self.done, " · ".join(filter(None, (f"round {self.round}, step {step}/{steps}", self.rates))))


class TrainingBar(Bar):
    """Epoch, loss, images per second and the share of the search in the time; a tracker, if any, gets the curves.

    After a signal, the first step that ends stops the training.
    """

    trainer: Trainer
    loss: float | None = None
    search = images = 0.0

    def __init__(self, console: Console, accelerator: Accelerator, *, begins: str, learns: str) -> None:
        super().__init__(console, "train", shown=accelerator.is_main_process)
        self.accelerator, self.begins, self.learns = accelerator, begins, learns

    def start(self, trainer: Trainer) -> None:
        self.trainer = trainer
        step, total = trainer.step, trainer.total_steps
        begins = f"goes on after step {step} of {total}" if step else self.begins
        if step == total:
            begins = f"finished already: {step} of {total} steps; more --epochs go on from there"
        if self.shown:
            self.console.plain(f"{begins}\n{self.learns}")
        if self.accelerator.log_with:
            self.accelerator.init_trackers("tracking")
        self.begin(step, total)

    def step(self, report: StepReport) -> None:
        import torch

        self.accelerator.log({"loss": report.loss, "learning_rate": report.learning_rate}, step=report.step)
        self.search += report.search_seconds
        self.images += report.images * self.accelerator.num_processes
        self.loss = report.loss if self.loss is None else 0.95 * self.loss + 0.05 * report.loss
        elapsed = time.monotonic() - self.began  # waiting for images included
        words = (
            f"epoch {report.epoch + 1}/{self.trainer.plan.epochs} · loss {self.loss:.2f} · "
            f"{self.images / elapsed:.0f} images/s · search {100 * self.search / elapsed:.0f}% of the time"
        )
        self.at(report.step, words)
        asked = torch.tensor(float(STOP.asked is not None), device=self.accelerator.device)
        if bool(self.accelerator.reduce(asked, "sum")):  # all processes stop after the same step; `runs.train` saves it
            raise KeyboardInterrupt

    def epoch(self, epoch: Mapping[str, Any]) -> None:
        rates = {name: epoch[name]["rate"] for name in ("undefended", "certified")}
        self.accelerator.log({f"validation/{name}": rate for name, rate in rates.items()}, step=epoch["step"])
        words = ", ".join(f"{name} {percent(rate)}" for name, rate in rates.items())
        self.console.plain(f"epoch {epoch['epoch']}: mean loss {epoch['loss']:.3f}, {words}")
        self.last_line = time.monotonic()  # so that no line about its steps follows the line of an epoch
