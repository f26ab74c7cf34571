"""Files that mean harm: nothing in them runs, hangs, fills the memory, or reaches the terminal raw; no traceback."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import shutil
import struct
import subprocess
import sys
import time
import unicodedata
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import save_file

from patchproof.cli import run
from patchproof.cli._setup import stored_engine
from patchproof.cli._training_log import TrainingLog
from patchproof.config import CertifyConfig, TrainConfig, read_config_file
from patchproof.data import MAX_PIXELS, decode
from patchproof.models import load_checkpoint, load_classifier, save_checkpoint
from patchproof.models._state import read_state
from patchproof.records import Record, RunFolder, Tally, Witness
from patchproof.report._runs import load_runs
from patchproof.seals import sealed
from patchproof.types import PatchproofError
from test_cli import CLASSES, assert_one_line, picture

slow = pytest.mark.slow

PATIENCE = 20_000
"""Milliseconds after which one input counts as a hang; a quiet machine needs a hundredth."""


@pytest.fixture
def photos(tmp_path) -> Path:
    for label, name in enumerate(CLASSES):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(2):
            picture(10 * label + number).save(tmp_path / "photos" / name / f"{number}.png")
    return tmp_path / "photos"


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    save_checkpoint(load_classifier("small", "random", class_names=CLASSES, seed=1), tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def quick(photos: Path, checkpoint: Path) -> list[str]:
    return ["--dataset", str(photos), "--weights", str(checkpoint), "--patch", "3px", "--masks", "2", "--device", "cpu"]


# --- weights -------------------------------------------------------------------------------------------------------


class Boom:
    """A pickle that, when loaded, leaves a file behind."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self.marker),)


def pickled(path: Path, marker: Path, *, with_torch: bool) -> Path:
    state = {"head.weight": torch.zeros(3, 64), "head.bias": Boom(marker)}
    if with_torch:
        torch.save(state, path)
    else:
        path.write_bytes(pickle.dumps(state))
    return path


def test_the_pickle_of_these_tests_does_harm(tmp_path):
    pickle.loads(pickle.dumps(Boom(tmp_path / "harm")))
    assert (tmp_path / "harm").exists()


@pytest.mark.parametrize("with_torch", [True, False])
@pytest.mark.parametrize("name", ["w.pth", "w.pt", "w.bin", "w.ckpt", "w.safetensors"])
@pytest.mark.parametrize("verb", ["certify", "predict", "attack", "train"])
def test_pickles_are_refused_wherever_weights_are_read(photos, tmp_path, capsys, verb, name, with_torch):
    pickled(tmp_path / name, tmp_path / "harm", with_torch=with_torch)
    shutil.copytree(photos, tmp_path / "held out")
    data = {"predict": [str(photos)], "train": ["--dataset", str(photos), "--validation", "held out"]}
    arguments = [verb, *data.get(verb, ["--dataset", str(photos)]), "--weights", name, "--device", "cpu"]
    assert run(arguments) == 2
    assert_one_line(capsys.readouterr().err, "was refused|is damaged or cut short")
    assert not (tmp_path / "harm").exists()


def test_pickles_are_refused_inside_checkpoints(photos, checkpoint, tmp_path, capsys):
    pickled(checkpoint / "model.safetensors", tmp_path / "harm", with_torch=True)
    assert run(["certify", *quick(photos, checkpoint)]) == 2
    assert_one_line(capsys.readouterr().err, r"model\.safetensors is damaged")
    record = json.loads((checkpoint / "classifier.json").read_text())
    del record["sha256"], record["seal"]
    (checkpoint / "classifier.json").write_text(json.dumps(record))
    assert run(["certify", *quick(photos, checkpoint)]) == 2
    assert_one_line(capsys.readouterr().err, r"model\.safetensors is damaged or cut short")
    assert not (tmp_path / "harm").exists()


def test_pickles_are_refused_as_published_data(tmp_path, capsys):
    (tmp_path / "data" / "cifar-10-batches-py").mkdir(parents=True)
    for name in ("test_batch", "batches.meta"):
        pickled(tmp_path / "data" / "cifar-10-batches-py" / name, tmp_path / "harm", with_torch=False)
    assert run(["certify", "--dataset", "cifar10", "--data-dir", "data"]) == 2
    assert_one_line(capsys.readouterr().err, "its md5 sums are wrong")
    assert not (tmp_path / "harm").exists()


