"""What it gains on a CPU to keep the memory that a pass frees, as the command line does (`cli/_process.py`).

    python benchmarks/allocator.py --output benchmarks/results/allocator-cpu.json

The same passes in processes of their own, with glibc's defaults and with freed memory kept, in turn.
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
from pathlib import Path
from typing import Any

import torch

from patchproof.masking import default_batch, network
from patchproof.models import load_classifier
from patchproof.runs import device_name, versions

KEPT = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1)}
"""What the environment says where a program cannot, e.g. for Python code of one's own."""


def passes(model: str, seconds: float) -> dict[str, float]:
    """Passes per second of a network in whole chunks, the share of the time in the kernel, and peak memory."""
    classifier = load_classifier(model, "random", num_classes=10).eval().to(memory_format=torch.channels_last)
    size = default_batch(classifier.input_size, torch.device("cpu"))
    images = torch.rand(size, 3, *classifier.input_size).contiguous(memory_format=torch.channels_last)
    one_pass = network(classifier)
    one_pass(images, None)
    before, started, count = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter(), 0
    while time.perf_counter() - started < seconds:
        one_pass(images, None)
        count += size
    took, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_SELF)
    system, user = after.ru_stime - before.ru_stime, after.ru_utime - before.ru_utime
    rate = {"passes_per_second": count / took, "in_kernel": system / (system + user)}
    return {**rate, "peak_mib": after.ru_maxrss / 1024}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["small", "tf_efficientnet_lite0"])
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--output", type=Path, default=None)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(passes(arguments.child, arguments.seconds)))
        return
    plain = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    rows: list[dict[str, Any]] = []
    for model in arguments.models:
        command = [sys.executable, __file__, "--child", model, "--seconds", str(arguments.seconds)]
        turns = [
            [json.loads(subprocess.check_output(command, env=plain | more)) for more in ({}, KEPT)]
            for _ in range(arguments.turns)
        ]
        ratios = [kept["passes_per_second"] / default["passes_per_second"] for default, kept in turns]
        rows.append({"model": model, "ratios": ratios, "turns": turns})
        print(f"{model}: {statistics.median(ratios):.2f} times as many passes per second ({min(ratios):.2f} the least)")
    report = {"device": device_name(torch.device("cpu")), "versions": versions(), "rows": rows}
    if arguments.output:
        arguments.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
