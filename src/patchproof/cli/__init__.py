"""The command line: parses, calls the library, and shows the results. Wrong input gives one line and an exit code."""

from __future__ import annotations

import importlib
import inspect
import io
import logging
import os
import re
import signal
import sys
import time
import traceback
import typing
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, CycloptsError, Group, Parameter, Token, UnknownOptionError, UnusedCliTokensError
from cyclopts.config import Dict
from rich.markup import escape

from patchproof.cli._process import STOP, keep_freed_memory, sleep_while_waiting
from patchproof.cli._settings import ARGUMENTS, COMMANDS, FLAGS, HEADINGS, SETTINGS, TrainSettings, owners, with_defense
from patchproof.cli._show import Console
from patchproof.cli._sources import STANDARD_INPUT, find_flag, in_flags, known_settings, read_config_file
from patchproof.machine import require_address, require_file, require_free, require_run
from patchproof.recipes import find_recipe
from patchproof.types import InputError, PatchproofError
from patchproof.version import __version__

RESUMABLE = ("certify", "attack", "train")
SECONDS_FOR_MAIN = 3.0
"""Seconds that other processes wait before they fail, so that the main one reports what is wrong for all."""

NAMES_OR_PATHS = ("model", "weights", "dataset", "validation", "teacher")
GROUPS = {owner: Group(heading, sort_key=place) for place, (owner, heading) in enumerate(HEADINGS.items(), start=1)}


def build_app(kinds: Mapping[str, type[Any]] = SETTINGS) -> App:
    """The commands; `kinds` are the settings of each, by default with the options of its default defence."""
    app = App(
        name="patchproof",
        version=__version__,
        suppress_keyboard_interrupt=False,
        help="Make image classifiers provably resistant to adversarial patches, and measure the proof.",
        group_arguments=Group("Arguments", sort_key=0),
        default_parameter=Parameter(negative=(), name_transform=lambda name: FLAGS.get(name, name).replace("_", "-")),
    )
    for place, name in enumerate(kinds):
        kind: Any = kinds[name]
        if kinds is SETTINGS and hasattr(kind, "defense"):
            kind = with_defense(kind, kind.defense)
        app.command(command_function(name, kind), name=name, sort_key=place)
    app.register_install_completion_command(help="Install completion for your shell (bash, zsh, fish), once.")
    return app


@cache
def command_function(command: str, kind: type[Any]) -> Callable[..., int]:
    """The command as a function of its arguments, positional only, and its settings, which cyclopts reads as flags."""
    hints = typing.get_type_hints(kind)  # resolved in the modules that declare the fields
    for name, hint in hints.items():
        owner = next(one.__name__ for one in reversed(kind.__mro__) if name in inspect.get_annotations(one))
        group = GROUPS.get("Options" if owner.endswith("Options") else owner, GROUPS[""])
        converter = whole_number if int in (hint, *typing.get_args(hint)) else None
        default = False if hint is bool else None  # "default: False" would suggest that a switch takes a value
        hint = hint | Path if name in NAMES_OR_PATHS else hint  # str comes first, so that is what the value stays
        hints[name] = Annotated[hint, Parameter(group=group, converter=converter, show_default=default)]
    kind.__init__.__annotations__ = kind.__annotations__ = hints  # cyclopts reads both
    parameters = []
    for name, (hint, words) in ARGUMENTS.get(command, {}).items():
        several = typing.get_origin(hint) is list
        shown = Parameter(name=f"{name.upper()}..." if several else None, help=words)
        annotation = Annotated[hint, shown]  # type: ignore[valid-type]
        place = inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY, annotation=annotation)
        parameters.append(place if several else place.replace(default=None))
    count, defaults = len(parameters), kind()
    flags = inspect.Parameter("settings", inspect.Parameter.KEYWORD_ONLY, default=defaults)
    parameters.append(flags.replace(annotation=Annotated[kind, Parameter(name="*")]))  # type: ignore[valid-type]

    def call(*values: Any, settings: Any = defaults) -> int:
        Console.silent = settings.quiet
        logging.getLogger("patchproof").setLevel(logging.DEBUG if settings.verbose else logging.INFO)
        refuse_early(command, values, settings)
        if is_main_process() and "torch" not in sys.modules:  # a sign of life before the seconds that its import takes
            Console(stderr=True, highlight=False).print(f"[dim]{command}: loading PyTorch[/]")
        module, _, function = COMMANDS[command][1].partition(":")
        does = getattr(importlib.import_module(f"patchproof.cli.{module}"), function)
        return does(*values, *[None] * (count - len(values)), settings)

    call.__name__, call.__doc__ = command, kind.__doc__
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call