def test_a_compressed_weight_file_is_refused_before_it_is_unpacked(tmp_path, capsys):
    torch.save({"head.bias": torch.zeros(10)}, tmp_path / "w.pth")
    with zipfile.ZipFile(tmp_path / "w.pth") as whole, zipfile.ZipFile(tmp_path / "bomb.pth", "w") as bomb:
        for entry in whole.namelist():
            content = bytes(10**8) if entry.endswith("data/0") else whole.read(entry)
            bomb.writestr(entry, content, compress_type=zipfile.ZIP_DEFLATED)
    assert (tmp_path / "bomb.pth").stat().st_size < 10**6
    assert run(["certify", "--weights", "bomb.pth"]) == 2
    assert_one_line(capsys.readouterr().err, "is compressed, which torch.save never does")


def test_a_last_layer_that_claims_a_billion_classes_is_refused(tmp_path, capsys):
    state = load_classifier("small", "random", num_classes=3).module.state_dict()
    state |= {"head.weight": torch.zeros(1, 1).expand(10**9, 64), "head.bias": torch.zeros(1).expand(10**9)}
    torch.save(state, tmp_path / "w.pth")
    assert run(["predict", "--weights", "w.pth", str(tmp_path / "w.pth")]) == 2
    assert_one_line(capsys.readouterr().err, "a last layer of 1,000,000,000 classes is refused; the limit is 1,000,000")


def header(content: bytes, *, length: int | None = None, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(content) if length is None else length) + content + data


def entry(**values: Any) -> bytes:
    return json.dumps({"head.bias": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]} | values}).encode()


HEADERS = {
    "empty": b"",
    "half a length": b"\x01\x00",
    "an endless header": header(b"{}", length=2**63),
    "a header beyond the file": header(b"{}", length=10**6),
    "no JSON": header(b"\xff\xfe{"),
    "a list": header(b"[1]"),
    "deep nesting": header(b"[" * 10_000),
    "an unknown type": header(entry(dtype="F7"), data=bytes(12)),
    "a negative shape": header(entry(shape=[-3]), data=bytes(12)),
    "an endless shape": header(entry(shape=[2**62, 2**62]), data=bytes(12)),
    "data beyond the file": header(entry(data_offsets=[0, 10**12]), data=bytes(12)),
    "data backwards": header(entry(data_offsets=[12, 0]), data=bytes(12)),
}


@pytest.mark.parametrize("name", HEADERS)
def test_safetensors_with_hostile_headers_are_refused(photos, tmp_path, capsys, name):
    (tmp_path / "w.safetensors").write_bytes(HEADERS[name])
    assert run(["certify", "--dataset", str(photos), "--weights", "w.safetensors"]) == 2
    assert_one_line(capsys.readouterr().err, r"w\.safetensors is damaged or cut short")


def spoiled(state: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    changes = {
        "missing": {},
        "whole numbers": {"head.bias": torch.arange(3)},
        "yes and no": {"head.bias": torch.tensor([True, False, True])},
        "of another shape": {"head.bias": torch.zeros(3, 1)},
        "not a number": {"head.bias": torch.tensor([0.0, torch.nan, 0.0])},
        "infinite": {"head.bias": torch.tensor([0.0, torch.inf, 0.0])},
    }
    return {key: value for key, value in state.items() if key != "head.bias"} | changes[name]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing", "1 tensors missing"),
        ("whole numbers", r"1 tensors of another type \(e.g. head.bias: torch.int64\)"),
        ("yes and no", r"1 tensors of another type \(e.g. head.bias: torch.bool\)"),
        ("of another shape", "tensors of another shape"),
        ("not a number", "1 of 3 values in tensor head.bias are NaN or infinite"),
        ("infinite", "1 of 3 values in tensor head.bias are NaN or infinite"),
    ],
)
def test_tensors_that_are_no_weights_are_refused(photos, tmp_path, capsys, name, message):
    state = load_classifier("small", "random", num_classes=3).module.state_dict()
    save_file({k: v.contiguous() for k, v in spoiled(state, name).items()}, tmp_path / "w.safetensors")
    assert run(["certify", "--dataset", str(photos), "--weights", "w.safetensors"]) in (1, 2)
    assert_one_line(capsys.readouterr().err, message)


