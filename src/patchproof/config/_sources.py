"""Where settings come from besides flags, and how they are saved."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import yaml

from patchproof.types import InputError

CONFIG_BYTES = 100_000

# PyYAML's constructors raise whatever a value such as `!!int x` or a month 13 trips over.
_YAML_FAILURES = (yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)


def read_config_file(path: Path, kind: type[Any]) -> dict[str, Any]:
    """The settings in a YAML file; an unknown key is an error that names the nearest one."""
    content = _read_yaml(path)
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise InputError(f"{path} must hold settings as `name: value` lines, not a {type(content).__name__}")
    values = {_known_key(str(key), kind, path): value for key, value in content.items() if value is not None}
    whole = {f.name for f in fields(kind) if str(f.type).startswith("int")}
    for name, value in values.items():
        if not isinstance(value, str | int | float):
            raise InputError(f"{path}: `{name}` must be one plain value, not a {type(value).__name__}")
        if name in whole and (isinstance(value, bool) or not isinstance(value, int)):
            raise InputError(f"{path}: `{name}` must be a whole number, not {value!r}")
    return values


class _PlainLoader(yaml.SafeLoader):
    """Makes no objects, and follows no aliases: a few lines of them can stand for billions of values."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            alias = self.peek_event()  # type: ignore[no-untyped-call]
            raise yaml.YAMLError(f"aliases (*{alias.anchor}) are not allowed in settings")
        return super().compose_node(parent, index)


def _read_yaml(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            text = file.read(CONFIG_BYTES + 1)
        if len(text) > CONFIG_BYTES:
            raise InputError(f"{path} has more than the {CONFIG_BYTES:,} bytes that settings may have")
        return yaml.load(text.decode("utf-8"), Loader=_PlainLoader)
    except OSError as error:
        raise InputError(f"cannot read the configuration {path}: {error.strerror}") from error
    except InputError:
        raise
    except _YAML_FAILURES as error:
        raise InputError(f"{path} is not valid YAML: {' '.join(str(error).split())[:300]}") from error


def _known_key(key: str, kind: type[Any], path: Path) -> str:
    names = [f.name for f in fields(kind) if f.name != "config"]
    name = key.replace("-", "_")
    if name in names:
        return name
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean `{near[0]}`?" if near else f"known are {', '.join(names)}"
    raise InputError(f"{path}: unknown setting `{key}`; {hint}")


def resolved(config: Any) -> dict[str, Any]:
    """The settings as they are saved: plain values, without those that say how a run was begun."""
    values = {k: str(v) if isinstance(v, Path) else v for k, v in asdict(config).items()}
    return {k: v for k, v in values.items() if k not in {"config", "resume"}}


def find_flag(tokens: Sequence[str], flag: str) -> str | None:
    """The value of a flag that has to be known before the others are read."""
    for token, following in zip(tokens, [*tokens[1:], ""], strict=True):
        if token == flag:
            return following
        if token.startswith(f"{flag}="):
            return token.removeprefix(f"{flag}=")
    return None
