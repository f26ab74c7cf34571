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
from patchproof.data import open_dataset
from patchproof.models import load_checkpoint, load_classifier, sealed
from patchproof.recipes import recipes
from patchproof.report import Options, Report, build_report
from patchproof.report._compare import comparison_pictures, paper_table, runs_table
from patchproof.report._counts import TracedRun, trace
from patchproof.report._gallery import make_gallery
from patchproof.report._tables import csv_text
from patchproof.report._training import COLUMNS, SHADE, worst_masks
from patchproof.runs import certify, train
from patchproof.runs._reading import StoredCertification, find_images, read_run, read_runs
from patchproof.types import InputError, shortened_name
from run_folders import CLASSES, detection, manifest, random_records, write_run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
RESULTS = Path(__file__).parents[1] / "results"


@pytest.fixture(scope="module")
def real(tmp_path_factory) -> Path:
    """A little training, and certifications of what came out of it, as the commands leave them."""
    folder = tmp_path_factory.mktemp("real")
    data, test = open_dataset("fashion-mini", split="train"), open_dataset("fashion-mini")
    threat = pp.PatchThreat.square(image_size=(28, 28), pixels=2)
    for strategy in ("cutout", "greedy"):
        classifier = load_classifier("small", weights="random", num_classes=10, class_names=test.class_names)
        plan = pp.Plan(strategy=strategy, epochs=1, batch_size=32, validation_images=8)
        config = {"dataset": "fashion-mini"}
        train(classifier, data, plan, validation=test, folder=folder / strategy, limit=64, config=config)
    for strategy, name, per_axis in (
        ("cutout", "patchcleanser", 2), ("greedy", "patchcleanser", 2), ("greedy", "patchcleanser", 3),
        ("greedy", "alarm", 3),
    ):  # fmt: skip
        weights = folder / strategy / "checkpoint-last"
        defense = pp.defense(name, load_checkpoint(weights).eval(), threat, per_axis=per_axis)
        output = folder / strategy / (f"certify-{per_axis}" if name == "patchcleanser" else name)
        certify(defense, test, folder=output, limit=24, config={"dataset": "fashion-mini", "weights": str(weights)})
    return folder


def pixels_of(uri: str) -> np.ndarray:
    assert uri.startswith("data:image/png;base64,")
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(uri.split(",")[1]))))


# Reading


@pytest.mark.skipif(not RESULTS.is_dir(), reason="no stored runs here")
def test_stored_runs_of_earlier_versions_stay_readable(tmp_path):
    """Their manifests name no defence: there was only one."""
    folder = RESULTS / "imagenette" / "greedy-seed0" / "certify-3percent-3x3"
    run = read_run(folder)
    assert (run.defense, run.guarantee, run.patch_words) == ("patchcleanser", "recovery", "39×39 px (3.0%)")
    assert (run.masks_words, run.image_size, run.planned, run.native) == ("3×3 masks", (224, 224), 3925, False)
    assert run.class_name(0) == "tench"
    results = json.loads((folder / "results.json").read_text())
    assert run.seconds == results["cost"]["seconds"]
    assert run.rates["certified"].as_dict() == results["certified"]  # from records.jsonl.xz
    assert not [words for words in run.notices if "resume" in words or "contradicts" in words or "missing" in words]
    assert read_run(folder.parent / "train").losses
    shutil.copytree(folder, tmp_path / "cut")
    packed = tmp_path / "cut" / "records.jsonl.xz"
    packed.write_bytes(packed.read_bytes()[:-100])
    assert "records.jsonl is missing or cannot be read" in read_run(tmp_path / "cut").notices
    kinds = {}
    for path in sorted(RESULTS.glob("*/*/*/manifest.json")):
        made = json.loads(path.read_text("utf-8"))
        kinds[made["command"], *made["identity"].get("defense", {"name": None})] = path.parent
    assert {"certify", "attack", "train"} <= {read_run(folder).manifest["command"] for folder in kinds.values()}


