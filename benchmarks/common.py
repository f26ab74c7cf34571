"""Flags, images and reports, shared by the benchmarks."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import patchproof as pp
from patchproof.data import iterate_batches, spread_indices
from patchproof.masking import as_images
from patchproof.models import ImageClassifier
from patchproof.runs import device_name, preprocessing_for, versions

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with the flag --output, to which each script adds its own."""
    flags = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--output", type=Path, default=None)
    return flags


def machine(device: str = "cpu") -> dict[str, Any]:
    """The device and the versions that a report was measured with."""
    return {"device": device_name(torch.device(device)), "versions": versions()}


def write(report: Any, output: Path | None) -> None:
    if output:
        output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def open_images(classifier: ImageClassifier, dataset: str, count: int, device: str) -> tuple[Tensor, Tensor]:
    """Images from all over a data set, prepared for the classifier, on the device; and their labels in the data set."""
    source = pp.open_dataset(dataset)
    how = preprocessing_for(classifier, source.low_resolution, classifier.input_size)
    batches = list(iterate_batches(source, how, spread_indices(source, count), batch_size=64, workers=8))
    images = as_images(torch.cat([batch.images for batch in batches]), device)
    return images, torch.cat([batch.labels for batch in batches])


def paper_masks(classifier: ImageClassifier) -> pp.MaskSet:
    """6×6 masks against a square patch of 3%."""
    return pp.covering_masks(pp.PatchThreat.square(image_size=classifier.input_size, percent=3), per_axis=6)
