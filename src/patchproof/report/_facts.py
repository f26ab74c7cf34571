"""What a manifest says, as far as it says it: a damaged one yields fewer facts, never an error."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from patchproof.geometry import MaskSet, Rect
from patchproof.records import Record
from patchproof.report._text import class_words, printable, size_words
from patchproof.types import InputError, Preprocessing, Size

Value = TypeVar("Value")
UNKNOWN = "unknown"


def look(manifest: Mapping[str, Any], *keys: str) -> Any:
    """The value under these keys, one inside the other; None where there is none."""
    value: Any = manifest
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


@dataclass(frozen=True)
class Facts:
    """What a certification was made with; None, or empty, where the manifest does not say."""

    dataset: str = UNKNOWN
    architecture: str = UNKNOWN
    weights: str | None = None
    patch_sizes: tuple[Size, ...] = ()
    native: bool = False
    masks: MaskSet | None = None
    preprocessing: Preprocessing | None = None
    fill: tuple[float, ...] = ()
    planned: int | None = None
    available: int | None = None
    data_sha256: str | None = None
    weights_sha256: str | None = None
    precision: str = UNKNOWN
    device: str = UNKNOWN
    tau: float | None = None
    exhaustive: bool = False
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def axes(self) -> Size | None:
        """Masks on the vertical and on the horizontal axis."""
        return None if self.masks is None else _axes(self.masks)

    @property
    def masks_words(self) -> str:
        return UNKNOWN if self.axes is None else f"{size_words(self.axes)} masks"

    @property
    def patch_percent(self) -> float | None:
        """The largest patch's share of the network input's area."""
        if self.masks is None or not self.patch_sizes:
            return None
        height, width = self.masks.image_size
        return 100 * max(h * w for h, w in self.patch_sizes) / (height * width)

    @property
    def patch_words(self) -> str:
        if not self.patch_sizes:
            return UNKNOWN
        sizes = " or ".join(map(size_words, self.patch_sizes))
        share = "" if self.patch_percent is None else f" ({self.patch_percent:.1f}%)"
        return f"{sizes} px{share}" + (f", footprint of {self.config.get('patch')} native" if self.native else "")


def read_facts(manifest: Mapping[str, Any]) -> Facts:
    planned, available = _counts(look(manifest, "identity", "images"))
    return Facts(
        dataset=_text(look(manifest, "data", "name")) or UNKNOWN,
        architecture=_text(look(manifest, "identity", "architecture")) or UNKNOWN,
        weights=_raw_text(look(manifest, "config", "weights")),
        patch_sizes=_made(_sizes, look(manifest, "identity", "patch_sizes")) or (),
        native=look(manifest, "identity", "threat_space") == "native",
        masks=_made(_mask_set, look(manifest, "masks")),
        preprocessing=_made(_preprocessing, look(manifest, "identity", "preprocessing")),
        fill=_made(_colour, look(manifest, "model", "mean")) or (),
        planned=planned,
        available=available,
        data_sha256=_raw_text(look(manifest, "identity", "data_sha256")),
        weights_sha256=_raw_text(look(manifest, "identity", "weights_sha256")),
        precision=_text(look(manifest, "precision")) or UNKNOWN,
        device=_text(look(manifest, "device")) or UNKNOWN,
        tau=_made(_number, look(manifest, "tau", "fp32")),
        exhaustive=look(manifest, "identity", "exhaustive") is True,
        config=look(manifest, "config") if isinstance(look(manifest, "config"), Mapping) else {},
    )


def missing_facts(facts: Facts) -> list[str]:
    """What every whole manifest says and this one does not, in words."""
    known = {
        "the data set": facts.dataset != UNKNOWN,
        "the architecture": facts.architecture != UNKNOWN,
        "the patch": bool(facts.patch_sizes),
        "the masks": facts.masks is not None,
        "the number of images": facts.planned is not None,
    }
    return [name for name, is_known in known.items() if not is_known]


def label_names(manifest: Mapping[str, Any], records: Iterable[Record]) -> dict[int, str]:
    """Words for the labels of the records, which are the classifier's outputs.

    Manifests written before they listed the outputs' names leave two ways: a folder data set's paths begin with the
    class, and otherwise outputs stand for the data set's classes by position when there are as many.
    """
    data, model = look(manifest, "data", "class_names"), look(manifest, "model")
    outputs = look(manifest, "model", "class_names")
    by_position = look(manifest, "model", "classes") == len(data) if isinstance(data, list) else False
    if _is_names(outputs):
        return class_words(dict(enumerate(outputs)))
    if not _is_names(data):
        return {}
    listed = isinstance(model, Mapping) and "class_names" in model
    from_paths = {} if listed else _first_folders(records, set(data))
    return class_words(from_paths or (dict(enumerate(data)) if by_position else {}))


def _first_folders(records: Iterable[Record], classes: set[str]) -> dict[int, str]:
    folders = {record.label: record.path.split("/")[0] for record in records}
    return {label: folder for label, folder in folders.items() if folder in classes}


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(name, str) for name in value)


def _made(make: Callable[[Any], Value], content: Any) -> Value | None:
    try:
        return make(content)
    except (TypeError, ValueError, KeyError, AttributeError, InputError):
        return None


def _axes(masks: MaskSet) -> Size | None:
    try:
        rows, columns = masks.axes
    except InputError:
        return None
    return len(rows), len(columns)


def _raw_text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _text(value: Any) -> str | None:
    return printable(value) if isinstance(value, str) else None


def _counts(value: Any) -> tuple[int | None, int | None]:
    match = re.fullmatch(r"(\d{1,12}) of (\d{1,12})", value) if isinstance(value, str) else None
    return (int(match[1]), int(match[2])) if match else (None, None)


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"no whole number: {value!r}")
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"no number: {value!r}")
    return float(value)


def _size(value: Any) -> Size:
    height, width = map(_whole, value)
    return height, width


def _sizes(value: Any) -> tuple[Size, ...]:
    return tuple(map(_size, value))


def _mask_set(value: Any) -> MaskSet:
    rects = tuple(Rect(*map(_whole, rect)) for rect in value["rects"])
    return MaskSet(_size(value["image_size"]), rects)


def _preprocessing(value: Any) -> Preprocessing:
    resize, crop = value["resize"], value["crop"]
    return Preprocessing(
        resize=_size(resize) if isinstance(resize, list) else None if resize is None else _whole(resize),
        crop=None if crop is None else _size(crop),
        interpolation=value["interpolation"],
        antialias=bool(value["antialias"]),
        cover=bool(value.get("cover", False)),
    )


def _colour(value: Any) -> tuple[float, ...]:
    colour = tuple(map(_number, value))
    if not all(0 <= level <= 1 for level in colour):
        raise ValueError(colour)
    return colour
