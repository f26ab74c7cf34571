"""`patchproof`, `python -m patchproof`, and with it `torchrun -m patchproof`."""

import sys

from patchproof.version import __version__


def main() -> None:
    """The command line; its version is said before anything is imported for the rest."""
    if sys.argv[1:] == ["--version"]:
        sys.stdout.write(f"{__version__}\n")
        return
    from patchproof.cli import main

    main()


if __name__ == "__main__":
    main()