def test_labels_are_named_as_the_classifier_orders_them(tmp_path):
    def names(number: int, **changes) -> dict[int, str]:
        return dict(read_run(write_run(tmp_path / str(number), manifest(count=1, **changes), [])).class_names)

    assert names(0, **{"model.class_names": ["eel", "cat", "dog"]}) == {0: "eel", 1: "cat", 2: "dog"}
    assert names(1, **{"model.class_names": None}) == {0: "cat", 1: "dog", 2: "eel"}
    assert names(2, **{"model.class_names": None, "model.classes": 1000}) == {}


# Galleries


def cards_of(run: StoredCertification, count: int, source=None) -> dict[str, tuple]:
    return dict(make_gallery(run, source or find_images(run), count)[0])


@pytest.mark.parametrize("name", ["certify-3", "alarm"])
def test_a_card_shows_the_image_and_the_copy_that_decided(real, name):
    run = read_run(real / "greedy" / name)
    records, source = {record.path: record for record in run.good}, open_dataset("fashion-mini")
    groups = cards_of(run, 5)
    assert len(groups["Not certified"]) == min(5, sum(not record.certified for record in run.good))
    margins = [abs(float(card.margin)) for card in groups["Not certified"]]
    failed = sorted(abs(record.margin) for record in run.good if not record.certified)
    assert margins == sorted(margins)
    assert [margins[0], margins[-1]] == pytest.approx([failed[0], failed[-1]], rel=0.01)
    for card in (card for cards in groups.values() for card in cards):
        record = records[card.title]
        image, witness = np.asarray(source.load(record.index)), record.evidence["witness"]
        assert (pixels_of(card.image) == image).all()
        expected = image.copy()
        for number in witness["masks"]:
            rect = run.masks.rects[number]
            expected[rect.top : rect.bottom, rect.left : rect.right] = np.round(255 * np.array(run.fill))
        assert (pixels_of(card.masked) == expected).all()
        assert card.label == source.class_names[record.label]
        assert card.answered == source.class_names[witness["label"]]
        assert float(card.margin) == pytest.approx(record.margin, rel=0.01)
        assert card.certified == record.certified


@pytest.mark.parametrize(
    "evidence",
    [{}, {"votes": 3}, {"witness": None}, *({"witness": {"masks": masks}} for masks in ([0, 9], "0", [1.0], [True]))],
)
def test_without_masks_in_the_evidence_the_image_is_shown_alone(real, evidence):
    run = read_run(real / "greedy" / "certify-3")
    cards = cards_of(replace(run, records=tuple(replace(r, evidence=evidence) for r in run.records)), 2)
    assert {(card.masked, card.answered) for group in cards.values() for card in group} == {(None, None)}
    alone = cards_of(replace(run, masks=None), 2)
    assert {card.masked for group in alone.values() for card in group} == {None}


def test_a_witness_of_many_masks_hides_all_of_them_with_the_runs_fill(real):
    run = read_run(real / "greedy" / "certify-3")
    three = tuple(replace(r, evidence={"witness": {"masks": [0, 4, 8], "label": 1}}) for r in run.records)
    for card in cards_of(replace(run, records=three), 1)["Not certified"]:
        assert (len(card.rects), card.how, card.answered) == (3, "under 3 masks", "Trouser")
        image, shown, gone = pixels_of(card.image), pixels_of(card.masked), np.zeros(run.image_size, dtype=bool)
        for rect in (run.masks.rects[number] for number in (0, 4, 8)):
            gone[rect.top : rect.bottom, rect.left : rect.right] = True
        assert (shown[~gone] == image[~gone]).all()
        assert (shown[gone] == np.round(255 * np.array(run.fill))).all()


@pytest.fixture
def photos(tmp_path) -> Path:
    """A folder data set with its certification, `r`."""
    for label, name in enumerate(CLASSES):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(3):
            noise = np.random.default_rng(10 * label + number).integers(0, 256, (80, 90, 3)).astype(np.uint8)
            Image.fromarray(noise).save(tmp_path / "photos" / name / f"{number}.png")
    classifier = load_classifier("small", weights="random", num_classes=3, class_names=CLASSES, input_size=(72, 72))
    threat = pp.PatchThreat.square(image_size=(72, 72), pixels=9)
    config = {"dataset": str(tmp_path / "photos")}
    data = open_dataset(str(tmp_path / "photos"))
    certify(pp.defense("patchcleanser", classifier, threat, per_axis=2), data, folder=tmp_path / "r", config=config)
    return tmp_path / "photos"


