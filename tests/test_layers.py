"""Imports go down only (pyproject.toml, [tool.importlinter])."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_no_layer_knows_the_ones_above_it():
    lint = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([lint], cwd=Path(__file__).parents[1], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
