"""Reports: numbers that equal a slow reference, pages that load nothing, and every doubt about a run said."""

from __future__ import annotations

import csv
import io
import json
import re
import time
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from patchproof.cli import run as command
from patchproof.models import sealed
from patchproof.report import Options, Report, build_report, notice_groups
from patchproof.report._figures import COLOURS, INK, line_picture, series_style
from patchproof.report._tables import Column, Table, csv_text, latex, markdown
from patchproof.runs._folder import RunFolder
from patchproof.runs._reading import class_words, read_run, read_runs
from patchproof.runs._record import Rate, Record
from patchproof.runs._status import run_status
from patchproof.types import CheckError, InputError, printable
from run_folders import CLASSES, detection, manifest, random_records, write_run, write_training

VOID = {"meta", "img", "br", "link", "input", "hr"}


class Parsed(HTMLParser):
    """Tags that must close, addresses that are loaded, ids, and the text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.loaded: list[str] = []
        self.links: list[str] = []
        self.ids: list[str] = []
        self.images_without_words = 0
        self.text = ""
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        values = dict(attrs)
        self.tags.append(tag)
        self.ids += [values["id"]] if "id" in values else []
        addresses = [
            values[name] for name in ("src", "xlink:href", "href", "srcset", "data", "poster") if name in values
        ]
        self.links += [address for address in addresses if address.startswith("#")]
        self.loaded += [address for address in addresses if not address.startswith("#")]
        self.images_without_words += tag == "img" and not values.get("alt")
        assert not [name for name in values if name.startswith("on")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] != ["style"]:
            self.text += data


def shown(report: Report) -> Parsed:
    return Parsed(report.html())


def table(report: Report, key: str) -> list[dict[str, str]]:
    found = next(t for t in report.tables if t.key == key)
    return list(csv.DictReader(io.StringIO(csv_text(found))))


def texts(report: Report) -> list[str]:
    return [notice["text"] for notice in report.notices]


@pytest.fixture
def folder(tmp_path) -> Path:
    return write_run(tmp_path / "run", manifest(count=60), random_records(60))


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    """Such a folder that nothing changes."""
    return write_run(tmp_path_factory.mktemp("sound") / "run", manifest(count=60), random_records(60))


@pytest.fixture(scope="module")
def report(sound) -> Report:
    """Of that folder, with figures that are drawn once."""
    return build_report([sound])


@pytest.fixture(scope="module")
def lines(sound) -> list[dict]:
    return [json.loads(line) for line in (sound / "records.jsonl").read_text().splitlines()]


def assert_rate(row: dict[str, str], name: str, k: int, n: int) -> None:
    assert (int(row[f"{name} k"]), int(row[f"{name} n"]), float(row[f"{name} rate"])) == (k, n, k / n)
    assert (float(row[f"{name} low"]), float(row[f"{name} high"])) == Rate(k, n).interval


# Numbers


def test_accuracies_and_classes_equal_a_plain_count_of_the_lines(report, lines):
    for row in table(report, "accuracies"):
        k = sum(line[row["accuracy"]] for line in lines)
        assert_rate(row, "rate (95% interval)", k, 60)
        assert row["images"] == f"{k} of 60"
    rows = table(report, "classes")
    assert [row["class"] for row in rows] == list(CLASSES)
    for label, row in enumerate(rows):
        mine = [line for line in lines if line["label"] == label]
        for name in ("undefended", "defended", "certified"):
            assert_rate(row, name, sum(line[name] for line in mine), len(mine))


def test_margins_and_cost_equal_plain_sorting(report, lines):
    for row, certified in zip(table(report, "margins"), (True, False), strict=True):
        values = sorted(line["margin"] for line in lines if line["certified"] == certified)
        middle = (values[(len(values) - 1) // 2] + values[len(values) // 2]) / 2
        assert (int(row["images"]), float(row["smallest"])) == (len(values), values[0])
        assert (float(row["median"]), float(row["largest"])) == (pytest.approx(middle), values[-1])
    cost = {row["what"]: row["how much"] for row in table(report, "cost")}
    total = sum(line["forwards"] for line in lines)
    assert cost["passes, all images"] == f"{total:,}"
    assert cost["passes per image, mean"] == f"{total / 60:.1f}"
    assert cost["different masked copies per image"] == "45"
    assert (cost["time"], cost["images per second"]) == ("12.5 s", "4.8")


def test_the_histogram_of_margins_holds_every_image(tmp_path):
    records = [replace(r, margin=1e6 if r.index == 0 else r.margin) for r in random_records(60)]
    (picture,) = [
        p for p in build_report([write_run(tmp_path / "r", manifest(count=60), records)]).pictures if p.key == "margins"
    ]
    (axes,) = picture.figure.axes
    heights = [height for bars in axes.patches for height in bars.get_data().values]
    assert sum(heights) == pytest.approx(100)


@pytest.mark.parametrize("largest", [0.022, 0.0, 50.0])
def test_no_bin_of_the_histogram_of_margins_has_both_signs(tmp_path, largest):
    records = random_records(60)
    records = [replace(r, certified=r.index == 0, margin=-r.index / 7 if r.index else largest) for r in records]
    pictures = build_report([write_run(tmp_path / "r", manifest(count=60), records)]).pictures
    (axes,) = next(p for p in pictures if p.key == "margins").figure.axes
    for bars, signs in zip(axes.patches, ({True}, {False}), strict=True):
        heights, edges, _ = bars.get_data()
        assert {bool(edges[i] >= 0) for i, height in enumerate(heights) if height} == signs
        assert sum(heights) == pytest.approx(100 * len([r for r in records if r.certified in signs]) / 60)


# Tables and words


def example() -> Table:
    columns = (Column("class"), Column("n"), Column("defended", group="a & b"), Column("certified", group="a & b"))
    rows = (("5% _x_ | <b>", 3, Rate(1, 3), None), ("$y$\\z", 4, Rate(4, 4), Rate(0, 0)))
    return Table("t", "A #1 table", columns, rows, ("a note",))


def test_markdown_has_one_cell_per_column_and_no_markup_from_names():
    lines = [line for line in markdown(example()).splitlines() if line.startswith("|")]
    cells = [re.split(r"(?<!\\)\|", line)[1:-1] for line in lines]
    assert {len(row) for row in cells} == {4}
    assert cells[0][2].strip() == "a &amp; b: defended"
    assert cells[2] == [r" 5% \_x\_ \| &lt;b&gt; ", " 3 ", " 33.3% (0.8–90.6%) ", " – "]
    assert cells[3][3].strip() == "no images"


def test_latex_escapes_what_tex_would_read():
    text = latex(example())
    assert r"5\% \_x\_ \textbar{} \textless{}b\textgreater{} & 3 & 33.3\% (0.8--90.6\%) & -- \\" in text
    assert r"\$y\$\textbackslash{}z & 4" in text
    assert r"\multicolumn{2}{l}{a \& b}" in text
    assert text.count("{") == text.count("}")


def test_words_are_one_printable_line():
    assert printable("a\nb\x1b\udcff é") == "a\\nb\\x1b\\udcff é"
    words = class_words({0: "n01440764", 1: "n02012849", 2: "n03126707", 3: "n99999999", 4: "eel"})
    assert words == {0: "tench", 1: "crane (n02012849)", 2: "crane (n03126707)", 3: "n99999999", 4: "eel"}


def test_folders_are_named_by_where_they_differ_and_read_once(folder, tmp_path):
    for name in ("a/x", "b/x", "b/y"):
        write_run(tmp_path / name, manifest(count=3), random_records(3))
    folders = [tmp_path / name for name in ("a/x", "b/x", "b/y", "b/../a/x")]
    assert [run.name for run in read_runs(folders)[0]] == ["a/x", "b/x", "y"]


def test_a_notice_about_several_runs_is_said_once():
    said = [*((name, "late") for name in "abcde"), ("a", "odd"), ("", "mixed")]
    groups = notice_groups([{"run": run, "text": text} for run, text in said])
    assert groups == {"a, b, c and 2 more": ["late"], "a": ["odd"], "": ["mixed"]}


# Figures


def test_series_and_bars_differ_in_black_and_white(report):
    styles = [series_style(number) for number in range(30)]
    assert len({(style["marker"], style["linestyle"]) for style in styles}) == 30
    assert {style["color"] for style in styles} == set(COLOURS)
    (picture,) = [p for p in report.pictures if p.key == "margins"]
    assert f"fill: {COLOURS[0].lower()}" in picture.svg
    assert "<pattern" in picture.svg


def test_figures_have_axes_units_n_and_text_that_is_text(report):
    units = {"classes": "images of the class (%)", "margins": "margin (logits)"}
    units["failing-masks"] = "images without a certificate (%)"
    failed = sum(not record.certified for record in random_records(60))
    assert {picture.key for picture in report.pictures} == set(units)
    for picture in report.pictures:
        found = [
            "".join(t.itertext()) for t in ElementTree.fromstring(picture.svg_file).iter() if t.tag.endswith("text")
        ]
        assert any(text.startswith(units[picture.key]) for text in found)
        assert any(f"n = {failed if picture.key == 'failing-masks' else 60}" in text for text in found)
        assert "95%" in picture.alt or "istogram" in picture.alt
        assert INK not in picture.inline
        assert picture.png.startswith(b"\x89PNG")


@pytest.mark.parametrize("letters", [8, 13, 14, 15, 22, 23, 24, 26, 60, 100])
def test_legends_fit_into_the_figure(letters):
    words = ("39×39 px (3.0%) of masks " * 5)[:letters]
    series = {f"{number}{words[1:]}": [Rate(5, 10), Rate(6, 10)] for number in range(3)}
    picture = line_picture("lines", "Lines, n = 10", series, "x", "y", ticks=[1, 2])
    assert picture.svg
    (legend,) = picture.figure.legends
    assert legend.get_window_extent().x0 >= 0
    assert legend.get_window_extent().x1 <= picture.figure.bbox.x1


def test_class_names_in_any_script_are_drawn_without_a_warning(tmp_path, recwarn):
    run = write_run(tmp_path / "r", manifest(count=30, classes=["猫", "犬", "鰻"]), random_records(30))
    (picture,) = [p for p in build_report([run]).pictures if p.key == "classes"]
    assert "猫 (n =" in picture.svg
    assert picture.png
    assert not [str(warning.message) for warning in recwarn if "Glyph" in str(warning.message)]


def test_more_classes_than_fit_are_ranked(tmp_path):
    names = [f"k{i}" for i in range(90)]
    run = write_run(tmp_path / "r", manifest(count=900, classes=names), random_records(900, classes=90))
    report = build_report([run])
    (picture,) = [p for p in report.pictures if p.key == "classes"]
    (shown,) = [t for s in report.sections for t in s.tables if t.key == "classes"]
    assert (len(shown.rows), len(table(report, "classes"))) == (20, 90)
    assert all(f"{row[0]} (n = {row[1]})" in picture.svg for row in shown.rows)
    rates = [row[2].rate for row in shown.rows]
    everything = sorted(float(row["certified rate"]) for row in table(report, "classes"))
    assert rates == pytest.approx([*everything[:10], *everything[-10:]])


# The page


def test_the_page_is_complete_and_loads_nothing(report, sound, tmp_path):
    several = build_report([sound, write_training(tmp_path / "trained")], Options(title="My title"))
    for source in (replace(report, title="My title").html(), several.html()):
        page = Parsed(source)
        assert page.ids
        assert len(page.ids) == len(set(page.ids))
        assert all(address.startswith("data:image/") for address in page.loaded)
        assert {address[1:] for address in page.links} <= set(page.ids)
        assert not {"script", "link", "iframe", "object", "embed", "base"} & set(page.tags)
        assert page.images_without_words == 0
        assert "My title" in page.text
        assert not re.search(r"@import|url\((?!#)", source)
        assert not re.findall(r"https?://(?!www\.w3\.org/)", source)


def test_every_accuracy_is_on_the_page_with_its_guarantee(report):
    page = shown(report)
    for row in table(report, "accuracies"):
        assert f"{100 * float(row['rate (95% interval) rate']):.1f}%" in page.text
        assert f"{row['images']} images" in page.text
    assert report.subtitle.startswith("Certified recovery against one patch of 5×5 px (3.2%)")
    assert "clean images, through double masking" in page.text
    assert page.text.count("certified (recovery) = the right label under any such patch.") == 1
    assert "certified (recovery)" in report.pictures[0].svg


def test_names_and_paths_are_shown_as_text_whatever_they_hold(tmp_path):
    evil = ["<script>alert(1)</script>", "a&b\"'$x_1^2$", "line\nbreak\x1b"]
    elements = {"script", "marquee", "blink", "iframe"}
    content = manifest(count=30, classes=evil, **{"data.name": "<img src=x onerror=alert(1)>"})
    content["config"]["weights"] = "</style><blink>&\udcff"
    content["identity"]["defense"]["name"] = "<iframe>"
    run = write_run(tmp_path / "r<marquee>&\udcff", content, random_records(30))
    other = write_run(tmp_path / "other", content, random_records(30))
    title = "</title><script>1</script>"
    one, two = (build_report(runs, Options(title=title)) for runs in ([run], [run, other]))
    single = Parsed(one.write(tmp_path / "out").read_text("utf-8"))
    for page in (single, shown(two)):
        assert not elements & set(page.tags)
        assert title in page.text
        assert not [address for address in page.loaded if not address.startswith("data:")]
    for words in (evil[0], evil[1], "line\\nbreak\\x1b", "</style><blink>&\\udcff", "the defence <iframe>"):
        assert words in single.text
    for figure in (tmp_path / "out" / "figures").glob("*.svg"):
        ElementTree.parse(figure)
    assert "&lt;script&gt;" in (tmp_path / "out" / "tables" / "classes.md").read_text("utf-8")
    assert r"\textless{}script\textgreater{}" in (tmp_path / "out" / "tables" / "classes.tex").read_text("utf-8")


@pytest.mark.slow
def test_the_same_runs_give_the_same_bytes(folder, tmp_path):
    train = write_training(tmp_path / "trained")
    for name in ("one", "two"):
        build_report([folder, train]).write(tmp_path / name)
    files = sorted(p.relative_to(tmp_path / "one") for p in (tmp_path / "one").rglob("*") if p.is_file())
    assert {path.suffix for path in files} == {".html", ".svg", ".png", ".md", ".csv", ".tex", ".json"}
    assert files == sorted(p.relative_to(tmp_path / "two") for p in (tmp_path / "two").rglob("*") if p.is_file())
    for path in files:
        assert (tmp_path / "one" / path).read_bytes() == (tmp_path / "two" / path).read_bytes(), path


@pytest.mark.slow
@pytest.mark.parametrize(("count", "classes"), [(1_200, 120), (50_000, 1000)])
def test_many_records_take_seconds_and_stay_small(tmp_path, count, classes):
    names = [f"class {i}" for i in range(classes)]
    content = manifest(count=count, classes=names, side=224, patch=39, per_axis=6)
    run = write_run(tmp_path / "r", content, random_records(count, classes=classes, masks=36))
    started = time.monotonic()
    page = build_report([run]).write(tmp_path / "out")
    assert time.monotonic() - started < 60
    assert page.stat().st_size < 10_000_000
    assert f"{count:,}" in page.read_text("utf-8")


# Any defence


def test_detection_is_named_everywhere_and_double_masking_nowhere(tmp_path):
    run = write_run(tmp_path / "r", manifest(count=60, **detection()), random_records(60))
    report = build_report([run])
    page = shown(report)
    assert report.subtitle.startswith("Certified detection against one patch of")
    for words in (
        "certified (detection) = the right label or an alarm under any such patch.",
        "clean images, through the defence alarm",
        "The margin says how far the certificate is from failing",
    ):
        assert words in page.text
    assert not re.search("double masking|pairs of masks|recover|masked copies per image", page.text)


def test_a_defence_without_classifier_or_masks_has_a_page(tmp_path):
    """Its records have no undefended answer and evidence of another kind; it may not even say its patch."""
    content = manifest(count=40) | {"model": None, "tau": None, "config": {}}
    del content["masks"]
    content["identity"] |= {"architecture": None, "weights_sha256": None, "defense": {"name": "votes"}}
    content["data"]["class_names"] = []
    records = [replace(r, undefended=None, evidence={"votes": [3, r.index]}) for r in random_records(40)]
    report = build_report([write_run(tmp_path / "r", content, records)])
    page = shown(report)
    assert report.title == "votes on pets"
    assert [row["accuracy"] for row in table(report, "accuracies")] == ["defended", "certified"]
    assert list(table(report, "classes")[0])[-5:] == [f"defended {part}" for part in ("k", "n", "rate", "low", "high")]
    for words in ("class 2", "no masks", "not measured", "The run does not say where its images are"):
        assert words in page.text
    assert not re.search("undefended|logits|masked", page.text.partition("Made by")[0])


# Doubts


def rewrite_manifest(**changes: object) -> Callable[[Path], object]:
    return lambda folder: (folder / "manifest.json").write_text(json.dumps(sealed(manifest(count=60) | changes)))


def change_a_digit(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"images": "60 of 60"', '"images": "61 of 61"'))


def enlarge_the_patch(folder: Path) -> None:
    """Without its seal, the manifest would state a guarantee that nobody measured."""
    path = folder / "manifest.json"
    edited = json.loads(path.read_text().replace('"patch_sizes": [[5, 5]]', '"patch_sizes": [[9, 9]]'))
    assert edited["identity"]["defense"]["patch_sizes"] == [[9, 9]]
    path.write_text(json.dumps({key: value for key, value in edited.items() if key != "seal"}))


REFUSED: list[tuple[Callable[[Path], object], str]] = [
    (lambda f: (f / "manifest.json").unlink(), r"manifest.json is missing, so what the run measured is not known; r"),
    (lambda f: (f / "manifest.json").write_text("[1"), r"manifest.json is damaged"),
    (lambda f: (f / "manifest.json").write_text("[1]"), r"manifest.json is damaged: no JSON object"),
    (lambda f: (f / "manifest.json").write_text('{"name": "an app"}'), r"manifest.json is not the manifest of a run"),
    (change_a_digit, r"manifest.json is damaged: not what was written; restore it from a copy, or begin a new run"),
    (enlarge_the_patch, r"manifest.json is damaged: not what was written"),
    (rewrite_manifest(schema=9), r"manifest.json has schema 9, this version reads 1; make the run again with it"),
    (rewrite_manifest(identity=3), r"manifest.json is not the manifest of a run"),
    (rewrite_manifest(data=[]), r"manifest.json is damaged \(TypeError"),
    (rewrite_manifest(masks={"image_size": [28, 28], "rects": [[0, 0, 99, 9]]}), r"manifest.json is damaged"),
    (rewrite_manifest(guarantee="hope"), r"guarantee must be one of recovery, detection, not 'hope'"),
    (lambda f: (f / "spoiled.json").write_text('{"reason": "images changed"}'), r"cannot be trusted: images changed"),
]  # fmt: skip


@pytest.mark.parametrize(("damage", "words"), REFUSED)
def test_no_number_is_shown_of_a_run_that_cannot_be_trusted(folder, tmp_path, damage, words):
    damage(folder)
    sound = write_run(tmp_path / "sound", manifest(count=3), random_records(3))
    with pytest.raises(CheckError, match=words):
        build_report([sound, folder])


def damage_last_line(folder: Path) -> None:
    path = folder / "records.jsonl"
    path.write_bytes(path.read_bytes()[:-20])


def damage_a_line(folder: Path) -> None:
    path = folder / "records.jsonl"
    lines = path.read_bytes().split(b"\n")
    lines[4], lines[9] = b"\x00\xff{", lines[9].replace(b'"label": ', b'"label": "x" , "label": "')
    path.write_bytes(b"\n".join(lines))


def repeat_a_line(folder: Path) -> None:
    path = folder / "records.jsonl"
    first = json.loads(path.read_text().splitlines()[0])
    path.write_text(path.read_text() + json.dumps(first | {"certified": not first["certified"]}) + "\n")


def contradict(folder: Path) -> None:
    results = json.loads((folder / "results.json").read_text())
    results["certified"]["k"] += 1
    (folder / "results.json").write_text(json.dumps(results))


def certify_a_wrong_answer(folder: Path) -> None:
    path = folder / "records.jsonl"
    path.write_text(path.read_text().replace('"defended": true', '"defended": false'))


def limit_afterwards(folder: Path) -> None:
    (folder / "manifest.json").write_text(json.dumps(sealed(manifest(count=60, available=90))))


DAMAGES: list[tuple[Callable[[Path], object], str, int]] = [
    (damage_last_line, r"the last line of records.jsonl is cut short and left out", 59),
    (damage_last_line, r"partial: 59 of 60 images are done; resume the run to finish it", 59),
    (damage_a_line, r"^damaged: 2 lines of records.jsonl, left out: 5, 10$", 58),
    (damage_a_line, r"partial: 58 of 60 .* just the failures; remove line 5 of .*, then resume the run$", 58),
    (repeat_a_line, r"1 record repeats an image; the first of each counts", 60),
    (contradict, r"results.json contradicts the records, which count: it says certified (\d+) of 60, the records", 60),
    (certify_a_wrong_answer, r"images are recorded as certified but answered wrong, which a certificate rules out", 60),
    (lambda f: (f / "results.json").unlink(), r"results.json is missing or damaged; the accuracies are counted", 60),
    (lambda f: (f / "results.json").write_text("{"), r"results.json is missing or damaged; the accuracies are", 60),
    (lambda f: (f / "results.json").write_text("{}"), r"results.json contradicts .* undefended 0 of 0, the rec", 60),
    (limit_afterwards, r"partial: 60 of 90 images were asked for", 60),
    (limit_afterwards, r"20 records are about images that the manifest did not plan; they are counted", 60),
    (lambda f: (f / "records.jsonl").unlink(), r"records.jsonl is missing or cannot be read", 0),
    (lambda f: (f / "records.jsonl").write_text(""), r"there is no record yet, so there is nothing to count", 0),
]  # fmt: skip


@pytest.mark.parametrize(("damage", "words", "left"), DAMAGES)
def test_every_damage_is_said_and_the_rest_is_counted(folder, damage, words, left):
    sound = read_run(folder)
    assert sound.notices == ()
    damage(folder)
    run = read_run(folder)
    assert [text for text in run.notices if re.search(words, text)]
    assert run.rates["certified"].n == left
    assert left < 60 or run.rates["certified"] == sound.rates["certified"]


@pytest.mark.parametrize("damage", [damage_a_line, lambda f: (f / "records.jsonl").write_text("")])
def test_notices_stand_above_the_numbers_and_the_rest_is_shown(report, folder, damage):
    assert texts(report) == []
    damage(folder)
    report = build_report([folder])
    page = shown(report)
    assert texts(report)
    for text in texts(report):
        assert page.text.index("Before you read the numbers") < page.text.index(text) < page.text.index("certified")
    left = read_run(folder).rates["certified"].n
    assert table(report, "accuracies")[0]["rate (95% interval) n"] == str(left)
    assert {p.key for p in report.pictures} == ({"classes", "failing-masks", "margins"} if left else set())


def test_a_digit_changed_in_a_record_is_found_by_its_checksum(tmp_path):
    folder = RunFolder(write_run(tmp_path / "run", manifest(count=30), []).resolve())
    folder.append([record.line().encode() for record in random_records(30)], {})
    assert not [text for text in read_run(folder.path).notices if re.search("damaged|checksums", text)]
    lines = folder.records_path.read_text().splitlines(keepends=True)
    lines[6] = lines[6].replace('"forwards": ', '"forwards": 1')
    folder.records_path.write_text("".join(lines))
    run = read_run(folder.path)
    assert "damaged: 1 line of records.jsonl, left out: 7" in run.notices
    assert run_status(run).startswith("damaged: 1 line of records.jsonl; ")
    assert not [text for text in run.notices if "resume the run to finish it" in text]
    folder.sums_path.unlink()
    run = read_run(folder.path)
    assert "checksums are missing: 30 lines of records.jsonl could have been changed unnoticed" in run.notices
    assert "; checksums are missing" in run_status(run)


def test_bad_images_are_said_and_counted_nowhere(tmp_path):
    records = [*random_records(9), Record(9, "x/9.png", 0, error="cut short")]
    run = read_run(write_run(tmp_path / "r", manifest(count=10), records))
    assert run.notices == ("partial: 1 bad image was skipped",)
    assert run.rates["certified"].n == 9


def test_what_is_no_run_is_named_and_exits_with_two(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    for place, said in (
        ("empty", "empty is not the folder of a run: it has no manifest.json"),
        ("nowhere", "no such folder: nowhere"),
    ):
        assert command(["report", place]) == 2
        assert said in " ".join(capsys.readouterr().err.split())
    write_run(tmp_path / "runs" / "one", manifest(count=3), random_records(3))
    assert command(["report", "runs"]) == 2
    assert "it has 1 run inside, e.g. runs/one" in " ".join(capsys.readouterr().err.split())
    (tmp_path / "home" / "work" / "deep").mkdir(parents=True)
    (tmp_path / "runs").rename(tmp_path / "home" / "work" / "deep" / "runs")
    assert command(["report", "home"]) == 2
    assert "inside" not in capsys.readouterr().err, "a whole home folder is not searched"
    (tmp_path / "home" / "work" / "deep" / "runs").rename(tmp_path / "runs")
    assert command(["report", "runs/one", "--baseline", "elsewhere"]) == 2
    assert "--baseline needs several certifications to compare, and there is one" in capsys.readouterr().err
    assert command(["report"]) == 2
    (tmp_path / "empty" / "manifest.json").write_text(
        json.dumps(sealed({"command": "predict", "identity": {}, "schema": 1}))
    )
    with pytest.raises(InputError, match="holds a `predict` run, not one of certify, attack or train"):
        build_report([tmp_path / "empty"])
    assert not (tmp_path / "empty" / "report").exists()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda f: (f / "results.json").unlink(), "results.json is missing or damaged: training was stopped"),
        (lambda f: (f / "log.jsonl").write_text('{"kind": "cat"}\n'), "damaged: 1 line of log.jsonl, left out: 1"),
        (lambda f: (f / "log.jsonl").write_text(""), "partial: 0 of 20 steps are done; resume the run to finish it"),
    ],
)  # fmt: skip
def test_a_damaged_training_run_says_so(tmp_path, damage, words):
    train = write_training(tmp_path / "t", epochs=4)
    assert read_run(train).notices == ()
    damage(train)
    assert [text for text in read_run(train).notices if words in text]


def test_a_training_run_is_a_row_and_its_notices_are_on_the_page(tmp_path):
    train = write_training(tmp_path / "t", epochs=4)
    with (train / "log.jsonl").open("a") as log:
        log.write('{"kind": "cat"}\n')
    report = build_report([train])
    (row,) = table(report, "training")
    assert (row["strategy"], row["extra passes per image"], row["best epoch"]) == ("greedy", "25", "4")
    assert (row["certified k"], row["certified n"], row["seconds"]) == ("20", "50", "3.5")
    assert "damaged: 1 line of log.jsonl, left out: 25" in shown(report).text


def test_a_training_names_the_defence_that_validated_it_with_its_guarantee(tmp_path):
    """And is drawn for its few steps: no band of single steps, no half steps, accuracies on one scale, one heading."""
    alarm = write_training(tmp_path / "t", steps=4, validate_with="alarm")
    report = build_report([alarm])
    (section,) = (section for section in report.sections if section.key == "training")
    assert (
        section.tables[0].notes[0]
        == "In every row: strategy greedy, certified by alarm (detection), best epoch chosen on pets, split validation."
    )
    assert " by alarm (detection) on 50 validation images." in report.conclusion.verdict[0]
    pictures = {picture.key: picture for picture in report.pictures}
    assert "certified (detection), %" in pictures["validation-certified"].svg
    assert "double masking" not in report.html()
    assert report.html().count(">Training<") == 2  # a link, a heading
    assert all(tick == round(tick) for tick in pictures["loss"].figure.axes[0].get_xticks())
    single = build_report([write_training(tmp_path / "margin", strategy="none", steps=1, epochs=1, loss="bagcert")])
    axes = {picture.key: picture.figure.axes[0] for picture in single.pictures}["loss"]
    assert axes.lines[0].get_marker() == "o", "a line of one step could not be seen"
    assert [pictures["loss"].figure.axes[0].get_ylabel(), axes.get_ylabel()] == ["loss (nats)", "loss"]
    assert "Training loss, n = 1 step." in single.html()
    limits = {pictures[f"validation-{name}"].figure.axes[0].get_ylim() for name in ("certified", "undefended")}
    assert len(limits) == 1
    plain = write_training(tmp_path / "plain")
    (section,) = (section for section in build_report([alarm, plain]).sections if section.key == "training")
    (place,) = (i for i, column in enumerate(section.tables[0].columns) if column.name == "certified by")
    shown = [row[place] for row in section.tables[0].rows]
    assert shown == ["alarm (detection)", "double masking with 3×3 masks (recovery)"]
    assert section.tables[0].notes[0] == "In every row: strategy greedy, best epoch chosen on pets, split validation."


# Files


def test_only_an_earlier_report_is_written_over_and_nothing_in_the_run(report, folder, tmp_path):
    (folder / "records.jsonl").write_bytes((folder / "records.jsonl").read_bytes()[:-7])
    before = {path: path.read_bytes() for path in folder.rglob("*")}
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("")
    assert texts(build_report([folder]))
    with pytest.raises(InputError, match="holds other things than a report; choose another folder"):
        report.write(tmp_path / "mine")
    (tmp_path / "mine" / "index.html").write_text("<h1>my site</h1>")
    with pytest.raises(InputError, match="holds other things"):
        report.write(tmp_path / "mine")
    with pytest.raises(InputError, match="is a file; give a folder"):
        report.write(folder / "results.json")
    report.write(tmp_path / "out")
    build_report([write_training(tmp_path / "t")]).write(tmp_path / "out")
    assert not (tmp_path / "out" / "figures" / "margins.svg").exists()
    assert (tmp_path / "out" / "figures" / "loss.svg").exists()
    assert {path: path.read_bytes() for path in folder.rglob("*")} == before


def test_the_command_writes_beside_one_run_and_below_runs_for_several(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("t", "u"):
        write_training(tmp_path / name)
    assert command(["report", "t", "--title", "Mine"]) == 0
    assert capsys.readouterr().out.strip().endswith("report: t/report/index.html")
    assert "<title>Mine</title>" in (tmp_path / "t" / "report" / "index.html").read_text("utf-8")
    (tmp_path / "r.yaml").write_text("title: From a file\n")
    assert command(["report", "t", "u", "--config", "r.yaml"]) == 0
    (page,) = (tmp_path / "runs").glob("report-2-runs-*/index.html")
    assert "From a file" in page.read_text("utf-8")
    for title in ("First", "Again"):
        assert command(["report", "t", "--title", title, "--output", "here"]) == 0
    assert "<title>Again</title>" in (tmp_path / "here" / "index.html").read_text("utf-8")


@pytest.mark.parametrize("images", [-1, 101])
def test_a_gallery_of_an_impossible_size_is_refused(images):
    with pytest.raises(InputError, match=f"images must be 0 to 100 of each kind, not {images}"):
        Options(images=images)


def test_ls_counts_the_records_and_says_what_contradicts_them(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    results = json.loads((folder / "results.json").read_text())
    results["certified"]["k"] = 60
    (folder / "results.json").write_text(json.dumps(results))
    train = write_training(folder.parent / "t", epochs=2)
    said = {"epoch": 1, "step": 10, "undefended": {"k": 50, "n": 50}, "certified": {"k": 50, "n": 50}}
    (train / "results.json").write_text(json.dumps({"status": "complete", "seconds": 3.5, "epochs": [said]}))
    single = [replace(r, undefended=r.label == 0, certified=r.label == 0, defended=True) for r in random_records(90)]
    write_run(folder.parent / "one", manifest(count=90), single)
    assert command(["ls", "runs", str(folder.parent), "--json"]) == 0
    rows = {row["run"]: row for row in json.loads(capsys.readouterr().out)}
    counted = read_run(folder).rates["certified"]
    assert rows[folder.name]["certified"] == counted.as_dict()
    assert rows["t"]["certified"]["k"] == 20
    assert rows["t"]["defended"] is None
    assert rows["one"]["what"] == "certify small (random) on pets (all), patchcleanser, 3×3 masks, 5×5 px (3.2%)"
    assert rows["one"]["status"] == "complete; one class"
    assert "one class" not in rows[folder.name]["status"]
    assert "results.json contradicts the records" in rows[folder.name]["status"]
    assert "results.json and log.jsonl contradict each other about epoch 1" in rows["t"]["status"]
