"""The script that runs the evidence: each step once, several at a time, whatever ends them."""

from __future__ import annotations

import contextlib
import itertools
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from patchproof.cli import build_app
from patchproof.types import CheckError

SCRIPTS = Path(__file__).parents[1] / "scripts"

PRETENDED = """
import json, os, pathlib, signal, sys, time
words = sys.argv[1:]
folder = pathlib.Path(words[words.index("--output") + 1])
diary = pathlib.Path(words[words.index("--diary") + 1])
def note(what):
    with diary.open("a") as file:
        file.write(f"{what} {folder.name}\\n")
note("begin")
folder.mkdir(parents=True, exist_ok=True)
limit = int(words[words.index("--limit") + 1]) if "--limit" in words else None
(folder / "manifest.json").write_text(json.dumps({"config": {"limit": limit}}))
if "slow" in folder.name:
    signal.signal(signal.SIGTERM, signal.SIG_IGN if "deaf" in folder.name else lambda *_: (note("stop"), os._exit(1)))
    note("listen")
    time.sleep(60)
time.sleep(0.2)
if "crash" in folder.name:
    os.kill(os.getpid(), signal.SIGKILL)
(folder / "checkpoint-last").mkdir()
(folder / "records.jsonl").write_text("a record")
whole = {"images": {"done": 3, "planned": 4 if "partly" in folder.name else 3}}
(folder / "results.json").write_text(json.dumps({"status": "complete"} if "train" in folder.name else whole))
note("end")
"""
"""In place of `patchproof`: it writes what a run writes, and says when."""


