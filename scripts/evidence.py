"""Produce the evidence under results/: every experiment is a few `patchproof` commands, run in one process.

    python scripts/evidence.py imagenette cifar10 imagenet --data DATA --runs runs/evidence --plan
    python scripts/evidence.py imagenette --data DATA --runs runs/evidence --results results --minutes 9

DATA holds `imagenette2-160/{train,val}`, `cifar10/{train,test}` and `imagenet-val-1000/val` as class folders. `--plan`
only prints the commands and their forward passes. What is finished is skipped, what was cut off is resumed, and a step
that would not fit into the minutes left is put off. Each finished run is copied to `--results`: manifest, results, and
the records compressed. With `--processes 5`, five processes share the list: each takes the next step that no other has.
That keeps a GPU busier, if NVIDIA's MPS daemon runs, so that their kernels run side by side.
"""

from __future__ import annotations

import argparse
import fcntl
import lzma
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from evidence_plan import EXPERIMENTS, Step

from patchproof.cli import run
from patchproof.records import read_json

SECONDS_TO_WAIT = 2.0


def keep(folder: Path, target: Path) -> None:
    """Manifest and results as they are, records and log compressed. Results come last: they say that all is there."""
    target.mkdir(parents=True, exist_ok=True)
    for name in ("records.jsonl", "log.jsonl"):
        if (folder / name).exists():
            (target / f"{name}.xz").write_bytes(lzma.compress((folder / name).read_bytes(), preset=9))
    for name in ("manifest.json", "results.json"):
        shutil.copyfile(folder / name, target / name)


def finished(folder: Path) -> bool:
    """All that was asked for is there; a --limit alone makes a run partial, not unfinished."""
    if not (folder / "results.json").exists():
        return False
    results = read_json(folder / "results.json")
    if "images" not in results:
        return results.get("status") == "complete"
    return bool(results["images"]["done"] == results["images"]["planned"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiments", nargs="+", choices=EXPERIMENTS)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--runs", type=Path, default=Path("runs/evidence"))
    parser.add_argument("--results", type=Path, default=None)
    parser.add_argument("--minutes", type=float, default=10_000.0)
    parser.add_argument("--rate", type=float, default=15_000.0, help="inference passes a second, to plan with")
    parser.add_argument("--only", default="", help="only steps whose name contains this, or one of these with commas")
    parser.add_argument("--plan", action="store_true", help="print the commands and stop")
    parser.add_argument("--processes", type=int, default=1, help="so many share the list")
    arguments = parser.parse_args()
    steps = [step for name in arguments.experiments for step in EXPERIMENTS[name]()]
    steps = [step for step in steps if any(part in step.name for part in arguments.only.split(","))]
    if arguments.plan:
        for step in steps:
            print(f"{step.passes:>12,}  {' '.join(step.command(arguments.data, arguments.runs))}")
        total = sum(step.passes for step in steps)
        print(f"{total:>12,}  passes, {total / arguments.rate / 60:.0f} minutes")
    elif arguments.processes > 1:
        share(arguments)
    else:
        work(steps, arguments)


def share(arguments: argparse.Namespace) -> None:
    """The same command in several processes; each says what it does in a log of its own."""
    arguments.runs.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, __file__, *sys.argv[1:], "--processes", "1"]
    children = []
    for number in range(arguments.processes):
        with (arguments.runs / f"process-{number}.log").open("a") as log:
            children.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT))
    for child in children:
        child.wait()


def work(steps: list[Step], arguments: argparse.Namespace) -> None:
    """Every step that no other process takes; one that waits for another process is looked at again."""
    ends = time.monotonic() + 60 * arguments.minutes
    while steps:
        before, steps = steps, [step for step in steps if not settle(step, arguments, ends)]
        if steps == before:
            time.sleep(SECONDS_TO_WAIT)


def settle(step: Step, arguments: argparse.Namespace, ends: float) -> bool:
    """Do a step, or find that it is done or will not be; not so (yet) if it or its network is in other hands."""
    with claimed(arguments.runs, step.name) as mine:
        if not mine:
            return False
        if finished((arguments.results or arguments.runs) / step.name):
            return True
        if step.after and not trained(step.after, arguments):
            with claimed(arguments.runs, step.after) as idle:
                if idle:
                    print(f"put off: {step.name}, since its network is not trained to the end", flush=True)
                return idle
        if time.monotonic() + step.passes / arguments.rate > ends:
            print(f"put off: {step.name}", flush=True)
        else:
            execute(step, arguments)
        return True


@contextmanager
def claimed(runs: Path, name: str) -> Iterator[bool]:
    """Is this step for this process alone now? The claim ends with the process, however that ends."""
    file = runs / "claims" / name.replace("/", ":")
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def trained(name: str, arguments: argparse.Namespace) -> bool:
    return any(finished(folder / name) for folder in (arguments.results, arguments.runs) if folder)


def execute(step: Step, arguments: argparse.Namespace) -> None:
    command = step.command(arguments.data, arguments.runs)
    print(f"$ patchproof {' '.join(command)}", flush=True)
    started = time.monotonic()
    if run(command):
        print(f"failed: {step.name}", flush=True)
        return
    torch.compiler.reset()
    seconds = time.monotonic() - started
    print(f"{seconds:.0f} s, {step.passes / seconds:,.0f} planned passes/s\n", flush=True)
    if arguments.results:
        keep(arguments.runs / step.name, arguments.results / step.name)


if __name__ == "__main__":
    main()
