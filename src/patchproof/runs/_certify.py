"""A certification: one record per image, resumable, on any number of processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from patchproof.defenses import Defense
from patchproof.runs._record import ACCURACIES, Record, Tally
from patchproof.runs._session import Results, Session
from patchproof.runs.executors import Executor
from patchproof.types import Preprocessing


def certify(
    defense: Defense,
    data: Any,
    *,
    folder: Path | str | None = None,
    resume: bool = False,
    limit: int | None = None,
    on_record: Callable[[Record], None] | None = None,
    executor: Executor | None = None,
    preprocessing: Preprocessing | None = None,
    workers: int | None = None,
    skip_bad: bool = False,
    on_start: Callable[[Tally, int], None] | None = None,
    config: Mapping[str, Any] | None = None,
) -> Results:
    """Count the images that provably keep their label under any patch of the threat, and record each.

    `data` is what `open_dataset` returns, or any sequence of (image, label): PIL images, or float tensors in [0, 1] of
    the input size. τ is measured on the data before anything is certified. With a `folder`, manifest, records and
    results are written there; `resume` continues what is there with the same defence, weights and data, or begins.
    `on_record` sees each new record once, and may raise to stop the run; `on_start` sees the tally of the records found
    in the folder and the number planned.
    """
    return Session("certify", ACCURACIES, **locals()).execute()
