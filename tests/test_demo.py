"""The demo tells the paper's story, and it is not luck: greedy certifies more than cutout on every seed."""

from __future__ import annotations

import csv
import json
from dataclasses import replace

import pytest

from patchproof.cli import run
from patchproof.cli._settings import DemoSettings
from patchproof.cli._show import Console
from patchproof.cli.demo import certify, fit
from patchproof.recipes import OWN_RECIPES, find_recipe


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_greedy_beats_cutout_by_more_than_the_half_width_of_the_interval(tmp_path, seed):
    settings, quiet = DemoSettings(seed=seed, images=1000), Console(quiet=True)
    fit(settings, tmp_path, "plain", quiet)
    rates = {}
    for strategy in ("cutout", "greedy"):
        fit(settings, tmp_path, strategy, quiet)
        rates[strategy] = certify(settings, tmp_path, strategy, 3, quiet).certified
    half_widths = [(high - low) / 2 for low, high in (rate.interval for rate in rates.values())]
    assert rates["greedy"].rate - rates["cutout"].rate > max(half_widths), rates


def test_a_short_demo_leaves_what_it_promises(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("plain", "cutout", "greedy"):
        recipe = find_recipe(f"fashion-small-{name}")
        short = {**recipe.training, "epochs": 1, "limit": 32, "validation_images": 8}
        monkeypatch.setitem(OWN_RECIPES, recipe.name, replace(recipe, training=short))
    assert run(["demo", "--epochs", "1", "--images", "2", "--device", "cpu"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "report: runs/demo/report/index.html"
    demo = tmp_path / "runs" / "demo"
    assert (demo / "report" / "figures" / "worst-masks.png").stat().st_size > 10_000
    with (demo / "report" / "tables" / "runs.csv").open(encoding="utf-8", newline="") as file:
        reported = {row["run"]: (row["certified k"], row["certified n"]) for row in csv.DictReader(file)}
    for run_name in (f"{strategy}/certify-{masks}" for strategy in ("cutout", "greedy") for masks in ("3x3", "6x6")):
        found = json.loads((demo / run_name / "results.json").read_text())["certified"]
        assert reported[run_name] == (str(found["k"]), str(found["n"])) == (str(found["k"]), "2")
    assert run(["demo", "--epochs", "1", "--images", "2", "--device", "cpu", "--json"]) == 0
    shown = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["strategy"], line["masks"], line["certified"]["n"]) for line in shown] == [
        (strategy, masks, 2) for strategy in ("cutout", "greedy") for masks in (3, 6)
    ]
    assert run(["demo", "--images", "1001"]) == 2
    assert "--images must be at most 1000" in capsys.readouterr().err
    assert run(["demo", "--output", "runs/demo"]) == 2
    assert "exists already; choose another --output" in capsys.readouterr().err
