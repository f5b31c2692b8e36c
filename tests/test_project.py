"""The files that people expect around a library: releases, the workflow, templates, citation, hooks."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import bqsgd

yaml = pytest.importorskip("yaml", reason="needs the extra `docs`")

ROOT = Path(__file__).resolve().parents[1]


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def read_yaml(name: str) -> Any:
    return yaml.safe_load(text_of(name))


def release_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("release", ROOT / ".ci" / "release.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_version_is_written_in_one_place():
    """The build reads it from the package; no other file that a release consists of repeats it."""
    project = tomllib.loads(text_of("pyproject.toml"))
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["hatch"]["version"]["path"] == "src/bqsgd/__init__.py"
    files = [*ROOT.joinpath("src").rglob("*.py"), *ROOT.glob("*.toml"), *ROOT.glob("*.cff"), ROOT / "README.md"]
    holders = [path for path in files if bqsgd.__version__ in path.read_text(encoding="utf-8")]
    assert holders == [ROOT / "src" / "bqsgd" / "__init__.py"]


def test_the_newest_section_of_the_changelog_is_for_this_version():
    section = re.search(r"^## (\S+) \((.+)\)$", text_of("CHANGELOG.md"), re.M)
    assert section is not None
    final = bqsgd.__version__.partition(".dev")[0]
    assert section[1] == final
    assert (section[2] == "unreleased") == (bqsgd.__version__ != final)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"version": "0.3.0.dev0"}, "not final"),
        ({"version": "0.4.0"}, "no heading"),
        ({"changelog": "## 0.3.0 (unreleased)\n"}, "no heading"),
        ({"tags": ["v0.3.0"]}, "tag v0.3.0 exists"),
        ({"uncommitted": " M README.md\n"}, "README.md"),
    ],
)
def test_a_release_is_refused_with_the_reason(change, reason):
    ready = {"version": "0.3.0", "changelog": "# Changes\n\n## 0.3.0 (2027-01-31)\n", "tags": ["v0.2.0"]}
    ready["uncommitted"] = ""
    obstacles = release_script().obstacles
    arguments = ready | change
    assert obstacles(ready.pop("version"), **ready) == []
    assert reason in " ".join(obstacles(arguments.pop("version"), **arguments))


def test_the_workflow_runs_what_contributors_run_on_every_supported_python():
    workflow = read_yaml(".github/workflows/ci.yml")
    commands = {name: [step["run"] for step in job["steps"] if "run" in step] for name, job in workflow["jobs"].items()}
    assert commands == {"test": [".ci/run"], "dist": ["make dist"]}
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o100
    assert text_of(".ci/run").rstrip().endswith("make test")
    versions = workflow["jobs"]["test"]["strategy"]["matrix"]["python"]
    classifiers = tomllib.loads(text_of("pyproject.toml"))["project"]["classifiers"]
    named = [re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", line) for line in classifiers]
    assert versions == [match[1] for match in named if match] == ["3.11", "3.12", "3.13"]
    assert workflow["permissions"] == {"contents": "read"}


def test_classifiers_are_known():
    trove = pytest.importorskip("trove_classifiers", reason="needs the extra `dev`")
    classifiers = tomllib.loads(text_of("pyproject.toml"))["project"]["classifiers"]
    assert set(classifiers) - set(trove.classifiers) == set()


def test_pre_commit_hooks_run_the_tools_that_constraints_pin():
    """Through the Makefile's environment: a hook with a version of its own would be a second place to change."""
    (repository,) = read_yaml(".pre-commit-config.yaml")["repos"]
    assert repository["repo"] == "local"
    assert "rev" not in repository
    for hook in repository["hooks"]:
        assert hook["language"] == "system"
        assert "additional_dependencies" not in hook
    entries = [hook["entry"] for hook in repository["hooks"]]
    assert entries == ["make lint", "make types", "make layers"]
    assert "\ntest: lint types layers " in text_of("Makefile")
    for tool in ("ruff", "mypy", "import-linter"):
        assert re.search(rf"^{tool}==\S+$", text_of("constraints.txt"), re.M), tool


def test_the_citation_has_what_the_format_requires():
    citation = read_yaml("CITATION.cff")
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert citation["license"] == tomllib.loads(text_of("pyproject.toml"))["project"]["license"]
    assert [author["family-names"] for author in citation["references"][0]["authors"]] == ["Yan", "Li", "Wu", "Song"]


def test_issue_templates_are_forms_with_a_question_that_must_be_answered():
    forms = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
    assert [form.name for form in forms] == ["bug.yml", "change.yml", "config.yml"]
    for form in forms[:2]:
        content = yaml.safe_load(form.read_text(encoding="utf-8"))
        assert {"name", "description", "body"} <= set(content)
        questions = [part for part in content["body"] if part["type"] != "markdown"]
        assert len({part["id"] for part in questions}) == len(questions)
        assert any(part.get("validations", {}).get("required") for part in questions)
    assert "SECURITY.md" in forms[0].read_text(encoding="utf-8")
    assert "make test" in text_of(".github/PULL_REQUEST_TEMPLATE.md")


def test_the_threat_models_of_the_security_page_are_those_a_guarantee_can_name():
    from bqsgd._src.release import Trust

    (head,) = [line for line in text_of("SECURITY.md").splitlines() if line.startswith("| | each message")]
    columns = re.findall(r'"([^"]+)"', head)
    assert len(columns) == len(Trust)
    assert all(trust.value.startswith(column) for trust, column in zip(Trust, columns, strict=True))
