"""Conclusions from the records: a verdict, the next steps, and what the guarantee excludes.

Each finding is a rule: if it holds, it yields a sentence of the verdict, a next step, or both.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import NamedTuple

from patchproof.geometry import PatchThreat, covering_masks, patch_words, size_words
from patchproof.recipes import needs_training
from patchproof.report._counts import (
    GUARANTEES,
    NAMED,
    Comparison,
    Paired,
    TracedRun,
    attacked_rates,
    by_class,
    count_pairs,
    mask_name,
    mask_shares,
    outcomes,
)
from patchproof.report._tables import interval_words, percent
from patchproof.report._training import validated_with
from patchproof.runs import Rate, StoredCertification, StoredTraining, one_class_words, rates
from patchproof.types import count_words, shortened

LEVEL = 0.05
"""Differences with a smaller p are called clear."""

FEW = 10
"""Fewest images of a class for which the class is called weak."""

WIDE = 0.10
"""Widest interval that is not called wide: of 95%, or between the bounds of robust accuracy."""

SPARE = 1.05
"""How many times the fewest images are recommended, as the rate of more images will be another."""

MORE_MASKS = {1: 6, 2: 4}
"""Masks per axis that are recommended, by the number of patches."""

MOST_STEPS = 5
ATTACK = "Attack the defence: this gives an upper bound on robust accuracy, as the certified rate is a lower one."

Said = tuple[str, str]
"""A sentence of the verdict, and a next step; either may be empty."""


class Conclusion(NamedTuple):
    """Sentences about what was found, what to do next, and what is not promised."""

    verdict: Sequence[str]
    next_steps: Sequence[str]
    excluded: Sequence[str]


def conclude(said: Iterable[Said], runs: Sequence[StoredCertification] = ()) -> Conclusion:
    """The sentences of the verdict, the first few steps, and what no certificate of these runs promises."""
    verdict, steps = ([text for text in dict.fromkeys(some) if text] for some in zip(*said, strict=True))
    return Conclusion(verdict, steps[:MOST_STEPS], [*dict.fromkeys(text for run in runs for text in excluded(run))])


def excluded(run: StoredCertification) -> Iterator[str]:
    """Claims that no certificate of this run makes."""
    where = "on the original image, before resizing" if run.native else "at the network's input, after resizing"
    size = f"{size_words(*run.patch_sizes)} pixels" if run.patch_sizes else "the stated size"
    size = patch_words(str(run.config["patch"])) if run.native else size
    more = "two patches at once" if run.patches == 1 else "three patches at once"
    yield f"Patches of any shape that do not fit into {size} ({where}), and {more}."
    yield "Changes outside the patch: noise, blur, lighting, rotation, another crop, or a further object in the scene."
    yield "Images without a certificate: the defence may withstand a patch on some of them, but nothing is proved."
    each = "each certificate is about one image. The rate is an estimate for images drawn like these"
    yield f"Other images: {each}, not for another camera, place or time."
    what = "weights, preprocessing, masks, precision and kind of device"
    yield f"Another system: certificates hold for the run's {what}."
    if run.guarantee == "detection":
        yield "Availability (detection): an attacker can cause alarms at will, and clean images may cause some."


def difference(paired: Paired, name: str, base: str, holm: float | None = None) -> str:
    """`greedy is 4.2 points above cutout (95% interval +1.0 to +7.3, McNemar p = 0.012, n = 400).`

    `holm` is the corrected p, if several runs are tested together.
    """
    p, points = paired.p if holm is None else holm, 100 * paired.difference
    value = "p\u00a0<\u00a00.001" if p < 0.001 else f"p\u00a0=\u00a0{p:.3f}"
    test = f"McNemar {value}" if holm is None else f"McNemar {value} (Holm)"
    facts = f"95% interval {interval_words(paired)}, {test}, n = {paired.n:,}"
    low, high = paired.interval
    agree = (p < LEVEL) != (low <= 0 <= high)
    decides = f"the {'test' if holm is None else 'corrected test'} decides"
    more = "" if agree else f" Interval and test disagree, at the limit of what {paired.n:,} images show; {decides}."
    if p >= LEVEL:
        return f"no clear difference between {name} and {base} ({points:+.1f} points, {facts}).{more}"
    return f"{name} is {abs(points):.1f} points {'above' if points > 0 else 'below'} {base} ({facts}).{more}"


def span(rate: Rate) -> float:
    """The width of the 95% interval in percentage points, rounded as it is printed."""
    return round(100 * (rate.interval[1] - rate.interval[0]), 1)


def images_wanted(rate: Rate) -> int:
    """Number of images with which the interval is not wide, if the rate stays nearly the same."""
    share = min(0.9, max(0.1, rate.rate))
    fewest = next(n for n in count(rate.n + 1) if span(Rate(round(share * n), n)) <= 100 * WIDE)
    return math.ceil(SPARE * fewest)


def broken_words(run: StoredCertification) -> str:
    broken = sum(record.broken for record in run.attacks)
    return f"{count_words(broken, 'certificate was', 'certificates were')} broken by a patch"


def unfinished(run: StoredCertification) -> Iterator[Said]:
    missing = run.planned - len(run.records)
    if missing > 0:
        yield "", f"Resume {run.name}: {missing:,} of {run.planned:,} images are left."


def bounds(run: StoredCertification) -> Iterator[Said]:
    """The bounds on robust accuracy that an attack shows."""
    found = attacked_rates(run)
    if "attacked" in found:
        words = " to ".join(f"{percent(found[name].rate)} ({name})" for name in ("certified", "attacked"))
        far = found["attacked"].rate - found["certified"].rate > WIDE
        step = f"Attack harder to lower the upper bound of {run.name}: more steps, restarts or places." if far else ""
        yield f"{run.name}: robust accuracy is from {words}, n = {found['attacked'].n:,}; {broken_words(run)}.", step


def about_run(one: TracedRun, others: Sequence[TracedRun] = ()) -> Iterator[Said]:
    """Findings about one certification or attack, the most urgent first.

    What the `others` have already tried is not recommended.
    """
    run, rate, single = one.run, one.certified, one_class_words(one.run)
    yield from unfinished(run)
    if not rate.n:
        yield "There is no record yet, so there is nothing to conclude.", ""
        return
    if any(record.broken for record in run.attacks):
        same = "a certificate cannot break if masks, weights and preprocessing are those of the run"
        step = f"Look at broken/ in the run's folder, and report it: {same}."
        yield f"Do not rely on this defence: {broken_words(run)}.", step
    if single is not None:
        step = "Train the classifier until it tells the classes apart; masks, patches and attacks come after that."
        yield f"{single[0].upper()}{single[1:]}.", step
    patch = f"{'' if run.patches > 1 else 'patch of '}{run.patch_words}"
    promise = GUARANTEES[run.guarantee].replace("such patch", patch)
    images = count_words(rate.n, "image is", "images are")
    yield f"{percent(rate.rate)} ({interval_words(rate)}) of {images} certified: {promise}.", ""
    if single is not None:
        return
    if span(rate) > 100 * WIDE:
        wanted = images_wanted(rate)
        verb = "Certify" if wanted <= run.available else "Collect and certify"
        goal = f"{verb} about {wanted:,} images for an interval of ±{50 * WIDE:.0f} points"
        step = f"{goal} (the data set has {run.available:,})."
        yield f"n = {rate.n:,} is small: the 95% interval spans {span(rate):.1f} points.", step
    clean = count_pairs((record.undefended, record.defended) for record in run.good)
    if clean.n:
        yield f"Clean accuracy: {difference(clean, 'the defence', 'the classifier alone')}", ""
    failed = outcomes(run)["not certified"]
    if failed and clean.n:
        wrong = sum(record.undefended is False for record in failed)
        words = count_words(len(failed), "image has", "images have")
        yield f"{words} no certificate; the classifier alone gets {wrong:,} of them wrong.", ""
        unfit = needs_training(run.defense, run.rates["undefended"].rate, run.rates["defended"].rate)
        if unfit is not None:
            yield "", f"{unfit}."
        elif len(failed) > wrong and run.masks is not None:  # how another defence is trained for, only its author knows
            yield "", more_masks(run, others)
            yield "", better_training(one, others)
        if 3 * wrong >= len(failed):
            which = f"{wrong:,} of {len(failed):,} images without a certificate"
            yield "", f"Improve the classifier itself: alone it gets {which} wrong."
    rated = [(label, rates(records)["certified"]) for label, records in by_class(run).items()]
    rated.sort(key=lambda pair: pair[1].rate)
    weak = [(label, r) for label, r in rated if r.n >= FEW and r.interval[1] < rate.rate]
    if weak:
        named = ", ".join(f"{run.class_name(label)} {percent(r.rate)}" for label, r in weak[:NAMED])
        more = f" and {len(weak) - NAMED} more" if len(weak) > NAMED else ""
        masks = list(mask_shares(run, [record for record in failed if record.label == weak[0][0]]))[:2]
        where = f"; they fail most often under {' and '.join(mask_name(run, n) for n in masks)}" if masks else ""
        step = f"Look at the images of {run.class_name(weak[0][0])} in the explorer{where}." if run.masks else ""
        yield f"Clearly below the average of {percent(rate.rate)}: {named}{more}.", step
    shares = list(mask_shares(run, failed).items())[:NAMED]
    if shares:
        named = ", ".join(f"{mask_name(run, number)} {percent(share.rate)}" for number, share in shares)
        yield f"Masks that decide failures most often, n = {shares[0][1].n:,}: {named}.", ""
    yield from bounds(run)
    if not run.attacks:
        yield "", ATTACK


def more_masks(run: StoredCertification, others: Sequence[TracedRun]) -> str:
    """Recommend more masks per axis, unless they would not be smaller or have been tried: a smaller mask hides less of
    what the network needs."""
    per_axis = MORE_MASKS[run.patches]
    if run.defense != "patchcleanser" or run.masks is None or run.axes is None or max(run.axes) >= per_axis:
        return ""
    finer = covering_masks(PatchThreat(run.masks.image_size, run.patch_sizes, run.patches), per_axis=per_axis)
    now, then = (max((r.height, r.width) for r in masks.blocks) for masks in (run.masks, finer))
    tried = {(other.run.weights_sha256, other.run.masks) for other in others if other.run.threat == run.threat}
    if then >= now or (run.weights_sha256, finer) in tried:
        return ""
    size = size_words((len(finer.axes[0]), len(finer.axes[1])))
    passes = f"{len(finer.unions):,} different masked copies per image instead of {len(run.masks.unions):,}"
    return f"Try {size} masks: each hides {size_words(then)} pixels instead of {size_words(now)}, for {passes}."


def better_training(one: TracedRun, others: Sequence[TracedRun]) -> str:
    """Recommend masks of `greedy`, or what is left to try if it, a variant of it or `memory` has found the masks."""
    strong = [name for other in (one, *others) if (name := other.strategy or "").startswith(("greedy", "memory"))]
    if strong:
        return f"Train longer, with more images or a larger network: masks of {strong[0]} are used already."
    instead = ", unless these weights already were" if one.strategy is None else f" instead of {one.strategy}"
    return f"Train with the masking strategy greedy{instead}: labels then change less under masks."


def about_runs(
    traced: Sequence[TracedRun], base: TracedRun, comparisons: Sequence[Comparison], unpaired: Mapping[str, str]
) -> Iterator[Said]:
    """Findings about several runs: which differ clearly from the baseline, and what would settle the others.

    `unpaired` has the reason for each run that cannot be compared.
    """
    own, single = base.run.name, {one.run.name: said for one in traced if (said := one_class_words(one.run))}
    random = {one.run.name for one in traced if any(n.startswith("random network") for n in one.run.notices)}
    unfit = single.keys() | random  # never recommended
    for run in (one.run for one in traced):
        yield from unfinished(run)
        if any(record.broken for record in run.attacks):
            yield f"Do not rely on {run.name}: {broken_words(run)}.", ""
    for said in dict.fromkeys(single.values()):
        alike = ", ".join(name for name in single if single[name] == said)
        yield f"{shortened(alike, 60)}: {said}.", ""
    ordered = sorted(comparisons, key=lambda c: -c.certified.difference)
    rated = [c for c in ordered if c.run.name not in unfit]
    better = [c.run.name for c in rated if c.corrected["certified"] < LEVEL and c.certified.difference > 0]
    if better:
        yield f"Best against the baseline {own}: {better[0]}.", f"Go on with {better[0]}."
    elif ordered:
        apart = " that tells the classes apart" if len(rated) < len(ordered) else ""
        step = "" if own in unfit else f"Keep {own}: no other certifies clearly more."
        yield f"No run{apart} certifies clearly more images than the baseline {own}.", step
    for c in ordered[:NAMED]:
        p, both = c.corrected["certified"], (c.run.rates["certified"], base.certified)
        overlap = max(rate.interval[0] for rate in both) <= min(rate.interval[1] for rate in both)
        more = " Their own intervals overlap, but on the same images the paired difference decides."
        said = difference(c.certified, c.run.name, own, p if len(ordered) > 1 else None)
        yield f"Certified: {said}{more if overlap and p < LEVEL else ''}", ""
        if (p := c.corrected["defended"]) < LEVEL:
            said = difference(c.accuracies["defended"], c.run.name, own, p if len(ordered) > 1 else None)
            yield f"Defended, on clean images: {said}", ""
    needed = [(n, c.run) for c in rated if (n := c.certified.images_needed or 0) > c.certified.n]
    for n, run in sorted(needed, key=lambda pair: pair[0])[:1]:
        shows = f"about {n:,} images would be needed to show the difference from {own} (chance 80%)"
        yield "", f"{run.name}: {shows}; the data set has {run.available:,}."
    for name, reason in list(unpaired.items())[:NAMED]:
        same = "on the same images (data set, split and limit) against the same patch"
        step = f"Certify all runs {same}, so that they can be paired." if " about " in reason else ""
        yield f"{name} is not compared: {reason}.", step
    compared = {own, *(c.run.name for c in rated)} - unfit or {own}
    found = [one for one in traced if one.run.name in compared]
    leader = max(found, key=lambda one: (one.certified.k / max(1, one.certified.n), one is base))
    attacks = [one.run for one in traced if one.run.attacks and one is not leader]
    name = "" if comparisons else f"{leader.run.name}: "  # otherwise the sentences above name it
    for said, step in about_run(leader, traced):
        quiet = comparisons or unpaired or not said
        settled = not step or (step == ATTACK and attacks) or step.startswith("Resume ")
        yield "" if quiet else name + said.removeprefix(name), "" if settled else name + step
    for run in attacks:
        yield from bounds(run)


def about_trainings(runs: Sequence[StoredTraining]) -> Iterator[Said]:
    """Findings about trainings alone: which epoch was best, and whether accuracy still rose at the end."""
    for run in runs:
        if run.best is None:
            yield f"{run.name}: no epoch is validated yet.", ""
            continue
        rate, (defense, guarantee) = run.best.certified, validated_with(run)
        words = f"epoch {run.best.epoch} of {len(run.epochs)} is the best, {percent(rate.rate)} certified"
        how = f"by {defense} ({guarantee}) on {rate.n:,} validation images"
        last = len(run.epochs) > 1 and run.best.epoch == run.epochs[-1].epoch
        step = f"Train {run.name} for more epochs: the last one is the best." if last else ""
        yield f"{run.name} ({run.strategy}): {words} ({interval_words(rate)}) {how}.", step
    if any(run.best is not None for run in runs):
        yield "", "Certify checkpoint-best on images that selected nothing: validation accuracy is too optimistic."
