"""Sections about trainings: their curves, and what each strategy hides from its own network."""

from __future__ import annotations

from collections.abc import Sequence
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
from patchproof.models import load_checkpoint, match_labels
from patchproof.report._figures import Picture, drawing, line_picture, numbers, series_style, styled
from patchproof.report._gallery import to_bytes
from patchproof.report._tables import Cell, Section, Table
from patchproof.runs import Rate, StoredTraining, class_words, find_images, preprocessing_for
from patchproof.training import STRATEGIES, masking_strategy
from patchproof.types import PatchproofError, printable, shortened, shortened_name

POINTS = 120
"""Points of a loss curve; each is the mean over neighbouring steps."""

COLUMNS = 6
"""Images in the picture of what strategies hide."""

SHADE = (0.84, 0.37, 0.0)
"""Colour of hidden pixels: vermilion, which reads as dark grey in black and white."""

STRIP_SIDE = 112
"""Largest side of these images."""

MOST_PASSES = 100
"""Strategies with more passes per image are left out: drawing their masks would take minutes."""

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
    return [Section("training", "Training", pictures=curves(named), tables=[table]), *worst_masks(named)]


def curves(named: Sequence[tuple[str, StoredTraining]]) -> list[Picture]:
    """The loss, and certified and undefended accuracy after each epoch."""
    learned, validated = ([(name, run) for name, run in named if getattr(run, part)] for part in ("losses", "epochs"))
    pictures, counted = list[Picture](), numbers(len(run.losses) for _, run in learned)
    title = f"Training loss, n = {counted} {'step' if counted == '1' else 'steps'}"
    with drawing("loss", title, f"{title}.", height=3.0 + 0.16 * len(learned)) as (picture, axes):
        for number, (name, run) in enumerate(learned):
            groups = np.array_split(np.array(run.losses, dtype=np.float64), min(POINTS, len(run.losses)))
            means = np.array([group.mean(axis=0) for group in groups])
            line = series_style(number) | ({"marker": "none"} if len(means) > 1 else {})
            axes.plot(means[:, 0], means[:, 1], **line, label=name)
        losses = {run.manifest["identity"]["plan"].get("loss", "cross-entropy") for _, run in learned}
        axes.set(xlabel="optimiser step", ylabel="loss (nats)" if losses == {"cross-entropy"} else "loss")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    pictures += [picture] if learned else []
    ticks = sorted({epoch.epoch for _, run in validated for epoch in run.epochs})
    guarantees = ", ".join(sorted({validated_with(run)[1] for _, run in validated}))
    for key, words in (("certified", f"certified ({guarantees})"), ("undefended", "undefended")) if validated else ():
        series = dict[str, list[Rate | None]]()
        for name, run in validated:
            known = {epoch.epoch: getattr(epoch, key) for epoch in run.epochs}
            series[name] = [known.get(tick) for tick in ticks]
        title = f"Validation, {key}, n = {numbers(rate.n for found in series.values() for rate in found if rate)}"
        pictures.append(line_picture(f"validation-{key}", title, series, "epoch", f"{words}, %", ticks=ticks))
    return pictures


def validated_with(run: StoredTraining) -> tuple[str, str]:
    """The defence that certified the validation images, in words, and its guarantee."""
    name = str(run.manifest["identity"]["plan"].get("validate_with") or "patchcleanser")
    words = "double masking with 3×3 masks" if name == "patchcleanser" else printable(name)
    return words, DEFENSES[name].kind.guarantee if name in DEFENSES else "unknown guarantee"


Strip = tuple[str, Float[Tensor, "b c h w"], list[str]]
"""A name, images, and a caption for each."""


def worst_masks(named: Sequence[tuple[str, StoredTraining]]) -> list[Section]:
    """The paper's illustration: one row per masked copy that a strategy would train on, with the answer and the loss
    below each image. Nothing if no checkpoint or no validation image is there any more."""
    source = next((found for _, run in named if not isinstance(found := find_images(run), str)), None)
    strips, left_out = list[Strip](), list[str]()
    for name, run in named:
        copies = list[Strip]()
        with suppress(PatchproofError, OSError):  # e.g. weights for other classes than the images have
            copies = masked_copies(name, run, source) if source else []
        strips += copies[bool(strips) :]  # the images themselves stand above all rows
        left_out += [] if copies else [name]
    if not strips:
        return []
    with styled():
        figure = Figure(figsize=(1.25 * COLUMNS + 0.3, 1.5 * len(strips) + 0.3), layout="constrained")
        grid = figure.subplots(len(strips), COLUMNS, squeeze=False)
        for row, (name, images, captions) in zip(grid, strips, strict=True):
            row[0].set_ylabel(shortened_name(printable(name), 24), fontsize=8)
            if max(images.shape[2:]) > STRIP_SIDE:
                images = functional.interpolate(images, size=(STRIP_SIDE,) * 2, mode="bilinear", antialias=True)
            for axes, image, caption in zip(row, images, captions, strict=False):
                axes.imshow(to_bytes(image), interpolation="none")
                axes.set_xlabel(caption, fontsize=6.5)
                axes.set(xticks=[], yticks=[])
        title = f"What each strategy hides from its own network, n = {len(strips[0][1])} images"
        figure.suptitle(f"{title}: answer, and loss in nats", fontsize=9.5)
    alt = f"{title}, with the network's answer and its loss below each."
    words = [WORST, f"Left out: {', '.join(left_out)}; {LEFT_OUT}"] if left_out else [WORST]
    return [Section("worst-masks", "What each strategy hides", words, [Picture("worst-masks", alt, figure)])]


def masked_copies(name: str, run: StoredTraining, source: ImageSource) -> list[Strip]:
    """Six images, and their copies under the masks that the strategy chooses with the network that it trained."""
    if run.mask_patch != "3%" or run.strategy not in STRATEGIES:
        return []
    classifier = load_checkpoint(run.folder / "checkpoint-last").eval()
    size = classifier.input_size
    choose = masking_strategy(run.strategy, image_size=size, generator=torch.Generator().manual_seed(0))
    if len(classifier.fill) != 3 or choose.forwards + choose.backwards > MOST_PASSES:
        return []
    how, indices = preprocessing_for(classifier, source.low_resolution, size), spread_indices(source, COLUMNS)
    (batch,) = iterate_batches(source, how, indices, batch_size=COLUMNS, skip_bad=True)
    images = as_images(batch.images, "cpu")
    labels = torch.tensor(match_labels(source.class_names, classifier, source.name))[batch.labels]
    words = class_words(dict(enumerate(classifier.class_names or source.class_names)))
    strips: list[Strip] = [("image", images, [shortened(words[label], 22) for label in labels.tolist()])]
    keep = choose(classifier, images, labels)
    for number, visible in enumerate(keep, start=1):
        logits = network(classifier)(images, visible)
        losses = functional.cross_entropy(logits, labels, reduction="none").tolist()
        answers = [shortened(words[label], 22) for label in logits.argmax(dim=1).tolist()]
        captions = [f"{answer}\n{loss:.2f}" for answer, loss in zip(answers, losses, strict=True)]
        shaded = torch.where(visible, images, torch.tensor(SHADE)[:, None, None])
        strips.append((f"{name} {number}" if len(keep) > 1 else name, shaded, captions))
    return strips
