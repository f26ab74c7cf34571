"""Reports of real runs: their images, the strategies behind their weights, and the paper's numbers beside theirs."""

from __future__ import annotations

import base64
import io
import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import patchproof as pp
from patchproof.cli import run as command
from patchproof.data import open_dataset
from patchproof.models import load_checkpoint
from patchproof.recipes import recipes
from patchproof.records import RunFolder
from patchproof.report import Options, build_report, worst_masks
from patchproof.report._compare import Entry, concise, mixed_notices, paper_table, runs_table
from patchproof.report._facts import label_names, read_facts
from patchproof.report._gallery import make_gallery, masked_pixels, open_images
from patchproof.report._lineage import Training, find_trainings
from patchproof.report._paper import paper_numbers
from patchproof.report._runs import CertifyRun, load_runs
from patchproof.report._tables import csv_text
from patchproof.report._trends import comparison_pictures
from patchproof.report._worst_masks import COLUMNS, SHADE, masked_strips, sample
from run_folders import CLASSES, manifest, random_records, write_run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.fixture(scope="module")
def real(tmp_path_factory) -> Path:
    """A little training, and a certification of what came out of it, as the commands leave them."""
    folder = tmp_path_factory.mktemp("real")
    common = ("--batch-size", "32", "--validation-images", "8", "--device", "cpu")
    for strategy in ("cutout", "greedy"):
        arguments = ("--strategy", strategy, "--epochs", "1", "--limit", "64", *common)
        assert command(["train", *arguments, "--output", str(folder / strategy)]) == 0
    for strategy, masks in (("cutout", 2), ("greedy", 2), ("greedy", 3)):
        weights, output = folder / strategy / "checkpoint-last", folder / strategy / f"certify-{masks}"
        arguments = ("--weights", str(weights), "--limit", "24", "--patch", "2px", "--masks", str(masks))
        assert command(["certify", *arguments, "--device", "cpu", "--output", str(output)]) == 0
    return folder


def loaded(folder: Path) -> CertifyRun:
    return load_runs([folder])[0][0]


def pixels_of(uri: str) -> np.ndarray:
    assert uri.startswith("data:image/png;base64,")
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(uri.split(",")[1]))))


# Galleries


def test_a_card_shows_the_image_and_the_copy_that_decided(real):
    run = loaded(real / "greedy" / "certify-3")
    gallery = make_gallery(run, 5, dataset=None, data_dir=None)
    assert gallery.notice is None
    records = {record.path: record for record in run.good}
    source = open_dataset("fashion-mini")
    assert len(gallery.failures) == min(5, sum(not record.certified for record in run.good))
    for card in (*gallery.certified, *gallery.failures):
        record = records[card.title]
        image = np.asarray(source.load(record.index))
        assert (pixels_of(card.image) == image).all()
        expected = image.copy()
        for number in record.witness.masks:
            rect = run.facts.masks.rects[number]
            expected[rect.top : rect.bottom, rect.left : rect.right] = round(0.286 * 255)
        assert (pixels_of(card.masked) == expected).all()
        assert card.label == source.class_names[record.label]
        assert card.answered == source.class_names[record.witness.label]
        assert float(card.margin) == pytest.approx(record.margin, rel=0.01)
        assert card.certified == record.certified


def test_cards_run_from_the_narrowest_margin_to_the_widest(real):
    cards = make_gallery(loaded(real / "greedy" / "certify-3"), 6, dataset=None, data_dir=None).failures
    margins = [abs(float(card.margin)) for card in cards]
    assert margins == sorted(margins)
    run = loaded(real / "greedy" / "certify-3")
    failed = sorted(abs(record.margin) for record in run.good if not record.certified)
    assert (margins[0], margins[-1]) == (pytest.approx(failed[0], rel=0.01), pytest.approx(failed[-1], rel=0.01))


