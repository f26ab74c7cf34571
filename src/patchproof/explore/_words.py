"""What was found, in sentences."""

from __future__ import annotations

from collections.abc import Sequence

from patchproof.explore._rounds import Rounds, SecondRound
from patchproof.explore._table import PairTable
from patchproof.geometry import PatchThreat
from patchproof.records import Record

MOST_NAMED = 4
"""More disagreeing copies than this are counted, not listed."""


def patch_words(threat: PatchThreat) -> str:
    return " or ".join(f"{h}×{w}" for h, w in threat.patch_sizes)


def verdict(table: PairTable, names: Sequence[str], threat: PatchThreat) -> str:
    """Certified or not, and what decides it."""
    name, (a, b) = names[table.label], table.weakest
    margin = float(table.margins[a, b])
    if table.certified:
        return (
            f"Certified: all {table.pairs} pairs of masks say {name}, the closest ({_pair(a, b)}) by {margin:.3g}. "
            f"No {patch_words(threat)} patch, anywhere on this image, can change the answer."
        )
    said = int(table.labels[a, b])
    verb = "does" if table.failing == 1 else "do"
    example = f"{_pair(a, b)} say {names[said]}" if said != table.label else f"{_pair(a, b)} lead by {margin:.3g} only"
    return (
        f"Not certified: {table.failing} of {table.pairs} pairs of masks {verb} not say {name} clearly enough, "
        f"e.g. {example}. A {patch_words(threat)} patch may be able to change the answer."
    )


def _pair(a: int, b: int) -> str:
    return f"mask {a + 1} twice" if a == b else f"masks {min(a, b) + 1} and {max(a, b) + 1}"


def record_words(record: Record, names: Sequence[str]) -> str:
    """What the run wrote down about this image."""
    certified = "certified" if record.certified else "not certified"
    answers = f"undefended {_rightness(record.undefended)}, defended {_rightness(record.defended)}"
    margin = "" if record.margin is None else f", margin {record.margin:+.3g}"
    return f"The run's record: {certified}{margin}, {answers}; labelled {names[record.label]}."


def _rightness(value: bool | None) -> str:
    return "right" if value else "wrong"


def explain(rounds: Rounds, names: Sequence[str]) -> str:
    """How double masking came to its answer, in a sentence or two."""
    count, answer = len(rounds.first), names[rounds.answer]
    others = rounds.disagreeing
    if not others:
        return f"All {count} copies say {names[rounds.majority]}, so there is no second round: the answer is {answer}."
    opening = f"{count - len(others)} of {count} copies say {names[rounds.majority]}"
    if not rounds.second[-1].confirmed:
        return f"{opening}; {_losers(rounds.second, names)}: the answer is {answer}, the majority's."
    *losers, winner = rounds.second
    before = f" {_capital(_losers(losers, names))}." if losers else ""
    return (
        f"{opening}; copy {winner.copy + 1} says {names[winner.label]}, and all its second-round copies agree: "
        f"the answer is {answer}.{before}"
    )


def _losers(rounds: Sequence[SecondRound], names: Sequence[str]) -> str:
    """The copies that their second round contradicts."""
    if len(rounds) == 1:
        r = rounds[0]
        verb = "does" if r.against == 1 else "do"
        return (
            f"copy {r.copy + 1} says {names[r.label]}, but {r.against} of its {len(r.labels)} second-round copies "
            f"{verb} not, so it is not believed"
        )
    if len(rounds) > MOST_NAMED:
        return f"{len(rounds)} copies that say something else are each contradicted in their second round"
    said = ", ".join(f"{r.copy + 1} ({names[r.label]})" for r in rounds)
    return f"copies {said} say something else, but each is contradicted in its second round"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def meaning(rounds: Rounds, table: PairTable, names: Sequence[str]) -> str:
    """The answer under the patch beside what the clean image's table promised."""
    undefended = f"Without the defence the answer would be {names[rounds.undefended]}."
    if rounds.answer == table.label:
        promise = "as the certificate promises" if table.certified else "though nothing was promised for this image"
        return f"{undefended} With it the answer is {names[table.label]}, {promise}."
    if not table.certified:
        return f"{undefended} With it the answer is not {names[table.label]}: this image is not certified."
    return (
        f"{undefended} With it the answer is not {names[table.label]} although this image is certified. That must not "
        "happen: the classifier answered the same masked image differently. Please report it."
    )
