"""Run the command line in this process and hand back what a shell would see."""

import json
from dataclasses import dataclass

import pytest

from bqsgd._src.cli.app import main


@dataclass
class Result:
    code: int
    out: str
    err: str

    @property
    def json(self):
        return json.loads(self.out, parse_constant=lambda name: pytest.fail(f"not strict JSON: {name}"))


@pytest.fixture
def bqsgd(capsys):
    def run(*arguments: object) -> Result:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return Result(code, out, err)

    return run
