"""Settings from a file, settings as they are saved, and the library's messages in the words of flags."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from patchproof.cli._settings import FLAGS, owners
from patchproof.types import InputError

CONFIG_BYTES = 100_000
STANDARD_INPUT = Path("-")
"""The argument of `predict` that stands for standard input."""

UNRECORDED = ("config", "resume", "json", "quiet", "verbose", "debug", "dry_run")
"""Settings that are not saved: they say how a run is begun or shown, not what it is."""

AS_GIVEN = r"""(?<!\w)'[^']*'|(?<!\w)"[^"]*"|\S*[/\\]\S*[^\s:;,]"""
"""Paths and quoted values in a message."""

PHRASES = {
    "the recipe cifar10-32px-bagcert trains a BagNet": "train a BagNet: patchproof train --recipe cifar10-32px-bagcert",
    "remove it, or pass skip_bad=True": "remove it and begin again, or continue with --resume --skip-bad",
    "give input_size": "give --image-size",
    "in another folder": "with another --output",
    "another folder": "another --output",
    "resume to continue": "continue with --resume",
    "resume on any": "--resume on any",
    "build or load it anew": "name the same --weights",
    " (pp.load_classifier)": "",
    "name other images as validation": "name other images with --validation FOLDER",
}
"""Phrases of the library's messages, and what they are in flags."""

DIFFERS = {
    "patch_sizes": "--patch differs: patch_sizes",
    "resize": "--image-size or the network differ: resize",
    "architecture": "--model, --weights or --mirror differ: architecture",
    "weights_sha256": "--weights differ: weights_sha256",
    "masks": "--masks differs: masks",
    "images": "--limit or the data differ: images",
    "name": "--defense",
}
"""Facts that keep a run from being continued, if no flag has their name, and the flags that they follow from."""


class UniqueKeys(yaml.SafeLoader):
    """Refuses a name that is set twice; YAML itself would silently take the last value."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [str(getattr(key, "value", key)).replace("-", "_") for key, _ in node.value]
        for name in names:
            if names.count(name) > 1:
                raise yaml.YAMLError(f"`{name}` is set more than once")
        return super().construct_mapping(node, deep)


def read_config_file(path: Path) -> dict[str, Any]:
    """The settings of a YAML file, with names as in flags, without leading dashes."""
    try:
        with path.open("rb") as file:
            text = file.read(CONFIG_BYTES + 1).decode("utf-8")
        if len(text) > CONFIG_BYTES:
            raise yaml.YAMLError(f"it has more than the {CONFIG_BYTES:,} bytes that settings may have")
        for token in yaml.scan(text):
            if isinstance(token, yaml.AliasToken):  # a few lines of them can stand for billions of values
                raise yaml.YAMLError(f"aliases (*{token.value}) are not allowed in settings")
        content = yaml.load(text, Loader=UniqueKeys)
    except OSError as error:
        raise InputError(f"cannot read the configuration {path}: {error.strerror}") from error
    except Exception as error:  # PyYAML's constructors raise whatever `!!int x` or a month 13 trips over
        raise InputError(f"{path} is not valid YAML: {' '.join(str(error).split())[:300]}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise InputError(f"{path} must hold settings as `name: value` lines, not a {type(content).__name__}")
    return {str(key).replace("-", "_"): value for key, value in content.items() if value is not None}


def known_settings(values: Mapping[str, Any], kind: type[Any], path: Path) -> dict[str, Any]:
    """The settings of a file; an unknown name is refused with the nearest known one."""
    known = [FLAGS.get(f.name, f.name) for f in fields(kind) if f.name != "config"]
    for name, value in values.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean `{near[0]}`?" if near else f"known are {', '.join(known)}"
            if owner := owners(name):
                hint = f"it is for {owner}"
            if name == "config":
                hint = "a file of settings cannot name another one"
            raise InputError(f"{path}: unknown setting `{name}`; {hint}")
        if value == "":
            raise InputError(f"{path}: `{name}` is empty; leave it out for its default")
        if not isinstance(value, str | int | float):
            raise InputError(f"{path}: `{name}` must be one plain value, not a {type(value).__name__}")
    return dict(values)


def resolved(settings: Any) -> dict[str, Any]:
    """The settings as they are saved: plain values, under the names of flags."""
    values = {f.name: getattr(settings, f.name) for f in fields(settings) if f.name not in UNRECORDED}
    return {FLAGS.get(k, k): str(v) if isinstance(v, Path) else v for k, v in values.items()}


def in_flags(message: str, kind: type[Any] | None) -> str:
    """A message of the library with this command's flags in place of parameters; paths stay as they are."""
    flags = {f.name: "--" + FLAGS.get(f.name, f.name).replace("_", "-") for f in fields(kind)} if kind else {}
    differs = flags | DIFFERS if "cannot be continued: " in message else {}
    parts = re.split(f"({AS_GIVEN})", message)
    for place, text in enumerate(parts[::2]):
        for words, flag in PHRASES.items():
            text = text.replace(words, flag)
        for name, words in differs.items():
            text = re.sub(rf"(: |; ){name} was", rf"\1{words} was", text)
        for name, flag in sorted(flags.items(), key=lambda item: len(item[0]), reverse=True):
            text = re.sub(rf"(?<![\w`-]){name}=True\b", flag, text)
            text = re.sub(rf"(?<![\w`.-]){name}(?= must| cannot|=| \d| needs|, the number of)", flag, text)
            if "_" in name:
                text = re.sub(rf"(?<![\w`.-]){name}\b", flag, text)
        parts[2 * place] = text
    return "".join(parts)


def find_flag(tokens: Sequence[str], flag: str) -> str | None:
    """The value of a flag that must be known before the other flags are read."""
    for token, following in zip(tokens, [*tokens[1:], ""], strict=True):
        if token.startswith(f"{flag}="):
            return token.removeprefix(f"{flag}=")
        if token == flag and following:
            return following
        if token == flag:
            raise InputError(f"{flag} requires an argument")
    return None
