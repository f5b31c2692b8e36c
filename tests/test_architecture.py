"""What holds across the whole project: light imports, the paper map, the documents' links, commands and names."""

import ast
import importlib
import importlib.resources
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest
import typer.main

ROOT = Path(__file__).resolve().parent.parent
PAPER_MAP = ROOT / "docs" / "paper.md"
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("**/*.md")])

STATEMENTS = {
    *(f"Eq. {number}" for number in range(1, 28)),
    "Assumption 1",
    "Assumption 2",
    "Definition 1",
    "Proposition 1",
    "Lemma 1",
    "Lemma 2",
    "Remark 1",
    "Remark 2",
    "Theorem 1, privacy",
    "Theorem 1, communication",
    "Theorem 1, convergence",
    *(f"Algorithm 1, line {number}" for number in range(1, 16)),
    "Table 1",
    "Table 2, parameters",
    "Table 2, accuracy",
    "Table 3, parameters",
    "Table 3, accuracy",
    "Figure 1",
    "Figure 2",
}


def map_rows() -> list[tuple[str, str, str]]:
    rows = []
    for line in PAPER_MAP.read_text(encoding="utf-8").split("## Errata")[0].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and cells[0] not in ("statement", "---"):
            rows.append((cells[0], cells[1], cells[2]))
    return rows


def resolve(dotted: str) -> object:
    module, _, name = dotted.rpartition(".")
    return getattr(importlib.import_module(module), name)


def is_defined(reference: str) -> bool:
    path, _, name = reference.partition("::")
    file = ROOT / path
    defined = rf"^\s*(async def|def|class) {name}\b"
    return file.is_file() and re.search(defined, file.read_text(encoding="utf-8"), re.M) is not None


def test_every_statement_of_the_paper_has_a_row():
    statements = [statement for statement, _, _ in map_rows()]
    assert len(statements) == len(set(statements))
    assert STATEMENTS - set(statements) == set()


@pytest.mark.parametrize("row", map_rows(), ids=lambda row: row[0])
def test_functions_and_tests_of_the_paper_map_exist(row):
    _, function, test = row
    for cell, pattern in ((function, r"(?:bqsgd\.|experiments/)"), (test, r"tests/")):
        named = re.findall(rf"`({pattern}[^`]+)`", cell)
        assert named or cell == "no code", cell
        for reference in named:
            if "::" in reference:
                assert is_defined(reference), f"{reference} does not exist"
            else:
                assert resolve(reference) is not None


def test_errata_name_existing_tests():
    text = (ROOT / "docs" / "paper.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(test_e\d\d_\w+)`", text))
    written = set(re.findall(r"^def (test_e\d\d_\w+)\(", (ROOT / "tests/paper/test_errata.py").read_text(), re.M))
    assert named == written
    assert {int(name[6:8]) for name in named} == {
        int(entry) for entry in re.findall(r"(?:\| |\*\*)E(\d+)(?: \||\.)", text)
    }


