"""Settings: patches and sizes as people write them, files below flags, unknown keys with the nearest one named."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from patchproof.config import (
    CertifyConfig,
    find_flag,
    parse_batch_size,
    parse_patches,
    parse_size,
    read_config_file,
    resolved,
)
from patchproof.types import InputError


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("3%", ((39, 39),)),
        ("2.4 %", ((35, 35),)),
        ("39px", ((39, 39),)),
        ("20x60px", ((20, 60),)),
        ("20×60px, 60x20px", ((20, 60), (60, 20))),
        ("1%,39px", ((23, 23), (39, 39))),
    ],
)
def test_patches_in_percent_or_pixels(text, sizes):
    assert parse_patches(text, (224, 224)) == sizes


@pytest.mark.parametrize(
    "text", ["3", "", "px", "x5px", "0px", "5x0px", "-3%", "3%%", "5x5x5px", "nan%", "1e400%", ","]
)
def test_what_is_no_patch_is_refused(text):
    with pytest.raises(InputError, match=r"--patch must look like|a patch covers more than 0"):
        parse_patches(text, (224, 224))


@given(st.text(max_size=12))
def test_no_text_makes_a_parser_fail_in_any_other_way(text):
    for parse in (
        lambda t: parse_patches(t, (224, 224)),
        lambda t: parse_size(t, what="--image-size"),
        parse_batch_size,
    ):
        with contextlib.suppress(InputError):
            parse(text)


def test_sizes_and_batch_sizes():
    assert parse_size("224", what="--image-size") == (224, 224)
    assert parse_size("224x320", what="--image-size") == (224, 320)
    with pytest.raises(InputError, match="--image-size must look like 224 or 224x320"):
        parse_size("0", what="--image-size")
    assert parse_batch_size("auto") is None
    assert parse_batch_size("32") == 32
    with pytest.raises(InputError, match="--batch-size must be a positive number or `auto`, not `-1`"):
        parse_batch_size("-1")


def write(folder: Path, text: str) -> Path:
    path = folder / "settings.yaml"
    path.write_text(text)
    return path


def test_a_file_may_use_dashes_and_leave_things_out(tmp_path):
    path = write(tmp_path, "data-dir: here\nmasks: 6\nlimit:\n")
    assert read_config_file(path, CertifyConfig) == {"data_dir": "here", "masks": 6}
    assert read_config_file(write(tmp_path, ""), CertifyConfig) == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("maks: 6", "unknown setting `maks`; did you mean `masks`"),
        ("zzzzzz: 6", "unknown setting `zzzzzz`; known are"),
        ("masks: 2.5", "`masks` must be a whole number, not 2.5"),
        ("- 1", "must hold settings as `name: value` lines, not a list"),
        ("{ a: [", "is not valid YAML"),
        ("a: !!python/object/apply:os.system ['true']", "is not valid YAML"),
    ],
)
def test_a_wrong_file_is_one_clear_error(tmp_path, text, message):
    with pytest.raises(InputError, match=message):
        read_config_file(write(tmp_path, text), CertifyConfig)


def test_a_missing_file_is_one_clear_error(tmp_path):
    with pytest.raises(InputError, match=r"cannot read the configuration .*: No such file"):
        read_config_file(tmp_path / "none.yaml", CertifyConfig)


def test_flags_needed_early_are_found_in_both_spellings():
    assert find_flag(["certify", "--config", "a.yaml"], "--config") == "a.yaml"
    assert find_flag(["certify", "--config=b.yaml"], "--config") == "b.yaml"
    assert find_flag(["certify"], "--config") is None


def test_what_is_saved_is_plain_and_says_nothing_of_where():
    saved = resolved(CertifyConfig(data_dir=Path("a"), resume=True))
    assert saved["data_dir"] == "a"
    assert saved["masks"] == 3
    assert "resume" not in saved
