"""The explorer's findings against slow references, what it refuses, and the command that opens it."""

from __future__ import annotations

import builtins
import importlib
import importlib.util
import io
import json
import pickle
import re
import sys
import threading
import urllib.request
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import patchproof as pp
import reference
from patchproof.cli import run
from patchproof.config import ExploreConfig
from patchproof.data import open_dataset, preprocess
from patchproof.explore import Explorer, Rounds, SecondRound, explain, noise, optimise, pair_table, paste, place, watch
from patchproof.explore import _draw as draw
from patchproof.explore import _explorer as explorer_module
from patchproof.explore._desk import DEFENDED, NOISE, PICTURE, Desk
from patchproof.explore._words import meaning, verdict
from patchproof.masking import as_images, label_margin, occlude
from patchproof.models import save_checkpoint
from small_model import fitted_checkpoint, fitted_classifier
from test_cli import assert_one_line
from test_patchcleanser import random_case

NEEDS_GRADIO = pytest.mark.skipif(
    importlib.util.find_spec("gradio") is None,
    reason="NO GRADIO: pip install 'patchproof[explore]'",
)
command = importlib.import_module("patchproof.cli.explore")  # the package's `explore` is the function
CLASSES = ("shirt", "bag", "coat")


@given(st.integers(0, 2**32))
@settings(max_examples=20)
def test_the_pair_table_equals_the_reference_and_the_library(seed):
    classifier, threat, masks, images, labels = random_case(seed)
    defense = pp.PatchCleanser(classifier, masks, threat, engine=pp.Engine(tau_fp32=0.25))
    whole = pp.two_mask_labels(classifier, images, masks)
    for image, label, expected in zip(images, labels.tolist(), whole, strict=True):
        found = pair_table(defense, image, label)
        logits = reference.two_mask_logits(classifier, image, masks)
        assert torch.equal(found.labels, expected)
        margins = [[reference.margin_of(cell, label) for cell in row] for row in logits]
        assert found.margins.tolist() == margins
        certified, least = reference.certify(logits, label, tau=0.25)
        assert found.certified == certified
        assert float(found.margins[found.weakest]) == least
        n = len(masks)
        wrong = {
            (min(a, b), max(a, b))
            for a in range(n)
            for b in range(n)
            if reference.argmax(logits[a][b]) != label or margins[a][b] < 0.25
        }
        assert found.failing == len(wrong)
        assert found.pairs == len({(min(a, b), max(a, b)) for a in range(n) for b in range(n)})


@given(st.integers(0, 2**32))
@settings(max_examples=20)
def test_rounds_are_those_of_double_masking(seed):
    classifier, threat, masks, images, _ = random_case(seed)
    defense = pp.PatchCleanser(classifier, masks, threat)
    answers = defense.predict(images).tolist()
    for image, answer, table in zip(images, answers, pp.two_mask_labels(classifier, images, masks), strict=True):
        rounds = watch(defense, image)
        rows = table.tolist()
        assert rounds.first == tuple(row[i] for i, row in enumerate(rows))
        assert rounds.answer == answer == reference.predict(rounds.first, lambda mask, rows=rows: rows[mask])
        assert rounds.undefended == reference.argmax(reference.logits_of(classifier, image))
        asked = [r.copy for r in rounds.second]
        assert asked == list(rounds.disagreeing)[: len(asked)]
        assert all(list(r.labels) == rows[r.copy] and r.label == rounds.first[r.copy] for r in rounds.second)
        assert [r.confirmed for r in rounds.second[:-1]] == [False] * max(0, len(asked) - 1)
        assert len(asked) == len(rounds.disagreeing) or rounds.second[-1].confirmed
        assert f"the answer is {CLASSES[answer]}" in explain(rounds, CLASSES)


def test_without_a_label_the_table_is_about_the_defended_answer():
    classifier, threat, masks, images, _ = random_case(11)
    defense = pp.PatchCleanser(classifier, masks, threat)
    for image, answer in zip(images, defense.predict(images).tolist(), strict=True):
        alone, told = pair_table(defense, image), pair_table(defense, image, answer)
        assert alone.label == answer
        assert torch.equal(alone.margins, told.margins)


