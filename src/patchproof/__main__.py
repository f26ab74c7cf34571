"""`patchproof`, `python -m patchproof`, and with it `torchrun -m patchproof`."""

import sys

from patchproof.version import __version__


def main() -> None:
    """The command line; the version is printed before the commands are imported."""
    if sys.argv[1:] == ["--version"]:
        sys.stdout.write(f"{__version__}\n")
        return
    try:
        from patchproof.cli import main

        main()
    except KeyboardInterrupt:  # before the command line listens to signals
        sys.exit(130)


if __name__ == "__main__":
    main()
