"""The command line: parses, calls the library, shows what it yields. Wrong input is one line and an exit code."""

from __future__ import annotations

import importlib
import inspect
import io
import logging
import os
import re
import signal
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from cyclopts import (
    App,
    CycloptsError,
    Parameter,
    Token,
    UnknownOptionError,
    UnusedCliTokensError,
    default_name_transform,
)
from cyclopts.config import Dict
from rich.markup import escape

from patchproof.cli._process import STOP, keep_freed_memory, sleep_while_waiting
from patchproof.cli._settings import (
    ARGUMENTS,
    COMMANDS,
    FLAGS,
    GROUPS,
    SETTINGS,
    TrainSettings,
    commands_with,
    with_defense,
)
from patchproof.cli._show import Console
from patchproof.cli._sources import STANDARD_INPUT, find_flag, in_flags, known_settings, read_config_file
from patchproof.recipes import find_recipe
from patchproof.settings import DEFENSE_OPTIONS
from patchproof.types import InputError, PatchproofError, require_address, require_free, require_run
from patchproof.version import __version__

RESUMABLE = ("certify", "attack", "train")


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
    for name in kinds:
        kind: Any = kinds[name]
        if kinds is SETTINGS and hasattr(kind, "defense"):
            kind = with_defense(kind, kind.defense)
        app.command(taking(name, kind), name=name)
    app.register_install_completion_command(help="Install completion for your shell (bash, zsh, fish), once.")
    return app


@cache
def taking(command: str, kind: type[Any]) -> Callable[..., int]:
    """The command with its settings as flags; what comes before them are its arguments."""
    hints = typing.get_type_hints(kind)  # fields come from modules with names of their own
    for name, hint in hints.items():
        converter = whole_number if int in (hint, *typing.get_args(hint)) else None
        default = False if hint is bool else None  # "default: False" would suggest that a switch takes a value
        brought_by = next(one.__name__ for one in reversed(kind.__mro__) if name in inspect.get_annotations(one))
        own = f"Options of this {'defence' if 'Options' in brought_by else 'command'}"
        group = GROUPS.get(brought_by, own)
        hints[name] = Annotated[hint, Parameter(group=group, converter=converter, show_default=default)]
    kind.__init__.__annotations__ = kind.__annotations__ = hints
    parameters = []
    for name, (hint, words) in ARGUMENTS.get(command, {}).items():
        missing = None if type(None) in typing.get_args(hint) else inspect.Parameter.empty
        several = (f"{name.upper()}...",) if typing.get_origin(hint) is list else None
        hint = Annotated[hint, Parameter(name=several, help=words)]
        place = inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY, default=missing, annotation=hint)
        parameters.append(place)
    places, flags = len(parameters), Annotated[kind, Parameter(name="*")]  # type: ignore[valid-type]
    last = inspect.Parameter("settings", inspect.Parameter.KEYWORD_ONLY, default=kind(), annotation=flags)
    parameters.append(last)

    def call(*values: Any, settings: Any = last.default) -> int:
        output, main = getattr(settings, "output", None), os.environ.get("LOCAL_RANK", "0") == "0"
        if output is not None and main and hasattr(settings, "resume") and not settings.dry_run:
            require_free(output, resume=settings.resume)  # before the seconds of an import
        if hasattr(settings, "port"):
            require_address(settings.host, settings.port)
        named = [one for value in values for one in (value if isinstance(value, list) else [value])]
        for path in (one for one in named if isinstance(one, Path) and one != Path(STANDARD_INPUT)):
            if command == "report":
                require_run(path)
            elif not (path.exists() or str(path).startswith("~")):
                raise InputError(f"no such {'image or folder' if command == 'predict' else 'folder'}: {path}")
        if main and "torch" not in sys.modules:  # a sign of life before the seconds that its import takes
            Console(stderr=True, highlight=False).print(f"[dim]{command}: loading PyTorch[/]")
        module, _, function = COMMANDS[command][1].partition(":")
        does = getattr(importlib.import_module(f"patchproof.cli.{module}"), function)
        return does(*values, *[None] * (places - len(values)), settings)

    call.__name__, call.__doc__ = command, kind.__doc__
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call


def whole_number(hint: Any, tokens: Sequence[Token]) -> Any:
    """An integer as it was written; what cyclopts itself does rounds 2.5 silently."""
    text = tokens[0].value
    words = [word for part in typing.get_args(hint) for word in typing.get_args(part)]  # e.g. Literal["auto"]
    if text in words:
        return text
    try:
        return int(text)
    except ValueError:
        allowed = "".join(f" or {word}" for word in words)
        raise ValueError(f"it must be a whole number{allowed}, not {text}") from None


class Notes(logging.Handler):
    """What the library has to say, below the command."""

    def emit(self, record: logging.LogRecord) -> None:
        note = escape(in_flags(record.getMessage(), None))
        Console(stderr=True, soft_wrap=True, highlight=False).print(f"[yellow]note:[/] {note}")


