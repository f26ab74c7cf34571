"""Properties that need a GPU: fast arithmetic, compiled networks, whole chunks, and running out of memory.

They are skipped without a GPU; with one, run `python -m pytest tests/test_gpu.py`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch import nn

import patchproof as pp
from patchproof.cli import run
from patchproof.data import ArraySource, iterate_batches, open_dataset
from patchproof.masking import CleanAnswers, Evaluator, as_images, images_ahead
from patchproof.models import ImageClassifier, load_classifier
from patchproof.training.checkpoint import load_training, save_training
from patchproof.training.loop import Trainer, TrainingData
from patchproof.training.recorded import RecordedPass
from patchproof.training.strategies import masking_strategy, training_masks
from patchproof.types import CheckError, Preprocessing
from reference import measured

DEVICE = "cuda"
THREAT = pp.PatchThreat.square(image_size=(28, 28), pixels=5)
IMAGES = 96

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A small network that has learned enough to certify some images and not others."""
    folder = tmp_path_factory.mktemp("gpu")
    words = f"train --model small --weights random --strategy greedy --limit 2000 --epochs 2 --device {DEVICE}"
    assert run([*words.split(), "--learning-rate", "0.1", "--validation-images", "50", "--output", str(folder)]) == 0
    return folder / "checkpoint-last"


def records(folder: Path, *words: str) -> list[dict]:
    """Records of a command; with `--compile` it runs in a process where the tests' type checks are not compiled."""
    words = (*words, "--output", str(folder))
    if "--compile" in words:
        subprocess.run([sys.executable, "-m", "patchproof", *words], check=True)
    else:
        assert run(words) == 0
    return [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]


def certify(trained: Path, folder: Path, *flags: str) -> list[dict]:
    """The verdicts, one per image."""
    found = records(folder, "certify", "--weights", str(trained), "--limit", str(IMAGES), *flags)
    return [{name: record[name] for name in ("index", "undefended", "defended", "certified")} for record in found]


@pytest.fixture(scope="module")
def on_the_cpu(trained, tmp_path_factory) -> list[dict]:
    verdicts = certify(trained, tmp_path_factory.mktemp("cpu") / "r", "--device", "cpu")
    assert 5 < sum(verdict["certified"] for verdict in verdicts) < IMAGES - 5
    return verdicts


@pytest.mark.parametrize("flags", ["auto", "fp32", "tf32", "bf16", "fp16", "fp16 --compile", "bf16 --exhaustive"])
def test_the_verdicts_are_those_of_the_cpu(trained, on_the_cpu, tmp_path, flags):
    """Labels with margins below τ count as wrong, and τ differs between devices, so one verdict may differ."""
    found = certify(trained, tmp_path / "r", "--device", DEVICE, "--precision", *flags.split())
    different = [a for a, b in zip(found, on_the_cpu, strict=True) if a != b]
    assert len(different) <= 1


def test_auto_takes_the_fastest_records_it_and_keeps_it_when_resumed(trained, tmp_path, capsys):
    words = ["--device", DEVICE, "--limit", "64", "--weights", str(trained), "--output", str(tmp_path)]
    assert run(["certify", *words]) == 0
    assert "note: precision" in capsys.readouterr().err
    lines, manifest = (tmp_path / "records.jsonl").read_text(), json.loads((tmp_path / "manifest.json").read_text())
    rates = manifest["tau"]["drift"]["labels_per_second"]
    assert manifest["precision"] == max(rates, key=rates.get).split()[0]
    assert manifest["identity"]["defense"]["precision"] == "auto"
    (tmp_path / "records.jsonl").write_text("".join(lines.splitlines(keepends=True)[:20]))
    assert run(["certify", *words, "--resume"]) == 0
    assert (tmp_path / "records.jsonl").read_text() == lines


def small_case(trained: Path, count: int) -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor]:
    source = open_dataset("fashion-mini")
    (batch,) = iterate_batches(source, Preprocessing(None), range(count), batch_size=count)
    return load_classifier("small", str(trained)).eval(), as_images(batch.images, torch.device("cpu")), batch.labels


@pytest.mark.parametrize("number", [0, 1])
def test_an_attacks_gradient_is_that_of_the_cpu(trained, number):
    classifier, images, labels = small_case(trained, 8)
    gradients = []
    for device in ("cpu", DEVICE):
        here, right = images.to(device), labels.to(device)
        defense = pp.defense("patchcleanser", classifier.to(device), THREAT, engine=pp.Engine(batch_size=256))
        evaluator, objective = Evaluator(defense.classifier, defense.engine), defense.objectives()[number]
        views = objective.views((28, 28), here.device)
        clean = evaluator.logits(here, views, torch.arange(len(views.first), device=device))
        places = torch.tensor([[10, 10, 5, 5]], device=device).expand(len(images), -1)
        aim = objective.aim(CleanAnswers(views, right, clean), places, torch.zeros_like(right))
        gradients.append(evaluator.gradient(here, right, views, aim, objective.loss)[1].cpu())
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-2, atol=1e-2 * float(gradients[0].abs().amax()))


