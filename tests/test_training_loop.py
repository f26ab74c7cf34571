"""Training steps: their loss, the weights they change, and that resuming changes nothing."""

from __future__ import annotations

import copy
import dataclasses
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch import nn

import patchproof as pp
import reference
from patchproof.data import ArraySource
from patchproof.masking import MaskedForward
from patchproof.models import load_classifier, weights_sha256
from patchproof.training import Plan
from patchproof.training.augment import flip_and_crop
from patchproof.training.checkpoint import load_training, save_training
from patchproof.training.loop import Trainer, TrainingData, start_accelerator
from patchproof.training.losses import masked_loss
from patchproof.training.memory import state_of
from patchproof.types import CheckError, InputError, Preprocessing

slow = pytest.mark.slow


def source(count: int = 26) -> ArraySource:
    pixels = np.random.default_rng(1).integers(0, 256, (count, 28, 28, 3)).astype(np.uint8)
    return ArraySource("noise", "train", ("a", "b", "c"), tuple(i % 3 for i in range(count)), pixels)


def trainer(plan: Plan, *, seed: int = 0, count: int = 26) -> Trainer:
    images = source(count)
    classifier = load_classifier("small", "random", class_names=images.class_names, seed=seed)
    data = TrainingData(images, range(count), torch.arange(3), Preprocessing((28, 28)))
    return Trainer(classifier, data, plan, accelerator=Accelerator(cpu=True))


PLAN = Plan(strategy="greedy3x3", epochs=2, batch_size=8, learning_rate=0.05)
VARIANTS = {
    "memory": {
        "strategy": "memory",
        "memory_tries": "2,2,2,1",
        "augment": "light",
        "clean_copies": True,
        "accumulate": 2,
        "ema": 0.9,
    },
    "cutout": {"strategy": "cutout"},
    "adamw, average": {"strategy": "rand", "optimizer": "adamw", "ema": 0.9, "learning_rate": 0.001},
    "augmented, clean copies": {"strategy": "gutout3x3", "augment": "light", "clean_copies": True},
    "in parts, smoothed": {"strategy": "rand3x3", "accumulate": 2, "label_smoothing": 0.1, "weight_decay": 1e-3},
    "head only": {"strategy": "rand3x3", "head_only": True},
}


@pytest.mark.parametrize("name", [*list(VARIANTS)[::2], *(pytest.param(n, marks=slow) for n in list(VARIANTS)[1::2])])
@pytest.mark.parametrize("stop", [pytest.param(1, marks=slow), 3, pytest.param(4, marks=slow)])
def test_a_resumed_run_is_the_undisturbed_one_bit_for_bit(tmp_path, name, stop):
    plan = dataclasses.replace(PLAN, **VARIANTS[name])
    whole = trainer(plan)
    losses = [report.loss for report in whole.run()]

    first = trainer(plan)
    steps = first.run()
    begun = [next(steps).loss for _ in range(stop)]
    save_training(tmp_path / "last", first, first.classifier, {"note": stop})
    torch.rand(7)  # the caller's random state does not matter, and is left as it is
    state = torch.get_rng_state()
    second = trainer(plan, seed=9)
    assert load_training(tmp_path / "last", second) == {"note": stop}
    assert second.step == stop
    assert torch.equal(torch.get_rng_state(), state)
    assert begun + [report.loss for report in second.run()] == losses
    assert torch.equal(torch.get_rng_state(), state)
    for key, value in (whole.weights() | state_of(whole.strategy)).items():
        found = (second.weights() | state_of(second.strategy))[key]
        torch.testing.assert_close(found, value, rtol=0, atol=0, equal_nan=True)


class Salient:
    """Runs the classifier for itself, forward and back, and leaves everything as these passes do."""

    def __init__(self) -> None:
        self.modes: list[bool] = []

    def __call__(self, classifier, images, labels, *, indices=None, epoch=0):
        self.modes.append(any(module.training for module in classifier.modules()))
        nn.functional.cross_entropy(classifier(images), labels).backward()
        return torch.ones(1, len(images), 1, 28, 28, dtype=torch.bool)


