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


def arguments(app: App, name: str) -> list[Argument]:
    """What can be given to a command: positions first, then flags; not the dataclass that holds the flags."""
    found = app[name].assemble_argument_collection(default_parameter=app.default_parameter, parse_docstring=True)
    return sorted((a for a in found if a.name != "*"), key=lambda a: a.index is None)


def usage(name: str, found: Sequence[Argument]) -> str:
    places = [(a, a.name) for a in found if a.index is not None]
    required = [place if a.required else f"[{place}]" for a, place in places]
    return " ".join(["patchproof", name, *required, *(["[flags]"] if len(places) < len(found) else [])])


def value_words(argument: Argument) -> str:
    """What stands after a flag: its choices, or the kind of value; nothing after a switch."""
    union = get_origin(argument.hint) in (Union, types.UnionType)
    kinds: list[Any] = [k for k in get_args(argument.hint) if k is not type(None)] if union else [argument.hint]
    names = {int: "NUMBER", float: "NUMBER", str: "TEXT", bool: "true | false" if len(kinds) > 1 else ""}
    words = [get_args(kind) if get_origin(kind) is Literal else (names.get(kind, "PATH"),) for kind in kinds]
    return " | ".join(str(word) for choices in words for word in choices)


def row(argument: Argument) -> tuple[str, str, str]:
    words = value_words(argument) if argument.index is None else ""
    named = f"`{argument.name}`" + (f" `{words}`" if words else "")
    value = argument.field_info.default
    silent = argument.required or any(value is nothing for nothing in (None, False, Declared.empty))
    return named, "" if silent else f"`{value}`", " ".join((argument.parameter.help or "").split())


def markdown(app: App) -> Iterator[str]:
    """One section per command: usage, what it does, and a table of its arguments."""
    for name in (name for name in app if name not in OPTIONS):
        found = arguments(app, name)
        yield from (f"## {name}", "", (app[name].help or "").split("\n")[0], "")
        yield from ("```text", usage(name, found), "```", "")
        if found:
            yield from ("```{list-table}", ":header-rows: 1", ":class: flags", ":widths: 34 12 54", "")
            for cells in (("", "default", "meaning"), *map(row, found)):
                yield from (f"{'  ' if number else '* '}- {cell}" for number, cell in enumerate(cells))
            yield from ("```", "")


class CommandLine(SphinxDirective):
    """Writes the reference in place of itself, so that it is always that of the code."""

    def run(self) -> list[nodes.Node]:
        self.content = StringList(list(markdown(build_app())), source="command line")
        return self.parse_content_to_nodes(allow_section_headings=True)


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("command-line", CommandLine)
    return {"parallel_read_safe": True}
