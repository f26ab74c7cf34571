"""`python -m patchproof`, and with it `torchrun -m patchproof`."""

from patchproof.cli import main

if __name__ == "__main__":
    main()