@pytest.mark.parametrize("head_only", [False, True])
def test_passes_of_a_users_strategy_do_not_change_the_step_and_the_resumed_run_is_the_same(tmp_path, head_only):
    plans = [dataclasses.replace(PLAN, strategy=strategy, head_only=head_only) for strategy in ("none", Salient())]
    plain, whole, stopped = trainer(plans[0]), trainer(plans[1]), trainer(plans[1])
    nn.functional.cross_entropy(stopped.classifier(torch.rand(2, 3, 28, 28)), torch.tensor([0, 1])).backward()
    stopped.classifier.load_state_dict(whole.classifier.state_dict())  # BatchNorm's statistics
    losses = [report.loss for report in plain.run()]
    assert [report.loss for report in whole.run()] == losses
    steps = stopped.run()
    begun = [next(steps).loss for _ in range(3)]
    save_training(tmp_path / "last", stopped, stopped.classifier, {})
    resumed = trainer(plans[1])
    load_training(tmp_path / "last", resumed)
    assert begun + [report.loss for report in resumed.run()] == losses
    for run in (whole, resumed):
        for name, value in plain.weights().items():
            torch.testing.assert_close(run.weights()[name], value, rtol=0, atol=0)
    assert not any(plans[1].strategy.modes), "it is always called in eval mode"


def test_every_step_draws_numbers_of_its_own_from_the_seed():
    drawn: list[float] = []

    def strategy(classifier, images, labels, *, indices=None, epoch=0):
        drawn.append(float(torch.rand(())))
        return torch.ones(1, len(images), 1, 28, 28, dtype=torch.bool)

    for seed in (0, 0, 1):
        list(trainer(dataclasses.replace(PLAN, strategy=strategy, seed=seed)).run())
    assert drawn[:8] == drawn[8:16]
    assert len(set(drawn)) == 16


def test_the_shipped_weights_are_the_running_average_mixed_with_the_first_ones():
    run = trainer(dataclasses.replace(PLAN, ema=0.3, start_share=0.25))
    start = {name: value.clone() for name, value in run.classifier.state_dict().items()}
    average = dict(start)
    for step, _ in enumerate(run.run()):
        decay = min(0.3, (1 + step) / (10 + step))  # 0.1, 0.18, 0.25, 0.3, 0.3, …
        for name, value in run.classifier.state_dict().items():
            average[name] = average[name].lerp(value, 1 - decay) if value.is_floating_point() else value.clone()
    for name, value in average.items():
        expected = 0.75 * value + 0.25 * start[name] if value.is_floating_point() else value
        torch.testing.assert_close(run.weights()[name], expected)


def test_steps_cover_every_image_once_per_epoch_in_a_new_order():
    run = trainer(PLAN)
    assert run.steps_per_epoch == 4
    epochs = [[i for batch in run._batches(epoch, skip=0) for i in batch.indices] for epoch in (0, 1)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(26))
    assert epochs[0] != epochs[1]
    assert trainer(PLAN, count=25).steps_per_epoch == 3, "a last batch of one image is left out"


class OwnMasking(nn.Module):
    """Says for itself what hidden pixels mean."""

    fill = (0.25, 0.5, 0.75)

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3 * 28 * 28, 3)

    def masked(self, images, keep):
        reference.require_filled(self, images, keep)
        return self.linear(images.flatten(1)) + (~keep).float().mean(dim=(1, 2, 3))[:, None] * torch.arange(3)


@pytest.mark.parametrize("make", [lambda: load_classifier("small", "random", num_classes=3), OwnMasking])
def test_the_loss_is_the_mean_cross_entropy_over_the_masked_copies(make, generator):
    classifier, labels = make().eval(), torch.tensor([0, 1, 2, 0])
    images = torch.rand(4, 3, 28, 28, generator=generator)
    rects = [[pp.Rect(copy_, row, 9, 9 + row) for row in range(4)] for copy_ in range(2)]
    keep = torch.stack(
        [torch.stack([reference.hide(torch.ones(1, 28, 28), [rect], [0.0]) > 0 for rect in row]) for row in rects]
    )
    expected = [
        reference.cross_entropy(reference.logits_under(classifier, images[row], [rect]), int(labels[row]))
        for copy_ in rects
        for row, rect in enumerate(copy_)
    ]
    found, each = masked_loss(MaskedForward(classifier), images, labels, keep)
    assert found.item() == pytest.approx(sum(expected) / 8, rel=1e-5)
    assert each.flatten().tolist() == pytest.approx(expected, rel=1e-5)


