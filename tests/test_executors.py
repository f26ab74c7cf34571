"""Several processes share out pieces of work: each piece once, answers in order, and nobody waits for the dead."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass

import pytest
import torch
from torch.distributed import TCPStore

import patchproof as pp
from patchproof.runs import executors
from patchproof.runs.executors import InProcess, Torchrun, launched, local_rank
from patchproof.types import CheckError, InputError
from reference import measured

PIECES = range(5, 42)


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@dataclass
class Answer:
    text: str

    def dump(self) -> str:
        return self.text


def job(numbers):
    for number in numbers:
        yield number, Answer(f"answer {number}")


def together(*work) -> list:
    """What each function returns, all at once; the first failure is raised."""
    found, failed = [None] * len(work), []

    def call(position):
        try:
            found[position] = work[position]()
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=call, args=(position,), daemon=True) for position in range(len(work))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert failed or not thread.is_alive(), "it waits for ever"
    if failed:
        raise failed[0]
    return found


@pytest.mark.parametrize("size", [1, 2, 5])
def test_every_piece_is_done_once_and_answered_in_order_whoever_did_it(store, size):
    done, expected = [], [f"answer {number}" for number in PIECES]

    def work(executor):
        def noted(numbers):
            for number, answer in job(numbers):
                done.append(number)
                yield number, answer

        with executor.at_work():
            everyone = executor.gather({"rank": executor.rank})
            told = executor.share({"go": [1, 2]} if executor.rank == 0 else None)
            return everyone, told, [a.text for a in executor.run(noted, PIECES, Answer)]

    team = [Torchrun(rank, size, store.clone()) for rank in range(size)] if size > 1 else [InProcess()]
    for _ in range(2):  # the same processes may make several runs
        done.clear()
        main, *others = together(*(lambda e=e: work(e) for e in team))
        assert main == ([{"rank": rank} for rank in range(size)], {"go": [1, 2]}, expected)
        assert all(other == ([], {"go": [1, 2]}, []) for other in others)
        assert sorted(done) == list(PIECES)


def test_a_process_holds_at_most_one_piece_ahead_of_the_one_it_works_on(store, tmp_path):
    """Through a certification: decoding and copying run ahead of the passes, and must not hoard work."""
    threat = pp.PatchThreat.square(image_size=(6, 6), pixels=2)
    masks = pp.covering_masks(threat, per_axis=2)
    data = [(torch.full((1, 6, 6), i / 24), i % 2) for i in range(24)]
    ahead, shares = [], {0: 0, 1: 0}

    def classifier(images):
        return torch.stack([images.mean((1, 2, 3)), 0.6 - images.mean((1, 2, 3))], dim=1)

    class Watched(Torchrun):
        claimed = worked = 0

        def _claims(self, *arguments):
            for number in super()._claims(*arguments):
                self.claimed += 1
                yield number

    @dataclass(frozen=True)
    class Slow(pp.PatchCleanser):
        executor: object = None
        images_at_once = 2

        def assess(self, images, labels=None):
            time.sleep(0.05 * (1 + self.executor.rank))
            self.executor.worked += 1
            shares[self.executor.rank] += len(images)
            ahead.append(self.executor.claimed - self.executor.worked)
            return super().assess(images, labels)

    def run(rank):
        executor = Watched(rank, 2, store.clone())
        defense = Slow(classifier, masks, threat, executor=executor)
        folder = tmp_path / "two" if rank == 0 else None
        return pp.certify(defense, data, folder=folder, executor=executor)

    main, other = together(lambda: run(0), lambda: run(1))
    alone = pp.certify(pp.PatchCleanser(classifier, masks, threat), data, folder=tmp_path / "one")
    assert (tmp_path / "two/records.jsonl").read_bytes() == (tmp_path / "one/records.jsonl").read_bytes()
    assert main.records == alone.records
    assert other.records == ()
    assert max(ahead) <= 1
    assert sum(shares.values()) == 24
    assert min(shares.values()) > 0
    assert main.content["cost"]["processes"] == 2


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda answers: [*answers[:2], answers[1]], "for piece 2 came another"),
        (lambda answers: answers[::-1], "for piece 0 came another"),
        (lambda answers: answers[:-1], "for piece 3 came nothing"),
        (lambda answers: [*answers, answers[-1]], "after the last piece came another"),
        (lambda answers: list(enumerate(answers)), "for piece 0 came tuple"),
        (lambda answers: None, "for piece 0 came nothing"),
    ],
)
def test_an_executor_that_repeats_leaves_out_or_swaps_answers_is_named_and_can_be_resumed(tmp_path, wrong, words):
    class Mine(InProcess):
        def run(self, job, pieces, load):
            return wrong([answer for _, answer in job(iter(pieces))])

    threat = pp.PatchThreat.square(image_size=(6, 6), pixels=2)
    data = [(torch.full((1, 6, 6), (i + 1) / 8), 0) for i in range(8)]
    defense = pp.PatchCleanser(Wobbly(), pp.covering_masks(threat, per_axis=2), threat, engine=pp.Engine(batch_size=8))
    message = f"Mine.run must yield the answers in the order of the pieces, once each; {words}"
    with pytest.raises(CheckError, match=message):
        pp.certify(defense, data, folder=tmp_path, executor=Mine())
    assert pp.certify(defense, data, folder=tmp_path, resume=True).certified.n == 8


class Wobbly:
    """In fast arithmetic every label leads by 0.05, in float32 by 0.01 times the brightness: all are decided again."""

    def __call__(self, images):
        lead = images.mean((1, 2, 3)) * 0.01
        lead = torch.full_like(lead, 0.05) if torch.is_autocast_enabled("cpu") else lead
        return torch.stack([lead, torch.zeros_like(lead)], dim=1)


@pytest.mark.parametrize(("at_once", "stop"), [(2, 1), (4, 2), (4, 5)])
@pytest.mark.parametrize("killed", [False, True])
def test_the_audit_of_a_resumed_piece_is_counted_once(tmp_path, at_once, stop, killed):
    """The first session stops in or after a piece of so many images, the second works in pieces of 4. If it is killed,
    it leaves an older results.json, and a line of progress.jsonl may speak of records that were not written."""
    threat = pp.PatchThreat.square(image_size=(6, 6), pixels=2)
    data = [(torch.full((1, 6, 6), (i + 1) / 8), 0) for i in range(8)]

    def run(folder, at_once, stop=None):
        def on_record(record):
            if record.index == stop:
                raise KeyboardInterrupt

        engine = pp.Engine(precision="bf16", batch_size=4 * at_once)
        defense = pp.PatchCleanser(Wobbly(), pp.covering_masks(threat, per_axis=2), threat, engine=engine)
        return pp.certify(defense, data, folder=tmp_path / folder, resume=True, on_record=on_record)

    whole = run("whole", 4)
    with pytest.raises(KeyboardInterrupt):
        run("resumed", at_once, stop)
    if killed:
        results, path = tmp_path / "resumed/results.json", tmp_path / "resumed/progress.jsonl"
        spent = json.loads(path.read_text().splitlines()[-1])
        spent["cost"]["seconds"] += 1000
        ahead = spent | {"images": spent["images"] | {"done": 7}, "audit": {}}
        path.write_text(f"\n{json.dumps(spent)}\n{json.dumps(ahead)}\n{{cut")
        results.write_text(json.dumps({"images": {"done": 0}, "cost": {"seconds": 2000}}))  # of a session before it
    resumed = run("resumed", 4)
    assert (resumed.content["cost"]["seconds"] > 1000) == killed
    assert whole.content["audit"]["redone"] > 0
    assert resumed.content["audit"] == whole.content["audit"]
    assert (tmp_path / "resumed/records.jsonl").read_bytes() == (tmp_path / "whole/records.jsonl").read_bytes()


def test_processes_that_see_different_things_are_refused(store):
    threat = pp.PatchThreat.square(image_size=(6, 6), pixels=2)
    masks = pp.covering_masks(threat, per_axis=2)

    def run(rank):
        data = [(torch.full((1, 6, 6), 0.5 + 0.1 * rank), 0)]
        defense = pp.PatchCleanser(lambda x: x.flatten(1)[:, :3], masks, threat, engine=measured())
        return pp.certify(defense, data, executor=Torchrun(rank, 2, store.clone()))

    with pytest.raises(CheckError, match=r"process 1 of 2 has another data_sha256|process 0 of 2 has failed"):
        together(lambda: run(0), lambda: run(1))


def test_a_process_that_fails_is_named_at_once_and_the_next_run_knows_nothing_of_it(store):
    main, helper = (Torchrun(rank, 2, store.clone()) for rank in range(2))
    with pytest.raises(InputError), helper.at_work():
        raise InputError("no such image: cat.png")
    message = r"process 1 of 2 has failed: no such image: cat.png \(whatever was finished"
    with pytest.raises(CheckError, match=message), main.at_work():
        together(lambda: main.gather(0))
    with helper.at_work():
        helper.gather(1)
    with main.at_work():
        assert together(lambda: main.gather(0)) == [[0, 1]]


def test_a_process_that_falls_silent_is_named_and_one_that_has_finished_is_not(store, monkeypatch):
    """Also in the second run of the same processes, which the third does not reach."""
    monkeypatch.setattr(executors, "BEAT_SECONDS", 0.02)
    monkeypatch.setattr(executors, "DEAD_AFTER_SECONDS", 0.3)
    main, finished, silent = (Torchrun(rank, 3, store.clone()) for rank in range(3))
    for executor in (main, finished, silent, finished):
        with executor.at_work():
            time.sleep(0.05)
    message = r"process 2 of 3 has not answered for 0 s; .*resume on any number"
    with pytest.raises(CheckError, match=message), main.at_work():
        together(lambda: list(main.run(lambda numbers: iter(()), PIECES, Answer)))


def test_a_process_whose_main_is_gone_says_so():
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    helper = Torchrun(1, 2, store.clone())
    del store
    with pytest.raises(CheckError, match="process 1 of 2 cannot reach the main process any more"):
        list(helper.run(job, PIECES, Answer))


def test_without_a_launcher_this_process_is_alone_and_half_an_environment_is_refused(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    launched.cache_clear()
    assert isinstance(launched(), InProcess)
    assert local_rank() is None
    monkeypatch.setenv("WORLD_SIZE", "two")
    launched.cache_clear()
    with pytest.raises(InputError, match="WORLD_SIZE must be a whole number, not 'two'"):
        launched()
    monkeypatch.setenv("WORLD_SIZE", "2")
    launched.cache_clear()
    with pytest.raises(InputError, match="MASTER_ADDR and MASTER_PORT are not set; start with torchrun"):
        launched()
