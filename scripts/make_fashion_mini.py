"""Rebuild src/patchproof/embedded/fashion_mini.npz from the four idx .gz files of Fashion-MNIST.

    python scripts/make_fashion_mini.py FOLDER

FOLDER holds train-images-idx3-ubyte.gz and the other three, from https://github.com/zalandoresearch/fashion-mnist or
from Debian's package dataset-fashion-mnist (its gzip headers differ, the files inside are the same).
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import zipfile
from pathlib import Path

import numpy as np

OUTPUT = Path(__file__).resolve().parents[1] / "src" / "patchproof" / "embedded" / "fashion_mini.npz"
PREFIXES = {"train": "train", "test": "t10k"}
PER_CLASS = {"train": 500, "test": 100}
MD5_UNZIPPED = {
    "train-images-idx3-ubyte": "f4a8712d7a061bf5bd6d2ca38dc4d50a",
    "train-labels-idx1-ubyte": "9018921c3c673c538a1fc5bad174d6f9",
    "t10k-images-idx3-ubyte": "8181f5470baa50b63fa0f6fddb340f0a",
    "t10k-labels-idx1-ubyte": "15d484375f8d13e6eb1aabb0c3f46965",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    arguments = parser.parse_args()
    check_md5(arguments.folder)
    arguments.output.write_bytes(npz_bytes(chosen_arrays(arguments.folder, PER_CLASS)))
    print(f"{hashlib.sha256(arguments.output.read_bytes()).hexdigest()}  {arguments.output.name}")


def check_md5(folder: Path) -> None:
    """The unzipped files are the published ones."""
    for name, expected in MD5_UNZIPPED.items():
        found = hashlib.md5(unzipped(folder, name), usedforsecurity=False).hexdigest()
        if found != expected:
            raise SystemExit(f"{name}.gz in {folder} is not Fashion-MNIST's: md5 {found} unzipped, expected {expected}")


def chosen_arrays(folder: Path, per_class: dict[str, int]) -> dict[str, np.ndarray]:
    """The first `per_class` images of each class in each split, in the order of the published files."""
    arrays: dict[str, np.ndarray] = {}
    for split, prefix in PREFIXES.items():
        labels = read_idx(unzipped(folder, f"{prefix}-labels-idx1-ubyte"))
        images = read_idx(unzipped(folder, f"{prefix}-images-idx3-ubyte"))
        chosen = first_of_each_class(labels, per_class[split])
        arrays |= {f"{split}_images": images[chosen], f"{split}_labels": labels[chosen]}
    return arrays


def first_of_each_class(labels: np.ndarray, count: int) -> np.ndarray:
    """Ascending positions of the first `count` of each label."""
    return np.sort(np.concatenate([np.flatnonzero(labels == label)[:count] for label in np.unique(labels)]))


def unzipped(folder: Path, name: str) -> bytes:
    return gzip.decompress((folder / f"{name}.gz").read_bytes())


def read_idx(data: bytes) -> np.ndarray:
    """An idx file of bytes: 0 0 8, the number of axes, each axis as a big-endian 32-bit length, the values."""
    if data[:3] != b"\0\0\x08":
        raise SystemExit(f"not an idx file of unsigned bytes: it starts with {data[:4]!r}")
    axes = data[3]
    shape = np.frombuffer(data, ">u4", count=axes, offset=4)
    return np.frombuffer(data, np.uint8, offset=4 + 4 * axes).reshape(shape)


def npz_bytes(arrays: dict[str, np.ndarray]) -> bytes:
    """An .npz without a clock in it: the same arrays give the same bytes (np.savez leaves the time to zipfile)."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, array in arrays.items():
            member = io.BytesIO()
            np.lib.format.write_array(member, np.ascontiguousarray(array), version=(1, 0), allow_pickle=False)
            entry = zipfile.ZipInfo(f"{name}.npy", date_time=(1980, 1, 1, 0, 0, 0))
            entry.create_system, entry.external_attr = 3, 0o644 << 16  # else they depend on the platform
            archive.writestr(entry, member.getvalue(), compress_type=zipfile.ZIP_DEFLATED, compresslevel=9)
    return buffer.getvalue()


if __name__ == "__main__":
    main()
