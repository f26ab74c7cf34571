"""Records and run folders: lines that survive, exact intervals, and folders that refuse what does not belong."""

from __future__ import annotations

import json
import math
import multiprocessing
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import bdtr, bdtrc

from patchproof.data import evenly_spread
from patchproof.machine import require_free
from patchproof.models import sealed
from patchproof.runs import AttackFindings, Rate, Record, RunFolder, Tally, rates, write_atomically
from patchproof.runs._folder import checked_prefix
from patchproof.runs._reading import _lines, is_planned
from patchproof.types import CheckError, InputError

MANIFEST = {"schema": 1, "command": "certify", "identity": {"weights_sha256": "aa", "defense": {"masks": [1, 2]}}}

numbers, answers = st.integers(0, 10**6), st.none() | st.booleans()
places = st.none() | st.tuples(numbers, numbers, numbers, numbers)
attacks = st.builds(
    AttackFindings, undefended_attacked=answers, attacked=answers, place=places, attacked_label=st.none() | numbers,
    passes=numbers, queries=numbers,
)  # fmt: skip
findings = st.builds(
    Record,
    index=numbers,
    path=st.text(st.characters(), min_size=1),
    label=numbers,
    undefended=answers,
    defended=st.booleans(),
    certified=st.booleans(),
    margin=st.none() | st.floats(allow_nan=False, allow_infinity=False),
    forwards=numbers,
    evidence=st.dictionaries(st.sampled_from(["witness", "votes"]), st.none() | numbers | st.lists(numbers)),
    attack=st.none() | attacks,
)
bad = st.builds(Record, index=numbers, path=st.text(), label=numbers, error=st.text(min_size=1))


def record(index: int, **values) -> Record:
    defaults = {"undefended": True, "defended": True, "certified": index % 2 == 0, "margin": 0.5, "forwards": 45}
    return Record(index, f"a/{index}.png", 0, **(defaults | values))


def lines(*records: Record) -> list[bytes]:
    return [each.line().encode() for each in records]


@given(findings | bad)
def test_a_line_is_one_line_and_reads_back_as_the_same_record(found):
    line = found.line()
    assert line.count("\n") == 1
    assert line.isascii()
    assert Record.parse(line) == found


def test_a_line_has_the_contracts_fields_in_order_and_keeps_names_that_are_no_text():
    evidence = {"witness": {"masks": [0, 1], "label": 2}}
    found = Record(0, os.fsdecode(b"a/\xff\n.png"), 1, True, True, False, 0.5, 45, evidence)
    assert list(json.loads(found.line())) == [
        "index", "path", "label", "undefended", "defended", "certified", "margin", "forwards", "witness",
    ]  # fmt: skip
    assert Record.parse(found.line()) == found


GOOD = json.loads(record(0).line())
NO_RECORDS = [
    "", "7", "{}", "{", "[]", '{"index": 1}', '{"index": 1, "path": "a", "label": 0}',
    *(json.dumps(GOOD | {name: 10**400}) for name in ("index", "label", "forwards", "margin")),
    json.dumps(GOOD | {"label": -1}), json.dumps(GOOD | {"attacked": 3}), json.dumps(GOOD | {"defended": None}),
]  # fmt: skip


@pytest.mark.parametrize("line", NO_RECORDS)
def test_what_is_no_record_is_not_read_as_one(line):
    with pytest.raises((ValueError, TypeError, KeyError)):
        Record.parse(line)


