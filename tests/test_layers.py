"""Imports go down only (pyproject.toml, [tool.importlinter])."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from jaxtyping import Float, TypeCheckError
from torch import Tensor

import patchproof
from patchproof.masking import occlude
from patchproof.types import Preprocessing
from typecheck import jaxtyped


def test_no_layer_knows_the_ones_above_it():
    lint = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([lint], cwd=Path(__file__).parents[1], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_room_looks_into_a_private_module_of_another():
    for path in Path(patchproof.__file__).parent.glob("*/*.py"):
        imports = [node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.ImportFrom)]
        for name in [f"{node.module}.{alias.name}" for node in imports for alias in node.names]:
            private = re.fullmatch(r"patchproof\.(\w+)\.(.+\.)?_[a-z].*", name)
            assert private is None or private[1] == path.parent.name, f"{path}: {name}"


def test_shapes_and_types_of_calls_are_checked_in_these_tests():
    with pytest.raises(TypeCheckError, match="images"):
        occlude("no images", torch.ones(1, 1, 2, 2, dtype=torch.bool), torch.zeros(3, 1, 1))
    with pytest.raises(TypeCheckError, match="antialias"):
        Preprocessing(resize=(8, 8), antialias="yes")


def test_an_axis_has_one_size_in_one_call_and_every_closure_is_checked():
    def scaled(factor):
        @jaxtyped
        def times(one: Float[Tensor, "n k"], other: Float[Tensor, " n"]) -> Float[Tensor, " k"]:
            return one.sum(0)[: int(factor)] * factor

        return times

    one, other = torch.ones(3, 2), torch.ones(3)
    assert scaled(2.0)(one, other).tolist() == [6, 6]
    assert scaled(4.0)(one, other).tolist() == [12, 12]  # its own closure, and sizes of its own call
    with pytest.raises(TypeCheckError, match="other"):
        scaled(2.0)(one, torch.ones(2))
    with pytest.raises(TypeCheckError, match="return"):
        scaled(1.0)(one, other)


def test_no_module_needs_what_windows_lacks():
    """A module that can use one of these asks for it where it is used, and does without."""
    unix = {"fcntl", "resource", "termios", "pwd", "grp"}
    for path in Path(patchproof.__file__).parent.rglob("*.py"):
        imports = [node for node in ast.parse(path.read_text("utf-8")).body if isinstance(node, ast.Import)]
        assert not {name.name for node in imports for name in node.names} & unix, path
