"""Measure how the time of `patchproof certify` falls with processes, and check that they write the same records.

    python benchmarks/processes.py --processes 1 2 --output benchmarks/results/processes-cpu.json -- --weights DIR

Arguments after `--` go to `certify`.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import parser, write


def certify(processes: int, folder: Path, arguments: list[str]) -> dict[str, Any]:
    """The seconds that the run itself counted, which leaves out starting processes, and a digest of its records."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [*launcher, "-m", "patchproof", "certify", *arguments, "--output", str(folder)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
    results = json.loads((folder / "results.json").read_text())
    digest = hashlib.sha256((folder / "records.jsonl").read_bytes()).hexdigest()
    return {"processes": processes, "seconds": results["cost"]["seconds"], "records_sha256": digest}


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    flags.add_argument("certify", nargs="*")
    arguments = flags.parse_args()
    with tempfile.TemporaryDirectory() as name:
        rows = [certify(count, Path(name) / str(count), arguments.certify) for count in arguments.processes]
    for row in rows:
        row["speed_up"] = rows[0]["seconds"] / row["seconds"]
        print(f"{row['processes']} processes: {row['seconds']:.1f} s, {row['speed_up']:.2f} times as fast")
    same = len({row["records_sha256"] for row in rows}) == 1
    print("the records are the same bytes" if same else "THE RECORDS DIFFER")
    report = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "certify": arguments.certify,
        "threads_a_process": 1,
        "rows": rows,
        "same_records": same,
    }
    write(report, arguments.output)
    sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
