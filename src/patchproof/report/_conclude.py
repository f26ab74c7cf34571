"""Conclusions from the records: a verdict, the next steps, and what the guarantee excludes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from patchproof.geometry import PatchThreat, covering_masks, patch_words, size_words
from patchproof.recipes import needs_training
from patchproof.report._counts import (
    FEW,
    LEVEL,
    Comparison,
    Paired,
    Z,
    attacked_rates,
    by_class,
    count_pairs,
    enough_per_class,
    mask_shares,
    outcomes,
)
from patchproof.report._tables import interval_words, percent
from patchproof.report._trace import GUARANTEES, NAMED, TracedRun
from patchproof.report._training import validated_with
from patchproof.runs import StoredCertification, StoredTraining, one_class_words
from patchproof.types import count_words, shortened

WIDE = 0.10
"""Widest 95% interval of a number of images that is not called small."""

MORE_MASKS = {1: 6, 2: 4}
"""Masks per axis that are recommended, by the number of patches."""

STRONG = "greedy"
"""The recommended masking strategy; the names of its variants begin like it."""

GAP = 0.10
"""Widest gap between the bounds on robust accuracy for which no harder attack is recommended."""

MOST_STEPS = 5
ATTACK = "Attack the defence: this gives an upper bound on robust accuracy, as the certified rate is a lower one."
NOTHING = "There is no record yet, so there is nothing to conclude."
BORDER = " Interval and test disagree, which can happen at the limit of what this many images show; the test decides."


@dataclass(frozen=True)
class Conclusion:
    """Sentences about what was found, what to do next, and what is not promised."""

    verdict: Sequence[str]
    steps: Sequence[str] = ()
    excludes: Sequence[str] = ()


def excluded(runs: Sequence[StoredCertification]) -> list[str]:
    """Claims that no certificate of these runs makes."""
    sizes = sorted({claimed_size(run) for run in runs if run.patch_sizes})
    native, counts = {run.native for run in runs}, {run.patches for run in runs}
    where = "on the original image, before resizing" if native == {True} else "at the network's input, after resizing"
    if len(native) > 1:
        where = "at the network's input or on the original image, as each run says"
    size = ", ".join(sizes) or "the stated size"
    if len(sizes) > 1:
        size = f"the sizes that their run states, of {size}"
    more = "more patches at once than a run says"
    if len(counts) == 1:
        more = "two patches at once" if counts == {1} else "three patches at once"
    found = [
        f"Patches of any shape that do not fit into {size} ({where}), and {more}.",
        "Changes outside the patch: noise, blur, lighting, rotation, another crop, or a further object in the scene.",
        "Images without a certificate: the defence may withstand a patch on some of them, but nothing is proved.",
        "Other images: each certificate is about one image. The rate is an estimate for images drawn like these, not "
        "for another camera, place or time.",
        "Another system: certificates hold for the run's weights, preprocessing, masks, precision and kind of device.",
    ]
    if any(run.guarantee == "detection" for run in runs):
        found.append("Availability (detection): an attacker can cause alarms at will, and clean images may cause some.")
    return found


def claimed_size(run: StoredCertification) -> str:
    """The patch that the certificates are about: as it was asked for on the original image, or at the input."""
    return patch_words(str(run.config["patch"])) if run.native else f"{size_words(*run.patch_sizes)} pixels"


def mask_name(run: StoredCertification, number: int) -> str:
    """The mask's number, counted from 1 as in the explorer, and its place in the grid."""
    if run.axes is None:
        return f"mask {number + 1}"
    row, column = divmod(number, run.axes[1])  # the masks of a grid are in the order of its rows
    return f"mask {number + 1} (row {row + 1} of {run.axes[0]}, column {column + 1} of {run.axes[1]})"


def unfinished(run: StoredCertification) -> list[str]:
    missing = run.planned - len(run.records)
    return [f"Resume the run: {missing:,} of {run.planned:,} images are left."] if missing > 0 else []


def broken_words(run: StoredCertification) -> str:
    broken = sum(record.broken for record in run.attacks)
    words = count_words(broken, "certificate was", "certificates were") if broken else "no certificate was"
    return f"{words} broken by a patch"


def bounds(run: StoredCertification) -> str:
    """The bounds on robust accuracy that an attack shows."""
    low, high = (attacked_rates(run)[name] for name in ("certified", "attacked"))
    words = f"from {percent(low.rate)} (certified) to {percent(high.rate)} (attacked), n = {high.n:,}"
    return f"is between the two bounds: {words}; {broken_words(run)}"


