"""Runs: what the command line does, in one Python call each; folders, records, manifests, resuming, executors."""

from patchproof.runs._certify import attack, certify
from patchproof.runs._cost import Cost, TrainingCost, estimate_cost, estimate_training, peak_memory
from patchproof.runs._device import choose_device
from patchproof.runs._folder import RunFolder, dump_json, read_json, write_atomically
from patchproof.runs._footprint import footprint_threat, with_shared_tau
from patchproof.runs._images import TrainingImages, training_images
from patchproof.runs._manifest import device_name, network_remarks, preprocessing_for, source_commit, versions
from patchproof.runs._measure import measure_on_generated, measure_tau
from patchproof.runs._predict import Prediction, Unusable, defense_like, image_files, predict, stored_defense
from patchproof.runs._reading import StoredCertification, StoredTraining, find_images, read_run, read_runs
from patchproof.runs._record import (
    ACCURACIES,
    ATTACK_ACCURACIES,
    AttackFindings,
    Rate,
    Record,
    Results,
    Tally,
    one_answer,
    rates,
)
from patchproof.runs._status import one_class_words, run_status, run_title
from patchproof.runs._train import Trained, train
from patchproof.runs.executors import InProcess, Torchrun, default_workers, launched, local_rank

__all__ = [
    "ACCURACIES",
    "ATTACK_ACCURACIES",
    "AttackFindings",
    "Cost",
    "InProcess",
    "Prediction",
    "Rate",
    "Record",
    "Results",
    "RunFolder",
    "StoredCertification",
    "StoredTraining",
    "Tally",
    "Torchrun",
    "Trained",
    "TrainingCost",
    "TrainingImages",
    "Unusable",
    "attack",
    "certify",
    "choose_device",
    "default_workers",
    "defense_like",
    "device_name",
    "dump_json",
    "estimate_cost",
    "estimate_training",
    "find_images",
    "footprint_threat",
    "image_files",
    "launched",
    "local_rank",
    "measure_on_generated",
    "measure_tau",
    "network_remarks",
    "one_answer",
    "one_class_words",
    "peak_memory",
    "predict",
    "preprocessing_for",
    "rates",
    "read_json",
    "read_run",
    "read_runs",
    "run_status",
    "run_title",
    "source_commit",
    "stored_defense",
    "train",
    "training_images",
    "versions",
    "with_shared_tau",
    "write_atomically",
]
