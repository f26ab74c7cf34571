"""`patchproof attack` as a user types it: records and results, resuming, and what a broken certificate leaves."""

from __future__ import annotations

import importlib.util
import json
import re
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import patchproof as pp
from patchproof.cli import _setup, run
from patchproof.data import preprocess
from patchproof.masking import Measured, as_images
from patchproof.models import load_classifier, save_checkpoint
from patchproof.report._gallery import attacked_gallery
from patchproof.runs import ATTACK_ACCURACIES, RunFolder, read_run
from patchproof.types import Preprocessing
from small_model import plain_network, plain_weights
from test_cli import assert_one_line, content, records

SPEC = importlib.util.spec_from_file_location("campaign", Path(__file__).parents[1] / "scripts" / "campaign.py")
campaign = sys.modules["campaign"] = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(campaign)

QUICK = ("--steps", 2, "--restarts", 1, "--places", 1, "--device", "cpu")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    save_checkpoint(load_classifier("small", "random", num_classes=10, seed=1), tmp_path / "start")
    return tmp_path / "start"


def attack(*arguments: object) -> int:
    return run(["attack", *map(str, arguments)])


def test_records_and_results_hold_the_sandwich_beside_what_certify_finds(checkpoint, capsys):
    common = ("--weights", checkpoint, "--limit", 10, "--patch", "1px", "--masks", 4)
    assert attack(*common, *QUICK, "--output", "a") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert run(["certify", *map(str, common), "--device", "cpu", "--output", "c"]) == 0
    extra = {"undefended_attacked", "attacked", "place", "attacked_label", "passes", "queries"}
    for attacked, certified in zip(records("a"), records("c"), strict=True):
        assert list(attacked) == [*certified, *(name for name in attacked if name in extra)]
        assert set(attacked) == set(certified) | extra
        assert {k: v for k, v in attacked.items() if k not in {*extra, "margin"}} == {
            k: v for k, v in certified.items() if k != "margin"
        }
        assert attacked["margin"] == pytest.approx(certified["margin"], abs=1e-4)
        assert attacked["certified"] <= attacked["attacked"] <= attacked["defended"]
        assert attacked["undefended_attacked"] <= attacked["undefended"]
        fell = attacked["defended"] and not attacked["attacked"]
        assert (attacked["place"] is not None, attacked["attacked_label"] is not None) == (fell, fell)
    found = content("a", "results")
    for name in ATTACK_ACCURACIES:
        assert (found[name]["k"], found[name]["n"]) == (sum(r[name] for r in records("a")), 10)
        assert name.replace("_", " ") in shown
    assert found["broken"] == []
    assert found["cost"]["passes"] == sum(r["passes"] for r in records("a")) > 0
    manifest = content("a", "manifest")
    assert (manifest["command"], manifest["identity"]["attack"]["steps"]) == ("attack", 2)