# --- settings ------------------------------------------------------------------------------------------------------


def laughs(levels: int) -> str:
    lines = ["a0: &a0 [ha, ha, ha, ha, ha, ha, ha, ha, ha]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, levels)]
    return "\n".join([*lines, f"limit: *a{levels - 1}"])


def merges(levels: int) -> str:
    lines = ["a0: &a0 {masks: 3}"]
    lines += [f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}" for n in range(1, levels)]
    return "\n".join(lines)


YAML = [
    ("!!python/object/apply:os.mkdir [harm]", "is not valid YAML: could not determine a constructor"),
    ("limit: !!python/object/apply:os.mkdir [harm]", "is not valid YAML"),
    ("!!python/object/new:os.mkdir {args: [harm]}", "is not valid YAML"),
    (laughs(12), r"aliases \(\*a0\) are not allowed in settings"),
    (merges(12), r"aliases \(\*a0\) are not allowed in settings"),
    ("limit: " + "[" * 5000, "is not valid YAML"),
    ("masks: " + "3" * 200_000, "has more than the 100,000 bytes that settings may have"),
    ("masks: [3]", "`masks` must be one plain value, not a list"),
    ("masks: {a: 3}", "`masks` must be one plain value, not a dict"),
    ("masks: 2001-01-01", "`masks` must be one plain value, not a date"),
    ("masks: 2001-99-99", "is not valid YAML"),
    ("masks: !!int x", "is not valid YAML"),
    ("masks: !!bool x", "is not valid YAML"),
    ("masks: !!timestamp x", "is not valid YAML"),
    ("masks: !!binary x", "is not valid YAML|one plain value"),
    ("masks: " + "9" * 5000, "is not valid YAML|masks"),
    ("\x1b]0;owned\x07: 1", "is not valid YAML|unknown setting"),
    ("? [a, b]\n: 1", "is not valid YAML"),
    ("- masks", "must hold settings as `name: value` lines"),
]


@pytest.mark.parametrize(("text", "message"), YAML)
def test_settings_that_mean_harm_are_one_line(tmp_path, capsys, text, message):
    (tmp_path / "s.yaml").write_text(text)
    started = time.monotonic()
    assert run(["certify", "--config", "s.yaml", "--limit", "1"]) == 2
    assert_one_line(capsys.readouterr().err, message)
    assert time.monotonic() - started < PATIENCE / 1000
    assert not (tmp_path / "harm").exists()


def test_an_endless_settings_file_is_not_read_to_its_end(capsys):
    assert run(["certify", "--config", "/dev/zero"]) == 2
    assert_one_line(capsys.readouterr().err, "has more than the 100,000 bytes")


# --- images --------------------------------------------------------------------------------------------------------


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(side: int, *extra: bytes) -> bytes:
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0))
    return (
        b"\x89PNG\r\n\x1a\n"
        + head
        + b"".join(extra)
        + chunk(b"IDAT", zlib.compress(bytes(10**6)))
        + chunk(b"IEND", b"")
    )


