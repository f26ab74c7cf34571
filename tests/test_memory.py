"""Memory depends on the chunk: a hundred times as many images take a few megabytes more, for their names."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))


@pytest.mark.slow
def test_fifty_thousand_images_take_no_more_memory_than_five_hundred():
    from memory import compare

    few, many = compare((500, 50_000)).values()
    assert many["peak_bytes"] < 1.08 * few["peak_bytes"]
