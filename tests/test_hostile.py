"""Files that mean harm: nothing in them runs, hangs, fills the memory, or reaches the terminal raw; no traceback."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import shutil
import struct
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
from patchproof.cli._settings import CertifySettings, TrainSettings
from patchproof.cli._sources import known_settings, read_config_file
from patchproof.data import MAX_PIXELS, decode
from patchproof.masking import Measured
from patchproof.models import load_checkpoint, load_classifier, save_checkpoint, sealed
from patchproof.models._files import read_state
from patchproof.runs import Record, RunFolder, Tally, read_runs
from patchproof.runs._manifest import stored_engine
from patchproof.runs._train import Progress, cut_log
from patchproof.types import PatchproofError
from test_cli import CLASSES, assert_one_line, class_folders, picture

slow = pytest.mark.slow
PATIENCE = 20_000
"""Milliseconds after which one input counts as a hang; a quiet machine needs a hundredth."""


@pytest.fixture
def photos(tmp_path) -> Path:
    return class_folders(tmp_path / "photos", 2)


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    save_checkpoint(load_classifier("small", "random", class_names=CLASSES, seed=1), tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def quick(photos: Path, checkpoint: Path) -> list[str]:
    return ["--dataset", str(photos), "--weights", str(checkpoint), "--patch", "3px", "--masks", "2", "--device", "cpu"]


def some(names: Any, fast: int) -> list[Any]:
    """The first few, and the others in the slow set."""
    return [name if number < fast else pytest.param(name, marks=slow) for number, name in enumerate(names)]


def refused(capsys, pattern: str, *words: object, codes: tuple[int, ...] = (2,)) -> None:
    assert run(list(map(str, words))) in codes, words
    assert_one_line(capsys.readouterr().err.splitlines(keepends=True)[-1], pattern)


# --- weights -------------------------------------------------------------------------------------------------------


class Boom:
    """A pickle that, when loaded, leaves a folder behind."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self.marker),)


def pickled(path: Path, marker: Path, *, with_torch: bool) -> None:
    state = {"head.weight": torch.zeros(3, 64), "head.bias": Boom(marker)}
    torch.save(state, path) if with_torch else path.write_bytes(pickle.dumps(state))


@pytest.mark.parametrize("with_torch", [True, False])
@pytest.mark.parametrize("name", some(["w.pth", "w.safetensors", "w.pt", "w.bin", "w.ckpt"], 2))
def test_pickles_are_refused_wherever_weights_are_read(photos, tmp_path, capsys, name, with_torch):
    pickled(tmp_path / name, tmp_path / "harm", with_torch=with_torch)
    shutil.copytree(photos, tmp_path / "held out")
    data = {"predict": [photos], "train": ["--dataset", photos, "--validation", "held out"]}
    for verb in ("certify", "predict", "attack", "train"):
        words = (verb, *data.get(verb, ["--dataset", photos]), "--model", "small", "--weights", name, "--device", "cpu")
        refused(capsys, "was refused|is damaged or cut short", *words)
    assert not (tmp_path / "harm").exists()
    pickle.loads(pickle.dumps(Boom(tmp_path / "harm")))  # which does do harm
    assert (tmp_path / "harm").exists()


def test_pickles_are_refused_inside_checkpoints(photos, checkpoint, tmp_path, capsys):
    pickled(checkpoint / "model.safetensors", tmp_path / "harm", with_torch=True)
    refused(capsys, r"model\.safetensors is damaged", "certify", *quick(photos, checkpoint))
    record = json.loads((checkpoint / "classifier.json").read_text())
    del record["sha256"], record["seal"]
    (checkpoint / "classifier.json").write_text(json.dumps(record))
    refused(capsys, r"model\.safetensors is damaged or cut short", "certify", *quick(photos, checkpoint))
    assert not (tmp_path / "harm").exists()