def second(copy: int, label: int, *labels: int) -> SecondRound:
    return SecondRound(copy, label, labels)


SENTENCES = [
    (
        Rounds(0, (0, 0, 0), 0, (), 0),
        "All 3 copies say shirt, so there is no second round: the answer is shirt.",
    ),
    (
        Rounds(0, (0, 1, 0), 0, (second(1, 1, 1, 1, 1),), 1),
        "2 of 3 copies say shirt; copy 2 says bag, and all its second-round copies agree: the answer is bag.",
    ),
    (
        Rounds(0, (0, 1, 0), 0, (second(1, 1, 1, 1, 0),), 0),
        "2 of 3 copies say shirt; copy 2 says bag, but 1 of its 3 second-round copies does not, so it is not believed: "
        "the answer is shirt, the majority's.",
    ),
    (
        Rounds(0, (1, 0, 0, 2), 0, (second(0, 1, 1, 0, 0, 0), second(3, 2, 2, 2, 2, 2)), 2),
        "2 of 4 copies say shirt; copy 4 says coat, and all its second-round copies agree: the answer is coat. Copy 1 "
        "says bag, but 3 of its 4 second-round copies do not, so it is not believed.",
    ),
    (
        Rounds(0, (1, 0, 0, 2), 0, (second(0, 1, 1, 0, 0, 0), second(3, 2, 2, 2, 2, 0)), 0),
        "2 of 4 copies say shirt; copies 1 (bag), 4 (coat) say something else, but each is contradicted in its second "
        "round: the answer is shirt, the majority's.",
    ),
]


@pytest.mark.parametrize(("rounds", "sentence"), SENTENCES)
def test_the_answer_is_explained_in_a_sentence_or_two(rounds, sentence):
    assert explain(rounds, CLASSES) == sentence


def test_a_broken_promise_would_be_said_loudly():
    _, threat, masks, images, _ = random_case(3)
    constant = pp.PatchCleanser(lambda x: torch.tensor([[1.0, 0.0, 0.0]]).expand(len(x), -1), masks, threat)
    table = pair_table(constant, images[0])
    assert table.certified
    assert "as the certificate promises" in meaning(Rounds(0, (0,), 0, (), 0), table, CLASSES)
    assert "must not happen" in meaning(Rounds(1, (1,), 1, (), 1), table, CLASSES)
    assert "No" in verdict(table, CLASSES, threat)


@given(st.integers(0, 2**32), st.integers(1, 6), st.integers(1, 6))
@settings(max_examples=20)
def test_a_placed_patch_changes_its_own_pixels_and_no_others(seed, height, width):
    generator = torch.Generator().manual_seed(seed)
    pixels = noise((8, 7), generator)
    patch = noise((height, width), generator)
    top = int(torch.randint(8 - height + 1, (), generator=generator))
    left = int(torch.randint(7 - width + 1, (), generator=generator))
    before = pixels.clone()
    patched = place(pixels, patch, top=top, left=left)
    for channel in range(3):
        for row in range(8):
            for column in range(7):
                inside = top <= row < top + height and left <= column < left + width
                expected = patch[channel, row - top, column - left] if inside else before[channel, row, column]
                assert patched[channel, row, column] == expected
    assert torch.equal(pixels, before)


@pytest.mark.parametrize(("top", "left"), [(-1, 0), (0, -1), (4, 0), (0, 5)])
def test_a_patch_that_leaves_the_image_is_refused(top, left):
    with pytest.raises(ValueError, match=r"a 5×3 patch at row .* leaves the 8×7 image; choose a row of 0 to 3"):
        place(torch.zeros(3, 8, 7, dtype=torch.uint8), torch.zeros(3, 5, 3, dtype=torch.uint8), top=top, left=left)


def test_a_pasted_picture_keeps_its_colours():
    picture = Image.new("RGB", (40, 20), (200, 10, 30))
    assert paste(picture, (3, 4)).tolist() == [[[value] * 4] * 3 for value in (200, 10, 30)]


