"""`patchproof train` as a user runs it: killed and resumed, resumed with something else, and given wrong input."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
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

from faults import Fault
from patchproof.cli import run
from patchproof.cli._runs import cost_words
from patchproof.models import load_checkpoint
from patchproof.report import build_report
from patchproof.runs import TrainingCost, has_splits
from patchproof.runs._train import _goes_on_longer
from patchproof.training import Plan
from patchproof.training.search import Memory
from patchproof.types import CheckError
from test_cli import assert_one_line, content

GREEDY = ("--strategy", "greedy", "--schedule", "cosine")


def two_classes(root: Path, counts: dict[str, int]) -> Path:
    """Two classes that can be told apart, in these splits."""
    draw = np.random.default_rng(0)
    for split, count in counts.items():
        for label, name in enumerate(("dark", "light")):
            (root / split / name).mkdir(parents=True)
            for number in range(count):
                pixels = draw.integers(0, 128, (28, 28, 3)) + 127 * label
                Image.fromarray(pixels.astype(np.uint8)).save(root / split / name / f"{number:02}.png")
    return root


@pytest.fixture
def data(tmp_path) -> Path:
    return two_classes(tmp_path / "data", {"train": 14, "val": 5})


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Path, Path, str]:
    """The data and the folder of a training that nothing disturbed, and what it said."""
    folder, said = tmp_path_factory.mktemp("finished"), io.StringIO()
    data = two_classes(folder / "data", {"train": 14, "val": 5})
    with contextlib.redirect_stderr(said):
        assert train(data, *GREEDY, "--output", str(folder / "r")) == 0
    return data, folder / "r", said.getvalue()


@pytest.fixture
def copied(finished, tmp_path) -> Path:
    """The data of that training; it is in `r`, to do anything with."""
    shutil.copytree(finished[1], tmp_path / "r")
    return finished[0]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_one_step_is_no_steps():
    words = cost_words(TrainingCost(1, 1, 0.5, 6, 1.0, 2.0, None))
    assert words == "1 epoch, 1 step of 0.5 s, 6 images validated after each epoch: 0:00:01 to 0:00:02"


def test_a_dry_run_times_a_few_steps_and_writes_nothing(data, capsys, monkeypatch):
    """28 images in batches of 8: four steps per epoch, of which two are enough to know what one takes."""
    assert train(data, "--epochs", "50", "--dry-run", "--json") == 0
    cost = json.loads(capsys.readouterr().out)
    assert (cost["epochs"], cost["steps"], cost["validation_images"]) == (50, 200, 6)
    assert 200 * cost["seconds_per_step"] < cost["fewest_seconds"] < cost["most_seconds"]
    assert train(data, "--epochs", "50", "--dry-run") == 0
    shown = capsys.readouterr()
    assert re.search(r"50 epochs, 200 steps of [\d.e-]+ s, 6 images validated .*: [\d:]+ to", shown.out)
    assert "timing a few steps" in shown.err
    assert not Path("runs").exists()
    with monkeypatch.context() as slow:
        slow.setattr("patchproof.runs._cost.ENOUGH_SECONDS", 0.0)
        slow.setattr("patchproof.runs._cost.median", len)
        assert train(data, "--epochs", "50", "--dry-run", "--json") == 0
    assert json.loads(capsys.readouterr().out)["seconds_per_step"] == 1, "where one takes that long, one is enough"
    monkeypatch.setattr(Memory, "saved", lambda self, epochs: 1e6)
    assert train(data, "--strategy", "memory", "--dry-run", "--json") == 0
    assert json.loads(capsys.readouterr().out)["seconds_per_step"] < 0, "what later epochs save is taken off"


def test_what_a_training_begins_with_is_said(tmp_path, capsys):
    small = two_classes(tmp_path / "small", {"train": 14, "val": 5})
    large = tmp_path / "large"
    for path in sorted(small.rglob("*.png")):
        there = large / path.relative_to(small)
        there.parent.mkdir(parents=True, exist_ok=True)
        Image.open(path).resize((80, 70)).save(there)
    for data, weights, words in (
        (small, "random", "begins with small, random weights, seed 0; input 28×28 pixels\n"),
        (large, "embedded", "embedded demonstration network, fresh head for 2 classes; input 28×28 pixels, to which"),
    ):
        for how in (["--dry-run"], ["--output", f"r-{weights}", "--epochs", "1"]):
            assert train(data, "--model", "small", "--weights", weights, *how) == 0
            assert words in capsys.readouterr().err


def test_one_class_is_refused(tmp_path, capsys):
    for split in ("train", "val"):
        (tmp_path / "one" / split / "cat").mkdir(parents=True)
        Image.new("RGB", (28, 28)).save(tmp_path / "one" / split / "cat" / "0.png")
    assert train(tmp_path / "one") == 2
    assert_one_line(capsys.readouterr().err, "the training images have one class, 'cat'; two are needed")


SETTINGS = {"--weights": "random", "--strategy": "none", "--epochs": "2", "--batch-size": "8", "--device": "cpu"}
SETTINGS |= {"--learning-rate": "0.05", "--validation-images": "6"}


def command(data: Path, *arguments: str) -> list[str]:
    """`train` with these arguments, and the usual settings where they say nothing."""
    usual = [word for flag, value in SETTINGS.items() if flag not in arguments for word in (flag, value)]
    return ["train", "--dataset", str(data), *usual, *arguments]


def train(data: Path, *arguments: str) -> int:
    return run(command(data, *arguments))


def losses(folder: str | Path) -> list[float]:
    lines = [json.loads(line) for line in (Path(folder) / "log.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["kind"] == "step"]


def weights(folder: str | Path, name: str = "checkpoint-last") -> bytes:
    return (Path(folder) / name / "model.safetensors").read_bytes()


def last_line(capsys) -> str:
    return capsys.readouterr().err.splitlines()[-1] + "\n"


def test_a_run_leaves_checkpoints_a_log_and_results_and_is_not_done_twice(copied, tmp_path, capsys):
    assert len(losses("r")) == 8
    results, manifest = content("r", "results"), content("r", "manifest")
    assert [e["epoch"] for e in results["epochs"]] == [1, 2]
    best = max(results["epochs"], key=lambda e: (e["certified"]["k"], e["undefended"]["k"], -e["epoch"]))
    assert results["best"] == best
    for name in ("checkpoint-last", "checkpoint-best"):
        assert load_checkpoint(tmp_path / "r" / name).class_names == ("dark", "light")
    assert manifest["search"] == {"forwards": 25, "backwards": 0}
    assert manifest["config"]["strategy"] == manifest["identity"]["plan"]["strategy"] == "greedy"
    assert run(["certify", "--weights", "r/checkpoint-last", "--dataset", str(copied), "--output", "c"]) == 0
    certified = content("c", "manifest")["identity"]["weights_sha256"]
    assert results["weights_sha256"] == certified != manifest["identity"]["weights_sha256"]
    before = weights("r"), losses("r")
    assert train(copied, *GREEDY, "--output", "r", "--resume") == 0
    assert (weights("r"), losses("r")) == before
    shown, said = capsys.readouterr()
    assert re.search(r"^best epoch . of 2: .{20,} validation images \(3×3 masks\)$", shown, re.MULTILINE), "one line"
    assert "finished already: 8 of 8 steps" in said
    assert "begins" not in said


def test_a_run_is_continued_only_with_what_it_began_with(copied, capsys):
    assert train(copied, *GREEDY, "--output", "r") == 2
    assert_one_line(last_line(capsys), "already holds a run; continue it with --resume")
    assert train(copied, *GREEDY, "--output", "r", "--resume", "--momentum", "0.5") == 1
    assert_one_line(last_line(capsys), "cannot be continued: --momentum was 0.9, now 0.5$")
    assert train(copied, *GREEDY, "--output", "r", "--resume", "--seed", "1") == 1
    assert_one_line(last_line(capsys), "cannot be continued: --seed was 0, now 1$")
    longer = [*GREEDY, "--output", "r", "--resume", "--epochs", "3"]
    assert train(copied, *longer, "--batch-size", "4") == 1
    assert_one_line(last_line(capsys), "cannot be continued: --batch-size was 8, now 4$")


def test_the_head_is_replaced_when_the_classes_differ(data, finished, tmp_path):
    two = str(finished[1] / "checkpoint-last")
    for split in ("train", "val"):
        (data / split / "grey").mkdir()
        for number in range(4):
            Image.new("L", (28, 28), 100 + number).save(data / split / "grey" / f"{number}.png")
    assert train(data, "--weights", two, "--output", "three", "--epochs", "1") == 0
    assert load_checkpoint(tmp_path / "three" / "checkpoint-last").class_names == ("dark", "grey", "light")


def test_a_diverging_run_stops_and_keeps_the_last_good_checkpoint(data, tmp_path, capsys):
    diverging = ("--learning-rate", "2e36", "--warmup-epochs", "2", "--schedule", "constant")
    assert train(data, "--output", "r", "--checkpoint-minutes", "0", *diverging) == 1
    assert_one_line(
        last_line(capsys), r"(the loss became \w+ at|NaN or infinite after) step \d+; a checkpoint saved before"
    )
    classifier = load_checkpoint(tmp_path / "r" / "checkpoint-last")
    assert all(torch.isfinite(p).all() for p in classifier.parameters())


def test_a_full_disk_is_one_line_and_keeps_the_checkpoint_before(commands, copied):
    before = weights("r")
    words = command(copied, "--output", "full", "--weights", "r/checkpoint-last")
    code, complaint = commands.run(words, Fault(file_bytes=100_000))  # the checkpoint is larger
    assert code == 1
    assert_one_line(complaint.splitlines()[-1] + "\n", r"cannot write model\.safetensors|File too large")
    assert "Traceback" not in complaint
    assert weights("r") == before


def test_unreadable_training_images_stop_the_run_or_are_skipped_when_told(data, capsys):
    (data / "train" / "dark" / "03.png").write_bytes(b"")
    assert train(data, "--output", "stops") == 1
    assert_one_line(last_line(capsys), r"cannot use image .*03\.png")
    assert train(data, "--output", "stops", "--skip-bad", "--resume") == 0  # as the message advises
    assert len(losses("stops")) == 8


def test_an_interrupted_resume_does_not_lose_the_log(copied, monkeypatch):
    before = losses("r")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        assert train(copied, *GREEDY, "--output", "r", "--resume") == 130
    assert losses("r") == before


def test_validation_images_must_be_others_of_the_same_classes(data, capsys):
    assert train(data / "train", "--validation", str(data / "train")) == 2
    assert_one_line(capsys.readouterr().err, "the validation images are the training images")
    assert train(data / "train") == 2
    assert_one_line(capsys.readouterr().err, "has no folder `train`.*--validation FOLDER")
    (data / "val" / "zebra").mkdir()
    Image.new("L", (28, 28)).save(data / "val" / "zebra" / "0.png")
    assert train(data) == 2
    assert_one_line(
        capsys.readouterr().err, "1 classes of the validation images are not among the training classes, e.g. zebra"
    )


def test_what_chooses_the_best_epoch_is_said_recorded_and_remembered(tmp_path, monkeypatch, capsys):
    """With a test split of its own, nothing overlaps; without, the best checkpoint's number is optimistic."""
    monkeypatch.setenv("COLUMNS", "200")
    data = two_classes(tmp_path / "pets", {"train": 14, "validation": 5, "test": 4})
    assert train(data, "--output", "r", "--epochs", "2") == 0
    assert "chosen on pets, split validation; pets, split test is left to test" in capsys.readouterr().err
    assert train(data, "--output", "t", "--epochs", "1", "--split", "test") == 0
    assert "split validation; certify tests the images it learns from, unless it is given" in capsys.readouterr().err
    recorded = content("r", "manifest")
    assert [recorded["data"][kind]["split"] for kind in ("train", "validation", "test")] == [
        "train",
        "validation",
        "test",
    ]
    assert recorded["remarks"] == []
    assert "best epoch chosen on pets, split validation." in build_report([Path("r")]).html()
    for split, optimistic in (("test", False), ("validation", True)):
        chosen = ["--weights", "r/checkpoint-best", "--dataset", str(data), "--split", split, "--output", split]
        assert run(["certify", *chosen]) == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert ("optimistic: the checkpoint was chosen among the epochs" in shown) == optimistic
        assert f"pets (split {split})" in shown
    flat = two_classes(tmp_path / "flat", {".": 6})
    assert train(data, "--output", "v", "--epochs", "1", "--validation", str(flat)) == 0
    said = (
        "learns from pets, split train; the best epoch is chosen on flat, split all; pets, split test is left to test"
    )
    assert said in capsys.readouterr().err
    assert [has_splits(str(place)) for place in (data, flat, "imagenette")] == [True, False, True]
    apart = ("--epochs", "1", "--validation", str(data / "validation"), "--output", "a")
    assert train(data / "train", *apart) == 0
    said = "chosen on validation, split all: checkpoint-best is not independent of these\n"
    assert said in capsys.readouterr().err, "which images will be tested is not known"
    assert content("a", "manifest")["remarks"] == []
    two = two_classes(tmp_path / "two", {"train": 14, "val": 5})
    assert train(two, "--output", "s", "--epochs", "1") == 0
    assert "these are also the images that certify tests" in capsys.readouterr().err
    assert "checkpoint-best certifies on them is optimistic" in content("s", "manifest")["remarks"][0]


