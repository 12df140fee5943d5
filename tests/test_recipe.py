"""Valid recipes are read; each mistake is a one-line error with file, key and the nearest valid name."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from meshwright.errors import UserError
from meshwright.layout import Layout
from meshwright.recipe import SCHEMA, Recipe, load_recipe, load_recipe_text
from meshwright.recipe.other_names import OTHER_NAMES
from tests import processor_time


def refusal(path: Path, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load_recipe(path, overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_recipe_determines_layout_name_and_run_directory(tiny_recipe: Path):
    recipe = load_recipe(tiny_recipe)
    assert recipe.parsed_layout == Layout()
    assert recipe.run.name == "tiny"  # from the file's name
    assert recipe.run_directory == Path("runs/tiny")
    assert recipe.source_path == tiny_recipe
    assert [source.path for source in recipe.data.all_sources] == ["stdlib"]
    assert load_recipe(tiny_recipe, ["run.directory=/elsewhere"]).run_directory == Path("/elsewhere")


def test_bundled_recipes_are_valid(repository: Path):
    recipes = sorted((repository / "recipes").glob("*.toml"))
    assert recipes
    for path in recipes:
        load_recipe(path).parsed_layout.check_implemented()


def test_recipe_round_trips_through_toml(tiny_recipe: Path):
    overrides = ['data.source=["a b/*.py", "ü"]', 'model.rope_scaling={type="linear", factor=2.0}', "train.clip=0"]
    recipe = load_recipe(tiny_recipe, overrides)
    again = load_recipe_text(recipe.to_toml(), "copy")
    assert again == recipe
    assert again != load_recipe(tiny_recipe)
    assert tomllib.loads(recipe.to_toml())["train"]["weight_decay"] == 0.1  # defaults are written too


def test_overrides_are_toml_or_bare_words_and_last_wins(tiny_recipe: Path):
    recipe = load_recipe(
        tiny_recipe,
        [
            "layout=dp2 zero1",
            "train.steps=9",
            "train.steps = 10",
            "train.schedule=linear",
            'train.optimizer="sgd"',
            "train.betas=[0.8, 0.9]",
            "train.compile=true",
            "run.name=5",
            "data.source=[\"a\", 'b']",
            "data.clean.minimum_characters=3",
            "data.tokenizer=a=b.json",
        ],
    )
    assert recipe.parsed_layout == Layout(dp=2, zero=1)
    assert (recipe.train.steps, recipe.train.schedule, recipe.train.optimizer) == (10, "linear", "sgd")
    assert (recipe.train.betas, recipe.train.compile, recipe.run.name) == ([0.8, 0.9], True, "5")
    assert [source.path for source in recipe.data.all_sources] == ["a", "b"]
    assert (recipe.data.clean.minimum_characters, recipe.data.tokenizer) == (3, "a=b.json")


def test_other_programs_names_stand_for_keys_that_exist():
    assert set(SCHEMA.elsewhere.values()) <= set(SCHEMA.keys)


@pytest.mark.parametrize(
    ("written", "nearest"),
    [
        ("train.stpes=3", "train.steps"),
        ("steps=3", "train.steps"),  # a key without its table
        ("train.sequence=3", "data.sequence"),  # the right key in the wrong table
        ("train.lr=3", "train.learning_rate"),  # another program's name
        ("model.n_layer=3", "model.layers"),
        ("model.num_query_groups=2", "model.kv_heads"),
        ("model.kv_channels=2", "model.head_dim"),  # not the most similar key, kv_heads
        ("train.micro_batch_size=2", "layout"),
        ("trian.steps=3", "train"),
        ("data.clean.minimum_chars=3", "data.clean.minimum_characters"),
        ("data.claen.minimum_characters=3", "data.clean"),
    ],
)
def test_a_typo_in_a_key_names_the_nearest_key(tiny_recipe: Path, written: str, nearest: str):
    key = written.partition("=")[0]
    assert f"; did you mean {nearest}?" in refusal(tiny_recipe, written)
    *tables, name = key.split(".")
    in_file = tiny_recipe.with_name("typo.toml")
    text = tiny_recipe.read_text()
    header = f"[{'.'.join(tables)}]"
    if header in text:
        in_file.write_text(text.replace(header, f"{header}\n{name} = 3"))
    else:
        in_file.write_text(f"{name} = 3\n{text}" if not tables else f"{text}\n{header}\n{name} = 3\n")
    assert f"; did you mean {nearest}?" in refusal(in_file)
    assert refusal(in_file).startswith(f"{in_file}: ")


def test_mistyped_key_is_reported_before_missing_key(tiny_recipe: Path):
    tiny_recipe.write_text(tiny_recipe.read_text().replace("steps =", "stpes ="))
    assert refusal(tiny_recipe) == f"{tiny_recipe}: train.stpes: unknown key; did you mean train.steps?"


def test_missing_key_counts_as_a_mistake_unless_a_mistyped_one_stands_for_it(tiny_recipe: Path):
    text = tiny_recipe.read_text()
    tiny_recipe.write_text(text.replace("[train]", "[trian]"))
    assert refusal(tiny_recipe) == f"{tiny_recipe}: trian: unknown table; did you mean train?"
    (batch,) = [line for line in text.splitlines() if line.startswith("batch =")]
    tiny_recipe.write_text(text.replace("steps =", "stpes =").replace(batch, ""))
    assert refusal(tiny_recipe).endswith("did you mean train.steps? (and 1 more key to fix)")


def test_mistake_is_located_in_override_or_file(tiny_recipe: Path):
    assert refusal(tiny_recipe, "train.batch=2", "train.steps=0").startswith('override "train.steps=0": train.steps: ')
    tiny_recipe.write_text(tiny_recipe.read_text().replace("steps = 4", "steps = 0"))
    assert refusal(tiny_recipe, "train.batch=2").startswith(f"{tiny_recipe}: train.steps: ")


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("train.steps=0", "should be a whole number, at least 1, not 0"),
        ("train.steps=2.5", "should be a whole number, at least 1, not 2.5"),
        ('train.steps="3"', 'should be a whole number, at least 1, not "3"'),
        ("train.steps=true", "should be a whole number, at least 1, not true"),
        ("train.batch=-2", "at least 1"),
        ("train.learning_rate=0", "should be a number, above 0, not 0"),
        ("train.learning_rate=nan", "should be a number, above 0, not nan"),
        ("train.learning_rate=inf", "not inf"),
        ("train.clip=-1", "at least 0"),
        ("train.minimum_learning_rate=1.5", "at least 0 and at most 1"),
        ("train.betas=[0.9]", "should be a list of 2"),
        ("train.betas=[0.9, 1.0]", "at least 0 and below 1"),
        ("train.slow_rank_factor=1", "above 1"),
        ("train.compile=True", "should be true or false"),
        ("train.optimizer=adamq", 'unknown optimizer "adamq"; did you mean "adamw"?'),
        ("train.schedule=cosin", 'did you mean "cosine"?'),
        ("train=3", "train: should be a table, not 3"),
        ("run.seed=-1", "at least 0"),
        ("run.name=a/b", "should be a plain directory name"),
        ('run.name=".."', "should be a plain directory name"),
        ("run.device=gpu", 'unknown device "gpu"'),
        ("run.rendezvous=tcp://host", "should be tcp://HOST:PORT or file:///PATH"),
        ("run.collective_timeout=0", "above 0"),
        ("run.threads=0", "at least 1"),
        ("run.threads=100000", "run.threads: 100000 is too large: at most 1,024"),
        ("data.validation_fraction=1", "below 1"),
        ("data.source=[]", "should be text in quotes or a list"),
        ("data.source=[3]", "should be text in quotes or a list"),
        ("data.clean.maximum_repetition=2", "at most 1"),
        ("data.vocabulary=256", "at least 257"),
        ("data.tokenizer=", "should be text in quotes"),
        ("checkpoint.keep=0", "at least 1"),
        ("checkpoint.dtype=bf16", 'unknown dtype "bf16"; did you mean "bfloat16"?'),
        ("model.family=lama", 'unknown family "lama"; did you mean "llama"?'),
        ("model.rope_scaling=3", "should be a table, not 3"),
        (
            "collectives.all_reduce=rabenseifer",
            'unknown all-reduce algorithm "rabenseifer"; did you mean "rabenseifner"?',
        ),
        ("collectives.reduce_scatter=butterfly", 'unknown reduce-scatter algorithm "butterfly"'),
        ("layout=dp2 zro1", 'unknown part "zro1"; did you mean "zero1"?'),
        ("layout=dp4 zero1 hs3", "groups of 3 do not divide"),
    ],
)
def test_value_out_of_range_is_refused_with_valid_range(tiny_recipe: Path, override: str, reason: str):
    message = refusal(tiny_recipe, override)
    assert reason in message
    key = override.partition("=")[0]
    assert message.startswith(f'override "{override}": {key}: ') and f": {key}: {key} " not in message


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["train.warmup=5"], "warmup = 5 is more than steps = 4"),
        (
            ["train.schedule=wsd", "train.warmup=2", "train.decay=3"],
            "warmup = 2 and decay = 3 do not fit into steps = 4",
        ),
        (["train.schedule=wsd"], 'schedule "wsd" needs decay'),
        (["train.decay=1"], 'schedule "cosine" has none'),
        (["train.momentum=0.9"], 'momentum belongs to optimizer "sgd"'),
        (["train.validate_every=1", "data.validation_fraction=0"], "data.validation_fraction is 0"),
        (["model.preset=gpt2"], "has two architectures, by preset and by family"),
        (["model.load_weights=true"], "load_weights needs from"),
    ],
)
def test_values_that_contradict_each_other_are_refused(tiny_recipe: Path, overrides: list[str], reason: str):
    assert reason in refusal(tiny_recipe, *overrides)


SOURCES = """
[[data.sources]]
path = "a"
weight = 3