@given(st.integers(1, 400).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_the_interval_is_clopper_pearsons(kn):
    k, n = kn
    low, high = Rate(k, n).interval
    assert 0 <= low <= k / n <= high <= 1
    if k:
        assert bdtrc(k - 1, n, low) == pytest.approx(0.025, rel=1e-6)
    if k < n:
        assert bdtr(k, n, high) == pytest.approx(0.025, rel=1e-6)


def test_accuracies_are_counted_over_the_records_that_have_the_finding():
    broken = AttackFindings(attacked=False, passes=5, queries=2)
    found = [
        record(0, attack=broken),
        record(1, undefended=None, attack=AttackFindings()),
        Record(2, "b", 0, error="cut"),
    ]
    assert rates(found) == {"undefended": Rate(1, 1), "defended": Rate(2, 2), "certified": Rate(1, 2)}
    tally = Tally(("attacked",)).add(found)
    assert (tally.done, tally.good, tally.forwards, tally.passes, tally.queries) == (3, 2, 90, 5, 2)
    assert tally.rates()["attacked"] == Rate(0, 1)
    assert tally.broken == [0], "certified, and yet a patch changed the answer"
    assert rates([])["certified"].as_dict() == {"k": 0, "n": 0, "rate": None, "interval": [0.0, 1.0]}
    assert math.isnan(rates([])["certified"].rate), "what was not measured is not 0%"


# --- folders ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path) -> RunFolder:
    """One that holds two records."""
    found = RunFolder(tmp_path / "run")
    with found.open(MANIFEST, resume=False):
        found.append(lines(record(0), record(1)), {})
    return found


def contents(folder: RunFolder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.path.iterdir()}


@pytest.mark.parametrize(("left", "kept"), [(-1, 1), (-40, 1), (20, 0)])
def test_a_last_line_cut_short_is_repaired_by_the_process_that_has_the_folder_and_by_no_other(folder, left, kept):
    whole = folder.records_path.read_bytes()
    folder.records_path.write_bytes(whole[:left])
    before = contents(folder)
    finished = [record(0), record(1)][:kept]
    read, notices, damaged = _lines(folder.records_path, Record.parse, folder.sums_path)  # as reports do
    assert (read, notices, damaged) == (finished, ["the last line of records.jsonl is cut short and left out"], [])
    assert contents(folder) == before
    assert folder.records() == finished
    folder.append(lines(record(0), record(1))[kept:], {})
    assert folder.records_path.read_bytes() == whole
    assert folder.records() == [record(0), record(1)]


def test_checksums_are_made_where_there_are_none_and_completed_where_a_write_stopped(folder):
    """A full disk may stop a write after any byte of the first checksum of a batch."""
    sums = folder.sums_path.read_bytes()
    for broken in (b"", sums + b"1a2b"):
        folder.sums_path.write_bytes(broken)
        assert folder.records() == [record(0), record(1)]
        assert folder.sums_path.read_bytes() == sums


@pytest.mark.parametrize("line", ["\0\0\0\n", record(1, certified=True).line()])
def test_a_damaged_line_is_refused_with_its_number_and_nothing_is_changed(folder, line):
    """Also one that is a record, but not the one that was written."""
    folder.records_path.write_text(record(0).line() + line)
    before = contents(folder)
    with pytest.raises(CheckError, match=r"line 2 is damaged.*remove it and all lines after it"):
        folder.records()
    assert contents(folder) == before


def changed(**changes) -> dict:
    return MANIFEST | {"identity": MANIFEST["identity"] | changes}


REFUSED = {
    "already holds a run; continue it with resume=True": (InputError, MANIFEST, False),
    "cannot be continued: weights_sha256 was aa, now bb$": (CheckError, changed(weights_sha256="bb"), True),
    r"cannot be continued: masks was \[1, 2\], now \[1\]$": (CheckError, changed(defense={"masks": [1]}), True),
    "steps was null, now 74$": (CheckError, changed(steps=74), True),
    "written with schema 1, this is 2": (CheckError, MANIFEST | {"schema": 2}, True),
    "holds a run of `certify`, this is `train`": (CheckError, MANIFEST | {"command": "train"}, True),
}


@pytest.mark.parametrize("message", REFUSED)
def test_a_run_goes_on_only_with_what_it_began_with_and_the_one_difference_is_named(folder, message):
    error, manifest, resume = REFUSED[message]
    before = contents(folder)
    with pytest.raises(error, match=message), folder.open(manifest, resume=resume):
        pass
    assert contents(folder) == before


def test_a_resumed_run_keeps_the_first_manifest(folder):
    with folder.open(MANIFEST | {"device": "another"}, resume=True) as stored:
        assert "device" not in stored
    assert json.loads(folder.manifest_path.read_text()) == sealed(MANIFEST)


@pytest.mark.parametrize("content", ["", "{", "[]", "\xff", json.dumps(MANIFEST | {"command": "attack", "seal": "0"})])
def test_a_damaged_manifest_is_refused(folder, content):
    folder.manifest_path.write_text(content, encoding="latin-1")
    with pytest.raises(CheckError, match=r"manifest\.json .*damaged"), folder.open(MANIFEST, resume=True):
        pass


def test_a_spoiled_run_is_never_continued(folder):
    folder.spoil("the data set changed")
    message = "cannot be continued: in an earlier session the data set changed"
    with pytest.raises(CheckError, match=message), folder.open(MANIFEST, resume=True):
        pass


@pytest.mark.parametrize("name", ["records.jsonl", "results.json"])
def test_a_folder_with_other_things_in_it_is_not_claimed(tmp_path, name):
    (tmp_path / name).write_text("mine\n")
    with (
        pytest.raises(InputError, match=f"holds '{name}' but no manifest"),
        RunFolder(tmp_path).open(MANIFEST, resume=True),
    ):
        pass
    assert (tmp_path / name).read_text() == "mine\n"
    with (
        pytest.raises(InputError, match=r"cannot create the folder .* is a file"),
        RunFolder(tmp_path / name / "run").open(MANIFEST, resume=False),
    ):
        pass


def hold(path, ready, done):
    with RunFolder(path).open(MANIFEST, resume=True):
        ready.set()
        done.wait(30)


def test_a_second_process_on_the_same_folder_is_refused_before_anything_is_measured(tmp_path, monkeypatch):
    context = multiprocessing.get_context("fork")  # a spawned one would import torch for seconds
    ready, done = context.Event(), context.Event()
    other = context.Process(target=hold, args=(tmp_path, ready, done))
    other.start()
    try:
        assert ready.wait(60)
        for resume in (True, False):
            with pytest.raises(CheckError, match="another process is writing"):
                require_free(tmp_path, resume=resume)
        monkeypatch.setattr("patchproof.runs._folder.require_free", lambda *_, **__: None)  # both looked at once
        with (
            pytest.raises(CheckError, match="another process is writing"),
            RunFolder(tmp_path).open(MANIFEST, resume=True),
        ):
            pass
    finally:
        done.set()
        other.join()
    with (
        pytest.raises(CheckError, match="another process has begun a run in"),
        RunFolder(tmp_path).open(MANIFEST, resume=False),
    ):
        pass


def test_records_of_another_plan_are_refused(tmp_path):
    with pytest.raises(CheckError, match=r"record 2 is about image 1 \(a/1.png\), this run's is 5"):
        list(checked_prefix([record(0), record(1)], [0, 5], "a/{}.png".format, where=tmp_path))
    with pytest.raises(CheckError, match="more than the 1 records that the run has images for"):
        list(checked_prefix([record(0), record(1)], [0], "a/{}.png".format, where=tmp_path))


def test_planned_images_are_those_that_are_spread_evenly():
    for available in range(12):
        for planned in range(15):
            expected = set(evenly_spread(planned, available))
            assert {image for image in range(15) if is_planned(image, planned, available)} == expected
    assert is_planned(10**29, 10**30, 10**40), "no list of the images is built"
    assert not is_planned(10**29 + 1, 10**30, 10**40)


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "results.json"
    write_atomically(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "new \udcff")
    assert path.read_text() == "old"
