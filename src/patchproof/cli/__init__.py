"""The command line: parses, calls the library, shows what it yields. Wrong input is one line and an exit code."""

from __future__ import annotations

import inspect
import io
import logging
import os
import signal
import sys
import threading
import typing
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import torch
from cyclopts import App, CycloptsError, Parameter, default_name_transform
from cyclopts.config import Dict
from rich.markup import escape

from patchproof.cli import _runs
from patchproof.cli._settings import FLAGS, SETTINGS, TrainSettings, with_defense
from patchproof.cli._show import Console
from patchproof.cli._sources import find_flag, in_flags, known_settings, read_config_file
from patchproof.cli.bench import bench
from patchproof.cli.demo import demo
from patchproof.cli.doctor import doctor
from patchproof.cli.ls import ls
from patchproof.cli.pages import explore, report
from patchproof.recipes import find_recipe
from patchproof.types import InputError, PatchproofError
from patchproof.version import __version__

COMMANDS = (demo, _runs.train, _runs.certify, _runs.attack, _runs.predict, report, explore, bench, ls, doctor)


def build_app(kinds: Mapping[str, type[Any]] = SETTINGS) -> App:
    """The commands; `kinds` are the settings that each takes, with the options of the defence chosen or the default."""
    app = App(
        name="patchproof",
        version=__version__,
        suppress_keyboard_interrupt=False,
        help="Make image classifiers provably resistant to adversarial patches, and measure the proof.",
        default_parameter=Parameter(
            negative=(), name_transform=lambda name: FLAGS.get(name) or default_name_transform(name)
        ),
    )
    for command in COMMANDS:
        kind: Any = kinds.get(command.__name__)
        if kinds is SETTINGS and hasattr(kind, "defense"):
            kind = with_defense(kind, kind.defense)
        app.command(command if kind is None else taking(command, kind), name=command.__name__)
    return app


def taking(command: Callable[..., int], kind: type[Any]) -> Callable[..., int]:
    """The command with its settings as flags; what comes before them are its arguments."""
    kind.__init__.__annotations__ = typing.get_type_hints(kind)  # fields come from modules with names of their own
    signature = inspect.signature(command, eval_str=True)
    *places, last = signature.parameters.values()
    places = [place.replace(kind=inspect.Parameter.POSITIONAL_ONLY) for place in places]
    flags = Annotated[kind, Parameter(name="*")]  # type: ignore[valid-type]
    last = last.replace(kind=inspect.Parameter.KEYWORD_ONLY, default=kind(), annotation=flags)

    @wraps(command)
    def call(*values: Any, settings: Any = last.default) -> int:
        return command(*values, settings)

    call.__signature__ = signature.replace(parameters=[*places, last])  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in (*places, last)}
    return call


class Notes(logging.Handler):
    """What the library has to say, below the command."""

    def emit(self, record: logging.LogRecord) -> None:
        note = escape(record.getMessage())
        Console(stderr=True, soft_wrap=True, highlight=False).print(f"[yellow]note:[/] {note}")


def run(tokens: Sequence[str]) -> int:
    """Exit code of one command: 0 done, 1 a failed check or run, 2 wrong usage."""
    tokens, kind = list(tokens), None
    logger = logging.getLogger("patchproof")
    logger.setLevel(logging.INFO)
    logger.handlers, logger.propagate = [Notes()], False
    try:
        kind, layers = _layers(tokens)
        app = build_app(SETTINGS if kind is None else {**SETTINGS, tokens[0]: kind})
        app.config = tuple(layers)
        result = app(tokens, exit_on_error=False, print_error=False, result_action="return_value")
        return result if isinstance(result, int) else 0
    except (Exception, KeyboardInterrupt) as error:
        # A library may have lost the interrupt and raised something else for it.
        interrupted = _stop_asked.is_set() or isinstance(error, KeyboardInterrupt)
        if isinstance(error, BrokenPipeError) or (interrupted and os.environ.get("RANK", "0") != "0"):
            return 1  # nobody listens, or the main one of several processes speaks
        code, message = 1, str(error)
        if interrupted:
            _hear_no_more()
            message = "stopped; what was finished is on disk, continue with --resume"
        elif isinstance(error, CycloptsError):
            code = 2
        elif isinstance(error, PatchproofError):
            code, message = 2 if isinstance(error, InputError) else 1, in_flags(message, kind)
        elif isinstance(error, torch.OutOfMemoryError):
            message = "out of memory on the device; choose a smaller --batch-size"
        elif isinstance(error, OSError):
            what = f"{error.strerror or error}{f' ({error.filename})' if error.filename else ''}"
            message = f"{what}; what was finished is on disk, a run goes on with --resume"
        else:
            raise
    one_line = escape(" ".join(message.split()))
    Console(stderr=True, soft_wrap=True, highlight=False).print(f"[bold red]patchproof:[/] {one_line}")
    return code


def _layers(tokens: list[str]) -> tuple[type[Any] | None, list[Dict]]:
    """The command's settings, with the options of the defence chosen, and what comes below its flags: the file of
    --config, and below that the recipe."""
    kind: Any = SETTINGS.get(tokens[0]) if tokens else None
    if kind is None:
        return None, []
    path = find_flag(tokens, "--config")
    values = {} if path is None else read_config_file(Path(path))
    if hasattr(kind, "defense"):
        kind = with_defense(kind, find_flag(tokens, "--defense") or str(values.get("defense") or kind.defense))
    layers = [Dict(known_settings(values, kind, Path(path)), use_commands_as_keys=False, source=path)] if path else []
    recipe = find_flag(tokens, "--recipe") or values.get("recipe")
    if recipe and kind is TrainSettings:
        settings = find_recipe(str(recipe)).settings()
        layers.append(Dict(settings, use_commands_as_keys=False, source=f"recipe {recipe}"))
    return kind, layers


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
