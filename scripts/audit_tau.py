"""How τ held up: what the certifications under results/ decided again in float32, against what was measured before.

    python scripts/audit_tau.py [FOLDER]

A label of a fast precision that leads by less than τ is decided again in float32, and the change of its margin noted;
τ is several times the change measured before the run (docs/decisions/0003-tau.md). τ(fp32) is at least 64 units in the
last place of the largest logit, whatever is measured: its floor. Runs whose τ comes from the tail of all changes
(docs/decisions/0010-fast-copy.md) are not in it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from patchproof.runs import read_json


@dataclass(frozen=True)
class Audit:
    """One run: labels decided again, the largest change of a margin over the one measured, and whether τ(fp32) is its
    floor. Runs of `attack` kept no count, and float32 has nothing to decide again: None."""

    redone: int | None
    ratio: float | None
    floor: bool


def audits(folder: Path) -> Iterator[Audit]:
    for path in sorted(folder.rglob("manifest.json")):
        manifest = read_json(path)
        if manifest["command"] == "train" or "precision" not in manifest["tau"]["drift"]:
            continue
        tau, audit = manifest["tau"], read_json(path.with_name("results.json")).get("audit")
        drift = tau["drift"]
        ratio = audit["largest_change"] / drift["precision"] if audit and drift["precision"] else None
        floor = tau["fp32"] == 64 * torch.finfo(torch.float32).eps * drift["scale"]
        yield Audit(audit and audit["redone"], ratio, floor)


def main() -> None:
    found = list(audits(Path(sys.argv[1] if sys.argv[1:] else "results")))
    redone = [audit.redone for audit in found if audit.redone is not None]
    ratios = [audit.ratio for audit in found if audit.ratio is not None]
    print(f"{sum(redone):,} labels decided again in {len(redone)} certifications, {len(ratios)} of them fast")
    print(f"largest change of a margin: {max(ratios, default=0.0):.2f} times the one measured before the run")
    print(f"τ(fp32) is its floor in {sum(audit.floor for audit in found)} of {len(found)} runs")


if __name__ == "__main__":
    main()