def test_images_that_moved_are_found_again_and_only_the_same_ones_are_shown(photos, tmp_path):
    run = read_run(tmp_path / "r")
    assert make_gallery(run, find_images(run), 4)[1] is None
    photos.rename(tmp_path / "moved")
    report = build_report([tmp_path / "r"])
    page = report.html()
    assert "The images cannot be shown: unknown dataset" in page
    assert "if they moved, give their new location as dataset or data_dir." in page
    assert {picture.key for picture in report.pictures} == {"classes", "failing-masks", "margins"}
    found = find_images(run, dataset=str(tmp_path / "moved"))
    cards = [card for group in cards_of(run, 4, found).values() for card in group]
    assert all(card.image.startswith("data:image/jpeg;base64,") for card in cards)
    file = tmp_path / "moved" / "cat" / "0.png"
    file.write_bytes(bytes(file.stat().st_size))  # damaged without changing its size
    groups, notice = make_gallery(run, found, 9)
    assert notice == "1 chosen image cannot be read."
    assert sum(len(cards) for _, cards in groups) == 8
    file.write_bytes(b"other bytes")
    with pytest.raises(InputError, match=r"are not those of the run .another sha256 of the listing"):
        find_images(run, str(tmp_path / "moved"))
    with pytest.raises(InputError, match="unknown dataset 'nowhere'"):  # what the caller names is not lost but wrong
        build_report([tmp_path / "r"], Options(dataset="nowhere"))
    shutil.copytree(tmp_path / "r", tmp_path / "again")
    with pytest.raises(InputError, match="dataset and data_dir are for the images of one certification"):
        build_report([tmp_path / "r", tmp_path / "again"], Options(dataset=str(tmp_path / "moved")))


# Strategies


def lineages(runs, trainings) -> list[tuple]:
    return [(one.label, one.strategy, one.passes) for one in trace(runs, trainings)]


def test_a_run_is_traced_to_the_training_that_made_its_weights(real, tmp_path):
    runs = [read_run(real / "cutout" / "certify-2"), read_run(real / "greedy" / "alarm")]
    assert lineages(runs, []) == [("cutout", "cutout", 0), ("greedy", "greedy", 25)]
    shutil.copytree(real, tmp_path / "moved")
    lost = replace(runs[1], folder=tmp_path / "elsewhere" / "r", weights="/gone/checkpoint-last")
    unknown = trace([lost, replace(lost, name="again")], [])
    assert [(one.strategy, one.label) for one in unknown] == [(None, "alarm †"), (None, "alarm †")]  # the same weights
    beside = replace(lost, folder=tmp_path / "moved" / "greedy" / "alarm")
    assert lineages([beside], []) == [("greedy", "greedy", 25)]
    _, trained = read_runs([tmp_path / "moved" / "cutout", tmp_path / "moved" / "greedy"])
    assert lineages([lost], trained) == [("greedy", "greedy", 25)]


def test_the_search_for_a_training_lists_no_parent_of_the_run(tmp_path, monkeypatch):
    """A parent may be a home folder, or the root of the file system."""
    run = write_run(tmp_path / "r", manifest(count=3, **{"config.weights": "zoo"}), random_records(3))
    monkeypatch.setattr(Path, "glob", None)
    monkeypatch.setattr(Path, "iterdir", None)
    assert trace([read_run(run)], [])[0].strategy is None


