"""`patchproof certify`, `attack`, `predict` and `train`: parse, call the run of that name, show what it found."""

from __future__ import annotations

import importlib.util
import io
import logging
import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from rich.markup import escape

from patchproof import runs
from patchproof.attacks import AttackPlan
from patchproof.cli._process import STOP
from patchproof.cli._settings import (
    CertifySettings,
    PredictSettings,
    TrainSettings,
    chosen,
    part,
    with_defense,
)
from patchproof.cli._setup import (
    build_defense,
    choose_device,
    named_network,
    open_classifier,
    open_defense,
    open_source,
    run_folder,
)
from patchproof.cli._show import (
    MARGINS,
    Console,
    RunBar,
    TrainingBar,
    clock,
    new_table,
    percent,
    print_json,
    print_table,
    remarks_text,
    results_table,
)
from patchproof.cli._sources import STANDARD_INPUT, in_flags, resolved
from patchproof.data import BadImageError, ImageSource, decode, open_dataset, spread_indices
from patchproof.defenses import DEFENSES, MaskedDefense
from patchproof.geometry import footprint_words, parse_patches, patch_words, size_words
from patchproof.masking import weight_names
from patchproof.models import EMBEDDED, architecture_of, match_labels, replace_head
from patchproof.recipes import find_recipe, needs_training
from patchproof.runs._predict import SMALL
from patchproof.runs.executors import Executor
from patchproof.training import Plan
from patchproof.types import CheckError, InputError, PatchproofError, Size, visible

SECONDS_FOR_MAIN = 3.0
"""What is wrong for every process is said by the main one; the launcher then ends the others before they say it too."""

PASSES_WORTH_A_WORD = 50_000
"""A run that may take more says at its start how long that is."""

PASSES_PER_STEP = 30
"""About as many take a step of an attack."""

PROMISE = (
    "Certified means: whatever {patches} of at most {patch} {are} put anywhere on this very image, the answer {stays}. "
    "It does not say that the answer is right, nor that the image has not been patched already."
)


def evaluate(settings: CertifySettings) -> int:
    """`certify`, or with the settings of an attack `attack`."""
    attack, executor = isinstance(settings, AttackPlan), runs.launched()
    bar = RunBar(Console(stderr=True), "attack" if attack else "certify", shown=not runs.local_rank())
    try:
        results, title = certified(settings, bar)
    except PatchproofError:
        if executor.rank:
            time.sleep(SECONDS_FOR_MAIN)
        raise
    if executor.rank or results is None:
        return 0
    stdout, content = Console(), results.content
    broken = content.get("broken", ())
    if settings.json:
        print_json({"folder": str(results.folder), **content})
        return 1 if broken else 0
    stdout.print(results_table(content, title=title))
    for reason in content["partial"]:
        stdout.print(f"[yellow]partial:[/] {escape(in_flags(reason, None))}")
    cost, steps = content["cost"], content["audit"]["steps"]
    shares = [f"{count / max(1, cost['forwards']):.1%} in {step}" for step, count in steps.items()]
    again = f", labels decided again: {' and '.join(shares)}" if shares else ""
    masked = "masked " * issubclass(DEFENSES[settings.defense].kind, MaskedDefense)
    stdout.print(f"{cost['forwards_per_image']:.1f} {masked}passes per image{again}, {cost['seconds']:.0f} s")
    if attack:
        stdout.print(f"{cost['passes_per_image']:.0f} passes per image to attack it")
    stdout.print(f"records, manifest and results: {escape(str(results.folder))}", soft_wrap=True)
    notes = [needs_training(content["defense"], results.undefended.rate, results.defended.rate)]
    one_class = runs.one_answer([record for record in results.records if record.error is None])
    if one_class is not None:  # of that class it is certified, and recognises nothing
        run: Any = runs.read_run(results.folder)
        label, own, rest = one_class
        notes.append(
            f"the network answers one class nearly always, {run.class_name(label)}: it is right on {own.k} of {own.n} "
            f"images of it and on {rest.k} of {rest.n} others; certificates for that class say nothing about "
            "recognition"
        )
    for note in filter(None, notes):
        stdout.print(f"[yellow]note:[/] {escape(note)}", soft_wrap=True, highlight=False)
    for index in broken:
        Console(stderr=True).print(
            f"[bold red]broken:[/] image {index} is certified and a patch changes its answer; image, patch and label "
            f"tables are in {escape(str(results.folder / 'broken' / str(index)))}",
            soft_wrap=True,
        )
    return 1 if broken else 0


