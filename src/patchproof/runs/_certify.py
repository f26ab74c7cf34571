"""Certifications and attacks: one record per image, resumable, on any number of processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from patchproof.attacks import AttackPlan, OnStep
from patchproof.defenses import Defense
from patchproof.runs._attack import Attacker
from patchproof.runs._record import Rate, Record, Results, Tally
from patchproof.runs._session import Session
from patchproof.runs.executors import Executor
from patchproof.types import InputError, Preprocessing


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
    return Session(**locals()).execute()


@dataclass(frozen=True)
class AttackResults(Results):
    """What an attack found; `broken` are certified images whose answer a patch changed, and must be empty."""

    @property
    def attacked(self) -> Rate:
        """The defence under attack: an upper bound on robust accuracy."""
        return self.rates["attacked"]

    @property
    def undefended_attacked(self) -> Rate:
        return self.rates["undefended_attacked"]

    @property
    def broken(self) -> tuple[Record, ...]:
        return tuple(record for record in self.records if record.broken)


def attack(
    defense: Defense,
    data: Any,
    plan: AttackPlan | None = None,
    *,
    folder: Path | str | None = None,
    resume: bool = False,
    limit: int | None = None,
    on_record: Callable[[Record], None] | None = None,
    on_step: OnStep | None = None,
    executor: Executor | None = None,
    preprocessing: Preprocessing | None = None,
    workers: int | None = None,
    skip_bad: bool = False,
    on_start: Callable[[Tally, int], None] | None = None,
    config: Mapping[str, Any] | None = None,
) -> AttackResults:
    """Certify images and attack them with patches, white-box, on the classifier and adaptively on the defence.

    For recovery, certified ≤ attacked ≤ defended. A certified image whose answer a patch changes is kept in
    `folder`/broken with its pixels. `on_step(step, steps)` sees each step of each attack. Everything else is as in
    `certify`.
    """
    options = {name: value for name, value in locals().items() if name not in ("plan", "on_step")}
    if not isinstance(plan, AttackPlan | None):
        raise InputError(f"plan must be an AttackPlan, e.g. AttackPlan(steps=40), not {plan!r}")
    return AttackResults(**vars(Session(**options, attacker=Attacker(plan or AttackPlan(), on_step)).execute()))