BOMBS = {
    "huge": (png(60_000), f"it has more than the {MAX_PIXELS:,} pixels allowed"),
    "text": (png(28, chunk(b"zTXt", b"k\0\0" + zlib.compress(bytes(5 * 10**6)))), "Decompressed data too large"),
    "profile": (png(28, chunk(b"iCCP", b"k\0\0" + zlib.compress(bytes(5 * 10**6)))), "Decompressed data too large|"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_decompression_bombs_are_refused_with_the_limit_or_harmless(photos, checkpoint, tmp_path, capsys, name):
    content, message = BOMBS[name]
    (photos / "cat" / "1.png").write_bytes(content)
    code = run(["certify", *quick(photos, checkpoint), "--output", "r"])
    assert_one_line(capsys.readouterr().err, message) if code else None
    assert code == 1 or name == "profile"
    assert run(["certify", *quick(photos, checkpoint), "--output", "r", "--resume", "--skip-bad"]) == 0
    assert run(["predict", str(photos / "cat"), "--weights", str(checkpoint)]) in (0, 1)


def test_loops_of_links_end(photos, checkpoint, tmp_path, capsys):
    (photos / "cat" / "again").symlink_to(photos / "cat")
    (photos / "cat" / "up").symlink_to(photos)
    (photos / "cat" / "self.png").symlink_to(photos / "cat" / "self.png")
    for name in ("loop", "loop.py"):
        (tmp_path / name).symlink_to(tmp_path / name)
    assert run(["certify", *quick(photos, checkpoint), "--output", "r", "--skip-bad"]) == 0
    lines = [json.loads(line) for line in (tmp_path / "r" / "records.jsonl").read_text().splitlines()]
    assert [line["path"] for line in lines if "error" in line] == ["cat/self.png"]
    assert len(lines) == 7
    assert run(["predict", str(photos), "--weights", str(checkpoint)]) == 1
    capsys.readouterr()
    for arguments in (
        ["certify", "--dataset", "loop"],
        ["certify", *quick(photos, checkpoint), "--output", "loop"],
        ["certify", "--weights", "loop"],
        ["certify", "--weights", "loop/model.safetensors"],
        ["certify", "--config", "loop"],
        ["certify", "--dataset", "cifar10", "--data-dir", "loop"],
        ["predict", "loop"],
        ["report", "loop"],
        ["report", "r", "--output", "loop"],
        ["ls", "runs", "loop"],
        ["certify", "--model", "loop.py:build"],
        ["train", "--dataset", "loop"],
        ["attack", "--weights", "loop"],
    ):
        assert run(arguments) in (1, 2), arguments
        assert_one_line(capsys.readouterr().err, "loop")


ODD_NAME = b"\x1b]0;owned\x07two\nlines\r\x08\xff\xc2\x9b31m[bold]"
"""A title for the terminal, a line break, overwriting, a byte that is no text, a two-byte control character, markup."""


def raw_control_characters(text: str) -> set[str]:
    return {c for c in text if c != "\n" and unicodedata.category(c) in ("Cc", "Cs")}


def test_names_do_not_reach_the_terminal_raw(tmp_path, capsys):
    name = ODD_NAME
    classes = [os.fsdecode(name + b"-class"), "other"]
    root = Path(os.fsdecode(bytes(tmp_path) + b"/photos" + name))
    for label, folder in enumerate(classes):
        (root / folder).mkdir(parents=True)
        for number in range(2):
            picture(10 * label + number).save(root / folder / os.fsdecode(b"%d" % number + name + b".png"))
    bad = root / "other" / os.fsdecode(b"bad" + name + b".png")
    bad.write_bytes(b"no image")
    save_checkpoint(load_classifier("small", "random", class_names=sorted(classes, key=os.fsencode)), tmp_path / "c")
    output = os.fsdecode(b"run" + name)
    quickly = [*quick(root, tmp_path / "c"), "--skip-bad"]
    for arguments, code in (
        (["certify", *quickly, "--output", output], 0),
        (["certify", *quickly, "--output", output], 2),
        (["certify", *quick(root, tmp_path / "c"), "--output", "stops"], 1),
        (["attack", *quickly, "--steps", "1", "--restarts", "1", "--places", "1", "--output", output + "-a"], 0),
        (["predict", str(root), "--weights", "c"], 1),
        (["predict", str(root), "--weights", "c", "--json"], 1),
        (["report", output, "--dataset", str(root)], 0),
        (["ls", "runs", "."], 0),
        (["certify", "--dataset", str(bad)], 2),
        (["predict", os.fsdecode(b"none" + name)], 2),
    ):
        assert run(arguments) == code, capsys.readouterr()
        shown = capsys.readouterr()
        assert not raw_control_characters(shown.out + shown.err), (arguments, shown)
    page = (tmp_path / output / "report" / "index.html").read_text("utf-8")
    assert not raw_control_characters(page) - {"\t"}


def test_a_checkpoints_words_about_itself_do_not_reach_the_terminal_raw(photos, checkpoint, capsys):
    record = json.loads((checkpoint / "classifier.json").read_text())
    for changes in (
        {"architecture": "\x1b]0;owned\x07"},
        {"class_names": ["\x1b[2J", "b", "c"]},
        {"source": "\x1b[2J"},
    ):
        (checkpoint / "classifier.json").write_text(json.dumps(sealed(record | changes)))
        run(["certify", *quick(photos, checkpoint), "--output", f"r{len(changes)}"])
        run(["predict", str(photos), "--weights", str(checkpoint)])
        shown = capsys.readouterr()
        assert not raw_control_characters(shown.out + shown.err)
        assert "Traceback" not in shown.err


@slow
def test_a_terminal_that_knows_only_ascii_is_no_traceback(tmp_path):
    words = [sys.executable, "-m", "patchproof", *SMALL_RUN, "--output", "r"]
    done = subprocess.run(words, env=os.environ | {"PYTHONIOENCODING": "ascii"}, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "one patch of 5\\xd75 pixels" in done.stdout


# --- data that changes under the run -------------------------------------------------------------------------------

CHANGES: dict[str, Callable[[Path], object]] = {
    "replaced": lambda photos: picture(99, size=(60, 60)).save(photos / "eel" / "1.png"),
    "removed": lambda photos: (photos / "eel" / "1.png").unlink(),
    "added": lambda photos: picture(99).save(photos / "eel" / "2.png"),
    "a class added": lambda photos: (photos / "fox").mkdir(),
    "all gone": lambda photos: photos.rename(photos.with_name("elsewhere")),
}


def during(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, act: Callable[[], object]) -> None:
    """Act just before the first call of `owner.name`."""
    real, acted = getattr(owner, name), []

    def first(*arguments: Any, **options: Any) -> Any:
        if not acted:
            acted.append(act())
        return real(*arguments, **options)

    monkeypatch.setattr(owner, name, first)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("verb", ["certify", pytest.param("attack", marks=slow)])
def test_images_that_change_during_a_run_are_noticed(photos, checkpoint, tmp_path, monkeypatch, capsys, verb, change):
    arguments = [verb, *quick(photos, checkpoint), "--skip-bad", "--batch-size", "8", "--output", "r"]
    arguments += ["--steps", "1", "--restarts", "1", "--places", "1"] if verb == "attack" else []
    shutil.copytree(photos, tmp_path / "as they were")
    with monkeypatch.context() as patch:
        during(patch, RunFolder, "append", lambda: CHANGES[change](photos))
        assert run(arguments) == 1
    assert_one_line(capsys.readouterr().err, "the data set changed during the run.*; put the files back as they were")
    results = json.loads((tmp_path / "r" / "results.json").read_text())
    assert results["status"] == "partial"
    assert "the data set changed during the run" in results["partial"][-1]
    assert run([*arguments, "--resume"]) in (1, 2)
    assert_one_line(capsys.readouterr().err, "data_sha256 was|holds no images|unknown dataset")
    put_back(tmp_path / "as they were", photos)
    assert run([*arguments, "--resume"]) == 1  # some of the records may be about other pictures
    assert_one_line(capsys.readouterr().err, "cannot be continued: in an earlier session the data set changed")


def put_back(copy: Path, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(copy, folder)


@pytest.mark.parametrize("key", ["data_sha256", "validation_sha256"])
def test_images_that_change_during_training_are_noticed(photos, tmp_path, monkeypatch, capsys, key):
    shutil.copytree(photos, tmp_path / "val")
    shutil.copytree(photos, tmp_path / "as they were")
    changed = photos if key == "data_sha256" else tmp_path / "val"
    words = ["train", "--dataset", str(photos), "--validation", "val", "--epochs", "1", "--batch-size", "6"]
    words += ["--strategy", "none", "--device", "cpu", "--output", "t"]
    with monkeypatch.context() as patch:
        during(patch, TrainingLog, "step", lambda: CHANGES["replaced"](changed))
        assert run(words) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert_one_line(said + "\n", rf"the images changed during training \({key}")
    assert not (tmp_path / "t" / "results.json").exists()
    put_back(tmp_path / "as they were", changed)
    assert run([*words, "--resume"]) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert_one_line(said + "\n", "cannot be continued: in an earlier session the images changed during training")


# --- JSON ----------------------------------------------------------------------------------------------------------

SMALL_RUN = ["certify", "--limit", "4", "--masks", "2", "--device", "cpu"]
ODD_JSON = {
    "deep lists": "[" * 100_000,
    "deep objects": '{"a":' * 100_000,
    "a long number": '{"schema": ' + "9" * 10_000 + "}",
    "no number": '{"schema": NaN, "command": "certify", "identity": {}, "tau": {"fast": Infinity, "fp32": 1e999}}',
    "a number beyond floats": '{"command": "certify", "identity": {}, "tau": {"fast": 1' + "0" * 400 + "}}",
    "another type": "[]",
    "surrogates": '{"command": "\\ud800", "identity": {"a": "\\udfff"}}',
    "empty": "",
    "zeros": "\0" * 1000,
}


odd_json = pytest.mark.parametrize(
    "name", [name if name in ("deep lists", "surrogates") else pytest.param(name, marks=slow) for name in ODD_JSON]
)


@pytest.fixture(scope="module")
def real_run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("real") / "r"
    assert run([*SMALL_RUN, "--output", str(folder)]) == 0
    return folder


@odd_json
@pytest.mark.parametrize(
    "file", ["manifest.json", "records.jsonl", *(pytest.param(f, marks=slow) for f in ("results.json", "records.crc"))]
)
def test_odd_json_in_a_run_folder_is_one_line(real_run, tmp_path, capsys, file, name):
    shutil.copytree(real_run, tmp_path / "r")
    (tmp_path / "r" / file).write_text(ODD_JSON[name] + "\n")
    code = run([*SMALL_RUN, "--output", "r", "--resume"])
    said = capsys.readouterr().err
    assert (code == 1) if said else (code == 0)
    if said:
        assert_one_line(said, "damaged|was written with schema|cannot be continued|holds a .* run")
    for other in (["ls", "runs", "."], ["report", "r"]):
        assert run(other) in (0, 2)
        shown = capsys.readouterr()
        assert not raw_control_characters(shown.out + shown.err)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[list[str], Path]:
    folder = tmp_path_factory.mktemp("trained")
    for split in ("train", "val"):
        for label, name in enumerate(CLASSES):
            (folder / "data" / split / name).mkdir(parents=True)
            for number in range(2):
                picture(10 * label + number).save(folder / "data" / split / name / f"{number}.png")
    words = ["train", "--epochs", "1", "--batch-size", "6", "--strategy", "none", "--device", "cpu", "--dataset"]
    assert run([*words, str(folder / "data"), "--output", str(folder / "t")]) == 0
    return [*words, str(folder / "data")], folder / "t"


@odd_json
@pytest.mark.parametrize("file", ["classifier.json", "training.json"])
def test_odd_json_in_a_checkpoint_is_one_line(trained, tmp_path, capsys, file, name):
    words, folder = trained
    shutil.copytree(folder, tmp_path / "t")
    (tmp_path / "t" / "checkpoint-last" / file).write_text(ODD_JSON[name])
    if file == "training.json":
        assert run([*words, "--output", "t", "--resume"]) == 1
        assert_one_line(capsys.readouterr().err, "checkpoint-last is damaged")
    else:
        assert run(["certify", "--weights", "t/checkpoint-last"]) == 2
        assert_one_line(capsys.readouterr().err, r"classifier\.json (is damaged|is no description|has schema)")


# --- fuzzing -------------------------------------------------------------------------------------------------------
# Each reader gets valid files with random changes; only a PatchproofError may come out.

edits = st.lists(st.tuples(st.integers(0, 3), st.floats(0, 1), st.binary(min_size=1, max_size=8)), max_size=6)


def edited(content: bytes, changes: list[tuple[int, float, bytes]]) -> bytes:
    """Bytes written over, put in, cut out, or everything after a place left out."""
    for kind, share, new in changes:
        place = int(share * len(content))
        after = {0: content[place + len(new) :], 1: content[place:], 2: content[place + 4 * len(new) :], 3: b""}[kind]
        content = content[:place] + (new if kind < 2 else b"") + after
    return content


odd_numbers = st.sampled_from([0, -1, 1, 10**6, 10**30, 10**400, 1e308, float("inf"), float("nan"), 0.5])
scalars = st.none() | st.booleans() | odd_numbers | st.integers() | st.text(max_size=8)
values = st.recursive(scalars, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=4), v, max_size=3))


@st.composite
def changed_json(draw: st.DrawFn, content: Any) -> Any:
    """The object with one value, at any depth, replaced or removed."""
    copy = json.loads(json.dumps(content))
    here, keys = copy, []
    while isinstance(here, (dict, list)) and here and (not keys or draw(st.booleans())):
        key = draw(st.sampled_from(sorted(here) if isinstance(here, dict) else range(len(here))))
        keys.append((here, key))
        here = here[key]
    owner, key = keys[-1]
    if draw(st.integers(0, 3)):
        owner[key] = draw(values)
    else:
        del owner[key]
    return copy


def tolerated(read: Callable[[], object]) -> None:
    with contextlib.suppress(PatchproofError):
        read()


RECORDS = [Record(n, f"a/{n}.png", n % 3, True, True, n % 2 == 0, 0.5, 10, Witness((0, 1), n % 3)) for n in range(4)]
FAST, LONG = 60, 3000
sizes = pytest.mark.parametrize("examples", [FAST, pytest.param(LONG, marks=slow)])


def fuzz(examples: int, strategy: st.SearchStrategy[Any], read: Callable[[Any], object]) -> None:
    @settings(max_examples=examples, deadline=PATIENCE, suppress_health_check=list(HealthCheck), database=None)
    @given(strategy)
    def check(value: Any) -> None:
        tolerated(lambda: read(value))

    check()


@sizes
def test_fuzzed_settings(tmp_path, examples, survived):
    valid = b"dataset: photos\nmasks: 3\npatch: 3%\nlimit: 10\nprecision: fp32\nstep-size: 0.1\nskip_bad: true\n"
    words = st.text("abc:-&*!<>?|[]{}'\"%@`#,\n \t0123456789.~_/\\", max_size=60).map(str.encode)

    def read(content: bytes) -> None:
        (tmp_path / "s.yaml").write_bytes(content)
        for kind in (CertifyConfig, TrainConfig):
            read_config_file(tmp_path / "s.yaml", kind)

    fuzz(examples, st.binary(max_size=80) | words | edits.map(lambda e: edited(valid, e)), read)
    survived("settings", examples, group="fuzzed without a traceback")


@sizes
def test_fuzzed_records(tmp_path, examples, survived):
    lines = [record.line() for record in RECORDS]
    broken = edits.map(lambda e: edited("".join(lines).encode(), e))
    odd = changed_json(json.loads(lines[1])).map(lambda v: (lines[0] + json.dumps(v) + "\n" + lines[2]).encode())
    attack = changed_json(json.loads(lines[1]) | {"attacked": True, "place": [1, 2, 3, 4], "passes": 3}).map(
        lambda v: (json.dumps(v) + "\n").encode()
    )
    folder = RunFolder(tmp_path)

    def read(content: bytes) -> None:
        folder.records_path.write_bytes(content)
        folder.sums_path.unlink(missing_ok=True)
        Tally().add(folder.records()).results(planned=9, available=9, seconds=0)

    fuzz(examples, broken | odd | attack, read)
    survived("records", examples, group="fuzzed without a traceback")


@sizes
def test_fuzzed_manifests(real_run, tmp_path, examples, survived):
    manifest = json.loads((real_run / "manifest.json").read_text())
    plain = {key: value for key, value in manifest.items() if key != "seal"}
    broken = edits.map(lambda e: edited(json.dumps(manifest).encode(), e))
    odd = changed_json(plain).map(lambda v: json.dumps(v).encode())
    (tmp_path / "records.jsonl").write_bytes((real_run / "records.jsonl").read_bytes())
    folder = RunFolder(tmp_path)

    def read(content: bytes) -> None:
        folder.manifest_path.write_bytes(content)
        tolerated(lambda: load_runs([tmp_path]))
        with folder.open(plain, resume=True) as stored:
            stored_engine(stored, chunk=None)

    fuzz(examples, broken | odd, read)
    survived("manifests", examples, group="fuzzed without a traceback")


@sizes
def test_fuzzed_checkpoints(tmp_path, examples, survived):
    examples = min(examples, LONG // 3)  # each builds a network
    classifier = load_classifier("small", "random", class_names=CLASSES)
    save_checkpoint(classifier, tmp_path / "c")
    record, tensors = (tmp_path / "c" / "classifier.json"), (tmp_path / "c" / "model.safetensors")
    described, content = json.loads(record.read_text()), tensors.read_bytes()
    del described["seal"], described["sha256"]
    length = struct.unpack("<Q", content[:8])[0] + 8
    odd = changed_json(described).map(lambda v: (json.dumps(v).encode(), content))
    heads = changed_json(json.loads(content[8:length])).map(lambda v: header(json.dumps(v).encode()) + content[length:])
    broken = (edits.map(lambda e: edited(content[:length], e) + content[length:]) | heads).map(
        lambda c: (json.dumps(described).encode(), c)
    )

    def read(files: tuple[bytes, bytes]) -> None:
        record.write_bytes(files[0])
        tensors.write_bytes(files[1])
        load_checkpoint(tmp_path / "c")

    fuzz(examples, odd | broken, read)
    survived("checkpoints", examples, group="fuzzed without a traceback")


@sizes
def test_fuzzed_torch_files(tmp_path, examples, survived):
    valid = []
    for zipped in (True, False):
        stream = io.BytesIO()
        torch.save({"a": torch.arange(6.0).reshape(2, 3)}, stream, _use_new_zipfile_serialization=zipped)
        valid.append(stream.getvalue())

    def read(content: bytes) -> None:
        (tmp_path / "w.pth").write_bytes(content)
        read_state(tmp_path / "w.pth")

    fuzz(examples, st.binary(max_size=50) | st.builds(edited, st.sampled_from(valid), edits), read)
    survived("torch files", examples, group="fuzzed without a traceback")


@pytest.fixture(scope="module")
def encoded() -> list[bytes]:
    pixels = np.random.default_rng(0).integers(0, 256, (9, 11, 3)).astype(np.uint8)
    found = []
    for kind, modes in {
        "PNG": ("RGB", "L", "P", "RGBA", "1", "I;16"),
        "JPEG": ("RGB", "L", "CMYK"),
        "WEBP": ("RGB", "RGBA"),
        "BMP": ("RGB", "L"),
        "GIF": ("P",),
        "TIFF": ("RGB", "L", "F", "CMYK"),
        "PPM": ("RGB", "L"),
    }.items():
        for mode in modes:
            stream = io.BytesIO()
            grey = Image.fromarray(pixels[..., 0].astype(np.uint16)) if mode == "I;16" else None
            (grey or Image.fromarray(pixels).convert(mode)).save(stream, kind)
            found.append(stream.getvalue())
    return found


@sizes
@pytest.mark.filterwarnings("ignore")
def test_fuzzed_images(encoded, tmp_path, examples, survived):
    def read(content: bytes) -> None:
        (tmp_path / "x.png").write_bytes(content)
        image = decode(tmp_path / "x.png")
        assert image.mode == "RGB"

    fuzz(2 * examples, st.binary(max_size=60) | st.builds(edited, st.sampled_from(encoded), edits), read)
    survived("images", 2 * examples, group="fuzzed without a traceback")


@sizes
def test_fuzzed_logs(tmp_path, examples, survived):
    line = {"kind": "step", "step": 3, "loss": 0.5}
    odd = changed_json(line).map(lambda v: (json.dumps(v) + "\n").encode())
    log = TrainingLog(tmp_path / "log.jsonl", writes=True)

    def read(content: bytes) -> None:
        (tmp_path / "log.jsonl").write_bytes(content)
        log.cut_after(5)
        tolerated(lambda: load_runs([tmp_path]))

    fuzz(examples, odd | edits.map(lambda e: edited(3 * (json.dumps(line) + "\n").encode(), e)), read)
    survived("logs", examples, group="fuzzed without a traceback")
