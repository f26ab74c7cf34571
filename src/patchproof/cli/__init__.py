"""The command line: parses, calls the library, shows what it yields. Wrong input is one line and an exit code."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from cyclopts import App, CycloptsError
from cyclopts.config import Dict
from rich.markup import escape

from patchproof import __version__
from patchproof.cli._terminal import Console
from patchproof.cli.attack import attack
from patchproof.cli.bench import bench
from patchproof.cli.certify import certify
from patchproof.cli.demo import demo
from patchproof.cli.doctor import doctor
from patchproof.cli.explore import explore
from patchproof.cli.ls import ls
from patchproof.cli.predict import predict
from patchproof.cli.report import report
from patchproof.cli.train import train
from patchproof.config import (
    AttackConfig,
    BenchConfig,
    CertifyConfig,
    DemoConfig,
    ExploreConfig,
    PredictConfig,
    ReportConfig,
    TrainConfig,
    find_flag,
    read_config_file,
)
from patchproof.recipes import find_recipe
from patchproof.types import InputError, PatchproofError

CONFIGS: dict[str, type[Any]] = {
    "certify": CertifyConfig,
    "predict": PredictConfig,
    "attack": AttackConfig,
    "demo": DemoConfig,
    "train": TrainConfig,
    "bench": BenchConfig,
    "report": ReportConfig,
    "explore": ExploreConfig,
}


def build_app() -> App:
    app = App(
        name="patchproof",
        version=__version__,
        suppress_keyboard_interrupt=False,
        help="Make image classifiers provably resistant to adversarial patches, and measure the proof.",
    )
    for command in (demo, train, certify, attack, predict, report, explore, bench, ls, doctor):
        app.command(command)
    return app


def run(tokens: Sequence[str]) -> int:
    """Exit code of one command: 0 done, 1 a failed check or run, 2 wrong usage."""
    try:
        return _call(list(tokens)) or 0
    except CycloptsError as error:
        return _complain(str(error), code=2)
    except PatchproofError as error:
        return _complain(str(error), code=2 if isinstance(error, InputError) else 1)
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") != "0":
            return 1  # one of several processes: the main one speaks
        _hear_no_more()
        return _complain("stopped; what was finished is on disk, continue with --resume", code=1)
    except torch.OutOfMemoryError:
        return _complain("out of memory on the device; choose a smaller --batch-size", code=1)
    except BrokenPipeError:
        return 1
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        return _complain(
            f"{error.strerror or error}{where}; what was finished is on disk, a run goes on with --resume", code=1
        )


def _call(tokens: list[str]) -> int | None:
    app = build_app()
    app.config = tuple(_layers(tokens))
    try:
        result = app(tokens, exit_on_error=False, print_error=False, result_action="return_value")
    except Exception as error:
        if _stop_asked.is_set():  # the interrupt was lost inside a library, and came out of it as this
            raise KeyboardInterrupt from error
        raise
    return result if isinstance(result, int) else None


def _layers(tokens: list[str]) -> Iterator[Dict]:
    """What stands below the flags: the file of --config, and below that the recipe."""
    kind = CONFIGS.get(tokens[0]) if tokens else None
    if kind is None:
        return
    path = find_flag(tokens, "--config")
    values = read_config_file(Path(path), kind) if path is not None else {}
    yield Dict(values, use_commands_as_keys=False, source=str(path))
    recipe = find_flag(tokens, "--recipe") or values.get("recipe")
    if recipe and kind is TrainConfig:
        yield Dict(find_recipe(str(recipe)).settings(), use_commands_as_keys=False, source=f"recipe {recipe}")


def _complain(message: str, *, code: int) -> int:
    one_line = " ".join(message.split())
    Console(stderr=True, soft_wrap=True, highlight=False).print(f"[bold red]patchproof:[/] {escape(one_line)}")
    return code


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # × or ↔ on a terminal that knows only ASCII
    code = run(sys.argv[1:])
    _hear_no_more()
    sys.exit(code)


_stop_asked = threading.Event()


def _stop(number: int, frame: FrameType | None) -> None:
    """A scheduler's stop ends a run as Ctrl-C does."""
    _stop_asked.set()
    raise KeyboardInterrupt


def _hear_no_more() -> None:
    """The command is ending: one more stop from a scheduler changes nothing."""
    if signal.getsignal(signal.SIGTERM) is _stop:  # `main` asked for it
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


__all__ = ["build_app", "main", "run"]
