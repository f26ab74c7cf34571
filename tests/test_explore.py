"""The explorer's findings against slow references, what it refuses, and the command that opens it."""

from __future__ import annotations

import builtins
import importlib
import importlib.util
import io
import json
import re
import sys
import threading
import urllib.request
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import patchproof as pp
import reference
from patchproof.cli import run
from patchproof.data import open_dataset
from patchproof.defenses import BagCert
from patchproof.explore import Explorer, open_explorer
from patchproof.explore import _draw as draw
from patchproof.explore import _explorer as explorer_module
from patchproof.explore._explorer import DEFENDED, NOISE, PICTURE, UNDEFENDED, noise
from patchproof.explore._findings import Finding, Rounds, explain, meaning, study, verdict, watch
from patchproof.explore._page import ExplorerPage
from patchproof.masking import Evaluator, Measured
from patchproof.models import ImageClassifier, save_checkpoint, sealed
from patchproof.models._networks import BagNet
from patchproof.runs import Record
from small_model import fitted_checkpoint, fitted_classifier
from test_defenses_patchcleanser import random_case

NEEDS_GRADIO = pytest.mark.skipif(
    importlib.util.find_spec("gradio") is None,
    reason="NO GRADIO: pip install 'patchproof[explore]'",
)
command = importlib.import_module("patchproof.cli.pages")
name = ("shirt", "bag", "coat", "an alarm").__getitem__
TAU = Measured(tau=0.0, tau_fp32=0.25)


def assert_one_line(text: str, pattern: str) -> None:
    assert re.fullmatch(r"patchproof: [^\n]*\n", text), text
    assert re.search(pattern, text), text


