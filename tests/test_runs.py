"""Runs from Python: any data, classifier and defence; what is on disk whatever happens; and attacks that keep the order
certified ≤ attacked ≤ defended."""

from __future__ import annotations

import json
import lzma
import shutil
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import nn

import patchproof as pp
from patchproof.attacks import AttackPlan
from patchproof.cli.ls import runs_below
from patchproof.data import open_dataset
from patchproof.runs import Record, _train, measure_on_generated, read_run
from patchproof.runs._attack import Attacker
from patchproof.runs.executors import InProcess
from patchproof.types import CheckError, InputError
from reference import measured
from small_model import plain_classifier, plain_network

THREAT = pp.PatchThreat.square(image_size=(28, 28), pixels=4)
MASKS = pp.covering_masks(THREAT, per_axis=3)
SOURCE = open_dataset("fashion-mini")
PICTURES = [(SOURCE.load(i), SOURCE.labels[i]) for i in range(0, 1000, 50)]
TENSORS = [(torch.from_numpy(SOURCE.pixels[i].copy())[None].expand(3, -1, -1) / 255, SOURCE.labels[i])
           for i in range(0, 1000, 50)]  # fmt: skip
SMALL = pp.Engine(batch_size=64)
"""Pieces of four images."""


def double_masking(classifier=None, **options):
    return pp.PatchCleanser(classifier or plain_classifier(), MASKS, THREAT, **{"engine": SMALL} | options)


def findings(results):
    return [(r.index, r.label, r.undefended, r.defended, r.certified) for r in results.records]


def test_any_sequence_and_any_callable_will_do_and_without_a_folder_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    network = plain_classifier()

    class Lazy:
        """A data set as torch has them: items are made when they are asked for."""

        def __len__(self):
            return len(PICTURES)

        def __getitem__(self, index):
            return PICTURES[index]

    expected = pp.certify(double_masking(network), PICTURES)
    assert 0 < expected.certified.k < expected.defended.k <= expected.certified.n == 20
    assert [r.index for r in expected.records] == list(range(20))
    assert repr(expected).startswith("Results(rates=")
    images, labels = torch.stack([image for image, _ in TENSORS]), torch.tensor([label for _, label in TENSORS])
    direct = double_masking(network)
    assert [r.certified for r in expected.records] == direct.certify(images, labels).certified.tolist()
    assert [r.defended for r in expected.records] == (direct.predict(images) == labels).tolist()
    assert [r.undefended for r in expected.records] == (network(images).argmax(dim=1) == labels).tolist()
    for classifier, data in ((network, TENSORS), (network, Lazy()), (lambda x: network(x), TENSORS)):
        assert findings(pp.certify(double_masking(classifier), data)) == findings(expected)
    assert [r.index for r in pp.certify(double_masking(network), PICTURES, limit=5).records] == [0, 4, 8, 12, 16]
    assert list(tmp_path.iterdir()) == []


def test_tau_is_measured_by_the_run_and_kept_in_its_manifest(tmp_path):
    for precision, fast in (("fp32", False), ("bf16", True)):
        engine = pp.Engine(precision=precision)
        found = pp.certify(double_masking(engine=engine), PICTURES, folder=tmp_path / precision)
        tau = json.loads((tmp_path / precision / "manifest.json").read_text())["tau"]
        assert (tau["fast"] > tau["fp32"] > 0) == fast
        assert (found.content["audit"]["redone"] > 0) == fast
        assert found.content["audit"]["largest_change"] <= tau["fast"]


@pytest.mark.parametrize("ensemble", [False, True])
def test_a_function_is_known_by_its_answers_when_a_run_is_resumed(tmp_path, ensemble):
    """It has no weights to compare, nor has an ensemble with a function in it."""
    network = plain_classifier()

    def certify(change):
        def function(images):
            return change(network(images))

        classifier = pp.Ensemble([network, function]).eval() if ensemble else function
        return pp.certify(double_masking(classifier), PICTURES, folder=tmp_path, resume=True)

    whole = certify(lambda logits: logits)
    assert certify(lambda logits: logits + 1e-6).records == whole.records
    for change in (lambda logits: logits.flip(1), lambda logits: 2 * logits):
        with pytest.raises(CheckError, match=r"cannot be continued: answer to the first image was \[.*, now \["):
            certify(change)