def test_importing_the_package_is_light():
    """`import bqsgd` loads neither torch nor Flower, nor do the layers below training."""
    script = (
        "import sys, bqsgd\n"
        "from bqsgd._src import codec\n"
        "from bqsgd._src.planner import search\n"
        "from bqsgd._src.paper import nominal, tradeoffs\n"
        "sys.exit(','.join(sorted({'torch', 'flwr', 'opacus', 'matplotlib'} & set(sys.modules))) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_package_says_that_it_is_typed():
    assert (importlib.resources.files("bqsgd") / "py.typed").is_file()


def public_names() -> dict[str, list[str]]:
    """Every public class, function and type alias of a public module, and where it is defined."""
    package, found = ROOT / "src" / "bqsgd" / "_src", {}
    for path in sorted(package.rglob("*.py")):
        place = path.relative_to(package)
        if place.parts[0] == "cli" or any(part.startswith("_") and part != "__init__.py" for part in place.parts):
            continue  # a command has the name of what it runs
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            names = [node.name] if isinstance(node, ast.ClassDef | ast.FunctionDef) else []
            if isinstance(node, ast.Assign):
                names = [target.id for target in node.targets if isinstance(target, ast.Name)]
                names = [name for name in names if name[0].isupper() and not name.isupper()]
            for name in names:
                if not name.startswith("_"):
                    found.setdefault(name, []).append(str(place))
    return found


def test_no_public_name_means_two_things():
    assert {name: places for name, places in public_names().items() if len(places) > 1} == {}


def documented_commands() -> list[tuple[str, str]]:
    found = []
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        blocks = re.findall(r"^```(\w*)[^\n]*\n(.*?)^```", text, re.S | re.M)
        for block in (code for language, code in blocks if language in ("", "sh", "bash", "console", "shell")):
            for line in block.replace("\\\n", " ").splitlines():
                command = line.strip().removeprefix("$ ").split("  #")[0].strip()
                if command.startswith(("bqsgd ", "make ")):
                    found.append((document.name, command))
    return found


@pytest.mark.parametrize(("document", "command"), documented_commands())
def test_documented_commands_exist(document, command):
    """Parse only: every command, sub-command and option a document shows is known to the program (or the Makefile)."""
    words = shlex.split(command)
    if words[0] == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
        assert all(word in targets for word in words[1:] if "=" not in word), f"{document}: {command}"
        return
    from bqsgd._src.cli.app import app

    current: click.Command = typer.main.get_command(app)
    arguments = words[1:]
    while isinstance(current, click.Group) and arguments and not arguments[0].startswith("-"):
        assert arguments[0] in current.commands, f"{document}: no command {arguments[0]!r}"
        current = current.commands[arguments.pop(0)]
    options = {
        name
        for parameter in current.get_params(click.Context(current))
        for name in (*parameter.opts, *parameter.secondary_opts)
    } | {"--help"}
    if current.context_settings.get("ignore_unknown_options"):
        return  # the command passes its options on to a program of Flower's
    for word in arguments:
        if word.startswith("--"):
            assert word.partition("=")[0] in options, f"{document}: {word} is no option of {current.name}"


def sessions() -> list[tuple[str, str]]:
    """Every command that a document shows together with what it prints."""
    texts = [document.read_text(encoding="utf-8") for document in DOCUMENTS]
    shown = [block for text in texts for block in re.findall(r"```console\n\$ (bqsgd .*?)```", text, re.S)]
    return [tuple(block.split("\n", 1)) for block in dict.fromkeys(shown)]


@pytest.mark.parametrize(("command", "shown"), sessions(), ids=lambda text: text[:20])
def test_sessions_in_the_documents_print_what_they_show(command, shown, capsys, monkeypatch):
    from bqsgd._src.cli.app import main

    monkeypatch.setenv("COLUMNS", "80")
    main(shlex.split(command)[1:])
    printed = "".join(capsys.readouterr())
    assert [line.rstrip() for line in printed.rstrip().splitlines()] == shown.rstrip().splitlines()


def test_the_example_of_frames_runs():
    page = (ROOT / "docs" / "reference" / "codec.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", page, re.S)
    done = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    frame_bytes, correlation = done.stdout.split()
    assert int(frame_bytes) < 61706 + 200
    # Correlation of the mean of four messages with the truth: 1 / sqrt(1 + (V/4) / (1/3)) = 0.28, spread 0.004:
    # the tolerance is 7 standard errors.
    assert abs(float(correlation) - 0.28) < 0.03


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_between_documents_lead_somewhere(document):
    for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", document.read_text(encoding="utf-8")):
        assert (document.parent / target).exists(), f"{document.name} links to {target}, which does not exist"


def test_every_nominal_figure_of_the_documents_is_named_so():
    """A document that speaks of nominal epsilon says at least once what that is."""
    for document in DOCUMENTS:
        text = " ".join(document.read_text(encoding="utf-8").split()).lower()
        if "nominal ε" in text or "nominal epsilon" in text:
            assert "not a guarantee" in text, document.name


def test_the_architecture_page_names_what_exists_and_every_folder():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    package = ROOT / "src" / "bqsgd" / "_src"
    figure = text.split("```")[1]
    named = set(re.findall(r"`([\w/]+(?:/|\.py|\.md))`", text))
    named |= set(re.findall(r"\b[a-z_]+(?:/[a-z_]*)*(?:/|\.py)(?![\w.])", figure))
    roots = (package, package / "engines", ROOT)
    assert [name for name in sorted(named) if not any((root / name).exists() for root in roots)] == []
    folders = {f"{path.parent.name}/" for path in package.glob("*/__init__.py")}
    modules = {path.name for path in package.glob("*.py") if not path.name.startswith("__")}
    assert (folders | modules) - named == set()


def test_the_architecture_page_has_the_layers_of_the_import_contract():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    shown = text.split("## Layers")[1].split("```")[1].split("\n")[1:-1]
    assert shown == [layer.replace("bqsgd._src.", "") for layer in contract["contracts"][0]["layers"]]


def prose(text: str) -> list[str]:
    """The lines of a document that are neither code nor tables."""
    outside = re.sub(r"^\s*```.*?^\s*```", "", text, flags=re.S | re.M)
    return [line for line in outside.splitlines() if not line.startswith("|")]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_lines_of_prose_are_at_most_120_characters_long(document):
    """A code span is not broken, however long."""
    text = document.read_text(encoding="utf-8")
    assert [line for line in prose(text) if len(re.sub(r"`[^`]+`", "", line)) > 120] == []


def test_programs_in_the_documents_use_public_names_only():
    programs = [
        (document.name, code)
        for document in DOCUMENTS
        for code in re.findall(r"^```python[^\n]*\n(.*?)^```", document.read_text(encoding="utf-8"), re.S | re.M)
    ]
    assert len(programs) > 10
    assert [name for name, code in programs if "bqsgd._src" in code] == []


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda path: path.name)
def test_a_page_says_first_whom_it_is_for(page):
    title, first = page.read_text(encoding="utf-8").split("\n\n", 2)[:2]
    assert title.startswith("# ")
    assert first.startswith("For ")


