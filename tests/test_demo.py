"""The demo tells the paper's story, and it is not luck: greedy certifies more than cutout on every seed."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import pytest

from patchproof.cli import run
from patchproof.cli._terminal import Console
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
    assert run(["demo", "--epochs", "1", "--images", "4", "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert "certified" in printed
    assert printed.splitlines()[-1] == f"report: {Path('runs/demo/report/index.html')}"
    report = tmp_path / "runs" / "demo" / "report"
    assert (report / "figures" / "worst-masks.png").stat().st_size > 10_000
    with (report / "tables" / "runs.csv").open(encoding="utf-8", newline="") as file:
        told = {row["run"]: int(row["certified k"]) for row in csv.DictReader(file)}
    for strategy in ("cutout", "greedy"):
        for masks in ("3x3", "6x6"):
            folder = tmp_path / "runs" / "demo" / strategy / f"certify-{masks}"
            found = json.loads((folder / "results.json").read_text())["certified"]
            assert found["n"] == 4
            assert told[f"{strategy}/certify-{masks}"] == found["k"]
    assert run(["demo", "--output", "runs/demo"]) == 2
    assert "exists already" in capsys.readouterr().err
