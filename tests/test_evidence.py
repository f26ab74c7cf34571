"""The script that runs the evidence: each step once, several at a time, whatever ends them."""

from __future__ import annotations

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
if "fail" in folder.name:
    sys.exit(3)
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


def step(evidence, name: str, folder: Path, *words: str, after: str | None = None):
    return evidence.Step(f"a/{name}", ("certify", "--diary", str(folder / "diary"), *words), 1000, after)


def work(evidence, folder: Path, steps, **settings):
    return evidence.Work(list(steps), folder, folder / "runs", folder / "results", **settings)


def diary(folder: Path) -> list[tuple[str, str]]:
    path = folder / "diary"
    return [tuple(line.split()) for line in path.read_text().splitlines()] if path.exists() else []


def test_every_step_is_done_once_and_no_network_is_certified_before_it_is_trained(evidence, tmp_path):
    steps = [step(evidence, f"train{t}", tmp_path) for t in range(2)]
    steps += [step(evidence, f"certify{t}-{c}", tmp_path, after=f"a/train{t}") for t in range(2) for c in range(3)]
    assert work(evidence, tmp_path, steps, processes=3).run() == 0
    lines = diary(tmp_path)
    assert sorted(name for what, name in lines if what == "begin") == sorted(s.name[2:] for s in steps)
    for t in range(2):
        begun = [lines.index(("begin", f"certify{t}-{c}")) for c in range(3)]
        assert lines.index(("end", f"train{t}")) < min(begun)
    at_once = [sum(1 if what == "begin" else -1 for what, _ in lines[: i + 1]) for i in range(len(lines))]
    assert max(at_once) == 3
    assert all((tmp_path / "results" / s.name / "records.jsonl.xz").exists() for s in steps)


@pytest.mark.parametrize("end", ["fail", "crash"])
def test_a_step_that_fails_is_tried_once_and_the_others_go_on(evidence, tmp_path, capsys, end):
    steps = [
        step(evidence, f"train-{end}", tmp_path),
        step(evidence, "certify", tmp_path, after=f"a/train-{end}"),
        step(evidence, "other", tmp_path),
    ]
    assert work(evidence, tmp_path, steps, processes=2).run() == 1
    assert sorted(name for what, name in diary(tmp_path) if what == "begin") == ["other", f"train-{end}"]
    said = capsys.readouterr().out
    assert f"failed: a/train-{end}, exit code {3 if end == 'fail' else -9}" in said
    assert "put off: a/certify, since its network is not trained to the end" in said
    assert "1 done, 1 failed, 1 put off" in said
    assert (tmp_path / "results/a/other/results.json").exists()
    assert not (tmp_path / f"results/a/train-{end}").exists()


def test_what_is_kept_is_left_alone_until_the_plan_asks_for_other_images(evidence, tmp_path, capsys):
    few, many = (step(evidence, "certify", tmp_path, "--limit", limit) for limit in ("2000", "2500"))
    for planned in (few, few, many):
        assert work(evidence, tmp_path, [planned]).run() == 0
    assert diary(tmp_path) == [("begin", "certify"), ("end", "certify")]
    assert "was begun with another --limit; remove it" in capsys.readouterr().out
    (tmp_path / "runs").rename(tmp_path / "away")
    assert work(evidence, tmp_path, [many]).run() == 0
    assert len(diary(tmp_path)) == 4
    assert evidence.limit_of(tmp_path / "results/a/certify") == 2500


@pytest.mark.parametrize("damage", ["", "{"])
def test_results_that_were_cut_off_are_not_results(evidence, tmp_path, damage):
    one = step(evidence, "certify", tmp_path)
    assert work(evidence, tmp_path, [one]).run() == 0
    (tmp_path / "results/a/certify/results.json").write_text(damage)
    (tmp_path / "runs").rename(tmp_path / "away")
    assert work(evidence, tmp_path, [one]).run() == 0
    assert evidence.finished(tmp_path / "results/a/certify")