def difference(paired: Paired, name: str, base: str, holm: float | None = None) -> str:
    """`greedy is 4.2 points above cutout (95% interval +1.0 to +7.3, McNemar p = 0.012, n = 400).`

    `holm` is the corrected p, if several runs are tested together.
    """
    p, points, (low, high) = paired.p if holm is None else holm, 100 * paired.difference, paired.interval
    value = "p\u00a0<\u00a00.001" if p < 0.001 else f"p\u00a0=\u00a0{p:.3f}"
    test = f"McNemar {value}" if holm is None else f"McNemar {value} (Holm)"
    facts = f"95% interval {interval_words(paired)}, {test}, n = {paired.n:,}"
    border = BORDER if (low <= 0 <= high) == (p < LEVEL) else ""
    if p >= LEVEL:
        return f"no clear difference between {name} and {base} ({points:+.1f} points, {facts}).{border}"
    return f"{name} is {abs(points):.1f} points {'above' if points > 0 else 'below'} {base} ({facts}).{border}"


def conclude_one(one: TracedRun, others: Sequence[TracedRun] = ()) -> Conclusion:
    """The conclusion about one certification or attack, the most urgent step first.

    What the `others` have already tried is not recommended.
    """
    run, rate, steps = one.run, one.certified, unfinished(one.run)
    if not rate.n:
        return Conclusion([NOTHING], steps)
    promise = GUARANTEES[run.guarantee].replace(
        "such patch", f"{'' if run.patches > 1 else 'patch of '}{run.patch_words}"
    )
    verdict = [f"{percent(rate.rate)} ({interval_words(rate)}) of {rate.n:,} images are certified: {promise}."]
    if not rate.k:
        verdict = [f"No image of {rate.n:,} is certified (95% interval {interval_words(rate)})."]
    if any(record.broken for record in run.attacks):
        verdict.insert(0, f"Do not rely on this defence: {broken_words(run)}.")
        same = "if masks, weights and preprocessing are those of the run"
        steps.append(f"Look at broken/ in the run's folder, and report it: a certificate cannot break {same}.")
    single = one_class_words(run)
    if single is not None:
        steps.append(
            "Train the classifier until it tells the classes apart; masks, patches and attacks come after that."
        )
        return Conclusion([f"{single[0].upper()}{single[1:]}.", *verdict], steps, excluded([run]))
    width = rate.interval[1] - rate.interval[0]
    if width > WIDE:
        verdict.append(f"n = {rate.n:,} is small: the 95% interval spans {100 * width:.0f} points.")
        steps.append(enough_images(run))
    clean = count_pairs((record.undefended, record.defended) for record in run.good)
    if clean.n:
        verdict.append(f"Clean accuracy: {difference(clean, 'the defence', 'the classifier alone')}")
    right = {record.label for record in run.good if record.certified}
    if len(right) == 1 and len(by_class(run)) > 1 and rate.k >= FEW:
        name = run.class_name(right.pop())
        verdict.append(f"All certified images are of class {name}: a network that always answers so would do the same.")
    failed, alone = outcomes(run)["not certified"], run.rates.get("undefended")
    wrong = sum(record.undefended is False for record in failed)
    if failed and alone is not None:
        words = count_words(len(failed), "image has", "images have")
        verdict.append(f"{words} no certificate; the classifier alone gets {wrong:,} of them wrong.")
        unfit = needs_training(run.defense, alone.rate, run.rates["defended"].rate)
        if unfit is not None:
            steps.append(f"{unfit}.")
        elif len(failed) > wrong and run.masks is not None:  # how another defence is trained for, only its author knows
            steps += [*more_masks(run, others), better_training(one, others)]
    if failed and 3 * wrong >= len(failed):
        which = f"{wrong:,} of {len(failed):,} images without a certificate"
        steps.append(f"Improve the classifier itself: alone it gets {which} wrong.")
    found = by_class(run)
    if failed and not enough_per_class(run):
        few = f"{rate.n:,} images of {len(found):,} classes are too few"
        verdict.append(f"Nothing is said about single classes, because {few}; tables/classes.csv has them.")
    rated = sorted((rates["certified"].rate, label, rates["certified"]) for label, rates in found.items())
    weak = [(label, r) for _, label, r in rated if r.n >= FEW and r.interval[1] < rate.rate]
    if weak:
        named = ", ".join(f"{run.class_name(label)} {percent(r.rate)}" for label, r in weak[:NAMED])
        more = f" and {len(weak) - NAMED} more" if len(weak) > NAMED else ""
        verdict.append(f"Clearly below the average of {percent(rate.rate)}: {named}{more}.")
    if weak and run.masks is not None:  # the explorer shows tables of masks
        lowest = weak[0][0]
        deciding = list(mask_shares(run, [record for record in failed if record.label == lowest]))[:2]
        masks = " and ".join(mask_name(run, number) for number in deciding)
        where = f"; they fail most often under {masks}" if masks else ""
        steps.append(f"Look at the images of {run.class_name(lowest)} in the explorer{where}.")
    shares = list(mask_shares(run, failed).items())[:NAMED]
    if shares:
        named = ", ".join(f"{mask_name(run, number)} {percent(share.rate)}" for number, share in shares)
        verdict.append(f"Masks that decide failures most often, n = {shares[0][1].n:,}: {named}.")
    attacked = attacked_rates(run)
    if "attacked" in attacked:
        verdict.append(f"Robust accuracy {bounds(run)}.")
        if attacked["attacked"].rate - attacked["certified"].rate > GAP:
            steps.append("Attack harder to lower the upper bound: more steps, restarts or places.")
    if not run.attacks:
        steps.append(ATTACK)
    return Conclusion(verdict, steps[:MOST_STEPS], excluded([run]))