def test_a_teacher_answers_for_the_same_masked_copies(generator):
    """Its outputs in the order of the classifier's; a share of 1 leaves the labels out."""
    classifier = load_classifier("small", "random", class_names=("a", "b", "c"), seed=0)
    other = load_classifier("small", "random", class_names=("c", "x", "a", "b"), seed=1)
    images, labels = torch.rand(4, 3, 28, 28, generator=generator), torch.tensor([0, 1, 2, 0])
    keep = torch.rand(2, 4, 1, 28, 28, generator=generator) > 0.3
    data = TrainingData(source(), range(26), torch.arange(3), Preprocessing((28, 28)))
    plan = dataclasses.replace(PLAN, strategy="none", teacher=pp.Ensemble([other, other]))
    run = Trainer(classifier, data, plan, accelerator=Accelerator(cpu=True))
    shown = torch.where(keep, images, classifier.mean[:, None, None]).flatten(0, 1)
    wanted = other(shown)[:, [2, 3, 0]].log_softmax(dim=1)
    own = classifier.eval()(shown).log_softmax(dim=1)
    divergence = (wanted.exp() * (wanted - own)).sum(dim=1).mean().item()
    for weight in (0.25, 1.0):
        options = {"teacher": run.model.teacher, "teacher_weight": weight}
        found, _ = masked_loss(MaskedForward(classifier), images, labels, keep, **options)
        labelled = nn.functional.cross_entropy(own, labels.repeat(2)).item()
        assert found.item() == pytest.approx((1 - weight) * labelled + weight * divergence, rel=1e-4)
    next(run.run())
    assert plan.describe()["teacher"] == weights_sha256(plan.teacher)
    function = dataclasses.replace(plan, teacher=pp.Ensemble([lambda x: x.mean((2, 3))]))
    assert function.describe()["teacher"] == "Ensemble", "not the same as none"
    trainer(function)  # says nothing of its classes
    for wrong, words in (
        (load_classifier("small", "random", class_names=("a", "b", "y")), "lacks 1 of the network's 3 classes, e.g. c"),
        (load_classifier("small", "random", num_classes=4), "the teacher has 4 classes, the network 3"),
        *(
            (nn.Sequential(nn.Flatten(), nn.Linear(3 * 28 * 28, n)), f"the teacher has {n} classes, the network 3")
            for n in (2, 5)
        ),
        (load_classifier("small", "random", num_classes=3, input_size=(32, 32)), r"takes images of \(32, 32\)"),
    ):
        with pytest.raises(InputError, match=words):
            trainer(dataclasses.replace(plan, teacher=wrong))


def test_parts_of_a_batch_add_up_to_the_whole():
    """Without BatchNorm's batch statistics (head only, the rest frozen) the update is the same."""
    results = []
    for parts in (1, 4):
        run = trainer(dataclasses.replace(PLAN, strategy="none", head_only=True, accumulate=parts))
        next(run.run())
        results.append(run.classifier.module.head.weight.detach().clone())
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-7)


def test_a_short_last_batch_is_cut_into_fewer_parts():
    run = trainer(dataclasses.replace(PLAN, strategy="none", batch_size=24, accumulate=12, epochs=1), count=28)
    assert all(np.isfinite(report.loss) for report in run.run())
    assert run.step == 2


def test_head_only_changes_the_last_layer_and_nothing_else():
    run = trainer(dataclasses.replace(PLAN, strategy="cutout", head_only=True))
    before = copy.deepcopy(run.classifier.state_dict())
    list(run.run())
    changed = {k for k, v in run.classifier.state_dict().items() if not torch.equal(v, before[k])}
    assert changed == {"module.head.weight", "module.head.bias"}


def test_a_training_hands_the_network_back_thawed_and_in_eval_mode_however_it_ends():
    network = load_classifier("small", "random", num_classes=3)
    first, *_, last = network.parameters()
    frozen = [first.requires_grad_(False), last.requires_grad_(False)]
    plan = Plan(strategy="none", epochs=1, batch_size=8, head_only=True)

    def interrupt(_report):
        raise KeyboardInterrupt

    teacher = load_classifier("small", "random", num_classes=4)
    for change, stop, error in (
        ({"teacher": teacher}, None, InputError),
        ({}, interrupt, KeyboardInterrupt),
        ({}, None, None),
    ):
        with nullcontext() if error is None else pytest.raises(error):
            pp.train(network, source(), dataclasses.replace(plan, **change), on_step=stop)
        assert [p for p in network.parameters() if not p.requires_grad] == frozen
        assert not network.training


def test_a_nan_loss_stops_the_run_and_names_the_step(tmp_path):
    run = trainer(dataclasses.replace(PLAN, strategy="none", learning_rate=1e30))
    save_training(tmp_path / "last", run, run.classifier, {})
    with pytest.raises(CheckError, match=r"the loss became (nan|inf) at step \d; a checkpoint saved before, if any"):
        list(run.run())
    assert load_training(tmp_path / "last", trainer(PLAN)) is not None


