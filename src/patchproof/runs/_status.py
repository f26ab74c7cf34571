"""A stored run in words: what it is about, its state, and a warning about its network."""

from __future__ import annotations

from patchproof.geometry import PatchThreat, footprint_words, patch_words, size_words
from patchproof.machine import being_written
from patchproof.runs._reading import StoredCertification, StoredTraining
from patchproof.runs._record import Tally, one_answer

ONE_CLASS = "the network answers one class nearly always, so these rates say nothing about recognition"


def run_title(run: StoredCertification) -> str:
    """Which network, images, defence, threat and masks the run is about."""
    if run.image_size is None or not run.patch_sizes:
        return f"{run.architecture} on {run.dataset}, {run.defense} ({run.guarantee})"
    threat = PatchThreat(run.image_size, run.patch_sizes, run.patches)
    against = f"{threat.words} anywhere on {size_words(run.image_size)}"
    if run.native:
        reached = f"{footprint_words(*run.patch_sizes)} pixels of the {size_words(run.image_size)} input"
        against = f"{threat.how_many} of {patch_words(str(run.config['patch']))} of the original image ({reached})"
    images = f"{run.dataset} (split {run.manifest['data']['split']})"
    masks = f", {run.masks.words}" if run.masks else ""
    return f"{run.architecture} on {images}, {run.defense} ({run.guarantee}): {against}{masks}"


def run_status(run: StoredCertification | StoredTraining) -> str:
    """How far the run has got, and what is doubtful about it, e.g. `running; 3 of 20 done` or `partial; one class`."""
    unfinished = "running" if being_written(run.folder) else "stopped"
    written = (run.folder / "results.json").exists()
    partial = [notice for notice in run.notices if notice.startswith("partial")]
    damaged = [notice.partition(", left out")[0] for notice in run.notices if notice.startswith("damaged: ")]
    doubts = [n.partition(": ")[0] for n in run.notices if not n.startswith(("partial", "damaged: "))]
    if isinstance(run, StoredTraining):
        state = "trained" if written and not partial else unfinished
        state += " (validation)" if run.best else " (no validation)"
        doubts = partial + damaged + doubts
    else:
        done, planned = len(run.records), run.planned or len(run.records)
        if not (done or written or damaged):
            return f"{unfinished}; 0 of {planned} done"
        state = "complete" if len(run.good) == run.available else "partial"
        if done < planned:
            state = f"{unfinished}; {done} of {planned} done"
        if damaged:
            state = damaged[0]
        if run.guarantee != "recovery":
            state += f", {run.guarantee}"
        attacked = Tally(["attacked"]).add(run.attacks).rates()["attacked"]
        if attacked.n:
            state += f", attacked {attacked.rate:.1%}"
    return "; ".join([state, *doubts, *(["one class"] if one_class_words(run) else [])])


def one_class_words(run: StoredCertification | StoredTraining) -> str | None:
    """A warning if the network answers one class nearly always: it certifies that class and recognises nothing."""
    if isinstance(run, StoredTraining):
        return ONE_CLASS if run.best is not None and run.best.one_class else None
    found = one_answer(run.good)
    if found is None:
        return None
    label, own, rest = found
    return (
        f"the network answers one class nearly always, {run.class_name(label)}: it is right on {own.k} of {own.n} "
        f"images of it and on {rest.k} of {rest.n} others; certificates for that class say nothing about recognition"
    )
