"""Sections about trainings: their curves, and what each strategy hides from its own network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress

import numpy as np
import torch
from jaxtyping import Float
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor
from torch.nn import functional

from patchproof.data import ImageSource, iterate_batches, spread_indices
from patchproof.defenses import DEFENSES
from patchproof.masking import as_images, network
from patchproof.models import ImageClassifier, load_checkpoint, match_labels
from patchproof.report._figures import Picture, drawing, error_line, numbers, percent_axis, series_style, styled
from patchproof.report._gallery import to_bytes
from patchproof.report._tables import Cell, Section, Table
from patchproof.runs import StoredTraining, class_words, find_images, preprocessing_for
from patchproof.training import STRATEGIES, masking_strategy
from patchproof.types import InputError, PatchproofError, printable, shortened, shortened_name

POINTS = 120
"""Points of a loss curve; each is the mean over neighbouring steps."""

COLUMNS = 6
"""Images in the picture of what strategies hide."""

SHADE = (0.84, 0.37, 0.0)
"""Colour of hidden pixels: vermilion, which reads as dark grey in black and white."""

STRIP_SIDE = 112
MOST_PASSES = 100
"""Strategies with more passes per image are skipped: drawing their masks would take minutes."""

WORST = (
    "Each row is one masked copy that a strategy would train on, chosen with the weights at the end of its training."
)
LEFT_OUT = "shown are the paper's strategies with masks for 3%, if checkpoint-last loads without code of your own."
SEARCHED_FIRST = "Extra passes of memory: for an image searched before; the first search takes as many as greedy's."
VALIDATED = "Accuracies on the validation images at the best epoch, with exact 95% intervals."


def trainings(runs: Sequence[StoredTraining]) -> list[Section]:
    """Curves of the trainings, and what each strategy hides if checkpoints and validation images are still there."""
    if not runs:
        return []
    rows: list[dict[str, Cell]] = [
        {
            "run": run.name,
            "strategy": run.strategy,
            "extra passes per image": run.search_passes,
            "steps": run.losses[-1][0] if run.losses else 0,
            "validated epochs": len(run.epochs),
            "seconds": run.seconds,
            "best epoch": run.best.epoch if run.best else None,
            "undefended": run.best.undefended if run.best else None,
            "certified": run.best.certified if run.best else None,
            "certified by": "{} ({})".format(*validated_with(run)) if run.best else None,
            "best epoch chosen on": run.selected_on,
        }
        for run in runs
    ]
    notes = [VALIDATED, SEARCHED_FIRST] if any(run.strategy == "memory" for run in runs) else [VALIDATED]
    table = Table.of("training", "Training", rows, notes).concise()
    names = [run.name if run.strategy in run.name else f"{run.name} ({run.strategy})" for run in runs]
    named = [(shortened_name(name, 40), run) for name, run in zip(names, runs, strict=True)]
    pictures = [*loss_picture(named), *validation_pictures(named)]
    return [Section("training", "Training", pictures=pictures, tables=[table]), *hidden_by_strategies(named)]


def loss_picture(named: Sequence[tuple[str, StoredTraining]]) -> list[Picture]:
    learned = [(name, run) for name, run in named if run.losses]
    if not learned:
        return []
    counted = numbers(len(run.losses) for _, run in learned)
    title = f"Training loss, n = {counted} {'step' if counted == '1' else 'steps'}"
    with drawing("loss", title, f"{title}.", height=3.0 + 0.16 * len(learned)) as (picture, axes):
        for number, (name, run) in enumerate(learned):
            groups = np.array_split(np.array(run.losses, dtype=np.float64), min(POINTS, len(run.losses)))
            steps, means = ([float(group[:, column].mean()) for group in groups] for column in (0, 1))
            line = series_style(number) | ({"marker": "none"} if len(steps) > 1 else {})
            axes.plot(steps, means, **line, label=name)
        losses = {run.manifest["identity"]["plan"].get("loss", "cross-entropy") for _, run in learned}
        axes.set(xlabel="optimiser step", ylabel="loss (nats)" if losses == {"cross-entropy"} else "loss")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    return [picture]


def validation_pictures(named: Sequence[tuple[str, StoredTraining]]) -> list[Picture]:
    """Certified and undefended accuracy after each epoch, on axes of the same range."""
    validated, pictures = [(name, run) for name, run in named if run.epochs], list[Picture]()
    every = [rate for _, run in validated for epoch in run.epochs for rate in (epoch.certified, epoch.undefended)]
    guarantees = ", ".join(sorted({validated_with(run)[1] for _, run in validated}))
    for key, words in (("certified", f"certified ({guarantees})"), ("undefended", "undefended")) if validated else ():
        title = f"Validation, {key}, n = {numbers(rate.n for rate in every)}"
        alt, height = f"{title}: accuracy after each epoch, 95% intervals.", 3.0 + 0.16 * len(validated)
        with drawing(f"validation-{key}", title, alt, height=height) as (picture, axes):
            for number, (name, run) in enumerate(validated):
                at, rates = [epoch.epoch for epoch in run.epochs], [getattr(epoch, key) for epoch in run.epochs]
                error_line(axes, at, rates, label=name, number=number, of=len(validated))
            last = max(run.epochs[-1].epoch for _, run in validated)
            axes.set(xlabel="epoch", ylabel=f"{words}, %", xlim=(0.5, last + 0.5))
            percent_axis(axes, every)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        pictures.append(picture)
    return pictures


def hidden_by_strategies(named: Sequence[tuple[str, StoredTraining]]) -> list[Section]:
    """A picture of the masks that each of the paper's strategies chooses, if a checkpoint and the images are found."""
    source = next((found for _, run in named if not isinstance(found := find_images(run), str)), None)
    classifiers = {}
    for name, run in named if source is not None else ():
        if run.mask_patch == "3%" and run.strategy in STRATEGIES:
            with suppress(PatchproofError, OSError):
                classifiers[name] = run.strategy, load_checkpoint(run.folder / "checkpoint-last").eval()
    if source is not None and classifiers:
        with suppress(PatchproofError):  # e.g. weights for other classes than the images have
            picture = worst_masks(classifiers, source, seed=0)
            left_out = ", ".join(name for name, _ in named if name not in classifiers)
            words = [WORST, f"Left out: {left_out}; {LEFT_OUT}"] if left_out else [WORST]
            return [Section("worst-masks", "What each strategy hides", words, [picture])]
    return []