def test_the_settings_table_of_the_training_page_has_every_group_and_known_names():
    from bqsgd._src.tasks.named import ALL_GROUPS

    text = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    group, seen, listed = "", set(), set()
    for line in text.split("## Settings")[1].split("```toml")[0].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|") or cells[0] in ("group", "---"):
            continue
        group = cells[0].strip("`") or group
        seen.add(group)
        for name in re.findall(r"`(\w+)`", cells[1]):
            assert name in ALL_GROUPS[group].settings(), f"{name} is no setting of {group}"
            listed.add(name)
    assert seen == set(ALL_GROUPS)
    settings = {name for group in ALL_GROUPS.values() for name in group.settings()}
    assert settings - listed == {"run", "roster_digest"}, "the two that a run sets itself"


def test_the_settings_file_of_the_training_page_is_accepted(tmp_path):
    from bqsgd._src.tasks.resolve import resolve

    (block,) = re.findall(r"```toml\n(.*?)```", (ROOT / "docs" / "training.md").read_text(encoding="utf-8"), re.S)
    (tmp_path / "settings.toml").write_text(block, encoding="utf-8")
    resolved = resolve({}, file=tmp_path / "settings.toml")
    config = resolved.config
    assert (resolved.source.dataset, config.clip.rule, config.run.rounds) == ("mnist", "l2", 600)
    assert config.privacy.budget(client=2, round=300).bits == 6


def stale_names() -> list[tuple[str, str]]:
    """Module names in the documents: every `bqsgd.some.module` or `bqsgd.some.module.name` that is shown."""
    found = set()
    for document in DOCUMENTS:
        if document.name != "CHANGELOG.md":
            text = document.read_text(encoding="utf-8")
            found |= {(document.name, name) for name in re.findall(r"(?<![\w./\"-])bqsgd(?:\.\w+)+", text)}
    return sorted(found)


@pytest.mark.parametrize(("document", "name"), stale_names())
def test_names_in_the_documents_exist(document, name):
    """`bqsgd.a.b.c` is a module, or an attribute of one (`bqsgd.parameters.v1` and the like are formats, not names)."""
    if re.search(r"\.v\d+$", name):
        return
    parts = name.split(".")
    # NVFlare has an environment of its own; the other two take seconds to import.
    if parts[:2] == ["bqsgd", "integrations"] and parts[2:3] and parts[2] in ("huggingface", "lightning", "nvflare"):
        listed = (ROOT / f"src/bqsgd/integrations/{parts[2]}.py").read_text(encoding="utf-8").split("__all__")[1]
        assert all(f'"{part}"' in listed for part in parts[3:]), f"{document} names {name}, which does not exist"
        return
    for cut in range(len(parts), 0, -1):
        try:
            target = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for attribute in parts[cut:]:
            target = getattr(target, attribute, None)
        assert target is not None, f"{document} names {name}, which does not exist"
        return
