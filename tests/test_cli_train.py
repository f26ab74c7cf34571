"""`patchproof train` as a user runs it: killed and resumed, resumed with something else, and told nonsense."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from faults import Fault, Server
from patchproof.cli import run
from patchproof.models import load_checkpoint
from test_cli import assert_one_line


@pytest.fixture
def data(tmp_path) -> Path:
    """Two classes that can be told apart, in train and val."""
    draw = np.random.default_rng(0)
    for split, count in (("train", 14), ("val", 5)):
        for label, name in enumerate(("dark", "light")):
            (tmp_path / "data" / split / name).mkdir(parents=True)
            for number in range(count):
                pixels = draw.integers(0, 128, (28, 28, 3)) + 127 * label
                Image.fromarray(pixels.astype(np.uint8)).save(tmp_path / "data" / split / name / f"{number:02}.png")
    return tmp_path / "data"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


SETTINGS = {"--strategy": "greedy", "--epochs": "3", "--batch-size": "8", "--learning-rate": "0.05", "--device": "cpu"}


def command(data: Path, *arguments: str) -> list[str]:
    """`train` with these arguments, and the usual settings where they say nothing."""
    usual = [word for flag, value in SETTINGS.items() if flag not in arguments for word in (flag, value)]
    return ["train", "--dataset", str(data), *usual, *arguments]


def train(data: Path, *arguments: str) -> int:
    return run(command(data, *arguments))


def losses(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["kind"] == "step"]


def weights(folder: Path, name: str = "checkpoint-last") -> bytes:
    return (folder / name / "model.safetensors").read_bytes()


def test_a_run_leaves_checkpoints_a_log_and_results(data, tmp_path):
    assert train(data, "--output", "r") == 0
    assert len(losses(tmp_path / "r")) == 12
    results = json.loads((tmp_path / "r" / "results.json").read_text())
    assert [e["epoch"] for e in results["epochs"]] == [1, 2, 3]
    best = max(results["epochs"], key=lambda e: (e["certified"]["k"], e["undefended"]["k"], -e["epoch"]))
    assert results["best"] == best
    for name in ("checkpoint-last", "checkpoint-best"):
        classifier = load_checkpoint(tmp_path / "r" / name)
        assert classifier.class_names == ("dark", "light")
    manifest = json.loads((tmp_path / "r" / "manifest.json").read_text())
    assert manifest["search"] == {"forwards": 25, "backwards": 0}
    assert run(["certify", "--weights", "r/checkpoint-last", "--dataset", str(data), "--output", "c"]) == 0
    certified = json.loads((tmp_path / "c" / "manifest.json").read_text())
    assert (
        results["weights_sha256"] == certified["identity"]["weights_sha256"] != manifest["identity"]["weights_sha256"]
    )


def kill_after(commands: Server, steps: int, data: Path, folder: Path, *arguments: str) -> bool:
    """Start the training, SIGKILL it once so many steps are written; True if it was still running."""
    process = commands.start(command(data, *arguments))
    log = folder / "log.jsonl"
    while not commands.ended(process.number):
        if log.exists() and log.read_bytes().count(b'"step", "step"') >= steps:
            process.send(signal.SIGKILL)
            return process.wait() == -signal.SIGKILL
        time.sleep(0.001)
    return False


@pytest.mark.slow  # tests/test_faults.py kills a few times in the fast set
@pytest.mark.parametrize("kills", [(5,), (1, 3, 6, 7, 10, 11)])
def test_killed_and_resumed_the_curve_and_the_weights_are_those_of_an_undisturbed_run(commands, data, tmp_path, kills):
    saving = ("--checkpoint-minutes", "0")
    assert train(data, "--output", "whole", *saving) == 0
    folder, killed = tmp_path / "killed", 0
    for steps in kills:
        resume = ("--resume",) if (folder / "manifest.json").exists() else ()
        killed += kill_after(commands, steps, data, folder, "--output", "killed", *saving, *resume)
    assert killed
    assert train(data, "--output", "killed", "--resume", *saving) == 0
    assert losses(folder) == losses(tmp_path / "whole")
    for name in ("checkpoint-last", "checkpoint-best"):
        assert weights(folder, name) == weights(tmp_path / "whole", name)


def test_a_run_is_continued_only_with_what_it_began_with(data, tmp_path, capsys):
    assert train(data, "--output", "r", "--limit", "16") == 0
    capsys.readouterr()
    assert train(data, "--output", "r") == 2
    assert_one_line(capsys.readouterr().err, "already holds a run; continue it with --resume")
    assert train(data, "--output", "r", "--resume", "--limit", "16", "--seed", "1") == 1
    assert_one_line(capsys.readouterr().err.splitlines()[-1] + "\n", "cannot be continued: weights_sha256 was|plan was")


def test_a_finished_run_resumed_changes_nothing(data, tmp_path):
    assert train(data, "--output", "r") == 0
    before = weights(tmp_path / "r"), losses(tmp_path / "r")
    assert train(data, "--output", "r", "--resume") == 0
    assert (weights(tmp_path / "r"), losses(tmp_path / "r")) == before


def test_the_head_is_replaced_when_the_classes_differ(data, tmp_path):
    assert train(data, "--output", "two") == 0
    (tmp_path / "data" / "train" / "grey").mkdir()
    (tmp_path / "data" / "val" / "grey").mkdir()
    for split in ("train", "val"):
        for number in range(4):
            Image.new("L", (28, 28), 100 + number).save(tmp_path / "data" / split / "grey" / f"{number}.png")
    assert train(data, "--weights", "two/checkpoint-last", "--output", "three", "--epochs", "1") == 0
    assert load_checkpoint(tmp_path / "three" / "checkpoint-last").class_names == ("dark", "grey", "light")


def test_a_damaged_checkpoint_is_named(data, tmp_path, capsys):
    assert train(data, "--output", "r", "--epochs", "1") == 0
    (tmp_path / "r" / "checkpoint-last" / "training.safetensors").write_bytes(b"cut")
    capsys.readouterr()
    assert train(data, "--output", "r", "--epochs", "1", "--resume") == 1
    assert_one_line(capsys.readouterr().err, "checkpoint-last is damaged")


def test_a_diverging_run_stops_and_keeps_the_last_good_checkpoint(data, tmp_path, capsys):
    diverging = ("--learning-rate", "1e38", "--warmup-epochs", "100", "--schedule", "constant", "--strategy", "none")
    assert train(data, "--output", "r", "--checkpoint-minutes", "0", *diverging) == 1
    error = capsys.readouterr().err.splitlines()[-1] + "\n"
    assert_one_line(
        error, r"(the loss became \w+ at|weights are NaN or infinite after) step \d+; a checkpoint saved before"
    )
    classifier = load_checkpoint(tmp_path / "r" / "checkpoint-last")
    assert all(torch.isfinite(p).all() for p in classifier.parameters())


def test_a_full_disk_is_one_line_and_keeps_the_checkpoint_before(commands, data, tmp_path):
    assert train(data, "--output", "r", "--epochs", "1", "--checkpoint-minutes", "99") == 0
    before = weights(tmp_path / "r")
    words = command(data, "--output", "full", "--weights", "r/checkpoint-last")
    code, complaint = commands.run(words, Fault(file_bytes=100_000))  # the checkpoint is larger
    assert code == 1
    assert_one_line(complaint.splitlines()[-1] + "\n", r"cannot write model\.safetensors|File too large")
    assert "Traceback" not in complaint
    assert weights(tmp_path / "r") == before


def test_unreadable_training_images_stop_the_run_or_are_skipped_when_told(data, tmp_path, capsys):
    (data / "train" / "dark" / "03.png").write_bytes(b"")
    assert train(data, "--output", "stops") == 1
    assert_one_line(capsys.readouterr().err.splitlines()[-1] + "\n", r"cannot use image .*03\.png")
    assert train(data, "--output", "skips", "--skip-bad") == 0
    assert len(losses(tmp_path / "skips")) == 12


def test_an_interrupted_resume_does_not_lose_the_log(data, tmp_path, monkeypatch):
    assert train(data, "--output", "r") == 0
    before = losses(tmp_path / "r")
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    assert train(data, "--output", "r", "--resume") == 1
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert losses(tmp_path / "r") == before


WRONG = [
    (["--learning-rate", "0"], "--learning-rate must be positive"),
    (["--learning-rate", "inf"], "every number of a plan must be finite"),
    (["--seed", "1180591620717411303424"], "--seed must be in"),
    (["--checkpoint-minutes", "nan"], "--checkpoint-minutes must be a number"),
    (["--precision", "fp16"], "--precision fp16 needs a GPU"),
    (["--workers", "0"], "--workers must be at least 1, not 0"),
    (["--device", "meta"], "--device must be cpu"),
    (["--mask-patch", "0px"], "--mask-patch must look like 3%"),
    (["--strategy", "greddy"], "unknown masking strategy `greddy`; did you mean `greedy`"),
    (["--batch-size", "1"], "BatchNorm cannot learn from batches of one image"),
    (["--batch-size", "auto"], "--batch-size auto is for certification"),
    (["--recipe", "imagenet-vit-greddy"], "unknown recipe `imagenet-vit-greddy`; did you mean `imagenet-vit-greedy`"),
    (["--mask-patch", "90px"], "a 90×90 patch does not fit"),
    (["--epochs", "0"], "--epochs must be at least 1"),
    (["--weights", "pretrained"], "`small` has no pretrained weights"),
    (["--learning-rte", "1"], "Unknown option: --learning-rte"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG)
def test_wrong_input_is_one_line(data, capsys, arguments, message):
    assert train(data, *arguments) == 2
    assert_one_line(capsys.readouterr().err, message)
    assert not Path("runs").exists()


def test_validation_images_must_be_others(data, capsys):
    code = train(data / "train", "--validation", str(data / "train"))
    assert code == 2
    assert_one_line(capsys.readouterr().err, "the validation images are the training images")


def test_a_folder_without_splits_is_told_about_validation(data, capsys):
    assert train(data / "train") == 2
    assert_one_line(capsys.readouterr().err, "has no folder `train`.*--validation FOLDER")


def test_a_class_only_in_val_is_named(data, capsys):
    (data / "val" / "zebra").mkdir()
    Image.new("L", (28, 28)).save(data / "val" / "zebra" / "0.png")
    assert train(data) == 2
    assert_one_line(capsys.readouterr().err, "1 classes to learn nothing about, e.g. zebra")


@pytest.mark.slow
def test_two_processes_resume_as_if_undisturbed(data, tmp_path):
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "patchproof"]
    saving = ("--checkpoint-minutes", "0")
    subprocess.run([*words, *command(data, "--output", "whole", *saving)], check=True, timeout=300)
    process = subprocess.Popen([*words, *command(data, "--output", "killed", *saving)], start_new_session=True)
    log = tmp_path / "killed" / "log.jsonl"
    while process.poll() is None and not (log.exists() and log.read_bytes().count(b'"step", "step"') >= 6):
        time.sleep(0.001)
    os.killpg(process.pid, signal.SIGKILL)
    subprocess.run([*words, *command(data, "--output", "killed", *saving, "--resume")], check=True, timeout=300)
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    assert weights(tmp_path / "killed") == weights(tmp_path / "whole")


@pytest.mark.slow
def test_two_processes_train_as_one(data, tmp_path):
    """Same masks would need the same generator on every process; with `none` the mean gradient is the same."""
    common = ["--dataset", str(data), "--strategy", "none", "--epochs", "1", "--batch-size", "8", "--device", "cpu"]
    frozen = ["--head-only", "--learning-rate", "0.05", "--schedule", "constant"]
    assert run(["train", *common, *frozen, "--output", "one"]) == 0
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "patchproof", "train"]
    subprocess.run([*torchrun, *common, *frozen, "--output", "two"], check=True, timeout=300)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-4)