def certified(settings: Any, bar: RunBar, executor: Executor | None = None) -> tuple[Any, str]:
    """The results of a certification or an attack, and what they are about; None where only the cost is asked for."""
    with bar.progress:
        plan = part(settings, AttackPlan) if isinstance(settings, AttackPlan) else None
        model, weights = named_network(settings)
        settings = replace(settings, model=settings.model or (model if weights == EMBEDDED else None), weights=weights)
        source = open_source(settings)
        folder = run_folder("certify" if plan is None else "attack", settings, source)
        defense = open_defense(settings, source)
        try:
            match_labels(source.class_names, defense.classifier, source.name)  # before minutes are spent or estimated
        except InputError as error:
            if settings.dataset != CertifySettings.dataset:
                raise
            raise InputError(f"{settings.dataset} is the default: give your images as --dataset; {error}") from error
        count, cost = len(spread_indices(source, settings.limit)), None
        steps = 0 if plan is None else plan.steps * plan.restarts * plan.places
        if settings.dry_run or count * (defense.most_passes + PASSES_PER_STEP * steps) > PASSES_WORTH_A_WORD:
            bar.say("timing a few passes")
            cost = runs.estimate_cost(defense, count, plan)
        if cost is not None and settings.dry_run:
            show_cost(cost, settings.json)
            return None, ""
        if cost is not None and bar.shown:
            logging.getLogger("patchproof").info(cost_words(cost))
        options: dict[str, Any] = chosen(settings, "resume", "limit", "workers", "skip_bad")
        options |= {"folder": folder, "config": resolved(settings), "executor": executor}
        first = "measuring the margin that a label needs" if hasattr(defense, "with_engine") else "checking the network"
        options |= {"on_measure": lambda: bar.say(first)}
        options |= {"on_start": bar.start, "on_record": bar.add}
        threat, masks = defense.threat, getattr(defense, "masks", None)
        against = f"{threat.words} anywhere on {size_words(threat.image_size)}"
        if settings.threat_space == "native":
            reached = f"{footprint_words(*threat.patch_sizes)} pixels of the {size_words(threat.image_size)} input"
            against = f"{threat.how_many} of {patch_words(settings.patch)} of the original image ({reached})"
        title = (
            f"{defense.classifier.architecture} on {source.name} (split {source.split}), {defense.name} "
            f"({defense.guarantee}): {against}{'' if masks is None else f', {masks.words}'}"
        )
        if plan is None:
            return runs.certify(defense, source, **options), title
        return runs.attack(defense, source, plan, on_step=bar.step, **options), title


def show_cost(cost: runs.Cost | runs.TrainingCost, as_json: bool) -> None:
    if as_json:
        print_json(asdict(cost))
    else:
        sys.stdout.write(f"{cost_words(cost)}\n")


def cost_words(cost: runs.Cost | runs.TrainingCost) -> str:
    times = " to ".join(dict.fromkeys((clock(cost.fewest_seconds), clock(math.ceil(cost.most_seconds)))))
    if isinstance(cost, runs.TrainingCost):
        memory = "" if cost.peak_bytes is None else f"; {cost.peak_bytes / 1e9:,.1f} GB"
        return (
            f"{cost.epochs} epoch{'s' * (cost.epochs != 1)}, {cost.steps:,} steps of {cost.seconds_per_step:.2g} s, "
            f"{cost.validation_images} images validated after each epoch: {times}{memory}"
        )
    attacks = f"; attacks up to {clock(math.ceil(cost.attack_seconds))} more" if cost.attack_seconds else ""
    passes = " to ".join(dict.fromkeys((f"{cost.fewest_passes:,}", f"{cost.most_passes:,}")))
    return (
        f"{cost.images:,} image{'s' * (cost.images != 1)}{f' with {cost.masks:,} masks' if cost.masks else ''}: "
        f"{passes} passes, {times} at {cost.passes_per_second:,.0f} passes/s; "
        f"{(cost.table_bytes + (cost.peak_bytes or 0)) / 1e9:,.1f} GB{attacks}"
    )


