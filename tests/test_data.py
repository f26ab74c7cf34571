"""patchproof.data: a file becomes the right pixels or an error that names it, and batches hold the right images."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import re
import runpy
import struct
import threading
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from timm.data.transforms import ResizeKeepRatio
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as tv

import reference_geometry as reference
from patchproof.data import (
    DATASETS,
    MAX_PIXELS,
    ArraySource,
    BadImage,
    BadImageError,
    Batch,
    Decoded,
    FolderSource,
    ImageSource,
    SequenceSource,
    as_source,
    decode,
    default_preprocessing,
    iterate_batches,
    open_dataset,
    preprocess,
    spread_indices,
)
from patchproof.geometry import Rect, native_footprint, placement
from patchproof.runs import image_files
from patchproof.types import NOTED, CheckError, InputError, Preprocessing

INTERPOLATION = {"nearest": InterpolationMode.NEAREST, "bilinear": InterpolationMode.BILINEAR}
INTERPOLATION["bicubic"] = InterpolationMode.BICUBIC
SAME = Preprocessing(resize=None)


def noise(height: int, width: int, *, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def save(path: Path, image: Image.Image | None = None, **options: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    (image or noise(8, 9)).save(path, **options)
    return path


def class_folders(root: Path, names: list[str], *, per_class: int = 2, size: int = 8) -> Path:
    for name in names:
        for i in range(per_class):
            save(root / name / f"{i}.png", noise(size, size, seed=i))
    return root


def numbered(count: int, *, size: int = 4) -> ArraySource:
    """Image i is filled with i and has the label i mod 3."""
    pixels = np.arange(count, dtype=np.uint8)[:, None, None, None].repeat(size, 1).repeat(size, 2).repeat(3, 3)
    return ArraySource("numbered", "test", ("a", "b", "c"), tuple(i % 3 for i in range(count)), pixels)


def pixel(image: Image.Image) -> tuple[int, ...]:
    return tuple(np.asarray(image)[0, 0].tolist())


# decoding


def test_every_format_decodes_to_rgb_from_files_and_streams(tmp_path: Path) -> None:
    for extension in ("jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm"):
        file = save(tmp_path / f"a.{extension}")
        image = decode(file)
        assert (image.mode, image.size) == ("RGB", (9, 8))
        assert decode(io.BytesIO(file.read_bytes())).tobytes() == decode(str(file)).tobytes() == image.tobytes()
    assert decode(tmp_path / "a.png").tobytes() == noise(8, 9).tobytes()


@pytest.mark.parametrize(
    ("mode", "color", "expected"),
    [
        ("L", 77, (77, 77, 77)),
        ("1", 1, (255, 255, 255)),
        ("LA", (0, 51), (204, 204, 204)),
        ("RGBA", (255, 0, 0, 0), (255, 255, 255)),
        ("RGBA", (255, 0, 0, 255), (255, 0, 0)),
        ("RGBA", (0, 0, 100, 102), (153, 153, 193)),
    ],
)
def test_grey_and_alpha_over_white(tmp_path: Path, mode: str, color: object, expected: tuple[int, ...]) -> None:
    assert pixel(decode(save(tmp_path / "a.png", Image.new(mode, (3, 2), color)))) == expected


def test_palettes_first_frames_cmyk_and_orientation(tmp_path: Path, notes: list[str]) -> None:
    image = Image.new("P", (2, 1))
    image.putpalette([10, 20, 30, 40, 50, 60])
    image.putpixel((1, 0), 1)
    plain = np.asarray(decode(save(tmp_path / "plain.png", image)))
    assert plain[0].tolist() == [[10, 20, 30], [40, 50, 60]]
    for name, transparency in (("one.png", 0), ("shares.png", bytes([0, 255])), ("one.gif", 0)):
        found = np.asarray(decode(save(tmp_path / name, image, transparency=transparency)))
        assert found[0].tolist() == [[255, 255, 255], [40, 50, 60]]
    frames = [Image.new("RGB", (4, 4), color) for color in ("red", "blue")]
    assert pixel(decode(save(tmp_path / "a.gif", frames[0], save_all=True, append_images=frames[1:]))) == (255, 0, 0)
    for name in ("a.jpg", "a.tif"):
        image = decode(save(tmp_path / name, Image.new("CMYK", (16, 16), (0, 128, 255, 51))))
        assert np.abs(np.subtract(pixel(image), (204, 102, 0))).max() <= 3
    exif = Image.Exif()
    exif[0x0112] = 1
    decode(save(tmp_path / "upright.jpg", noise(8, 20), exif=exif))
    assert not notes
    exif[0x0112] = 6
    assert decode(save(tmp_path / "turned.jpg", noise(8, 20), exif=exif)).size == (20, 8)
    assert decode(save(tmp_path / "again.jpg", noise(8, 20), exif=exif)).size == (20, 8)
    (said,) = notes
    several = {"format": "MPO", "save_all": True, "append_images": [noise(8, 20)]}  # as phones do, in a .jpg
    for name, options in (("phone.jpg", several), ("turned.webp", {}), ("turned.png", {})):
        NOTED.clear()
        assert decode(save(tmp_path / name, noise(8, 20), exif=exif, **options)).size == (20, 8)
        assert notes[-1].endswith(f", e.g. {tmp_path / name}")
    assert said.startswith("some images have an EXIF orientation, which is not applied")
    assert said.endswith(f", e.g. {tmp_path / 'turned.jpg'}"), "the first of them, once"
    tagged = (tmp_path / "turned.jpg").read_bytes()
    broken = tagged.replace(b"MM\0*", b"MM\0?").replace(b"II*\0", b"II?\0")
    assert broken != tagged
    assert decode(io.BytesIO(broken)).size == (20, 8)


GREY16 = np.array([[0, 127, 129, 257, 300, 32768, 65406, 65535]], dtype=np.uint16)
GREY8 = np.rint(GREY16 / 257).astype(np.uint8)


@pytest.mark.parametrize("kind", ["I;16 png", "I;16 tif", "I;16B tif", "I pgm", "I tif"])
def test_16_bit_grey_is_scaled_not_clipped(tmp_path: Path, kind: str) -> None:
    mode, extension = kind.split()
    file = tmp_path / f"a.{extension}"
    if extension == "pgm":
        file.write_bytes(b"P5 8 1 65535\n" + GREY16.astype(">u2").tobytes())
    elif mode == "I;16B":
        Image.frombytes("I;16B", (8, 1), GREY16.astype(">u2").tobytes()).save(file)
    else:
        Image.fromarray(GREY16 if mode == "I;16" else GREY16.astype(np.int32)).save(file)
    with Image.open(file) as stored:
        assert stored.mode == mode
    assert np.array_equal(np.asarray(decode(file)), GREY8[..., None].repeat(3, axis=2))


def test_a_transparent_grey_level_and_float_levels(tmp_path: Path) -> None:
    file = save(tmp_path / "a.png", Image.fromarray(GREY16), transparency=300)
    assert np.asarray(decode(file))[0, :, 0].tolist() == [255 if v == 300 else round(v / 257) for v in GREY16[0]]
    for levels, expected in (([0, 0.5, 1], [0, 128, 255]), ([0, 99.6, 255], [0, 100, 255])):
        file = save(tmp_path / "a.tif", Image.fromarray(np.array([levels], dtype=np.float32)))
        assert np.asarray(decode(file))[0, :, 0].tolist() == expected


@pytest.mark.parametrize(
    ("levels", "message"),
    [
        (np.array([[-1, 5]], dtype=np.int32), "levels from -1 to 5, expected 0 to 65535"),
        (np.array([[0, 70000]], dtype=np.int32), "levels from 0 to 70000, expected 0 to 65535"),
        (np.array([[0, 256]], dtype=np.float32), "levels from 0 to 256, expected 0 to 1 or 0 to 255"),
        (np.array([[0, np.nan]], dtype=np.float32), "levels from nan to nan"),
    ],
)
def test_grey_levels_out_of_range_are_refused(tmp_path: Path, levels: np.ndarray, message: str) -> None:
    with pytest.raises(BadImageError, match=message):
        decode(save(tmp_path / "a.tif", Image.fromarray(levels)))


def truncated(path: Path, **options: object) -> None:
    save(path, noise(64, 64), **options)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def png_header(path: Path, side: int) -> None:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0))
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"\0")))


BAD_FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty.jpg": (lambda p: p.touch(), "the file is empty"),
    "text.jpg": (lambda p: p.write_text("hello"), "not an image, or its header is damaged .known formats: JPEG"),
    "postscript.jpg": (lambda p: p.write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"), "not an image"),
    "cut.jpg": (truncated, "truncated"),
    "cut.png": (truncated, "truncated|broken"),
    "cut.webp": (truncated, "cannot use image"),
    "cut.bmp": (truncated, "truncated"),
    "cut.tif": (truncated, "cannot use image"),
    "missing.jpg": (lambda p: None, "No such file"),
    "folder.jpg": (lambda p: p.mkdir(), "it is a folder; give the image files in it"),
    "bomb.png": (lambda p: png_header(p, 60_000), f"more than the {MAX_PIXELS:,} pixels allowed"),
    "just too large.png": (lambda p: png_header(p, 13_350), f"more than the {MAX_PIXELS:,} pixels allowed"),
}


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("name", BAD_FILES)
def test_a_file_that_is_no_image_is_named(tmp_path: Path, name: str) -> None:
    make, message = BAD_FILES[name]
    make(tmp_path / name)
    with pytest.raises(BadImageError, match=message) as caught:
        decode(tmp_path / name)
    assert caught.value.path == str(tmp_path / name)
    assert name in str(caught.value)


def test_bad_image_error_is_one_printable_line_and_survives_pickling() -> None:
    error = BadImageError("a\n\udcff.jpg", "why")
    copy = pickle.loads(pickle.dumps(error))
    assert isinstance(error, CheckError)
    assert (copy.path, copy.reason, str(copy)) == (error.path, error.reason, str(error))
    assert "\n" not in str(error)
    assert str(error).encode()


# class folders


def listing(source: ImageSource) -> list[str]:
    return [source.path(i) for i in range(len(source))]


def test_folder_listing_is_sorted_by_class_then_path_however_it_was_made(tmp_path: Path) -> None:
    visible = ["B/1.png", "a/deep/er/y.JPeG", "a/z.png", "a b/x.png", "b/1.PNG", "b/2.png", "b/é.png"]
    hidden = ["a/._1.png", "a/.ipynb_checkpoints/1.png", ".git/1.png", "root.png"]
    sources = []
    for root, order in (("one", visible), ("two", visible[::-1])):
        for path in [*hidden, *order]:
            save(tmp_path / root / path)
        (tmp_path / root / "a" / "notes.txt").write_text("not listed")
        sources.append(open_dataset(str(tmp_path / root)))
    assert listing(sources[0]) == listing(sources[1]) == visible
    assert sources[0].listing_sha256() == sources[1].listing_sha256()
    assert sources[0].class_names == ("B", "a", "a b", "b")
    assert list(sources[0].labels) == [0, 1, 1, 2, 3, 3, 3]
    assert (sources[0].name, sources[0].split) == ("one", "all")
    assert "1.png" not in repr(sources[0]), "a notebook shows it, and there may be a million"


def test_links_that_loop_or_dangle_and_pipes(tmp_path: Path) -> None:
    root = class_folders(tmp_path / "root", ["a", "b"], per_class=1)
    (root / "a" / "self").symlink_to(root / "a")
    (root / "a" / "up").symlink_to(root)
    (root / "a" / "further up").symlink_to(tmp_path)
    (root / "loop").symlink_to(root)
    (root / "b" / "x.png").symlink_to("x.png")
    (root / "b" / "gone.png").symlink_to("nowhere.png")
    os.mkfifo(root / "b" / "pipe.png")
    (root / "c").symlink_to(root / "a")
    source = open_dataset(str(root))
    assert listing(source) == ["a/0.png", "b/0.png", "b/gone.png", "b/x.png", "c/0.png"]
    with pytest.raises(BadImageError, match="No such file"):
        source.load(2)
    with pytest.raises(BadImageError, match="symbolic links"):
        source.load(3)
    assert len(source.listing_sha256()) == 64


def test_odd_names_survive(tmp_path: Path) -> None:
    save(tmp_path / "a" / "1.png")
    odd = os.fsdecode(b"a/line\nbreak \xff\xfe.png")
    os.rename(tmp_path / "a" / "1.png", tmp_path / odd)  # noqa: PTH104
    save(tmp_path / "a" / "zürich 日本.png")
    source = open_dataset(str(tmp_path))
    assert [source.path(i) for i in range(2)] == [odd, "a/zürich 日本.png"]
    assert source.load(0).size == (9, 8)
    assert len(source.listing_sha256()) == 64
    (tmp_path / odd).write_bytes(b"")
    with pytest.raises(BadImageError, match=r"line\\nbreak \\udcff\\udcfe.png.*empty"):
        source.load(0)


def test_listing_digest_sees_paths_labels_and_sizes(tmp_path: Path) -> None:
    def digest(**changes: object) -> str:
        fields = {"root": tmp_path, "name": "n", "split": "s", "class_names": ("a", "b"), "labels": (0, 1)}
        fields |= {"paths": ("a/0.png", "b/0.png"), "low_resolution": True}
        return FolderSource(**(fields | changes)).listing_sha256()  # type: ignore[arg-type]

    class_folders(tmp_path, ["a", "b"])
    first = digest()
    assert digest(name="other") == first
    assert len({first, digest(labels=(1, 0)), digest(paths=("a/0.png", "b/1.png"))}) == 3
    (tmp_path / "a" / "0.png").write_bytes(b"short")
    assert digest() != first


def test_native_sizes_come_from_headers(tmp_path: Path) -> None:
    save(tmp_path / "a" / "1.png", noise(5, 7))
    save(tmp_path / "a" / "2.jpg", noise(70, 60))
    (tmp_path / "a" / "3.jpg").write_bytes((tmp_path / "a" / "2.jpg").read_bytes()[:700])
    (tmp_path / "a" / "4.png").touch()
    assert open_dataset(str(tmp_path)).native_sizes() == {(5, 7): "a/1.png", (70, 60): "a/2.jpg"}


@pytest.mark.parametrize(("size", "expected"), [((63, 63), True), ((64, 20), False), ((20, 64), False)])
def test_most_readable_images_decide_whether_a_data_set_has_low_resolution(
    tmp_path: Path, size: tuple[int, int], expected: bool, notes: list[str]
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "0.png").touch()
    for number in (2, 3, 4):
        save(tmp_path / "a" / f"{number}.png", noise(*size))
    assert open_dataset(str(tmp_path)).low_resolution is expected
    assert not notes
    odd = noise(9, 7) if not expected else noise(80, 80)
    save(tmp_path / "a" / "1.png", odd)
    assert open_dataset(str(tmp_path)).low_resolution is expected  # one odd image, though it comes first
    assert ["has images below 64 pixels and larger ones" in said for said in notes] == [True]
    same = noise(*size)
    assert as_source([(odd, 0), (same, 0), (same, 0)]).low_resolution is expected


def test_folders_without_classes_or_images(tmp_path: Path) -> None:
    save(tmp_path / "lonely.png")
    with pytest.raises(InputError, match=r"no class folders in .*expected one sub-folder per class"):
        open_dataset(str(tmp_path))
    class_folders(tmp_path, ["cat"])
    (tmp_path / "dog").mkdir()
    with pytest.raises(InputError, match=r"class folder '.*dog' holds no images .*remove the folder"):
        open_dataset(str(tmp_path))


def test_images_of_formats_that_are_not_read_are_noted(tmp_path: Path, notes: list[str]) -> None:
    class_folders(tmp_path, ["cat", "dog"])
    for name in ("cat/1.HEIC", "dog/2.avif", "dog/notes.txt"):
        (tmp_path / name).write_bytes(b"")
    said = "images of unknown formats are left out (2); convert them, e.g. "
    open_dataset(tmp_path)
    assert notes == [f"{tmp_path.name}: {said}cat/1.HEIC"]
    image_files(tmp_path)
    assert notes[1].startswith(f"{tmp_path}: {said}")


def test_a_folder_of_images_is_listed_as_class_folders_are(tmp_path: Path) -> None:
    """Hidden copies, as macOS leaves them, are not read; links are followed, and a loop of them ends."""
    root = tmp_path / "root"
    save(root / "cat" / "a.png")
    for hidden in ("._a.png", ".thumbnails/t.png"):
        save(root / "cat" / hidden)
    save(tmp_path / "elsewhere" / "b.png")
    (root / "cat" / "link").symlink_to(tmp_path / "elsewhere")
    (root / "cat" / "loop").symlink_to(root / "cat")
    listed = [root / path for path in open_dataset(str(root)).paths]
    assert image_files(root) == listed == [root / "cat" / "a.png", root / "cat" / "link" / "b.png"]
    assert image_files(root / "cat") == listed


def test_a_folder_that_cannot_be_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(folder: Path) -> None:
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr(os, "scandir", refuse)  # root may list anything, so the real refusal cannot be provoked
    with pytest.raises(InputError, match=r"cannot list the folder .*Permission denied"):
        open_dataset(str(tmp_path))


def test_folders_with_splits(tmp_path: Path) -> None:
    root = tmp_path / "birds"
    class_folders(root / "train", ["a", "b"], per_class=3)
    with pytest.raises(InputError, match="no split 'test'; choose one of: train"):
        open_dataset(str(root))
    with pytest.raises(InputError, match="no split 'val': it holds class folders itself; leave the split out"):
        open_dataset(str(root / "train"), split="val")
    class_folders(root / "test", ["a", "b"])
    splits = ("train", "val", "test", None)
    assert [open_dataset(str(root), split=s).split for s in splits] == ["train", "test", "test", "test"]
    for name in ("valid", "validation", "val"):  # what there is of these chooses, and `test` is tested
        class_folders(root / name, ["a", "b"])
        assert [open_dataset(str(root), split=s).split for s in splits] == ["train", name, "test", "test"]
    with pytest.raises(InputError, match="no split 'extra'; choose one of: train, val, validation, valid, test"):
        open_dataset(str(root), split="extra")
    with pytest.raises(InputError, match=r"holds data sets, not classes; choose one, e\.g\. .*birds"):
        open_dataset(str(tmp_path))


def test_a_class_may_be_called_test(tmp_path: Path) -> None:
    assert open_dataset(str(class_folders(tmp_path, ["test", "text"]))).class_names == ("test", "text")


# named sets


def test_unknown_names_suggest_the_nearest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine" / "Photos").mkdir(parents=True)
    (tmp_path / "fashion").mkdir()
    (tmp_path / "other.txt").touch()
    for name, nearest in (
        ("imagnet", "imagenet"),
        ("CIFAR10", "cifar10"),
        ("svnh", "svhn"),
        ("mine/photo", "mine/Photos"),
        ("mines", "mine"),
        ("fashion-min", "fashion-mini"),
    ):
        message = f"unknown dataset '{name}': no folder of class folders.*did you mean '{nearest}'"
        with pytest.raises(InputError, match=message):
            open_dataset(name)
    with pytest.raises(InputError, match=r"no folder of class folders, and none of imagenet, .* fashion-mini$"):
        open_dataset("other.text")
    assert DATASETS == ("imagenet", "imagenette", "cifar10", "cifar100", "svhn", "fashion-mini")


@pytest.mark.parametrize(
    ("name", "folder", "classes", "low_resolution"),
    [
        ("imagenet", "val", 1000, False),
        ("imagenet", "ILSVRC2012_img_val", 1000, False),
        ("imagenette", "imagenette/val", 10, False),
        ("imagenette", "imagenette2/val", 10, False),
        ("imagenette", "imagenette2-320/test", 10, False),
        ("imagenette", "imagenette2-160/val", 10, False),
        ("cifar10", "cifar10/test", 10, True),
        ("cifar10", "cifar10/val", 10, True),
        ("cifar100", "cifar100/test", 100, True),
        ("svhn", "svhn/test", 10, True),
    ],
)
def test_named_sets_as_class_folders(
    tmp_path: Path, name: str, folder: str, classes: int, low_resolution: bool
) -> None:
    class_folders(tmp_path / folder, [f"class{i:03d}" for i in range(classes)], per_class=1)
    source = open_dataset(name, data_dir=tmp_path)
    assert (source.name, source.split, len(source)) == (name, re.split("[/_]", folder)[-1], classes)
    assert source.low_resolution is low_resolution


def test_every_place_is_searched_and_every_class_needed(tmp_path: Path) -> None:
    names = [f"n{i}" for i in range(10)]
    class_folders(tmp_path / "imagenette2" / "train", names)
    class_folders(tmp_path / "imagenette2-160" / "val", names, per_class=1)
    assert len(open_dataset("imagenette", data_dir=tmp_path)) == 10
    with pytest.raises(InputError, match=r"imagenette in .* has no split 'dev'; choose one of: train, val"):
        open_dataset("imagenette", data_dir=tmp_path, split="dev")
    class_folders(tmp_path / "imagenet" / "val", ["n01440764"])
    message = r"imagenet has 1000 classes, but .* has 1 class folders; complete it, or give"
    with pytest.raises(InputError, match=message):  # with a folder missing, every later label would be wrong
        open_dataset("imagenet", data_dir=tmp_path)


@pytest.mark.parametrize(
    ("name", "places"),
    [
        ("imagenet", "imagenet/val, .*data_dir, or download it by hand"),
        ("imagenette", "imagenette2/val, imagenette2-320/val, .*data_dir, or pass download=True"),
        ("cifar10", "cifar-10-batches-py, cifar10/test; .*data_dir, or pass download=True"),
        ("cifar100", "cifar-100-python, cifar100/test; "),
        ("svhn", "test_32x32.mat, svhn/test; "),
    ],
)
def test_missing_data_says_where_it_was_looked_for(tmp_path: Path, name: str, places: str) -> None:
    with pytest.raises(InputError, match=f"no {name} images in .*looked there for {places}"):
        open_dataset(name, data_dir=tmp_path)
    if name == "imagenet":
        with pytest.raises(InputError, match="data_dir, or download it by hand"):
            open_dataset("imagenet", data_dir=tmp_path, download=True)


@pytest.mark.parametrize("name", ["imagenette", "cifar10", "svhn"])
def test_download_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for variable in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(variable, "http://127.0.0.1:9")  # nothing listens there
    for variable in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(InputError, match=f"{name} in .* could not be downloaded .*; check the network") as caught:
        open_dataset(name, data_dir=tmp_path, download=True)
    assert "\n" not in str(caught.value)


def write_cifar(root: Path, name: str) -> np.ndarray:
    """The published layout with two images a file; returns the test images (n h w 3)."""
    rows = np.random.default_rng(3).integers(0, 256, (2, 3072), dtype=np.uint8)
    label_key, parts = ("fine_labels", ["train"]) if name == "cifar100" else ("labels", [])
    folder = root / ("cifar-100-python" if name == "cifar100" else "cifar-10-batches-py")
    folder.mkdir(parents=True)
    parts = parts or [f"data_batch_{i}" for i in range(1, 6)]
    for part in [*parts, "test" if name == "cifar100" else "test_batch"]:
        (folder / part).write_bytes(pickle.dumps({"data": rows, label_key: [1, 0]}))
    meta, key = ("meta", "fine_label_names") if name == "cifar100" else ("batches.meta", "label_names")
    (folder / meta).write_bytes(pickle.dumps({key: ["ant", "bee"]}))
    return rows.reshape(2, 3, 32, 32).transpose(0, 2, 3, 1)


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
@pytest.mark.parametrize("below", ["", "cifar10"])
def test_cifar_as_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, below: str) -> None:
    below = below and name
    expected = write_cifar(tmp_path / below, name)
    with pytest.raises(InputError, match=f"{name} in .* is incomplete or damaged, its md5 sums .* download=True"):
        open_dataset(name, data_dir=tmp_path)
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *_: True)
    source = open_dataset(name, data_dir=tmp_path)
    assert (source.class_names, list(source.labels), source.split) == (("ant", "bee"), [1, 0], "test")
    assert np.array_equal(np.asarray(source.load(1)), expected[1])
    assert (source.path(1), list(source.native_sizes()), source.low_resolution) == ("test/00001", [(32, 32)], True)
    assert len(open_dataset(name, data_dir=tmp_path, split="train")) == (2 if name == "cifar100" else 10)
    with pytest.raises(InputError, match=f"{name} has no split 'extra'; choose one of: train, test"):
        open_dataset(name, data_dir=tmp_path, split="extra")


def test_svhn_as_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from scipy.io import savemat

    images = np.random.default_rng(4).integers(0, 256, (3, 32, 32, 3), dtype=np.uint8)
    savemat(tmp_path / "test_32x32.mat", {"X": images.transpose(1, 2, 3, 0), "y": np.array([[10], [1], [9]])})
    with pytest.raises(InputError, match=r"test_32x32.mat' is incomplete or damaged"):
        open_dataset("svhn", data_dir=tmp_path)
    with pytest.raises(InputError, match=r"train_32x32.mat' is incomplete or damaged"):
        open_dataset("svhn", data_dir=tmp_path, split="train")
    monkeypatch.setattr("torchvision.datasets.svhn.check_integrity", lambda *_: True)
    source = open_dataset("svhn", data_dir=tmp_path, split="val")
    assert (source.class_names, list(source.labels)) == (tuple("0123456789"), [0, 1, 9])
    assert np.array_equal(np.asarray(source.load(2)), images[2])


@pytest.mark.parametrize(
    ("split", "count", "digest"),
    [
        ("train", 5000, "cba021055d5e8132a2126caccbc048782c0f2188c05ee11fef0d6bcfdbc592cc"),
        ("test", 1000, "82069bda039e0540611aa5e710cc7989140d647cda1ba9c6d192617f00b9524f"),
        (None, 1000, "82069bda039e0540611aa5e710cc7989140d647cda1ba9c6d192617f00b9524f"),
    ],
)
def test_fashion_mini(split: str | None, count: int, digest: str) -> None:
    source = open_dataset("fashion-mini", split=split)
    assert (len(source), list(source.native_sizes()), source.low_resolution) == (count, [(28, 28)], True)
    assert np.bincount(source.labels).tolist() == [count // 10] * 10
    assert set(source.labels[:200]) == set(range(10))
    assert (source.class_names[0], source.class_names[9]) == ("T-shirt/top", "Ankle boot")
    assert source.load(0).mode == "RGB"
    assert source.listing_sha256() == digest


def test_digests_of_arrays_and_splits_of_fashion_mini() -> None:
    first = numbered(3)
    labels = ArraySource(first.name, first.split, first.class_names, (0, 1, 1), first.pixels)
    pixels = ArraySource(first.name, first.split, first.class_names, first.labels, first.pixels + 1)
    assert len({source.listing_sha256() for source in (first, labels, pixels)}) == 3
    assert open_dataset("fashion-mini", split="val").split == "test"
    with pytest.raises(InputError, match="fashion-mini has no split 'dev'; choose one of: train, test"):
        open_dataset("fashion-mini", split="dev")


# any sequence of (image, label)


class Items:
    """Labels 0, 1, 2, 0, …; counts how often each item is read."""

    def __init__(self, images: list[object]) -> None:
        self.images, self.read = images, Counter[int]()

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[object, int]:
        self.read[index] += 1
        image = self.images[index]
        if isinstance(image, Exception):
            raise image
        return image, index % 3


def test_pictures_in_a_sequence_are_read_once_and_become_rgb() -> None:
    grey, alpha = Image.new("L", (9, 8), 77), Image.new("RGBA", (9, 8), (255, 0, 0, 0))
    items = Items([noise(8, 9), grey, alpha, OSError(5, "gone"), Image.fromarray(np.full((8, 9), np.nan, np.float32))])
    source = as_source(items)
    assert isinstance(source, ImageSource)
    assert (source.name, source.split, source.class_names, source.low_resolution) == ("images", "all", (), True)
    items.read.clear()
    (batch,) = iterate_batches(source, SAME, range(5), batch_size=5, skip_bad=True)
    assert items.read == dict.fromkeys(range(5), 1)
    assert torch.equal(batch.images[0], torch.from_numpy(np.array(noise(8, 9))).permute(2, 0, 1))
    assert [batch.images[i, :, 0, 0].tolist() for i in (1, 2)] == [[77] * 3, [255] * 3]
    assert (batch.indices, batch.labels.tolist()) == ([0, 1, 2], [0, 1, 2])
    assert [(bad.index, bad.path, bad.reason[:12]) for bad in batch.bad] == [
        (3, "00003", "gone"),
        (4, "00004", "grey levels "),
    ]
    assert list(source.labels) == [0, 1, 2, -1, 1]
    assert source.labels[1:3] == [1, 2]
    assert source.native_sizes() == {(8, 9): "00000"}
    with pytest.raises(
        BadImageError, match="cannot use image '00003': gone; repair or remove it, or pass skip_bad=True"
    ):
        list(iterate_batches(source, SAME, range(5), batch_size=5))
    assert not as_source([(noise(64, 20), 0)]).low_resolution


def test_what_pillow_raises_makes_a_bad_image_and_what_a_data_set_raises_does_not(tmp_path: Path) -> None:
    content = io.BytesIO()
    noise(8, 9).save(content, "png")
    damaged = bytearray(content.getvalue())
    damaged[40] ^= 255
    (tmp_path / "a.png").write_bytes(damaged)

    class Opened(Items):
        def __getitem__(self, index: int) -> tuple[object, int]:
            image, label = super().__getitem__(index)
            return (Image.open(image).convert("RGB") if isinstance(image, Path) else image), label

    for bad in (tmp_path / "a.png", Image.DecompressionBombError("big"), BadImageError("there", "gone")):
        (batch,) = iterate_batches(as_source(Opened([noise(8, 9), bad])), SAME, range(2), batch_size=2, skip_bad=True)
        assert ([one.index for one in batch.bad], batch.indices) == ([1], [0])
    for bug in (KeyError("x"), RuntimeError("x"), ValueError("x"), IndexError("x")):
        with pytest.raises(
            CheckError, match=r"fails at item 0: \w+Error: '?x'? \(.*test_data.py:\d+, in __getitem__\)"
        ):
            as_source(Opened([bug, noise(8, 9)]))


def test_float_tensors_reach_the_batch_as_they_are() -> None:
    tensors = torch.rand(3, 1, 6, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    source = as_source([(image, np.int64(label)) for label, image in enumerate(tensors)])
    (batch,) = iterate_batches(source, default_preprocessing(True, (6, 5)), [2, 0], batch_size=2)
    assert torch.equal(batch.images, tensors[[2, 0]].float())
    assert (batch.labels.tolist(), source.native_sizes()) == ([2, 0], {(6, 5): "00000"})
    with pytest.raises(InputError, match=r"float tensors must have the input size \(7, 5\), not \(6, 5\)"):
        list(iterate_batches(source, default_preprocessing(True, (7, 5)), [0], batch_size=1))
    mixed = as_source([(tensors[0], 0), (noise(6, 5), 1), (tensors[0, :, 1:], 2)])
    for pair, words in (
        ([0, 1], r"PIL images \(bytes\) and tensors .* give all PIL images or all tensors"),
        ([0, 2], "different sizes cannot share a batch.*give the prep"),
    ):
        with pytest.raises(InputError, match=words):
            list(iterate_batches(mixed, SAME, pair, batch_size=2))
        assert [len(batch.images) for batch in iterate_batches(mixed, SAME, pair, batch_size=1)] == [1, 1]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (7, r"int is no data set: expected a sequence of \(image, label\)"),
        ("photos", r"str is no data set: .*open_dataset"),
        ([], "there are no images; expected"),
        ([("cat.png", 0)], r"item 0 is \(str; int\)"),
        ([(noise(2, 2), 0.5)], "the label of item 0 must be an integer, not 0.5"),
    ],
)
def test_other_data_than_a_sequence_of_images_is_refused(data: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        as_source(data)


def test_the_digest_of_a_sequence_sees_pixels_labels_and_order() -> None:
    pairs = [(noise(4, 4, seed=i), i) for i in range(3)]
    sources = [pairs, pairs[::-1], [*pairs[:2], (pairs[2][0], 1)], [*pairs[:2], (noise(4, 4, seed=9), 2)], pairs[:2]]
    digests = [SequenceSource(items).listing_sha256() for items in sources]
    assert len(set(digests)) == 5
    assert SequenceSource(pairs).listing_sha256([0, 1]) == digests[4]
    items = Items([image for image, _ in pairs])
    source = as_source(items)
    items.read.clear()
    assert source.listing_sha256([1]) != source.listing_sha256([2])
    assert items.read == {1: 1, 2: 1}
    assert as_source(source) is source
    assert numbered(3).listing_sha256([0]) == numbered(3).listing_sha256()


# preprocessing


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("size", [(50, 61), (61, 50), (20, 31), (32, 32)])
@pytest.mark.parametrize("resize", [32, (40, 33), None])
def test_preprocess_equals_torchvision_on_pillow(
    size: tuple[int, int], resize: int | tuple[int, int] | None, interpolation: str
) -> None:
    image = noise(*size)
    resized = image if resize is None else tv.resize(image, resize, interpolation=INTERPOLATION[interpolation])
    crop = (min(27, resized.height), min(32, resized.width))
    expected = tv.pil_to_tensor(tv.center_crop(resized, list(crop)))
    assert torch.equal(preprocess(image, Preprocessing(resize, crop, interpolation)), expected)  # type: ignore[arg-type]


@pytest.mark.parametrize(("native", "resized"), [((20, 31), (40, 33)), ((32, 32), (224, 224)), ((50, 33), (11, 40))])
def test_nearest_copies_the_pixel_under_the_centre(native: tuple[int, int], resized: tuple[int, int]) -> None:
    image = noise(*native)
    found = preprocess(image, Preprocessing(resized, None, "nearest"))
    rows, columns = (
        [reference.nearest_source(x, n, r) for x in range(r)] for n, r in zip(native, resized, strict=True)
    )
    assert np.array_equal(found.permute(1, 2, 0).numpy(), np.asarray(image)[rows][:, columns])


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize(("native", "resized"), [((20, 31), (40, 33)), ((50, 33), (11, 40)), ((32, 32), (7, 9))])
def test_preprocess_without_antialias(native: tuple[int, int], resized: tuple[int, int], interpolation: str) -> None:
    image = noise(*native)
    tables = (reference.resize_weights(n, r, interpolation) for n, r in zip(native, resized, strict=True))
    rows, columns = (np.array(table, dtype=float) for table in tables)
    exact = np.einsum("yi,xj,ijc->cyx", rows, columns, np.asarray(image, dtype=np.float64)).clip(0, 255)
    found = preprocess(image, Preprocessing(resized, None, interpolation, antialias=False))  # type: ignore[arg-type]
    assert np.abs(found.numpy() - exact).max() <= 0.501
    assert not torch.equal(found, preprocess(image, Preprocessing(resized, None, interpolation)))  # type: ignore[arg-type]


def test_nearest_ignores_antialias_and_equal_sizes_change_nothing() -> None:
    image = noise(30, 41)
    one, two = (preprocess(image, Preprocessing((17, 20), None, "nearest", antialias=a)) for a in (True, False))
    assert torch.equal(one, two)
    for antialias in (True, False):
        same = preprocess(image, Preprocessing((30, 41), None, "bicubic", antialias=antialias))
        assert np.array_equal(same.permute(1, 2, 0).numpy(), np.asarray(image))


SIDES = st.integers(1, 40)


@settings(max_examples=200, deadline=None)
@given(
    st.tuples(SIDES, SIDES),
    st.tuples(SIDES, SIDES),
    st.sampled_from(["nearest", "bilinear", "bicubic"]),
    st.booleans(),
    st.data(),
)
def test_a_native_patch_changes_nothing_outside_its_footprint(
    native: tuple[int, int], resized: tuple[int, int], interpolation: str, antialias: bool, data: st.DataObject
) -> None:
    height, width = (data.draw(st.integers(1, n)) for n in native)
    top, left = data.draw(st.integers(0, native[0] - height)), data.draw(st.integers(0, native[1] - width))
    preprocessing = Preprocessing(resized, None, interpolation, antialias)  # type: ignore[arg-type]
    clean = np.asarray(noise(*native, seed=data.draw(st.integers(0, 9))))
    patched = clean.copy()
    patched[top : top + height, left : left + width] = 255 * (clean[top : top + height, left : left + width] < 128)
    changed = preprocess(Image.fromarray(clean), preprocessing) != preprocess(Image.fromarray(patched), preprocessing)
    footprint = native_footprint(Rect(top, left, height, width), native, preprocessing)
    if footprint is not None:
        changed[:, footprint.top : footprint.bottom, footprint.left : footprint.right] = False
    assert not changed.any()


def test_slivers_are_refused_before_they_are_enlarged() -> None:
    with pytest.raises(InputError, match=f"256×15360000, more than {MAX_PIXELS:,} pixels; crop it first"):
        preprocess(noise(1, 60_000), Preprocessing(256, (224, 224)))


@pytest.mark.parametrize(
    ("low", "size", "crop_pct", "expected"),
    [
        (False, (224, 224), 0.875, Preprocessing(256, (224, 224))),
        (False, (224, 224), 0.9, Preprocessing(248, (224, 224))),
        (False, (240, 224), 1.0, Preprocessing((240, 224), (240, 224), cover=True)),
        (True, (224, 224), 0.875, Preprocessing((224, 224), None)),
    ],
)
def test_default_preprocessing(low: bool, size: tuple[int, int], crop_pct: float, expected: Preprocessing) -> None:
    assert default_preprocessing(low, size, crop_pct=crop_pct) == expected
    assert default_preprocessing(low, size, interpolation="bilinear").interpolation == "bilinear"


@pytest.mark.parametrize("shape", [(300, 300), (300, 500), (500, 300), (30, 40), (97, 1), (300, 401)])
@pytest.mark.parametrize("size", [(64, 96), (96, 64)])
def test_an_oblong_input_shows_as_much_of_any_image_as_timm_shows(
    shape: tuple[int, int], size: tuple[int, int]
) -> None:
    pixels = Image.fromarray(np.zeros((*shape, 3), np.uint8))
    preprocessing = default_preprocessing(False, size)
    assert preprocess(pixels, preprocessing).shape == (3, *size)
    margin = tuple(int(side / 0.875) for side in size)
    found = placement(preprocessing, shape).resized
    theirs = ResizeKeepRatio(margin)(pixels)  # it rounds the side that is not met exactly, and we cut it off
    assert all(0 <= a - b <= 1 for a, b in zip((theirs.height, theirs.width), found, strict=True))
    assert any(a == b for a, b in zip(margin, found, strict=True))
    assert all(a >= b for a, b in zip(found, margin, strict=True))


def test_fashion_mini_keeps_its_pixels_at_28() -> None:
    source = open_dataset("fashion-mini")
    image = preprocess(source.load(3), default_preprocessing(source.low_resolution, (28, 28)))
    assert isinstance(source, ArraySource)
    assert np.array_equal(image.numpy(), source.pixels[3][None].repeat(3, axis=0))


# batches


@given(st.integers(1, 300), st.none() | st.integers(1, 400))
@settings(deadline=None)
def test_spread_indices(count: int, limit: int | None) -> None:
    source = numbered(count, size=1)
    indices = spread_indices(source, limit)
    wanted = count if limit is None else min(count, limit)
    assert len(indices) == wanted
    assert indices == sorted(set(indices))
    assert set(indices) <= set(range(count))
    gaps = np.diff([*indices, count])
    assert indices[0] == 0
    assert gaps.max() - gaps.min() <= 1


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 29), max_size=25), st.integers(1, 9), st.integers(1, 4))
def test_batches_equal_loading_one_by_one(indices: list[int], batch_size: int, workers: int) -> None:
    source, preprocessing = numbered(30), Preprocessing((6, 5), (5, 3))
    batches = list(iterate_batches(source, preprocessing, indices, batch_size=batch_size, workers=workers))
    assert [b.indices for b in batches] == [indices[i : i + batch_size] for i in range(0, len(indices), batch_size)]
    for batch in batches:
        expected = [preprocess(source.load(i), preprocessing) for i in batch.indices]
        assert torch.equal(batch.images, torch.stack(expected))
        assert batch.labels.tolist() == [source.labels[i] for i in batch.indices]
        assert (batch.images.dtype, batch.labels.dtype, batch.bad) == (torch.uint8, torch.int64, [])


def test_bad_images_are_raised_when_their_batch_is_reached(tmp_path: Path) -> None:
    class_folders(tmp_path, ["a"], per_class=6)
    (tmp_path / "a" / "4.png").write_text("no image")
    source = open_dataset(str(tmp_path))
    batches = iterate_batches(source, SAME, range(6), batch_size=2)
    assert [next(batches).indices, next(batches).indices] == [[0, 1], [2, 3]]
    with pytest.raises(BadImageError, match=r"a/4\.png"):
        next(batches)
    assert decode_threads() == 0


def test_bad_images_can_be_skipped_and_are_listed(tmp_path: Path) -> None:
    class_folders(tmp_path, ["a", "b"], per_class=3)
    source = open_dataset(str(tmp_path))
    (tmp_path / "a" / "1.png").write_text("no image")
    (tmp_path / "b" / "0.png").unlink()
    batches = list(iterate_batches(source, SAME, range(6), batch_size=4, skip_bad=True))
    assert [(b.indices, b.labels.tolist(), len(b.images)) for b in batches] == [
        ([0, 2], [0, 0], 2),
        ([4, 5], [1, 1], 2),
    ]
    assert [(bad.index, bad.path) for bad in batches[0].bad] == [(1, "a/1.png"), (3, "b/0.png")]
    assert batches[0].bad[1] == BadImage(3, "b/0.png", "No such file or directory")


@pytest.mark.parametrize(
    ("preprocessing", "size"),
    [(Preprocessing(40, (32, 24)), (32, 24)), (Preprocessing((16, 12)), (16, 12)), (Preprocessing(16), (0, 0))],
)
def test_a_batch_of_bad_images_is_empty(tmp_path: Path, preprocessing: Preprocessing, size: tuple[int, int]) -> None:
    source = open_dataset(str(class_folders(tmp_path, ["a"])))
    for file in (tmp_path / "a").iterdir():
        file.unlink()
    (batch,) = iterate_batches(source, preprocessing, [0, 1], batch_size=2, skip_bad=True)
    assert (batch.images.shape, batch.labels.shape, batch.indices, len(batch.bad)) == ((0, 3, *size), (0,), [], 2)


def test_an_image_smaller_than_the_crop_is_named(tmp_path: Path) -> None:
    class_folders(tmp_path, ["a"], per_class=1, size=16)
    save(tmp_path / "a" / "small.png", noise(16, 7))
    source = open_dataset(str(tmp_path))
    with pytest.raises(BadImageError, match=r"a/small\.png'.*crop .* is larger"):
        list(iterate_batches(source, Preprocessing(None, (8, 8)), [0, 1], batch_size=2))
    (batch,) = iterate_batches(source, Preprocessing(None, (8, 8)), [0, 1], batch_size=2, skip_bad=True)
    assert (batch.indices, batch.bad[0].index) == ([0], 1)


def test_batches_check_their_arguments_before_they_start() -> None:
    for name in ("batch_size", "workers"):
        with pytest.raises(InputError, match=f"{name} must be at least 1, not 0"):
            iterate_batches(numbered(2), SAME, [0], **{"batch_size": 1, name: 0})
    with pytest.raises(
        InputError, match="limit, the number of images, must be a whole number of at least 1, not 0; leave it out"
    ):
        spread_indices(numbered(3), 0)


def decode_threads() -> int:
    return sum(thread.name.startswith("patchproof-decode") for thread in threading.enumerate())


@dataclass(frozen=True, eq=False)
class Counting(ArraySource):
    loaded: list[int] = field(default_factory=list)

    def load(self, index: int) -> Image.Image:
        self.loaded.append(index)
        return super().load(index)


def test_reading_ahead_is_bounded_and_ends_with_the_iterator() -> None:
    plain = numbered(100)
    source = Counting(plain.name, plain.split, plain.class_names, plain.labels, plain.pixels)
    batches = iterate_batches(source, SAME, range(100), batch_size=5, workers=3)
    assert decode_threads() == 0
    next(batches)
    assert decode_threads() > 0
    batches.close()  # type: ignore[attr-defined]
    assert decode_threads() == 0
    assert len(source.loaded) <= 15


# the script that made the embedded slice


def write_idx(folder: Path) -> None:
    """Image i of a split is filled with i; the labels run 2, 1, 0, 2, 1, 0, …"""
    for prefix, count in (("train", 12), ("t10k", 9)):
        labels = bytes(2 - i % 3 for i in range(count))
        images = b"".join(bytes([i]) * 6 for i in range(count))
        label_file = b"\0\0\x08\x01" + struct.pack(">I", count) + labels
        image_file = b"\0\0\x08\x03" + struct.pack(">III", count, 2, 3) + images
        (folder / f"{prefix}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(label_file))
        (folder / f"{prefix}-images-idx3-ubyte.gz").write_bytes(gzip.compress(image_file))


def test_script_takes_the_first_of_each_class_and_is_deterministic(tmp_path: Path) -> None:
    path = Path(__file__).parents[1] / "scripts" / "make_fashion_mini.py"
    script = SimpleNamespace(**runpy.run_path(str(path)))
    write_idx(tmp_path)
    first, again = (script.npz_bytes(script.chosen_arrays(tmp_path, {"train": 2, "test": 1})) for _ in range(2))
    assert first == again
    arrays = np.load(io.BytesIO(first), allow_pickle=False)
    assert arrays["train_labels"].tolist() == [2, 1, 0, 2, 1, 0]
    assert arrays["train_images"][:, 1, 2].tolist() == [0, 1, 2, 3, 4, 5]
    assert arrays["train_images"].shape == (6, 2, 3)
    assert arrays["test_labels"].tolist() == [2, 1, 0]
    with pytest.raises(SystemExit, match=r"train-images-idx3-ubyte.gz in .* is not Fashion-MNIST's: md5"):
        script.check_md5(tmp_path)


def test_kept_images_are_decoded_once(tmp_path, monkeypatch):
    """In another order and other batches too; a bad image stays bad."""
    class_folders(tmp_path, ["a", "b"], per_class=5)
    source, how, kept = open_dataset(str(tmp_path)), Preprocessing((8, 8)), Decoded()
    (tmp_path / "a" / "1.png").write_text("no image")

    def batches(order: list[int], size: int, store: Decoded | None) -> list[Batch]:
        return list(iterate_batches(source, how, order, batch_size=size, skip_bad=True, kept=store))

    other = [7, 1, 0, 9, 2, 8, 3, 6, 5, 4]
    fresh = batches(list(range(10)), 4, None) + batches(other, 3, None)
    first = batches(list(range(10)), 4, kept)
    decoded = []
    load = FolderSource.load
    monkeypatch.setattr(FolderSource, "load", lambda self, index: decoded.append(index) or load(self, index))
    for expected, found in zip(fresh, first + batches(other, 3, kept), strict=True):
        assert (found.indices, found.bad) == (expected.indices, expected.bad)
        assert torch.equal(found.images, expected.images)
        assert torch.equal(found.labels, expected.labels)
        assert found.images.is_contiguous(memory_format=torch.channels_last)
    assert decoded == [1]
