"""A run on disk: one JSON line an image, a manifest beside it, and every percentage computed from the lines."""

from __future__ import annotations

from patchproof.records._files import BEGIN_AGAIN, checksum, dump_json, read_json, write_atomically
from patchproof.records._folder import RunFolder, checked_prefix, refuse_differences
from patchproof.records._rates import SCHEMA, Rate, Tally, rates, summarize
from patchproof.records._record import ACCURACIES, ATTACK_ACCURACIES, AttackRecord, Record, Witness, parse_record

__all__ = [
    "ACCURACIES",
    "ATTACK_ACCURACIES",
    "BEGIN_AGAIN",
    "SCHEMA",
    "AttackRecord",
    "Rate",
    "Record",
    "RunFolder",
    "Tally",
    "Witness",
    "checked_prefix",
    "checksum",
    "dump_json",
    "parse_record",
    "rates",
    "read_json",
    "refuse_differences",
    "summarize",
    "write_atomically",
]
