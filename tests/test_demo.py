"""The demo tells the paper's story, and it is not luck: greedy certifies more than cutout on every seed."""

from __future__ import annotations

import json
import sys

import pytest
from rich.console import Console

from patchproof.cli import run
from patchproof.cli.demo import certify, fit
from patchproof.config import DemoConfig
from patchproof.records import Rate


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_greedy_beats_cutout_by_more_than_the_half_width_of_the_interval(tmp_path, seed):
    config, quiet = DemoConfig(seed=seed, images=1000), Console(quiet=True)
    fit(config, tmp_path / "start", "none", quiet, epochs=2, learning_rate=0.1)
    rates = {}
    for strategy in ("cutout", "greedy"):
        fit(config, tmp_path / strategy, strategy, quiet, epochs=config.epochs, start=tmp_path / "start")
        found = certify(config, tmp_path, strategy, 3, quiet)["certified"]
        rates[strategy] = Rate(found["k"], found["n"])
    half_widths = [(high - low) / 2 for low, high in (rate.interval for rate in rates.values())]
    assert rates["greedy"].rate - rates["cutout"].rate > max(half_widths), rates


def test_a_short_demo_leaves_what_it_promises(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    module = sys.modules["patchproof.cli.demo"]
    monkeypatch.setattr(module, "START_EPOCHS", 1)
    monkeypatch.setattr(module, "TRAINING_IMAGES", 200)
    assert run(["demo", "--epochs", "1", "--images", "10", "--device", "cpu"]) == 0
    assert "certified" in capsys.readouterr().out
    assert (tmp_path / "runs" / "demo" / "worst-case-masks.png").stat().st_size > 10_000
    for strategy in ("cutout", "greedy"):
        for masks in ("3x3", "6x6"):
            folder = tmp_path / "runs" / "demo" / strategy / f"certify-{masks}"
            assert json.loads((folder / "results.json").read_text())["certified"]["n"] == 10
    assert run(["demo", "--output", "runs/demo"]) == 2
    assert "exists already" in capsys.readouterr().err
