"""The memory of a strategy: merged over processes, saved with the weights, and equal after any interruption."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import patchproof as pp
from patchproof.training.memory import merged, state_of
from patchproof.types import CheckError, InputError
from test_seams import WorstRemembered, examples

NAN = float("nan")
IMAGES = 22
values = st.sampled_from([0.0, 1.0, -2.5, NAN])


@given(st.lists(values, min_size=1, max_size=8), st.data())
def test_merging_takes_the_changes_that_each_process_made_to_its_own_images(before, data):
    """The memory is a tensor by image and a mapping by image, which may gain and lose entries."""
    owner = [data.draw(st.integers(0, 2)) for _ in before]
    after = [data.draw(values) for _ in before]
    removed = {i for i in range(len(before)) if data.draw(st.booleans())}
    added = {f"new {process}": float(process) for process in range(3)}

    def plain(value):
        return None if math.isnan(value) else value  # a NaN is no JSON

    def seen_by(process):
        mine = [new if owner[i] == process else old for i, (old, new) in enumerate(zip(before, after, strict=True))]
        kept = {str(i): plain(v) for i, v in enumerate(mine) if not (owner[i] == process and i in removed)}
        return {"tensor": torch.tensor(mine), "mapping": {**kept, f"new {process}": added[f"new {process}"]}}

    old = {"tensor": torch.tensor(before), "mapping": {str(i): plain(v) for i, v in enumerate(before)}}
    found = merged(old, [seen_by(process) for process in range(3)])
    torch.testing.assert_close(found["tensor"], torch.tensor(after), equal_nan=True, rtol=0, atol=0)
    assert found["mapping"] == {str(i): plain(v) for i, v in enumerate(after) if i not in removed} | added


CONFLICTS = {
    "state.seen": (torch.zeros(3), torch.tensor([1.0, 0, 0]), torch.tensor([NAN, 0, 0])),
    "state.seen.7": ({"7": 0}, {"7": 1}, {"7": 2}),
    "state.seen.8": ({}, {"8": [1]}, {"8": [2]}),
    "state.seen in": (3, 4, 5),
}


@pytest.mark.parametrize("name", CONFLICTS)
def test_processes_that_change_the_same_entry_must_agree(name):
    before, one, other = CONFLICTS[name]
    with pytest.raises(
        CheckError, match=rf"two processes changed the strategy's {name}.*keep what it remembers per im"
    ):
        merged({"seen": before}, [{"seen": one}, {"seen": other}])
    for agreed in (one, before):
        found = merged({"seen": before}, [{"seen": one}, {"seen": agreed}])["seen"]
        assert torch.equal(found, one) if isinstance(one, torch.Tensor) else found == one


def test_merging_keeps_what_no_process_changed_and_lets_tensors_grow():
    states = [{"steps": 2, "several": [1, {"2": None}]} for _ in range(3)]
    assert merged(states[0], states[1:]) == states[0]
    rows = [torch.tensor([[1.0], [NAN]]), torch.tensor([[NAN], [NAN], [2.0]])]
    grown = merged({"grown": torch.zeros(0, 1)}, [{"grown": tensor} for tensor in rows])["grown"]
    assert grown.nan_to_num(-1).tolist() == [[1], [-1], [2]], "what one process lacks the other has"
    assert merged({"grown": torch.zeros(2)}, [{"grown": torch.zeros(3)}] * 2)["grown"].shape == (3,)


def test_state_that_a_checkpoint_could_not_restore_is_refused():
    for wrong in ({1: 2}, [torch.zeros(1)], (1, 2), NAN):
        with pytest.raises(InputError, match="the strategy's state 'seen'"):
            state_of(SimpleNamespace(state_dict=lambda wrong=wrong: {"seen": wrong}, load_state_dict=None))
    state = {"seen": torch.full((2,), NAN), "of": {"1": [2]}}
    kept = state_of(SimpleNamespace(state_dict=lambda: state, load_state_dict=None))
    assert kept["of"] == {"1": [2]}
    assert state_of(lambda *_: None) == {}


def test_a_memory_that_could_not_be_loaded_is_refused_before_the_training_begins(tmp_path):
    class Half:
        state_dict = WorstRemembered.state_dict
        __call__ = WorstRemembered.__call__

    with pytest.raises(InputError, match=r"state_dict\(\) but no load_state_dict\(state\), .*; add it, or remove"):
        train(tmp_path / "run", strategy=Half())
    assert not (tmp_path / "run").exists()


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 12 * 12, 3)).eval()


def train(folder=None, *, stop=None, seen=None, batch_size=8, strategy=None, **options):
    def on_step(report):
        seen is None or seen.append(report.step)
        if report.step == stop:
            raise KeyboardInterrupt

    plan = pp.Plan(strategy=strategy or WorstRemembered(), epochs=3, batch_size=batch_size, learning_rate=0.1)
    trained = pp.train(network(), examples()[:IMAGES], plan, folder=folder, on_step=on_step, **options)
    return trained.classifier.state_dict(), plan.strategy


@pytest.mark.parametrize("stop", [1, 3, 7])  # step 3 ends the first epoch
def test_a_run_ended_by_its_callback_is_resumed_bit_for_bit_memory_included(tmp_path, stop):
    (weights, strategy), seen = train(), []
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "run", stop=stop, seen=seen)
    with pytest.raises(pp.InputError, match="already holds a run"):
        train(tmp_path / "run")
    again, resumed = train(tmp_path / "run", resume=True, seen=seen)
    assert seen == list(range(1, 10)), "each step is seen once"
    assert all(torch.equal(again[name], value) for name, value in weights.items())
    assert torch.equal(resumed.losses, strategy.losses)
    assert resumed.seen == strategy.seen == {str(i): 3 for i in range(IMAGES)}


def remembering():
    return pp.masking_strategy("memory", image_size=(12, 12), generator=torch.Generator(), tries=(2, 2, 2, 1))


def test_images_of_a_new_training_are_not_taken_for_mirrored():
    used, fresh = remembering(), remembering()
    used.mirrored = torch.ones(8, dtype=torch.bool)
    for strategy in (used, fresh):
        train(strategy=strategy, limit=8)
    torch.testing.assert_close(used.table, fresh.table, rtol=0, atol=0, equal_nan=True)


def main(folder: str, kind: str) -> None:
    weights, strategy = train(Path(folder), batch_size=6, strategy=remembering() if kind == "memory" else None)
    found = {name: value for name, value in strategy.state_dict().items() if name != "losses"}
    found |= {"losses": strategy.state_dict()["losses"].nan_to_num(-1).tolist(), "bias": weights["1.bias"].tolist()}
    Path(folder, f"rank-{os.environ['RANK']}.json").write_text(json.dumps(found))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["own", "memory"])
def test_two_processes_keep_one_memory(tmp_path, kind):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone", __file__]
    subprocess.run([*command, str(tmp_path), kind], check=True, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""})
    one, two = (json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2))
    assert one == two
    losses = torch.tensor(one["losses"])
    if kind == "own":
        assert one["seen"] == {str(i): 3 for i in range(IMAGES)}
        assert (losses[:IMAGES] > 0).all(), "each process has seen half of the images"
        return
    alone = train(batch_size=6, strategy=remembering())[1].table.nan_to_num(-1)
    torch.testing.assert_close(losses, alone, rtol=1e-4, atol=1e-5)
    assert (alone[:, :9] >= 0).all()
    assert (alone == -1).any(), "some masks have never been tried"


if __name__ == "__main__":
    main(*sys.argv[1:])