@pytest.fixture(scope="module")
def fitted():
    classifier = fitted_classifier()
    threat = pp.PatchThreat.square(image_size=(28, 28), pixels=5)
    return pp.PatchCleanser(classifier, pp.covering_masks(threat, per_axis=3), threat)


def margins_with(defense, pixels, rect, patch, label, *, defended):
    """Mean margin over the copies that a patch is to win: slow, one by one."""
    image = as_images(place(pixels, patch, top=rect.top, left=rect.left)[None], "cpu")
    inside = torch.zeros(28, 28, dtype=torch.bool)
    inside[rect.top : rect.bottom, rect.left : rect.right] = True
    shown = [k for k in defense.masks.keep() if bool((k[0] & inside).any())]
    keeps = shown if defended else [torch.ones(1, 28, 28, dtype=torch.bool)]
    fill = torch.tensor(defense.classifier.fill)[:, None, None]
    with torch.no_grad():
        found = [label_margin(defense.classifier(occlude(image, k, fill)), torch.tensor([label])) for k in keeps]
    return float(torch.cat(found).mean())


@pytest.mark.parametrize("defended", [False, True])
def test_an_optimised_patch_lowers_the_margin_it_is_made_against(fitted, defended):
    pixels = noise((28, 28), torch.Generator().manual_seed(5)) // 2
    label = int(fitted.predict(as_images(pixels[None], "cpu"))[0])
    rect = pp.Rect(9, 11, 5, 5)

    def made(steps):
        generator = torch.Generator().manual_seed(1)
        return optimise(fitted, pixels, rect, label, defended=defended, steps=steps, generator=generator)

    start, end = (margins_with(fitted, pixels, rect, made(s), label, defended=defended) for s in (0, 30))
    assert end < start - 0.1
    assert torch.equal(made(5), made(5))
    assert all(parameter.grad is None for parameter in fitted.classifier.parameters())


@pytest.mark.slow
def test_no_optimised_patch_changes_a_certified_answer(fitted):
    """The theorem, seen from the explorer: wherever the optimiser wins, the table had said it might."""
    source = open_dataset("fashion-mini")
    explorer = Explorer(fitted, pp.Preprocessing((28, 28), interpolation="bilinear"), source.class_names, "test")
    won = certified = 0
    for index in range(0, 1000, 90):
        pixels = preprocess(source.load(index), explorer.preprocessing)
        table = explorer.table(pixels)
        rect = pp.Rect(12, 12, 5, 5)
        patch = explorer.optimised(pixels, rect, table.label, defended=True, steps=15, seed=index)
        rounds = explorer.rounds(place(pixels, patch, top=12, left=12))
        certified += table.certified
        won += rounds.answer != table.label
        assert rounds.answer == table.label or not table.certified
    assert won > 0
    assert certified > 0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return fitted_checkpoint(tmp_path_factory.mktemp("model") / "checkpoint-last")


@pytest.fixture(scope="module")
def certified(checkpoint) -> Path:
    folder = checkpoint.parent / "certify"
    arguments = ["certify", "--weights", str(checkpoint), "--limit", "30", "--device", "cpu", "--output", str(folder)]
    assert run(arguments) == 0
    return folder


@pytest.fixture(scope="module")
def explorer(certified) -> Explorer:
    return command.open_explorer(certified, ExploreConfig(device="cpu"))


def test_every_image_of_the_run_has_the_table_that_its_record_tells_of(explorer, certified):
    records = [json.loads(line) for line in (certified / "records.jsonl").read_text().splitlines()]
    assert [c.index for c in explorer.images.choices] == [r["index"] for r in records]
    assert {r["certified"] for r in records} == {True, False}
    for choice, record in zip(explorer.images.choices, records, strict=True):
        pixels = explorer.pixels(choice)
        table = explorer.table(pixels, choice.label)
        assert table.certified == record["certified"]
        assert (explorer.rounds(pixels).answer == choice.label) == record["defended"]
        if record["certified"]:
            assert float(table.margins.min()) == pytest.approx(record["margin"], abs=1e-4)


