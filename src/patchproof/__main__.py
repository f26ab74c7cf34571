"""The entry point of `patchproof`, `python -m patchproof` and `torchrun -m patchproof`."""

import sys

from patchproof.version import __version__


def main() -> None:
    """Run the command line; `--version` is answered before the commands are imported."""
    if sys.argv[1:] == ["--version"]:
        sys.stdout.write(f"{__version__}\n")
        return
    try:
        from patchproof.cli import main

        main()
    except KeyboardInterrupt:  # before the command line handles signals
        sys.exit(130)


if __name__ == "__main__":
    main()
