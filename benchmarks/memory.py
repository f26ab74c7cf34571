"""Peak memory of `patchproof certify` on a synthetic data set of 500 images and on one of 50,000.

A tiny network certifies a folder of links to a few tiny images, so what grows with the number of images grows here too.

    python benchmarks/memory.py --output benchmarks/results/memory-cpu.json
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from common import parser, write
from PIL import Image

NETWORK = """
import torch
from torch import nn

def build(num_classes=10):
    torch.manual_seed(0)
    return nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(3 * 8 * 8, num_classes))
"""


def make_images(folder: Path, count: int) -> Path:
    """Make `count` files in class folders, all of them links to a few pictures."""
    pictures = folder / "pictures"
    pictures.mkdir()
    for number in range(16):
        pixels = np.random.default_rng(number).integers(0, 256, (32, 32, 3)).astype(np.uint8)
        Image.fromarray(pixels).save(pictures / f"{number}.png")
    root = folder / "images"
    for number in range(count):
        label = root / f"class{number % 10}"
        label.mkdir(parents=True, exist_ok=True)
        os.link(pictures / f"{number % 16}.png", label / f"{number:06d}.png")
    return root


def certify(folder: Path, images: Path) -> dict[str, float]:
    """Peak resident bytes and seconds of one certification in a process of its own."""
    (folder / "network.py").write_text(NETWORK)
    command = [sys.executable, "-m", "patchproof", "certify", "--model", f"{folder / 'network.py'}:build"]
    command += ["--weights", "random", "--image-size", "32", "--dataset", str(images), "--output", str(folder / "run")]
    command += ["--patch", "3%", "--masks", "2", "--batch-size", "1024", "--device", "cpu"]
    started = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"certify failed with status {status}")
    return {"peak_bytes": usage.ru_maxrss * 1024, "seconds": time.monotonic() - started}


def compare(counts: tuple[int, ...] = (500, 50_000)) -> dict[int, dict[str, float]]:
    found = {}
    for count in counts:
        with tempfile.TemporaryDirectory() as name:
            found[count] = certify(Path(name), make_images(Path(name), count))
    return found


def main() -> None:
    arguments = parser(__doc__).parse_args()
    found = compare()
    for count, cost in found.items():
        print(f"{count:>7,} images: {cost['peak_bytes'] / 2**20:.0f} MiB, {cost['seconds']:.0f} s")
    write(found, arguments.output)


if __name__ == "__main__":
    main()