def test_only_the_same_weights_are_called_by_a_strategy(real, tmp_path):
    """A checkpoint at the place that the run names may be of a later training."""
    shutil.copytree(real, tmp_path / "t")
    run, checkpoint = read_run(tmp_path / "t" / "cutout" / "certify-2"), tmp_path / "t" / "cutout" / "checkpoint-last"
    shutil.rmtree(tmp_path / "t" / "cutout" / "checkpoint-best")
    (checkpoint / "model.safetensors").unlink()
    named = replace(run, weights=str(checkpoint))
    assert lineages([named], []) == [("cutout", "cutout", 0)]  # results.json knows what they were
    (tmp_path / "t" / "cutout" / "results.json").unlink()
    assert lineages([named], [read_run(tmp_path / "t" / "greedy")]) == [("certify-2 †", None, None)]
    shutil.copy(real / "cutout" / "results.json", tmp_path / "t" / "cutout")
    path = tmp_path / "t" / "cutout" / "manifest.json"
    path.write_text(path.read_text().replace("cutout", "rand"))  # its checksum is now another
    assert lineages([named], [])[0][1] is None
    path.write_text(json.dumps(sealed({})))
    assert lineages([named], [])[0][1] is None


# The paper


def run_of(folder: Path, architecture: str, dataset: str, **changes) -> StoredCertification:
    sizes = {"side": 224, "patch": 39} | {
        key: changes.pop(key) for key in ("side", "patch", "per_axis") if key in changes
    }
    changed = {"identity.architecture": architecture, "data.name": dataset, **changes}
    number = len(list(folder.iterdir()))
    return read_run(write_run(folder / f"run{number}", manifest(count=40, **sizes, **changed), random_records(40)))


@pytest.mark.parametrize("name", ["imagenette-resnet-greedy", "imagenet-vit-cutout", "imagenet-convnext-rand"])
def test_the_papers_cell_is_found_for_every_patch_and_mask_set(tmp_path, name):
    recipe = recipes()[name]
    side = {"1%": 23, "2%": 32, "3%": 39}
    for e in recipe.expectations:
        training = recipe.training
        ours = run_of(tmp_path, training["model"], training["dataset"], patch=side[e.patch], per_axis=e.masks)
        assert TracedRun(ours, ours.name, training["strategy"]).paper == {"": e}


def test_another_architecture_or_size_is_context_and_says_which(tmp_path):
    def numbers(*arguments, **changes) -> list[tuple]:
        run = TracedRun(run_of(tmp_path, *arguments, **changes), "run", "greedy")
        return [(context, cell.certified) for context, cell in run.paper.items()]

    every = [("ResNet", 93.7), ("ViT", 95.5), ("ConvNeXt", 95.4)]
    assert numbers("resnet18", "imagenette") == numbers("tf_efficientnet_lite0", "imagenette2-160") == every
    assert numbers("vit_base_patch16_224", "imagenette", side=160, patch=28) == every
    # pixels of the low-resolution sets are those of 224
    assert numbers("vit_base_patch16_224.augreg", "cifar10", patch=35, per_axis=6) == [("", 92.0)]
    assert numbers("vit_base_patch16_224", "cifar10", patch=34) == []
    assert numbers("vit_base_patch16_224", "cifar10", side=112, patch=35) == []


@pytest.mark.parametrize(
    ("strategy", "changes"),
    [
        (None, {}),
        ("none", {}),
        ("greedy", {"config.threat_space": "native"}),
        ("greedy", {"data.name": "pets"}),
        ("greedy", {"identity.defense.patch_sizes": [[39, 39], [20, 60]]}),
        ("greedy", {"masks": None}),
        ("greedy", detection()),
    ],
)
def test_what_the_paper_did_not_measure_has_no_number(tmp_path, strategy, changes):
    known, other = ({"dataset": "imagenette"} | more for more in ({}, changes))
    assert len(TracedRun(run_of(tmp_path, "resnetv2_50x1_bit", **known), "run", "greedy").paper) == 1
    assert TracedRun(run_of(tmp_path, "resnetv2_50x1_bit", **other), "run", strategy).paper == {}


# Several runs


def traced(folder: Path, strategy: str | None, *, seed: int = 0, count: int = 40, passes: int = 0, **changes):
    number = len(list(folder.iterdir()))
    run = read_run(
        write_run(folder / f"run{number}", manifest(count=count, **changes), random_records(count, seed=seed))
    )
    return TracedRun(run, run.name, strategy, passes if strategy else None)