def predict(images: list[Path], settings: PredictSettings) -> int:
    """Answers on standard output, in the order of the files; what cannot be used is named on standard error."""
    files: list[Any] = []
    for path in images:
        if path != Path(STANDARD_INPUT):
            files += runs.image_files(path)
            continue
        try:
            files.append(decode(io.BytesIO(sys.stdin.buffer.read())))
        except BadImageError as error:
            raise CheckError(f"standard input: {error.reason}") from error
        files[-1].filename = "-"
    status = Console(stderr=True)
    like = None if settings.like is None else runs.read_run(settings.like)
    if not isinstance(like, runs.StoredCertification | None):
        raise InputError(f"{settings.like} is no certification; give the folder of a certify run")
    classifier = open_classifier(settings)
    bar = RunBar(status, "predict")
    defense = defense_for(settings, like, classifier, bar)
    good: list[runs.Prediction] = []

    def show(answer: runs.Prediction | runs.Unusable) -> None:
        if isinstance(answer, runs.Unusable):
            status.print(f"[red]cannot use[/] {escape(visible(answer.path))}: {escape(answer.reason)}", soft_wrap=True)
            if settings.json:
                print_json({"path": answer.path, "error": answer.reason})
            return
        good.append(answer)
        bar.at(len(good), "")
        if settings.json:
            values = asdict(answer)
            first = {name: values.pop(name) for name in ("path", "label", "name")}
            print_json(first | values.pop("remarks") | values)

    bar.begin(0, len(files))
    with bar.progress:
        found = runs.predict(defense, files, on_answer=show, preprocessing=getattr(like, "preprocessing", None))
    if found.misjudged:
        status.print(f"[yellow]note:[/] float32 answered {found.misjudged} images that a fast precision misjudged")
    if good and not settings.json:
        show_predictions(good, settings, like, classifier)
    return 0 if len(good) == len(files) else 1


def defense_for(settings: PredictSettings, like: Any, classifier: Any, bar: RunBar) -> Any:
    """The defence of a certification (--like), or one with τ measured on generated images; native patches have another
    footprint for each size of image, and so another defence."""
    if like is not None:
        return runs.defense_like(like, classifier)
    if settings.threat_space == "input":  # what is wrong with the flags is no fault of the images
        build_defense(settings, classifier, low_resolution=False)
    engine = None

    @cache
    def defense(*native: Size) -> Any:
        nonlocal engine
        small = all(max(size) < SMALL for size in native)
        built = build_defense(settings, classifier, low_resolution=small, native=native)
        if not hasattr(built, "with_engine"):  # needs no τ
            return built
        if engine is None:
            bar.say("measuring the margin that a label needs, on generated images")
            engine, _ = runs.measure_on_generated(built)  # type: ignore[misc]
            bar.begin(0, bar.total)  # no image's time
        return built.with_engine(engine)

    return lambda size: defense(size) if settings.threat_space == "native" else defense()


def show_predictions(answers: Sequence[runs.Prediction], settings: PredictSettings, like: Any, classifier: Any) -> None:
    console, remarks = Console(), list(answers[0].remarks)
    try:  # the folder of all is said once, so that names fit on a line
        shared = os.path.commonpath([Path(found.path).parent for found in answers])
    except ValueError:  # some paths are absolute, some are not
        shared = ""
    if shared:
        shared = shared.rstrip(os.sep) + os.sep
        console.print(f"images in {escape(visible(shared))}", soft_wrap=True, highlight=False)
    defense, guarantee, patches = settings.defense, DEFENSES[settings.defense].kind.guarantee, settings.patches
    if like is not None:
        defense, guarantee, patches = like.defense, like.guarantee, like.patches
    numbers = next((f"margin, {unit}" for unit, names in MARGINS.items() if defense in names), "margin"), "passes"
    table = new_table("image", "answer", *remarks, "certified", *numbers, numbers=numbers)
    table.caption = remarks_text(runs.network_remarks(classifier))
    for found in answers:
        certified = "[bold green]yes[/]" if found.certified else "no"
        margin = "–" if found.margin is None else f"{found.margin:.3f}"
        values = [found.remarks[name] for name in remarks]
        said = [("no", "yes")[value] if isinstance(value, bool) else str(value) for value in values]
        name = escape(visible(found.path.removeprefix(shared)))
        table.add_row(name, escape(found.name), *said, certified, margin, str(found.forwards))
    print_table(console, table)
    size = classifier.input_size
    native, text = settings.threat_space == "native", settings.patch
    sizes = () if native else parse_patches(text, size)
    if like is not None:
        native, text, sizes = like.native, str(like.config.get("patch")), like.patch_sizes
    patch = f"{size_words(*sizes)} pixels (of the {size_words(size)} network input that this image is resized to"
    if native:
        patch = f"{patch_words(text)} (of the original image"
    patch += ")" if like is None else f"; the size that {escape(visible(str(settings.like)))} certified)"
    stays = "stays the same" if guarantee == "recovery" else "stays the same or becomes an alarm"
    count = {"patches": "one patch", "are": "is"} if patches == 1 else {"patches": "two patches", "are": "are"}
    console.print(PROMISE.format(patch=patch, stays=stays, **count), style="dim")