@pytest.fixture
def evidence(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import evidence

    (tmp_path / "pretended.py").write_text(PRETENDED)
    monkeypatch.setattr(evidence, "PROGRAM", [sys.executable, str(tmp_path / "pretended.py")])
    monkeypatch.setattr(evidence, "SECONDS_BETWEEN_LOOKS", 0.01)
    yield evidence
    for name in ("evidence", "evidence_plan"):
        sys.modules.pop(name, None)


@pytest.fixture
def step(evidence, tmp_path):
    def step(name: str, *words: str, after: str | None = None, passes: int = 1000):
        return evidence.Step(f"a/{name}", ("certify", "--diary", str(tmp_path / "diary"), *words), passes, after)

    return step


@pytest.fixture
def work(evidence, tmp_path):
    return lambda *steps, **plan: evidence.Work(list(steps), tmp_path, tmp_path / "runs", tmp_path / "results", **plan)


def diary(folder: Path, what: str | None = None) -> list[tuple[str, str]] | list[str]:
    """What the steps wrote down, in its order; or the names of those that wrote this."""
    lines = [tuple(line.split()) for line in (folder / "diary").read_text().splitlines()]
    return lines if what is None else sorted(name for word, name in lines if word == what)


def test_every_step_is_done_once_and_no_network_is_certified_before_it_is_trained(work, step, tmp_path):
    steps = [step(f"train{t}") for t in range(2)]
    steps += [step(f"certify{t}-{c}", after=f"a/train{t}") for t in range(2) for c in range(3)]
    assert work(*steps, processes=3).run() == 0
    lines = diary(tmp_path)
    assert diary(tmp_path, "begin") == sorted(s.name[2:] for s in steps)
    for t in range(2):
        begun = [lines.index(("begin", f"certify{t}-{c}")) for c in range(3)]
        assert lines.index(("end", f"train{t}")) < min(begun)
    at_once = [sum(1 if what == "begin" else -1 for what, _ in lines[: i + 1]) for i in range(len(lines))]
    assert max(at_once) == 3
    assert all((tmp_path / "results" / s.name / "records.jsonl.xz").exists() for s in steps)


def test_a_step_that_fails_is_tried_once_and_the_others_go_on(work, step, tmp_path, capsys):
    steps = step("train-crash"), step("certify", after="a/train-crash"), step("other")
    assert work(*steps, processes=2).run() == 1
    assert diary(tmp_path, "begin") == ["other", "train-crash"]
    said = capsys.readouterr().out
    assert "failed: a/train-crash, exit code -9" in said
    assert "put off: a/certify, since its network is not trained to the end" in said
    assert "1 done, 1 failed, 1 put off" in said
    assert (tmp_path / "results/a/other/results.json").exists()
    assert not (tmp_path / "results/a/train-crash").exists()


def test_what_is_kept_is_left_alone_until_the_plan_asks_for_other_images(evidence, work, step, tmp_path, capsys):
    few, many = (step("certify", "--limit", limit) for limit in ("2000", "2500"))
    for planned in (few, few, many):
        assert work(planned).run() == 0
    assert diary(tmp_path, "begin") == ["certify"]
    assert "was begun with another --limit; remove it" in capsys.readouterr().out
    for damage in (None, "{"):  # results that were cut off are not results
        (tmp_path / "runs").rename(tmp_path / f"away{damage}")
        if damage:
            (tmp_path / "results/a/certify/results.json").write_text(damage)
        assert work(many).run() == 0
        assert evidence.finished(tmp_path / "results/a/certify")
    assert diary(tmp_path, "end") == ["certify"] * 3
    assert evidence.limit_of(tmp_path / "results/a/certify") == 2500


def test_results_come_last_and_old_ones_go_first(evidence, work, step, tmp_path, monkeypatch):
    one, kept = step("certify"), tmp_path / "results/a/certify"
    assert work(one).run() == 0
    monkeypatch.setattr(evidence.lzma, "compress", lambda *_, **__: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        evidence.keep(tmp_path / "runs/a/certify", kept)
    assert not (kept / "results.json").exists()
    (tmp_path / "runs").rename(tmp_path / "away")
    again = work(one)
    assert (again.run(), again.failed) == (1, ["a/certify"])
    (tmp_path / "run").mkdir()
    with pytest.raises(CheckError, match="nothing to count"):
        evidence.keep(tmp_path / "run", tmp_path / "kept")
    assert not (tmp_path / "kept/results.json").exists()


def test_a_network_is_certified_only_if_it_is_there_and_trained_to_the_end(work, step, tmp_path, capsys):
    certify = step("certify", after="a/train")
    (tmp_path / "runs/a/train/checkpoint-last").mkdir(parents=True)
    assert work(certify).run() == 0
    assert "since its network is not trained to the end" in capsys.readouterr().out
    (tmp_path / "runs/a").rename(tmp_path / "away")
    (tmp_path / "results/a/train").mkdir(parents=True)
    (tmp_path / "results/a/train/results.json").write_text('{"status": "complete"}')
    assert work(certify).run() == 0
    assert "to train it anew, give another --results" in capsys.readouterr().out
    assert not (tmp_path / "diary").exists()


def test_what_does_not_fit_into_the_time_is_put_off(work, step, tmp_path, capsys):
    steps = step("long", passes=400_000), step("short-partly", passes=100_000)
    plan = {"processes": 2, "rate": 10_000.0, "ends": time.monotonic() + 60}  # each has half of the rate
    assert work(*steps, **plan).run() == 0
    assert diary(tmp_path, "begin") == ["short-partly"]
    assert "put off: a/long, for lack of time" in capsys.readouterr().out


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_stops_every_step(evidence, tmp_path, number):
    """The script in a process of its own, with steps that take a minute, one of which does not listen; the experiment
    is named twice, and its steps are done once."""
    program = f"""
import sys
sys.path.insert(0, {str(SCRIPTS)!r})
import evidence
evidence.PROGRAM, evidence.SECONDS_TO_STOP = {evidence.PROGRAM!r}, 1.0
WORDS = ("certify", "--diary", {str(tmp_path / "diary")!r})
evidence.EXPERIMENTS["demo"] = lambda: [evidence.Step(f"a/{{n}}", WORDS, 1) for n in ("slow", "slow-deaf", "slower")]
sys.argv = ["evidence", "demo", "demo", "--data", "d", "--runs", "runs", "--results", "results", "--processes", "2"]
sys.exit(evidence.main())
"""
    process = subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    ends = time.monotonic() + 60
    while not (tmp_path / "diary").exists() or len(diary(tmp_path, "listen")) < 2:
        assert time.monotonic() < ends
        time.sleep(0.05)
    process.send_signal(number)
    said, _ = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "stopped; the same command goes on" in said
    assert diary(tmp_path, "begin") == ["slow", "slow-deaf"]
    assert diary(tmp_path, "stop") == ["slow"]
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has just ended
            assert str(tmp_path / "pretended.py").encode() not in path.read_bytes()


def test_every_planned_command_is_one_that_exists(evidence, tmp_path):
    """Parsed by the command line itself, up to the data and weights that are not here; one of each set of flags."""
    steps = [step for steps in evidence.EXPERIMENTS.values() for step in steps()]
    kinds = {tuple(word for word in step.words if word.startswith("--")): step for step in steps}
    app = build_app()
    for one in kinds.values():
        command, *_ = app.parse_args(one.command(tmp_path, tmp_path), exit_on_error=False, print_error=False)
        assert command.__name__ == one.words[0]


def test_all_that_is_planned_was_done_as_planned(evidence):
    """And nothing else, but for what single commands made: the demo, the leaderboard, docs/howto/strategy.md. Where it
    ran and how fast is in no plan."""
    by_machine = {"dataset", "weights", "workers", "compile", "device"}
    results = SCRIPTS.parent / "results"
    planned = {step.name: step for steps in evidence.EXPERIMENTS.values() for step in steps()}
    done = {path.parent.relative_to(results).as_posix() for path in results.rglob("manifest.json")}
    unplanned = ("demo/", "leaderboard/", "imagenette-stronger/", "fashion-memory/", "cifar10-memory/")
    assert {name for name in done if not name.startswith(unplanned)} == set(planned)
    for name, one in planned.items():
        made = json.loads((results / name / "manifest.json").read_text("utf-8"))
        pairs = [(word, after) for word, after in itertools.pairwise((*one.words, "--")) if word.startswith("--")]
        asked = {word[2:].replace("-", "_"): "True" if after.startswith("--") else after for word, after in pairs}
        for key, word in asked.items() if made["command"] == one.words[0] else [("command", "")]:
            found = made["config"][key]
            same = found == float(word) if isinstance(found, float) else str(found) == word
            assert same or key in by_machine, (name, key)
        assert evidence.finished(results / name), name
