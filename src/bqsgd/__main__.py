"""`python -m bqsgd`: the same as the `bqsgd` command, for launchers such as torchrun."""

import sys

from bqsgd._src.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
