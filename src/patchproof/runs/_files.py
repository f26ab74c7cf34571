"""Files that are complete or absent, whatever happens while they are written."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from patchproof.types import CheckError, InputError

BEGIN_AGAIN = "restore it from a copy, or begin again in another folder"
TAIL_BYTES = 1 << 16


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckError(f"{path} is damaged ({error}); {BEGIN_AGAIN}") from error
    if not isinstance(content, dict):
        raise CheckError(f"{path} is damaged: no JSON object; {BEGIN_AGAIN}")
    return content


def plain(value: Any) -> Any:
    """As JSON will give it back: lists for tuples, keys as text."""
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise InputError(f"what describe() returns must be JSON, with finite numbers: {error}") from error


def dump_json(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=2, ensure_ascii=True, allow_nan=False) + "\n"


def write_atomically(path: Path, content: str) -> None:
    """All of it or nothing, also when the machine stops half-way."""
    temporary = part_of(path)
    with temporary.open("w", encoding="utf-8") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def part_of(path: Path) -> Path:
    return path.with_name(path.name + ".part")


def end_of_last_line(file: BinaryIO, end: int) -> int:
    """The position after the last line break before `end`; 0 where there is none."""
    while end:
        start = max(0, end - TAIL_BYTES)
        file.seek(start)
        found = file.read(end - start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0


def append(path: Path, content: bytes) -> None:
    with path.open("ab") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def checksum(line: bytes) -> str:
    return f"{zlib.crc32(line):08x}"


def make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot create the folder {path}: {error.strerror}") from error
