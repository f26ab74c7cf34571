"""The script that runs the evidence: several processes share its list."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from pathlib import Path

import pytest

from patchproof.cli import build_app

SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.fixture
def evidence(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import evidence

    yield evidence
    for name in ("evidence", "evidence_plan"):
        sys.modules.pop(name, None)


def pretend(evidence, folder: Path):
    """A step takes a moment, says so in a file, and is finished."""

    def execute(step, arguments):
        with (folder / "done").open("a") as log:
            log.write(f"{step.name}\n")
        time.sleep(0.03)
        target = arguments.runs / step.name
        target.mkdir(parents=True)
        (target / "results.json").write_text(json.dumps({"status": "complete"}))

    evidence.execute, evidence.SECONDS_TO_WAIT = execute, 0.01


@pytest.fixture
def arguments(tmp_path):
    return argparse.Namespace(runs=tmp_path / "runs", results=None, minutes=1.0, rate=1.0)


def test_processes_share_the_list_and_no_network_is_certified_before_it_is_trained(evidence, arguments, tmp_path):
    pretend(evidence, tmp_path)
    steps = [evidence.Step(f"a/train{t}", (), 1) for t in range(3)]
    steps += [evidence.Step(f"a/certify{t}-{c}", (), 1, after=f"a/train{t}") for t in range(3) for c in range(4)]
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=evidence.work, args=(steps, arguments)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=60)
        assert process.exitcode == 0
    order = (tmp_path / "done").read_text().split()
    assert sorted(order) == sorted(step.name for step in steps)
    assert all(order.index(step.after) < order.index(step.name) for step in steps if step.after)


def test_what_cannot_be_done_is_put_off_and_what_is_done_is_left_alone(evidence, arguments, tmp_path, capsys):
    pretend(evidence, tmp_path)
    steps = [
        evidence.Step("a/certify", (), 1, after="a/train"),
        evidence.Step("a/long", (), 10**9),
        evidence.Step("a/short", (), 1),
    ]
    for _ in range(2):
        evidence.work(steps, arguments)
    assert (tmp_path / "done").read_text().split() == ["a/short"]
    said = capsys.readouterr().out
    assert "put off: a/certify, since its network is not trained to the end" in said
    assert "put off: a/long" in said


def test_a_claim_ends_with_its_process(evidence, tmp_path):
    with evidence.claimed(tmp_path, "a/b") as mine, evidence.claimed(tmp_path, "a/b") as again:
        assert (mine, again) == (True, False)
    with evidence.claimed(tmp_path, "a/b") as mine:
        assert mine


def test_every_planned_command_is_one_that_exists(evidence, tmp_path):
    """Parsed by the command line itself, up to the data and weights that are not here."""
    app = build_app()

    for steps in evidence.EXPERIMENTS.values():
        for step in steps():
            command, _bound, *_ = app.parse_args(
                step.command(tmp_path, tmp_path), exit_on_error=False, print_error=False
            )
            assert command.__name__ == step.words[0]