def test_pickles_are_refused_as_published_data(tmp_path, capsys):
    folder = tmp_path / "data" / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    for name in ("test_batch", "batches.meta"):
        pickled(folder / name, tmp_path / "harm", with_torch=False)
    words = "certify --dataset cifar10 --data-dir data --weights random"
    refused(capsys, "its md5 sums are wrong.*--download", *words.split())
    assert not (tmp_path / "harm").exists()


def test_a_compressed_weight_file_is_refused_before_it_is_unpacked(tmp_path, capsys):
    torch.save({"head.bias": torch.zeros(10)}, tmp_path / "w.pth")
    with zipfile.ZipFile(tmp_path / "w.pth") as whole, zipfile.ZipFile(tmp_path / "bomb.pth", "w") as bomb:
        for entry in whole.namelist():
            content = bytes(10**8) if entry.endswith("data/0") else whole.read(entry)
            bomb.writestr(entry, content, compress_type=zipfile.ZIP_DEFLATED)
    assert (tmp_path / "bomb.pth").stat().st_size < 10**6
    words = "certify --model small --weights bomb.pth"
    refused(capsys, "is compressed, which torch.save never does", *words.split())


def test_a_last_layer_that_claims_a_billion_classes_is_refused(tmp_path, capsys):
    state = load_classifier("small", "random", num_classes=3).module.state_dict()
    state |= {"head.weight": torch.zeros(1, 1).expand(10**9, 64), "head.bias": torch.zeros(1).expand(10**9)}
    torch.save(state, tmp_path / "w.pth")
    words = "predict w.pth --model small --weights w.pth"
    refused(capsys, "a last layer of 1,000,000,000 classes is refused; the limit is 1,000,000", *words.split())


def header(content: bytes, *, length: int | None = None, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(content) if length is None else length) + content + data


def entry(**values: Any) -> bytes:
    content = json.dumps({"head.bias": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]} | values}).encode()
    return header(content, data=bytes(12))


HEADERS = {
    "empty": b"",
    "half a length": b"\x01\x00",
    "an endless header": header(b"{}", length=2**63),
    "a header beyond the file": header(b"{}", length=10**6),
    "no JSON": header(b"\xff\xfe{"),
    "a list": header(b"[1]"),
    "deep nesting": header(b"[" * 10_000),
    "an unknown type": entry(dtype="F7"),
    "a negative shape": entry(shape=[-3]),
    "an endless shape": entry(shape=[2**62, 2**62]),
    "data beyond the file": entry(data_offsets=[0, 10**12]),
    "data backwards": entry(data_offsets=[12, 0]),
}


@pytest.mark.parametrize("name", HEADERS)
def test_safetensors_with_hostile_headers_are_refused(tmp_path, capsys, name):
    (tmp_path / "w.safetensors").write_bytes(HEADERS[name])
    words = "certify --model small --weights w.safetensors"
    refused(capsys, r"w\.safetensors is damaged or cut short", *words.split())


SPOILED = {
    "1 tensors missing": None,
    r"1 tensors of another type \(e.g. head.bias: torch.int64\)": torch.arange(3),
    r"1 tensors of another type \(e.g. head.bias: torch.bool\)": torch.tensor([True, False, True]),
    "tensors of another shape": torch.zeros(3, 1),
    "1 of 3 values in tensor head.bias are NaN or infinite": torch.tensor([0.0, torch.nan, 0.0]),
}


@pytest.mark.parametrize("message", SPOILED)
def test_tensors_that_are_no_weights_are_refused(photos, tmp_path, capsys, message):
    state = load_classifier("small", "random", num_classes=3).module.state_dict() | {"head.bias": SPOILED[message]}
    save_file({k: v.contiguous() for k, v in state.items() if v is not None}, tmp_path / "w.safetensors")
    words = ("certify", "--dataset", photos, "--model", "small", "--weights", "w.safetensors")
    refused(capsys, message, *words, codes=(1, 2))


# --- settings ------------------------------------------------------------------------------------------------------


