"""Make image classifiers provably resistant to adversarial patches, and measure the proof."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from patchproof.version import __version__ as __version__

if TYPE_CHECKING:
    from patchproof._public import *  # noqa: F403


def __getattr__(name: str) -> Any:
    """Import the public names when one of them, or `__all__`, is first used."""
    if name == "__all__" or not name.startswith("__"):
        from importlib import import_module

        public = vars(import_module("patchproof._public"))
        if name == "__all__":
            return [public_name for public_name in public if not public_name.startswith("_")]
        if name in public:
            return public[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})
