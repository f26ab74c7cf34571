"""`{command-line}`: every command and flag, with default and meaning, as the program itself has them."""

from __future__ import annotations

import types
from collections.abc import Iterator, Sequence
from inspect import Parameter as Declared
from typing import Any, Literal, Union, get_args, get_origin

from cyclopts import App
from cyclopts.argument import Argument
from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from patchproof.cli import build_app

OPTIONS = ("--help", "-h", "--version")


def commands(app: App) -> Iterator[tuple[str, App]]:
    """The verbs in the order of the program's own help."""
    for name in app:
        if name not in OPTIONS:
            yield name, app[name]


def arguments(command: App) -> list[Argument]:
    """What can be given to a command: positions first, then flags; not the dataclass that holds the flags."""
    found = command.assemble_argument_collection(parse_docstring=True)
    return sorted((a for a in found if a.name != "*"), key=lambda a: a.index is None)


def usage(name: str, command: App) -> str:
    places = [a.name + ("…" if _is_list(a.hint) else "") for a in arguments(command) if a.index is not None]
    required = [place if a.required else f"[{place}]" for place, a in zip(places, arguments(command), strict=False)]
    flags = ["[flags]"] if any(a.index is None for a in arguments(command)) else []
    return " ".join(["patchproof", name, *required, *flags])


def value_words(argument: Argument) -> str:
    """What stands after a flag: its choices, or the kind of value; nothing after a switch."""
    kind = _without_none(argument.hint)
    if kind is bool:
        return ""
    if get_origin(kind) is Literal:
        return " | ".join(map(str, get_args(kind)))
    names = {int: "NUMBER", float: "NUMBER", str: "TEXT"}
    return names.get(kind, "PATH")


def default_words(argument: Argument) -> str:
    value = argument.field_info.default
    silent = argument.required or any(value is nothing for nothing in (None, False, Declared.empty))
    return "" if silent else str(value)


def _without_none(hint: Any) -> Any:
    if get_origin(hint) in (Union, types.UnionType):
        return next(kind for kind in get_args(hint) if kind is not type(None))
    return hint


def _is_list(hint: Any) -> bool:
    return get_origin(hint) is list


def markdown(app: App) -> Iterator[str]:
    """A section a command: usage, what it does, and a table of its arguments."""
    for name, command in commands(app):
        yield from (f"## {name}", "", (command.help or "").split("\n")[0], "", "```text", usage(name, command), "```")
        yield ""
        rows = [row(argument) for argument in arguments(command)]
        if rows:
            yield from table(("", "default", "meaning"), rows)
        yield ""


def row(argument: Argument) -> tuple[str, str, str]:
    words = value_words(argument) if argument.index is None else ""
    named = f"`{argument.name}`" + (f" `{words}`" if words else "")
    default = default_words(argument)
    return named, f"`{default}`" if default else "", " ".join((argument.parameter.help or "").split())


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield "```{list-table}"
    yield from (":header-rows: 1", ":class: flags", ":widths: 34 12 54", "")
    for cells in (head, *rows):
        for number, cell in enumerate(cells):
            yield f"{'* ' if number == 0 else '  '}- {cell}"
    yield from ("```", "")


class CommandLine(SphinxDirective):
    """Writes the reference in place of itself, so that it is always that of the code."""

    def run(self) -> list[nodes.Node]:
        self.content = StringList(list(markdown(build_app())), source="command line")
        return self.parse_content_to_nodes(allow_section_headings=True)


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("command-line", CommandLine)
    return {"parallel_read_safe": True}
