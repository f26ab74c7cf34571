"""Imports go down only (pyproject.toml, [tool.importlinter])."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from jaxtyping import TypeCheckError

import patchproof
from patchproof.masking import occlude


def test_no_layer_knows_the_ones_above_it():
    lint = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([lint], cwd=Path(__file__).parents[1], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_shapes_and_types_of_calls_are_checked_in_these_tests():
    with pytest.raises(TypeCheckError, match="images"):
        occlude("no images", torch.ones(1, 1, 2, 2, dtype=torch.bool), torch.zeros(3, 1, 1))


def test_no_module_needs_what_windows_lacks():
    """A module that can use one of these asks for it where it is used, and does without."""
    unix = {"fcntl", "resource", "termios", "pwd", "grp"}
    for path in Path(patchproof.__file__).parent.rglob("*.py"):
        imports = [node for node in ast.parse(path.read_text("utf-8")).body if isinstance(node, ast.Import)]
        assert not {name.name for node in imports for name in node.names} & unix, path
