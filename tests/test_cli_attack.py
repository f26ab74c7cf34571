"""`patchproof attack` as a user types it: the sandwich in records and results, resuming, and what a break leaves."""

from __future__ import annotations

import json
import re
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import patchproof as pp
from patchproof.cli import run
from patchproof.cli._setup import Setup
from patchproof.models import load_classifier, save_checkpoint
from patchproof.records import ATTACK_ACCURACIES, AttackRecord, RunFolder, parse_record
from test_attacks import campaign

QUICK = ("--steps", 2, "--restarts", 1, "--places", 1, "--device", "cpu")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    save_checkpoint(load_classifier("small", "random", num_classes=10, seed=1), tmp_path / "start")
    return tmp_path / "start"


def attack(*arguments: object) -> int:
    return run(["attack", *map(str, arguments)])


def records(folder: str) -> list[dict]:
    return [json.loads(line) for line in (Path(folder) / "records.jsonl").read_text().splitlines()]


def results(folder: str) -> dict:
    return json.loads((Path(folder) / "results.json").read_text())


def test_records_and_results_hold_the_sandwich_beside_what_certify_finds(checkpoint, capsys):
    common = ("--weights", checkpoint, "--limit", 20, "--patch", "1px", "--masks", 4)
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
    found = results("a")
    for name in ATTACK_ACCURACIES:
        assert (found[name]["k"], found[name]["n"]) == (sum(r[name] for r in records("a")), 20)
        assert name.replace("_", " ") in shown
    assert found["broken"] == []
    assert found["cost"]["passes"] == sum(r["passes"] for r in records("a")) > 0
    manifest = json.loads(Path("a/manifest.json").read_text())
    assert manifest["command"] == "attack"
    assert manifest["identity"]["attack"]["steps"] == 2


def test_a_target_that_is_left_alone_is_null_and_counted_nowhere(checkpoint, capsys):
    common = ("--weights", checkpoint, "--limit", 6, *QUICK)
    assert attack(*common, "--target", "undefended", "--output", "u") == 0
    assert "defended attacked" in capsys.readouterr().out
    assert all(r["attacked"] is None and r["undefended_attacked"] is not None for r in records("u"))
    assert results("u")["attacked"]["n"] == 0
    assert attack(*common, "--target", "defended", "--only-certified", "--patch", "1px", "--output", "d") == 0
    for record in records("d"):
        assert record["undefended_attacked"] is None
        assert record["attacked"] == (True if record["certified"] else None)
    assert "undefended attacked" not in capsys.readouterr().out


def test_the_seed_and_the_plan_are_part_of_the_run(checkpoint, capsys):
    common = ("--weights", checkpoint, "--limit", 3, *QUICK, "--output", "r")
    assert attack(*common) == 0
    assert attack(*common, "--seed", 5, "--resume") == 1
    assert "attack was" in capsys.readouterr().err
    assert run(["certify", "--weights", str(checkpoint), "--limit", "3", "--output", "r", "--resume"]) == 1
    assert "holds a `attack` run" in capsys.readouterr().err


SLOW = ("--limit", 48, "--steps", 4, "--restarts", 2, "--places", 2, "--device", "cpu", "--target", "defended")