class Stop(Exception):
    """Raised by a callback on purpose."""


def test_a_run_goes_on_with_the_default_mask_colour_written_out(tmp_path):
    grey = plain_classifier()
    grey.fill = (0.5, 0.5, 0.5)
    for first, then in ((plain_classifier(), grey), (grey, plain_classifier())):
        folder = tmp_path / str(hasattr(first, "fill"))
        done = pp.certify(double_masking(first), PICTURES[:2], folder=folder)
        assert pp.certify(double_masking(then), PICTURES[:2], folder=folder, resume=True).records == done.records


@pytest.mark.parametrize("stop", [0, 5, 19])
def test_a_run_ended_by_its_callback_goes_on_to_the_same_bytes_and_every_record_is_seen_once(
    tmp_path, monkeypatch, stop
):
    lines, line = [], Record.line
    monkeypatch.setattr(Record, "line", lambda self: lines.append(self.index) or line(self))
    seen: list[int] = []

    def on_record(record, stop=None):
        seen.append(record.index)
        if record.index == stop:
            raise Stop

    whole = pp.certify(double_masking(), PICTURES, folder=tmp_path / "whole", on_record=on_record)
    assert seen == lines == list(range(20)), "each is seen once, and its line is made once"
    seen.clear()
    folder = tmp_path / "run"
    with pytest.raises(Stop):
        pp.certify(double_masking(), PICTURES, folder=folder, on_record=lambda record: on_record(record, stop))
    results = json.loads((folder / "results.json").read_text())
    assert seen == list(range(stop + 1))
    assert len((folder / "records.jsonl").read_text().splitlines()) == results["images"]["done"] == stop + 1
    assert results["status"] == ("complete" if stop == 19 else "partial")
    with pytest.raises(InputError, match="already holds a run; continue it with resume=True"):
        pp.certify(double_masking(), PICTURES, folder=folder)
    resumed = pp.certify(double_masking(), PICTURES, folder=folder, resume=True, on_record=on_record)
    assert seen == list(range(20))
    assert (folder / "records.jsonl").read_bytes() == (tmp_path / "whole/records.jsonl").read_bytes()
    assert resumed.records == whole.records
    assert resumed.rates == whole.rates


def other_weights():
    network = plain_classifier()
    network[2].bias.data[0] += 1e-3
    return network


def other_fill():
    network = plain_classifier()
    network.fill = (0.25, 0.25, 0.25)
    return network