def laughs(levels: int, first: str, later: str) -> str:
    """Each line stands for nine of the one before."""
    names = [", ".join([f"*a{n - 1}"] * 9) for n in range(1, levels)]
    return "\n".join([f"a0: &a0 {first}", *(f"a{n}: &a{n} {later % name}" for n, name in enumerate(names, start=1))])


YAML = [
    ("!!python/object/apply:os.mkdir [harm]", "is not valid YAML: could not determine a constructor"),
    ("limit: !!python/object/apply:os.mkdir [harm]", "is not valid YAML"),
    ("!!python/object/new:os.mkdir {args: [harm]}", "is not valid YAML"),
    (laughs(12, "[ha, ha]", "[%s]"), r"aliases \(\*a0\) are not allowed in settings"),
    (laughs(12, "{masks: 3}", "{<<: [%s]}"), r"aliases \(\*a0\) are not allowed in settings"),
    ("limit: " + "[" * 600, "is not valid YAML"),
    ("masks: " + "3" * 200_000, "has more than the 100,000 bytes that settings may have"),
    ("output: ''", "`output` is empty; leave it out for its default"),
    ("masks: [3]", "`masks` must be one plain value, not a list"),
    ("masks: 2001-01-01", "`masks` must be one plain value, not a date"),
    ("masks: 2001-99-99", "is not valid YAML"),
    ("masks: !!int x", "is not valid YAML"),
    ("masks: !!binary x", "is not valid YAML|one plain value"),
    ("masks: " + "9" * 5000, "is not valid YAML|masks"),
    ("defense: [alarm]", "unknown defence|one plain value"),
    ("\x1b]0;owned\x07: 1", "is not valid YAML|unknown setting"),
    ("? [a, b]\n: 1", "is not valid YAML"),
    ("- masks", "must hold settings as `name: value` lines"),
]


@pytest.mark.parametrize(("text", "message"), YAML)
def test_settings_that_mean_harm_are_one_line(tmp_path, capsys, text, message):
    (tmp_path / "s.yaml").write_text(text)
    started = time.monotonic()
    refused(capsys, message, "certify", "--config", "s.yaml", "--limit", "1")
    assert time.monotonic() - started < PATIENCE / 1000
    assert not (tmp_path / "harm").exists()


def test_an_endless_settings_file_is_not_read_to_its_end(capsys):
    refused(capsys, "has more than the 100,000 bytes", "certify", "--config", "/dev/zero")


# --- images and names ----------------------------------------------------------------------------------------------


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(side: int, *extra: bytes) -> bytes:
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0))
    data = chunk(b"IDAT", zlib.compress(bytes(10**6))) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(extra) + data


BOMBS = {
    f"it has more than the {MAX_PIXELS:,} pixels allowed": png(60_000),
    "Decompressed data too large": png(28, chunk(b"zTXt", b"k\0\0" + zlib.compress(bytes(5 * 10**6)))),
}


@pytest.mark.parametrize("message", BOMBS)
def test_decompression_bombs_are_refused_with_the_limit_or_harmless(photos, checkpoint, capsys, message):
    (photos / "cat" / "1.png").write_bytes(BOMBS[message])
    refused(capsys, message, "certify", *quick(photos, checkpoint), "--output", "r", codes=(1,))
    assert run(["certify", *quick(photos, checkpoint), "--output", "r", "--resume", "--skip-bad"]) == 0
    assert run(["predict", str(photos / "cat"), "--weights", str(checkpoint)]) == 1


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
    for words in (
        "certify --dataset loop --weights random",
        "certify --weights random --output loop",
        "certify --weights loop",
        "certify --model small --weights loop/model.safetensors",
        "certify --config loop",
        "certify --dataset cifar10 --data-dir loop --weights random",
        "predict loop",
        "predict photos --weights checkpoint --like loop",
        "report loop",
        "report r --output loop",
        "ls runs loop",
        "certify --model loop.py:build",
        "train --dataset loop --weights random",
        "attack --weights loop",
    ):
        refused(capsys, "loop", *words.split(), codes=(1, 2))