def validated_with(run: StoredTraining) -> tuple[str, str]:
    """The defence that certified the validation images, in words, and its guarantee."""
    name = str(run.manifest["identity"]["plan"].get("validate_with") or "patchcleanser")
    words = "double masking with 3×3 masks" if name == "patchcleanser" else printable(name)
    return words, DEFENSES[name].kind.guarantee if name in DEFENSES else "unknown guarantee"


def worst_masks(classifiers: Mapping[str, tuple[str, ImageClassifier]], source: ImageSource, *, seed: int) -> Picture:
    """The paper's illustration: one row per masked copy that a strategy would train on, chosen with the classifier that
    it trained, with the answer and the loss below each image.

    `classifiers` has name -> (strategy, classifier); classifiers with another input size than the first are skipped.
    """
    size = next(iter(classifiers.values()))[1].input_size
    strips: list[tuple[str, Float[Tensor, "b c h w"], list[str]]] = []  # title, images, a caption below each
    for name, (strategy, classifier) in classifiers.items():
        if classifier.input_size != size or len(classifier.fill) != 3:
            continue
        how, indices = preprocessing_for(classifier, source.low_resolution, size), spread_indices(source, COLUMNS)
        (batch,) = iterate_batches(source, how, indices, batch_size=COLUMNS, skip_bad=True)
        images = as_images(batch.images, "cpu")
        labels = torch.tensor(match_labels(source.class_names, classifier, source.name))[batch.labels]
        words = class_words(dict(enumerate(classifier.class_names or source.class_names)))
        if not strips:
            strips.append(("image", images, [shortened(words[label], 22) for label in labels.tolist()]))
        choose = masking_strategy(strategy, image_size=size, generator=torch.Generator().manual_seed(seed))
        keep = choose(classifier, images, labels) if choose.forwards + choose.backwards <= MOST_PASSES else ()
        for number, visible in enumerate(keep, start=1):
            logits = network(classifier)(images, visible)
            losses = functional.cross_entropy(logits, labels, reduction="none").tolist()
            answers = [shortened(words[label], 22) for label in logits.argmax(dim=1).tolist()]
            captions = [f"{answer}\n{loss:.2f}" for answer, loss in zip(answers, losses, strict=True)]
            shaded = torch.where(visible, images, torch.tensor(SHADE)[:, None, None])
            strips.append((f"{name} {number}" if len(keep) > 1 else name, shaded, captions))
    if not strips:
        raise InputError("none of the classifiers takes colour images, so what they were trained on cannot be shown")
    count = len(strips[0][2])
    with styled():
        figure = Figure(figsize=(1.25 * count + 0.3, 1.5 * len(strips) + 0.3), layout="constrained")
        grid = figure.subplots(len(strips), count, squeeze=False)
        for row, (name, images, captions) in zip(grid, strips, strict=True):
            row[0].set_ylabel(shortened_name(printable(name), 24), fontsize=8)
            if max(images.shape[2:]) > STRIP_SIDE:
                images = functional.interpolate(images, size=(STRIP_SIDE,) * 2, mode="bilinear", antialias=True)
            for axes, image, caption in zip(row, images, captions, strict=True):
                axes.imshow(to_bytes(image), interpolation="none")
                axes.set_xlabel(caption, fontsize=6.5)
                axes.set(xticks=[], yticks=[])
        title = f"What each strategy hides from its own network, n = {count} images"
        figure.suptitle(f"{title}: answer, and loss in nats", fontsize=9.5)
        return Picture("worst-masks", title, f"{title}, with the network's answer and its loss below each.", figure)
