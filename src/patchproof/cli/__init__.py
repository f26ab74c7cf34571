"""The command line: parses, calls the library, shows what it yields. Wrong input is one line and an exit code."""

from __future__ import annotations

import inspect
import io
import os
import signal
import sys
import threading
import typing
from collections.abc import Callable, Mapping, Sequence
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
from patchproof.cli.explore import explore
from patchproof.cli.ls import ls
from patchproof.cli.report import report
from patchproof.recipes import find_recipe
from patchproof.types import InputError, PatchproofError
from patchproof.version import __version__

COMMANDS: tuple[Callable[..., int], ...] = (
    demo,
    _runs.train,
    _runs.certify,
    _runs.attack,
    _runs.predict,
    report,
    explore,
    bench,
    ls,
    doctor,
)


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
    *arguments, _ = inspect.signature(command).parameters.values()
    hints = typing.get_type_hints(command)
    flags: Any = Annotated[kind, Parameter(name="*")]  # type: ignore[valid-type]
    kind.__init__.__annotations__ = typing.get_type_hints(kind)  # fields come from modules with names of their own

    default = kind()

    def call(*values: Any, settings: Any = default) -> int:
        return command(*values, settings)

    places = [p.replace(kind=inspect.Parameter.POSITIONAL_ONLY, annotation=hints[p.name]) for p in arguments]
    last = inspect.Parameter("settings", inspect.Parameter.KEYWORD_ONLY, default=default, annotation=flags)
    call.__signature__ = inspect.Signature([*places, last])  # type: ignore[attr-defined]
    call.__annotations__ = {**{p.name: hints[p.name] for p in arguments}, "settings": flags}
    call.__name__, call.__doc__ = command.__name__, command.__doc__
    return call


def run(tokens: Sequence[str]) -> int:
    """Exit code of one command: 0 done, 1 a failed check or run, 2 wrong usage."""
    kind: type[Any] | None = None
    try:
        kind, layers = _layers(list(tokens))
        return _call(list(tokens), kind, layers) or 0
    except CycloptsError as error:
        return _complain(str(error), code=2)
    except PatchproofError as error:
        return _complain(in_flags(str(error), kind), code=2 if isinstance(error, InputError) else 1)
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


def _call(tokens: list[str], kind: type[Any] | None, layers: Sequence[Dict]) -> int | None:
    app = build_app(SETTINGS if kind is None else {**SETTINGS, tokens[0]: kind})
    app.config = tuple(layers)
    try:
        result = app(tokens, exit_on_error=False, print_error=False, result_action="return_value")
    except Exception as error:
        if _stop_asked.is_set():  # the interrupt was lost inside a library, and came out of it as this
            raise KeyboardInterrupt from error
        raise
    return result if isinstance(result, int) else None


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
