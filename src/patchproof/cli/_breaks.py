"""A certified image that a patch broke, on disk: all that is needed to look at it and to ask the defence again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from PIL import Image
from safetensors.torch import save_file
from torch import Tensor

from patchproof.cli._setup import Setup
from patchproof.evaluation import Break
from patchproof.masking import two_mask_labels
from patchproof.records import dump_json, write_atomically


def save_break(folder: Path, found: Break, setup: Setup) -> Path:
    """folder/INDEX: pictures to look at, exact pixels, and the label tables of the image before and after."""
    place = folder / str(found.record.index)
    place.mkdir(parents=True, exist_ok=True)
    pixels = {"image": found.image, "patched": found.patched, "patch": _cut(found)}
    save_file({name: tensor.cpu().contiguous() for name, tensor in pixels.items()}, place / "pixels.safetensors")
    for name, tensor in pixels.items():
        _picture(tensor).save(place / f"{name}.png")
    write_atomically(place / "tables.json", dump_json(_tables(found, setup)))
    return place


def _tables(found: Break, setup: Setup) -> dict[str, Any]:
    """F(x ⊙ m0 ⊙ m1) for the clean and for the patched image, and what makes the numbers repeatable."""
    clean, patched = (  # each by itself: an image must not depend on its company, but this may be how it broke
        two_mask_labels(setup.classifier, image[None], setup.masks, engine=setup.engine)[0].tolist()
        for image in (found.image, found.patched)
    )
    record = found.record
    return {
        "index": record.index,
        "path": record.path,
        "label": record.label,
        "place": record.place,
        "answer_to_patched": record.attacked_label,
        "clean_table": clean,
        "patched_table": patched,
        "image_size": setup.masks.image_size,
        "masks": [[r.top, r.left, r.height, r.width] for r in setup.masks.rects],
        "patch_sizes": setup.threat.patch_sizes,
        "engine": vars(setup.engine),
        "reproduce": "build the defence with these masks, load pixels.safetensors, and call "
        "defense.predict(patched[None]); docs/attacks.md has the lines",
    }


def _cut(found: Break) -> Tensor:
    top, left, height, width = found.record.place or (0, 0, 0, 0)
    return found.patched[:, top : top + height, left : left + width]


def _picture(pixels: Tensor) -> Image.Image:
    values = (pixels.clamp(0, 1) * 255).round().byte().cpu()
    return Image.fromarray((values[0] if len(values) == 1 else values.permute(1, 2, 0)).numpy())
