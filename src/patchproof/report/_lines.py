"""JSON files that may be damaged: what can be read of them, and words for the rest."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from patchproof.records import checksum
from patchproof.report._text import count_words, shortened


def json_object(path: Path) -> dict[str, Any] | None:
    """The object in a file; None where there is none."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


@dataclass(frozen=True)
class Lines:
    """The lines of a file that hold what they should, and what to say about the others."""

    values: list[Any] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)


def read_sums(path: Path) -> list[str]:
    """The checksums that a run keeps of its lines; none where there is no such file."""
    try:
        return path.read_text("ascii", errors="replace").split("\n")[:-1]
    except OSError:
        return []


def read_lines(path: Path, parse: Callable[[str], Any], *, sums: Sequence[str] = ()) -> Lines:
    """Every sound line of a JSONL file, which has its checksum if there is one for it.

    The last one counts only when its end is there: a kill may have cut it.
    """
    try:
        *lines, rest = path.read_bytes().split(b"\n")
    except OSError:
        return Lines(notices=[f"{path.name} is missing or cannot be read"])
    values, damaged = [], []
    for number, line in enumerate(lines, start=1):
        try:
            if number <= len(sums) and checksum(line + b"\n") != sums[number - 1]:
                raise ValueError("its checksum is another")
            values.append(parse(line.decode("utf-8")))
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
            damaged.append(number)
    notices = [f"the last line of {path.name} is cut short and left out"] if rest else []
    if damaged:
        which = shortened(", ".join(map(str, damaged)), 60)
        words = count_words(len(damaged), "line is", "lines are")
        notices.append(f"{words} damaged in {path.name} and left out: {which}")
    return Lines(values, notices)
