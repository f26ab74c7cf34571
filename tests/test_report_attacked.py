"""Reports of attacks: both bounds on robust accuracy, and a loud word where a certificate broke."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from patchproof.data import open_dataset
from patchproof.records import ATTACK_ACCURACIES, AttackRecord, Rate
from patchproof.report import build_report
from patchproof.report._attacked import attacked_rates, bounds_picture
from patchproof.report._runs import load_runs
from run_folders import manifest, random_records, write_run


def attacked_records(count: int, *, seed: int = 0) -> list[AttackRecord]:
    """Every third answer that is not certified falls, and of the bare classifier's every second."""
    found = []
    for record in random_records(count, seed=seed):
        falls = bool(record.defended) and not record.certified and record.index % 3 == 0
        fields = {f: getattr(record, f) for f in asdict(record)}
        attack = AttackRecord(
            **fields,
            undefended_attacked=bool(record.undefended) and record.index % 2 == 0,
            attacked=bool(record.defended) and not falls,
            passes=100,
            queries=4,
        )
        patch = {"place": (3, 4, 5, 5), "attacked_label": (record.label + 1) % 3} if falls else {}
        found.append(replace(attack, **patch))
    return found


@pytest.fixture
def folder(tmp_path):
    return write_run(tmp_path / "attack", manifest(count=60, command="attack"), attacked_records(60))


@pytest.fixture
def pets(tmp_path):
    """Real images, and the manifest of an attack on them."""
    data = tmp_path / "pets"
    for index in range(30):
        path = data / ("cat", "dog", "eel")[index % 3] / f"{index:02d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((28, 28, 3), 8 * index, np.uint8)).save(path)
    source = open_dataset(str(data))
    content = manifest(count=30, command="attack")
    content["config"]["dataset"] = str(data)
    content["identity"]["data_sha256"] = source.listing_sha256()
    return source, content


def records_of(source) -> list[AttackRecord]:
    found = attacked_records(30)
    labels = [int(source.labels[r.index]) for r in found]
    return [
        replace(r, path=source.path(r.index), label=label, attacked_label=(label + 1) % 3 if r.place else None)
        for r, label in zip(found, labels, strict=True)
    ]


def test_all_five_accuracies_are_counted_from_the_records(folder):
    (run,), _ = load_runs([folder])
    records = attacked_records(60)
    plain = {name: Rate(sum(getattr(r, name) for r in records), 60) for name in ATTACK_ACCURACIES}
    assert attacked_rates(run) == plain
    report = build_report([folder])
    (table,) = [table for table in report.tables if table.key == "attacked"]
    assert [value for _, value in table.rows] == [*(plain[name] for name in ATTACK_ACCURACIES), 0, 6000]


def test_the_page_of_one_attack_has_the_bounds_first_and_no_alarm(folder):
    report = build_report([folder])
    assert report.page.sections[0].key == "attacked"
    assert not [notice for notice in report.notices if "broken" in notice.text]
    text = "".join(ElementTree.fromstring(report.pictures[0].svg_file).itertext())
    assert "n = 60" in text
    assert "images (%)" in text
    assert "defended, attacked" in text


def test_a_broken_certificate_stands_at_the_top(tmp_path):
    records = attacked_records(60)
    victim = next(i for i, record in enumerate(records) if record.certified)
    records[victim] = replace(records[victim], attacked=False, place=(0, 0, 5, 5), attacked_label=2)
    folder = write_run(tmp_path / "attack", manifest(count=60, command="attack"), records)
    report = build_report([folder])
    assert "1 certified image was broken by a patch" in report.notices[0].text
    assert str(victim) in report.notices[0].text
    page = report.write(tmp_path / "page").read_text("utf-8")
    assert page.index("certified image was broken") < page.index('class="tiles"')


def test_attacks_stand_beside_certifications(folder, tmp_path):
    plain = write_run(tmp_path / "certify", manifest(count=60), random_records(60))
    report = build_report([plain, folder])
    (section,) = [section for section in report.page.sections if section.key == "attacked"]
    assert dict(section.tables[0].rows)["attacked copies"] == 6000
    other = write_run(tmp_path / "again", manifest(count=60, command="attack"), attacked_records(60, seed=1))
    (section,) = [section for section in build_report([folder, other]).page.sections if section.key == "attacked"]
    assert [(row[0], row[-1]) for row in section.tables[0].rows] == [("attack", 6000), ("again", 6000)]