def test_images_can_be_sorted_by_what_was_found(explorer):
    images, desk = explorer.images, Desk(explorer)
    certified, failing = images.of_kind("certified"), images.of_kind("not certified")
    assert sorted([*certified, *failing], key=lambda c: c.index) == list(images.choices)
    assert all(c.record.certified for c in certified)
    assert all(not c.record.defended for c in images.of_kind("answered wrong"))
    html, number, pages = desk.page_of("all", 99, None)
    assert (number, pages) == (3, 3)
    assert re.findall(r'data-index="(\d+)"', html) == [str(c.index) for c in images.choices[24:]]
    assert desk.page_of("all", -4, None)[1] == 1


def test_a_masked_copy_is_the_reference_s(explorer):
    pixels = explorer.pixels(explorer.images.choices[0])
    rects = explorer.defense.masks.rects
    expected = reference.hide(pixels, (rects[1], rects[5]), explorer.fill)
    assert torch.equal(explorer.masked(pixels, 1, 5), expected)


def test_the_heat_map_marks_every_cell_by_more_than_colour(explorer):
    failing = explorer.images.of_kind("not certified")
    table = explorer.table(explorer.pixels(failing[0]), failing[0].label)
    html = draw.heat_map(table, explorer.names, (2, 3))
    cells = re.findall(r'data-a="(\d)" data-b="(\d)" data-kind="(\w+)"(.*?)</g>', html)
    assert len(cells) == 81
    for a, b, kind, inside in cells:
        wrong = int(table.labels[int(a), int(b)]) != table.label
        assert (kind == "wrong") == wrong == ("pp-hatch" in inside)
    assert any(kind == "wrong" for _, _, kind, _ in cells)
    assert "first mask" in html
    assert "second mask" in html


@given(st.floats(allow_nan=True, allow_infinity=True, width=32), st.floats(0, 100, width=32))
def test_colours_tell_the_side_of_zero(margin, scale):
    red, _, blue = draw.colour(margin, scale)
    assert all(0 <= value <= 255 for value in draw.colour(margin, scale))
    if margin >= scale > 0:
        assert (red, blue) == (0, 178)
    if margin <= -scale < 0 or margin != margin:
        assert (red, blue) == (213, 0)


def test_names_cannot_break_the_page(explorer):
    names = tuple(f'<script>alert("{i}")</script>\x07${{x}}' for i in range(10))
    evil = Explorer(explorer.defense, explorer.preprocessing, names, "x", explorer.images)
    choice = evil.images.choices[0]
    pixels = evil.pixels(choice)
    table, rounds = evil.table(pixels, choice.label), evil.rounds(pixels)
    html = draw.heat_map(table, names) + draw.rounds_view(evil, pixels, rounds) + draw.cards(evil, [choice], None)
    html += draw.masked_copy(evil, pixels, table, 0, 1) + draw.message(explain(rounds, names))
    assert "<script" not in html
    assert "\x07" not in html
    assert "&lt;script&gt;" in html


def png(size: tuple[int, int] = (50, 40)) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (*size, 3), dtype=np.uint8)).save(file, "PNG")
    return file.getvalue()


def bomb() -> bytes:
    """A PNG header of 100,000 × 100,000 pixels."""
    header = (100_000).to_bytes(4, "big") * 2 + bytes([8, 2, 0, 0, 0])
    chunk = b"IHDR" + header
    length = len(header).to_bytes(4, "big")
    return b"\x89PNG\r\n\x1a\n" + length + chunk + zlib.crc32(chunk).to_bytes(4, "big") + png()[33:]


BAD = {
    "empty.png": (b"", "the file is empty"),
    "words.jpg": (b"hello", "not an image"),
    "drawing.svg": (b'<svg xmlns="http://www.w3.org/2000/svg"><script>1</script></svg>', "not an image"),
    "drawing.png": (b'<svg xmlns="http://www.w3.org/2000/svg"/>', "not an image"),
    "model.pkl": (pickle.dumps([1, 2]), "not an image"),
    "cut.png": (png()[:400], "truncated|broken|cannot|incomplete"),
    "bomb.png": (bomb(), "decompression bomb"),
}


