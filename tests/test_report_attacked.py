"""Reports of attacks: both bounds on robust accuracy, and a loud word where a certificate broke."""

from __future__ import annotations

import base64
import io
import json
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from patchproof.data import open_dataset
from patchproof.report import build_report
from patchproof.report._counts import attacked_rates
from patchproof.runs._reading import read_run
from patchproof.runs._record import ATTACK_ACCURACIES, Rate, Record
from patchproof.settings import AttackPlan
from run_folders import attacked_records, detection, manifest, random_records, write_run


def pixels_of(uri: str) -> np.ndarray:
    return np.array(Image.open(io.BytesIO(base64.b64decode(uri.split(",")[1]))))


def attacked(report):
    return next(section for section in report.sections if section.key == "attacked")


def fallen(record: Record, **changes) -> Record:
    return replace(record, attack=replace(record.attack, **changes))


@pytest.fixture
def folder(tmp_path):
    return write_run(tmp_path / "attack", manifest(count=60, command="attack"), attacked_records(60))


@pytest.fixture
def pets(tmp_path):
    """Real images, the manifest of an attack on them, and its records."""
    data = tmp_path / "pets"
    for index in range(30):
        path = data / ("cat", "dog", "eel")[index % 3] / f"{index:02d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((28, 28, 3), 8 * index, np.uint8)).save(path)
    source = open_dataset(str(data))
    content = manifest(count=30, command="attack")
    content["config"]["dataset"] = str(data)
    content["identity"]["data_sha256"] = source.listing_sha256()
    return content, [replace(r, path=source.path(r.index)) for r in attacked_records(30)]


def test_how_strong_the_attack_was_is_said(pets, tmp_path):
    content, records = pets
    content["identity"]["attack"] = vars(AttackPlan(steps=10, target="defended", place_search="grid"))
    made = next(
        s for s in build_report([write_run(tmp_path / "attack", content, records)]).sections if s.key == "settings"
    )
    facts = dict(made.tables[0].rows)
    for words in (
        "target defended",
        "steps 10",
        "step_size 0.1",
        "restarts 2",
        "place_search grid",
        "places 4",
        "seed 0",
    ):
        assert words in facts["attack"].split(", ")


def test_all_five_accuracies_are_counted_from_the_records(folder):
    plain = {name: Rate(sum(r.finding(name) for r in attacked_records(60)), 60) for name in ATTACK_ACCURACIES}
    assert attacked_rates(read_run(folder)) == plain
    report = build_report([folder])
    (table,) = (table for table in report.tables if table.key == "attacked")
    assert [value for _, value in table.rows] == [*(plain[name] for name in ATTACK_ACCURACIES), 0, 6000]
    assert report.sections[0].key == "attacked"
    assert not [notice for notice in report.notices if "broken" in notice["text"]]
    text = "".join(ElementTree.fromstring(report.pictures[0].svg_file).itertext())
    for words in ("n = 60", "images (%)", "defended, attacked", "recovery"):
        assert words in text


def test_a_broken_certificate_stands_at_the_top_and_is_shown_first_and_as_wrong(pets, tmp_path):
    content, records = pets
    victim = [i for i, record in enumerate(records) if record.certified][-1]
    wrong = (records[victim].label + 1) % 3
    records[victim] = fallen(records[victim], attacked=False, place=(0, 0, 5, 5), attacked_label=wrong)
    report = build_report([write_run(tmp_path / "attack", content, records)])
    assert (
        f"1 certified image was broken by a patch, which a certificate rules out: image {victim}"
        in (report.notices[0]["text"])
    )
    page = report.html()
    assert page.index("certified image was broken") < page.index('class="tiles"')
    ((_, cards),) = attacked(report).cards
    assert (cards[0].title, cards[0].certified) == (records[victim].path, True)
    shown = page[page.index("The defence, changed by a patch") :].partition("</figure>")[0]
    assert f'<dd class="wrong">{cards[0].answered}</dd>' in shown


def test_images_whose_answer_changed_are_shown_with_the_place(pets, tmp_path):
    content, records = pets
    report = build_report([write_run(tmp_path / "attack", content, records)])
    fell = [record for record in records if record.attack.place]
    ((title, cards),) = attacked(report).cards
    assert (title, len(fell) > 0) == ("The defence, changed by a patch", True)
    assert [card.title for card in cards] == [record.path for record in fell][:8]
    assert all((c.rects[0].top, c.rects[0].left, c.rects[0].height) == (3, 4, 5) for c in cards)
    assert all(card.how == "where the patch was" for card in cards)
    assert all(card.margin is None for card in cards), "the margin of the certificate is not that of the patched image"


