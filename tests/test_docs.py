"""The documentation is true: every key, default, command, option, layout, name and link is checked."""

from __future__ import annotations

import ast
import copy
import functools
import importlib
import inspect
import json
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from meshwright import errors
from meshwright.cli.main import meshwright
from meshwright.data.cleaning.rules import RULES
from meshwright.errors import UserError
from meshwright.layout import Layout
from meshwright.monitoring.resuming import RESUMABLE
from meshwright.names import FAMILIES
from meshwright.recipe import SCHEMA, Recipe, SourceRecipe, load_recipe
from meshwright.spec.parameters import parameter_table
from meshwright.spec.presets import PRESETS
from meshwright.tables import is_table

REPOSITORY = Path(__file__).resolve().parent.parent
PAGES = [REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
PAGES += sorted((REPOSITORY / "docs").rglob("*.md"))
QUICKSTART = REPOSITORY / "recipes" / "quickstart.toml"
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def blocks(page: Path, *languages: str) -> list[str]:
    """The fenced blocks of a page whose opening line says one of `languages`."""
    found = re.findall(r"^```([^\n]*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    return [text for language, text in found if language.strip() in languages]


def tables(page: Path) -> Iterator[tuple[list[str], list[list[str]]]]:
    """Header and rows of each Markdown table of a page."""
    for text in re.findall(r"(?:^\|.*\|$\n?)+", page.read_text(), re.MULTILINE):
        header, _, *rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines()]
        yield [cell.strip("| ") for cell in header], [[cell.strip("| ") for cell in row] for row in rows]


def commands(page: Path) -> list[list[str]]:
    """The command lines that a page shows, split into words."""
    lines = [line for text in blocks(page, "sh") for line in text.splitlines()]
    for text in blocks(page, "console"):
        lines += [line.removeprefix("$ ") for line in text.splitlines() if line.startswith("$ ")]
    lines += re.findall(r"`(meshwright [a-z][^`\n]*|make [a-z]+)`", page.read_text())
    split = [shlex.split(line.removesuffix(" &"), comments=True) for line in lines]
    return [words[: words.index(">")] if ">" in words else words for words in split if words]


# --- the recipe


def documented_keys() -> dict[str, dict[str, str]]:
    """Key -> column -> cell, of every table of recipe.md that has keys."""
    return {
        row[0].strip("`"): dict(zip(header, row, strict=True))
        for header, rows in tables(REPOSITORY / "docs" / "recipe.md")
        if header[0] == "key"
        for row in rows
    }


DOCUMENTED = documented_keys()
FIELDS = {key: field for key, field in SCHEMA.keys.items() if not is_table(field.annotation)}
each_key = pytest.mark.parametrize("key", FIELDS)


def phrase(schema: dict[str, Any]) -> str:
    """How recipe.md writes the type that a JSON schema describes."""
    if "anyOf" in schema:
        return " or ".join(phrase(member) for member in schema["anyOf"] if member.get("type") != "null")
    if "$ref" in schema:
        return "table"
    kind = schema["type"]
    if kind == "array":
        if "maxItems" in schema and schema.get("minItems") == schema["maxItems"]:
            return f"{schema['minItems']} numbers, each {limits(schema['items'])}"
        return f"list of {phrase(schema['items'])}"
    name = {"string": "text", "boolean": "true / false", "object": "table"}.get(kind, kind)
    bounds = limits(schema)
    return f"{name}{', ' if ' to ' in bounds else ' '}{bounds}".strip()


def limits(schema: dict[str, Any]) -> str:
    """The range of a number."""
    least, above = schema.get("minimum"), schema.get("exclusiveMinimum")
    most, below = schema.get("maximum"), schema.get("exclusiveMaximum")
    if schema["type"] == "integer" and below is not None:
        most, below = below - 1, None
    if least is not None and most is not None:
        return f"{least:g} to {most:g}" if schema["type"] == "number" else f"{least} to {most}"
    parts = [("≥", least), (">", above), ("≤", most), ("<", below)]
    return ", ".join(f"{sign} {value:g}" for sign, value in parts if value is not None)


@functools.cache
def recipe_schema() -> dict[str, Any]:
    return Recipe.model_json_schema()


def schema_of(key: str) -> dict[str, Any]:
    """The JSON schema of a key, as pydantic derives it."""
    whole = recipe_schema()
    found: dict[str, Any] = whole
    for part in key.split("."):
        found = found["properties"][part]
        if "$ref" in found:
            found = whole["$defs"][found["$ref"].rpartition("/")[2]]
    return found


def test_recipe_md_has_every_key_and_no_other():
    assert list(DOCUMENTED) == list(FIELDS)


def test_recipe_page_has_exactly_the_source_keys():
    [rows] = [rows for header, rows in tables(REPOSITORY / "docs" / "recipe.md") if header[0] == "key of a source"]
    assert [row[0].strip("`") for row in rows] == list(SourceRecipe.model_fields)


@each_key
def test_the_documented_default_is_the_default(key: str):
    field, said = FIELDS[key], DOCUMENTED[key]["default"]
    if field.is_required():
        assert said == "required"
    elif field.default is None:
        assert said == "–"
    else:
        assert tomllib.loads(f"value = {said.strip('`')}")["value"] == field.default


@each_key
def test_the_documented_type_is_the_type(key: str):
    said = DOCUMENTED[key]["type"]
    if not said.startswith("`"):
        assert said == phrase(schema_of(key))
        assert not choices(key), f"{key} takes one of {choices(key)}: list them as its type"
    else:
        assert re.findall(r'`"([^"]+)"`', said) == choices(key)


def choices(key: str) -> list[str]:
    """Return the choices of a key, as listed in its error; [] if it accepts any text."""
    if "string" not in str(schema_of(key)) or key in ("layout", "model.rope_scaling"):
        return []
    tables = tomllib.loads(QUICKSTART.read_text())
    SCHEMA.override(tables, f"{key}=zzz")
    try:
        Recipe.from_tables(tables)
    except UserError as error:
        known = re.search(r'unknown \w+ "zzz" \(known: (.*?)\)', str(error))
        return known[1].split(", ") if known else []
    return []


@each_key
def test_keys_changeable_on_resume_are_documented(key: str):
    free = any(key == name or key.startswith(f"{name}.") for name in RESUMABLE)
    assert DOCUMENTED[key]["on resume"] == ("free" if free else "fixed")


@each_page
def test_recipes_in_the_documentation_are_valid(page: Path):
    for text in blocks(page, "toml"):
        tables = copy.deepcopy(tomllib.loads(QUICKSTART.read_text()))
        for name, value in tomllib.loads(text).items():
            # A model has one architecture, data have one list of sources.
            replaces = not isinstance(value, dict) or name == "model" or "sources" in value
            tables[name] = value if replaces else {**tables.get(name, {}), **value}
        Recipe.from_tables(tables, where=page.name)


@each_page
def test_every_key_named_in_the_text_exists(page: Path):
    prefixes = "|".join(sorted({key.partition(".")[0] for key in SCHEMA.keys if "." in key}))
    for name in re.findall(rf"`((?:{prefixes})\.[a-z_.]+)(?: = [^`]*)?`", page.read_text()):
        assert name in SCHEMA.keys or name.endswith((".json", ".safetensors", ".py", ".md")), name


# --- layouts


def layouts(kind: str) -> list[str]:
    return [line for page in PAGES for text in blocks(page, f"layout {kind}") for line in text.splitlines()]


@pytest.mark.parametrize("text", layouts("runs"))
def test_layouts_documented_as_running_run(text: str):
    Layout.parse(text).check_implemented()


@pytest.mark.parametrize("text", layouts("refused"))
def test_layouts_documented_as_refused_are_valid_and_refused(text: str):
    layout = Layout.parse(text)
    with pytest.raises(UserError, match="this version cannot run"):
        layout.check_implemented()


@pytest.mark.parametrize("text", layouts("impossible"))
def test_layouts_documented_as_impossible_are_refused(text: str):
    with pytest.raises(UserError):
        Layout.parse(text)


def test_every_part_of_the_notation_is_documented():
    text = (REPOSITORY / "docs" / "layout.md").read_text()
    with pytest.raises(UserError) as caught:
        Layout.parse("nonsense")
    known = re.search(r"known: (.*)\)", str(caught.value))
    assert known
    for part in re.split("[,;] ", known[1].removesuffix(" in plans alone")):
        assert re.search(rf"`{re.sub('N$', '[N0-9M]', part)}", text), part


# --- commands


def click_command(words: list[str]) -> tuple[click.Command, list[str]]:
    """Return the command that words name, and the words after its name."""
    found: click.Command = meshwright
    while isinstance(found, click.Group) and words and not words[0].startswith("-"):
        inner = found.get_command(click.Context(found), words[0])
        assert inner is not None, f"no command {words[0]}"
        found, words = inner, words[1:]
    return found, words


@each_page
def test_commands_in_the_documentation_exist_and_take_their_arguments(page: Path):
    for words in commands(page):
        if "meshwright" not in words[:6]:
            continue
        command, arguments = click_command(words[words.index("meshwright") + 1 :])
        if isinstance(command, click.Group) or (len(arguments) == 0 and command.name != "verify"):
            continue  # named in a sentence
        context = command.make_context(str(command.name), list(arguments))
        for override in context.params.get("overrides", ()):
            assert override.partition("=")[0] in SCHEMA.keys, override
        recipe = context.params.get("recipe")
        if recipe and recipe.startswith("recipes/") and not context.params.get("layout"):
            load_recipe(REPOSITORY / recipe, context.params.get("overrides", ()))


@pytest.mark.parametrize(("command", "name"), [("generate", "evaluate-and-generate"), ("serve", "serving")])
def test_every_option_is_documented(command: str, name: str):
    page = REPOSITORY / "docs" / f"{name}.md"
    options = {name for parameter in click_command([command])[0].params for name in parameter.opts}
    rows = [row for header, rows in tables(page) if header[0] == "option" for row in rows]
    documented = {option for row in rows for option in re.findall(r"`(--[a-z-]+)`", row[0])}
    assert documented == {name for name in options if name.startswith("--")} - {"--json"}


@each_page
def test_make_targets_and_scripts_exist(page: Path):
    targets = set(re.findall(r"^([a-z]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
    for words in commands(page):
        if words[0] == "make":
            assert set(words[1:]) <= targets, words
        for word in words[1:]:
            if word.startswith(("bench/", "tests/", "recipes/", "scripts/")):
                assert (REPOSITORY / word).exists(), word


def test_every_command_is_in_the_readme():
    shown = {words[1] for words in commands(REPOSITORY / "README.md") if words[0] == "meshwright"}
    assert set(meshwright.list_commands(click.Context(meshwright))) <= shown  # type: ignore[attr-defined]


def test_every_benchmark_is_documented():
    text = (REPOSITORY / "docs" / "benchmarks.md").read_text()
    for script in (REPOSITORY / "bench").rglob("*.py"):
        if '__name__ == "__main__"' in script.read_text() and script.name not in ("contenders.py", "cuda_cases.py"):
            assert f"`{script.relative_to(REPOSITORY)}`" in text, script.name


# --- names and numbers


def test_exit_codes_are_those_of_the_errors():
    documented = {
        int(row[0])
        for header, rows in tables(REPOSITORY / "docs" / "training.md")
        if header[0] == "code"
        for row in rows
    }
    codes = {
        kind.exit_code
        for _, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, errors.MeshwrightError)
    }
    assert documented == codes | {0, 130}


def test_families_and_presets_are_all_documented():
    page = REPOSITORY / "docs" / "model.md"
    families, presets = (rows for header, rows in tables(page) if header[0] == "family")
    assert [row[0].strip("`") for row in families] == list(FAMILIES)
    assert sorted(name for row in presets for name in re.findall(r"`([^`]+)`", row[1])) == sorted(PRESETS)


def test_documented_parameter_table_matches_code():
    table = parameter_table(PRESETS["qwen3-tiny"].config)
    rows = next(rows for header, rows in tables(REPOSITORY / "docs" / "model.md") if header[0] == "entry")
    for name, shape, tensor, split, decay in rows:
        entry = table.entry(name.strip("`"))
        assert shape == " × ".join(map(str, entry.shape))
        assert tensor == f"`{entry.tensor}`, {entry.offset}"
        assert split == (", ".join(f"{axis}: {dim}" for axis, dim in entry.split.items()) or "–")
        assert decay == ("yes" if entry.decay else "no")


def test_cleaning_rules_are_documented_in_their_order():
    rows = next(rows for header, rows in tables(REPOSITORY / "docs" / "data.md") if header[0] == "rule")
    assert [row[0].strip("`") for row in rows] == list(RULES)


def test_architecture_lists_every_package_and_every_file_of_the_core():
    source, text = REPOSITORY / "src" / "meshwright", (REPOSITORY / "docs" / "architecture.md").read_text()
    packages = {path.name for path in source.iterdir() if (path / "__init__.py").exists()}
    assert not [name for name in packages if f"{name}/" not in text]
    for package in ("program", "comm", "model", "parallel", "checkpoint", "training"):
        files = sorted(path.name for path in (source / package).glob("*.py") if path.name != "__init__.py")
        listed = re.search(rf"^    {package}/ .*\n((?:^        .*\n)+)", text, re.MULTILINE)
        assert listed and re.findall(r"^        (\w+\.py) ", listed[1], re.MULTILINE) == files, package


def test_readme_is_short():
    assert len((REPOSITORY / "README.md").read_text().splitlines()) <= 130


@each_page
def test_documented_python_imports_exist(page: Path):
    for text in blocks(page, "python"):
        for node in ast.parse(text).body:
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("meshwright"):
                module = importlib.import_module(str(node.module))
                assert all(hasattr(module, alias.name) for alias in node.names), ast.unparse(node)
    for name in re.findall(r"`(meshwright(?:\.\w+)+)\(", page.read_text()):
        module_name, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module_name), attribute), name


