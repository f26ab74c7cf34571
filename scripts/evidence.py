"""Produce the evidence under results/: every experiment is a few `patchproof` commands.

    python scripts/evidence.py imagenette cifar10 imagenet --data DATA --plan
    python scripts/evidence.py imagenette --data DATA --results my-results --processes 5 --minutes 30
    OMP_NUM_THREADS=1 python scripts/evidence.py fashion --processes 2 --rate 4000      # on a CPU, with embedded images

DATA holds `imagenette2-160/{train,val}`, `cifar10/{train,test}` and `imagenet-val-1000/val` as class folders. `--plan`
only prints the commands and their forward passes. What is finished is skipped, what was cut off is resumed, and a step
that would not fit into the minutes left is put off. Each finished run is copied to `--results`: manifest, results, and
the records compressed. Certifications need the checkpoints below `--runs`, which the project's results/ do not include:
to train anew, give another `--results`. Several processes keep a GPU busier, if NVIDIA's MPS daemon runs.
"""

from __future__ import annotations

import argparse
import lzma
import shutil
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from evidence_plan import EXPERIMENTS, Step

from patchproof.runs import read_json
from patchproof.types import CheckError, PatchproofError

PROGRAM = [sys.executable, "-m", "patchproof"]
SECONDS_BETWEEN_LOOKS = 0.5
SECONDS_TO_STOP = 60.0
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass
class Work:
    """Steps to do, some at a time, in their order; a certification waits for its network."""

    waiting: list[Step]
    data: Path
    runs: Path
    results: Path
    processes: int = 1
    rate: float = 15_000.0
    """Passes per second, of all processes together."""
    ends: float = float("inf")
    running: dict[Step, tuple[subprocess.Popen[bytes], float]] = field(default_factory=dict)
    done: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    put_off: list[str] = field(default_factory=list)

    def run(self) -> int:
        """0, or 1 if a step failed. An error or a signal stops the steps that run."""
        try:
            while self.waiting or self.running:
                self.collect()
                self.start()
                if self.running:
                    time.sleep(SECONDS_BETWEEN_LOOKS)
        finally:
            self.stop()
        print(f"{len(self.done)} done, {len(self.failed)} failed, {len(self.put_off)} put off")
        return 1 if self.failed else 0

    def start(self) -> None:
        """As many steps as there is room for. What has to wait for a step in hand is looked at again."""
        for step in tuple(self.waiting):
            if len(self.running) >= self.processes:
                return
            if any(step.after == other.name for other in (*self.waiting, *self.running)):
                continue
            self.waiting.remove(step)
            try:
                if self.kept(step):
                    continue
                reason = self.obstacle(step)
                if reason:
                    self.put_off.append(step.name)
                    print(f"put off: {step.name}, {reason}", flush=True)
                else:
                    self.launch(step)
            except (OSError, PatchproofError) as error:
                self.fail(step, str(error))

    def kept(self, step: Step) -> bool:
        return finished(self.results / step.name) and limit_of(self.results / step.name) == step.limit

    def obstacle(self, step: Step) -> str | None:
        """Why it cannot be done."""
        folder = self.runs / step.name
        if step.after and not any(finished(root / step.after) for root in (self.runs, self.results)):
            return "since its network is not trained to the end"
        if step.after and not (self.runs / step.after / "checkpoint-last").is_dir():
            return f"since its network is not below {self.runs}; to train it anew, give another --results"
        if (folder / "manifest.json").exists() and limit_of(folder) != step.limit:
            return f"since {folder} was begun with another --limit; remove it"
        if time.monotonic() + step.passes * self.processes / self.rate > self.ends:
            return "for lack of time"
        return None

    def launch(self, step: Step) -> None:
        """Out of reach of the terminal's signals: `stop` passes them on, once."""
        command = [*PROGRAM, *step.command(self.data, self.runs)]
        print(f"$ patchproof {' '.join(command[len(PROGRAM) :])}", flush=True)
        (self.runs / "logs").mkdir(parents=True, exist_ok=True)
        with self.log(step).open("ab") if self.processes > 1 else nullcontext() as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
            self.running[step] = process, time.monotonic()

    def log(self, step: Step) -> Path:
        return self.runs / "logs" / f"{step.name.replace('/', '-')}.log"

    def collect(self) -> None:
        """What has ended since the last look."""
        for step, (process, started) in tuple(self.running.items()):
            code = process.poll()
            if code is None:
                continue
            del self.running[step]
            if code:
                where = "" if self.processes == 1 else f"; {self.log(step)} says why"
                self.fail(step, f"exit code {code}{where}")
                continue
            try:
                keep(self.runs / step.name, self.results / step.name)
            except (OSError, PatchproofError) as error:
                self.fail(step, str(error))
            else:
                self.done.append(step.name)
                print(f"done: {step.name}, {time.monotonic() - started:.0f} s", flush=True)

    def fail(self, step: Step, reason: str) -> None:
        self.failed.append(step.name)
        print(f"failed: {step.name}, {reason}", flush=True)

    def stop(self) -> None:
        """A second signal does not stop the stopping."""
        for number in SIGNALS if self.running else ():
            signal.signal(number, signal.SIG_IGN)
        for process, _ in self.running.values():
            process.terminate()
        ends = time.monotonic() + SECONDS_TO_STOP
        for process, _ in self.running.values():
            try:
                process.wait(max(0.0, ends - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def keep(folder: Path, target: Path) -> None:
    """Manifest and results as they are, records and log compressed. Results come last: they say that all is there."""
    target.mkdir(parents=True, exist_ok=True)
    (target / "results.json").unlink(missing_ok=True)
    lines = [name for name in ("records.jsonl", "log.jsonl") if (folder / name).exists()]
    if not lines:
        raise CheckError(f"{folder} has neither records nor a log; there is nothing to count its results from")
    for name in lines:
        (target / f"{name}.xz").write_bytes(lzma.compress((folder / name).read_bytes(), preset=9))
    shutil.copyfile(folder / "manifest.json", target / "manifest.json")
    shutil.copyfile(folder / "results.json", target / "results.json.part")
    (target / "results.json.part").replace(target / "results.json")


def finished(folder: Path) -> bool:
    """All that was asked for is there; a --limit alone makes a run partial, not unfinished."""
    try:
        results = read_json(folder / "results.json")
    except (FileNotFoundError, PatchproofError):
        return False
    if "images" not in results:
        return results.get("status") == "complete"
    return bool(results["images"]["done"] == results["images"]["planned"])


def limit_of(folder: Path) -> int | None:
    """How many images a run was begun with; None for all."""
    return read_json(folder / "manifest.json")["config"]["limit"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiments", nargs="+", choices=EXPERIMENTS)
    parser.add_argument("--data", type=Path, help="needed for all but `fashion`")
    parser.add_argument("--runs", type=Path, default=Path("runs/evidence"))
    parser.add_argument("--results", type=Path, default=Path("runs/evidence-results"))
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--rate", type=float, default=Work.rate, help="inference passes per second, to plan with")
    parser.add_argument("--only", default="", help="only steps whose name contains this, or one of these with commas")
    parser.add_argument("--processes", type=int, default=1, help="number of steps at a time")
    parser.add_argument("--plan", action="store_true", help="print the commands and stop")
    arguments = parser.parse_args()
    if arguments.data is None and arguments.experiments != ["fashion"]:
        parser.error("--data is needed: the folder with imagenette2-160, cifar10 and imagenet-val-1000")
    if arguments.processes < 1:
        parser.error("--processes must be at least 1")
    every = dict.fromkeys(step for name in arguments.experiments for step in EXPERIMENTS[name]())
    steps = [step for step in every if any(part in step.name for part in arguments.only.split(","))]
    if arguments.plan:
        for step in steps:
            print(f"{step.passes:>12,}  {' '.join(step.command(arguments.data, arguments.runs))}")
        total = sum(step.passes for step in steps)
        print(f"{total:>12,}  passes, {total / arguments.rate / 60:.0f} minutes")
        return 0
    for number in SIGNALS:
        signal.signal(number, _interrupt)
    places = arguments.data, arguments.runs, arguments.results
    ends = time.monotonic() + 60 * arguments.minutes
    try:
        return Work(steps, *places, arguments.processes, arguments.rate, ends).run()
    except KeyboardInterrupt:
        print("stopped; the same command goes on")
        return 1


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