def train(settings: TrainSettings) -> int:
    """The best epoch and where everything is; for a recipe, the certifications that belong to it."""
    found = trained(settings, Console(stderr=True))
    if found is None:
        return 0
    console, best = Console(), found.results["best"]
    if settings.json:
        print_json({"folder": str(found.folder), **found.results})
    else:
        how = "3×3 masks" if settings.validate_with == "patchcleanser" else settings.validate_with
        console.print(
            f"best epoch {best['epoch']} of {settings.epochs}: undefended {percent(best['undefended']['rate'])}, "
            f"certified {percent(best['certified']['rate'])} of {best['certified']['n']} validation images ({how})",
            soft_wrap=True,
        )
        if best.get("one_class"):  # a training begun by an earlier version does not say
            note = "the network answers one class nearly always, so these rates say nothing about recognition"
            console.print(f"[yellow]note:[/] {note}", soft_wrap=True, highlight=False)
        console.print(f"checkpoints and log: {escape(str(found.folder))}", soft_wrap=True)
    if settings.recipe and found.folder is not None:
        certify_recipe(settings, found.folder, console)
    return 0


def trained(settings: TrainSettings, console: Console) -> runs.Trained | None:
    """None where only the cost is asked for, and on processes that are not the main one."""
    from patchproof.training.loop import start_accelerator

    tracker = None if settings.track == "none" else settings.track
    if tracker is not None and importlib.util.find_spec(tracker) is None:
        raise InputError(f"--track {tracker} needs a package that is not installed: pip install 'patchproof[track]'")
    start = find_recipe(settings.recipe).start if settings.recipe else None
    if start is not None and settings.weights is None:
        raise InputError(
            f"recipe {settings.recipe} goes on from the network of another: first `patchproof train --recipe {start} "
            f"--output runs/{start}`, then add --weights runs/{start}/checkpoint-last"
        )
    plan: Plan = part(replace(settings, teacher=None), Plan)
    accelerator = start_accelerator(plan, choose_device(settings.device), log_with=tracker)
    if settings.model is None and settings.weights is None:
        raise InputError("no network is named to train: give --weights, e.g. a checkpoint folder, or --model")
    if len(weight_names(settings.weights or "-")) > 1 or (settings.mirror and settings.teacher is None):
        raise InputError("train fine-tunes one network; several, and --mirror, are for its --teacher")
    source, held_out, tested = open_sources(settings)
    folder = run_folder("train", settings, source)
    if settings.teacher is not None:
        for name in weight_names(settings.teacher):
            if name == "random" or architecture_of(name) is None:
                raise InputError(f"--teacher takes checkpoint folders, `embedded` or `zoo`; `{name}` is none of them")
        named = replace(settings, model=None, weights=settings.teacher, drop_tokens=False)
        plan = replace(plan, teacher=open_classifier(named))
    classifier = open_classifier(replace(settings, mirror=False), source.class_names)
    if sorted(classifier.class_names or ()) != sorted(source.class_names):
        classifier = replace_head(classifier, len(source.class_names), source.class_names, seed=settings.seed)
    how = chosen(settings, "limit", "workers", "skip_bad", "keep_decoded")
    size = classifier.input_size
    begins = f"begins with {classifier.architecture}, {classifier.source}; input {size_words(size)} pixels"
    if max(size) < SMALL and not source.low_resolution:
        begins += ", to which larger images are shrunk: --image-size 224 keeps more of them"
    if settings.dry_run:
        if accelerator.is_main_process:
            console.print(escape(f"{begins}\ntiming a few steps"), soft_wrap=True, highlight=False)
        cost = runs.estimate_training(classifier, source, plan, validation=held_out, accelerator=accelerator, **how)
        if accelerator.is_main_process:
            show_cost(cost, settings.json)
        return None
    if tracker is not None:
        accelerator.project_configuration.set_directories(str(folder))
    train, validated, test = (f"{images.name}, split {images.split}" for images in (source, held_out, tested))
    learns = f"learns from {train}; the best epoch is chosen on {validated}; "
    if held_out.listing_sha256() == tested.listing_sha256():
        learns += "these are also the images that certify tests: checkpoint-best is not independent of them"
    elif source.listing_sha256() == tested.listing_sha256():
        learns += "certify tests the images it learns from, unless it is given another --split"
    else:
        learns += f"{test} is left to test"
    bar = TrainingBar(console, accelerator, begins=begins, learns=learns)
    shown: dict[str, Any] = {"on_start": bar.start, "on_step": bar.step, "on_epoch": bar.epoch}
    how |= chosen(settings, "resume", "checkpoint_minutes") | {"folder": folder, "config": resolved(settings)}
    with bar.progress, STOP.patiently():
        found = runs.train(
            classifier, source, plan, validation=held_out, test=tested, accelerator=accelerator, **shown, **how
        )
    return found if accelerator.is_main_process else None