def test_the_papers_layout_has_a_row_per_strategy_and_columns_per_setting(tmp_path):
    imagenette = {"side": 224, "patch": 39, "data.name": "imagenette", "identity.architecture": "resnetv2_50x1_bit"}
    chosen = (("greedy", 3), ("cutout", 3), ("greedy", 6), ("greedy", 6), (None, 6))
    runs = [traced(tmp_path, s, seed=i, per_axis=masks, **imagenette) for i, (s, masks) in enumerate(chosen)]
    table = paper_table(runs)
    assert [row[0] for row in table.rows] == ["cutout", "greedy (run0, run2)", "greedy (run3)", "run4 †"]
    assert [name.rsplit(" · ", 2)[1] for name, _ in table.groups[1:]] == ["3×3 masks", "6×6 masks"]
    assert [column.name for column in table.columns] == [
        "strategy",
        *["defended", "defended, paper", "certified", "certified, paper"] * 2,
    ]
    assert tuple(table.rows[1][1:5]) == (runs[0].run.rates["defended"], "99.2%", runs[0].certified, "93.7%")
    assert tuple(table.rows[1][5:9]) == (runs[2].run.rates["defended"], "99.4%", runs[2].certified, "95.6%")
    assert table.rows[0][5:] == table.rows[2][1:5] == [None, None, None, None]
    assert tuple(table.rows[3][5:]) == (runs[4].run.rates["defended"], None, runs[4].certified, None)
    assert any(note.startswith("† The training strategy is not known") for note in table.notes)
    assert csv_text(table).count("\n") == 5
    (row,) = paper_table([traced(tmp_path, "greedy", side=224, patch=39, **{"data.name": "imagenette"})]).rows
    assert row[-1] == "(ResNet 93.7%, ViT 95.5%, ConvNeXt 95.4%)"


def test_lines_join_only_runs_that_differ_in_one_thing(tmp_path):
    runs = [
        traced(tmp_path, strategy, patch=patch, per_axis=masks, passes=cost, **{"identity.weights_sha256": strategy})
        for strategy, cost in (("cutout", 0), ("greedy", 25))
        for patch, masks in ((5, 3), (5, 6), (3, 3))
    ]
    pictures = {picture.key: picture for picture in comparison_pictures(runs)}
    assert set(pictures) == {"by-masks", "by-patch", "by-training-cost"}
    assert pictures["by-masks"].alt.startswith("Certified accuracy against masks, n = 40: 2 lines")
    assert pictures["by-patch"].alt.startswith("Certified accuracy against patch size, n = 40: 2 lines")
    assert "weights of" not in pictures["by-masks"].svg
    assert pictures["by-training-cost"].alt.endswith("training cost, n = 40: 3 rows of points with 95% intervals.")
    for words in ("masks per axis", "certified (recovery), % of images", "n = 40"):
        assert words in pictures["by-masks"].svg
    assert comparison_pictures(runs[:1]) == []
    unknown = [replace(one, first="a", strategy=None, passes=None) for one in runs[:2]]
    assert "weights of a" in comparison_pictures(unknown)[0].svg, "one line of two runs"
    more = {"per_axis": 6, "patch": 5, "identity.weights_sha256": "cutout"}
    assert len(comparison_pictures([runs[0], traced(tmp_path, "cutout", **more)])) == 1
    for change in ({"identity.data_sha256": "other"}, {"config.threat_space": "native"}, detection()):
        assert comparison_pictures([runs[0], traced(tmp_path, "cutout", **more | change)]) == []


SMALLER = {"patch": 3, "per_axis": 3}