ODD_NAME = b"\x1b]0;owned\x07two\nlines\r\x08\xff\xc2\x9b31m[bold]"
"""A title for the terminal, a line break, overwriting, a byte that is no text, a two-byte control character, markup."""


def raw_control_characters(text: str) -> set[str]:
    return {c for c in text if c != "\n" and unicodedata.category(c) in ("Cc", "Cs")}


def test_names_do_not_reach_the_terminal_raw(tmp_path, capsys):
    classes = [os.fsdecode(ODD_NAME + b"-class"), "other"]
    root = Path(os.fsdecode(bytes(tmp_path) + b"/photos" + ODD_NAME))
    for label, folder in enumerate(classes):
        (root / folder).mkdir(parents=True)
        picture(label).save(root / folder / os.fsdecode(b"0" + ODD_NAME + b".png"))
    bad = root / "other" / os.fsdecode(b"bad" + ODD_NAME + b".png")
    bad.write_bytes(b"no image")
    save_checkpoint(load_classifier("small", "random", class_names=sorted(classes, key=os.fsencode)), tmp_path / "c")
    output = os.fsdecode(b"run" + ODD_NAME)
    quickly = [*quick(root, tmp_path / "c"), "--skip-bad"]
    for arguments, code in (
        (["certify", *quickly, "--output", output], 0),
        (["certify", *quickly, "--output", output], 2),
        (["certify", *quick(root, tmp_path / "c"), "--output", "stops"], 1),
        (["attack", *quickly, "--steps", "1", "--restarts", "1", "--places", "1", "--output", output + "-a"], 0),
        (["predict", str(root), "--weights", "c", "--like", output], 1),
        (["predict", str(root), "--weights", "c", "--like", output, "--json"], 1),
        (["report", output, "--dataset", str(root)], 0),
        (["ls", "runs", "."], 0),
        (["certify", "--dataset", str(bad), "--weights", "c"], 2),
        (["predict", os.fsdecode(b"none" + ODD_NAME)], 2),
    ):
        assert run(arguments) == code, capsys.readouterr()
        shown = capsys.readouterr()
        assert not raw_control_characters(shown.out + shown.err), (arguments, shown)
    page = (tmp_path / output / "report" / "index.html").read_text("utf-8")
    assert not raw_control_characters(page) - {"\t"}


def test_a_checkpoints_words_about_itself_do_not_reach_the_terminal_raw(photos, checkpoint, capsys):
    record = json.loads((checkpoint / "classifier.json").read_text())
    odd = {"architecture": "\x1b]0;owned\x07", "class_names": ["\x1b[2J", "b", "c"], "source": "\x1b[2J"}
    for name, value in odd.items():
        (checkpoint / "classifier.json").write_text(json.dumps(sealed(record | {name: value})))
        run(["certify", *quick(photos, checkpoint), "--output", f"r-{name}"])
        run(["predict", str(photos), *quick(photos, checkpoint)[2:]])
        shown = capsys.readouterr()
        assert not raw_control_characters(shown.out + shown.err)
        assert "Traceback" not in shown.err


# --- data that changes under the run -------------------------------------------------------------------------------

CHANGES: dict[str, Callable[[Path], object]] = {
    "replaced": lambda photos: picture(99, size=(60, 60)).save(photos / "eel" / "1.png"),
    "a class added": lambda photos: (photos / "fox").mkdir(),
    "all gone": lambda photos: photos.rename(photos.with_name("elsewhere")),
    "removed": lambda photos: (photos / "eel" / "1.png").unlink(),
    "added": lambda photos: picture(99).save(photos / "eel" / "2.png"),
}


