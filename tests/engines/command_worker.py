"""One rank of `bqsgd train --engine torch-distributed`. argv: JSON of {settings: the other arguments, ...}."""

import json
import sys

from bqsgd._src.cli.app import main as command


def main():
    code = command(["train", "--engine", "torch-distributed", *json.loads(sys.argv[1])["settings"]])
    if code:
        sys.exit(code)


if __name__ == "__main__":
    main()