@pytest.mark.parametrize(
    ("changes", "joined"),
    [
        (SMALLER, True),
        (SMALLER | {"config.threat_space": "native"}, False),
        (SMALLER | {"identity.defense.patches": 2, "masks": None}, False),
        ({"identity.defense.patch_sizes": [[3, 3], [2, 6]]}, False),
        ({"identity.defense.patch_sizes": [[2, 6]]}, False),
        ({"side": 56}, False),
    ],
)
def test_a_line_against_the_patch_size_keeps_number_shape_and_space_of_the_patch(tmp_path, changes, joined):
    one = {"masks": None} if "masks" in changes else {}
    runs = [traced(tmp_path, "greedy", **one), traced(tmp_path, "greedy", **changes)]
    assert bool(comparison_pictures(runs)) == joined
    native = {"config.threat_space": "native"}
    squares = [traced(tmp_path, "greedy", patch=patch, **native) for patch in (5, 4)]
    oblong = {"config.patch": "3x6px", "identity.defense.patch_sizes": [[3, 3]]}
    assert len(comparison_pictures(squares)) == 1
    assert comparison_pictures([squares[0], traced(tmp_path, "greedy", **native | oblong)]) == []
    both = comparison_pictures([*runs, *squares])
    assert [picture.alt.split(": ")[1] for picture in both] == [f"{1 + joined} lines with 95% intervals."]
    assert ("one square on the original image" in both[0].svg) == joined


def test_a_rival_alone_is_named_in_a_note_and_many_columns_after_long_names_have_the_whole_page(tmp_path):
    names = [f"certify-photos-tf_efficientnet_lite0-greedy-{n}" for n in range(3)]
    folders = [write_run(tmp_path / name, manifest(count=30), random_records(30, seed=len(name))) for name in names]
    for some, columns, note in (
        (folders[:2], ["accuracy", "images", "gained"], f"In every row: run {names[1]}."),
        (folders, ["run", "images", "gained"], "In every row: accuracy certified."),
    ):
        report = build_report(some)
        (table,) = (t for s in report.sections for t in s.tables if t.key == "paired")
        assert ([column.name for column in table.columns[:3]], table.notes[0]) == (columns, note)
        assert table.wide == (len(some) > 2)
        assert ('<div class="beside">' in report.html().split('id="paired"')[1].split("</section>")[0]) != table.wide
        (whole,) = (t for t in report.tables if t.key == "paired")
        assert [column.name for column in whole.columns[:2]] == ["run", "accuracy"]
    (single,) = (t for s in report.sections for t in s.tables if t.key == "runs")
    assert replace(single, rows=single.rows[:1]).concise().columns[0].name == "run", "a single row keeps its name"


def test_what_all_runs_share_is_said_once_and_stays_in_the_files(tmp_path):
    runs = [traced(tmp_path, "greedy"), traced(tmp_path, "cutout", count=20)]
    complete = runs_table(runs)
    shown = complete.concise()
    left_out = [column.name for column in complete.columns if column not in shown.columns]
    same = ["data set", "split", "architecture", "defence", "guarantee", "masks", "patch"]
    assert left_out[: len(same)] == same
    assert "images" not in left_out
    assert all(str(complete.rows[0][i]) in shown.notes[0] for i, _ in enumerate(same, start=3))
    assert ", guarantee recovery, 3×3 masks, patch 5×5 px (3.2%), " in shown.notes[0]
    report = build_report([one.run.folder for one in runs])
    assert [t.columns for t in report.tables if t.key == "runs"] == [complete.columns]
    (section,) = (section for section in report.sections if section.key == "runs")
    assert "tables/runs.csv" in "".join(section.words)
    assert {"split", "date", "commit", "sha256 of the weights"} <= {column.name for column in complete.columns}


def test_a_few_images_of_many_classes_have_no_table_by_class_and_no_footnote_about_strategies(tmp_path):
    records = [replace(r, label=r.index) for r in random_records(3)]
    folders = [write_run(tmp_path / name, manifest(count=3), records) for name in ("r-best", "r-last")]
    report = build_report(folders)
    assert "paired-classes" not in {section.key for section in report.sections}
    assert "†" not in report.html()
    assert "no training is known" not in report.html()
    (table,) = (t for s in report.sections for t in s.tables if t.key == "runs")
    assert ([row[0] for row in table.rows], table.columns[1].name) == (["r-best", "r-last"], "images")


