"""Every test runs with the shapes and types of the annotations checked at each call (jaxtyping + beartype)."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import jaxtyping
import pytest

import typecheck
from faults import Server, quicken

if TYPE_CHECKING:
    import torch

# Several test processes share the cores; torch's threads would wait for each other. Child processes inherit this.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# As `keep_freed_memory` does, for the processes of the tests.
os.environ |= {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1)}
if os.environ.pop("PYTHONDONTWRITEBYTECODE", ""):
    # Every process that imports torch would compile it, for seconds. The bytecode is kept away from the sources.
    sys.pycache_prefix = os.environ["PYTHONPYCACHEPREFIX"] = str(Path(__file__).parents[1] / ".pytest_cache/bytecode")
    sys.dont_write_bytecode = False

jaxtyping.jaxtyped = typecheck.jaxtyped
jaxtyping.install_import_hook("patchproof", "typecheck.checked")
hypothesis.settings.register_profile("thorough", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.register_profile("quick", hypothesis.settings.get_profile("thorough"), max_examples=20)


FORKING = ("test_faults.py", "test_cli_processes.py", "test_cli_train.py", "test_cli_attack.py")
"""Files whose tests share `commands`, which takes many seconds to begin."""

EXPLORING = ("test_explore_browser.py", "test_explore.py")
"""Files whose tests share the network of `small_model.py`."""

LONG = (
    *FORKING,
    *EXPLORING,
    "test_report.py",
    "test_seams.py",
    "test_cli.py",
    "test_report_runs.py",
    "test_attacks.py",
    "test_defenses_patchcleanser.py",
    "test_hostile.py",
    "test_runs.py",
    "test_training_strategies.py",
    "test_training_gradcam.py",
    "test_defenses.py",
    "test_cli_throughput.py",
    "test_demo.py",
)
"""Files that take longest, those first: what is left for the end is short, and no process waits long for another."""


def pytest_configure(config: pytest.Config) -> None:
    hypothesis.settings.load_profile("quick" if config.getoption("markexpr") == "not slow" else "thorough")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    quicken()  # here: a process that only hands out tests to others does without torch
    gc.freeze()  # half a million objects of imported modules, which no collection need visit
    places = {name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: places.get(item.path.name, len(LONG)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file is for one process, so that its models, servers and browsers are made once."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            shared = [group for group in (FORKING, EXPLORING) if file.endswith(group)]
            return shared[0][0] if shared else file

    config.option.loadscopereorder = False
    return ByFile(config, log)


Survived = Callable[..., None]


@pytest.fixture
def survived(record_property: Callable[[str, object], None]) -> Survived:
    """Count what a test has put the program through; the counts are printed at the end of the session."""
    return lambda kind, count=1, group="faults survived": record_property(f"{group}: {kind}", count)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """`faults survived: 64 SIGKILL, 20 SIGTERM`, from the tests that passed on any worker."""
    groups: dict[str, Counter[str]] = {}
    for report in terminalreporter.stats.get("passed", []):
        for name, count in report.user_properties:
            group, _, kind = name.partition(": ")
            groups.setdefault(group, Counter())[kind] += count
    for group, counts in sorted(groups.items()):
        words = ", ".join(f"{count:,} {kind}" for kind, count in sorted(counts.items()))
        terminalreporter.write_line(f"{group}: {words}")


@pytest.fixture(scope="session")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("commands"))
    yield server
    server.close()


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the library says in passing during a test, also if it has said it before."""
    from patchproof.types import NOTED

    said: list[str] = []
    NOTED.clear()
    monkeypatch.setattr(logging.getLogger("patchproof"), "warning", said.append)
    return said


@pytest.fixture
def generator() -> torch.Generator:
    import torch

    return torch.Generator().manual_seed(20230616)