def test_a_target_that_was_not_attacked_has_no_number(tmp_path):
    records = [replace(r, attacked=None, place=None, attacked_label=None) for r in attacked_records(30)]
    folder = write_run(tmp_path / "attack", manifest(count=30, command="attack"), records)
    (run,), _ = load_runs([folder])
    assert attacked_rates(run)["attacked"].n == 0
    assert bounds_picture([run]).svg
    (table,) = [table for table in build_report([folder]).tables if table.key == "attacked"]
    assert dict(table.rows)["defended, attacked"] is None


def test_images_that_were_not_attacked_count_as_clean_in_the_upper_bound(tmp_path):
    """`--only-certified` attacks few images: the rate over those alone would be no bound on anything."""
    records = [r if r.certified else replace(r, attacked=None, place=None) for r in attacked_records(60)]
    folder = write_run(tmp_path / "attack", manifest(count=60, command="attack"), records)
    (run,), _ = load_runs([folder])
    rates = attacked_rates(run)
    assert {rate.n for rate in rates.values()} == {60}
    assert rates["certified"].k <= rates["attacked"].k <= rates["defended"].k
    (table,) = [table for table in build_report([folder]).tables if table.key == "attacked"]
    certified = sum(bool(r.certified) for r in records)
    assert f"attack: {certified} of 60 images were attacked behind the defence" in table.notes[1]


def test_a_record_without_attacks_among_them_is_said_and_left_out(tmp_path):
    records = [*attacked_records(59), random_records(60)[59]]
    folder = write_run(tmp_path / "attack", manifest(count=60, command="attack"), records)
    report = build_report([folder])
    assert "1 record says nothing about attacks" in report.notices[0].text
    (run,), _ = load_runs([folder])
    assert attacked_rates(run)["attacked"].n == 59


def test_results_that_contradict_the_records_about_attacks_are_found_out(folder):
    path = folder / "results.json"
    rates = {n: {"k": 1, "n": 60} for n in ("attacked", "undefended_attacked")}
    path.write_text(json.dumps(json.loads(path.read_text()) | rates))
    (run,), _ = load_runs([folder])
    assert any(
        "results.json contradicts the records" in notice and "attacked 1 of 60" in notice for notice in run.notices
    )


@pytest.mark.parametrize("place", [(100, 100, 5, 5), (0, 0, 0, 0), (25, 25, 9, 9)])
def test_a_place_outside_the_image_costs_the_card_and_not_the_page(pets, tmp_path, place):
    source, content = pets
    records = [replace(r, place=place if r.place else None) for r in records_of(source)]
    report = build_report([write_run(tmp_path / "attack", content, records)])
    (section,) = [section for section in report.page.sections if section.key == "attacked"]
    assert section.gallery is None or not section.gallery.changed
    assert report.write(tmp_path / "page").is_file()


def test_a_broken_certificate_is_shown_first_and_as_wrong(pets, tmp_path):
    source, content = pets
    records = records_of(source)
    victim = [i for i, record in enumerate(records) if record.certified][-1]
    wrong = (records[victim].label + 1) % 3
    records[victim] = replace(records[victim], attacked=False, place=(0, 0, 5, 5), attacked_label=wrong)
    report = build_report([write_run(tmp_path / "attack", content, records)])
    (section,) = [section for section in report.page.sections if section.key == "attacked"]
    card = section.gallery.changed[0]
    assert card.title == records[victim].path
    assert card.certified
    assert not card.right


def test_images_whose_answer_changed_are_shown_with_the_place(pets, tmp_path):
    source, content = pets
    records = records_of(source)
    folder = write_run(tmp_path / "attack", content, records)
    (section,) = [section for section in build_report([folder]).page.sections if section.key == "attacked"]
    fallen = [record for record in records if record.place]
    assert fallen
    assert section.gallery is not None
    assert [card.title for card in section.gallery.changed] == [record.path for record in fallen][:8]
    assert all((c.rects[0].top, c.rects[0].left, c.rects[0].height) == (3, 4, 5) for c in section.gallery.changed)
    assert all(card.how == "where the patch lay" for card in section.gallery.changed)