def test_detection_is_never_put_beside_recovery_without_a_word(tmp_path):
    runs = [traced(tmp_path, "greedy"), traced(tmp_path, "greedy", **detection())]
    report = build_report([str(one.run.folder) for one in runs])  # text as good as a path
    said = {"run": "run1", "text": "mixed: its certificates are detection, those of run0 recovery"}
    assert report.notices[0] == said
    assert report.write(str(tmp_path / "page")).is_file()
    for wrong in ([], str(tmp_path)):
        with pytest.raises(pp.InputError, match=r"folders must be a list of at least one run folder, .*, not "):
            build_report(wrong)
    shown = {column.name for s in report.sections for t in s.tables if t.key == "runs" for column in t.columns}
    assert {"defence", "guarantee"} <= shown
    groups = [name for name, _ in paper_table(runs).groups]
    assert [group.split(" · ")[2] for group in groups[1:]] == ["patchcleanser (recovery)", "alarm (detection)"]


# What strategies hide


def test_each_strategy_hides_pixels_from_its_own_network(real):
    trained = [(name, read_run(real / name)) for name in ("cutout", "greedy")]
    source, classifier = open_dataset("fashion-mini"), load_checkpoint(real / "greedy" / "checkpoint-last").eval()
    ((picture,),) = (section.pictures for section in worst_masks(trained))
    for words in ("cutout", "greedy 1", "greedy 2", "Ankle boot"):
        assert words in picture.svg
    drawn = [np.asarray(axes.images[0].get_array()) for axes in picture.figure.axes]
    images = torch.from_numpy(np.stack(drawn[:COLUMNS])).permute(0, 3, 1, 2) / 255
    labels = torch.tensor([source.class_names.index(axes.get_xlabel()) for axes in picture.figure.axes[:COLUMNS]])
    keep = pp.masking_strategy("greedy", image_size=(28, 28), generator=torch.Generator())(classifier, images, labels)
    slow = replace(trained[1][1], strategy="grid6x6")  # hundreds of passes
    assert worst_masks([("slow", slow)]) == []
    shade, drawn = np.round(255 * np.array(SHADE)), drawn[-2 * COLUMNS :]
    for shown, visible in zip(drawn, keep.flatten(0, 1), strict=True):
        assert ((shown == shade).all(axis=2) == ~visible[0].numpy()).all()


# The page, in a browser


@pytest.fixture(scope="module")
def reports(real) -> dict[str, Report]:
    everything = [*sorted(real.glob("*/certify-*")), real / "greedy" / "alarm", real / "cutout", real / "greedy"]
    long = [real / "certify-photos-tf_efficientnet_lite0-greedy-seed0-checkpoint-best-3%-3x3", real / "other"]
    words = {f"{part}.class_names": [f"animals of the kind number {n}" for n in range(3)] for part in ("data", "model")}
    for per_axis, folder in zip((3, 6), long, strict=True):
        write_run(folder, manifest(count=30, per_axis=per_axis, **words), random_records(30))
    native = {"config.threat_space": "native", "identity.defense.patch_sizes": [[13, 27], [20, 28]]}
    for what, changes in {"2%-3x3": {}, "40px-native-3x3": native, "2%-3x3-alarm": detection()}.items():
        long.append(real / f"certify-photos-tf_efficientnet_lite0-zoo-{what}-30images")
        write_run(long[-1], manifest(count=30, **changes, **words), random_records(30))
    return {
        "one": build_report([real / "greedy" / "certify-3"], Options(images=3)),
        "several": build_report(everything),
        "long": build_report(long[1::-1]),
        "longer": build_report(long),
    }


def test_a_training_that_cannot_be_drawn_is_named(real, tmp_path):
    shutil.copytree(real / "cutout", tmp_path / "gone")
    shutil.rmtree(tmp_path / "gone" / "checkpoint-last")
    (text,) = re.findall("Left out: [^<]*", build_report([real / "greedy", tmp_path / "gone"]).html())
    assert text.startswith("Left out: gone (cutout); shown are ")