def test_the_loss_of_an_epoch_is_its_mean(finished):
    _, folder, said = finished
    shown = [float(number) for number in re.findall(r"epoch \d: mean loss (\S+),", said)]
    found = losses(folder)
    sizes = [8, 8, 8, 4]  # 28 images
    means = [sum(size * one for size, one in zip(sizes, part, strict=True)) / 28 for part in (found[:4], found[4:])]
    assert shown == pytest.approx(means, abs=0.0006)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)]
)
def test_stopped_by_a_signal_training_saves_the_step_and_goes_on_from_it(commands, data, number, code):
    process = commands.start(command(data, "--epochs", "30", "--schedule", "constant", "--output", "r"))
    log = Path("r/log.jsonl")
    while not commands.ended(process.number) and not (log.exists() and log.read_bytes().count(b"\n") >= 6):
        time.sleep(0.005)
    assert process.send(number)
    assert process.wait() == code
    assert "stopped; what was finished is on disk, continue with --resume" in process.complaint
    assert len(losses("r")) == json.loads(Path("r/checkpoint-last/training.json").read_text())["step"] < 120


def test_a_finished_training_goes_on_with_more_epochs_where_its_schedule_allows(data, capsys):
    constant = ("--schedule", "constant", "--limit", "16")
    assert train(data, "--output", "two", *constant) == 0
    assert train(data, "--output", "r", "--epochs", "1", *constant) == 0
    capsys.readouterr()
    assert train(data, "--output", "r", *constant, "--resume") == 0
    said = capsys.readouterr().err
    assert "goes on after step 2 of 4\nlearns from data" in said
    assert "begins" not in said
    assert (losses("r"), weights("r")) == (losses("two"), weights("two"))
    assert content("r", "manifest")["steps"] == 4


