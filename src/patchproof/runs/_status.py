"""The state of a stored run, and a warning about its network, in words."""

from __future__ import annotations

from patchproof.runs._folder import being_written
from patchproof.runs._reading import StoredCertification, StoredTraining
from patchproof.runs._record import Tally, one_answer


def run_status(run: StoredCertification | StoredTraining) -> str:
    """How far the run has got, and what is doubtful about it, e.g. `running; 3 of 20 done` or `partial; one class`."""
    unfinished = "running" if being_written(run.folder) else "stopped"
    written = (run.folder / "results.json").exists()
    partial = [notice for notice in run.notices if notice.startswith("partial")]
    doubts = [notice.partition(": ")[0] for notice in run.notices if notice not in partial]
    if isinstance(run, StoredTraining):
        state = "trained" if written and not partial else unfinished
        state += " (validation)" if run.best else " (no validation)"
        doubts = partial + doubts
        one_class = run.best is not None and run.best.one_class
    else:
        done, planned = len(run.records), run.planned or len(run.records)
        if not done and not written:
            return f"{unfinished}; 0 of {planned} done"
        state = "complete" if len(run.good) == run.available else "partial"
        if done < planned:
            state = f"{unfinished}; {done} of {planned} done"
        if run.guarantee != "recovery":
            state += f", {run.guarantee}"
        attacked = Tally(["attacked"]).add(run.attacks).rates()["attacked"]
        if attacked.n:
            state += f", attacked {attacked.rate:.1%}"
        one_class = one_answer(run.good) is not None
    return "; ".join([state, *doubts, *(["one class"] if one_class else [])])


def one_class_words(run: StoredCertification) -> str | None:
    """A warning if the network answers one class nearly always: it certifies that class and recognises nothing."""
    found = one_answer(run.good)
    if found is None:
        return None
    label, own, rest = found
    return (
        f"the network answers one class nearly always, {run.class_name(label)}: it is right on {own.k} of {own.n} "
        f"images of it and on {rest.k} of {rest.n} others; certificates for that class say nothing about recognition"
    )