CHANGES = {
    r"fill was null, now \[0.25, 0.25, 0.25\]$": lambda: (double_masking(other_fill()), PICTURES),
    r"weights_sha256 was \w{12}…, now \w{12}…$": lambda: (double_masking(other_weights()), PICTURES),
    r"masks was 3x3 masks.*, now 2x2 masks.*$": lambda: (
        pp.PatchCleanser(plain_classifier(), pp.covering_masks(THREAT, per_axis=2), THREAT),
        PICTURES,
    ),
    r"data_sha256 was \w{12}…, now \w{12}…$": lambda: (double_masking(), [*PICTURES[:-1], PICTURES[0]]),
    "precision was fp32, now bf16$": lambda: (double_masking(engine=pp.Engine(precision="bf16")), PICTURES),
    "name was patchcleanser, now patchguard-smoothing$": lambda: (
        pp.defense("patchguard-smoothing", plain_classifier(), THREAT, engine=SMALL),
        PICTURES,
    ),
    "exhaustive was false, now true$": lambda: (double_masking(exhaustive=True), PICTURES),
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "run"
    pp.certify(double_masking(), PICTURES, folder=folder)
    return folder


def test_folders_of_earlier_versions_and_packed_ones(finished, tmp_path):
    """The seconds and labels decided again of an earlier session count, also where results.json alone has them; packed
    records are not made again without a word; a certification knows nothing of attacks."""
    folder = shutil.copytree(finished, tmp_path / "run")
    (folder / "progress.jsonl").unlink()
    results = json.loads((folder / "results.json").read_text())
    results["audit"] |= {"redone": 5, "steps": {"fp32": 5}, "largest_change": 0.25}
    results["cost"]["seconds"] = 1000.0
    (folder / "results.json").write_text(json.dumps(results))
    again = pp.certify(double_masking(), PICTURES, folder=folder, resume=True)
    assert again.content["audit"]["steps"] == {"fp32": 5}
    assert again.content["cost"]["seconds"] >= 1000
    assert "attacked" not in again.rates
    for odd in ([], {"steps": {"fp32": 5}, "largest_change": 0.25, "shares": []}):
        (folder / "results.json").write_text(json.dumps(results | {"audit": odd}))
        assert pp.certify(double_masking(), PICTURES, folder=folder, resume=True).content["audit"]["steps"] == {}
    with lzma.open(folder / "records.jsonl.xz", "wb") as packed:
        packed.write((folder / "records.jsonl").read_bytes())
    (folder / "records.jsonl").unlink()
    with pytest.raises(CheckError, match=r"records\.jsonl\.xz is packed; unpack it"):
        pp.certify(double_masking(), PICTURES, folder=folder, resume=True)


@pytest.mark.parametrize("message", CHANGES)
def test_a_resumed_run_with_something_else_is_refused_and_just_that_is_named(finished, message):
    defense, data = CHANGES[message]()
    before = {path: path.read_bytes() for path in finished.iterdir()}
    with pytest.raises(CheckError, match=f"so it cannot be continued: {message}"):
        pp.certify(defense, data, folder=finished, resume=True)
    assert {path: path.read_bytes() for path in finished.iterdir()} == before


class Corner:
    """A defence without a classifier, options or engine, that certifies whatever is dark in the corner."""

    name, guarantee, threat = "corner", "detection", THREAT

    def predict(self, images):
        return torch.where(images[:, 0, 0, 0] < 0.5, images[:, 1, 14, 14].mul(3).long(), -1)

    def certify(self, images, labels):
        certified = (images[:, 0, 0, 0] < 0.5) & (self.predict(images) == labels)
        passes = torch.full_like(labels, 7)
        return pp.Certificates(certified, images[:, 0, 0, 0], passes, {"corner": images[:, 0, 0, 0], "v.top": passes})

    def describe(self):
        return {"name": self.name}


def test_a_precision_that_goes_astray_in_the_middle_of_a_run_spoils_it_for_good(tmp_path):
    """τ was measured before: nothing that this run certified can be trusted."""
    network, gone = plain_classifier(), []

    class Astray(nn.Module):
        def forward(self, images):
            fast = bool(gone) and torch.is_autocast_enabled("cpu")
            return network(images) if not fast else torch.zeros(len(images), 10)

    def run(**options):
        defense = double_masking(Astray().eval(), engine=pp.Engine(precision="bf16", batch_size=16))
        return pp.certify(defense, PICTURES, folder=tmp_path / "run", **options)

    with pytest.raises(CheckError, match="between bf16 and fp32, more than"):
        run(on_record=gone.append)
    gone.clear()
    with pytest.raises(CheckError, match="cannot be continued: in an earlier session the margin of a label changed"):
        run(resume=True)


def test_a_defence_without_a_classifier_has_no_undefended_answers_and_its_evidence_is_its_own(tmp_path):
    image = torch.zeros(3, 28, 28)
    image[1, 14, 14] = 0.4
    data = [(image, 1), (torch.ones(3, 28, 28), 0), (image, 2)]
    found = pp.certify(Corner(), data, folder=tmp_path / "run")
    assert [(r.undefended, r.defended, r.certified) for r in found.records] == [
        (None, True, True), (None, False, False), (None, False, False),
    ]  # fmt: skip
    assert found.records[0].evidence == {"corner": 0.0, "v": {"top": 7}}
    assert (found.undefended.n, found.certified.k, found.certified.n) == (0, 1, 3)
    assert (found.content["guarantee"], found.content["cost"]["forwards"]) == ("detection", 21)
    attacked = pp.attack(Corner(), data, AttackPlan(places=4, restarts=1))
    assert [r.attack.attacked for r in attacked.records] == [True, True, False]
    assert attacked.undefended_attacked.n == 0
    assert attacked.broken == ()


class Fooled(pp.PatchCleanser):
    """Certifies what it should not: the clean answer, without regard to patches."""

    def assess(self, images, labels=None):
        found = super().assess(images, labels)
        certified = found.predictions == labels
        proof = pp.Certificates(certified, found.certificates.margin, found.certificates.forwards)
        return type(found)(found.predictions, proof)


def test_a_killed_attack_loses_one_image_on_a_gpu_too(monkeypatch):
    """What an executor is given as one piece is written together."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "pretended")

    class Pieces(InProcess):
        def run(self, job, pieces, load):
            self.count = len(pieces)
            return iter(())

    class OnGPU:
        name, guarantee, threat, device = "own", "recovery", THREAT, "cuda"
        predict = certify = describe = lambda self, *_: {}

    executor = Pieces()
    with pytest.raises(CheckError, match=r"Pieces\.run must yield the answers in the order of the pieces"):
        pp.attack(OnGPU(), PICTURES, executor=executor)
    assert executor.count == len(PICTURES)


def test_attacks_keep_the_order_per_image_and_certificates_that_fall_are_kept(tmp_path):
    plan, few_pictures = AttackPlan(steps=4, restarts=1, places=2, step_size=0.2), PICTURES[:6]
    found = pp.attack(double_masking(), few_pictures, plan, folder=tmp_path / "held")
    for record in found.records:
        assert record.certified <= record.attack.attacked <= record.defended
        assert record.attack.undefended_attacked <= record.undefended
        fell = record.defended and not record.attack.attacked
        assert (record.attack.place is not None, record.attack.attacked_label is not None) == (fell, fell)
    assert found.broken == ()
    assert 0 < found.certified.k <= found.attacked.k < found.defended.k
    assert found.undefended_attacked.k < found.undefended.k
    again = pp.attack(double_masking(), few_pictures, plan, folder=tmp_path / "held", resume=True)
    assert again.records == found.records

    only = AttackPlan(steps=1, restarts=1, places=1, only_certified=True, target="defended")
    few = pp.attack(double_masking(), few_pictures, only)
    assert [r.attack.attacked for r in few.records] == [True if r.certified else None for r in found.records]
    assert few.undefended_attacked.n == 0

    network = plain_classifier()
    fallen = pp.attack(Fooled(network, MASKS, THREAT, engine=SMALL), few_pictures, plan, folder=tmp_path / "fell")
    assert fallen.broken
    assert fallen.content["broken"] == [record.index for record in fallen.broken]
    kept = tmp_path / "fell/broken" / str(fallen.broken[0].index)
    assert {path.name for path in kept.iterdir()} >= {"pixels.safetensors", "tables.json", "patched.png"}
    assert json.loads((kept / "tables.json").read_text())["answer_to_patched"] == fallen.broken[0].attack.attacked_label


def test_a_patch_that_cannot_be_written_is_a_clear_error(tmp_path):
    (tmp_path / "patches" / "0.part").mkdir(parents=True)
    with pytest.raises(CheckError, match=r"cannot write 0\.part"):
        Attacker(AttackPlan()).save(tmp_path, None, Record(0, "x", 0), {"defended": torch.zeros(1, 2, 2)})


def test_prediction_measures_tau_on_generated_images_and_is_not_stopped_by_hostile_ones(tmp_path, monkeypatch):
    """In bf16 an image that is mostly white gets another label, by little: nothing like that is measured on."""

    class Hostile(nn.Module):
        def forward(self, images):
            white = images.flatten(1).median(dim=1).values == 1
            astray = white & torch.tensor(torch.is_autocast_enabled("cpu"))
            right, wrong = torch.eye(10)[3], torch.eye(10)[5]
            return torch.where(astray[:, None], 0.999999 * right + wrong, right)  # by less than any τ

    white, black = Image.new("RGB", (28, 28), "white"), Image.new("RGB", (28, 28), "black")
    defense = pp.PatchCleanser(Hostile().eval(), MASKS, THREAT, engine=pp.Engine(precision="bf16"))
    in_float32 = pp.PatchCleanser(Hostile().eval(), MASKS, THREAT)
    monkeypatch.setattr("patchproof.runs._measure.MOST_COPIES", 128)
    assert [measure_on_generated(d)[1].copies for d in (defense, in_float32)] == [128, 64]
    seen = []
    answers = pp.predict(defense, [white, black, tmp_path / "missing.png"], on_answer=seen.append)
    assert answers == seen
    assert [getattr(answer, "label", None) for answer in answers] == [3, 3, None]
    assert "missing.png" in answers[2].path
    images = torch.ones(1, 3, 28, 28)
    assert answers.misjudged == 1
    with pytest.raises(CheckError, match="between bf16 and fp32"):
        defense.with_engine(measured(precision="bf16", tau=0.1)).certify(images, torch.tensor([3]))

    class Outside:
        """A user's defence, made of another one, with the members that hand over τ."""

        def __init__(self, inner):
            vars(self).update((name, getattr(inner, name)) for name in dir(inner) if not name.startswith("_"))
            self.with_engine = lambda engine: Outside(inner.with_engine(engine))

    answers = pp.predict(Outside(defense), [white, black])
    assert ([answer.label for answer in answers], answers.misjudged) == ([3, 3], 1)


def test_a_modules_own_history_is_left_alone():
    network = plain_network()
    for own in ({"loss": [1.0, 2.0]}, []):
        network.history = own
        pp.train(network, PICTURES, pp.Plan(strategy="none", epochs=1, batch_size=20))
        assert network.history is own
        assert not pp.certify(pp.defense("patchcleanser", network, THREAT), PICTURES[:1]).content["remarks"]


def test_training_is_in_place_and_its_best_epoch_is_kept(tmp_path):
    torch.manual_seed(0)
    network, seen = plain_network(), []
    before = {name: value.clone() for name, value in network.state_dict().items()}
    plan = pp.Plan(strategy="rand3x3", epochs=2, batch_size=10, learning_rate=0.1, validation_images=10)
    trained = pp.train(
        network, PICTURES, plan, validation=PICTURES, folder=tmp_path / "t", on_step=lambda r: seen.append(r.step)
    )
    assert trained.classifier is network
    assert not network.training
    certified = pp.certify(pp.defense("patchcleanser", network, THREAT), PICTURES)
    assert any("not held out" in remark for remark in certified.content["remarks"])
    assert seen == [1, 2, 3, 4]
    assert any(not torch.equal(before[name], value) for name, value in network.state_dict().items())
    assert trained.best["certified"]["n"] == 10
    assert {path.name for path in (tmp_path / "t").iterdir()} >= {"checkpoint-best", "checkpoint-last", "results.json"}
    with pytest.raises(CheckError, match="the classifier must be as it was when the training began, so build or load"):
        pp.train(network, PICTURES, plan, validation=PICTURES, folder=tmp_path / "t", resume=True)
    again = plain_network()
    again.load_state_dict(before)
    alone = pp.train(again, PICTURES, plan)
    assert [epoch.keys() for epoch in alone.results["epochs"]] == [{"epoch", "step", "loss"}] * 2
    for epoch, validated in zip(alone.results["epochs"], trained.results["epochs"], strict=True):
        assert epoch.items() <= validated.items()
    assert all(torch.equal(network.state_dict()[name], value) for name, value in again.state_dict().items())


def test_a_training_that_is_refused_for_its_manifest_freezes_nothing():
    network, plan = pp.load_classifier("small", "embedded"), pp.Plan(strategy="none", epochs=1, head_only=True)
    with pytest.raises(pp.InputError, match="config must be JSON"):
        pp.train(network, PICTURES, plan, config={"mine": {1}})
    assert all(parameter.requires_grad for parameter in network.parameters())


def learn_to_tell_apart(folder, *, epochs=2, resume=False):
    """Train a network that answers one class, which can tell classes apart after the first epoch.

    At first it certifies all images of the most frequent class, more than afterwards.
    """
    dull, able = plain_classifier(), plain_classifier()
    nn.init.zeros_(dull[4].weight)
    dull[4].bias.data = 5 * torch.eye(10)[8]
    bags = [(SOURCE.load(i), 8) for i, label in enumerate(SOURCE.labels) if label == 8][:20]
    plan = pp.Plan(strategy="none", epochs=epochs, batch_size=40, learning_rate=1e-9, schedule="constant")

    def learn(epoch):
        dull.load_state_dict(able.state_dict())

    options = {"validation": [*bags, *PICTURES], "folder": folder, "resume": resume, "on_epoch": learn}
    return pp.train(dull, PICTURES, plan, **options)


def test_an_epoch_of_a_network_that_answers_one_class_is_best_only_if_there_is_no_other(tmp_path):
    trained = learn_to_tell_apart(tmp_path / "t")
    first, second = trained.results["epochs"]
    assert (first["one_class"], second["one_class"]) == (True, False)
    assert first["certified"]["k"] > second["certified"]["k"]
    assert trained.best == second
    assert read_run(tmp_path / "t").best.epoch == 2
    best = load_file(tmp_path / "t" / "checkpoint-best" / "model.safetensors")
    assert all(tensor.any() for tensor in best.values())


def test_a_best_epoch_of_one_class_that_an_earlier_version_chose_is_said_and_replaced(tmp_path, monkeypatch):
    """Earlier versions chose by certificates alone, so their `checkpoint-best` can hold such an epoch."""
    with monkeypatch.context() as earlier:
        earlier.setattr(_train, "_rank", lambda epoch: epoch["certified"]["k"])
        assert learn_to_tell_apart(tmp_path / "t").best["epoch"] == 1
    assert read_run(tmp_path / "t").best.epoch == 1
    assert runs_below(tmp_path)[0]["status"].endswith("one class")
    assert learn_to_tell_apart(tmp_path / "t", epochs=3, resume=True).best["epoch"] == 3
    assert read_run(tmp_path / "t").best.epoch == 3
    best = load_file(tmp_path / "t" / "checkpoint-best" / "model.safetensors")
    assert all(tensor.any() for tensor in best.values())


def test_ls_says_what_is_running_stopped_trained_or_attacked(tmp_path):
    def row(name):
        return next(row for row in runs_below(tmp_path) if row["run"] == name)

    def look(record):
        seen.append(row("r")["status"])
        seen.extend(text for text in read_run(tmp_path / "r").notices if "it is running" in text)
        raise Stop

    seen = []
    with pytest.raises(Stop):
        pp.certify(double_masking(), PICTURES, folder=tmp_path / "r", on_record=look)
    assert seen == ["running; 0 of 20 done", "partial: 0 of 20 images are done; it is running"]
    assert row("r")["status"] == "stopped; 1 of 20 done"
    (tmp_path / "r" / "results.json").unlink()  # as a kill leaves it
    assert row("r")["status"] == "stopped; 1 of 20 done"
    plan = pp.AttackPlan(steps=1, restarts=1, places=1)
    found = pp.attack(double_masking(), PICTURES, plan, folder=tmp_path / "a", limit=2)
    assert row("a")["what"].startswith("attack Sequential on images (all), patchcleanser, 3×3 masks, ")
    assert row("a")["status"] == f"partial, attacked {100 * found.attacked.rate:.1f}%"

    def stop(report):
        told.append(row("t")["status"])
        raise Stop

    plan, told = pp.Plan(strategy="none", epochs=1, batch_size=10, learning_rate=0.1), []
    with pytest.raises(Stop):
        pp.train(plain_network(), PICTURES, plan, folder=tmp_path / "t", on_step=stop)
    assert told == ["running (no validation); partial: 1 of 2 steps are done; it is running"]
    assert row("t")["status"].startswith("stopped (no validation); partial: 1 of 2 steps")
    pp.train(plain_network(), PICTURES, plan, folder=tmp_path / "u")
    assert row("u")["what"] == "train Sequential on images (all), none"
    assert row("u")["status"] == "trained (no validation)"


def test_the_first_answers_do_not_wait_for_all():
    network, passes, counts = plain_classifier(), [], []
    network.register_forward_hook(lambda *_: passes.append(1))
    defense = double_masking(network, engine=measured(batch_size=4096))
    pp.predict(defense, [picture for picture, _ in PICTURES], on_answer=lambda _: counts.append(len(passes)))
    assert [counts.count(number) for number in sorted(set(counts))] == [4, 8, 8]


@pytest.mark.slow
def test_fifty_thousand_images_take_no_more_memory_than_five_hundred(monkeypatch):
    """Memory depends on the chunk: a hundred times as many images take some more, for their names and records."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    from memory import compare

    few, many = compare((500, 50_000)).values()
    assert many["peak_bytes"] < 1.08 * few["peak_bytes"]
    sys.modules.pop("memory")