def test_an_epoch_is_said_though_its_last_step_is_the_last_of_all(data, capsys, monkeypatch):
    monkeypatch.setattr("patchproof.cli._show.STOP.asked", signal.SIGINT)
    assert train(data, "--output", "r", "--limit", "8") == 130
    said = capsys.readouterr().err
    assert "epoch 1: mean loss" in said
    assert "stopped; what was finished is on disk, continue with --resume" in said


def test_a_training_whose_schedule_depends_on_its_length_does_not_go_on(copied, capsys):
    before = weights("r")
    assert train(copied, *GREEDY, "--output", "r", "--epochs", "3", "--resume") == 1
    assert_one_line(last_line(capsys), "cannot go on to 3 epochs: with the schedule `cosine` .* another --output")
    assert weights("r") == before


LAUNCHER = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "patchproof"]


@pytest.mark.slow
def test_two_processes_resume_as_if_undisturbed(data):
    saving = ("--checkpoint-minutes", "0", "--strategy", "greedy", "--epochs", "3")
    subprocess.run([*LAUNCHER, *command(data, "--output", "whole", *saving)], check=True, timeout=300)
    process = subprocess.Popen([*LAUNCHER, *command(data, "--output", "killed", *saving)], start_new_session=True)
    log = Path("killed/log.jsonl")
    while process.poll() is None and not (log.exists() and log.read_bytes().count(b'"step", "step"') >= 6):
        time.sleep(0.001)
    os.killpg(process.pid, signal.SIGKILL)
    subprocess.run([*LAUNCHER, *command(data, "--output", "killed", *saving, "--resume")], check=True, timeout=300)
    assert losses("killed") == losses("whole")
    assert weights("killed") == weights("whole")


@pytest.mark.slow
def test_two_processes_train_as_one(data):
    """Same masks would need the same generator on every process; with `none` the mean gradient is the same."""
    frozen = ("--epochs", "1", "--head-only", "--schedule", "constant")
    assert train(data, *frozen, "--output", "one") == 0
    subprocess.run([*LAUNCHER, *command(data, *frozen, "--output", "two")], check=True, timeout=300)
    assert losses("two") == pytest.approx(losses("one"), rel=1e-4)


def test_more_epochs_of_another_number_of_steps_are_refused(tmp_path):
    """As on other processes, whose last batch may be left out: epochs would be skipped silently."""
    stored = {"command": "train", "identity": {"steps": 4, "plan": {"epochs": 2}}}
    current = {"identity": {"steps": 6, "plan": {"epochs": 6}}}
    with pytest.raises(CheckError, match="has 2 steps per epoch, here it would be 1: take as many processes"):
        _goes_on_longer(stored, plan=Plan(epochs=6), current=current, folder=tmp_path)
