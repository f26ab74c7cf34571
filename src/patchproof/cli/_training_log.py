"""The log of a training, which grows a line at a time and forgets what will be done again."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from patchproof.records import write_atomically

if TYPE_CHECKING:
    from patchproof.training.loop import StepReport


class TrainingLog:
    """log.jsonl: a line a step and a line an epoch, each on its own, so that curves can be drawn while it grows."""

    def __init__(self, path: Path, *, writes: bool) -> None:
        self.path, self.writes = path, writes

    def step(self, report: StepReport) -> None:
        self._add({"kind": "step", **asdict(report)})

    def epoch(self, values: dict[str, Any]) -> None:
        self._add({"kind": "epoch", **values})

    def _add(self, values: dict[str, Any]) -> None:
        if self.writes:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(values) + "\n")

    def cut_after(self, step: int) -> int:
        """Forget the steps after the checkpoint: they will be done again. How many of those before it are missing."""
        if not self.writes:
            return 0
        lines = self.path.read_text("utf-8", errors="replace").split("\n") if self.path.exists() else []
        kept = {line: found for line in lines if (found := _step_of(line)) is not None and 0 < found <= step}
        write_atomically(self.path, "".join(f"{line}\n" for line in kept))
        return step - len(set(kept.values()))


def _step_of(line: str) -> int | None:
    """The step a line is about; None for a line cut short."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, LookupError, TypeError, OverflowError, RecursionError):
        return None