def enough_images(run: StoredCertification) -> str:
    """Recommend the number of images that gives a narrow interval."""
    rate = run.rates["certified"]
    share = min(0.9, max(0.1, rate.rate))
    wanted = math.ceil(share * (1 - share) * (2 * Z / WIDE) ** 2)
    goal, has = f"an interval of ±{50 * WIDE:.0f} points", f"the data set has {run.available:,}"
    if wanted <= run.available:
        return f"Certify about {max(wanted, rate.n + 1):,} images for {goal} ({has})."
    return f"Collect more images: {goal} takes about {wanted:,}, and {has}."


def more_masks(run: StoredCertification, others: Sequence[TracedRun]) -> list[str]:
    """Recommend more masks per axis, unless they would not be smaller or have been tried: a smaller mask hides less of
    what the network needs."""
    per_axis = MORE_MASKS[run.patches]
    if run.defense != "patchcleanser" or run.masks is None or run.axes is None or max(run.axes) >= per_axis:
        return []
    finer = covering_masks(PatchThreat(run.masks.image_size, run.patch_sizes, run.patches), per_axis=per_axis)
    now, then = (max((r.height, r.width) for r in masks.blocks) for masks in (run.masks, finer))
    tried = {(other.run.weights_sha256, other.run.masks) for other in others if other.run.threat == run.threat}
    if then >= now or (run.weights_sha256, finer) in tried:
        return []
    size = size_words((len(finer.axes[0]), len(finer.axes[1])))
    passes = f"{len(finer.unions):,} different masked copies per image instead of {len(run.masks.unions):,}"
    return [f"Try {size} masks: each hides {size_words(then)} pixels instead of {size_words(now)}, for {passes}."]


def better_training(one: TracedRun, others: Sequence[TracedRun]) -> str:
    strong = [name for other in (one, *others) if (name := other.strategy or "").startswith(STRONG)]
    if strong:
        return f"Train longer, with more images or a larger network: masks of {strong[0]} are used already."
    instead = ", unless these weights already were" if one.strategy is None else f" instead of {one.strategy}"
    return f"Train with the masking strategy {STRONG}{instead}: labels then change less under masks."