@pytest.mark.parametrize("flags", ["fp32", "bf16", "fp16 --compile"])
def test_certified_attacked_defended_image_by_image(trained, tmp_path, flags):
    words = f"attack --limit 12 --steps 8 --places 2 --device {DEVICE} --precision {flags}"
    for record in records(tmp_path / "r", *words.split(), "--weights", str(trained)):
        assert record["certified"] <= record["attacked"] <= record["defended"]


@pytest.mark.parametrize("name", ["greedy", "grid3x3", "gutout3x3"])
def test_the_search_finds_the_masks_of_the_cpu(trained, name):
    """The search is in float32, where rounding may break ties differently."""
    classifier, images, labels = small_case(trained, 64)
    found = []
    for device in ("cpu", DEVICE):
        strategy = masking_strategy(
            name, image_size=(28, 28), generator=torch.Generator(), masks=training_masks((28, 28)), engine=pp.Engine()
        )
        found.append(strategy(classifier.to(device), images.to(device), labels.to(device)).cpu())
    same = (found[0] == found[1]).flatten(2).all(dim=2)
    assert same.float().mean() > 0.95


def test_recorded_steps_learn_what_launched_ones_do(tmp_path):
    """With dropout, BatchNorm and a last batch of another size, also if the run is resumed at that batch."""
    pixels = np.random.default_rng(1).integers(0, 256, (42, 12, 12, 3)).astype(np.uint8)
    images = ArraySource("noise", "train", ("a", "b"), tuple(i % 2 for i in range(42)), pixels)
    data = TrainingData(images, range(42), torch.arange(2), Preprocessing((12, 12)))

    def trainer(compiled: bool) -> Trainer:
        torch.manual_seed(0)
        layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(800, 2)
        network = ImageClassifier(
            nn.Sequential(*layers), mean=(0.5,) * 3, std=(0.2,) * 3, input_size=(12, 12), num_classes=2
        ).to(DEVICE)
        plan = pp.Plan(strategy="cutout", epochs=3, batch_size=16, learning_rate=0.05, compile=compiled)
        return Trainer(network, data, plan, accelerator=Accelerator())

    ends = []
    for compiled in (False, True):
        undisturbed = trainer(compiled)
        losses = [report.loss for report in undisturbed.run()]
        ends.append((torch.tensor(losses), undisturbed.weights()))
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-3, atol=1e-4)
    stopped = trainer(True)
    for _ in zip(range(5), stopped.run(), strict=False):
        pass
    save_training(tmp_path / "last", stopped, stopped.classifier, {})
    resumed = trainer(True)
    assert load_training(tmp_path / "last", resumed) is not None
    for _ in resumed.run():
        pass
    torch.testing.assert_close(resumed.weights(), undisturbed.weights(), rtol=1e-5, atol=1e-6)
    assert resumed.model.masked._shape == (16, 3, 12, 12), "whole batches are recorded"


def test_batches_are_copied_while_steps_are_recorded():
    """Each batch is larger than the one before, so that its copy must allocate memory, and comes somewhat later."""

    def batches() -> Iterator[tuple[int, torch.Tensor]]:
        for number in range(40):
            time.sleep(number / 2000)
            yield number, torch.zeros(64, 3, 200 + number, 200, dtype=torch.uint8)

    images, keep = torch.rand(4, 3, 8, 8, device=DEVICE), torch.ones(4, 1, 8, 8, dtype=torch.bool, device=DEVICE)
    for number, copied in images_ahead(batches(), torch.device(DEVICE)):
        network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(288, 2)).to(DEVICE)
        RecordedPass(network, 4)(images, keep).sum().backward()
        assert copied.shape[2] == 200 + number


def test_what_cannot_be_recorded_says_how_to_go_on():
    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scores = nn.Linear(192, 2)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return self.scores(images.flatten(1)) * (1 if images.sum().item() > 0 else 2)

    images, keep = torch.rand(4, 3, 8, 8, device=DEVICE), torch.ones(4, 1, 8, 8, dtype=torch.bool, device=DEVICE)
    with pytest.raises(CheckError, match=r"cannot be recorded .* use compile=False"):
        RecordedPass(Asks().to(DEVICE), 4)(images, keep)


def test_memory_that_runs_out_halves_the_chunk_and_changes_no_verdict(trained):
    classifier, images, labels = small_case(trained, 400)
    plain = pp.defense("patchcleanser", classifier, THREAT, engine=measured(batch_size=512)).certify(images, labels)
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 100 * 2**20) / total)
    try:
        crowded = pp.defense("patchcleanser", classifier.to(DEVICE), THREAT, engine=measured(batch_size=16_384))
        found = crowded.certify(images.to(DEVICE), labels.to(DEVICE))
        assert crowded.evaluator.chunk < 16_384
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert (found.certified.cpu() == plain.certified).float().mean() > 0.99
