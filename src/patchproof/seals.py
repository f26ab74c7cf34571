"""Marks of wholeness inside small JSON files: a file that was changed or damaged is told from one as it was written."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

SEAL = "seal"


def sealed(content: Mapping[str, Any]) -> dict[str, Any]:
    """The content, and a digest of it under the last key."""
    return {**content, SEAL: _digest(content)}


def is_whole(content: Mapping[str, Any]) -> bool:
    """Whether the content is what was sealed. True where there is no seal: older files have none."""
    return SEAL not in content or content[SEAL] == _digest(content)


def _digest(content: Mapping[str, Any]) -> str:
    plain = {key: value for key, value in content.items() if key != SEAL}
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()
