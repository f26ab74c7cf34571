"""How the time of `patchproof certify` falls with the number of processes, and that their records are the same bytes.

    python benchmarks/processes.py --processes 1 2 --output benchmarks/results/processes-cpu.json -- --weights DIR

What follows `--` goes to `certify`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


def certify(processes: int, folder: Path, arguments: list[str]) -> dict[str, Any]:
    """Seconds that the run itself counted, without the start of the processes, and a digest of its records."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [*launcher, "-m", "patchproof", "certify", *arguments, "--output", str(folder)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
    results = json.loads((folder / "results.json").read_text())
    digest = hashlib.sha256((folder / "records.jsonl").read_bytes()).hexdigest()
    return {"processes": processes, "seconds": results["cost"]["seconds"], "records_sha256": digest}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--output", type=Path, default=None)
    parser.add_argument("certify", nargs="*")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        rows = [certify(count, Path(name) / str(count), arguments.certify) for count in arguments.processes]
    for row in rows:
        row["speed_up"] = rows[0]["seconds"] / row["seconds"]
        print(f"{row['processes']} processes: {row['seconds']:.1f} s, {row['speed_up']:.2f} times as fast")
    same = len({row["records_sha256"] for row in rows}) == 1
    print("the records are the same bytes" if same else "THE RECORDS DIFFER")
    if arguments.output:
        report = {"machine": f"{platform.machine()}, {os.cpu_count()} cores", "certify": arguments.certify}
        report |= {"threads_a_process": 1, "rows": rows, "same_records": same}
        arguments.output.write_text(json.dumps(report, indent=2) + "\n")
    sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