def conclude_several(
    traced: Sequence[TracedRun],
    base: TracedRun,
    comparisons: Sequence[Comparison],
    unpaired: Mapping[str, str],
    twins: Mapping[str, str],
) -> Conclusion:
    """The conclusion about several runs: which differ clearly from the baseline, and what would settle the others.

    `unpaired` has the reason for each run that cannot be compared, `twins` for each attack the run that it attacks.
    """
    known, own = [one for one in traced if one.certified.n], base.run.name
    single = {one.run.name: said for one in known if (said := one_class_words(one.run))}
    if not known:
        return Conclusion([NOTHING])
    verdict, steps = list[str](), [step for one in traced for step in unfinished(one.run)][:1]
    ordered = sorted(comparisons, key=lambda c: -c.certified.difference)
    clear, clean = ([c for c in ordered if c.corrected[name] < LEVEL] for name in ("certified", "defended"))
    random = {one.run.name for one in known if any(n.startswith("random network") for n in one.run.notices)}
    unfit = single.keys() | random  # never recommended
    rated = [c for c in ordered if c.run.name not in unfit]
    better = [c.run for c in rated if c in clear and c.certified.difference > 0]
    above = [c.run for c in rated if c in clean and c not in clear and c.accuracies["defended"].difference > 0]
    if better:
        verdict.append(f"Best against the baseline {own}: {better[0].name}.")
        steps.append(f"Go on with {better[0].name}.")
    elif ordered:
        apart = " that tells the classes apart" if len(rated) < len(ordered) else ""
        verdict.append(f"No run{apart} certifies clearly more images than the baseline {own}.")
        if above:
            why = "clearly better on clean images, no clear difference in certificates"
            steps.append(f"Go on with {above[0].name}: {why}.")
        elif own not in unfit:
            steps.append(f"Keep {own}: no other is clearly better.")
    for c in ordered[:NAMED]:
        for name, words in (("certified", "Certified"), ("defended", "Defended, on clean images")):
            if name == "certified" or c in clean:
                holm = c.corrected[name] if len(ordered) > 1 else None
                said = f"{words}: {difference(c.accuracies[name], c.run.name, own, holm)}"
                (low, high), (base_low, base_high) = (run.rates[name].interval for run in (c.run, c.base))
                if name == "certified" and c in clear and low <= base_high and base_low <= high:
                    said += " Their own intervals overlap, but on the same images the paired difference decides."
                verdict.append(said)
    if len(ordered) > NAMED:
        verdict.append(f"{len(ordered) - NAMED} more are in the table.")
    unclear = [(needed, c) for c in rated if c not in clear and (needed := c.certified.images_needed) is not None]
    for needed, c in sorted(unclear, key=lambda pair: pair[0])[:1]:
        if needed > c.certified.n:
            has = f"the data set has {c.run.available:,}"
            shows = f"about {needed:,} images would be needed to show the difference from {own} (chance 80%)"
            steps.append(f"{c.run.name}: {shows}; {has}.")
    verdict += [f"{name} is not compared with {own}: {reason}." for name, reason in list(unpaired.items())[:NAMED]]
    if any(" about " in reason for reason in unpaired.values()):
        same = "on the same images (data set, split and limit) against the same patch"
        steps.append(f"Certify all runs {same}, so that they can be paired.")
    attacked = [one.run for one in known if "attacked" in attacked_rates(one.run)]
    if not unpaired:
        trusted = [one for one in known if one.run.name not in unfit] or known
        own_runs = [one for one in trusted if one.run.name not in twins] or trusted
        leader = max(own_runs, key=lambda one: (one.certified.rate, one is base))
        found = conclude_one(leader, traced)
        steps += [step for step in found.steps if step not in steps and not (step == ATTACK and attacked)]
        if not ordered:  # there is only this run and attacks on it
            verdict += found.verdict
            attacked = [run for run in attacked if run is not leader.run]
    for run in attacked:
        verdict.append(f"{run.name}: robust accuracy {bounds(run)}.")
        if any(record.broken for record in run.attacks):
            verdict.insert(0, f"Do not rely on {run.name}: {broken_words(run)}.")
    for name, other in list(twins.items())[:NAMED]:
        verdict.append(f"{name} and {other} have the same weights and defence, so there is nothing to choose between.")
    if ordered:
        alike = {said: [name for name in single if single[name] == said] for said in single.values()}
        verdict = [*(f"{shortened(', '.join(names), 60)}: {said}." for said, names in alike.items()), *verdict]
    return Conclusion(verdict, steps[:MOST_STEPS], excluded([one.run for one in known]))


def conclude_training(runs: Sequence[StoredTraining]) -> Conclusion:
    """The conclusion about trainings alone: which epoch was best, and whether accuracy still rose at the end."""
    verdict, steps = [], []
    for run in runs:
        if run.best is None:
            verdict.append(f"{run.name}: no epoch is validated yet.")
            continue
        rate = run.best.certified
        defense, guarantee = validated_with(run)
        words = f"epoch {run.best.epoch} of {len(run.epochs)} is the best, {percent(rate.rate)} certified"
        how = f"by {defense} ({guarantee}) on {rate.n:,} validation images"
        verdict.append(f"{run.name} ({run.strategy}): {words} ({interval_words(rate)}) {how}.")
        if len(run.epochs) > 1 and run.best.epoch == run.epochs[-1].epoch:
            steps.append(f"Train {run.name} for more epochs: the last one is the best.")
    if any(run.best is not None for run in runs):
        steps.append("Certify checkpoint-best on images that selected nothing: validation accuracy is too optimistic.")
    return Conclusion(verdict, steps[:MOST_STEPS])
