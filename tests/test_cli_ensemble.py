"""Several networks, and mirrored ones, as one classifier from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import patchproof as pp
from patchproof.cli import run
from patchproof.explore import open_explorer
from patchproof.masking import Mirror
from patchproof.models import load_classifier, save_checkpoint, weights_sha256

BOTH = ["--weights", "one,two", "--mirror"]


@pytest.fixture
def both(tmp_path, monkeypatch) -> pp.Ensemble:
    """Two checkpoints in the working directory, and the classifier that they are together."""
    monkeypatch.chdir(tmp_path)
    names = pp.open_dataset("fashion-mini").class_names
    members = [load_classifier("small", "random", class_names=names, seed=seed) for seed in (1, 2)]
    for member, name in zip(members, ("one", "two"), strict=True):
        save_checkpoint(member, Path(name))
    together = pp.Ensemble(members)
    return pp.Ensemble([together, Mirror([together])])


def content(folder: str, name: str) -> dict:
    return json.loads((Path(folder) / f"{name}.json").read_text())


def test_they_are_certified_resumed_predicted_and_explored_as_one(both, capsys):
    assert run(["certify", *BOTH, "--limit", "3", "--output", "r"]) == 0
    assert "ensemble of small, small with its mirror image on fashion-mini" in " ".join(capsys.readouterr().out.split())
    manifest = content("r", "manifest")
    assert manifest["model"]["architecture"] == "ensemble of small, small with its mirror image"
    assert manifest["identity"]["weights_sha256"] == weights_sha256(both)
    first, mirrored = manifest["model"]["members"]
    hashes = [weights_sha256(member) for member in both.members[0].members]
    assert [member["weights_sha256"] for member in first["members"]] == hashes
    assert mirrored["architecture"].startswith("mirrored")
    assert any(remark.startswith("random network") for remark in manifest["remarks"]) is False, "read from checkpoints"
    records = [json.loads(line) for line in Path("r/records.jsonl").read_text().splitlines()]
    source = pp.open_dataset("fashion-mini")
    images = torch.stack([torch.from_numpy(source.pixels[r["index"]]).expand(3, -1, -1) / 255 for r in records])
    assert both(images).argmax(dim=1).tolist() == [record["undefended"] for record in records]

    assert run(["certify", *BOTH, "--limit", "3", "--output", "r", "--resume"]) == 0
    assert run(["certify", *BOTH[:2], "--limit", "3", "--output", "r", "--resume"]) == 1
    assert "--mirror differ: architecture was" in capsys.readouterr().err
    source.load(0).save("x.png")
    assert run(["predict", "x.png", *BOTH, "--like", "r", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["forwards"] >= 9
    capsys.readouterr()
    assert run(["predict", "x.png", "--weights", "one,two", "--like", "r"]) == 1
    assert "give the weights of that run, one,two with --mirror" in capsys.readouterr().err
    assert run(["predict", "x.png", "--weights", "two,one", "--mirror", "--like", "r"]) == 1
    explorer = open_explorer(Path("r"))
    assert weights_sha256(explorer.defense.classifier) == weights_sha256(both)
    words = ["--weights", "one,embedded,random"]
    assert run(["certify", *words, "--limit", "1", "--output", "w"]) == 0
    assert len(open_explorer(Path("w")).defense.classifier.members) == 3, "members that are no folders"


@pytest.mark.slow
def test_they_are_attacked_and_measured_as_one(both):
    quick = ["--limit", "1", "--steps", "1", "--restarts", "1", "--places", "1"]
    assert run(["attack", *BOTH, *quick, "--output", "a"]) == 0
    assert content("a", "results")["broken"] == []
    bench = ["bench", *BOTH, "--limit", "1", "--peer-images", "1", "--seconds", "0.05", "--surviving"]
    assert run([*bench, "--masks", "2", "--output", "bench.json"]) == 0
    assert json.loads(Path("bench.json").read_text())["certified"] == 1


def test_one_network_is_taught_by_them(both, capsys):
    train = ["train", "--weights", "one", "--limit", "8", "--batch-size", "4", "--epochs", "1", "--strategy", "rand3x3"]
    train += ["--validation-images", "2", "--teacher", "one,two", "--teacher-weight", "0.7"]
    assert run([*train, "--mirror", "--output", "t"]) == 0
    assert content("t", "manifest")["identity"]["plan"]["teacher"] == weights_sha256(both)
    assert run([*train, "--output", "t", "--resume"]) == 1
    assert "teacher was" in capsys.readouterr().err
    for wrong in ("random", "one,pretrained", "missing.pth"):
        assert run([*train[:-4], "--teacher", wrong, "--output", "w"]) == 2
        words = f"--teacher takes checkpoint folders, `embedded` or `zoo`; `{wrong.removeprefix('one,')}` is none"
        assert words in capsys.readouterr().err
    assert run(["train", "--weights", "one,two"]) == 2
    assert "train fine-tunes one network" in capsys.readouterr().err


def test_names_of_nothing_are_refused(both, capsys):
    assert run(["certify", "--weights", "one,,two"]) == 2
    assert "separated by one comma each" in capsys.readouterr().err
    for unknown in ("one,~nobody-here/two", "~nobody-here/one"):
        assert run(["certify", "--weights", unknown]) == 2
        assert "a path begins with ~ and a name that no user" in capsys.readouterr().err
