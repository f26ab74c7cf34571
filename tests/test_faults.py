"""`certify` and `train` under faults: whatever befalls them, a resumed run ends with what an undisturbed one has.

Kills are real signals to real processes (`faults.py`). A fault either lets the run go on with `--resume`, or is refused
in one line that says what to do; doing that gives the same bytes too.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from faults import Fault, Server, resize_disk, small_disk
from patchproof.models import load_classifier, save_checkpoint
from patchproof.runs import RunFolder, read_run
from patchproof.types import CheckError
from test_cli_train import losses, two_classes, weights

slow = pytest.mark.slow
ROOM = 64 * 1024


@dataclass(frozen=True)
class Job:
    """A command, the folder of a run that nothing disturbed, and how long that run took."""

    arguments: list[str]
    whole: Path
    seconds: float
    half_way: int
    """File events in the folder until about half of the run is over."""

    def words(self, folder: Path) -> list[str]:
        """`--resume` begins a run where there is none."""
        return [*self.arguments, "--output", str(folder), "--resume"]

    def evidence(self, folder: Path) -> dict[str, Any]:
        """All that two runs of this command must have in common, bit by bit."""
        results = json.loads((folder / "results.json").read_text())
        if self.arguments[0] == "certify":
            del results["cost"]["seconds"], results["cost"]["batch_size"]
            return {"records": (folder / "records.jsonl").read_bytes(), "results": results}
        kept = {name: weights(folder, name) for name in ("checkpoint-last", "checkpoint-best")}
        return kept | {"losses": losses(folder), "epochs": results["epochs"], "best": results["best"]}

    def progress(self, folder: Path) -> int:
        """Records, or steps, that are on disk."""
        path = folder / ("records.jsonl" if self.arguments[0] == "certify" else "log.jsonl")
        return path.read_bytes().count(b"\n") if path.exists() else 0


def whole_run(commands: Server, arguments: str, folder: Path, half_way: int) -> Job:
    started = time.monotonic()
    code, complaint = commands.run([*arguments.split(), "--output", str(folder / "whole")])
    assert code == 0, complaint
    return Job(arguments.split(), folder / "whole", time.monotonic() - started, half_way)


@pytest.fixture(scope="session")
def certify(commands, tmp_path_factory) -> Job:
    words = (
        "certify --limit 16 --masks 2 --exhaustive --batch-size 8 --device cpu --workers 1 --weights random --seed 1"
    )
    return whole_run(commands, words, tmp_path_factory.mktemp("certify"), half_way=14)


@pytest.fixture(scope="session")
def train(commands, tmp_path_factory) -> Job:
    data = two_classes(tmp_path_factory.mktemp("train") / "data", {"train": 9, "val": 4})
    words = "train --strategy cutout --epochs 2 --batch-size 6 --learning-rate 0.05 --device cpu --workers 1"
    words += f" --weights random --checkpoint-minutes 0 --dataset {data}"
    return whole_run(commands, words, data.parent, half_way=84)


@pytest.fixture
def job(request, certify, train) -> Job:
    return {"certify": certify, "train": train}[request.param]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


both = pytest.mark.parametrize("job", ["certify", pytest.param("train", marks=slow)], indirect=True)


def finish(commands: Server, job: Job, folder: Path) -> None:
    """Go on without any fault: the run ends, and has what the undisturbed one has."""
    code, complaint = commands.run(job.words(folder))
    assert code == 0, complaint
    assert job.evidence(folder) == job.evidence(job.whole)
    if job.arguments[0] == "certify":
        sums = (folder / "records.crc").read_bytes()
        assert len(RunFolder(folder).records()) == sums.count(b"\n")
        assert (folder / "records.crc").read_bytes() == sums, "nothing was to be repaired"


def refused(code: int, complaint: str, pattern: str) -> None:
    """Exit code 1 or 2, or that of a signal, and a last line that matches; never a traceback."""
    assert code in (1, 2, 130, 143), complaint
    assert "Traceback" not in complaint
    assert re.match(f"patchproof: .*({pattern})", complaint.splitlines()[-1]), complaint


def stopped_half_way(commands: Server, job: Job, folder: Path) -> None:
    code, complaint = commands.run(job.words(folder), Fault(folder=str(folder), die_at=job.half_way))
    assert code == -signal.SIGKILL, complaint
    assert 0 < job.progress(folder) < job.progress(job.whole)


def changed(job: Job, folder: Path, name: str, content: bytes) -> Path:
    """A copy of the undisturbed run in which one file holds something else."""
    shutil.copytree(job.whole, folder)
    (folder / name).write_bytes(content)
    return folder


# --- killed --------------------------------------------------------------------------------------------------------

KILLS = [
    ("certify", signal.SIGKILL, 2),
    ("certify", signal.SIGTERM, 1),
    ("certify", signal.SIGINT, 1),
    ("train", signal.SIGKILL, 1),
    pytest.param("train", signal.SIGTERM, 12, marks=slow),
    pytest.param("train", signal.SIGKILL, 30, marks=slow),
    pytest.param("certify", signal.SIGTERM, 20, marks=slow),
    pytest.param("certify", signal.SIGKILL, 40, marks=slow),
]


@pytest.mark.parametrize(("job", "number", "kills"), KILLS, indirect=["job"])
def test_killed_at_random_moments_nothing_is_lost_or_counted_twice(commands, job, number, kills, tmp_path, survived):
    draw, struck, folders = random.Random(kills), 0, 1
    while struck < kills:
        folder = tmp_path / str(folders)
        before = job.progress(folder)
        command = commands.start(job.words(folder))
        time.sleep(draw.uniform(0, job.seconds))
        hit = command.send(number)
        code = command.wait()
        struck += hit
        if code == 0:
            assert job.evidence(folder) == job.evidence(job.whole)
            folders += 1
        elif code != -number:  # before the handler is there, SIGTERM ends a process as SIGKILL does
            assert (hit, number != signal.SIGKILL, code) == (True, True, 128 + number), command.complaint
            on_disk, nothing = "; what was finished is on disk, continue with --resume", "; nothing was written yet"
            advice = on_disk if job.progress(folder) else f"{on_disk}|{nothing}"
            refused(code, command.complaint, f"stopped({advice}|)$")  # no advice before the arguments are read
        if job.arguments[0] == "certify":
            assert job.progress(folder) >= before
    finish(commands, job, tmp_path / str(folders))
    survived(signal.Signals(number).name, struck)


POINTS = [
    ("certify", (7,)),
    ("train", (40,)),
    pytest.param("certify", range(1, 200, 2), marks=slow),
    pytest.param("train", range(1, 1000, 6), marks=slow),
]


@pytest.mark.parametrize(("job", "points"), POINTS, indirect=["job"])
def test_killed_just_before_a_file_event_the_run_goes_on(commands, job, points, tmp_path, survived):
    """Opening, renaming, removing: every one of them is a moment at which only half of a change is on disk."""
    struck = 0
    for point in points:
        folder = tmp_path / str(point)
        code, complaint = commands.run(job.words(folder), Fault(folder=str(folder), die_at=point))
        if code == 0:  # the run has fewer events than that
            break
        assert code == -signal.SIGKILL, complaint
        finish(commands, job, folder)
        shutil.rmtree(folder)
        struck += 1
    assert struck
    survived("SIGKILL at a file event", struck)


@both
def test_a_second_process_on_the_folder_is_refused_and_the_first_one_finishes(commands, job, tmp_path, survived):
    first = commands.start(job.words(tmp_path / "r"))
    until = time.monotonic() + 60
    while not job.progress(tmp_path / "r") and time.monotonic() < until:
        time.sleep(0.001)
    assert first.send(signal.SIGSTOP)
    code, complaint = commands.run(job.words(tmp_path / "r"))
    refused(code, complaint, f"another process is writing to {tmp_path / 'r'}; wait for it, or stop it")
    assert first.send(signal.SIGCONT)
    assert first.wait() == 0
    assert job.evidence(tmp_path / "r") == job.evidence(job.whole)
    survived("second process")


# --- the disk ------------------------------------------------------------------------------------------------------

DISKS = [
    ("certify", (0.6,)),
    pytest.param("certify", (0.2, 0.4, 0.8, 0.9, 1.0), marks=slow),
    pytest.param("train", (0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0), marks=slow),
]


@pytest.mark.parametrize(("job", "shares"), DISKS, indirect=["job"])
def test_a_full_disk_is_one_line_and_with_room_the_run_goes_on(commands, job, shares, tmp_path, survived):
    used = sum(path.stat().st_size for path in job.whole.rglob("*") if path.is_file()) // 1024
    for share in shares:
        with small_disk(tmp_path / str(share), kilobytes=max(4, int(share * used) // 4 * 4)) as mounted:
            if not mounted:
                pytest.skip("no file system can be mounted here; the test below fills a disk in another way")
            folder = tmp_path / str(share) / "r"
            code, complaint = commands.run(job.words(folder))
            refused(code, complaint, "No space left on device|cannot write")
            resize_disk(tmp_path / str(share), kilobytes=ROOM)
            finish(commands, job, folder)
            survived("full disk")


LIMITS = [
    ("certify", (1200,)),
    pytest.param("certify", (300, 700, 1500, 1800, 2100), marks=slow),
    pytest.param("train", (300, 1500, 50_000), marks=slow),
]


@pytest.mark.parametrize(("job", "limits"), LIMITS, indirect=["job"])
def test_a_write_that_stops_in_the_middle_of_a_line_is_made_good(commands, job, limits, tmp_path, survived):
    for limit in limits:
        stopped_half_way(commands, job, tmp_path / str(limit))
        code, complaint = commands.run(job.words(tmp_path / str(limit)), Fault(file_bytes=limit))
        refused(code, complaint, "File too large|cannot write")
        finish(commands, job, tmp_path / str(limit))
        survived("write cut short")


def test_what_may_not_be_read_is_said_to_be_forbidden_not_damaged(commands, tmp_path):
    checkpoint, images = tmp_path / "start", tmp_path / "images"
    save_checkpoint(load_classifier("small", "random", num_classes=2), checkpoint)
    (tmp_path / "w.pth").write_bytes((checkpoint / "model.safetensors").read_bytes())
    (images / "cat").mkdir(parents=True)
    for words, path in (
        (("--model", "small", "--weights", tmp_path / "w.pth"), tmp_path / "w.pth"),
        (("--weights", checkpoint), checkpoint / "classifier.json"),
        (("--dataset", images), images / "cat"),
    ):
        path.chmod(0)
        code, complaint = commands.run(["certify", *map(str, words)], Fault(powerless=True))
        refused(code, complaint, f"cannot (read|list).*{path}.*: Permission denied$")
        path.chmod(0o755)


@both
def test_a_read_only_folder_is_one_line_and_writable_again_the_run_goes_on(commands, job, tmp_path, survived):
    folder = tmp_path / "r"
    stopped_half_way(commands, job, folder)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    protected = [folder, *folder.rglob("*")]
    for path in protected:
        path.chmod(0o555)
    code, complaint = commands.run(job.words(folder), Fault(powerless=True))
    refused(code, complaint, f"cannot write to {folder}: Permission denied; .* make it writable, or .* --output")
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    for path in protected:
        path.chmod(0o755)
    finish(commands, job, folder)
    survived("read-only folder")


@slow
@both
def test_a_disk_that_turns_read_only_is_one_line(commands, job, tmp_path, survived):
    with small_disk(tmp_path / "disk", kilobytes=ROOM) as mounted:
        if not mounted:
            pytest.skip("no file system can be mounted here")
        stopped_half_way(commands, job, tmp_path / "disk" / "r")
        subprocess.run(["mount", "-o", "remount,ro", str(tmp_path / "disk")], check=True)
        code, complaint = commands.run(job.words(tmp_path / "disk" / "r"))
        refused(code, complaint, "Read-only file system; .* make it writable, or .* another --output")
        subprocess.run(["mount", "-o", "remount,rw", str(tmp_path / "disk")], check=True)
        finish(commands, job, tmp_path / "disk" / "r")
        survived("read-only disk")


# --- the clock -----------------------------------------------------------------------------------------------------


@both
def test_the_clock_set_back_changes_nothing(commands, job, tmp_path, survived):
    """Files from the future, and a clock that goes back an hour at every look."""
    stopped_half_way(commands, job, tmp_path / "r")
    for path in (tmp_path / "r").rglob("*"):
        os.utime(path, (4e9, 4e9))
    code, complaint = commands.run(job.words(tmp_path / "r"), Fault(clock=1e6))
    assert code == 0, complaint
    assert job.evidence(tmp_path / "r") == job.evidence(job.whole)
    survived("clock set back")


# --- damaged files -------------------------------------------------------------------------------------------------


def flips(content: bytes, count: int, seed: int) -> Iterator[tuple[int, bytes]]:
    """The content with one bit of one byte turned over, and where."""
    draw = random.Random(seed)
    for _ in range(count):
        place = draw.randrange(len(content))
        yield place, content[:place] + bytes([content[place] ^ (1 << draw.randrange(8))]) + content[place + 1 :]


@pytest.mark.parametrize("count", [100, pytest.param(5000, marks=slow)])
def test_a_flipped_bit_in_the_records_is_refused_with_its_line(certify, tmp_path, count, survived):
    shutil.copytree(certify.whole, tmp_path / "r")
    folder, whole = RunFolder(tmp_path / "r"), (certify.whole / "records.jsonl").read_bytes()
    for place, damaged in flips(whole, count, seed=1):
        folder.records_path.write_bytes(damaged)
        if place == len(whole) - 1:  # the last line has lost its end, as one that was being written
            assert len(folder.records()) == 15
            continue
        with pytest.raises(CheckError, match=rf"line {whole[:place].count(10) + 1} is damaged .*remove it and all"):
            folder.records()
        assert folder.records_path.read_bytes() == damaged
    survived("flipped bit in records", count)


@pytest.mark.parametrize("count", [1, pytest.param(12, marks=slow)])
def test_after_the_damaged_line_is_removed_as_told_the_run_goes_on(commands, certify, tmp_path, count, survived):
    whole = (certify.whole / "records.jsonl").read_bytes()
    for number, (_, damaged) in enumerate(flips(whole[:-1], count, seed=2)):
        folder = changed(certify, tmp_path / str(number), "records.jsonl", damaged + whole[-1:])
        code, complaint = commands.run(certify.words(folder))
        refused(code, complaint, r"records\.jsonl: line \d+ is damaged .*; remove it and all lines after it, then")
        line = int(re.search(r"line (\d+) is damaged", complaint)[1])
        sound = (damaged + whole[-1:]).split(b"\n")[: line - 1]
        (folder / "records.jsonl").write_bytes(b"".join(line + b"\n" for line in sound))
        finish(commands, certify, folder)
        survived("damaged record")


@pytest.mark.parametrize("count", [1, pytest.param(12, marks=slow)])
def test_records_cut_anywhere_are_completed(commands, certify, tmp_path, count, survived):
    whole, draw = (certify.whole / "records.jsonl").read_bytes(), random.Random(3)
    for number in range(count):
        folder = changed(certify, tmp_path / str(number), "records.jsonl", whole[: draw.randrange(len(whole))])
        (folder / "results.json").write_text("{ cut")
        finish(commands, certify, folder)
        survived("cut records")


@both
def test_a_flipped_bit_in_the_manifest_is_refused(job, tmp_path, survived):
    shutil.copytree(job.whole, tmp_path / "r")
    folder = RunFolder(tmp_path / "r")
    whole = folder.manifest_path.read_bytes()
    sound = {key: value for key, value in json.loads(whole).items() if key != "seal"}
    refusals = 0
    for _, damaged in flips(whole, 300, seed=4):
        folder.manifest_path.write_bytes(damaged)
        try:
            with folder.open(sound, resume=True) as stored:
                assert {key: stored[key] for key in sound} == sound  # only the word `seal` can have been hit
        except CheckError as error:
            refusals += "restore it from a copy, or begin a new run" in str(error)
    assert refusals > 290
    survived("flipped bit in a manifest", 300)


@both
def test_a_half_written_manifest_is_refused_and_one_never_begun_is_written(commands, job, tmp_path, survived):
    folder = tmp_path / "r"
    folder.mkdir()
    whole = (job.whole / "manifest.json").read_bytes()
    (folder / "manifest.json").write_bytes(whole[: len(whole) // 2])
    code, complaint = commands.run(job.words(folder))
    refused(code, complaint, r"manifest\.json is damaged .*; restore it from a copy, or begin a new run")
    (folder / "manifest.json").rename(folder / "manifest.json.part")  # where a kill leaves it
    finish(commands, job, folder)
    survived("half-written manifest")


DAMAGES = [(1, ("training.json",)), pytest.param(6, ("training.json", "training.safetensors"), marks=slow)]


@pytest.mark.parametrize(("count", "names"), DAMAGES)
def test_a_damaged_checkpoint_is_refused_and_removed_as_told_the_run_goes_on(
    commands, train, tmp_path, count, names, survived
):
    stopped_half_way(commands, train, tmp_path / "stopped")
    for name in names:
        content = (tmp_path / "stopped" / "checkpoint-last" / name).read_bytes()
        cut = [(0, content[: len(content) // 2])] if count > 1 else []
        for number, (_, damaged) in enumerate([*flips(content, count, seed=5), *cut]):
            folder = tmp_path / f"{name}-{number}"
            shutil.copytree(tmp_path / "stopped", folder)
            (folder / "checkpoint-last" / name).write_bytes(damaged)
            code, complaint = commands.run(train.words(folder))
            refused(code, complaint, r"checkpoint-last is damaged .*; remove it to begin again")
            shutil.rmtree(folder / "checkpoint-last")
            finish(commands, train, folder)
            survived("damaged checkpoint")


def test_a_line_lost_from_the_log_is_said_and_the_weights_do_not_care(commands, train, tmp_path, survived):
    stopped_half_way(commands, train, tmp_path / "r")
    log = tmp_path / "r" / "log.jsonl"
    log.write_text(log.read_text().replace('{"kind"', "{'kind'", 1))
    code, complaint = commands.run(train.words(tmp_path / "r"))
    assert code == 0, complaint
    assert losses(tmp_path / "r") == losses(train.whole)[1:]
    assert weights(tmp_path / "r") == weights(train.whole)
    assert any("1 step is missing in log.jsonl" in notice for notice in read_run(tmp_path / "r").notices)
    survived("damaged log")
