"""Imports go down only (pyproject.toml, [tool.importlinter])."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from jaxtyping import TypeCheckError

import patchproof
from patchproof.masking import occlude

ROOT = Path(patchproof.__file__).parent
UNIX = ["fcntl", "resource", "termios", "pwd", "grp"]


def test_no_layer_knows_the_ones_above_it():
    lint = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([lint], cwd=Path(__file__).parents[1], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_shapes_and_types_of_calls_are_checked_in_these_tests():
    with pytest.raises(TypeCheckError, match="images"):
        occlude("no images", torch.ones(1, 1, 2, 2, dtype=torch.bool), torch.zeros(3, 1, 1))


def test_every_module_imports_where_there_is_nothing_of_unix():
    """Windows has none of these; a module that needs one asks for it where it is used, and does without."""
    modules = [".".join(path.relative_to(ROOT.parent).with_suffix("").parts) for path in sorted(ROOT.rglob("*.py"))]
    wanted = [name.removesuffix(".__init__") for name in modules if not name.endswith("__main__")]
    lines = ["import sys, importlib", f"hidden = {UNIX}", "import filelock, torch, timm, accelerate, torchvision"]
    lines += ["sys.modules.update(dict.fromkeys(hidden))", f"for name in {wanted}: importlib.import_module(name)"]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
