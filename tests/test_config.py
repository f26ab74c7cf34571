"""Settings exist once: flags, YAML keys and defaults are the library's, and only the command line names flags."""

from __future__ import annotations

import ast
import contextlib
import importlib
import json
import re
import tomllib
from dataclasses import MISSING, dataclass, fields
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import patchproof as pp
from patchproof.cli import build_app, run
from patchproof.cli._settings import FLAGS, SETTINGS, CertifySettings, EngineSettings, TrainSettings, part, with_defense
from patchproof.cli._sources import in_flags, known_settings, read_config_file, resolved
from patchproof.defenses import DEFENSES, DefenseEntry
from patchproof.geometry import parse_patches, parse_size
from patchproof.types import InputError

SOURCE = Path(pp.__file__).parent
PARTS = [
    ("certify", EngineSettings),
    ("certify", pp.PatchCleanser.Options),
    ("attack", pp.AttackPlan),
    ("attack", EngineSettings),
    ("train", pp.Plan),
    ("bench", EngineSettings),
    ("predict", EngineSettings),
]


def flag(name: str) -> str:
    return "--" + FLAGS.get(name, name).replace("_", "-")


@cache
def arguments(verb: str) -> dict[str, object]:
    """Default of each flag, as `--help` shows it."""
    app = build_app()
    found = app[verb].assemble_argument_collection(default_parameter=app.default_parameter)
    return {argument.name: argument.field_info.default for argument in found if argument.name.startswith("--")}


@pytest.mark.parametrize(("verb", "kind"), PARTS, ids=lambda value: getattr(value, "__name__", value))
def test_flags_keys_and_defaults_are_those_of_the_library(verb, kind):
    shown, settings = arguments(verb), with_defense(SETTINGS[verb], "patchcleanser")
    for field in fields(kind):
        assert field.default is not MISSING
        assert shown[flag(field.name)] == field.default
        key = FLAGS.get(field.name, field.name)
        if field.default is not None:
            assert known_settings({key: field.default}, settings, Path("s.yaml")) == {key: field.default}
    _, bound, *_ = build_app().parse_args([verb, *(["a.png"] if verb == "predict" else []), "--device", "cpu"])
    assert part(bound.kwargs["settings"], kind) == part(settings(), kind) == kind()


