"""`torchrun … certify`: the same bytes as one process, whatever the number of processes and whoever is killed.

`torchrun` imports torch for itself and in each process, which takes most of the time. So in the fast set processes
forked from `commands` meet in a store of the test, as they would in that of the launcher, which the slow set has too.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from faults import PATIENCE, Command, Server
from patchproof.cli import run
from patchproof.models import load_classifier, save_checkpoint

SETTINGS = ("--masks", "2", "--exhaustive", "--batch-size", "8", "--limit", "60", "--weights", "start")


@pytest.fixture(scope="module")
def one(tmp_path_factory) -> Path:
    """The folder of a run of one process, and the weights it used."""
    folder = tmp_path_factory.mktemp("processes")
    save_checkpoint(load_classifier("small", "random", num_classes=10, seed=1), folder / "start")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert run(["certify", *SETTINGS, "--output", "one"]) == 0
    return folder


@pytest.fixture
def whole(one, tmp_path, monkeypatch) -> bytes:
    """The records of one process."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(one, tmp_path, dirs_exist_ok=True)
    return (tmp_path / "one" / "records.jsonl").read_bytes()


def torchrun(processes: int, *arguments: str) -> subprocess.Popen:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    words = [*launcher, "-m", "patchproof", "certify", *SETTINGS, *arguments]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def forked(
    commands: Server, processes: int, *arguments: str, words: tuple[str, ...] = ("certify", *SETTINGS)
) -> tuple[list[Command], TCPStore]:
    """Processes that know each other through what `torchrun` puts into their environment, and their store."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(processes)}
    common |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]
    return [commands.start([*words, *arguments], environment=common | rank) for rank in ranks], store


def wait_for_lines(path: Path, count: int) -> None:
    until = time.monotonic() + PATIENCE
    while not path.exists() or path.read_bytes().count(b"\n") < count:
        assert time.monotonic() < until
        time.sleep(0.005)


def assert_begins(whole: bytes, path: Path) -> None:
    """What is on disk is a part of the whole, but for a last line that may be cut."""
    before = path.read_bytes()
    assert whole.startswith(before[: before.rfind(b"\n") + 1])
    assert len(before) < len(whole)


def assert_records_of_one(whole: bytes, folder: Path, processes: int) -> None:
    assert (folder / "records.jsonl").read_bytes() == whole
    one, several = (json.loads((place / "results.json").read_text()) for place in (folder.parent / "one", folder))
    assert several["cost"]["processes"] == processes
    for name in ("undefended", "defended", "certified", "images", "status"):
        assert one[name] == several[name]


@pytest.mark.slow
def test_two_processes_write_the_records_of_one(whole, tmp_path):
    job = torchrun(2, "--output", "two")
    shown, said = job.communicate(timeout=200)
    assert job.returncode == 0, said
    assert shown.count("masked passes per image") == 1  # one process speaks for all
    assert_records_of_one(whole, tmp_path / "two", 2)


def test_one_of_two_killed_three_finish_it(commands, whole, tmp_path):
    path = tmp_path / "killed" / "records.jsonl"
    (main, other), _store = forked(commands, 2, "--output", "killed")
    wait_for_lines(path, 6)
    assert other.send(signal.SIGKILL)
    main.send(signal.SIGTERM)  # as the launcher does when one is gone
    assert (main.wait(), other.wait()) == (128 + signal.SIGTERM, -signal.SIGKILL)
    assert "continue with --resume" in main.complaint
    assert_begins(whole, path)
    again, _store = forked(commands, 3, "--output", "killed", "--resume")
    assert [rank.wait() for rank in again] == [0, 0, 0], again[0].complaint
    assert_records_of_one(whole, tmp_path / "killed", 3)


def test_attacks_of_two_processes_are_those_of_one(commands, whole, tmp_path):
    plan = ("--steps", "4", "--restarts", "1", "--places", "1")
    words = ("attack", "--masks", "2", "--limit", "4", "--weights", "embedded", *plan)
    assert run([*words, "--output", "alone"]) == 0
    both, _store = forked(commands, 2, "--output", "both", words=words)
    assert [rank.wait() for rank in both] == [0, 0], both[1].complaint
    kept = [path.relative_to("alone") for path in Path("alone").rglob("*.safetensors")]
    assert kept
    for name in ("records.jsonl", *kept):
        assert Path("both", name).read_bytes() == Path("alone", name).read_bytes()


def test_what_every_process_notes_the_main_one_says(commands, whole):
    words = ("certify", "--weights", "start", "--patch", "99%", "--limit", "2")
    both, _store = forked(commands, 2, "--output", "noted", words=words)
    assert [rank.wait() for rank in both] == [0, 0], both[1].complaint
    assert [rank.complaint.count("show nothing of the image") for rank in both] == [1, 0]


@pytest.mark.parametrize("words", [("--dataset", "nowhere"), ("--masks", "2.5"), ("--defense", "alrm")])
def test_what_every_process_gets_wrong_the_main_one_says(commands, tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    (main, other), _store = forked(commands, 2, *words)
    assert main.wait() == 2
    assert main.complaint.count("patchproof:") == 1
    time.sleep(0.3)
    other.send(signal.SIGTERM)  # as the launcher does when one has failed
    assert (other.wait(), other.complaint.count("patchproof:")) == (128 + signal.SIGTERM, 0)


def child(parent: int, rank: int) -> int:
    """Process id of a rank that `torchrun` has started."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            stat, environment = (path / "stat").read_text(), (path / "environ").read_bytes()
        except OSError:
            continue
        found = re.search(rb"(?:^|\0)RANK=(\d+)\0", environment)
        if found and int(found[1]) == rank and int(stat.rpartition(")")[2].split()[1]) == parent:
            return int(path.name)
    raise LookupError(rank)


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "then"), [(1, 3), (0, 1)])
def test_one_of_two_killed_the_job_ends_and_three_finish_it(whole, tmp_path, rank, then):
    """And one does where the main process was the one that was killed."""
    path = tmp_path / "killed" / "records.jsonl"
    job = torchrun(2, "--output", "killed")
    wait_for_lines(path, 6)
    os.kill(child(job.pid, rank), signal.SIGKILL)
    said = job.communicate(timeout=120)[1]
    assert job.returncode != 0
    assert rank == 0 or "continue with --resume" in said
    assert_begins(whole, path)
    again = torchrun(then, "--output", "killed", "--resume")
    assert again.communicate(timeout=200)
    assert again.returncode == 0
    assert path.read_bytes() == whole