[[data.sources]]
path = "b/*.parquet"
text_key = "page.text"
weight = 0.5
"""


def with_sources(recipe: Path, text: str = SOURCES) -> Path:
    """Write the recipe with tables of sources instead of its source."""
    lines = [line for line in recipe.read_text().splitlines() if not line.startswith("source")]
    recipe.write_text("\n".join(lines) + "\n" + text)
    return recipe


def test_several_sources_are_tables_with_weights(tiny_recipe: Path):
    recipe = load_recipe(with_sources(tiny_recipe))
    assert [source.path for source in recipe.data.all_sources] == ["a", "b/*.parquet"]
    assert recipe.data.weights == (3.0, 0.5)
    assert load_recipe_text(recipe.to_toml(), "copy") == recipe
    without = load_recipe(with_sources(tiny_recipe), ['data.sources=[{path="c"}, {path="d", name="e"}]'])
    assert without.data.weights is None


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("weight = 3", "wieght = 3", "data.sources number 1: wieght: unknown key; did you mean weight?"),
        ("weight = 0.5", "weight = 0", "data.sources number 2: weight: should be a number, above 0, not 0"),
        ('path = "a"', "", "data.sources number 1: path: this key is missing; it should be text in quotes"),
        (
            'path = "a"',
            'path = "a"\nformat = "parqet"',
            'number 1: format: unknown format "parqet"; did you mean "parquet"?',
        ),
        (
            "weight = 0.5",
            "",
            'data: sources: "b/*.parquet" has no weight but another source has: give every source one, or none',
        ),
        ('path = "a"', 'path = "b/*.parquet"', 'two are called "b/*.parquet": give each a unique name'),
        (SOURCES, "", "data: names no source: give source, or a [[data.sources]] table for each of several"),
        (SOURCES, "[data.sources]", "data.sources: should be a list, each a table"),
        (SOURCES, f'source = "a"\n{SOURCES}', "data: has both source and sources: keep one"),
    ],
)
def test_mistake_in_source_table_names_that_table(tiny_recipe: Path, old: str, new: str, reason: str):
    lines = [line for line in tiny_recipe.read_text().splitlines() if not line.startswith("source")]
    place = lines.index("[data]") + 1
    assert old in SOURCES
    text = SOURCES.replace(old, new)
    if text.startswith("source ="):
        lines.insert(place, text.partition("\n")[0])
        text = text.partition("\n")[2]
    tiny_recipe.write_text("\n".join(lines) + "\n" + text)
    assert reason in refusal(tiny_recipe)


def test_a_model_needs_an_architecture(tiny_recipe: Path):
    text = tiny_recipe.read_text()
    tiny_recipe.write_text(text.replace('family = "llama"\n', ""))
    assert "model: has no architecture: give preset, from, or family" in refusal(tiny_recipe)
    tiny_recipe.write_text(text.replace("layers = 2\n", "").replace("heads = 4\n", ""))
    assert "family llama needs layers and heads as well" in refusal(tiny_recipe)
    tiny_recipe.write_text(text.replace('family = "llama"\n', 'from = "directory"\nload_weights = true\n'))
    assert load_recipe(tiny_recipe).model.from_path == "directory"


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("train.steps", "an override is written table.key=value"),
        ("=3", "an override is written table.key=value"),
        ("train.steps.x=3", "train.steps is a value, not a table"),
    ],
)
def test_malformed_override_is_refused(tiny_recipe: Path, override: str, reason: str):
    assert reason in refusal(tiny_recipe, override)


def test_empty_file_is_refused_with_missing_keys(tmp_path: Path):
    empty = tmp_path / "empty.toml"
    empty.touch()
    assert refusal(empty) == f"{empty}: model: this table is missing (and 2 more keys to fix)"
    with pytest.raises(UserError, match=r"^here: train: this table is missing; it needs steps, batch, learning_rate"):
        Recipe.from_tables({"model": {"preset": "gpt2"}, "data": {"source": "stdlib", "sequence": 8}}, "here")


def test_invalid_toml_is_refused_from_python_too():
    with pytest.raises(UserError, match="data.source: should be text in quotes or a list"):
        Recipe.from_tables({"model": {"preset": "gpt2"}, "data": {"source": Path("x"), "sequence": 8}})


def test_contradiction_caused_by_override_names_override_and_file(tiny_recipe: Path):
    tiny_recipe.write_text(tiny_recipe.read_text().replace("steps = 4", "steps = 40\nwarmup = 5"))
    line = refusal(tiny_recipe, "model.layers=3", "train.steps=3")
    more = "train: warmup = 5 is more than steps = 3; set train.warmup=0, or up to 3"
    assert line == f'{tiny_recipe} with override "train.steps=3": {more}'
    line = refusal(tiny_recipe, "train.validate_every=2", "data.validation_fraction=0")
    assert line.startswith(f'{tiny_recipe} with overrides "train.validate_every=2", "data.validation_fraction=0": ')
    tiny_recipe.write_text(tiny_recipe.read_text().replace("warmup = 5", "warmup = 50"))
    assert refusal(tiny_recipe).startswith(f"{tiny_recipe}: train: warmup = 50 is more")


def test_reading_a_recipe_is_quick_and_needs_no_torch():
    program = "import sys, meshwright.recipe; assert 'torch' not in sys.modules"
    begun = processor_time.of_ended_processes()
    subprocess.run([sys.executable, "-c", program], check=True)
    assert processor_time.of_ended_processes() - begun < 2.0


def test_objective_follows_from_records_and_must_match_them(tiny_recipe: Path):
    assert load_recipe(tiny_recipe).objective == "next-token"
    pairs = "data.records=preference"
    assert load_recipe(tiny_recipe, [pairs]).objective == "dpo"
    assert load_recipe(tiny_recipe, [pairs, "train.objective=ipo"]).objective == "ipo"
    for overrides, said in (
        ([pairs, "train.objective=next-token"], "would learn the rejected responses too"),
        (["train.objective=dpo"], 'it needs data.records = "preference", not "text"'),
        (["data.records=chat", "train.objective=ipo"], 'it needs data.records = "preference", not "chat"'),
        ([pairs, "train.objective=dop"], 'unknown objective "dop"; did you mean "dpo"?'),
        ([pairs, "train.objective=ipo", "train.preference_smoothing=0.1"], 'belongs to objective "dpo"'),
        ([pairs, "train.desirable_weight=2"], 'train.desirable_weight belongs to objective "kto"; "dpo" has none'),
        (["train.preference_beta=0.5"], 'train.preference_beta belongs to objective "dpo" or'),
        ([pairs, "train.label_smoothing=0.1"], "did you mean train.preference_smoothing?"),
        ([pairs, "train.preference_beta=0"], "above 0"),
    ):
        with pytest.raises(UserError, match=re.escape(said)):
            load_recipe(tiny_recipe, overrides)


def test_keys_of_other_programs_lead_to_keys_of_a_recipe():
    assert set(OTHER_NAMES.values()) <= set(SCHEMA.keys)