def test_batches_of_one_image_are_refused_only_where_batchnorm_would_fail():
    for change in ({"batch_size": 1}, {"batch_size": 8, "accumulate": 8}):
        with pytest.raises(InputError, match="BatchNorm cannot learn from batches of one image"):
            trainer(dataclasses.replace(PLAN, **change))
    run = trainer(dataclasses.replace(PLAN, strategy="rand3x3", batch_size=1, head_only=True, epochs=1), count=3)
    assert [report.images for report in run.run()] == [1, 1, 1]
    with pytest.raises(InputError, match="1 training images are too few for one batch; give at least 2"):
        trainer(PLAN, count=1)


@pytest.mark.parametrize("damage", ["cut", "flip", "json", "missing"])
def test_a_damaged_checkpoint_is_named(tmp_path, damage):
    run = trainer(PLAN)
    save_training(tmp_path / "last", run, run.classifier, {})
    tensors, state = tmp_path / "last" / "training.safetensors", tmp_path / "last" / "training.json"
    content = tensors.read_bytes()
    if damage == "cut":
        tensors.write_bytes(content[: len(content) // 2])
    elif damage == "flip":
        tensors.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
    elif damage == "json":
        state.write_text("{")
    else:
        tensors.unlink()
    with pytest.raises(CheckError, match=r"the checkpoint .*last is damaged"):
        load_training(tmp_path / "last", run)


def test_an_error_of_a_users_strategy_as_it_loads_is_not_a_damaged_checkpoint(tmp_path):
    class Forgetful(Salient):
        def state_dict(self):
            return {"calls": len(self.modes)}

        def load_state_dict(self, state):
            raise KeyError("misspelt")

    run = trainer(dataclasses.replace(PLAN, strategy=Forgetful()))
    save_training(tmp_path / "last", run, run.classifier, {})
    with pytest.raises(KeyError, match="misspelt"):
        load_training(tmp_path / "last", run)


def test_a_save_that_fails_keeps_the_old_checkpoint(tmp_path, monkeypatch):
    run = trainer(PLAN)
    assert load_training(tmp_path / "last", run) is None, "no checkpoint yet is a fresh start"
    save_training(tmp_path / "last", run, run.classifier, {"number": 1})
    monkeypatch.setattr(
        "patchproof.training.checkpoint.write_state", lambda *_: (_ for _ in ()).throw(OSError(28, "No space"))
    )
    with pytest.raises(OSError, match="No space"):
        save_training(tmp_path / "last", run, run.classifier, {"number": 2})
    monkeypatch.undo()
    assert load_training(tmp_path / "last", run) == {"number": 1}


def test_the_papers_schedule_divides_the_rate_by_ten_after_half_of_the_epochs():
    plan = Plan(epochs=10, learning_rate=0.01)
    assert [plan.rate(e) for e in (0, 4.99, 5, 9.9)] == pytest.approx([0.01, 0.01, 0.001, 0.001])
    cosine = Plan(epochs=10, learning_rate=1.0, schedule="cosine", warmup_epochs=1)
    assert [cosine.rate(e) for e in (0, 0.5, 5, 10)] == pytest.approx([0, 0.497, 0.5, 0], abs=1e-3)
    assert Plan(learning_rate=0.3, schedule="constant").rate(9) == 0.3


def test_light_augmentation_mirrors_and_crops_by_the_generator_alone():
    images = torch.rand(64, 3, 20, 20)
    found = [flip_and_crop(images, torch.Generator().manual_seed(s))[0] for s in (1, 1, 2)]
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    ramp = torch.linspace(0, 1, 20).expand(64, 1, 20, 20)
    turned, mirrored = flip_and_crop(ramp, torch.Generator().manual_seed(3))
    slope = turned.diff(dim=3).mean(dim=(1, 2, 3)) * 19
    assert torch.equal(slope < 0, mirrored)
    assert ((slope.abs() > 0.68) & (slope.abs() < 1.02)).all()
    assert 16 < int((slope < 0).sum()) < 48


def test_one_process_can_train_in_one_precision_and_on_one_device_after_another(monkeypatch):
    found = [
        start_accelerator(Plan(precision=p), torch.device("cpu")).mixed_precision for p in ("bf16", "fp32", "bf16")
    ]
    assert found == ["bf16", "no", "bf16"]
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "meta")
    assert start_accelerator(Plan(), torch.device("cpu")).device.type == "meta"
    monkeypatch.delenv("ACCELERATE_TORCH_DEVICE")
    assert start_accelerator(Plan(), torch.device("cpu")).device.type == "cpu"