@pytest.mark.parametrize("patches", [1, 2])
def test_every_patch_that_changed_an_answer_is_kept_shown_and_changes_it_again(tmp_path, patches):
    classifier, data = plain_network(), pp.open_dataset("fashion-mini")
    classifier.load_state_dict(plain_weights())
    threat = pp.PatchThreat.square(image_size=(28, 28), pixels=9 if patches == 1 else 7, patches=patches)
    defense = pp.defense("patchcleanser", classifier, threat, per_axis=3)
    plan = pp.AttackPlan(steps=2, restarts=1, places=1, step_size=1.0)
    found = pp.attack(defense, data, plan, folder=tmp_path / "a", limit=5)
    stored = read_run(tmp_path / "a")
    assert (stored.records, stored.patches) == (found.records, patches)
    targets = {"defended": defense.predict, "undefended": lambda images: classifier(images).argmax(dim=1)}
    seen = dict.fromkeys(targets, 0)
    for record in stored.records:
        path = tmp_path / "a" / "patches" / f"{record.index}.safetensors"
        kept = load_file(path) if path.exists() else {}
        fell = {"defended": record.attack.place is not None}
        fell["undefended"] = record.undefended and not record.attack.undefended_attacked
        for name, predict in targets.items():
            names = (name, f"{name}_2")[:patches]
            assert [one in kept for one in (name, f"{name}_2")] == [fell[name], fell[name] and patches == 2]
            if not fell[name]:
                continue
            image = as_images(preprocess(data.load(record.index), Preprocessing(resize=(28, 28)))[None], "cpu")
            places = [tuple(kept[f"{one}_place"].tolist()) for one in names]
            for one, (top, left, height, width) in zip(names, places, strict=True):
                image[0, :, top : top + height, left : left + width] = kept[one]
            assert predict(image).tolist() == [int(kept[f"{name}_label"])] != [record.label]
            seen[name] += 1
        if fell["defended"]:
            assert record.attack.place == (places_of(kept, patches) if patches == 2 else places_of(kept, patches)[0])
            assert record.attack.attacked_label == int(kept["defended_label"])
    assert min(seen.values()) > 0
    shown = [(len(card.rects), card.how) for _, cards in attacked_gallery(stored, data, 8) for card in cards]
    assert shown == [(patches, "with the patch")] * sum(seen.values())


def places_of(kept: dict, patches: int) -> tuple:
    return tuple(tuple(kept[f"{one}_place"].tolist()) for one in ("defended", "defended_2")[:patches])


def test_a_target_that_is_left_alone_is_null_and_counted_nowhere(checkpoint, capsys):
    common = ("--weights", checkpoint, "--limit", 6, *QUICK)
    assert attack(*common, "--target", "undefended", "--output", "u") == 0
    assert "defended attacked" in capsys.readouterr().out
    assert all(r["attacked"] is None and r["undefended_attacked"] is not None for r in records("u"))
    assert content("u", "results")["attacked"]["n"] == 0
    assert attack(*common, "--target", "defended", "--only-certified", "--patch", "1px", "--output", "d") == 0
    for record in records("d"):
        assert record["undefended_attacked"] is None
        assert record["attacked"] == (True if record["certified"] else None)
    assert "undefended attacked" not in capsys.readouterr().out


def test_the_seed_and_the_plan_are_part_of_the_run(checkpoint, capsys, monkeypatch):
    common = ("--weights", checkpoint, "--limit", 3, *QUICK, "--output", "r")
    assert attack(*common) == 0
    assert attack(*common, "--seed", 5, "--resume") == 1
    assert_one_line(capsys.readouterr().err, "seed was 0, now 5")
    monkeypatch.setattr("patchproof.cli._runs.open_defense", lambda *_: pytest.fail("the network is loaded"))
    assert run(["certify", "--weights", str(checkpoint), "--limit", "3", "--output", "r", "--resume"]) == 1
    assert_one_line(capsys.readouterr().err, "holds a run of `attack`, this is `certify`; choose another --output")


