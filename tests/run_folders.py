"""Run folders written by hand, for tests that need certain numbers, names or damages in them."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from patchproof.geometry import PatchThreat, covering_masks
from patchproof.models import sealed
from patchproof.runs._record import ACCURACIES, ATTACK_ACCURACIES, AttackFindings, Record, Tally

CLASSES = ("cat", "dog", "eel")


def manifest(*, count: int, available: int | None = None, **changes: Any) -> dict[str, Any]:
    """What `patchproof certify` writes; `changes` replace parts, "identity.x" those inside one."""
    side, patch, per_axis = changes.pop("side", 28), changes.pop("patch", 5), changes.pop("per_axis", 3)
    classes = list(changes.pop("classes", CLASSES))
    patches = changes.get("identity.defense.patches", 1)
    masks = covering_masks(PatchThreat((side, side), ((patch, patch),), patches), per_axis=per_axis)
    content: dict[str, Any] = {
        "schema": 1,
        "command": "certify",
        "config": {"dataset": "nowhere", "data_dir": None, "split": None, "weights": "random", "patch": f"{patch}px"},
        "identity": {
            "architecture": "small",
            "weights_sha256": "aa",
            "data_sha256": "dd",
            "images": f"{count} of {available or count}",
            "preprocessing": {"resize": [side, side], "crop": None, "interpolation": "bilinear", "antialias": True},
            "defense": {
                "name": "patchcleanser",
                "guarantee": "recovery",
                "image_size": [side, side],
                "patch_sizes": [[patch, patch]],
                "exhaustive": False,
            },
        },
        "guarantee": "recovery",
        "model": {"classes": len(classes), "class_names": classes, "mean": [0.25, 0.5, 0.75]},
        "data": {"name": "pets", "split": "all", "images": available or count, "class_names": classes},
        "masks": {
            "image_size": [side, side],
            "rects": masks.rects,
        },
        "tau": {"fast": 0.0, "fp32": 1e-4},
        "device": "cpu",
        "precision": "fp32",
    }
    for name, value in changes.items():
        *parents, key = name.split(".")
        place = content
        for parent in parents:
            place = place[parent]
        place[key] = value
    return content


def detection(**changes: Any) -> dict[str, Any]:
    """What to change in a manifest for a run of the defence `alarm`."""
    named = {"identity.defense.name": "alarm", "identity.defense.guarantee": "detection", "guarantee": "detection"}
    return named | changes


def random_records(count: int, *, classes: int = len(CLASSES), masks: int = 9, seed: int = 0) -> list[Record]:
    """Images of which each certified one is defended, with margins of the right sign."""
    draw = random.Random(seed)
    records = []
    for index in range(count):
        defended = draw.random() < 0.8
        certified = defended and draw.random() < 0.6
        label = draw.randrange(classes)
        margin = round(draw.expovariate(1) * (1 if certified else -1), 6)
        pair, answer = [draw.randrange(masks), draw.randrange(masks)], label if certified else (label + 1) % classes
        passes = 45 if certified else draw.randrange(1, 46)
        right, evidence = draw.random() < 0.9, {"witness": {"masks": pair, "label": answer}}
        records.append(Record(index, f"x/{index}.png", label, right, defended, certified, margin, passes, evidence))
    return records


def attacked_records(count: int, *, seed: int = 0) -> list[Record]:
    """Every third answer that is not certified falls, and of the classifier's own every second."""
    found = []
    for record in random_records(count, seed=seed):
        falls = bool(record.defended) and not record.certified and record.index % 3 == 0
        attack = AttackFindings(
            undefended_attacked=bool(record.undefended) and record.index % 2 == 0,
            attacked=bool(record.defended) and not falls,
            place=(3, 4, 5, 5) if falls else None,
            attacked_label=(record.label + 1) % 3 if falls else None,
            passes=100,
            queries=4,
        )
        found.append(replace(record, attack=attack))
    return found


def write_run(folder: Path, content: dict[str, Any], records: Sequence[Record], *, seconds: float = 12.5) -> Path:
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text(json.dumps(sealed(content)))
    (folder / "records.jsonl").write_text("".join(record.line() for record in records))
    names = ATTACK_ACCURACIES if content["command"] == "attack" else ACCURACIES
    counted = {name: rate.as_dict() for name, rate in Tally(names).add(records).rates().items()}
    (folder / "results.json").write_text(json.dumps(counted | {"cost": {"seconds": seconds}}))
    return folder


def write_training(folder: Path, *, strategy: str = "greedy", steps: int = 20, epochs: int = 2, **plan: Any) -> Path:
    folder.mkdir(parents=True)
    content = {
        "schema": 1,
        "command": "train",
        "config": {"dataset": "nowhere"},
        "identity": {"plan": {"strategy": strategy, "mask_patch": "3%"} | plan},
        "data": {"validation": {"name": "pets", "split": "validation"}},
        "search": {"forwards": 25, "backwards": 0},
        "steps": steps,
    }
    lines = []
    for step in range(1, steps + 1):
        lines.append({"kind": "step", "step": step, "loss": 2.0 / step})
        if step % (steps // epochs) == 0:
            rate = {"k": step, "n": 50}
            lines.append(
                {"kind": "epoch", "epoch": step * epochs // steps, "step": step}
                | dict.fromkeys(("undefended", "certified"), rate)
            )
    (folder / "manifest.json").write_text(json.dumps(sealed(content)))
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "results.json").write_text(json.dumps({"status": "complete", "seconds": 3.5}))
    return folder