def run(tokens: Sequence[str]) -> int:
    """Exit code of one command: 0 done, 1 a failed check or run, 2 wrong usage, 128 + signal when stopped by one."""
    tokens, kind = [STANDARD_INPUT if token == "-" else token for token in tokens], None
    for place in range(len(tokens) - 1, 0, -1):
        if re.match(r"-\d", tokens[place]) and re.fullmatch(r"--[a-z-]+", tokens[place - 1]):
            tokens[place - 1 : place + 1] = [f"{tokens[place - 1]}={tokens[place]}"]  # a value, not a flag
    Console.silent, STOP.folder = "--quiet" in tokens, None
    logger = logging.getLogger("patchproof")
    logger.setLevel(logging.DEBUG if "--verbose" in tokens else logging.INFO)
    logger.handlers, logger.propagate = [Notes()], False
    try:
        for place, token in enumerate(tokens if tokens[:1] != ["ls"] else ()):
            if re.fullmatch(r"(--[a-z-]+=)?\s*", token):  # as a path it would mean the current folder
                given = " ".join(tokens[max(0, place - 1) : place + 1]).rstrip(" =\t\n")
                raise InputError(f"what comes after `{given}` is empty; is a variable not set?")
        kind, layers = _layers(tokens)
        app = build_app(SETTINGS if kind is None else {**SETTINGS, tokens[0]: kind})
        app.config = tuple(layers)
        result = app(tokens, exit_on_error=False, print_error=False, result_action="return_value")
        return result if isinstance(result, int) else 0
    except (Exception, KeyboardInterrupt) as error:
        # A library may have lost the interrupt and raised something else for it.
        interrupted = STOP.asked is not None or isinstance(error, KeyboardInterrupt)
        code, message = _complaint(error, tokens[:1], kind)
        if interrupted:
            STOP.ignore_further()
            code, message = 128 + (STOP.asked or signal.SIGINT), f"stopped{_go_on(tokens[:1])}"
        if isinstance(error, BrokenPipeError) or (interrupted and os.environ.get("RANK", "0") != "0"):
            return code  # nobody listens, or the main one of several processes speaks
        if message is None or ("--debug" in tokens and not interrupted):
            raise
    one_line = escape(" ".join(message.split()))
    Console(stderr=True, quiet=False, soft_wrap=True, highlight=False).print(f"[bold red]patchproof:[/] {one_line}")
    return code


def _complaint(error: BaseException, command: Sequence[str], kind: type[Any] | None) -> tuple[int, str | None]:
    """Exit code and one line for what a user can put right; no line for a fault of the program."""
    if isinstance(error, UnknownOptionError):
        flag = str(error.token.keyword or error.token.value).split("=")[0].removeprefix("--").replace("-", "_")
        owners = [n for n, o in DEFENSE_OPTIONS.items() if flag in {FLAGS.get(f.name, f.name) for f in fields(o)}]
        if owners or (verbs := commands_with(flag)):
            whose = f"the defence {', '.join(owners)}" if owners else f"the command {', '.join(verbs)}"
            return 2, f"Unknown option: --{flag.replace('_', '-')}. It is for {whose}."
        known = {FLAGS.get(f.name, f.name) for f in fields(kind)} if kind else set()
        if begun := [name for name in known if flag.startswith(name)]:  # --patchs is rather --patch than --patches
            longest = max(begun, key=len).replace("_", "-")
            return 2, f"Unknown option: --{flag.replace('_', '-')}. Did you mean --{longest}?"
        return 2, str(error)
    if isinstance(error, UnusedCliTokensError):
        unused = " ".join(error.unused_tokens or ())
        return 2, f"unexpected argument: {unused}; see `patchproof {' '.join(command)} --help`"
    if isinstance(error, CycloptsError):
        return 2, str(error)
    if isinstance(error, PatchproofError):
        return 2 if isinstance(error, InputError) else 1, in_flags(str(error), kind)
    torch = sys.modules.get("torch")
    if isinstance(error, MemoryError) or (torch is not None and isinstance(error, torch.OutOfMemoryError)):
        return 1, "out of memory; choose a smaller --batch-size"
    if isinstance(error, RuntimeError) and "home directory" in str(error):  # Path.expanduser of ~stranger/…
        return 2, "a path begins with ~ and a name that no user of this machine has"
    if isinstance(error, PermissionError) and error.filename:
        return 1, f"cannot read or write {error.filename}: {error.strerror}"
    if isinstance(error, OSError):
        where = f" ({error.filename})" if error.filename else ""
        return 1, f"{error.strerror or error}{where}{_go_on(command)}"
    return 1, None


def _go_on(command: Sequence[str]) -> str:
    """Advice that fits the command and what its folder holds."""
    if not command or command[0] not in RESUMABLE or STOP.folder is None:
        return ""
    begun = (STOP.folder / "manifest.json").exists()
    return "; what was finished is on disk, continue with --resume" if begun else "; nothing was written yet"


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
        training = dict(find_recipe(str(recipe)).training)
        layers.append(Dict(training, use_commands_as_keys=False, source=f"recipe {recipe}"))
    return kind, layers


def main() -> None:
    keep_freed_memory()
    sleep_while_waiting()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # × or ↔ on a terminal that knows only ASCII
    try:
        STOP.listen()
        code = run(sys.argv[1:])
        STOP.ignore_further()
    except KeyboardInterrupt:  # just before the command, or just after it
        code = 128 + (STOP.asked or signal.SIGINT)
    sys.exit(code)


__all__ = ["build_app", "main", "run"]
