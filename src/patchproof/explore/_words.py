"""What was found, in sentences. `name` gives the words for a label; −1 is an alarm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from patchproof.explore._findings import Finding, Rounds
from patchproof.geometry import size_words
from patchproof.runs import Record

MOST_NAMED = 4
"""More copies than this are counted, not listed."""

Name = Callable[[int], str]


def mask_words(masks: Sequence[int]) -> str:
    """`mask 3`, or `masks 3 and 5`: counted from 1."""
    return f"mask{'s' * (len(masks) > 1)} {' and '.join(str(mask + 1) for mask in masks)}"


def verdict(finding: Finding, name: Name, defense: Any) -> str:
    """Certified or not, the masked copy that decides it, and what follows for a patch."""
    patch, right, copies = f"{size_words(*defense.threat.patch_sizes)} patch", name(finding.label), finding.copies
    detects = defense.guarantee == "detection"
    opening = "Certified" if finding.certified else "Not certified"
    follows = f"No {patch}, anywhere on this image, can change the answer."
    if finding.certified and detects:
        follows = f"Under any {patch}, anywhere on this image, the answer is {right} or an alarm."
    elif not finding.certified:
        follows = f"A {patch} may be able to change the answer{' without an alarm' * detects}."
    if copies is None:
        return (
            f"{opening} as {right}, margin {finding.margin:+.3g}; the defence answers {name(finding.answer)}. {follows}"
        )
    cell, kind = copies.weakest, "pairs of masks" if len(copies.labels) > 1 else "masks"
    failing, count = copies.count(~copies.right), copies.count(copies.right | True)
    said, margin, which = int(copies.labels[cell]), float(copies.margins[cell]), mask_words(copies.masks(cell))
    found = f"all {count} {kind} say {right}, the closest ({which}) by {margin:.3g}"
    if failing:
        example = f"leads by {margin:.3g} only" if said == finding.label else f"is {name(said)}"
        verb = "does" if failing == 1 else "do"
        found = f"{failing} of {count} {kind} {verb} not say {right} clearly enough, e.g. under {which} it {example}"
    alarm = " On the clean image the defence raises an alarm." if finding.answer < 0 else ""
    return f"{opening}: {found}. {follows}{alarm}"


def record_words(record: Record, name: Name) -> str:
    """What a run recorded about this image."""
    if record.certified is None:
        return ""
    margin = "" if record.margin is None else f", margin {record.margin:+.3g}"
    answers = {"undefended": record.undefended, "defended": record.defended}
    words = "".join(f", {kind} {'right' if r else 'wrong'}" for kind, r in answers.items() if r is not None)
    return (
        f"The run's record: {'not ' * (not record.certified)}certified{margin}{words}; labelled {name(record.label)}."
    )


def explain(rounds: Rounds, name: Name) -> str:
    """How the defence came to its answer."""
    answer, count = f"the answer is {name(rounds.answer)}", len(rounds.first)
    if not count:
        return f"T{answer[1:]}."
    if not rounds.disagreeing:
        no_more = "" if rounds.second is None else ", so there is no second round"
        return f"All {count} copies say {name(rounds.majority)}{no_more}: {answer}."
    parts = [f"{count - rounds.disagreeing} of {count} copies say {name(rounds.majority)}"]
    if rounds.second is None:
        return f"{parts[0]}, {rounds.disagreeing} something else: {answer}."
    lost = [f"{r.copy + 1} ({name(r.label)})" for r in rounds.second if not r.confirmed]
    if len(lost) == 1:
        parts.append(f"copy {lost[0]} is contradicted by its second round")
    elif lost:
        which = f"copies {', '.join(lost)}" if len(lost) <= MOST_NAMED else f"{len(lost)} others"
        parts.append(f"{which} are each contradicted by their second round")
    won = [
        f"copy {r.copy + 1} ({name(r.label)}) is confirmed by its second round" for r in rounds.second if r.confirmed
    ]
    return f"{'; '.join([*parts, *won])}: {answer}{'' if won else ', the majority’s'}."


def meaning(rounds: Rounds, finding: Finding, name: Name, guarantee: str) -> str:
    """The answer under the patch beside what was proved of the clean image."""
    alone = "" if rounds.undefended is None else f"Without the defence the answer would be {name(rounds.undefended)}. "
    right, alarm = name(finding.label), rounds.answer < 0
    if rounds.answer == finding.label or (alarm and guarantee == "detection"):
        answer = "there is an alarm" if alarm else f"the answer is {right}"
        promise = "as the certificate promises" if finding.certified else "though nothing was promised for this image"
        return f"{alone}With it {answer}, {promise}."
    if not finding.certified:
        return f"{alone}With it the answer is not {right}: this image is not certified."
    return (
        f"{alone}With it the answer is not {right} although this image is certified. That must not happen: the "
        "classifier answered the same masked image differently. Please report it."
    )
