"""Run folders: lines that survive, intervals that are exact, and folders that refuse what does not belong."""

from __future__ import annotations

import json
import multiprocessing
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

from patchproof.records import Rate, Record, RunFolder, Witness, checked_prefix, rates, summarize, write_atomically
from patchproof.seals import sealed
from patchproof.types import CheckError, InputError

MANIFEST = {"schema": 1, "command": "certify", "identity": {"weights_sha256": "aa", "masks": [1, 2]}}

findings = st.builds(
    Record,
    index=st.integers(0, 10**6),
    path=st.text(st.characters(), min_size=1),
    label=st.integers(0, 999),
    undefended=st.booleans(),
    defended=st.booleans(),
    certified=st.booleans(),
    margin=st.none() | st.floats(allow_nan=False, allow_infinity=False),
    forwards=st.integers(0, 700),
    witness=st.builds(Witness, masks=st.tuples(st.integers(0, 35), st.integers(0, 35)), label=st.integers(0, 999)),
)
bad = st.builds(Record, index=st.integers(0, 10), path=st.text(), label=st.integers(0, 9), error=st.text(min_size=1))


def record(index: int, **values) -> Record:
    defaults = {"undefended": True, "defended": True, "certified": index % 2 == 0, "margin": 0.5, "forwards": 45}
    return Record(index, f"a/{index}.png", 0, **(defaults | values))


@given(findings | bad)
def test_a_line_is_one_line_and_reads_back_as_the_same_record(found):
    line = found.line()
    assert line.count("\n") == 1
    assert line.isascii()
    assert Record.parse(line) == found


def test_a_line_has_the_contracts_fields_in_order():
    assert list(json.loads(record(0).line())) == [
        "index", "path", "label", "undefended", "defended", "certified", "margin", "forwards", "witness",
    ]  # fmt: skip


def test_a_name_with_bytes_that_are_no_text_survives():
    path = os.fsdecode(b"a/\xff\n.png")
    assert Record.parse(Record(0, path, 1, error="x").line()).path == path


@pytest.mark.parametrize(
    "line",
    ["", "7", "{}", '{"index": 1}', '{"index": 1, "path": "a", "label": 0}', '{"index": 1, "surprise": 2}', "{", "[]"],
)
def test_what_is_no_record_is_not_read_as_one(line):
    with pytest.raises((ValueError, TypeError, KeyError)):
        Record.parse(line)


@pytest.mark.parametrize("name", ["index", "label", "forwards", "margin"])
def test_a_number_that_no_float_can_hold_is_no_record(name):
    with pytest.raises(ValueError, match="number"):
        Record.parse(json.dumps(json.loads(record(0).line()) | {name: 10**400}))