def is_main_process() -> bool:
    """True without a launcher, and for the first process of each machine."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def refuse_early(command: str, values: Sequence[Any], settings: Any) -> None:
    """Refuse missing paths and occupied places before the seconds that the import of torch takes."""
    output = getattr(settings, "output", None)
    if command in RESUMABLE and output is not None and is_main_process() and not settings.dry_run:
        require_free(output, resume=settings.resume)
        STOP.folder = output
    if command == "bench" and output is not None:
        require_file(output)
    if command == "explore":
        require_address(settings.host, settings.port)
    for path in [one for value in values for one in (value if isinstance(value, list) else [value])]:
        if command == "report":
            require_run(path)
        elif isinstance(path, Path) and not (path.exists() or path == STANDARD_INPUT or str(path).startswith("~")):
            raise InputError(f"no such {'image or folder' if command == 'predict' else 'folder'}: {path}")


def whole_number(hint: Any, tokens: Sequence[Token]) -> Any:
    """The integer as it was written, or a word that the hint allows; cyclopts itself would round 2.5 silently."""
    text = tokens[0].value
    words = [word for part in typing.get_args(hint) for word in typing.get_args(part)]  # e.g. Literal["auto"]
    if text in words:
        return text
    if re.fullmatch("[+-]?[0-9]{1,4000}", text):  # int() itself also takes 1_0, ٣ and, with an error, longer ones
        return int(text)
    raise ValueError(f"it must be {' or '.join(['a whole number', *words])}, not {text}")


class Notes(logging.Handler):
    """Prints the library's messages on standard error, once per machine: each of its processes has the same to say."""

    def emit(self, record: logging.LogRecord) -> None:
        if is_main_process():
            Console(stderr=True).note(in_flags(record.getMessage(), None))


def run(tokens: Sequence[str]) -> int:
    """Exit code of one command: 0 done, 1 a failed check or run, 2 wrong usage, 128 + signal when stopped by one."""
    kind: type[Any] | None = None
    if tokens[:1] == ["predict"]:
        tokens = ["./-" if token == "-" else token for token in tokens]  # cyclopts would take it for a flag
    STOP.folder = None
    logger = logging.getLogger("patchproof")
    logger.handlers, logger.propagate = [Notes()], False
    try:
        for place, token in enumerate(tokens if tokens[:1] != ["ls"] else ()):
            if re.fullmatch(r"(--[a-z-]+=)?\s*", token):  # as a path it would mean the current folder
                given = " ".join(tokens[max(0, place - 1) : place + 1]).rstrip(" =\t\n")
                raise InputError(f"what comes after `{given}` is empty; is a variable not set?")
        kind, layers = _layers(tokens)
        app = build_app(SETTINGS if kind is None else {tokens[0]: kind})
        app.config = tuple(layers)
        result = app(tokens, exit_on_error=False, print_error=False, result_action="return_value")
        return result if isinstance(result, int) else 0
    except BrokenPipeError:  # nobody reads the output any more
        return 1
    except (Exception, KeyboardInterrupt) as error:
        # A library may have caught the interrupt and raised another error for it.
        if STOP.asked is not None or isinstance(error, KeyboardInterrupt):
            STOP.ignore_further()
            code, message = 128 + (STOP.asked or signal.SIGINT), f"stopped{_how_to_continue(tokens)}"
            if os.environ.get("RANK", "0") != "0":  # the main process says it
                return code
        else:
            code, message = _complaint(error, tokens, kind)
            if not message:
                raise
            if os.environ.get("RANK", "0") != "0":
                time.sleep(SECONDS_FOR_MAIN)  # the launcher ends this process once the main one has failed
            if "--debug" in tokens:
                traceback.print_exc()
    one_line = escape(" ".join(message.split()))
    Console(stderr=True, quiet=False, soft_wrap=True, highlight=False).print(f"[bold red]patchproof:[/] {one_line}")
    return code


def _complaint(error: Exception, tokens: Sequence[str], kind: type[Any] | None) -> tuple[int, str]:
    """Exit code and message for an error that a user can put right; the message is empty for a fault of the program."""
    if isinstance(error, UnknownOptionError):
        flag = str(error.token.keyword or error.token.value).split("=")[0].removeprefix("--").replace("-", "_")
        if owner := owners(flag):
            return 2, f"Unknown option: --{flag.replace('_', '-')}. It is for {owner}."
    if isinstance(error, UnusedCliTokensError):
        return 2, f"unexpected argument: {' '.join(error.unused_tokens or ())}; see `patchproof {tokens[0]} --help`"
    if isinstance(error, CycloptsError):
        return 2, re.sub(r"\bfor \[(\w+)\]", r"for `\1`", str(error))  # a setting of a file, which is no flag
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
        return 1, f"{error.strerror or error}{where}{_how_to_continue(tokens)}"
    return 1, ""


def _how_to_continue(tokens: Sequence[str]) -> str:
    """Advice on --resume, if the command has it and its run folder is known."""
    if not tokens or tokens[0] not in RESUMABLE or STOP.folder is None:
        return ""
    begun = (STOP.folder / "manifest.json").exists()
    return "; what was finished is on disk, continue with --resume" if begun else "; nothing was written yet"


def _layers(tokens: Sequence[str]) -> tuple[type[Any] | None, list[Dict]]:
    """The settings of the command with the options of its defence, and what its flags override: first the file of
    --config, then the recipe."""
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