def test_documented_layout_example_runs_as_shown():
    [text] = blocks(REPOSITORY / "docs" / "layout.md", "python")
    scope: dict[str, Any] = {}
    for line in text.splitlines():
        code, _, said = line.partition("#")
        if said:
            assert eval(code, scope) == ast.literal_eval(said.strip()), line
        else:
            exec(code, scope)


# --- links


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each_page
def test_links_lead_somewhere(page: Path):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        there = (page.parent / name).resolve() if name else page
        assert there.exists(), target
        if anchor:
            assert anchor in anchors(there), target


@each_page
def test_files_of_the_source_named_in_the_documentation_exist(page: Path):
    source = REPOSITORY / "src" / "meshwright"
    for name in re.findall(r"`((?:\w+/)+\w+\.(?:py|json))`", page.read_text()):
        of_a_run = name.startswith("training/") or "NAME" in name
        assert of_a_run or any((root / name).exists() for root in (source, REPOSITORY)), name


# --- files of a run


def test_run_writes_documented_files(
    tmp_path: Path, tiny_recipe: Path, monkeypatch: pytest.MonkeyPatch, command_line: Callable[..., Any]
):
    from meshwright.comm.mesh import Mesh
    from meshwright.monitoring.run_directory import RunDirectory
    from meshwright.training.loop import train

    monkeypatch.chdir(tmp_path)
    text = "\n\n".join(f"The {number}th of the short lines of this text." for number in range(400))
    (tmp_path / "text.txt").write_text(text)
    overrides = ["data.source=text.txt", "data.cache=cache", "train.steps=2", "train.validate_every=2"]
    recipe = load_recipe(tiny_recipe, overrides)
    with RunDirectory(recipe.run_directory) as directory:
        directory.write_recipe(recipe.to_toml())
        train(recipe, Mesh.single(recipe.parsed_layout), directory, show_progress=False)
    training, checkpoints = REPOSITORY / "docs" / "training.md", REPOSITORY / "docs" / "checkpoints.md"

    lines = [json.loads(line) for line in directory.metrics.read_text().splitlines()]
    steps = [line for line in lines if "event" not in line]
    [rows] = [rows for header, rows in tables(training) if header[0] == "key of a step"]
    documented = [name for row in rows for name in re.findall(r"`(\w+)`", row[0])]
    assert [*steps[-1]] == [name for name in documented if not name.startswith("skipped")][: len(steps[-1])]
    [parts] = [row[1] for row in rows if row[0] == "`seconds_by_part`"]
    assert re.findall(r"`(\w+)`", parts) == [*steps[-1]["seconds_by_part"]]
    [events] = [rows for header, rows in tables(training) if header[0] == "event"]
    assert {line["event"] for line in lines if "event" in line} <= {row[0].strip("`") for row in events}

    [tree] = [text for text in blocks(checkpoints, "") if "manifest.json" in text]
    shown = set(re.findall(r"[\w.-]+\.(?:json|safetensors)\b", tree.replace("-of-00002", "-of-00001")))
    [checkpoint] = [path for path in directory.checkpoints.iterdir() if path.name.startswith("step-")]
    there = {path.name for path in checkpoint.rglob("*") if path.is_file()}
    assert there == shown - {"rank-00001-of-00001.safetensors"}

    [files] = [rows for header, rows in tables(training) if header[0] == "file"]
    assert {path.name for path in directory.path.iterdir()} - {".lock"} <= {row[0].strip("`/") for row in files}


def test_page_of_all_layouts_matches_measurements(monkeypatch):
    monkeypatch.syspath_prepend(REPOSITORY / "bench")
    layouts_page = importlib.import_module("layouts_page")
    result = json.loads((REPOSITORY / "bench" / "results" / "layouts.json").read_text())
    assert layouts_page.PAGE.read_text() == layouts_page.page(result)
    run = [line for lines in result["tables"].values() for line in lines if "refused" not in line]
    assert len(run) >= 200 and all(line["relative_error"] <= result["tolerance"] for line in run)