def test_several_real_runs_show_table_curves_and_masks(reports):
    (settings,) = [table for table in reports["one"].tables if table.key == "settings"]
    assert "strategy,greedy\n" in csv_text(settings).replace("\r", "")
    page = reports["several"].html()
    for words in (
        "Strategies",
        "masks per axis",
        "extra passes per image",
        "Validation, certified",
        "What each strategy",
    ):
        assert words in page
    assert "Left out: " not in page
    assert {picture.key for picture in reports["several"].pictures} >= {
        "by-masks", "by-training-cost", "loss", "validation-certified", "validation-undefended", "worst-masks",
    }  # fmt: skip
    for picture in [picture for report in reports.values() for picture in report.pictures]:
        picture.figure.draw_without_rendering()
        for axes in picture.figure.axes:
            x, y = axes.xaxis.label.get_window_extent(), axes.yaxis.label.get_window_extent()
            whole = picture.figure.bbox
            assert whole.x0 <= x.x0 <= x.x1 <= whole.x1, f"a label of {picture.key} is cut off"
            assert whole.y0 <= y.y0 <= y.y1 <= whole.y1, f"a label of {picture.key} is cut off"
    (axes,) = next(p.figure.axes for p in reports["several"].pictures if p.key == "validation-certified")
    assert all(tick == round(tick) for tick in axes.get_xticks())
    assert shortened_name("train-photos-tf_efficientnet_lite0-greedy-seed0", 24) == "train-ph…e0-greedy-seed0"


MEASURE = """<script>addEventListener("load", () => {
  const wide = [...document.querySelectorAll("body *")].filter(e => e.scrollWidth > e.clientWidth + 1 &&
    !["auto", "scroll"].includes(getComputedStyle(e).overflowX) && getComputedStyle(e).display !== "inline" &&
    !e.closest("svg")).map(e => e.className || e.tagName);
  const style = getComputedStyle(document.body);
  const cut = [...document.querySelectorAll(".scroll")].filter(e => e.scrollWidth > e.clientWidth + 1);
  const hinted = cut.every(e => getComputedStyle(e).backgroundAttachment.includes("local"));
  const half = [...document.querySelectorAll(".figures, .beside, .tiles")].filter(e => {
    const free = e.getBoundingClientRect().right - e.lastElementChild.getBoundingClientRect().right;
    return innerWidth > 1000 && e.children.length > 1 && free > e.clientWidth / 3;
  }).map(e => `${e.className} in ${e.closest("section")?.id}`);
  const thin = [...document.querySelectorAll("tbody th")].filter(e => e.innerText.length > 40 && e.clientWidth < 200);
  const broken = [...document.images].filter(i => !i.naturalWidth).length;
  parent.postMessage(JSON.stringify([NAME, innerWidth, document.documentElement.scrollWidth, style.backgroundColor,
    broken, wide, cut.map(e => e.ariaLabel), half, hinted, thin.length]), "*");
});</script></body>"""
# Chromium's windows are at least 500 pixels wide; a frame can be as narrow as a telephone.
FRAME = """<script>addEventListener("message", event => { document.title += event.data; });</script>
""" + "".join(
    f'<iframe src="{name}.html" width="WIDTH" height="2000" style="border: 0"></iframe>'
    for name in ("one", "several", "long", "longer")
)


@pytest.mark.skipif(CHROMIUM is None, reason="NO BROWSER: install Debian's `chromium` to open the report in one")
@pytest.mark.parametrize(("width", "dark"), [(390, True), pytest.param(1280, False, marks=pytest.mark.slow)])
def test_the_pages_open_in_a_browser_without_errors_and_fit_its_width(reports, tmp_path, width, dark):
    (tmp_path / "frame.html").write_text(FRAME.replace("WIDTH", str(width)))
    for name, report in reports.items():
        measured = report.html().replace("</body>", MEASURE.replace("NAME", f'"{name}"'))
        (tmp_path / f"{name}.html").write_text(measured, encoding="utf-8")
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
    found = [json.loads(f"[{measured}]") for measured in title.strip("[]").split("][")]
    assert {name for name, *_ in found} == set(reports)
    for name, inner, needed, background, broken, wide, cut, half, hinted, thin in found:
        assert inner == width
        assert needed <= width
        assert wide == []
        assert hinted
        assert thin == 0, "a long name is a tower of syllables"
        assert half == [], "the last row has a figure where two would fit"
        assert not (width == 1280 and name != "several" and cut)
        assert broken == 0
        assert background == ("rgb(20, 22, 26)" if dark else "rgb(255, 255, 255)")
