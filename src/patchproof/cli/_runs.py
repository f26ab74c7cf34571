"""`patchproof certify`, `attack`, `predict` and `train`: call the run of that name, and show what it found."""

from __future__ import annotations

import importlib.util
import io
import logging
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from rich.markup import escape

from patchproof import runs
from patchproof.attacks import AttackPlan
from patchproof.cli._process import STOP
from patchproof.cli._settings import CertifySettings, PredictSettings, TrainSettings, chosen, part, with_defense
from patchproof.cli._setup import build_defense, named_network, open_classifier, open_defense, open_source, run_folder
from patchproof.cli._show import (
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
from patchproof.data import BadImageError, decode, spread_indices
from patchproof.defenses import DEFENSES
from patchproof.geometry import parse_patches, parse_size, patch_words, size_words
from patchproof.masking import weight_names
from patchproof.models import EMBEDDED, architecture_of, match_labels, replace_head, rewrap
from patchproof.recipes import find_recipe, needs_training
from patchproof.runs.executors import Executor
from patchproof.training import Plan
from patchproof.types import CheckError, InputError, Size, count_words, visible

PASSES_WORTH_A_WORD = 50_000
"""A run that may take more passes says at its start how long they take."""

PASSES_PER_STEP = 30
"""About the number of passes in one step of an attack."""

MEASURING = "measuring the margin that a label needs"

PROMISE = (
    "Certified means: whatever {patches} of at most {size} {verb} put anywhere on this very image, the answer {stays}. "
    "It does not say that the answer is right, nor that the image has not been patched already."
)


def evaluate(settings: CertifySettings) -> int:
    """Run `certify`, or `attack` if the settings are those of an attack, and show the results."""
    attack, executor = isinstance(settings, AttackPlan), runs.launched()
    bar = RunBar(Console(stderr=True), "attack" if attack else "certify", shown=not runs.local_rank())
    results = certified(settings, bar)
    if executor.rank or results is None:
        return 0
    content = results.content
    stored: Any = runs.read_run(results.folder)
    broken = content.get("broken", ())
    unfit = needs_training(content["defense"], results.undefended.rate, results.defended.rate)
    notes = [note for note in (unfit, runs.one_class_words(stored)) if note]
    if settings.json:
        print_json({"folder": str(results.folder), **content, "remarks": [*content["remarks"], *notes]})
        return 1 if broken else 0
    stdout, cost = Console(), content["cost"]
    stdout.print(results_table(content, title=runs.run_title(stored)))
    for reason in content["partial"]:
        stdout.note(in_flags(reason, None), "partial")
    masked = "masked passes" if stored.masks else "passes"
    again = [f"{n / max(1, cost['forwards']):.1%} in {step}" for step, n in content["audit"]["steps"].items()]
    redone = f", labels decided again: {' and '.join(again)}" if again else ""
    stdout.plain(f"{cost['forwards_per_image']:.1f} {masked} per image{redone}, {cost['seconds']:.0f} s")
    if attack:
        stdout.plain(f"{cost['passes_per_image']:.0f} passes per image to attack it")
    stdout.plain(f"records, manifest and results: {results.folder}")
    for note in notes:
        stdout.note(note)
    for index in broken:
        words = "is certified and a patch changes its answer; image, patch and label tables are in"
        place = results.folder / "broken" / str(index)
        Console(stderr=True, quiet=False).note(f"image {index} {words} {place}", "broken", "bold red")
    return 1 if broken else 0


def certified(settings: Any, bar: RunBar, executor: Executor | None = None) -> Any:
    """The results of a certification or an attack; None after a dry run."""
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
        images = len(spread_indices(source, settings.limit))
        steps = 0 if plan is None else plan.steps * plan.restarts * plan.places
        if settings.dry_run or images * (defense.most_passes + PASSES_PER_STEP * steps) > PASSES_WORTH_A_WORD:
            bar.say("timing a few passes")
            cost = runs.estimate_cost(defense, images, plan)
            if settings.dry_run:
                show_cost(cost, settings.json)
                return None
            if cost is not None and bar.shown:
                logging.getLogger("patchproof").info(cost_words(cost))
        measuring = MEASURING if hasattr(defense, "with_engine") else "checking the network"
        options: dict[str, Any] = {
            **chosen(settings, "resume", "limit", "workers", "skip_bad"),
            "folder": folder,
            "config": resolved(settings),
            "executor": executor,
            "on_measure": lambda: bar.say(measuring),
            "on_start": bar.start,
            "on_record": bar.add,
        }
        if plan is None:
            return runs.certify(defense, source, **options)
        return runs.attack(defense, source, plan, on_step=bar.step, **options)


def show_cost(cost: Any, as_json: bool) -> None:
    if as_json:
        print_json(asdict(cost))
    else:
        Console().plain(cost_words(cost))


def cost_words(cost: runs.Cost | runs.TrainingCost) -> str:
    times = " to ".join(dict.fromkeys((clock(cost.fewest_seconds), clock(math.ceil(cost.most_seconds)))))
    if isinstance(cost, runs.TrainingCost):
        steps = f"{count_words(cost.epochs, 'epoch', 'epochs')}, {count_words(cost.steps, 'step', 'steps')}"
        memory = "" if cost.peak_bytes is None else f"; {cost.peak_bytes / 1e9:,.1f} GB"
        validated = f"{cost.validation_images} images validated after each epoch"
        return f"{steps} of {cost.seconds_per_step:.2g} s, {validated}: {times}{memory}"
    images = count_words(cost.images, "image", "images")
    masks = f" with {cost.masks:,} masks" if cost.masks else ""
    passes = " to ".join(dict.fromkeys((f"{cost.fewest_passes:,}", f"{cost.most_passes:,}")))
    memory = f"{(cost.table_bytes + (cost.peak_bytes or 0)) / 1e9:,.1f} GB"
    attacks = f"; attacks up to {clock(math.ceil(cost.attack_seconds))} more" if cost.attack_seconds else ""
    return f"{images}{masks}: {passes} passes, {times} at {cost.passes_per_second:,.0f} passes/s; {memory}{attacks}"


def predict(images: list[Path], settings: PredictSettings) -> int:
    """Print the answers in the order of the files, and name on standard error what cannot be used."""
    files: list[Any] = []
    for path in images:
        files += [standard_input()] if path == STANDARD_INPUT else runs.image_files(path)
    like = None if settings.like is None else runs.read_run(settings.like)
    if not isinstance(like, runs.StoredCertification | None):
        raise InputError(f"{settings.like} is no certification; give the folder of a certify run")
    classifier = open_classifier(settings if like is None else sized_like(like, settings))
    status = Console(stderr=True)
    bar = RunBar(status, "predict")
    defense = runs.defense_like(like, classifier) if like else defense_for(settings, classifier, bar)
    good: list[runs.Prediction] = []
    remarks = runs.network_remarks(classifier)

    def show(answer: runs.Prediction | runs.Unusable) -> None:
        if isinstance(answer, runs.Unusable):
            status.plain(f"cannot use {visible(answer.path)}: {answer.reason}")
            if settings.json:
                print_json({"path": answer.path, "error": answer.reason})
            return
        good.append(answer)
        bar.at(len(good), "")
        if settings.json:
            values = asdict(answer)
            first = {name: values.pop(name) for name in ("path", "label", "name")}
            print_json(first | values.pop("remarks") | values | ({"remarks": remarks} if remarks else {}))

    bar.begin(0, len(files))
    with bar.progress:
        found = runs.predict(defense, files, on_answer=show, preprocessing=like.preprocessing if like else None)
    if found.misjudged:
        status.note(f"float32 answered {found.misjudged} images that a fast precision misjudged")
    if good and not settings.json:
        show_predictions(good, settings, like, classifier)
    return 0 if len(good) == len(files) else 1


def sized_like(like: runs.StoredCertification, settings: PredictSettings) -> PredictSettings:
    """The settings with the input size of the run: its patch and its masks are for no other."""
    size = like.image_size
    if size is None:  # refused by `defense_like`
        return settings
    if settings.image_size and parse_size(settings.image_size) != size:
        words = f"{visible(str(settings.like))} certified images of {size_words(size)}, not {settings.image_size}"
        raise InputError(f"{words}; --like takes the settings of the run: leave out --image-size")
    return replace(settings, like=None, image_size="x".join(map(str, size)))


def standard_input() -> Any:
    try:
        image: Any = decode(io.BytesIO(sys.stdin.buffer.read()))
    except BadImageError as error:
        raise CheckError(f"standard input: {error.reason}") from error
    image.filename = "-"
    return image


def defense_for(settings: PredictSettings, classifier: Any, bar: RunBar) -> Any:
    """The defence of the settings; if the patch is measured on the original image, one for each size of image."""

    def build(size: Size) -> Any:
        return build_defense(
            settings, classifier, native_sizes={size: "this image"}, low_resolution=runs.is_small(size)
        )

    by_size = runs.with_shared_tau(build, lambda: bar.say(f"{MEASURING}, on generated images"))
    return by_size if settings.threat_space == "native" else by_size(classifier.input_size)


def show_predictions(answers: Sequence[runs.Prediction], settings: PredictSettings, like: Any, classifier: Any) -> None:
    source = ""
    if like is not None:  # the threat is that of the run
        sizes = ",".join(f"{height}x{width}px" for height, width in like.patch_sizes)
        threat = {"patches": like.patches, "threat_space": "native" if like.native else "input"}
        patch = str(like.config["patch"]) if like.native else sizes
        source = f"; the size that {visible(str(settings.like))} certified"
        settings = replace(settings, like=None, defense=like.defense, patch=patch, **threat)
    console, kind, remarks = Console(), DEFENSES[settings.defense].kind, list(answers[0].remarks)
    numbers = f"margin, {kind.margin_unit}" if hasattr(kind, "margin_unit") else "margin", "passes"
    table = new_table("image", "answer", *remarks, "certified", *numbers, numbers=numbers)
    table.caption = remarks_text(runs.network_remarks(classifier))
    for found in answers:
        certified = "[bold green]yes[/]" if found.certified else "no"
        margin = "–" if found.margin is None else f"{found.margin:.3f}"
        values = [found.remarks[remark] for remark in remarks]
        words = [("no", "yes")[value] if isinstance(value, bool) else str(value) for value in values]
        image, answer = escape(visible(found.path)), escape(found.name)
        table.add_row(image, answer, *words, certified, margin, str(found.forwards))
    print_table(console, table)
    if settings.threat_space == "native":
        size = f"{patch_words(settings.patch)} (of the original image{source})"
    else:
        sides = size_words(*parse_patches(settings.patch, classifier.input_size))
        where = f"of the {size_words(classifier.input_size)} network input that this image is resized to"
        size = f"{sides} pixels ({where}{source})"
    patches, verb = ("one patch", "is") if settings.patches == 1 else ("two patches", "are")
    stays = "stays the same" if kind.guarantee == "recovery" else "stays the same or becomes an alarm"
    promise = PROMISE.format(patches=patches, size=size, verb=verb, stays=stays)
    console.print(promise, style="dim", markup=False)


def train(settings: TrainSettings) -> int:
    """Train, show the best epoch and where everything is, and certify what a recipe names."""
    found = trained(settings, Console(stderr=True))
    if found is None:
        return 0
    console, best = Console(), found.results["best"]
    if settings.json:
        print_json({"folder": str(found.folder), **found.results})
    else:
        how = "3×3 masks" if settings.validate_with == "patchcleanser" else settings.validate_with
        rates = f"undefended {percent(best['undefended']['rate'])}, certified {percent(best['certified']['rate'])}"
        validated = f"{rates} of {best['certified']['n']} validation images ({how})"
        console.plain(f"best epoch {best['epoch']} of {settings.epochs}: {validated}")
        if best.get("one_class"):  # missing in trainings that an earlier version began
            console.note(runs.ONE_CLASS)
        console.plain(f"checkpoints and log: {found.folder}")
    if settings.recipe and found.folder is not None:
        certify_recipe(settings, found.folder, console)
    return 0


def trained(settings: TrainSettings, console: Console) -> runs.Trained | None:
    """The finished training; None after a dry run, and on processes other than the main one."""
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
    accelerator = start_accelerator(plan, runs.choose_device(settings.device), log_with=tracker)
    if settings.model is None and settings.weights is None:
        raise InputError("no network is named to train: give --weights, e.g. a checkpoint folder, or --model")
    if len(weight_names(settings.weights or "-")) > 1 or (settings.mirror and settings.teacher is None):
        raise InputError("train fine-tunes one network; several, and --mirror, are for its --teacher")
    images = runs.training_images(settings.dataset, **chosen(settings, "validation", "data_dir", "split", "download"))
    source = images.train
    folder = run_folder("train", settings, source)
    if settings.teacher is not None:
        plan = replace(plan, teacher=open_teacher(settings))
    classifier, names = open_classifier(replace(settings, mirror=False), source.class_names), source.class_names
    if classifier.class_names is None and classifier.num_classes == len(names):
        classifier = rewrap(classifier, class_names=names)  # outputs are matched by position, as `certify` does
    elif sorted(classifier.class_names or ()) != sorted(names):
        classifier = replace_head(classifier, len(names), names, seed=settings.seed)
    size = classifier.input_size
    begins = f"begins with {classifier.architecture}, {classifier.source}; input {size_words(size)} pixels"
    if runs.is_small(size) and not source.low_resolution:
        begins += ", to which larger images are shrunk: --image-size 224 keeps more of them"
    options: dict[str, Any] = chosen(settings, "limit", "workers", "skip_bad", "keep_decoded")
    options |= {"validation": images.validation, "accelerator": accelerator}
    if settings.dry_run:
        if accelerator.is_main_process:
            console.plain(f"{begins}\ntiming a few steps")
        cost = runs.estimate_training(classifier, source, plan, **options)
        if accelerator.is_main_process:
            show_cost(cost, settings.json)
        return None
    if tracker is not None:
        accelerator.project_configuration.set_directories(str(folder))
    bar = TrainingBar(console, accelerator, begins=begins, learns=images.words)
    options |= chosen(settings, "resume", "checkpoint_minutes")
    options |= {"test": images.test, "folder": folder, "config": resolved(settings)}
    options |= {"on_start": bar.start, "on_step": bar.step, "on_epoch": bar.epoch}
    with bar.progress, STOP.patiently():
        found = runs.train(classifier, source, plan, **options)
    return found if accelerator.is_main_process else None


def open_teacher(settings: TrainSettings) -> Any:
    for name in weight_names(str(settings.teacher)):
        if name == "random" or architecture_of(name) is None:
            raise InputError(f"--teacher takes checkpoint folders, `embedded` or `zoo`; `{name}` is none of them")
    return open_classifier(replace(settings, model=None, weights=settings.teacher, drop_tokens=False))


def certify_recipe(settings: TrainSettings, folder: Path, console: Console) -> None:
    """Certify every patch and mask set of the recipe, and show the paper's number below ours."""
    recipe = find_recipe(str(settings.recipe))
    kind = with_defense(CertifySettings, recipe.defense)
    shared = {f.name for f in fields(kind)} & {f.name for f in fields(settings)}
    common = chosen(settings, *(shared - {"batch_size", "compile", "precision", "model", "mirror", "split", "config"}))
    different = [
        name
        for name in ("model", "weights", "dataset", "strategy")
        if recipe.training.get(name) not in (None, getattr(settings, name))
    ]
    tested = settings.dataset if runs.has_splits(settings.dataset) else settings.validation
    for expected in recipe.expectations:
        masks = "" if expected.masks is None else f"-{expected.masks}x{expected.masks}"
        output = folder / f"certify-{expected.patch}{masks}"
        values = common | {
            "weights": str(folder / "checkpoint-last"),
            "dataset": tested,
            "patch": expected.patch,
            "defense": recipe.defense,
            **recipe.options_for(expected),
            "output": output,
            "resume": (output / "manifest.json").exists(),
        }
        bar = RunBar(Console(stderr=True), "certify")
        results = certified(kind(**values), bar, runs.InProcess())  # the other processes have left
        if settings.json:
            paper = None if expected.certified is None or different else asdict(expected)
            print_json({"folder": str(results.folder), "paper": paper, **results.content})
            continue
        stored: Any = runs.read_run(results.folder)
        console.print(results_table(results.content, title=runs.run_title(stored)))
        if expected.certified is not None and different:
            console.plain(f"not compared with the paper, because this training has another {', '.join(different)}\n")
        elif expected.certified is not None:
            clean = f"clean {expected.defended:.1f}%, " if expected.defended is not None else ""
            console.print(f"the paper (Table {expected.table}): {clean}certified {expected.certified:.1f}%\n")
