"""Every test runs with the shapes and types of the annotations checked at each call (jaxtyping + beartype)."""

from __future__ import annotations

import os

# Several test processes share the cores; torch's threads would wait for each other. Child processes inherit this.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from jaxtyping import install_import_hook

install_import_hook("patchproof", "typecheck.checked")

import hypothesis  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

torch.set_num_threads(1)
hypothesis.settings.register_profile("patchproof", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("patchproof")


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(20230616)