def test_masks_remove_the_pixels_with_the_runs_fill():
    pixels = torch.randint(0, 256, (3, 6, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    shown = masked_pixels(pixels, [pp.Rect(1, 2, 3, 4), pp.Rect(0, 0, 2, 2)], (0.0, 0.5, 1.0))
    hidden = torch.zeros(6, 8, dtype=torch.bool)
    hidden[1:4, 2:6] = True
    hidden[0:2, 0:2] = True
    assert (shown[:, ~hidden] == pixels[:, ~hidden]).all()
    assert (shown[:, hidden] == torch.tensor([0, 128, 255], dtype=torch.uint8)[:, None]).all()


@pytest.fixture
def photos(tmp_path) -> Path:
    """A folder data set with its certification, `r`."""
    for label, name in enumerate(CLASSES):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(3):
            noise = np.random.default_rng(10 * label + number).integers(0, 256, (80, 90, 3)).astype(np.uint8)
            Image.fromarray(noise).save(tmp_path / "photos" / name / f"{number}.png")
    arguments = ("--dataset", str(tmp_path / "photos"), "--image-size", "72", "--patch", "9px", "--masks", "2")
    assert command(["certify", *arguments, "--device", "cpu", "--output", str(tmp_path / "r")]) == 0
    return tmp_path / "photos"


def test_images_that_moved_are_found_again_and_only_the_same_ones_are_shown(photos, tmp_path):
    run = loaded(tmp_path / "r")
    assert make_gallery(run, 4, dataset=None, data_dir=None).notice is None
    photos.rename(tmp_path / "moved")
    report = build_report([tmp_path / "r"])
    page = report.write(tmp_path / "out").read_text("utf-8")
    assert "The images are not there any more" in page
    assert "name where they lie now with --dataset or --data-dir" in page
    assert {picture.key for picture in report.pictures} == {"classes", "margins", "cost"}
    found = make_gallery(run, 4, dataset=str(tmp_path / "moved"), data_dir=None)
    assert found.notice is None
    assert all(card.image.startswith("data:image/jpeg;base64,") for card in found.failures)
    (tmp_path / "moved" / "cat" / "0.png").write_bytes(b"other bytes")
    changed = open_images(run.facts, dataset=str(tmp_path / "moved"), data_dir=None)
    assert isinstance(changed, str)
    assert "are not those of the run (another sha256 of the listing): none are shown" in changed


def test_a_file_damaged_without_changing_its_size_leaves_the_other_cards(photos, tmp_path):
    file = photos / "cat" / "0.png"
    file.write_bytes(bytes(file.stat().st_size))
    gallery = make_gallery(loaded(tmp_path / "r"), 9, dataset=None, data_dir=None)
    assert gallery.notice == "1 chosen images cannot be read or have no witness."
    assert len(gallery.certified) + len(gallery.failures) == 8


def test_a_manifest_without_masks_has_no_gallery(real, tmp_path):
    run = loaded(real / "greedy" / "certify-3")
    found = open_images(replace(run.facts, masks=None), dataset=None, data_dir=None)
    assert found == "The manifest does not say how the images were read and masked, so none are shown."


def test_a_witness_beyond_the_mask_set_is_no_card(real, tmp_path):
    shutil.copytree(real / "greedy" / "certify-3", tmp_path / "r")
    content = json.loads((tmp_path / "r" / "manifest.json").read_text())
    content["masks"]["rects"] = content["masks"]["rects"][:1]
    (tmp_path / "r" / "manifest.json").write_text(json.dumps(content))
    gallery = make_gallery(loaded(tmp_path / "r"), 24, dataset=None, data_dir=None)
    cards = (*gallery.certified, *gallery.failures)
    assert all(len(card.rects) == 1 for card in cards)
    assert gallery.notice == f"{24 - len(cards)} chosen images cannot be read or have no witness."


def test_labels_are_named_as_the_classifier_orders_them():
    records = [replace(record, label=0, path="eel/1.png") for record in random_records(1)]
    content = manifest(count=1)
    content["model"]["class_names"] = ["eel", "cat", "dog"]
    assert label_names(content, records) == {0: "eel", 1: "cat", 2: "dog"}
    content["model"]["class_names"] = None
    assert label_names(content, records) == {0: "cat", 1: "dog", 2: "eel"}
    del content["model"]["class_names"]
    assert label_names(content, records) == {0: "eel"}
    content["data"]["class_names"] = 7
    assert label_names(content, records) == {}


# Strategies


def test_a_run_is_traced_to_the_training_that_made_its_weights(real, monkeypatch):
    monkeypatch.chdir(real)
    runs = [loaded(real / "cutout" / "certify-2"), loaded(real / "greedy" / "certify-3")]
    assert find_trainings(runs, []) == [Training("cutout", "cutout", 0), Training("greedy", "greedy", 25)]


def test_a_moved_tree_is_traced_by_its_weights(real, tmp_path):
    shutil.copytree(real, tmp_path / "moved")
    for path in (tmp_path / "moved").glob("*/certify-*/manifest.json"):
        path.write_text(path.read_text().replace(str(real), "/gone"))
    inside, (alone,) = (
        loaded(tmp_path / "moved" / "greedy" / "certify-2"),
        load_runs([real / "greedy" / "certify-3"])[0],
    )
    assert find_trainings([inside], [])[0] == Training("greedy", "greedy", 25)
    lost = replace(alone, folder=tmp_path / "elsewhere" / "r", facts=replace(alone.facts, weights="/gone/checkpoint"))
    assert find_trainings([lost], [])[0].strategy is None
    trained = load_runs([tmp_path / "moved" / "cutout", tmp_path / "moved" / "greedy"])[1]
    assert find_trainings([lost], trained)[0] == Training("greedy", "greedy", 25)


def test_weights_that_changed_since_are_doubted_and_never_another_strategys(real, tmp_path):
    shutil.copytree(real, tmp_path / "t")
    run = loaded(tmp_path / "t" / "cutout" / "certify-2")
    shutil.rmtree(tmp_path / "t" / "cutout" / "checkpoint-best")
    checkpoint = tmp_path / "t" / "cutout" / "checkpoint-last"
    (checkpoint / "model.safetensors").unlink()
    named = replace(run, facts=replace(run.facts, weights=str(checkpoint)))
    assert find_trainings([named], []) == [Training("cutout", "cutout", 0)]  # results.json knows what they were
    (tmp_path / "t" / "cutout" / "results.json").unlink()
    (found,) = find_trainings([named], load_runs([tmp_path / "t" / "greedy"])[1])
    assert found.strategy == "cutout"
    assert "but the weights there are gone or not those of the run" in found.doubt
    shutil.rmtree(tmp_path / "t" / "cutout" / "checkpoint-last")
    (tmp_path / "t" / "cutout" / "manifest.json").unlink()
    (found,) = find_trainings([named], load_runs([tmp_path / "t" / "greedy"])[1])
    assert (found.strategy, found.label) == (None, "certify-2")
    assert "so its strategy is not known; it goes by a folder's name" in found.doubt


def test_runs_of_the_same_unknown_weights_share_a_name(tmp_path):
    runs = [
        loaded(write_run(tmp_path / name, manifest(count=5, patch=patch), random_records(5)))
        for name, patch in (("one", 3), ("two", 5))
    ]
    assert [training.label for training in find_trainings(runs, [])] == ["one", "one"]


# The paper


def facts(architecture: str, dataset: str, *, side: int = 224, patch: int = 39, per_axis: int = 3, **changes):
    changed = {"identity.architecture": architecture, "data.name": dataset, **changes}
    return read_facts(manifest(count=5, side=side, patch=patch, per_axis=per_axis, **changed))


@pytest.mark.parametrize("name", ["imagenette-resnet-greedy", "imagenet-vit-cutout", "imagenet-convnext-rand"])
def test_the_papers_cell_is_found_for_every_patch_and_mask_set(name):
    recipe = recipes()[name]
    side = {"1%": 23, "2%": 32, "3%": 39}
    for e in recipe.expectations:
        ours = facts(str(recipe.settings()["model"]), recipe.dataset, patch=side[e.patch], per_axis=e.masks)
        (number,) = paper_numbers(ours, recipe.strategy)
        assert (number.certified, number.defended, number.context) == (e.certified, e.defended, None)


def test_pixels_of_the_low_resolution_sets_are_those_of_224():
    (number,) = paper_numbers(facts("vit_base_patch16_224.augreg", "cifar10", patch=35, per_axis=6), "greedy")
    assert (number.certified, number.defended, number.context) == (92.0, 98.8, None)
    assert paper_numbers(facts("vit_base_patch16_224", "cifar10", patch=34), "greedy") == []
    assert paper_numbers(facts("vit_base_patch16_224", "cifar10", side=112, patch=35), "greedy") == []


def test_another_architecture_is_context_and_says_which():
    (number,) = paper_numbers(facts("resnet18", "imagenette"), "greedy")
    assert (number.certified, number.context) == (93.7, "ResNet")
    others = paper_numbers(facts("tf_efficientnet_lite0", "imagenette"), "greedy")
    assert [(n.context, n.certified) for n in others] == [("ResNet", 93.7), ("ViT", 95.5), ("ConvNeXt", 95.4)]
    (smaller,) = paper_numbers(facts("vit_base_patch16_224", "imagenette", side=160, patch=28), "greedy")
    assert smaller.context == "224×224"


@pytest.mark.parametrize(
    ("strategy", "changes"),
    [
        (None, {}),
        ("none", {}),
        ("greedy", {"identity.threat_space": "native"}),
        ("greedy", {"data.name": "pets"}),
        ("greedy", {"identity.patch_sizes": [[39, 39], [20, 60]]}),
        ("greedy", {"masks": None}),
    ],
)
def test_what_the_paper_did_not_measure_has_no_number(strategy, changes):
    ours = facts("resnetv2_50x1_bit", "imagenette")
    assert len(paper_numbers(ours, "greedy")) == 1
    assert paper_numbers(facts("resnetv2_50x1_bit", **{"dataset": "imagenette"} | changes), strategy) == []


# Several runs


def entry(tmp_path: Path, strategy: str | None, *, seed: int = 0, count: int = 40, passes: int = 0, **changes) -> Entry:
    name = f"run{len(list(tmp_path.iterdir()))}"
    content = manifest(count=count, **changes)
    run = loaded(write_run(tmp_path / name, content, random_records(count, seed=seed)))
    return Entry(run, Training(strategy or run.name, strategy, passes if strategy else None))


def test_the_papers_layout_has_a_row_a_strategy_and_columns_a_setting(tmp_path):
    imagenette = {"side": 224, "patch": 39, "data.name": "imagenette", "identity.architecture": "resnetv2_50x1_bit"}
    entries = [
        entry(tmp_path, "greedy", seed=1, per_axis=3, **imagenette),
        entry(tmp_path, "cutout", seed=2, per_axis=3, **imagenette),
        entry(tmp_path, "greedy", seed=3, per_axis=6, **imagenette),
        entry(tmp_path, "greedy", seed=4, per_axis=6, **imagenette),
        entry(tmp_path, None, seed=5, per_axis=6, **imagenette),
    ]
    table = paper_table(entries)
    assert [row[0] for row in table.rows] == ["cutout", "greedy", "greedy (run 2)", "run4 †"]
    assert [name.rsplit(" · ", 2)[1] for name, _ in table.groups[1:]] == ["3×3 masks", "6×6 masks"]
    assert [column.name for column in table.columns] == ["strategy", *["defended", "paper", "certified", "paper"] * 2]
    assert table.rows[1][1:5] == (entries[0].run.rates["defended"], "99.2%", entries[0].certified, "93.7%")
    assert table.rows[1][5:9] == (entries[2].run.rates["defended"], "99.4%", entries[2].certified, "95.6%")
    assert table.rows[0][5:] == (None, None, None, None)
    assert table.rows[2][1:5] == (None, None, None, None)
    assert table.rows[3][5:] == (entries[4].run.rates["defended"], None, entries[4].certified, None)
    assert any(note.startswith("† The training strategy is not known") for note in table.notes)
    assert csv_text(table).count("\n") == 5


def test_context_stands_in_brackets(tmp_path):
    one = entry(tmp_path, "greedy", side=224, patch=39, **{"data.name": "imagenette"})
    table = paper_table([one])
    assert table.rows[0][-1] == "(ResNet 93.7%, ViT 95.5%, ConvNeXt 95.4%)"
    assert any("not as a comparison" in note for note in table.notes)


def test_lines_join_only_runs_that_differ_in_one_thing(tmp_path):
    entries = [
        entry(tmp_path, strategy, patch=patch, per_axis=masks, passes=cost, **{"identity.weights_sha256": strategy})
        for strategy, cost in (("cutout", 0), ("greedy", 25))
        for patch, masks in ((5, 3), (5, 6), (3, 3))
    ]
    pictures = {picture.key: picture for picture in comparison_pictures(entries)}
    assert set(pictures) == {"by-masks", "by-patch", "by-training-cost"}
    assert pictures["by-masks"].alt.startswith("Certified accuracy against masks: 2 lines")
    assert pictures["by-patch"].alt.startswith("Certified accuracy against patch size: 2 lines")
    assert pictures["by-training-cost"].alt.startswith("Certified accuracy against training cost: 3 rows of points")
    for words in ("masks per axis", "certified (% of images)", "n = 40"):
        assert words in pictures["by-masks"].svg
    assert comparison_pictures(entries[:1]) == []
    more = {"per_axis": 6, "patch": 5, "identity.weights_sha256": "cutout"}
    assert len(comparison_pictures([entries[0], entry(tmp_path, "cutout", **more)])) == 1
    for change in ({"identity.data_sha256": "other"}, {"identity.threat_space": "native"}):
        assert comparison_pictures([entries[0], entry(tmp_path, "cutout", **more | change)]) == []


def test_what_all_runs_share_is_said_once_and_stays_in_the_files(tmp_path):
    entries = [entry(tmp_path, "greedy"), entry(tmp_path, "cutout", count=20)]
    whole = runs_table(entries)
    shown = concise(whole)
    left_out = [column.name for column in whole.columns if column not in shown.columns]
    assert left_out == ["data set", "architecture", "masks", "patch"]  # the numbers of images differ
    for row in whole.rows:
        assert all(f"{name} {row[i]}" in shown.notes[0] for i, name in enumerate(left_out, start=2))
    kept = [whole.columns.index(column) for column in shown.columns]
    assert shown.rows == tuple(tuple(row[i] for i in kept) for row in whole.rows)
    assert concise(runs_table(entries[:1])) == runs_table(entries[:1])
    report = build_report([e.run.folder for e in entries])
    assert [t.columns for t in report.tables if t.key == "runs"] == [whole.columns]


def test_runs_about_other_images_are_said_to_be_mixed(tmp_path):
    one, same = entry(tmp_path, "greedy"), entry(tmp_path, "cutout", seed=1)
    assert mixed_notices([one, same]) == []
    fewer = entry(tmp_path, "rand", count=20)
    assert mixed_notices([one, fewer]) == ["mixed: the runs cover different images of the same data set (n = 20, 40)"]
    others = entry(tmp_path, "rand", **{"identity.data_sha256": "ee", "data.name": "plants"})
    assert mixed_notices([one, others]) == [
        "mixed: the runs are not about the same images (pets, plants); compare only within a data set"
    ]
    native = entry(tmp_path, "rand", **{"identity.threat_space": "native"})
    assert mixed_notices([one, native])[0].startswith("mixed: some patches are measured on the original image")
    report = build_report([one.run.folder, others.run.folder])
    assert report.notices[0].text.startswith("mixed: the runs are not about the same images")


# What strategies hide


def test_each_strategy_hides_pixels_from_its_own_network(real):
    classifiers = {s: (s, load_checkpoint(real / s / "checkpoint-last").eval()) for s in ("cutout", "greedy")}
    source = open_dataset("fashion-mini")
    picture = worst_masks(classifiers, source, seed=0)
    for words in ("cutout", "greedy 1", "greedy 2", "Ankle boot"):
        assert words in picture.svg
    classifier = classifiers["greedy"][1]
    images, labels = sample(source, classifier)
    strips = masked_strips("g", "greedy", classifier, images, labels, dict(enumerate(source.class_names)), seed=0)
    assert len(strips) == 2
    keep = pp.masking_strategy("greedy", image_size=(28, 28), generator=torch.Generator())(classifier, images, labels)
    for strip, visible in zip(strips, keep, strict=True):
        hidden = (strip.images == torch.tensor(SHADE)[:, None, None]).all(dim=1, keepdim=True)
        assert torch.equal(hidden, ~visible)
        assert len(strip.captions) == COLUMNS


def test_a_strategy_that_takes_hundreds_of_passes_is_left_out(real):
    classifier = load_checkpoint(real / "greedy" / "checkpoint-last").eval()
    images, labels = sample(open_dataset("fashion-mini"), classifier)
    assert masked_strips("g", "grid6x6", classifier, images, labels, {}, seed=0) == []


# The whole, in a browser


@pytest.fixture(scope="module")
def pages(real, tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    everything = [*sorted(real.glob("*/certify-*")), real / "cutout", real / "greedy"]
    return {
        "one": build_report([real / "greedy" / "certify-3"], Options(images=3)).write(folder / "one"),
        "several": build_report(everything).write(folder / "several"),
    }


def test_several_real_runs_show_table_curves_and_masks(pages):
    settings = (pages["one"].parent / "tables" / "settings.csv").read_text()
    assert "trained on the masks of,greedy\n" in settings
    page = pages["several"].read_text("utf-8")
    for words in (
        "Strategies",
        "masks per axis",
        "extra passes an image",
        "Validation, certified",
        "What each strategy",
    ):
        assert words in page
    assert {path.stem for path in (pages["several"].parent / "figures").glob("*.svg")} >= {
        "by-masks", "by-training-cost", "loss", "validation-certified", "validation-undefended", "worst-masks",
    }  # fmt: skip


MEASURE = """<script>addEventListener("load", () => {
  const wide = [...document.querySelectorAll("body *")].filter(e => e.scrollWidth > e.clientWidth + 1 &&
    !["auto", "scroll"].includes(getComputedStyle(e).overflowX) && getComputedStyle(e).display !== "inline" &&
    !e.closest("svg")).map(e => e.className || e.tagName);
  const style = getComputedStyle(document.body);
  const broken = [...document.images].filter(i => !i.naturalWidth).length;
  parent.postMessage(JSON.stringify([innerWidth, document.documentElement.scrollWidth, style.backgroundColor, broken,
    wide]), "*");
});</script></body>"""
# Chromium's windows are at least 500 pixels wide; a frame can be as narrow as a telephone.
FRAME = """<script>addEventListener("message", event => { document.title = event.data; });</script>
<iframe src="page.html" width="WIDTH" height="2000" style="border: 0"></iframe>"""


@pytest.mark.skipif(CHROMIUM is None, reason="NO BROWSER: install Debian's `chromium` to open the report in one")
@pytest.mark.parametrize("name", ["one", "several"])
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_the_page_opens_in_a_browser_without_errors_and_fits_its_width(pages, tmp_path, name, width, dark):
    (tmp_path / "frame.html").write_text(FRAME.replace("WIDTH", str(width)))
    (tmp_path / "page.html").write_text(pages[name].read_text("utf-8").replace("</body>", MEASURE), encoding="utf-8")
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--hide-scrollbars"]
    options += ["--window-size=1400,2100", f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=3000"]
    options += ["--blink-settings=preferredColorScheme=0"] if dark else []
    done = subprocess.run(
        [CHROMIUM, *options, "--dump-dom", (tmp_path / "frame.html").as_uri()],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert "CONSOLE" not in done.stderr
    title = re.search(r"<title>(.*?)</title>", done.stdout).group(1)
    inner, needed, background, broken, wide = json.loads(title)
    assert inner == width
    assert needed <= width
    assert wide == []
    assert broken == 0
    assert background == ("rgb(20, 22, 26)" if dark else "rgb(255, 255, 255)")


def test_a_digit_changed_in_a_record_is_found_by_its_checksum(tmp_path):
    folder = RunFolder(write_run(tmp_path / "run", manifest(count=30), []).resolve())
    folder.append(random_records(30))
    sound = build_report([folder.path])
    assert not [notice for notice in sound.notices if "damaged" in notice.text]
    lines = folder.records_path.read_text().splitlines(keepends=True)
    lines[6] = lines[6].replace('"forwards": ', '"forwards": 1')
    folder.records_path.write_text("".join(lines))
    report = build_report([folder.path])
    assert any("1 line is damaged in records.jsonl and left out: 7" in notice.text for notice in report.notices)


@pytest.mark.parametrize("model", [True, 3, "small", [], None])
def test_a_manifest_whose_model_is_no_object_still_has_a_report(tmp_path, model):
    run = write_run(tmp_path / "run", manifest(count=9) | {"model": model}, random_records(9))
    assert build_report([run]).page.title == "small on pets"