@given(st.integers(1, 400).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_the_interval_is_clopper_pearsons(kn):
    k, n = kn
    low, high = Rate(k, n).interval
    assert 0 <= low <= k / n <= high <= 1
    if k:
        assert binom.sf(k - 1, n, low) == pytest.approx(0.025, rel=1e-6)
    if k < n:
        assert binom.cdf(k, n, high) == pytest.approx(0.025, rel=1e-6)


def test_bad_images_are_counted_nowhere_but_said():
    found = [record(0), record(1), Record(2, "b", 0, error="cut short")]
    assert rates(found)["certified"] == Rate(1, 2)
    results = summarize(found, planned=3, available=3, seconds=1.0)
    assert results["status"] == "partial"
    assert results["images"] == {"done": 3, "planned": 3, "available": 3, "bad": 1}
    assert results["cost"]["forwards_per_image"] == 45


def test_a_limited_or_unfinished_run_is_partial_and_a_whole_one_complete():
    assert summarize([record(0)], planned=1, available=1, seconds=0)["status"] == "complete"
    limited = summarize([record(0)], planned=1, available=9, seconds=0)
    assert limited["partial"] == ["1 of 9 images were asked for (--limit)"]
    stopped = summarize([record(0)], planned=2, available=2, seconds=0)
    assert stopped["partial"] == ["1 of 2 images are done; continue with --resume"]


def test_an_unfinished_run_without_a_single_record_has_results_too():
    results = summarize([], planned=2, available=2, seconds=0)
    assert results["certified"] == {"k": 0, "n": 0, "rate": 0.0, "interval": [0.0, 1.0]}


def begin(folder: RunFolder, records):
    with folder.open(MANIFEST, resume=False):
        folder.append(records)


@pytest.mark.parametrize("cut", [1, 5, 40])
def test_a_last_line_cut_short_is_repaired_and_the_others_are_kept(tmp_path, cut):
    folder = RunFolder(tmp_path / "run")
    begin(folder, [record(0), record(1)])
    content = folder.records_path.read_bytes()
    folder.records_path.write_bytes(content[:-cut])
    assert folder.records() == [record(0)]
    folder.append([record(1)])
    assert folder.records_path.read_bytes() == content


def test_reading_alone_leaves_a_line_being_written_as_it_is(tmp_path):
    folder = RunFolder(tmp_path / "run")
    begin(folder, [record(0), record(1)])
    written = folder.records_path.read_bytes()[:-9]
    folder.records_path.write_bytes(written)
    before = {path: path.read_bytes() for path in folder.path.iterdir()}
    assert folder.records(repair=False) == [record(0)]
    assert {path: path.read_bytes() for path in folder.path.iterdir()} == before


def test_a_first_line_cut_short_leaves_no_record_and_can_be_written_again(tmp_path):
    folder = RunFolder(tmp_path / "run")
    begin(folder, [record(0)])
    content = folder.records_path.read_bytes()
    folder.records_path.write_bytes(content[:20])
    assert folder.records() == []
    folder.append([record(0)])
    assert (folder.records_path.read_bytes(), folder.records()) == (content, [record(0)])


def test_a_run_without_checksums_is_read_and_gets_them(tmp_path):
    folder = RunFolder(tmp_path / "run")
    begin(folder, [record(0), record(1)])
    sums = folder.sums_path.read_bytes()
    folder.sums_path.unlink()
    assert folder.records() == [record(0), record(1)]
    assert folder.sums_path.read_bytes() == sums


def test_a_checksum_that_was_cut_short_is_removed_before_the_next_is_added(tmp_path):
    """A full disk may stop a write after any byte of the first checksum of a batch."""
    folder = RunFolder(tmp_path / "run")
    begin(folder, [record(0)])
    with folder.sums_path.open("a") as file:
        file.write("1a2b")
    assert folder.records() == [record(0)]
    folder.append([record(1)])
    assert folder.records(repair=False) == [record(0), record(1)]
    assert [len(line) for line in folder.sums_path.read_text().splitlines()] == [8, 8]


def test_a_damaged_line_is_refused_with_its_number_and_nothing_is_changed(tmp_path):
    folder = RunFolder(tmp_path / "run")
    begin(folder, [record(0), record(1), record(2)])
    lines = folder.records_path.read_text().splitlines(keepends=True)
    folder.records_path.write_text(lines[0] + "\0\0\0\n" + lines[2])
    before = folder.records_path.read_bytes()
    with pytest.raises(CheckError, match=r"line 2 is damaged.*remove it and all lines after it"):
        folder.records()
    assert folder.records_path.read_bytes() == before


def test_a_folder_with_a_run_is_not_begun_again(tmp_path):
    folder = RunFolder(tmp_path / "run")
    begin(folder, [record(0)])
    with (
        pytest.raises(InputError, match="already holds a run; continue it with --resume"),
        folder.open(MANIFEST, resume=False),
    ):
        pass
    assert folder.records() == [record(0)]


def test_a_run_made_with_something_else_is_refused_and_the_difference_named(tmp_path):
    folder = RunFolder(tmp_path / "run")
    begin(folder, [])
    other = {"schema": 1, "command": "certify", "identity": {"weights_sha256": "bb", "masks": [1, 2]}}
    with (
        pytest.raises(CheckError, match=r"cannot be continued: weights_sha256 was aa, now bb$"),
        folder.open(other, resume=True),
    ):
        pass


def test_another_number_of_training_steps_is_refused(tmp_path):
    """Also for runs that have it beside their identity: with more processes an epoch may be a batch shorter."""
    folder, made = RunFolder(tmp_path / "run"), MANIFEST | {"steps": 75, "processes": 1}
    with folder.open(made, resume=False):
        pass
    with folder.open(made, resume=True):
        pass
    message = r"was begun with 1 processes and 75 steps; with 2 it would be 74.*; go on with as many"
    with (
        pytest.raises(CheckError, match=message),
        folder.open(made | {"steps": 74, "processes": 2}, resume=True),
    ):
        pass


def test_a_resumed_run_keeps_the_first_manifest(tmp_path):
    folder = RunFolder(tmp_path / "run")
    begin(folder, [])
    with folder.open(MANIFEST | {"device": "another"}, resume=True) as stored:
        assert "device" not in stored
    assert json.loads(folder.manifest_path.read_text()) == sealed(MANIFEST)


def test_another_schema_is_refused(tmp_path):
    folder = RunFolder(tmp_path / "run")
    begin(folder, [])
    with (
        pytest.raises(CheckError, match="written with schema 1, this is 2"),
        folder.open(MANIFEST | {"schema": 2}, resume=True),
    ):
        pass


@pytest.mark.parametrize("content", ["", "{", "[]", "\xff"])
def test_a_damaged_manifest_is_refused(tmp_path, content):
    folder = RunFolder(tmp_path / "run")
    begin(folder, [])
    folder.manifest_path.write_text(content, encoding="latin-1")
    with pytest.raises(CheckError, match=r"manifest\.json .*damaged"), folder.open(MANIFEST, resume=True):
        pass


def test_records_without_a_manifest_are_left_alone(tmp_path):
    (tmp_path / "records.jsonl").write_text("mine\n")
    with (
        pytest.raises(InputError, match=r"holds 'records\.jsonl' but no manifest"),
        RunFolder(tmp_path).open(MANIFEST, resume=True),
    ):
        pass
    assert (tmp_path / "records.jsonl").read_text() == "mine\n"


def test_a_folder_of_another_command_is_refused_by_name(tmp_path):
    folder = RunFolder(tmp_path / "run")
    begin(folder, [])
    other = MANIFEST | {"command": "train"}
    with pytest.raises(CheckError, match="holds a `certify` run, this is `train`"), folder.open(other, resume=True):
        pass


def test_a_folder_with_other_things_in_it_is_not_claimed(tmp_path):
    (tmp_path / "results.json").write_text('{"mine": 1}')
    with pytest.raises(InputError, match=r"holds 'results\.json' but no manifest"):
        begin(RunFolder(tmp_path), [])
    assert not (tmp_path / "manifest.json").exists()


def hold(path, ready, done):
    with RunFolder(path).open(MANIFEST, resume=True):
        ready.set()
        done.wait(30)


def test_a_second_process_on_the_same_folder_is_refused(tmp_path):
    context = multiprocessing.get_context("fork")  # a spawned one would import torch for seconds
    ready, done = context.Event(), context.Event()
    other = context.Process(target=hold, args=(tmp_path, ready, done))
    other.start()
    try:
        assert ready.wait(60)
        with (
            pytest.raises(CheckError, match="another process is writing"),
            RunFolder(tmp_path).open(MANIFEST, resume=True),
        ):
            pass
    finally:
        done.set()
        other.join()


def test_records_of_another_plan_are_refused(tmp_path):
    with pytest.raises(CheckError, match=r"record 2 is about image 1 \(a/1.png\), this run's is 5"):
        list(checked_prefix([record(0), record(1)], [0, 5], "a/{}.png".format, where=tmp_path))
    with pytest.raises(CheckError, match="more than the 1 records that the run has images for"):
        list(checked_prefix([record(0), record(1)], [0], "a/{}.png".format, where=tmp_path))


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "results.json"
    write_atomically(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "new \udcff")
    assert path.read_text() == "old"


def test_a_folder_that_cannot_be_made_is_one_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(InputError, match="cannot create the folder"),
        RunFolder(tmp_path / "file" / "run").open(MANIFEST, resume=False),
    ):
        pass