@contextlib.contextmanager
def during(owner: Any, name: str, act: Callable[[], object]):
    """Inside, act just before the first call of `owner.name`."""
    real, acted = getattr(owner, name), []

    def first(*arguments: Any, **options: Any) -> Any:
        if not acted:
            acted.append(act())
        return real(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, first)
        yield


def put_back(copy: Path, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(copy, folder)


@pytest.mark.parametrize("change", some(CHANGES, 1))
@pytest.mark.parametrize("verb", ["certify", pytest.param("attack", marks=slow)])
def test_images_that_change_during_a_run_are_noticed(photos, checkpoint, tmp_path, capsys, verb, change):
    words = [verb, *quick(photos, checkpoint), "--skip-bad", "--batch-size", "8", "--output", "r"]
    words += ["--steps", "1", "--restarts", "1", "--places", "1"] if verb == "attack" else []
    shutil.copytree(photos, tmp_path / "as they were")
    with during(RunFolder, "append", lambda: CHANGES[change](photos)):
        refused(capsys, "the data set changed during the run.*; put the files back as they were", *words, codes=(1,))
    results = json.loads((tmp_path / "r" / "results.json").read_text())
    assert results["status"] == "partial"
    assert "the data set changed during the run" in results["partial"][-1]
    refused(
        capsys, "data_sha256 was|or the data differ|holds no images|unknown dataset", *words, "--resume", codes=(1, 2)
    )
    put_back(tmp_path / "as they were", photos)  # some of the records may be about other pictures
    again = "cannot be continued: in an earlier session the data set changed"
    refused(capsys, again, *words, "--resume", codes=(1,))


@pytest.mark.parametrize("which", ["photos", pytest.param("val", marks=slow)])
def test_images_that_change_during_training_are_noticed(photos, tmp_path, capsys, which):
    shutil.copytree(photos, tmp_path / "val")
    shutil.copytree(photos, tmp_path / "as they were")
    words = "train --dataset photos --validation val --epochs 1 --batch-size 6 --weights random --strategy none"
    words += " --device cpu --output t"
    with during(Progress, "add", lambda: CHANGES["replaced"](tmp_path / which)):
        refused(capsys, "the data set changed during the run", *words.split(), codes=(1,))
    assert not (tmp_path / "t" / "results.json").exists()
    put_back(tmp_path / "as they were", tmp_path / which)
    again = "cannot be continued: in an earlier session the data set changed"
    refused(capsys, again, *words.split(), "--resume", codes=(1,))


# --- JSON ----------------------------------------------------------------------------------------------------------

SMALL_RUN = ["certify", "--weights", "random", "--limit", "4", "--masks", "2", "--device", "cpu"]
ODD_JSON = {
    "deep lists": "[" * 100_000,
    "surrogates": '{"command": "\\ud800", "identity": {"a": "\\udfff"}}',
    "deep objects": '{"a":' * 100_000,
    "a long number": '{"schema": ' + "9" * 10_000 + "}",
    "no number": '{"schema": NaN, "command": "certify", "identity": {}, "tau": {"fast": Infinity, "fp32": 1e999}}',
    "a number beyond floats": '{"command": "certify", "identity": {}, "tau": {"fast": 1' + "0" * 400 + "}}",
    "another type": "[]",
    "empty": "",
    "zeros": "\0" * 1000,
}


@pytest.fixture(scope="module")
def real_run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("real") / "r"
    assert run([*SMALL_RUN, "--output", str(folder)]) == 0
    return folder


@pytest.mark.parametrize("name", some(ODD_JSON, 2))
@pytest.mark.parametrize("file", some(["manifest.json", "records.jsonl", "results.json", "records.crc"], 2))
def test_odd_json_in_a_run_folder_is_one_line(real_run, tmp_path, capsys, file, name):
    shutil.copytree(real_run, tmp_path / "r")
    (tmp_path / "r" / file).write_text(ODD_JSON[name] + "\n")
    code = run([*SMALL_RUN, "--output", "r", "--resume"])
    said = capsys.readouterr().err
    assert code in (0, 1)
    if code:
        assert_one_line(said, "damaged|was written with schema|cannot be continued|holds a .* run")
    for other in (["ls", "runs", "."], ["report", "r"]):
        assert run(other) in (0, 1)
        shown = capsys.readouterr()
        assert not raw_control_characters(shown.out + shown.err)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[list[str], Path]:
    folder = tmp_path_factory.mktemp("trained")
    for split in ("train", "val"):
        class_folders(folder / "data" / split, 2)
    words = f"train --weights random --epochs 1 --batch-size 6 --strategy none --device cpu --dataset {folder / 'data'}"
    assert run([*words.split(), "--output", str(folder / "t")]) == 0
    return words.split(), folder / "t"


@pytest.mark.parametrize("name", some(ODD_JSON, 2))
def test_odd_json_in_a_checkpoint_is_one_line(trained, tmp_path, capsys, name):
    words, folder = trained
    shutil.copytree(folder, tmp_path / "t")
    for file in ("classifier.json", "training.json"):
        (tmp_path / "t" / "checkpoint-last" / file).write_text(ODD_JSON[name])
    refused(capsys, "checkpoint-last is damaged", *words, "--output", "t", "--resume", codes=(1,))
    pattern = r"classifier\.json (is damaged|is no description|has schema)"
    refused(capsys, pattern, "certify", "--weights", "t/checkpoint-last")


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
def changed_json(draw: st.DrawFn, content: Any) -> bytes:
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
    return json.dumps(copy).encode()


def tolerated(read: Callable[[], object]) -> None:
    with contextlib.suppress(PatchproofError):
        read()


@pytest.fixture(params=some([60, 3000], 1))
def fuzz(request, survived):
    def fuzz(kind: str, strategy: st.SearchStrategy[Any], read: Callable[[Any], object], times: float = 1) -> None:
        examples = int(times * request.param)

        @settings(max_examples=examples, deadline=PATIENCE, suppress_health_check=list(HealthCheck), database=None)
        @given(strategy)
        def check(value: Any) -> None:
            tolerated(lambda: read(value))

        check()
        survived(kind, examples, group="fuzzed without a traceback")

    return fuzz


def test_fuzzed_settings(tmp_path, fuzz):
    valid = b"dataset: photos\nmasks: 3\npatch: 3%\nlimit: 10\nprecision: fp32\nstep-size: 0.1\nskip_bad: true\n"
    words = st.text("abc:-&*!<>?|[]{}'\"%@`#,\n \t0123456789.~_/\\", max_size=60).map(str.encode)
    path = tmp_path / "s.yaml"

    def read(content: bytes) -> None:
        path.write_bytes(content)
        for kind in (CertifySettings, TrainSettings):
            known_settings(read_config_file(path), kind, path)

    fuzz("settings", st.binary(max_size=80) | words | edits.map(lambda e: edited(valid, e)), read)


def test_fuzzed_records(tmp_path, fuzz):
    witness = {"witness": {"masks": [0, 1], "label": 2}}
    lines = [Record(n, f"{n}.png", n, True, True, n == 0, 0.5, 10, witness).line().encode() for n in range(3)]
    attacked = json.loads(lines[1]) | {"attacked": True, "place": [1, 2, 3, 4], "passes": 3}
    odd = changed_json(json.loads(lines[1])) | changed_json(attacked)
    folder = RunFolder(tmp_path)

    def read(content: bytes) -> None:
        folder.records_path.write_bytes(content)
        folder.sums_path.unlink(missing_ok=True)
        Tally().add(folder.records()).rates()

    cut = edits.map(lambda e: edited(b"".join(lines), e))
    fuzz("records", cut | odd.map(lambda line: lines[0] + line + b"\n" + lines[2]), read)


def test_fuzzed_manifests(real_run, tmp_path, fuzz):
    manifest = json.loads((real_run / "manifest.json").read_text())
    plain = {key: value for key, value in manifest.items() if key != "seal"}
    shutil.copyfile(real_run / "records.jsonl", tmp_path / "records.jsonl")
    folder, engine = RunFolder(tmp_path), Measured(tau=0.0, tau_fp32=1e-6)

    def read(content: bytes) -> None:
        folder.manifest_path.write_bytes(content)
        tolerated(lambda: read_runs([tmp_path]))
        with folder.open(plain, resume=True) as stored:
            stored_engine(engine, stored, plain, where=tmp_path, keep_batch=False)

    fuzz("manifests", edits.map(lambda e: edited(json.dumps(manifest).encode(), e)) | changed_json(plain), read)


def test_fuzzed_checkpoints(checkpoint, fuzz):
    record, tensors = checkpoint / "classifier.json", checkpoint / "model.safetensors"
    described, content = json.loads(record.read_text()), tensors.read_bytes()
    del described["seal"], described["sha256"]
    length, plain = struct.unpack("<Q", content[:8])[0] + 8, json.dumps(described).encode()
    heads = changed_json(json.loads(content[8:length])).map(lambda v: header(v) + content[length:])
    broken = edits.map(lambda e: edited(content[:length], e) + content[length:]) | heads

    def read(files: tuple[bytes, bytes]) -> None:
        record.write_bytes(files[0])
        tensors.write_bytes(files[1])
        load_checkpoint(checkpoint)

    odd = changed_json(described).map(lambda v: (v, content)) | broken.map(lambda c: (plain, c))
    fuzz("checkpoints", odd, read, times=1 / 3)  # each builds a network


def test_fuzzed_torch_files(tmp_path, fuzz):
    valid = []
    for zipped in (True, False):
        stream = io.BytesIO()
        torch.save({"a": torch.arange(6.0).reshape(2, 3)}, stream, _use_new_zipfile_serialization=zipped)
        valid.append(stream.getvalue())

    def read(content: bytes) -> None:
        (tmp_path / "w.pth").write_bytes(content)
        read_state(tmp_path / "w.pth")

    fuzz("torch files", st.binary(max_size=50) | st.builds(edited, st.sampled_from(valid), edits), read)


FORMATS = {"PNG": "RGB L P RGBA 1", "JPEG": "RGB L CMYK", "WEBP": "RGB RGBA", "BMP": "RGB L", "GIF": "P"}
FORMATS |= {"TIFF": "RGB L F CMYK", "PPM": "RGB L"}


@pytest.mark.filterwarnings("ignore")
def test_fuzzed_images(tmp_path, fuzz):
    pixels, encoded = np.random.default_rng(0).integers(0, 256, (9, 11, 3)).astype(np.uint8), []
    for kind, mode in ((kind, mode) for kind, modes in FORMATS.items() for mode in modes.split()):
        stream = io.BytesIO()
        Image.fromarray(pixels).convert(mode).save(stream, kind)
        encoded.append(stream.getvalue())

    def read(content: bytes) -> None:
        (tmp_path / "x.png").write_bytes(content)
        assert decode(tmp_path / "x.png").mode == "RGB"

    fuzz("images", st.binary(max_size=60) | st.builds(edited, st.sampled_from(encoded), edits), read, times=2)


def test_fuzzed_logs(tmp_path, fuzz):
    line = {"kind": "step", "step": 3, "loss": 0.5}
    manifest = {"schema": 1, "command": "train", "config": {}, "identity": {"plan": {"strategy": "greedy"}}, "steps": 3}
    (tmp_path / "manifest.json").write_text(json.dumps(sealed(manifest)))

    def read(content: bytes) -> None:
        (tmp_path / "log.jsonl").write_bytes(content + b"\n")
        tolerated(lambda: read_runs([tmp_path]))
        cut_log(tmp_path / "log.jsonl", 5)

    fuzz("logs", changed_json(line) | edits.map(lambda e: edited(3 * (json.dumps(line) + "\n").encode(), e)), read)