def test_killed_and_cut_short_and_resumed_the_records_are_the_same_bytes(commands, checkpoint):
    arguments = ("--weights", checkpoint, "--limit", 12, *QUICK, "--target", "defended")
    assert attack(*arguments, "--output", "whole") == 0
    path = Path("killed/records.jsonl")
    process = commands.start(["attack", *map(str, arguments), "--output", "killed"])
    while not commands.ended(process.number) and not (path.exists() and path.read_bytes().count(b"\n") >= 4):
        time.sleep(0.01)
    assert process.send(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    path.write_bytes(path.read_bytes()[:-300])
    assert 0 < len(RunFolder(Path("killed")).records()) < 12
    assert attack(*arguments, "--output", "killed", "--resume") == 0
    assert path.read_bytes() == Path("whole/records.jsonl").read_bytes()
    assert content("killed", "results")["images"]["done"] == 12


def test_every_step_is_shown_and_every_image_recorded_by_itself(checkpoint, tmp_path):
    """A kill loses at most one image."""
    defense = pp.defense(
        "patchcleanser", pp.load_checkpoint(checkpoint), pp.PatchThreat((28, 28), ((2, 2),)), per_axis=2
    )
    steps, lines = [], []

    def seen(record):
        lines.append(len((tmp_path / "r" / "records.jsonl").read_bytes().splitlines()) if record.index else 0)

    plan = pp.AttackPlan(steps=3, restarts=1, places=1, target="undefended")
    data = [pp.open_dataset("fashion-mini").load(index) for index in range(4)]
    right = pp.predict(defense, data)
    pairs = [(image, answer.label) for image, answer in zip(data, right, strict=True)]
    pp.attack(defense, pairs, plan, folder=tmp_path / "r", on_record=seen, on_step=lambda *at: steps.append(at))
    assert lines == [0, 1, 2, 3]
    assert steps[:3] == [(1, 3), (2, 3), (3, 3)]


def test_a_dry_run_says_how_long_attacks_may_take(checkpoint, capsys):
    """A hundred times the steps take far longer; an existing run is no reason to refuse."""
    common = ("--weights", checkpoint, "--patch", "2px", "--masks", 2, "--limit", 4, "--dry-run", "--json")
    Path("r").mkdir()
    Path("r/manifest.json").write_text("{}")
    found = []
    for steps in (100, 10_000):
        assert attack(*common, "--output", "r", "--steps", steps, "--restarts", 1, "--places", 1) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert all(cost["most_passes"] == 4 * 10 for cost in found)
    assert found[1]["attack_seconds"] > 10 * found[0]["attack_seconds"] > 0
    assert attack(*common[:-1], "--steps", 100, "--restarts", 5, "--places", 2) == 0
    assert re.search(r"4 images with 4 masks: 16 to 40 passes, .*; attacks up to [\d:]+ more", capsys.readouterr().out)


STARTLED = """
import torch
from torch import nn
from torch.nn import functional

class Startled(nn.Module):
    fill = (0.0, 0.0, 0.0)

    def forward(self, images):
        bright = functional.softplus(20 * (images - 0.6)).sum(dim=(1, 2, 3)) / 20
        return torch.stack([torch.full_like(bright, 0.5), bright], dim=1)

def build():
    return Startled()
"""


@pytest.fixture
def dark_photos(tmp_path) -> tuple:
    for name in ("calm", "upset"):
        (tmp_path / "dark" / name).mkdir(parents=True)
        for number in range(2):
            pixels = np.random.default_rng(number).integers(60, 90, (12, 12, 3)).astype(np.uint8)
            Image.fromarray(pixels).save(tmp_path / "dark" / name / f"{number}.png")
    (tmp_path / "own.py").write_text(STARTLED)
    model = ("--model", "own.py:build", "--weights", "random", "--image-size", 12, "--dataset", "dark")
    plan = ("--patch", "3px", "--steps", 4, "--restarts", 1, "--place-search", "exhaustive", "--step-size", 0.3)
    return (*model, *plan, "--device", "cpu")


@pytest.fixture
def literal_rule(monkeypatch):
    """Replace double masking by the paper's literal wording, which can be broken."""

    def defense(_, classifier, threat, *, engine, per_axis, exhaustive=False):
        masks = pp.covering_masks(threat, per_axis=per_axis)
        return campaign.LiteralRule(classifier, masks, threat, engine=engine)

    monkeypatch.setattr(_setup, "defense", defense)
    monkeypatch.setattr(campaign.pp, "defense", defense)


@pytest.mark.slow
def test_the_true_defence_holds_against_every_place(dark_photos):
    assert attack(*dark_photos, "--target", "defended", "--output", "r") == 0
    assert [r["certified"] for r in records("r")] == [r["attacked"] for r in records("r")] == [True, True, False, False]
    assert not Path("r/broken").exists()


def test_a_broken_certified_image_fails_the_run_and_is_kept(dark_photos, literal_rule, capsys):
    arguments = (*dark_photos, "--target", "defended", "--output", "r")
    assert attack(*arguments) == 1
    shown = " ".join(capsys.readouterr().err.split())
    assert "broken: image 0 is certified and a patch changes its answer" in shown
    assert content("r", "results")["broken"] == [0, 1]
    folder = Path("r/broken/1")
    tables, pixels = content(folder, "tables"), load_file(folder / "pixels.safetensors")
    masks = pp.MaskSet(tuple(tables["masks"]["image_size"]), tuple(pp.Rect(*r) for r in tables["masks"]["rects"]))
    threat = pp.PatchThreat(masks.image_size, tuple(map(tuple, tables["defense"]["patch_sizes"])))
    classifier = load_classifier("own.py:build", "random", num_classes=2, input_size=(12, 12)).eval()
    both = torch.stack([pixels["image"], pixels["patched"]])
    assert pp.two_mask_labels(classifier, both, masks).tolist() == [tables["clean_table"], tables["patched_table"]]
    top, left, height, width = tables["place"]
    changed = (pixels["image"] != pixels["patched"]).any(dim=0)
    assert bool(changed[top : top + height, left : left + width].any())
    changed[top : top + height, left : left + width] = False
    assert not bool(changed.any())
    answers = campaign.LiteralRule(classifier, masks, threat).predict(both)
    assert answers.tolist() == [tables["label"], tables["answer_to_patched"]] == [0, 1]
    engine = Measured(**tables["engine"])
    assert pp.PatchCleanser(classifier, masks, threat, engine=engine).predict(both).tolist() == [0, 0]
    for name in ("image", "patched", "patch"):
        with Image.open(folder / f"{name}.png") as picture:
            assert picture.size == tuple(reversed(pixels[name].shape[1:]))
    assert attack(*arguments, "--resume") == 1
    assert "image 1 is certified" in capsys.readouterr().err


def test_bad_images_are_recorded_when_told_to_skip_them(dark_photos):
    Path("dark/calm/1.png").write_bytes(b"")
    quick = [{"exhaustive": "grid", 4: 1}.get(word, word) for word in dark_photos]
    assert attack(*quick, "--output", "r") == 1
    assert attack(*quick, "--output", "r", "--resume", "--skip-bad") == 0
    assert [r["index"] for r in records("r") if "error" in r] == [1]
    assert content("r", "results")["attacked"]["n"] == 3


def start_campaign(dark_photos: tuple, *arguments: str) -> int:
    return campaign.main([*map(str, dark_photos), "--output", "c.json", *arguments])


@pytest.mark.slow
def test_a_campaign_counts_and_goes_on(dark_photos, capsys):
    assert start_campaign(dark_photos) == 0
    counts = json.loads(Path("c.json").read_text())
    assert [counts[name]["broken"] for name in ("mask removed", "literal rule", "double masking")] == [2, 2, 0]
    assert counts["double masking"]["tried"] == 2
    assert sorted(counts["double masking"]["indices"]) == [0, 1]
    assert counts["manifest"]["config"]["masks"] == 3
    assert "double masking: 4 images, 2 certified and attacked, 0 broken" in capsys.readouterr().out
    assert start_campaign(dark_photos) == 0
    again = json.loads(Path("c.json").read_text())
    for name in ("mask removed", "literal rule", "double masking"):
        assert counts[name] | {"seconds": 0} == again[name] | {"seconds": 0}


def test_a_certificate_broken_in_a_campaign_is_kept(dark_photos, literal_rule, capsys):
    assert start_campaign(dark_photos, "--enough", "1") == 1
    assert "double masking: certified images were broken; see c" in capsys.readouterr().out
    counts = json.loads(Path("c.json").read_text())
    assert [counts[name]["broken"] for name in ("mask removed", "literal rule", "double masking")] == [1, 1, 2]
    for fallen in counts["double masking"]["breaks"]:
        assert (fallen["index"] in (0, 1), fallen["label"], fallen["answer"]) == (True, 0, 1)
    kept = sorted(Path("c/double-masking/broken").iterdir())
    assert len(kept) == 2
    assert load_file(kept[0] / "pixels.safetensors")["patch"].shape == (3, 3, 3)