def test_killed_or_cut_short_and_resumed_the_records_are_the_same_bytes(commands, checkpoint):
    arguments = ("--weights", checkpoint, *SLOW)
    assert attack(*arguments, "--output", "whole") == 0
    expected = Path("whole/records.jsonl").read_bytes()
    path = Path("killed/records.jsonl")
    process = commands.start(["attack", *map(str, arguments), "--output", "killed"])
    while not commands.ended(process.number) and not (path.exists() and path.read_bytes().count(b"\n") >= 16):
        time.sleep(0.01)
    assert process.send(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    path.write_bytes(path.read_bytes()[:-300])
    assert 0 < len(RunFolder(Path("killed")).records()) < 48
    assert attack(*arguments, "--output", "killed", "--resume") == 0
    assert path.read_bytes() == expected
    assert results("killed")["images"]["done"] == 48


def test_a_line_of_an_attack_is_read_back_as_it_was_written():
    record = AttackRecord(3, "a.png", 1, True, True, False, 0.5, 9, None, None, False, False, (1, 2, 5, 5), 4, 70, 8)
    assert parse_record(record.line()) == record
    with pytest.raises(ValueError, match="true, false or null"):
        parse_record(record.line().replace('"attacked": false', '"attacked": 1'))


# --- a broken certificate ------------------------------------------------------------------------------------------

STARTLED = """
import torch
from torch import nn
from torch.nn import functional

class Startled(nn.Module):
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
    return (*model, *plan, "--target", "defended", "--device", "cpu")


@pytest.fixture
def literal_rule(monkeypatch):
    def defense(self):
        return campaign.LiteralRule(self.classifier, self.masks, self.threat, engine=self.engine)

    monkeypatch.setattr(Setup, "defense", property(defense))


def test_the_true_defence_holds_against_every_place(dark_photos):
    assert attack(*dark_photos, "--output", "r") == 0
    assert [r["certified"] for r in records("r")] == [r["attacked"] for r in records("r")] == [True, True, False, False]
    assert not Path("r/broken").exists()


def test_a_broken_certified_image_fails_the_run_and_is_kept(dark_photos, literal_rule, capsys):
    assert attack(*dark_photos, "--output", "r") == 1
    shown = " ".join(capsys.readouterr().err.split())
    assert "broken: image 0 is certified and a patch changes its answer" in shown
    assert results("r")["broken"] == [0, 1]
    folder = Path("r/broken/1")
    tables = json.loads((folder / "tables.json").read_text())
    pixels = load_file(folder / "pixels.safetensors")
    masks = pp.MaskSet(tuple(tables["image_size"]), tuple(pp.Rect(*rect) for rect in tables["masks"]))
    threat = pp.PatchThreat(masks.image_size, tuple(map(tuple, tables["patch_sizes"])))
    classifier = load_classifier("own.py:build", "random", num_classes=2, input_size=(12, 12)).eval()
    both = torch.stack([pixels["image"], pixels["patched"]])
    assert pp.two_mask_labels(classifier, both, masks).tolist() == [tables["clean_table"], tables["patched_table"]]
    top, left, height, width = tables["place"]
    changed = (pixels["image"] != pixels["patched"]).any(dim=0)
    assert bool(changed[top : top + height, left : left + width].any())
    changed[top : top + height, left : left + width] = False
    assert not bool(changed.any())
    assert pixels["patch"].shape == (3, 3, 3)
    answers = campaign.LiteralRule(classifier, masks, threat).predict(both)
    assert answers.tolist() == [tables["label"], tables["answer_to_patched"]] == [0, 1]
    assert pp.PatchCleanser(classifier, masks, threat).predict(both).tolist() == [0, 0]
    for name in ("image", "patched", "patch"):
        with Image.open(folder / f"{name}.png") as picture:
            assert picture.size == tuple(reversed(pixels[name].shape[1:]))


def test_a_certificate_broken_in_a_campaign_is_kept(dark_photos, literal_rule, capsys):
    words = [*map(str, dark_photos[: dark_photos.index("--target")]), "--device", "cpu", "--output", "c.json"]
    assert campaign.main(words) == 1
    assert "double masking: certified images were broken; see c.json and c-broken" in capsys.readouterr().out
    assert sorted(json.loads(Path("c.json").read_text())["double masking"]["indices"]) == [0, 1]
    for index in (0, 1):
        tables = json.loads(Path(f"c-broken/{index}/tables.json").read_text())
        assert (tables["index"], tables["label"], tables["answer_to_patched"]) == (index, 0, 1)
        assert np.all(np.array(tables["clean_table"]) == 0)
        assert load_file(f"c-broken/{index}/pixels.safetensors")["patch"].shape == (3, 3, 3)


@pytest.mark.parametrize(
    ("flags", "message"),
    [(("--precision", "fp99"), "fp99"), (("--minutes", "nan"), "a positive number"), (("--minutes", "0"), "positive")],
)
def test_wrong_settings_of_a_campaign_are_named(flags, message, capsys):
    with pytest.raises(SystemExit):
        campaign.main(list(flags))
    assert message in capsys.readouterr().err


def test_a_resumed_run_still_fails_for_what_broke_before(dark_photos, literal_rule, capsys):
    assert attack(*dark_photos, "--output", "r") == 1
    assert attack(*dark_photos, "--output", "r", "--resume") == 1
    assert "image 1 is certified" in capsys.readouterr().err


WRONG = [
    (("--steps", 0), "at least 1 of its steps, not 0"),
    (("--restarts", 0), "at least 1 of its restarts"),
    (("--places", 0), "at least 1 of its places"),
    (("--step-size", 2), r"step size must be in \(0, 1\]"),
    (("--target", "nobody"), '"nobody"'),
    (("--place-search", "luck"), '"luck"'),
    (("--stesp", 3), "Did you mean --steps"),
    (("--target", "undefended", "--only-certified"), "leaves it alone; drop one"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG)
def test_wrong_input_is_one_line_and_exit_code_2(arguments, message, capsys):
    assert attack(*arguments) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("patchproof: ")
    assert shown.count("\n") == 1
    assert re.search(message, shown), shown
    assert not Path("runs").exists()


def test_bad_images_are_recorded_when_told_to_skip_them(dark_photos):
    Path("dark/calm/1.png").write_bytes(b"")
    quick = [{"exhaustive": "grid", 4: 1}.get(word, word) for word in dark_photos]
    assert attack(*quick, "--output", "r") == 1
    assert attack(*quick, "--output", "r", "--resume", "--skip-bad") == 0
    assert [r["index"] for r in records("r") if "error" in r] == [1]
    assert results("r")["attacked"]["n"] == 3


@pytest.mark.slow
def test_the_campaign_script_writes_its_counts(dark_photos, capsys):
    flags = [str(v) for v in dark_photos if v not in ("--target", "defended")]
    assert campaign.main([*flags, "--minutes", "1", "--output", "counts.json"]) == 0
    counts = json.loads(Path("counts.json").read_text())
    assert [counts[name]["broken"] for name in ("mask removed", "literal rule", "double masking")] == [2, 2, 0]
    assert counts["double masking"]["tried"] == 2
    assert "double masking: 4 images, 2 certified and attacked, 0 broken" in capsys.readouterr().out