def test_kept_patches_are_pasted_where_they_were_and_damaged_ones_leave_the_place_blank(pets, tmp_path):
    content, records = pets
    folder = write_run(tmp_path / "attack", content, records)
    fell = [record.index for record in records if record.attack.place]
    alone = [r.index for r in records if r.undefended and not r.attack.undefended_attacked]
    patch = torch.rand(3, 5, 5, generator=torch.Generator().manual_seed(0))
    (folder / "patches").mkdir()
    for index in {*fell[1:], *alone}:
        kept = {}
        for name, place in (("defended", (3, 4, 5, 5)), ("undefended", (20, 1, 5, 5))):
            kept |= {name: patch.clone(), f"{name}_place": torch.tensor(place), f"{name}_label": torch.tensor(0)}
        save_file(kept, folder / "patches" / f"{index}.safetensors")
    (folder / "patches" / f"{fell[0]}.safetensors").write_bytes(b"\0" * 40)
    save_file(kept | {"defended_place": torch.tensor((0, 0, 5, 5))}, folder / "patches" / f"{fell[1]}.safetensors")
    report = build_report([folder])
    (_, defended), (title, undefended) = attacked(report).cards
    assert title == "The classifier alone, changed by a patch"
    blank, shown = "where the patch was", "with the patch"
    assert [card.how for card in defended[:3]] == [blank, blank, shown]  # damaged; of another place; kept
    wanted = (255 * patch).round().permute(1, 2, 0).byte().numpy()
    for card, (top, left) in ((defended[2], (3, 4)), (undefended[-1], (20, 1))):
        before, after = pixels_of(card.image), pixels_of(card.masked)
        assert (after[top : top + 5, left : left + 5] == wanted).all()
        after[top : top + 5, left : left + 5] = before[top : top + 5, left : left + 5]
        assert (after == before).all()
    assert "blank if the patch was not kept" in attacked(report).words[-1]
    assert defended[2].masked in report.html()


def test_a_place_outside_the_image_costs_the_card_and_not_the_page(pets, tmp_path):
    content, records = pets
    for number, place in enumerate([(100, 100, 5, 5), (0, 0, 0, 0), (25, 25, 9, 9)]):
        moved = [fallen(r, place=place if r.attack.place else None) for r in records]
        report = build_report([write_run(tmp_path / str(number), content, moved)])
        assert attacked(report).cards == []
    assert "defended, attacked" in report.html()


@pytest.mark.parametrize("place", [20, (20, 1, 5), (20, 1, 5, 5, 5), ((20, 1, 5, 5),)])
def test_a_kept_place_that_is_none_costs_the_card_and_not_the_page(pets, tmp_path, place):
    content, records = pets
    folder = write_run(tmp_path / "attack", content, [fallen(record, place=None) for record in records])
    (folder / "patches").mkdir()
    kept = {"undefended": torch.rand(3, 5, 5), "undefended_label": torch.tensor(0)}
    for record in records:
        save_file(kept | {"undefended_place": torch.tensor(place)}, folder / "patches" / f"{record.index}.safetensors")
    assert attacked(build_report([folder])).cards == []


def test_attacks_stand_beside_certifications(folder, tmp_path):
    plain = write_run(tmp_path / "certify", manifest(count=60), random_records(60))
    (table,) = attacked(build_report([plain, folder])).tables
    assert dict(table.rows)["attacked copies"] == 6000
    content = manifest(count=60, command="attack", **detection())
    other = write_run(tmp_path / "again", content, attacked_records(60, seed=1))
    (table,) = attacked(build_report([folder, other])).tables
    assert [(row[0], row[-1]) for row in table.rows] == [("attack", 6000), ("again", 6000)]
    assert "the right label or an alarm under any such patch; certified (recovery) =" in table.notes[0]


def test_what_was_not_attacked_has_no_number(tmp_path):
    """Neither has a defence without a classifier an undefended one."""
    records = [replace(r, undefended=None) for r in attacked_records(30)]
    records = [fallen(r, attacked=None, place=None, undefended_attacked=None) for r in records]
    folder = write_run(tmp_path / "attack", manifest(count=30, command="attack"), records)
    run = read_run(folder)
    assert set(attacked_rates(run)) == {"defended", "certified"}
    section = attacked(build_report([folder]))
    (table,), (picture,) = section.tables, section.pictures
    assert picture.svg
    assert dict(table.rows)["defended, attacked"] is dict(table.rows)["undefended"] is None
    assert "attacked</text>" not in picture.svg  # a legend of what has no point


def test_images_that_were_not_attacked_count_as_clean_in_the_upper_bound(tmp_path):
    """Attacks on certified images alone see few images: the rate over those would be no bound on anything."""
    records = [r if r.certified else fallen(r, attacked=None, place=None) for r in attacked_records(60)]
    folder = write_run(tmp_path / "attack", manifest(count=60, command="attack"), records)
    rates = attacked_rates(read_run(folder))
    assert {rate.n for rate in rates.values()} == {60}
    assert rates["attacked"] == rates["defended"]  # no certified image fell
    assert rates["certified"].k < rates["attacked"].k
    (table,) = attacked(build_report([folder])).tables
    certified = sum(bool(r.certified) for r in records)
    assert f"attack: {certified} of 60 images were attacked behind the defence" in table.notes[1]


def test_results_that_contradict_the_records_about_attacks_are_found_out(folder):
    path = folder / "results.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"attacked": {"k": 1, "n": 60}}))
    (notice,) = read_run(folder).notices
    assert "results.json contradicts the records" in notice
    assert "attacked 1 of 60" in notice