def test_results_come_last_and_old_ones_go_first(evidence, tmp_path, monkeypatch):
    one = step(evidence, "certify", tmp_path)
    assert work(evidence, tmp_path, [one]).run() == 0
    monkeypatch.setattr(evidence.lzma, "compress", lambda *_, **__: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        evidence.keep(tmp_path / "runs/a/certify", tmp_path / "results/a/certify")
    assert not (tmp_path / "results/a/certify/results.json").exists()
    again = work(evidence, tmp_path, [one])
    (tmp_path / "runs").rename(tmp_path / "away")
    assert again.run() == 1, "one step fails, the others would go on"
    assert again.failed == ["a/certify"]


def test_a_run_that_is_not_whole_is_gone_on_with(evidence, tmp_path):
    assert work(evidence, tmp_path, [step(evidence, "certify-partly", tmp_path)]).run() == 0
    assert not evidence.finished(tmp_path / "results/a/certify-partly")


def test_a_network_is_certified_only_if_it_is_there_and_trained_to_the_end(evidence, tmp_path, capsys):
    certify = step(evidence, "certify", tmp_path, after="a/train")
    (tmp_path / "runs/a/train/checkpoint-last").mkdir(parents=True)
    assert work(evidence, tmp_path, [certify]).run() == 0
    assert "since its network is not trained to the end" in capsys.readouterr().out
    (tmp_path / "runs/a").rename(tmp_path / "away")
    (tmp_path / "results/a/train").mkdir(parents=True)
    (tmp_path / "results/a/train/results.json").write_text('{"status": "complete"}')
    assert work(evidence, tmp_path, [certify]).run() == 0
    assert "to train it anew, give another --results" in capsys.readouterr().out
    assert diary(tmp_path) == []


def test_results_without_records_are_not_kept(evidence, tmp_path):
    (tmp_path / "run").mkdir()
    with pytest.raises(CheckError, match="nothing to count"):
        evidence.keep(tmp_path / "run", tmp_path / "kept")
    assert not (tmp_path / "kept/results.json").exists()


def test_what_does_not_fit_into_the_time_is_put_off(evidence, tmp_path, capsys):
    words = ("certify", "--diary", str(tmp_path / "diary"))
    steps = [evidence.Step("a/long", words, 400_000), evidence.Step("a/short", words, 100_000)]
    plan = {"processes": 2, "rate": 10_000.0, "ends": time.monotonic() + 60}  # each has half of the rate
    assert work(evidence, tmp_path, steps, **plan).run() == 0
    assert diary(tmp_path) == [("begin", "short"), ("end", "short")]
    assert "put off: a/long, for lack of time" in capsys.readouterr().out


def alive(program: Path) -> list[bytes]:
    """The commands of processes that run this program."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_bytes())
        except OSError:  # it has just ended
            continue
    return [command for command in found if str(program).encode() in command]


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_stops_every_step(evidence, tmp_path, number):
    """The whole script in a process of its own, with steps that take a minute, one of which does not listen; the
    experiment is named twice, and its steps are done once."""
    words = ("certify", "--diary", str(tmp_path / "diary"))
    program = f"""
import sys
sys.path.insert(0, {str(SCRIPTS)!r})
import evidence
evidence.PROGRAM, evidence.SECONDS_TO_STOP = {evidence.PROGRAM!r}, 1.0
NAMES = "slow", "slow-deaf", "slower"
evidence.EXPERIMENTS["demo"] = lambda: [evidence.Step(f"a/{{n}}", {words!r}, 1) for n in NAMES]
sys.argv = ["evidence", "demo", "demo", "--data", "d", "--runs", "runs", "--results", "results", "--processes", "2"]
sys.exit(evidence.main())
"""
    process = subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    ends = time.monotonic() + 60
    while [what for what, _ in diary(tmp_path)].count("listen") < 2 and time.monotonic() < ends:
        time.sleep(0.05)
    process.send_signal(number)
    said, _ = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "stopped; the same command goes on" in said
    begun = [who for what, who in diary(tmp_path) if what == "begin"]
    assert sorted(begun) == ["slow", "slow-deaf"]
    assert [who for what, who in diary(tmp_path) if what == "stop"] == ["slow"]
    assert not alive(tmp_path / "pretended.py")


def test_less_than_one_process_is_refused(evidence, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["evidence", "imagenet", "--data", "d", "--processes", "0"])
    with pytest.raises(SystemExit):
        evidence.main()
    assert "--processes must be at least 1" in capsys.readouterr().err


def test_every_planned_command_is_one_that_exists(evidence, tmp_path):
    """Parsed by the command line itself, up to the data and weights that are not here; one of each set of flags."""
    steps = [step for steps in evidence.EXPERIMENTS.values() for step in steps()]
    kinds = {tuple(word for word in step.words if word.startswith("--")): step for step in steps}
    app = build_app()
    for one in kinds.values():
        words = one.command(tmp_path, tmp_path)
        command, *_ = app.parse_args(words, exit_on_error=False, print_error=False)
        assert command.__name__ == one.words[0]


def test_all_that_is_planned_was_done_as_planned(evidence):
    """And nothing else, but for the demo, which has no plan. Where it ran and how fast is not in the plan."""
    by_machine = {"dataset", "weights", "workers", "compile", "device"}
    results = SCRIPTS.parent / "results"
    planned = {step.name: step for steps in evidence.EXPERIMENTS.values() for step in steps()}
    done = {path.parent.relative_to(results).as_posix() for path in results.rglob("manifest.json")}
    assert {name for name in done if not name.startswith("demo/")} == set(planned)
    for name, one in planned.items():
        made = json.loads((results / name / "manifest.json").read_text("utf-8"))
        config = made["config"]
        differing = {name: config[name] for name, word in flags(one.words).items() if not same(config[name], word)}
        assert (made["command"], differing.keys() - by_machine) == (one.words[0], set()), name
        assert evidence.finished(results / name), name


def flags(words: tuple[str, ...]) -> dict[str, str]:
    """`--image-size 224 --compile` by the names that a manifest has for them."""
    pairs = [(word, after) for word, after in itertools.pairwise((*words, "--")) if word.startswith("--")]
    return {word[2:].replace("-", "_"): "True" if after.startswith("--") else after for word, after in pairs}


def same(recorded: object, word: str) -> bool:
    return recorded == float(word) if isinstance(recorded, float) else str(recorded) == word