@pytest.mark.parametrize("name", BAD)
def test_files_that_are_no_images_are_refused_in_a_sentence(explorer, tmp_path, name):
    content, reason = BAD[name]
    (tmp_path / name).write_bytes(content)
    for use in (explorer.own, explorer.picture):
        with pytest.raises(ValueError, match=f"cannot use {re.escape(name)}: .*({reason})"):
            use(tmp_path / name)


def test_a_file_that_is_too_large_is_refused_unread(explorer, tmp_path, monkeypatch):
    (tmp_path / "large.png").write_bytes(png())
    monkeypatch.setattr(explorer_module, "UPLOAD_LIMIT", 1024**2)
    with (tmp_path / "large.png").open("r+b") as file:
        file.truncate(1024**2 + 1)
    with pytest.raises(ValueError, match=r"large\.png has 1\.0 MB, at most 1 MB are taken"):
        explorer.own(tmp_path / "large.png")


def test_an_image_of_one_s_own_is_read_as_the_run_s_images_are(explorer, tmp_path):
    (tmp_path / "own.png").write_bytes(png())
    desk = Desk(explorer)
    scene = desk.own(str(tmp_path / "own.png"), None)
    assert tuple(scene.pixels.shape) == (3, 28, 28)
    assert scene.table.label == int(explorer.defense.predict(explorer.image(scene.pixels)[None])[0])
    assert "own.png" in scene.words


def test_the_patch_stays_where_it_is_put_and_inside_the_image(explorer, tmp_path):
    (tmp_path / "own.png").write_bytes(png())
    desk = Desk(explorer)
    scene = desk.pick(explorer.images.choices[0], None).moved(100, -3)
    assert (scene.top, scene.left) == (23, 0)
    settings = {"size": 0, "seed": 4, "steps": 3}
    pasted = desk.with_patch(scene, PICTURE, file=str(tmp_path / "own.png"), **settings)
    assert torch.equal(pasted.patch, paste(Image.open(tmp_path / "own.png"), (5, 5)))
    for kind in (NOISE, DEFENDED):
        made = desk.with_patch(pasted, kind, file=None, **settings)
        assert (made.top, made.left) == (23, 0)
        assert not torch.equal(made.patch, pasted.patch)
    assert desk.pick(explorer.images.choices[1], pasted).rect == pasted.rect
    with pytest.raises(ValueError, match="drop in a picture"):
        desk.with_patch(scene, PICTURE, file=None, **settings)


def test_a_checkpoint_and_a_training_run_can_be_explored_too(checkpoint, tmp_path):
    config = ExploreConfig(device="cpu", dataset="fashion-mini", masks=2, patch="4px")
    found = command.open_explorer(checkpoint, config)
    assert len(found.images.choices) == 1000
    assert len(found.defense.masks) == 4
    assert found.images.kinds == ("all",)
    fitted_folder = tmp_path / "train"
    save_checkpoint(found.defense.classifier.cpu(), fitted_folder / "checkpoint-best")
    manifest = {"schema": 1, "command": "train", "config": {"dataset": "fashion-mini"}, "identity": {}}
    (fitted_folder / "manifest.json").write_text(json.dumps(manifest))
    trained = command.open_explorer(fitted_folder, ExploreConfig(device="cpu"))
    assert len(trained.images.choices) == 1000
    alone = command.open_explorer(checkpoint, ExploreConfig(device="cpu"))
    assert alone.images is None
    assert "drop in your own" in alone.notices[0]


def copied(certified: Path, folder: Path, **changes) -> Path:
    """The run somewhere else, with parts of its manifest's identity or settings changed."""
    folder.mkdir(parents=True)
    manifest = json.loads((certified / "manifest.json").read_text())
    for name, value in changes.items():
        section = "identity" if name in manifest["identity"] else "config"
        manifest[section][name] = value
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (folder / "records.jsonl").write_bytes((certified / "records.jsonl").read_bytes())
    return folder