@given(st.integers(0, 2**32))
@settings(max_examples=settings().max_examples * 2 // 5)
def test_findings_equal_the_reference(seed):
    """Every cell of the two-mask table, the certificate and the answer; and for one round of masks its row."""
    classifier, threat, masks, images, labels = random_case(seed)
    double = pp.PatchCleanser(classifier, masks, threat, engine=TAU)
    single, evaluator = pp.Alarm(classifier, masks, threat, engine=TAU), Evaluator(classifier, TAU, strict=False)
    images, labels = images[:2], labels[:2]  # of which the first is labelled wrong
    answers, alarms = double.predict(images).tolist(), single.predict(images).tolist()
    for image, label, answer, alarm in zip(images, labels.tolist(), answers, alarms, strict=True):
        logits = reference.two_mask_logits(classifier, image, masks)
        n, margins = len(masks), [[reference.margin_of(cell, label) for cell in row] for row in logits]
        told = [[reference.argmax(cell) for cell in row] for row in logits]
        right = [[told[a][b] == label and margins[a][b] >= 0.25 for b in range(n)] for a in range(n)]
        found = study(double, evaluator, image, label)
        assert (found.certified, found.margin) == reference.certify(logits, label, tau=0.25)
        assert (found.label, found.answer) == (label, answer)
        copies = found.copies
        assert (copies.labels.tolist(), copies.margins.tolist(), copies.right.tolist()) == (told, margins, right)
        assert copies.count(~copies.right) == sum(not right[a][b] for a in range(n) for b in range(a, n))
        said, wrong = verdict(found, name, double), answer != label
        assert ("Certified" in said) == found.certified
        assert ("may be able to change the answer" in said) == (not found.certified and not wrong)
        assert ("The answer is wrong even without a patch." in said) == wrong
        one = study(single, evaluator, image, label)
        assert one.copies.labels.tolist() == [[told[a][a] for a in range(n)]]
        assert one.copies.margins.tolist() == [[margins[a][a] for a in range(n)]]
        assert (one.certified, one.answer) == (all(right[a][a] for a in range(n)), alarm)
        own = study(double, evaluator, image)
        assert own.label == answer
        assert torch.equal(own.copies.margins, study(double, evaluator, image, answer).copies.margins)
        unmasked = reference.argmax(classifier(image[None])[0].tolist())
        assert study(single, evaluator, image).label == (alarm if alarm >= 0 else unmasked)


@given(st.integers(0, 2**32))
@settings(max_examples=settings().max_examples * 2 // 5)
def test_rounds_are_those_of_the_defence(seed):
    classifier, threat, masks, images, _ = random_case(seed)
    double, single = (kind(classifier, masks, threat, engine=TAU) for kind in (pp.PatchCleanser, pp.Alarm))
    evaluator, tables = double.evaluator, pp.two_mask_labels(classifier, images, masks).tolist()
    answers, alarms = double.predict(images).tolist(), single.predict(images).tolist()
    for image, answer, alarm, rows in zip(images, answers, alarms, tables, strict=True):
        rounds = watch(double, evaluator, image)
        assert rounds.first == tuple(row[i] for i, row in enumerate(rows))
        assert rounds.answer == answer == reference.predict(rounds.first, lambda mask, rows=rows: rows[mask])
        assert rounds.undefended == reference.argmax(classifier(image[None])[0].tolist())
        others = [copy for copy, label in enumerate(rounds.first) if label != rounds.majority]
        asked = list(rounds.second)
        assert asked == others[: len(asked)]
        assert all(list(labels) == rows[copy] for copy, labels in rounds.second.items())
        unanimous = [copy for copy in asked if set(rows[copy]) == {rounds.first[copy]}]
        assert unanimous == ([] if rounds.confirmed is None else [rounds.confirmed])
        assert len(asked) == len(others) or rounds.confirmed == asked[-1]
        assert f"the answer is {name(answer)}" in explain(rounds, name)
        once = watch(single, evaluator, image)
        assert (once.first, once.answer, once.second) == (rounds.first, alarm, None)


SENTENCES = [
    (Rounds(0, 0, (0, 0, 0), 0, {}), "All 3 copies say shirt, so there is no second round: the answer is shirt."),
    (
        Rounds(0, 1, (0, 1, 0), 0, {1: (1, 1, 1)}),
        "2 of 3 copies say shirt; copy 2 (bag) is confirmed by its second round: the answer is bag.",
    ),
    (
        Rounds(0, 0, (1, 0, 0, 2), 0, {0: (1, 0, 0, 0), 3: (2, 2, 2, 0)}),
        "2 of 4 copies say shirt; copies 1 (bag), 4 (coat) are each contradicted by their second round: the answer is "
        "shirt, the majority’s.",
    ),
    (Rounds(0, -1, (1, 0, 0), 0), "2 of 3 copies say shirt, 1 something else: the answer is an alarm."),
    (Rounds(None, 2), "The answer is coat."),
]


@pytest.mark.parametrize(("rounds", "sentence"), SENTENCES)
def test_the_answer_is_explained_in_a_sentence(rounds, sentence):
    assert explain(rounds, name) == sentence


@pytest.mark.parametrize(
    ("answer", "certified", "guarantee", "words"),
    [
        (0, True, "recovery", "the answer is shirt, as the certificate promises"),
        (0, False, "recovery", "though nothing was promised"),
        (1, False, "recovery", "the answer is not shirt: this image is not certified"),
        (1, True, "recovery", "must not happen"),
        (-1, True, "detection", "there is an alarm, as the certificate promises"),
        (1, True, "detection", "must not happen"),
    ],
)
def test_the_answer_is_held_against_the_certificate(answer, certified, guarantee, words):
    finding = Finding(0, 0, certified, 1.0)
    assert words in meaning(Rounds(1, answer), finding, name, guarantee)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return fitted_checkpoint(tmp_path_factory.mktemp("model") / "checkpoint-last")


ONE_DEFENCE = pytest.mark.parametrize(
    "certified", ["patchcleanser", pytest.param("alarm", marks=pytest.mark.slow)], indirect=True
)


@pytest.fixture(scope="module", params=["patchcleanser", "alarm"])
def certified(checkpoint, request) -> Path:
    folder = checkpoint.parent / request.param
    shared = ["--weights", str(checkpoint), "--limit", "16", "--device", "cpu", "--output", str(folder)]
    assert run(["certify", "--defense", request.param, *shared]) == 0
    return folder


@pytest.fixture(scope="module")
def explorer(certified) -> Explorer:
    return open_explorer(certified)


@ONE_DEFENCE
def test_the_explorer_and_predict_like_its_run_see_the_same_pixels(certified, checkpoint, tmp_path, capsys):
    """A photograph larger than the run's images: both prepare it as the run prepared those."""
    photo, pixels = tmp_path / "photo.png", np.random.default_rng(0).integers(0, 255, (6, 10, 3), dtype=np.uint8)
    Image.fromarray(pixels).resize((200, 120)).save(photo)
    capsys.readouterr()
    assert run(["predict", str(photo), "--weights", str(checkpoint), "--like", str(certified), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["margin"] == pytest.approx(open_explorer(certified).own(photo).finding.margin, abs=1e-4)


def test_every_image_of_the_run_has_the_findings_of_its_record(explorer, certified):
    records = [json.loads(line) for line in (certified / "records.jsonl").read_text().splitlines()]
    assert [record.index for record in explorer.records] == [record["index"] for record in records]
    assert {record["certified"] for record in records} == {True, False}
    assert ", 3×3 masks, " in explorer.title
    assert not explorer.evaluator.strict  # a hostile image does not stop the page
    assert not explorer.defense.evaluator.strict
    for record, written in zip(explorer.records, records, strict=True):
        shown = explorer.pick(record)
        assert shown.finding.certified == written["certified"]
        assert ("as far as the run looked" in shown.words) == (
            not written["certified"]
        )  # its margin may not be the least
        assert (shown.finding.answer == record.label) == written["defended"]
        assert (explorer.rounds(shown.pixels).answer == record.label) == written["defended"]
        if written["certified"]:
            assert shown.finding.margin == pytest.approx(written["margin"], abs=1e-4)
        masks = shown.finding.copies.masks(shown.cell)
        rects = explorer.masks.blocks
        fill = [round(255 * value) for value in explorer.defense.classifier.fill]
        expected = reference.hide(shown.pixels, [rects[mask] for mask in masks], fill)
        assert torch.equal(explorer.masked(shown.pixels, masks), expected)


@pytest.mark.parametrize("kind", [UNDEFENDED, pytest.param(DEFENDED, marks=pytest.mark.slow)])
def test_an_optimised_patch_is_one_of_the_threat_and_beats_noise(explorer, kind, monkeypatch):
    """It changes its own pixels alone, and no certified answer; the same seed makes the same patch."""
    monkeypatch.setattr(explorer_module, "ATTACK_SECONDS", 1e9)
    won = {NOISE: 0, kind: 0}
    for record in explorer.records[::4]:
        shown = explorer.pick(record).moved(9, 11)
        label, before = shown.finding.label, shown.pixels.clone()
        for patch in won:
            made = explorer.with_patch(shown, patch, seed=3, steps=15)
            rounds = explorer.rounds(made.patched)
            inside = torch.zeros(28, 28, dtype=torch.bool)
            inside[9:14, 11:16] = True
            assert torch.equal(made.patched[:, ~inside], before[:, ~inside])
            assert torch.equal(shown.pixels, before)
            assert not shown.finding.certified or rounds.answer in (label, -1)
            reached = [rounds.undefended] if kind == UNDEFENDED else rounds.first
            won[patch] += sum(answer != label for answer in reached)
    assert won[kind] > won[NOISE]
    assert torch.equal(made.one.patch, explorer.with_patch(shown, kind, seed=3, steps=15).one.patch)
    assert all(parameter.grad is None for parameter in explorer.defense.classifier.parameters())


def test_slow_machines_take_fewer_steps(explorer, monkeypatch):
    asked = []
    plan = explorer_module.AttackPlan
    monkeypatch.setattr(explorer_module, "AttackPlan", lambda **given: asked.append(given["steps"]) or plan(**given))
    monkeypatch.setattr(explorer_module, "ATTACK_SECONDS", 1e-9)
    explorer.with_patch(explorer.pick(explorer.records[0]), UNDEFENDED, steps=200)
    assert asked == [1, 1]


def test_the_patch_stays_where_it_is_put_and_inside_the_image(explorer, tmp_path):
    file = tmp_path / "own.png"
    file.write_bytes(png())
    shown = explorer.pick(explorer.records[0]).moved(100, -3)
    assert shown.one.rect[:2] == (23, 0)
    pasted = explorer.with_patch(shown, PICTURE, file=file)
    assert pasted.one.patch.shape == (3, 5, 5)
    Image.new("RGB", (40, 20), (200, 10, 30)).save(tmp_path / "red.png")
    red = explorer.with_patch(shown, PICTURE, file=tmp_path / "red.png").one.patch
    assert red.tolist() == [[[value] * 5] * 5 for value in (200, 10, 30)]
    assert explorer.pick(explorer.records[1], pasted).one.rect == pasted.one.rect == shown.one.rect
    with pytest.raises(ValueError, match="drop in a picture"):
        explorer.with_patch(shown, PICTURE)


def test_two_patches_are_placed_one_at_a_time_and_optimised_together(monkeypatch):
    monkeypatch.setattr(explorer_module, "ATTACK_SECONDS", 1e9)
    classifier = fitted_classifier()
    threat = pp.PatchThreat.square(image_size=(28, 28), pixels=5, patches=2)
    source = open_dataset("fashion-mini")
    records = (Record(0, source.path(0), int(source.labels[0])),)
    explorer = Explorer(
        pp.defense("patchcleanser", classifier, threat, per_axis=2),
        pp.Preprocessing((28, 28)),
        "test",
        {},
        source,
        records,
    )
    assert "two patches of 5×5 pixels anywhere on 28×28, 10 unions of 2×2 masks" in explorer.title
    shown = explorer.pick(records[0]).moved(20, 20)
    shown = replace(shown, chosen=1).moved(3, 4)
    assert [one.rect[:2] for one in shown.patches] == [(20, 20), (3, 4)]
    right = replace(shown.finding, answer=shown.finding.label)
    assert re.search(r"(No two|Two) 5×5 patches", verdict(right, explorer.name, explorer.defense))
    page = draw.patched_view(shown, explorer.size)
    assert page.count("pp-frame") == 2
    assert "a patch at row 20, column 20 and a patch at row 3, column 4" in page
    made = explorer.with_patch(shown, UNDEFENDED, steps=3)
    within = torch.zeros(28, 28, dtype=torch.bool)
    within[20:25, 20:25] = within[3:8, 4:9] = True
    assert torch.equal((made.patched != shown.pixels).any(dim=0) & ~within, torch.zeros_like(within))
    assert all(not torch.equal(a.patch, b.patch) for a, b in zip(made.patches, shown.patches, strict=True))
    last = len(explorer.masks) - 1
    assert draw.vote(explorer, (last,), "", "agrees").count("<i ") == 2, "both rectangles of the mask are drawn"
    monkeypatch.setattr(draw, "LARGEST_TABLE", 9)
    assert "too large for a page" in draw.heat_map(explorer, shown, shown.finding.copies)
    pytest.importorskip("gradio")
    changes = ExplorerPage(explorer).patch_chosen(None, shown, 0)
    assert 20 in changes.values()


def test_a_patch_against_local_evidence_climbs_the_scores_of_the_defence(tmp_path):
    climbed = []

    class Watched(BagCert):
        def surrogate(self, images):
            climbed.append(len(images))
            return super().surrogate(images)

    bagnet, grey = BagNet(3, blocks=[(4, 3, 1)]), (0.5,) * 3
    classifier = ImageClassifier(bagnet, mean=grey, std=grey, input_size=(6, 6), num_classes=3).eval()
    defense = Watched(classifier, pp.PatchThreat((6, 6), ((2, 2),)), engine=TAU)
    explorer = Explorer(defense, pp.Preprocessing((6, 6)), "test", {})
    Image.new("RGB", (6, 6)).save(tmp_path / "own.png")
    shown = explorer.own(tmp_path / "own.png")
    explorer.with_patch(shown, UNDEFENDED, steps=1)
    assert not climbed
    explorer.with_patch(shown, DEFENDED, steps=1)
    assert climbed


class Bare:
    """A defence without masks or a classifier."""

    name, guarantee, threat = "bare", "recovery", pp.PatchThreat((28, 28), ((5, 5), (3, 7)))

    def predict(self, images):
        return (images.mean(dim=(1, 2, 3)) > 0.5).long()

    def certify(self, images, labels):
        margin = (images.mean(dim=(1, 2, 3)) - 0.5).abs() - 25 / 784
        right = self.predict(images) == labels
        return pp.Certificates(right & (margin > 0), margin, torch.zeros_like(labels))

    def describe(self):
        return {"name": self.name}


class Seeing(Bare):
    """A defence without masks whose classifier can be attacked."""

    @staticmethod
    def classifier(images):
        light = images.mean(dim=(1, 2, 3))
        return torch.stack([0.5 - light, light - 0.5], dim=1)


class Tuned(Seeing):
    """A defence that takes the measured τ and has no `evaluator`."""

    def __init__(self, engine=None):
        self.engine = engine or pp.Engine()

    def with_engine(self, engine):
        return Tuned(engine)


@pytest.mark.parametrize("defense", [Bare(), Seeing(), Tuned()])
def test_any_defence_can_be_explored(defense, tmp_path):
    file = tmp_path / "own.png"
    Image.new("RGB", (40, 40), (140, 140, 140)).save(file)
    explorer = Explorer(defense, pp.Preprocessing((28, 28)), "test", {0: "dark", 1: "bright"})
    shown = explorer.own(file)
    assert (shown.finding.answer, shown.finding.certified, shown.finding.copies) == (1, True, None)
    assert "Certified as bright, margin +0.0171; the defence answers bright" in verdict(
        shown.finding, explorer.name, defense
    )
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (40, 40)).save(tmp_path / "turned.jpg", exif=exif)
    said = [explorer.own(place).words for place in (file, tmp_path / "turned.jpg")]
    assert ["EXIF orientation is not applied" in words for words in said] == [False, True]
    wide = explorer.with_patch(shown, NOISE, size=1)
    assert (wide.one.rect.height, wide.one.rect.width) == (3, 7)
    if isinstance(defense, Seeing):
        made = explorer.with_patch(shown, DEFENDED, size=1, steps=5)
        assert float(made.patched.float().mean()) < float(wide.patched.float().mean())
    else:
        with pytest.raises(ValueError, match="needs the gradients of a classifier"):
            explorer.with_patch(shown, DEFENDED)
    assert explorer.rounds(wide.patched).first == ()
    pytest.importorskip("gradio")
    page = ExplorerPage(explorer)
    changes = page.dropped(None, None, str(file))
    assert page.table not in changes
    assert "as the certificate promises" in changes[page.answer]


def test_the_heat_map_marks_every_cell_by_more_than_colour(checkpoint):
    explorer = open_explorer(checkpoint, dataset="fashion-mini")
    selections = map(explorer.pick, explorer.records)
    shown = next(s for s in selections if 0 < int(s.finding.copies.right.sum()) < 81)
    copies = replace(shown.finding.copies, right=shown.finding.copies.margins > 1)
    html = draw.heat_map(explorer, shown, copies)
    cells = re.findall(r'class="pp-cell pp-cell-(\w+)(?: pp-selected)?" data-pick="(\d) (\d)"', html)
    assert len(cells) == 81
    for kind, a, b in cells:
        margin = float(copies.margins[int(a), int(b)])
        assert kind == ("wrong" if margin < 0 else "right" if margin > 1 else "close")
    assert {kind for kind, _, _ in cells} == {"wrong", "right", "close"}
    assert html.count("pp-selected") == 1


@pytest.mark.parametrize(("scale", "number"), [(30.0, r"-?\d+\.\d"), (0.2, r"-?0\.\d\d")])
def test_numbers_in_the_heat_map_are_fine_enough_and_never_minus_zero(checkpoint, scale, number):
    explorer = open_explorer(checkpoint, dataset="fashion-mini")
    shown = explorer.pick(explorer.records[0])
    margins = scale * torch.linspace(-1, 1, 81).reshape(9, 9)
    margins[0] = -1e-4
    html = draw.heat_map(explorer, shown, replace(shown.finding.copies, margins=margins))
    written = re.findall(r"<i>(\S+)</i></span>", html)
    assert len(written) == 81
    assert all(re.fullmatch(number, one) for one in written)
    assert all(float(one) == 0 and "-" not in one for one in written[:9])
    assert len(set(written)) > 30


@NEEDS_GRADIO
@ONE_DEFENCE
def test_names_cannot_break_the_page(explorer):
    names = {i: f'<script>alert("{i}")</script>\x07${{x}}' for i in range(10)}
    evil = Explorer(explorer.defense, explorer.preprocessing, "x", names, explorer.source, explorer.records)
    page = ExplorerPage(evil)
    changes = page.of_kind(None, None, "all")
    shown = changes[page.shown]
    changes |= page.made(None, shown, DEFENDED, 0, 0, 3, None) | page.turned(None, shown, "all")
    html = "".join(str(value) for place, value in changes.items() if place is not page.shown)
    assert "<script" not in html
    assert "\x07" not in html
    assert "&lt;script&gt;" in html


@NEEDS_GRADIO
def test_images_can_be_sorted_by_what_was_found(explorer):
    kinds = {kind: explorer.of_kind(kind) for kind in ("certified", "not certified", "answered wrong")}
    assert sorted([*kinds["certified"], *kinds["not certified"]], key=lambda r: r.index) == list(explorer.records)
    assert all(record.certified for record in kinds["certified"])
    assert not any(record.defended for record in kinds["answered wrong"])
    page = ExplorerPage(explorer)
    changes = page.turned(None, None, "all", 99)
    assert re.findall(r'data-pick="(\d+)"', changes[page.cards]) == [str(r.index) for r in explorer.records[12:]]
    assert changes[page.number]["value"] == 2
    assert page.turned(None, None, "all", -4)[page.number]["value"] == 1


@NEEDS_GRADIO
@ONE_DEFENCE
def test_a_kind_without_images_leaves_the_image_and_says_so(explorer, tmp_path):
    page = ExplorerPage(replace(explorer, records=explorer.of_kind("certified")))
    shown = page.of_kind(None, None, "all")[page.shown]
    assert page.of_kind(None, shown, "not certified") == {}
    assert "No image is of this kind" in page.turned(None, shown, "not certified")[page.cards]
    (tmp_path / "own.png").write_bytes(png())
    own = page.dropped(None, shown, str(tmp_path / "own.png"))[page.shown]
    assert page.of_kind(None, own, "certified") == {}, "one's own image is of every kind"
    made = page.made(None, shown, NOISE, 0, 7, 1, None)[page.shown].moved(2, 3)
    last = SimpleNamespace(pick=str(page.explorer.records[-1].index))
    assert page.picked(last, made)[page.shown].patches == made.patches, "the patch stays where it was"


def png() -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (50, 40, 3), dtype=np.uint8)).save(file, "PNG")
    return file.getvalue()


BAD = {
    "empty.png": (b"", "the file is empty"),
    "drawing.svg": (b'<svg xmlns="http://www.w3.org/2000/svg"><script>1</script></svg>', "not an image"),
    "cut.png": (png()[:400], "truncated|broken|cannot|incomplete"),
}


def test_files_that_are_no_images_are_refused_in_a_sentence(tmp_path, monkeypatch):
    explorer = Explorer(Bare(), pp.Preprocessing((28, 28)), "test", {})
    shown = explorer._select(noise((28, 28), 0), 0, "", None)
    for file, (content, reason) in BAD.items():
        (tmp_path / file).write_bytes(content)
        for use in (explorer.own, lambda path: explorer.with_patch(shown, PICTURE, file=path)):
            with pytest.raises(ValueError, match=f"cannot use {re.escape(file)}: .*({reason})"):
                use(tmp_path / file)
    monkeypatch.setattr(explorer_module, "UPLOAD_LIMIT", 1024**2)
    with (tmp_path / "large.png").open("wb") as large:
        large.truncate(1024**2 + 1)
    with pytest.raises(ValueError, match=r"large\.png has 1\.0 MB, at most 1 MB are taken"):
        explorer.own(tmp_path / "large.png")


def test_a_checkpoint_and_a_training_run_can_be_explored_too(checkpoint, tmp_path):
    found = open_explorer(checkpoint, dataset="fashion-mini", per_axis=2, patch="4px")
    assert (len(found.records), len(found.masks), found.defense.threat.patch_sizes) == (1000, 4, ((4, 4),))
    assert {record.certified for record in found.records} == {None}
    folder = tmp_path / "train"
    save_checkpoint(fitted_classifier(), folder / "checkpoint-best")
    identity = {"plan": {"strategy": "greedy", "mask_patch": "3%"}}
    identity["validation_sha256"] = open_dataset("fashion-mini").listing_sha256()
    manifest = {"schema": 1, "command": "train", "config": {"dataset": "fashion-mini"}, "identity": identity}
    (folder / "manifest.json").write_text(json.dumps(sealed(manifest)))
    for place in (folder, folder / "checkpoint-best"):
        assert len(open_explorer(place).records) == 1000
    alone = open_explorer(checkpoint)
    assert alone.source is None
    assert "drop in your own" in alone.notices[0]
    for wrong in ({"weights": "x"}, {"split": "train"}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} (are for a run|needs a dataset)"):
            open_explorer(checkpoint, **wrong)


def copied(certified: Path, folder: Path, **changes) -> Path:
    """The run somewhere else, with parts of its manifest's identity or settings changed."""
    folder.mkdir(parents=True)
    manifest = json.loads((certified / "manifest.json").read_text())
    for key, value in changes.items():
        manifest["identity" if key in manifest["identity"] else "config"][key] = value
    (folder / "manifest.json").write_text(json.dumps(sealed(manifest)))
    (folder / "records.jsonl").write_bytes((certified / "records.jsonl").read_bytes())
    return folder


@NEEDS_GRADIO
def test_other_weights_than_the_run_s_are_refused(certified, checkpoint, tmp_path, capsys):
    other = copied(certified, tmp_path / "other", weights_sha256="0" * 64)
    assert run(["explore", str(other), "--device", "cpu"]) == 1
    assert_one_line(capsys.readouterr().err, r"the sha256 000000000000….*are not found.*give the right ones")
    moved = copied(certified, tmp_path / "moved", weights="gone/checkpoint-last")
    assert run(["explore", str(moved), "--device", "cpu"]) == 1
    assert_one_line(capsys.readouterr().err, r"gone/checkpoint-last")
    assert len(open_explorer(moved, weights=str(checkpoint)).records) == 16
    evil = copied(certified, tmp_path / "evil", model="evil.py:build")
    assert run(["explore", str(evil), "--device", "cpu"]) == 2
    assert_one_line(capsys.readouterr().err, r"certified the factory evil\.py:build; give it as the model")


@NEEDS_GRADIO
def test_images_that_are_gone_leave_a_note_and_other_masks_another(certified, tmp_path):
    lost = open_explorer(copied(certified, tmp_path / "lost", data_sha256="0" * 64))
    assert lost.source is None
    assert "give their new location as dataset" in lost.notices[-1]
    other = open_explorer(certified, patch="4px", per_axis=1)
    assert (len(other.masks), other.defense.threat.patch_sizes) == (1, ((4, 4),))
    assert "records are about the run's own patch of 5×5" in other.notices[-1]
    page = ExplorerPage(other)
    assert re.search(r"\bmask 1\b", page.of_kind(None, None, "all")[page.verdict])


@NEEDS_GRADIO
def test_what_is_no_run_is_refused(tmp_path, checkpoint, capsys):
    assert run(["explore", str(tmp_path / "nothing"), "--device", "cpu"]) == 2
    assert_one_line(capsys.readouterr().err, r"no such folder: .*nothing")
    assert run(["explore", str(tmp_path), "--device", "cpu"]) == 2
    assert_one_line(capsys.readouterr().err, r"not the folder of a run")
    assert run(["explore", str(checkpoint), "--port", "70000"]) == 2
    assert_one_line(capsys.readouterr().err, r"--port must be from 1 to 65535, not 70000")


def test_without_gradio_the_way_out_is_named(tmp_path, monkeypatch, capsys):
    real = builtins.__import__

    def without_gradio(name, *rest):
        if name == "gradio":
            raise ImportError
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_gradio)
    monkeypatch.delitem(sys.modules, "gradio", raising=False)
    assert run(["explore", str(tmp_path), "--device", "cpu"]) == 2
    assert_one_line(capsys.readouterr().err, r"pip install 'patchproof\[explore\]'")


