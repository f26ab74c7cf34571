"""What follows from the records: a verdict, what to do next, and what the guarantee excludes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from patchproof.geometry import PatchThreat, covering_masks, size_words
from patchproof.recipes import needs_training
from patchproof.report._counts import (
    FEW,
    LEVEL,
    Comparison,
    Paired,
    Z,
    attacked_rates,
    by_class,
    compare,
    count_pairs,
    enough_per_class,
    mask_shares,
    outcomes,
)
from patchproof.report._tables import interval_words, percent
from patchproof.report._trace import GUARANTEES, NAMED, TracedRun
from patchproof.report._training import validated_with
from patchproof.runs import StoredCertification, StoredTraining, one_answer
from patchproof.runs._reading import count_words

WIDE = 0.10
"""A 95% interval wider than this says little: n is too small."""

MORE_MASKS = {1: 6, 2: 4}
"""Masks per axis that are recommended, by the number of patches."""

STRONG = "greedy"
GAP = 0.10
MOST_STEPS = 5
ATTACK = "Attack the defence for an upper bound on robust accuracy: the certified rate is the lower one."
NOTHING = "There is no record yet, so there is nothing to conclude."
BORDER = " Interval and test disagree, as they may at the border of what so many images can show: the test decides."


@dataclass(frozen=True)
class Conclusion:
    """Sentences: what was found, what to do next, what is not promised."""

    verdict: Sequence[str]
    steps: Sequence[str] = ()
    excludes: Sequence[str] = ()


def excluded(runs: Sequence[StoredCertification]) -> list[str]:
    """What no certificate of these runs says anything about."""
    sizes = sorted({size_words(*run.patch_sizes) for run in runs if run.patch_sizes})
    shown = f"{', '.join(sizes)} pixels" if sizes else "the stated size"
    native, counts = {run.native for run in runs}, {run.patches for run in runs}
    where = "on the original image, before resizing" if native == {True} else "at the network's input, after resizing"
    if len(native) > 1:
        where = "at the network's input or on the original image, as each run says"
    more = {1: "two patches at once", 2: "three patches at once"}[min(counts)]
    if len(counts) > 1:
        more = "more patches at once than a run says"
    found = [
        f"Patches that do not fit into {shown} ({where}), other shapes that reach beyond it, and {more}.",
        "Changes outside the patch: noise, blur, light, rotation, another crop, or an object put into the scene.",
        "Images that are not certified: some of them may still hold, nothing is proved about them.",
        "Other images: a certificate is about one image. The rate is an estimate for images drawn like these, not for "
        "another camera, place or time.",
        "Another program: weights, preprocessing, masks, precision and kind of device are those of the run.",
    ]
    if any(run.guarantee == "detection" for run in runs):
        found.append("Service (detection): an attacker can cause alarms at will, and clean images may raise one too.")
    return found


def mask_name(run: StoredCertification, number: int) -> str:
    """By number, as in the explorer, and where it lies in the grid."""
    if run.axes is None:
        return f"mask {number + 1}"
    row, column = divmod(number, run.axes[1])  # masks with axes are in the order of rows
    return f"mask {number + 1} (row {row + 1} of {run.axes[0]}, column {column + 1} of {run.axes[1]})"


def unfinished(run: StoredCertification) -> list[str]:
    missing = run.planned - len(run.records)
    return [f"Resume the run: {missing:,} of {run.planned:,} images are left."] if missing > 0 else []


def broken_words(run: StoredCertification) -> str:
    broken = sum(record.broken for record in run.attacks)
    words = count_words(broken, "certificate was", "certificates were") if broken else "no certificate was"
    return f"{words} broken by a patch"


def bounds(run: StoredCertification) -> str:
    """What is known of the robust accuracy of a run that was attacked."""
    low, high = (attacked_rates(run)[name] for name in ("certified", "attacked"))
    words = f"from {percent(low.rate)} (certified) to {percent(high.rate)} (attacked), n = {high.n:,}"
    return f"is between the two bounds: {words}; {broken_words(run)}"


def one_answer_words(run: StoredCertification) -> str | None:
    """Whether the network answers one class nearly always."""
    found = one_answer(run.good)
    if found is None:
        return None
    label, own, rest = found
    facts = f"right on {own.k:,} of {own.n:,} images of it, on {rest.k:,} of {rest.n:,} others"
    share = "rates are about the share of that class and say nothing about recognition"
    return f"The network answers one class nearly always, {run.class_name(label)}: {facts}. The {share}."


def conclude_one(one: TracedRun, beside: Sequence[TracedRun] = ()) -> Conclusion:
    """About one certification or attack: each finding with what a person can do about it, most urgent first.

    What the runs `beside` it have tried is not recommended."""
    run, rate, steps = one.run, one.certified, unfinished(one.run)
    if not rate.n:
        return Conclusion([NOTHING], steps)
    failed, alone = outcomes(run)["not certified"], run.rates.get("undefended")
    wrong, width = sum(record.undefended is False for record in failed), rate.interval[1] - rate.interval[0]
    what = GUARANTEES[run.guarantee].replace("such patch", f"{'patch of ' * (run.patches == 1)}{run.patch_words}")
    verdict = [f"{percent(rate.rate)} ({interval_words(rate)}) of {rate.n:,} images are certified: {what}."]
    if not rate.k:
        verdict = [f"No image of {rate.n:,} is certified (95% interval {interval_words(rate)})."]
    if any(record.broken for record in run.attacks):
        verdict.insert(0, f"Do not rely on this defence: {broken_words(run)}.")
        steps.append("Look at broken/ in the run's folder, and report it: a certificate cannot break if masks, weights "
                     "and preprocessing are those of the run.")  # fmt: skip
    single = one_answer_words(run)
    if single is not None:
        learn = "Train the classifier until it tells the classes apart, before masks, patches or attacks are tried."
        return Conclusion([single, *verdict], [*steps, learn], excluded([run]))
    if width > WIDE:
        verdict.append(f"n = {rate.n:,} is small: the 95% interval spans {100 * width:.0f} points.")
        share = min(0.9, max(0.1, rate.rate))
        wanted = math.ceil(share * (1 - share) * (2 * Z / WIDE) ** 2)
        goal, room = f"an interval of ±{50 * WIDE:.0f} points", f"the data set has {run.available:,}"
        more = "Collect more images" if run.planned == run.available else "Certify all images, and collect more"
        enough = f"Certify about {max(wanted, rate.n + 1):,} images for {goal} ({room})."
        steps.append(enough if wanted <= run.available else f"{more}: {goal} takes about {wanted:,}, and {room}.")
    clean = count_pairs((record.undefended, record.defended) for record in run.good)
    if clean.n:
        verdict.append(f"Clean accuracy: {difference(clean, 'the defence', 'the classifier alone')}")
    right = {record.label for record in run.good if record.certified}
    if len(right) == 1 and len(by_class(run)) > 1 and rate.k >= FEW:
        name = run.class_name(right.pop())
        verdict.append(f"All certified images are of class {name}: a network that always answers so would do the same.")
    if failed and alone is not None:
        words = count_words(len(failed), "image has", "images have")
        why = f"{wrong:,} misclassified as they are, {len(failed) - wrong:,} classified right"
        verdict.append(f"{words} no certificate: {why}.")
    unfit = None if alone is None else needs_training(run.defense, alone.rate, run.rates["defended"].rate)
    if unfit is not None:
        steps.append(f"{unfit}.")
    elif len(failed) > wrong and alone is not None:
        per_axis = MORE_MASKS[run.patches]
        if run.defense == "patchcleanser" and run.masks and run.axes is not None and max(run.axes) < per_axis:
            # More masks are smaller ones: each hides less that the network would need.
            finer = covering_masks(PatchThreat(run.masks.image_size, run.patch_sizes, run.patches), per_axis=per_axis)
            now, then = (max((r.height, r.width) for r in masks.blocks) for masks in (run.masks, finer))
            each = f"each hides {size_words(then)} pixels instead of {size_words(now)}"
            passes = f"{len(finer.unions):,} different masked copies per image instead of {len(run.masks.unions):,}"
            size = size_words((len(finer.axes[0]), len(finer.axes[1])))
            tried = {(other.run.weights_sha256, other.run.masks) for other in beside if other.run.threat == run.threat}
            new = then < now and (run.weights_sha256, finer) not in tried
            steps += [f"Try {size} masks: {each}, for {passes}."] if new else []
        strong = [name for other in (one, *beside) if (name := other.strategy or "").startswith(STRONG)]
        instead = ", unless these weights were" if one.strategy is None else f" instead of {one.strategy}"
        advice = f"Train with the masking strategy {STRONG}{instead}: labels then change less under masks."
        if strong:
            advice = f"Train longer, with more images or a larger network: masks of {strong[0]} are used already."
        steps.append(advice)
    if failed and 3 * wrong >= len(failed):
        which = f"{wrong:,} of {len(failed):,} images without a certificate are misclassified as they are"
        steps.append(f"Improve the classifier itself: {which}.")
    if failed and not enough_per_class(run):
        each = f"{rate.n:,} images of {len(by_class(run)):,} classes are too few"
        verdict.append(f"Nothing is said about single classes: {each}; tables/classes.csv has them.")
    # Classes whose whole 95% interval lies below the certified accuracy of all images, lowest first.
    rated = sorted((rates["certified"].rate, label, rates["certified"]) for label, rates in by_class(run).items())
    weak = [(label, r) for _, label, r in rated if r.n >= FEW and r.interval[1] < rate.rate]
    low = {label: f"{run.class_name(label)} {percent(r.rate)}" for label, r in weak}
    if low:
        rest = f" and {len(low) - NAMED} more" if len(low) > NAMED else ""
        named = ", ".join(list(low.values())[:NAMED])
        verdict.append(f"Clearly below the average of {percent(rate.rate)}: {named}{rest}.")
        lowest = next(iter(low))
        mine = mask_shares(run, [record for record in failed if record.label == lowest])
        masks = " and ".join(mask_name(run, number) for number in list(mine)[:2])
        where = f"; they fail most often under {masks}" if masks else ""
        steps.append(f"Look at the images of {run.class_name(lowest)} in the explorer{where}.")
    shares = list(mask_shares(run, failed).items())[:NAMED]
    if shares:
        named = ", ".join(f"{mask_name(run, number)} {percent(share.rate)}" for number, share in shares)
        verdict.append(f"Masks that fail most often, of {shares[0][1].n:,} images without a certificate: {named}.")
    found = attacked_rates(run)
    if "attacked" in found:
        verdict.append(f"Robust accuracy {bounds(run)}.")
        if found["attacked"].rate - found["certified"].rate > GAP:
            steps.append("Attack harder to lower the upper bound: more steps, restarts or places.")
    if not run.attacks and len(steps) < MOST_STEPS:
        steps.append(ATTACK)
    steps = steps or ["Compare with another run on the same images: report both together."]
    return Conclusion(verdict, steps[:MOST_STEPS], excluded([run]))


def conclude_several(
    traced: Sequence[TracedRun],
    base: TracedRun,
    comparisons: Sequence[Comparison],
    unpaired: Mapping[str, str],
    twins: Mapping[str, str],
) -> Conclusion:
    """About runs beside each other: which differ clearly from the baseline, and what would settle the others.

    Names in `unpaired` come with the reason, those in `twins` with the run that has the same weights and defence.
    """
    known, own = [one for one in traced if one.certified.n], base.run.name
    single = {one.run.name: said for one in known if (said := one_answer_words(one.run))}
    if not known:
        return Conclusion([NOTHING])
    verdict, steps = [], [step for one in traced for step in unfinished(one.run)][:1]
    ordered = sorted(comparisons, key=lambda c: -c.certified.difference)
    clear, clean = ([c for c in ordered if c.corrected[name] < LEVEL] for name in ("certified", "defended"))
    for c in ordered[:NAMED]:
        words = {
            name: difference(c.accuracies[name], c.run.name, own, c.corrected[name] if len(ordered) > 1 else None)
            for name in ("certified", "defended")
        }
        first, second = (run.rates["certified"].interval for run in (c.base, c.run))
        if c in clear and first[0] <= second[1] and second[0] <= first[1]:
            words["certified"] += " Their separate intervals overlap; on the same images the paired difference counts."
        verdict.append(f"Certified: {words['certified']}")
        if c in clean:
            verdict.append(f"Defended, on clean images: {words['defended']}")
    if len(ordered) > NAMED:
        verdict.append(f"{len(ordered) - NAMED} more are in the table.")
    rated = [c for c in ordered if c.run.name not in single]  # what is nearly one answer is not worth choosing
    better = [c.run for c in rated if c in clear and c.certified.difference > 0]
    above = [c.run for c in rated if c in clean and c not in clear and c.accuracies["defended"].difference > 0]
    if len(better) > 1:
        best, next_best = better[:2]
        words_best = difference(compare(next_best, best)[0].certified, best.name, next_best.name)
        verdict.append(f"Certified, the two best: {words_best}")
    if better:
        verdict.insert(0, f"Best against the baseline {own}: {better[0].name}.")
        steps.append(f"Go on with {better[0].name}.")
    elif ordered:
        apart = " that tells the classes apart" if len(rated) < len(ordered) else ""
        verdict.insert(0, f"No run{apart} certifies clearly more images than the baseline {own}.")
        why = "clearly better on clean images, no clear difference in certificates"
        keep = [] if own in single else [f"Keep {own}: no other is clearly better."]
        steps += [f"Go on with {above[0].name}: {why}."] if above else keep
    unclear = [(c, c.certified.images_needed or 0) for c in rated if c not in clear]
    for c, needed in [(c, needed) for c, needed in unclear if needed > c.certified.n][:1]:
        has = c.run.available
        room = f"the data set has {has:,}" if needed > has else f"{c.certified.n:,} of {has:,} are done"
        shows = f"about {needed:,} images would be needed to show the difference from {own} (chance 80%)"
        steps.append(f"{c.run.name}: {shows}; {room}.")
    verdict += [f"{name} is not compared with {own}: {reason}." for name, reason in list(unpaired.items())[:NAMED]]
    if any("other images" in reason for reason in unpaired.values()):
        steps.append("Certify all runs on the same images (data set, split and limit), so that they can be paired.")
    attacked = [one.run for one in known if "attacked" in attacked_rates(one.run)]
    if not unpaired:
        leader = max(
            known,
            key=lambda one: (one.run.name not in single, one.run.name not in twins, one.certified.rate, one is base),
        )
        found = conclude_one(leader, traced)
        steps += [step for step in found.steps if step not in steps and not (step == ATTACK and attacked)]
        if not ordered:  # nothing but this run and attacks on it
            verdict += found.verdict
            attacked = [run for run in attacked if run is not leader.run]
    for run in attacked:
        verdict.append(f"{run.name}: robust accuracy {bounds(run)}.")
        if any(record.broken for record in run.attacks):
            verdict.insert(0, f"Do not rely on {run.name}: {broken_words(run)}.")
    for name, other in list(twins.items())[:NAMED]:
        verdict.append(f"{name} and {other} are of the same weights and defence: there is nothing to choose between.")
    if ordered:
        verdict[:0] = [f"{name}: {said}" for name, said in single.items()]
    return Conclusion(verdict, steps[:MOST_STEPS], excluded([one.run for one in known]))


def difference(paired: Paired, name: str, base: str, holm: float | None = None) -> str:
    """`greedy is 4.2 points above cutout (95% interval +1.0 to +7.3, McNemar p = 0.012, n = 400).` The p is Holm's
    where several runs are tested together."""
    p, points, (low, high) = paired.p if holm is None else holm, 100 * paired.difference, paired.interval
    value = "p\u00a0<\u00a00.001" if p < 0.001 else f"p\u00a0=\u00a0{p:.3f}"
    test = f"McNemar {value}{'' if holm is None else ' (Holm)'}"
    facts = f"95% interval {interval_words(paired)}, {test}, n = {paired.n:,}"
    border = BORDER if (low <= 0 <= high) == (p < LEVEL) else ""
    if p >= LEVEL:
        return f"no clear difference between {name} and {base} ({points:+.1f} points, {facts}).{border}"
    return f"{name} is {abs(points):.1f} points {'above' if points > 0 else 'below'} {base} ({facts}).{border}"


def conclude_training(runs: Sequence[StoredTraining]) -> Conclusion:
    """About trainings by themselves: which epoch was best, and whether accuracy still rose at the end."""
    verdict, steps = [], []
    for run in runs:
        if run.best is None:
            verdict.append(f"{run.name}: no epoch is validated yet.")
            continue
        rate = run.best.certified
        words = f"epoch {run.best.epoch} of {len(run.epochs)} is the best, {percent(rate.rate)} certified"
        how = "{} ({})".format(*validated_with(run))
        verdict.append(
            f"{run.name} ({run.strategy}): {words} ({interval_words(rate)}) by {how} on {rate.n:,} validation images."
        )
        if len(run.epochs) > 1 and run.best.epoch == run.epochs[-1].epoch:
            steps.append(f"Train {run.name} for more epochs: the last one is the best.")
    if any(run.best is not None for run in runs):
        steps.append("Certify checkpoint-best on images that selected nothing: validation accuracy is too hopeful.")
    return Conclusion(verdict, steps[:MOST_STEPS])