@NEEDS_GRADIO
def test_other_weights_than_the_run_s_are_refused(certified, checkpoint, tmp_path, capsys):
    other = copied(certified, tmp_path / "other", weights_sha256="0" * 64)
    assert run(["explore", str(other), "--device", "cpu"]) == 1
    assert_one_line(capsys.readouterr().err, r"the weights are not those that.*sha256 000000000000….*--weights")
    moved = copied(certified, tmp_path / "moved", weights="gone/checkpoint-last")
    assert run(["explore", str(moved), "--device", "cpu"]) == 1
    assert_one_line(capsys.readouterr().err, r"gone/checkpoint-last is not there")
    found = command.open_explorer(moved, ExploreConfig(device="cpu", weights=str(checkpoint)))
    assert len(found.images.choices) == 30


@NEEDS_GRADIO
def test_a_manifest_cannot_have_code_run(certified, tmp_path, capsys):
    evil = copied(certified, tmp_path / "evil", model="evil.py:build")
    assert run(["explore", str(evil), "--device", "cpu"]) == 2
    assert_one_line(capsys.readouterr().err, r"certified the factory evil\.py:build; name it with --model")


def test_images_that_are_gone_leave_a_note_and_the_rest_works(certified, tmp_path):
    lost = copied(certified, tmp_path / "lost", data_sha256="0" * 64)
    found = command.open_explorer(lost, ExploreConfig(device="cpu"))
    assert found.images is None
    assert "--dataset or --data-dir" in found.notices[-1]


@NEEDS_GRADIO
def test_what_is_no_run_is_refused(tmp_path, capsys):
    assert run(["explore", str(tmp_path / "nothing")]) == 2
    assert_one_line(capsys.readouterr().err, r"no such folder")
    assert run(["explore", str(tmp_path), "--port", "70000"]) == 2
    assert_one_line(capsys.readouterr().err, r"--port must be from 1 to 65535, not 70000")


def test_without_gradio_the_way_out_is_named(certified, monkeypatch, capsys):
    real = builtins.__import__

    def without_gradio(name, *rest):
        if name == "gradio":
            raise ImportError
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_gradio)
    monkeypatch.delitem(sys.modules, "gradio", raising=False)
    assert run(["explore", str(certified)]) == 2
    assert_one_line(capsys.readouterr().err, r"pip install 'patchproof\[explore\]'")


connected: list[object] = []
watching = threading.Event()


def hear(event: str, arguments: tuple) -> None:
    if event == "socket.connect" and watching.is_set():
        connected.append(arguments[1])


@NEEDS_GRADIO
def test_the_command_serves_the_page_here_only_and_calls_nobody(certified, monkeypatch, capsys):
    seen: dict[str, str] = {}

    def visit() -> None:
        url = re.search(r"explore: (\S+)", capsys.readouterr().out).group(1)
        seen["url"] = url
        seen["page"] = urllib.request.urlopen(url, timeout=20).read().decode()

    monkeypatch.setattr(command, "wait_for_ctrl_c", visit)
    sys.addaudithook(hear)
    watching.set()
    try:
        assert run(["explore", str(certified), "--device", "cpu"]) == 0
    finally:
        watching.clear()
    assert seen["url"].startswith("http://127.0.0.1:")
    assert "patchproof explore" in seen["page"]
    assert not re.search(r'(src|href)="https?://', seen["page"])
    hosts = {place[0] for place in connected if isinstance(place, tuple)}
    assert hosts <= {"127.0.0.1"}


@NEEDS_GRADIO
def test_other_addresses_are_warned_about(certified, monkeypatch, capsys):
    monkeypatch.setattr(command, "wait_for_ctrl_c", lambda: None)
    assert run(["explore", str(certified), "--device", "cpu", "--host", "0.0.0.0"]) == 0
    assert "warning: listening on 0.0.0.0: whoever can reach this machine can use the page" in capsys.readouterr().out
    assert run(["explore", str(certified), "--device", "cpu", "--host", "256.1.1.1"]) == 2
    assert_one_line(capsys.readouterr().err, r"cannot listen on 256\.1\.1\.1")