def test_a_new_defence_brings_its_flags_and_defaults_with_it(monkeypatch, capsys):
    class Banded(pp.Alarm):
        name = "banded"

        @dataclass(frozen=True, kw_only=True)
        class Options:
            band: int = 17
            """Columns of a band."""

    monkeypatch.setitem(DEFENSES, "banded", DefenseEntry("bands", Banded))  # type: ignore[arg-type]
    assert run(["certify", "--defense", "banded", "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "--band INT Columns of a band. [default: 17]" in re.sub(r"[│ ]+", " ", shown)
    assert "--masks" not in shown
    assert run(["ls", "defenses"]) == 0
    assert "--band" in capsys.readouterr().out


def strings(source: str) -> dict[str, int]:
    """The strings of a program, docstrings aside, and their lines."""
    tree = ast.parse(source)
    documented = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    constants = [n for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    return {node.value: node.lineno for node in constants if id(node) not in documented}


def test_the_library_names_no_flag():
    """Its messages name parameters: no string outside `cli` holds a flag of a command."""
    flags = {name for verb in SETTINGS for name in arguments(verb)}
    assert {"--masks", "--resume", "--step-size", "--learning-rate", "--data-dir"} <= flags
    assert list(strings('"""--masks"""\nraise ValueError(f"{x} needs --masks 3")')) == [" needs --masks 3"]
    for path in SOURCE.rglob("*.py"):
        for text, line in strings(path.read_text("utf-8")).items() if path.parent.name != "cli" else ():
            assert not flags & set(re.findall(r"--[a-z][a-z-]*", text)), f"{path}:{line}"


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("per_axis must be at least 1, not 0", "--masks must be at least 1, not 0"),
        ("batch_size must be a positive number or `auto`, not 0", "--batch-size must be a positive number"),
        ("a run; continue it with resume=True, or choose another folder", "with --resume, or choose another --output"),
        ("device, torch or batch_size; go on where", "torch or --batch-size; go on"),
        (
            "so it cannot be continued: images was 4 of 8, now 8 of 8; name was ibp, now alarm",
            "continued: --limit or the data differ: images was 4 of 8, now 8 of 8; --defense was ibp, now alarm",
        ),
        (
            "so it cannot be continued: exhaustive was false, now true; precision was fp32, now bf16",
            "continued: --exhaustive was false, now true; --precision was fp32, now bf16$",
        ),
        ("the model is resnet18; name the model resnet18", "the model is resnet18; name the model resnet18"),
        (
            "no 'data_dir' in /a/data_dir/batch_size: in another folder",
            "^no 'data_dir' in /a/data_dir/batch_size: with",
        ),
        (r"cannot read C:\data_dir\a; batch_size must be 1", r"^cannot read C:\\data_dir\\a; --batch-size must be 1$"),
        ("give the folder itself as data_dir, or pass download=True", "as --data-dir, or pass --download"),
    ],
)
def test_the_command_line_says_flags_for_parameters(message, words):
    assert re.search(words, in_flags(message, with_defense(CertifySettings, "patchcleanser")))


@pytest.mark.parametrize(
    ("text", "sizes"),
    [("2.4 %", ((35, 35),)), ("20×60px, 60x20px", ((20, 60), (60, 20))), ("1%,39px", ((23, 23), (39, 39)))],
)
def test_patches_in_percent_or_pixels(text, sizes):
    assert parse_patches(text, (224, 224)) == sizes


@pytest.mark.parametrize("text", ["3", "", "px", "x5px", "0px", "5x0px", "-3%", "3%%", "5x5x5px", "nan%", "1e400%"])
def test_what_is_no_patch_is_refused(text):
    with pytest.raises(InputError, match=r"a patch looks like 3%|a patch covers more than 0"):
        parse_patches(text, (224, 224))


@given(st.text(max_size=12))
def test_no_text_makes_a_parser_fail_in_any_other_way(text):
    for parse in (lambda t: parse_patches(t, (224, 224)), parse_size):
        with contextlib.suppress(InputError):
            parse(text)


def test_sizes():
    assert (parse_size("224"), parse_size("224x320")) == ((224, 224), (224, 320))
    with pytest.raises(InputError, match="224x320"):
        parse_size("0")


def test_every_extra_is_one_that_the_code_imports():
    project = tomllib.loads((SOURCE.parents[1] / "pyproject.toml").read_text())["project"]
    code = "".join(path.read_text() for path in SOURCE.rglob("*.py"))
    for extra, packages in project["optional-dependencies"].items():
        names = [re.split("[>=<[]", package)[0] for package in packages]
        if extra not in ("docs", "dev"):
            assert any(re.search(rf"\b{name.replace('-', '[-_]')}\b", code) for name in names), extra


def test_the_container_has_what_the_package_is_built_from_and_runs_a_command_there_is():
    root = SOURCE.parents[1]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    ignored, *copied = (root / ".dockerignore").read_text().split()
    copied = [name.removeprefix("!") for name in copied]
    assert ignored == "*"
    assert all((root / name).exists() for name in copied)
    for needed in ("pyproject.toml", "src/patchproof", project["readme"], *project["license-files"]):
        assert any(Path(needed).is_relative_to(name) for name in copied), needed
    recipe = (root / "Dockerfile").read_text()
    (command,) = json.loads(re.search(r"^ENTRYPOINT (.*)", recipe, re.MULTILINE)[1])
    module, _, function = project["scripts"][command].partition(":")
    assert callable(getattr(importlib.import_module(module), function))
    python = re.search(r"^FROM python:(\d+\.\d+)-", recipe, re.MULTILINE)[1]
    assert f"Programming Language :: Python :: {python}" in project["classifiers"]
    for text in (recipe, (root / "README.md").read_text()):
        mounted, words = re.search(r"docker run ([^`\n]*?) patchproof ([^`\n]*)", text).groups()
        place = re.search(r"^WORKDIR (.*)", recipe, re.MULTILINE)[1]
        assert f'-v "$PWD:{place}"' in mounted, "the run would vanish with the container"
        words = words.split()
        build_app().parse_args(words, exit_on_error=False, print_error=False)


def read(folder: Path, text: str) -> dict:
    path = folder / "settings.yaml"
    path.write_text(text)
    return known_settings(read_config_file(path), with_defense(CertifySettings, "patchcleanser"), path)


def test_a_file_may_use_dashes_and_leave_things_out(tmp_path):
    assert read(tmp_path, "data-dir: here\nmasks: 6\nlimit:\n") == {"data_dir": "here", "masks": 6}
    assert read(tmp_path, "") == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("maks: 6", "unknown setting `maks`; did you mean `masks`"),
        ("per_axis: 6", "unknown setting `per_axis`"),
        ("zzzzzz: 6", "unknown setting `zzzzzz`; known are"),
        ("config: b.yaml", "unknown setting `config`; a file of settings cannot name another one"),
        ("epochs: 3", "unknown setting `epochs`; it is for the commands demo, train"),
        ("masks: 3\nmasks: 4", "`masks` is set more than once"),
        ("image-size: 28\nimage_size: 30", "`image_size` is set more than once"),
    ],
)
def test_a_wrong_file_is_one_clear_error(tmp_path, text, message):
    with pytest.raises(InputError, match=message):
        read(tmp_path, text)


@pytest.mark.parametrize(("name", "value"), [("masks", "2.5"), ("masks", "true"), ("json", "maybe"), ("limit", "x")])
def test_a_value_of_another_type_is_refused_as_on_the_command_line(tmp_path, capsys, name, value):
    (tmp_path / "s.yaml").write_text(f"{name}: {value}\n")
    assert run(["certify", f"--config={tmp_path / 's.yaml'}"]) == 2
    assert re.search(rf"Invalid value for `{name}`.*( {value}|into bool)", capsys.readouterr().err, re.IGNORECASE)


def test_what_is_saved_is_plain_and_says_nothing_of_how_the_run_was_begun():
    saved = resolved(with_defense(CertifySettings, "alarm")(defense="alarm", data_dir=Path("a"), resume=True))
    assert (saved["data_dir"], saved["masks"], saved["defense"]) == ("a", 3, "alarm")
    assert not {"resume", "config", "per_axis", "exhaustive"} & set(saved)
    assert resolved(TrainSettings())["strategy"] == "greedy"
