"""`torchrun … certify`: the same bytes as one process, whatever the number of processes and whoever is killed.

`torchrun` imports torch for itself and in each process, which takes most of the time. So one test of the fast set uses
it; in the others processes forked from `commands` meet in a store of the test's, as they would in the launcher's.
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

SETTINGS = ("--masks", "3", "--exhaustive", "--batch-size", "8", "--limit", "60", "--weights", "start")


def torchrun(processes: int, *arguments: str) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return [*launcher, "-m", "patchproof", "certify", *SETTINGS, *arguments]


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


class Job:
    """Processes that know each other through what `torchrun` puts into their environment, and their store."""

    def __init__(self, commands: Server, processes: int, *arguments: str) -> None:
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.store.port), "WORLD_SIZE": str(processes)}
        common |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
        words = ["certify", *SETTINGS, *arguments]
        self.ranks: list[Command] = [
            commands.start(words, environment=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(processes)
        ]


def wait_for_lines(path: Path, count: int) -> None:
    until = time.monotonic() + PATIENCE
    while not path.exists() or path.read_bytes().count(b"\n") < count:
        assert time.monotonic() < until
        time.sleep(0.005)


def children(parent: int) -> dict[int, int]:
    """Process id of each rank that `torchrun` has started."""
    found = {}
    for path in Path("/proc").iterdir():
        try:
            stat, environment = (path / "stat").read_text(), (path / "environ").read_bytes()
        except (OSError, ValueError):
            continue
        rank = re.search(rb"(?:^|\0)RANK=(\d+)\0", environment)
        if rank and int(stat.rpartition(")")[2].split()[1]) == parent:
            found[int(rank[1])] = int(path.name)
    return found


def test_two_processes_write_the_records_of_one(whole, tmp_path):
    done = subprocess.run(torchrun(2, "--output", "two"), capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "two" / "records.jsonl").read_bytes() == whole
    one, two = (json.loads((tmp_path / name / "results.json").read_text()) for name in ("one", "two"))
    assert two["cost"]["processes"] == 2
    for name in ("undefended", "defended", "certified", "images", "status"):
        assert one[name] == two[name]
    assert done.stdout.count("masked passes an image") == 1  # one process speaks for all


def test_one_of_two_killed_three_finish_it(commands, whole, tmp_path):
    path = tmp_path / "killed" / "records.jsonl"
    job = Job(commands, 2, "--output", "killed")
    main, other = job.ranks
    wait_for_lines(path, 6)
    assert other.send(signal.SIGKILL)
    main.send(signal.SIGTERM)  # as the launcher does when one is gone
    assert (main.wait(), other.wait()) == (1, -signal.SIGKILL)
    assert "continue with --resume" in main.complaint
    before = path.read_bytes()
    assert whole.startswith(before[: before.rfind(b"\n") + 1])
    assert len(before) < len(whole)
    again = Job(commands, 3, "--output", "killed", "--resume")
    assert [rank.wait() for rank in again.ranks] == [0, 0, 0]
    assert path.read_bytes() == whole


@pytest.mark.slow
def test_one_of_two_killed_the_job_ends_and_three_finish_it(whole, tmp_path):
    path = tmp_path / "killed" / "records.jsonl"
    job = subprocess.Popen(torchrun(2, "--output", "killed"), stderr=subprocess.PIPE, text=True)
    while not path.exists() or path.read_bytes().count(b"\n") < 6:
        assert job.poll() is None
        time.sleep(0.005)
    os.kill(children(job.pid)[1], signal.SIGKILL)
    message = job.communicate(timeout=120)[1]
    assert job.returncode != 0
    assert "continue with --resume" in message
    before = path.read_bytes()
    assert whole.startswith(before[: before.rfind(b"\n") + 1])
    assert len(before) < len(whole)
    done = subprocess.run(torchrun(3, "--output", "killed", "--resume"), capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert path.read_bytes() == whole


@pytest.mark.slow
def test_the_main_process_killed_one_process_finishes(whole, tmp_path):
    path = tmp_path / "killed" / "records.jsonl"
    job = subprocess.Popen(torchrun(2, "--output", "killed"), stderr=subprocess.DEVNULL)
    while not path.exists() or path.read_bytes().count(b"\n") < 6:
        assert job.poll() is None
        time.sleep(0.005)
    os.kill(children(job.pid)[0], signal.SIGKILL)
    assert job.wait(timeout=120) != 0
    assert run(["certify", *SETTINGS, "--output", "killed", "--resume"]) == 0
    assert path.read_bytes() == whole


def test_what_every_process_gets_wrong_the_main_one_says(commands, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    job = Job(commands, 2, "--dataset", "nowhere")
    main, _ = job.ranks
    assert main.wait() == 2
    assert main.complaint.count("patchproof:") == 1


@pytest.mark.slow
def test_what_every_process_gets_wrong_is_said_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = subprocess.run(torchrun(2, "--dataset", "nowhere"), capture_output=True, text=True, timeout=200)
    assert done.returncode != 0
    assert done.stderr.count("patchproof:") == 1