def open_sources(settings: TrainSettings) -> tuple[ImageSource, ImageSource, ImageSource]:
    """The images to learn from; never the same, those that choose the best epoch; and those that `certify` takes."""
    folder = Path(settings.dataset)
    if not (settings.split or settings.validation) and folder.is_dir() and not (folder / "train").is_dir():
        raise InputError(
            f"{folder} has no folder `train`; if it holds the classes itself, name others with --validation FOLDER"
        )
    source = open_source(replace(settings, split=settings.split or (None if settings.validation else "train")))
    if settings.validation:
        held_out = tested = open_dataset(settings.validation)
    else:
        held_out, tested = (open_source(replace(settings, split=split)) for split in ("val", None))
    here, there = (getattr(images, "root", None) for images in (source, held_out))
    same = (source.name, source.split) == (held_out.name, held_out.split)
    if here is not None and there is not None:
        same = Path(here).resolve() == Path(there).resolve()
    if same:
        raise InputError("the validation images are the training images; name others with --validation FOLDER")
    unknown = sorted(set(held_out.class_names) - set(source.class_names))
    if unknown:
        raise InputError(f"the validation images have {len(unknown)} classes to learn nothing about, e.g. {unknown[0]}")
    return source, held_out, tested


def certify_recipe(settings: TrainSettings, folder: Path, console: Console) -> None:
    """Every patch and mask set of the recipe's row, with the paper's number beside ours."""
    recipe = find_recipe(str(settings.recipe))
    kind = with_defense(CertifySettings, recipe.defense)
    shared = {f.name for f in fields(kind)} & {f.name for f in fields(settings)}
    left_out = {"batch_size", "compile", "precision", "model", "mirror", "split", "config"}
    common = chosen(settings, *(shared - left_out))
    for expected in recipe.expectations:
        masks = "" if expected.masks is None else f"-{expected.masks}x{expected.masks}"
        output = folder / f"certify-{expected.patch}{masks}"
        values = common | {
            "weights": str(folder / "checkpoint-last"),
            "dataset": settings.validation or settings.dataset,
            "patch": expected.patch,
            "defense": recipe.defense,
            **recipe.options_for(expected),
            "output": output,
            "resume": (output / "manifest.json").exists(),
        }
        bar = RunBar(Console(stderr=True), "certify")
        results, title = certified(kind(**values), bar, runs.InProcess())  # the other processes have left
        if settings.json:
            paper = None if expected.certified is None else asdict(expected)
            print_json({"folder": str(results.folder), "paper": paper, **results.content})
            continue
        console.print(results_table(results.content, title=title))
        if expected.certified is not None:
            clean = f"clean {expected.defended:.1f}%, " if expected.defended is not None else ""
            console.print(f"the paper (Table {expected.table}): {clean}certified {expected.certified:.1f}%\n")
