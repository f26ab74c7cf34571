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
    "undefended": "clean, classifier alone",
    "defended": "clean, defended",
    "certified": "any such patch, provably",
}
DETECTION = {"certified": "right or an alarm, provably"}
ATTACKED = {
    "undefended": "clean images",
    "undefended_attacked": "attacked images",
    "defended": "clean images",
    "attacked": "attacked images",
    "certified": "any such patch",
}
"""Beside the longer names of a table of attacks, short enough for 80 columns."""
DETECTION_ATTACKED = {"attacked": "right or alarm", "certified": "right or alarm"}

MARGINS = {
    "votes": ("derandomized-smoothing", "smoothed-vit", "patchguard-smoothing"),
    "scores": ("clipped-bagnet", "patchguard-bagnet", "bagcert"),
    "bound": ("ibp",),
}
"""What a margin is measured in, where not in logits."""


class Console(rich.console.Console):
    """Rich's, but a string shows its control characters and its bytes that are no text as `\\x1b` and `\\udcff`.

    File names, class names and what a checkpoint says of itself may come from anybody. While all is `silent`, standard
    error shows nothing.
    """

    silent: ClassVar[bool] = False

    def __init__(self, **options: Any) -> None:
        options.setdefault("quiet", self.silent and options.get("stderr", False))
        super().__init__(**options)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str("\n".join(map(visible, text.split("\n"))), **options)


def print_json(value: Any) -> None:
    """One line for programs, on standard output."""
    sys.stdout.write(json.dumps(value, allow_nan=False) + "\n")
    sys.stdout.flush()  # whoever reads it may be waiting for this line


def percent(rate: float) -> str:
    return f"{100 * rate:.1f}%"


def interval_text(rate: Rate) -> str:
    low, high = rate.interval
    return f"{100 * low:.1f}–{percent(high)}"


def new_table(*columns: str, numbers: Sequence[str] = (), title: str | None = None, **options: Any) -> Table:
    """An empty table; the columns that are `numbers` are right-aligned and never wrapped."""
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
    """Where the lines are too narrow for a row, its first cell is a line, whole, and the others are below it."""
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
    """What must be known of the network, for the foot of a table."""
    return Text("; ".join(map(visible, remarks)), style="bold yellow not italic", justify="left") if remarks else None


def results_table(results: Mapping[str, Any], *, title: str) -> Table:
    """The accuracies of a results.json, each as k of n with its interval."""
    from patchproof.runs import ACCURACIES, ATTACK_ACCURACIES, Rate

    meaning, detection = (ATTACKED, DETECTION_ATTACKED) if "broken" in results else (MEANING, DETECTION)
    meaning = meaning | (detection if results["guarantee"] == "detection" else {})
    numbers = "images", "rate", "95% interval"
    table = new_table("accuracy", *numbers, "of what", numbers=numbers, title=title)
    table.caption = remarks_text(results["remarks"])
    for name in ATTACK_ACCURACIES if "broken" in results else ACCURACIES:
        rate = Rate(results[name]["k"], results[name]["n"])
        if rate.n:
            style = "bold green" if name == "certified" else None
            cells = name.replace("_", " "), f"{rate.k} of {rate.n}", percent(rate.rate), interval_text(rate)
            table.add_row(*cells, f"[dim]{meaning[name]}[/]", style=style)
    return table


class Bar:
    """How far, how long, how much longer, and what has been found so far; without a terminal, a line now and then.

    Where the line is too narrow, what has been found is cut off, and nothing else.
    """

    def __init__(self, console: Console, verb: str, *, shown: bool = True) -> None:
        self.console, self.shown, self.in_lines = console, shown, shown and not console.is_terminal
        self.last_line = self.began = self.moment = time.monotonic()
        self.done = self.before = self.total = 0
        self.words = ""
        self.burst = self.moment
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
        """What is being done before the first image."""
        self.progress.update(self.task, words=words)
        if self.in_lines:
            self.console.print(words, highlight=False, soft_wrap=True)

    def at(self, done: int, words: str) -> None:
        now, here = time.monotonic(), self.done - self.before
        next_batch = now - self.moment > 1
        # Images come a batch at a time, all at once: so far, and how long that took, is known when the next comes.
        known = (next_batch or now - self.burst > 1) and (here or self.words)
        self.burst = now if next_batch else self.burst
        if self.in_lines and known and now - self.last_line > SECONDS_BETWEEN_LINES:
            passed = self.moment - self.began
            left = f", {clock(passed / here * (self.total - self.done))} left" if here else ""
            line = f"{self.done}/{self.total}  {clock(passed)}{left}  {self.words}"
            self.console.print(line, highlight=False, soft_wrap=True)
            self.last_line = now
        self.done, self.moment, self.words = done, now, words
        self.progress.update(self.task, completed=done, words=words)


def clock(seconds: float) -> str:
    """0:07:32; from two days on, `88 days`."""
    minutes, rest = divmod(round(seconds), 60)
    days = minutes / 60 / 24
    return f"{days:,.0f} days" if days >= 2 else f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


class RunBar(Bar):
    """The accuracies of a certification or an attack so far."""

    tally: Tally
    rates, round = "", 0

    def start(self, tally: Tally, total: int) -> None:
        self.tally = tally
        self.begin(tally.done, total)

    def add(self, record: Record) -> None:
        found = reversed(self.tally.rates().items())
        self.rates = " · ".join(f"{name.replace('_', ' ')} {percent(r.rate)}" for name, r in found if r.n)
        self.round = 0
        self.at(self.tally.done, self.rates)

    def step(self, step: int, steps: int) -> None:
        """One step of an attack on the images that come next; each round tries other places, or another way."""
        self.round += step == 1
        self.at(self.done, " · ".join(filter(None, (f"round {self.round}, step {step}/{steps}", self.rates))))


class TrainingBar(Bar):
    """Epoch, loss, images per second, and how much of the time the search takes; curves go to the tracker, if there is
    one. Each step is the last one if a signal asked for that."""

    trainer: Trainer
    loss: float | None = None
    search = images = 0.0

    def __init__(self, console: Console, accelerator: Accelerator, *, begins: str, learns: str) -> None:
        super().__init__(console, "train", shown=accelerator.is_main_process)
        self.accelerator, self.begins, self.learns = accelerator, begins, learns

    def start(self, trainer: Trainer) -> None:
        self.trainer = trainer
        begins = self.begins if not trainer.step else f"goes on after step {trainer.step} of {trainer.total_steps}"
        if trainer.step == trainer.total_steps:
            begins = f"finished already: {trainer.step} of {trainer.total_steps} steps; more --epochs go on from there"
        if self.shown:
            self.console.print(escape(f"{begins}\n{self.learns}"), soft_wrap=True, highlight=False)
        if self.accelerator.log_with:
            self.accelerator.init_trackers("tracking")
        self.begin(trainer.step, trainer.total_steps)

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
        self.console.print(f"epoch {epoch['epoch']}: mean loss {epoch['loss']:.3f}, {words}", highlight=False)
        self.last_line = time.monotonic()  # a line, too: none about the steps before it comes after it
