"""The open seams: a user's defence, strategy with memory and classifier in every run, killed and resumed.

Everything here is written as a user of the package would write it, with public names only.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import patchproof as pp
from patchproof.report import build_report

SIZE, CLASSES, IMAGES = 12, 3, 40


class Holes(nn.Module):
    """A classifier that gets the hidden pixels as an extra channel."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, 8, 3, padding=1)
        self.last = nn.Linear(8 * 9, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        return self.masked(images, torch.ones_like(images[:, :1], dtype=torch.bool))

    def masked(self, images: Tensor, keep: Tensor) -> Tensor:
        shown = torch.cat([images * keep, keep.to(images)], dim=1)
        return self.last(nn.functional.adaptive_avg_pool2d(self.first(shown).relu(), 3).flatten(1))


class Quadrants:
    """A defence that votes over the four quadrants, each seen alone: a patch inside a quadrant's reach changes at most
    the views it touches, so a lead of more than twice that many votes survives."""

    name, guarantee = "quadrants", "recovery"

    def __init__(self, classifier: nn.Module, threat: pp.PatchThreat) -> None:
        self.classifier, self.threat = classifier, threat
        half = SIZE // 2
        keep = torch.zeros(9, 1, SIZE, SIZE, dtype=torch.bool)
        for number in range(9):  # overlapping windows, so that there are nine votes
            top, left = (number // 3) * half // 2, (number % 3) * half // 2
            keep[number, :, top : top + half, left : left + half] = True
        self.keep = keep

    def votes(self, images: Tensor) -> Tensor:
        answers = [self.classifier.masked(images, k.expand(len(images), -1, -1, -1)).argmax(dim=1) for k in self.keep]
        return torch.stack([sum((a == c).long() for a in answers) for c in range(CLASSES)], dim=1)

    @torch.no_grad()
    def predict(self, images: Tensor) -> Tensor:
        return self.votes(images).argmax(dim=1)

    @torch.no_grad()
    def certify(self, images: Tensor, labels: Tensor) -> pp.Certificates:
        votes = self.votes(images)
        own = votes.gather(1, labels[:, None])[:, 0]
        rest = votes.scatter(1, labels[:, None], -1).amax(dim=1)
        lead = (own - rest).float()
        touched = 4  # windows that a patch of one pixel can touch
        passes = torch.full_like(labels, len(self.keep))
        return pp.Certificates(lead > 2 * touched, lead, passes, {"votes": votes})

    def describe(self) -> dict[str, object]:
        return {"name": self.name, "patch_sizes": [list(s) for s in self.threat.patch_sizes], "windows": len(self.keep)}


class WorstRemembered:
    """A strategy with memory: hides the half of the image with the larger loss when it was last tried.

    It tries one half per epoch.
    """

    def __init__(self) -> None:
        self.losses = torch.zeros(IMAGES, 2)
        self.seen: dict[str, int] = {}

    def __call__(self, classifier, images, labels, *, indices=None, epoch=0):  # type: ignore[no-untyped-def]
        half = torch.ones(2, 1, SIZE, SIZE, dtype=torch.bool)
        half[0, :, : SIZE // 2], half[1, :, SIZE // 2 :] = False, False
        tried = epoch % 2
        shown = torch.where(half[tried], images, 0.5)
        with torch.no_grad():
            found = nn.functional.cross_entropy(classifier(shown), labels, reduction="none")
        self.losses[indices, tried] = found
        for index in indices.tolist():
            self.seen[str(index)] = self.seen.get(str(index), 0) + 1
        return half[self.losses[indices].argmax(dim=1)][None]

    def state_dict(self) -> dict[str, object]:
        return {"losses": self.losses, "seen": self.seen}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.losses, self.seen = state["losses"].clone(), dict(state["seen"])  # type: ignore[union-attr,call-overload]


def network() -> Holes:
    torch.manual_seed(3)
    return Holes().eval()


def examples() -> list[tuple[Tensor, int]]:
    """Images whose brightness gives the class."""
    generator = torch.Generator().manual_seed(0)
    labels = [i % CLASSES for i in range(IMAGES)]
    return [((torch.rand(3, SIZE, SIZE, generator=generator) + label) / CLASSES, label) for label in labels]


def threat() -> pp.PatchThreat:
    return pp.PatchThreat.square(image_size=(SIZE, SIZE), pixels=1)


def plan() -> pp.Plan:
    return pp.Plan(strategy=WorstRemembered(), epochs=4, batch_size=8, learning_rate=0.1)


@cache
def trained() -> Holes:
    net = network()
    pp.train(net, examples(), plan())
    return net


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_in_the_middle(work: Callable[[], object]) -> None:
    """Do this in a forked process until it is killed; a fork need not import torch again."""
    number = os.fork()
    if number == 0:
        try:
            work()
        except BaseException:
            traceback.print_exc()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]) == -signal.SIGKILL


def train_until_killed(folder: str, threads: int) -> None:
    torch.set_num_threads(threads)
    pp.train(network(), examples(), plan(), folder=folder, on_step=lambda report: report.step < 13 or killed())


def test_defence_of_ones_own_is_certified_killed_resumed_attacked_and_reported(tmp_path: Path) -> None:
    defense = Quadrants(trained(), threat())
    whole = pp.certify(defense, examples(), folder=tmp_path / "whole")
    folder, stop = tmp_path / "killed", lambda record: record.index < 20 or killed()
    kill_in_the_middle(lambda: pp.certify(defense, examples(), folder=folder, on_record=stop))
    resumed = pp.certify(defense, examples(), folder=tmp_path / "killed", resume=True)
    assert (tmp_path / "killed/records.jsonl").read_bytes() == (tmp_path / "whole/records.jsonl").read_bytes()
    assert resumed.certified == whole.certified
    assert 0 < whole.certified.k <= whole.defended.k
    votes = defense.votes(torch.stack([image for image, _ in examples()]))
    assert [record.evidence["votes"] for record in whole.records] == votes.tolist()
    other = Quadrants(defense.classifier, threat())
    other.keep = other.keep[:8]
    with pytest.raises(pp.CheckError, match="windows was 9, now 8"):
        pp.certify(other, examples(), folder=tmp_path / "killed", resume=True)

    found = pp.attack(defense, examples(), pp.AttackPlan(steps=6, places=3, restarts=1), folder=tmp_path / "x", limit=6)
    assert found.broken == ()
    assert found.certified.k <= found.attacked.k
    assert found.undefended_attacked.n == 6
    text = build_report([tmp_path / "whole", tmp_path / "x"]).html()
    assert "quadrants" in text
    assert "double masking" not in text


def test_strategy_with_memory_is_killed_and_resumed_bit_for_bit(tmp_path: Path) -> None:
    whole_plan = plan()
    whole = pp.train(network(), examples(), whole_plan, folder=tmp_path / "whole", validation=examples()[:10])
    # No fork: a training forked from a process that has run other tests once ended with an error instead.
    call = f"import test_seams; test_seams.train_until_killed({str(tmp_path / 'killed')!r}, {torch.get_num_threads()})"
    ended = subprocess.run([sys.executable, "-c", call], cwd=Path(__file__).parent, capture_output=True, text=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    log = [json.loads(line) for line in (tmp_path / "killed/log.jsonl").read_text().splitlines()]
    assert max(entry["step"] for entry in log) == 13
    resumed_plan = plan()
    resumed = pp.train(network(), examples(), resumed_plan, folder=tmp_path / "killed", resume=True)
    for name, value in whole.classifier.state_dict().items():
        assert torch.equal(value, resumed.classifier.state_dict()[name]), name
    assert torch.equal(whole_plan.strategy.losses, resumed_plan.strategy.losses)
    assert whole_plan.strategy.seen == resumed_plan.strategy.seen == {str(i): 4 for i in range(IMAGES)}
    stored = load_file(tmp_path / "killed/checkpoint-last/training.safetensors")
    assert torch.equal(stored["strategy/losses"], whole_plan.strategy.losses)
    assert "WorstRemembered" in build_report([tmp_path / "whole"]).html()


def test_classifier_that_is_told_what_is_hidden_goes_through_double_masking() -> None:
    net, images = trained(), examples()
    masks = pp.covering_masks(threat(), per_axis=2)
    found = pp.certify(pp.PatchCleanser(net, masks, threat()), images)
    keep = masks.keep()
    for (image, label), record in zip(images, found.records, strict=True):
        pairs = [keep[a] & keep[b] for a in range(len(keep)) for b in range(a, len(keep))]
        answers = [int(net.masked(image[None], pair[None]).argmax()) for pair in pairs]
        assert record.certified == (set(answers) == {label})
    peeking = nn.Module()
    peeking.forward = lambda images: net(images)  # type: ignore[assignment]
    peeking.masked = lambda images, keep: net(images)  # type: ignore[assignment]  # looks at pixels it should not see
    blind = pp.two_mask_labels(net.__class__.forward.__get__(net), torch.stack([i for i, _ in images]), masks)
    assert torch.equal(pp.two_mask_labels(peeking.eval(), torch.stack([i for i, _ in images]), masks), blind)
