"""How much faster a CPU computes if the memory that a pass frees is kept, as the command line does (`cli/_process.py`).

    python benchmarks/allocator.py --output benchmarks/results/allocator-cpu.json

The same passes run in processes of their own, alternately with glibc's defaults and with freed memory kept.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from typing import Any

import torch
from common import machine, parser, write

from patchproof.masking import default_batch, network
from patchproof.models import load_classifier

SECONDS, TURNS = 5, 3

KEPT = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1)}
"""Environment variables that keep freed memory, for Python code that does not go through the command line."""


def passes(model: str) -> dict[str, float]:
    """Passes per second of a network in full batches, the share of the time in the kernel, and peak memory."""
    classifier = load_classifier(model, "random", num_classes=10).to(memory_format=torch.channels_last)
    size = default_batch(classifier.input_size, torch.device("cpu"))
    images = torch.rand(size, 3, *classifier.input_size).contiguous(memory_format=torch.channels_last)
    one_pass = network(classifier)
    one_pass(images, None)
    before, started, count = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter(), 0
    while time.perf_counter() - started < SECONDS:
        one_pass(images, None)
        count += size
    seconds, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_SELF)
    system, user = after.ru_stime - before.ru_stime, after.ru_utime - before.ru_utime
    share = system / (system + user)
    return {"passes_per_second": count / seconds, "in_kernel": share, "peak_mib": after.ru_maxrss / 1024}


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--models", nargs="+", default=["small", "tf_efficientnet_lite0"])
    flags.add_argument("--child", help=argparse.SUPPRESS)
    arguments = flags.parse_args()
    if arguments.child:
        print(json.dumps(passes(arguments.child)))
        return
    plain = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    rows: list[dict[str, Any]] = []
    for model in arguments.models:
        command = [sys.executable, __file__, "--child", model]
        turns = [
            [json.loads(subprocess.check_output(command, env=plain | more)) for more in ({}, KEPT)]
            for _ in range(TURNS)
        ]
        ratios = [kept["passes_per_second"] / default["passes_per_second"] for default, kept in turns]
        rows.append({"model": model, "ratios": ratios, "turns": turns})
        print(f"{model}: {statistics.median(ratios):.2f} times as many passes per second (least: {min(ratios):.2f})")
    write({**machine(), "rows": rows}, arguments.output)


if __name__ == "__main__":
    main()