connected: list[object] = []
watching = threading.Event()


def hear(event: str, arguments: tuple) -> None:
    if event == "socket.connect" and watching.is_set():
        connected.append(arguments[1])


@NEEDS_GRADIO
@ONE_DEFENCE
def test_the_command_serves_the_page_here_only_and_calls_nobody(certified, monkeypatch, capsys):
    seen: dict[str, str] = {}

    def visit() -> None:
        url = re.search(r"explore: (\S+)", capsys.readouterr().out).group(1)
        seen["url"] = url
        seen["page"] = urllib.request.urlopen(url, timeout=20).read().decode()

    import gradio

    monkeypatch.setattr(command, "wait_for_ctrl_c", visit)
    monkeypatch.setattr(gradio.networking, "url_ok", lambda url: False)  # as on a slow machine
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    sys.addaudithook(hear)
    watching.set()
    try:
        assert run(["explore", str(certified), "--device", "cpu"]) == 0
    finally:
        watching.clear()
    assert seen["url"].startswith("http://127.0.0.1:")
    assert "patchproof explore" in seen["page"]
    assert not re.search(r'(src|href)="https?://', seen["page"])
    assert {place[0] for place in connected if isinstance(place, tuple)} <= {"127.0.0.1"}

    def interrupted(*_: object, **__: object) -> None:
        raise RuntimeError("deque mutated during iteration")  # as gradio's close does now and then

    with monkeypatch.context() as patch:
        patch.setattr(gradio.Blocks, "close", interrupted)
        assert run(["explore", str(certified), "--device", "cpu"]) == 0
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(seen["url"], timeout=20)
    monkeypatch.setattr(command, "wait_for_ctrl_c", lambda: None)
    assert run(["explore", str(certified), "--device", "cpu", "--host", "0.0.0.0"]) == 0
    assert "warning: listening on 0.0.0.0: whoever can reach this machine can use the page" in capsys.readouterr().out
    assert run(["explore", str(certified), "--device", "cpu", "--host", "256.1.1.1"]) == 2
    assert_one_line(capsys.readouterr().err, r"cannot listen on 256\.1\.1\.1")

    def unreachable(*_: object, **__: object) -> None:
        raise gradio.blocks.httpx.ConnectError("[Errno 111] Connection refused")

    monkeypatch.setattr(gradio.blocks.httpx, "get", unreachable)
    assert run(["explore", str(certified), "--device", "cpu"]) == 1
    assert_one_line(capsys.readouterr().err, r"the page does not answer on 127\.0\.0\.1: \[Errno 111\]")
