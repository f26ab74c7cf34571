"""Several processes share out pieces of work: each piece once, answers in order, and nobody waits for the dead."""

from __future__ import annotations

import threading

import pytest
from torch.distributed import HashStore, TCPStore

from patchproof.team import Team, join_team
from patchproof.types import CheckError, InputError

PIECES = range(5, 42)


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def teams(store: TCPStore, size: int) -> list[Team]:
    return [Team(rank, size, store.clone()) for rank in range(size)]


def test_a_process_on_its_own_does_every_piece_in_order():
    team = Team()
    assert list(team.claims(PIECES)) == list(PIECES)
    for piece in PIECES:
        team.deliver(piece, f"answer {piece}")
    assert list(team.gathered(PIECES)) == [f"answer {piece}" for piece in PIECES]


@pytest.mark.parametrize("size", [2, 3, 7])
def test_every_piece_is_claimed_once_and_gathered_in_order_whoever_did_it(store, size):
    claimed: dict[int, list[int]] = {}

    def work(team: Team) -> None:
        with team.at_work():
            for piece in team.claims(PIECES):
                claimed.setdefault(team.rank, []).append(piece)
                team.deliver(piece, str(piece))

    members = teams(store, size)
    helpers = [threading.Thread(target=work, args=(member,)) for member in members[1:]]
    for helper in helpers:
        helper.start()
    work(members[0])
    assert list(members[0].gathered(PIECES, wait=True)) == [str(piece) for piece in PIECES]
    for helper in helpers:
        helper.join()
    assert sorted(piece for pieces in claimed.values() for piece in pieces) == list(PIECES)


def test_what_is_not_there_yet_is_not_waited_for_and_order_is_kept(store):
    main, helper = teams(store, 2)
    helper.deliver(6, "six")
    assert list(main.gathered(range(5, 8))) == []
    main.deliver(5, "five")
    assert list(main.gathered(range(5, 8))) == ["five", "six"]
    assert list(main.gathered(range(7, 8))) == []


def test_what_one_process_leaves_another_is_told(store):
    main, helper = teams(store, 2)
    helper.tell("manifest/1", {"tau": 0.1, "names": ["a", "b"]})
    assert main.told("manifest/1") == {"tau": 0.1, "names": ["a", "b"]}


def test_a_process_that_fails_is_named_at_once(store):
    main, helper = teams(store, 2)
    with pytest.raises(InputError), helper.at_work():
        raise InputError("no such image: cat.png")
    with pytest.raises(CheckError, match=r"process 1 of 2 has failed: no such image: cat.png \(whatever was finished"):
        list(main.gathered(PIECES, wait=True))


def test_a_process_that_falls_silent_is_named_and_one_that_has_finished_is_not(store):
    main, finished, _ = (Team(rank, 3, store.clone(), dead_after=0.3) for rank in range(3))
    with finished.at_work():
        finished.deliver(5, "five")
    with pytest.raises(CheckError, match=r"process 2 of 3 has not answered for 0 s; .* --resume"):
        list(main.gathered(PIECES, wait=True))


def test_a_process_whose_main_is_gone_says_so():
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    helper = Team(1, 2, store.clone())
    del store
    with pytest.raises(CheckError, match="process 1 of 2 cannot claim work from the main process any more"):
        list(helper.claims(PIECES))


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"WORLD_SIZE": "2"}, "MASTER_ADDR and MASTER_PORT are not set; start with torchrun"),
        ({"WORLD_SIZE": "two"}, "RANK and WORLD_SIZE must be numbers"),
    ],
)
def test_half_an_environment_is_refused(monkeypatch, variables, message):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=message):
        join_team()


def test_without_a_launcher_there_is_a_team_of_one(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert join_team().size == 1
    with pytest.raises(InputError, match="told nothing"):
        join_team().told("go")


def test_stores_without_a_network_work_too():
    main = Team(0, 1, HashStore())
    assert list(main.claims(range(3))) == [0, 1, 2]
