"""The recipe: one TOML file that says what to train and on what; every mistake in it is one line that names its key."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field, PrivateAttr, model_validator

from meshwright.errors import UserError
from meshwright.layout import Layout
from meshwright.names import (
    ALGORITHM_ALIASES,
    CHECKPOINT_DTYPES,
    COLLECTIVE_ALGORITHMS,
    DATA_FORMATS,
    DEVICES,
    FAMILIES,
    HEURISTICS,
    LEARNING_RATE_SCHEDULES,
    OPTIMIZERS,
    PERSONAL_DATA,
    RECORD_TYPES,
    unknown,
)
from meshwright.tables import Schema, Table, matching, named
from meshwright.toml import parse_toml, read_toml, write_toml


def _layout(text: str) -> str:
    if text == "auto":  # `meshwright train` has the planner choose
        return text
    try:
        Layout.parse(text)
    except UserError as error:
        raise ValueError(str(error).removeprefix(f'layout "{text}": ')) from None  # the key says it already
    return text


def _power_of_two(value: float) -> float:
    if math.frexp(value)[0] != 0.5 or value < 1:
        raise ValueError(f"{value:g} is not a power of two from 1 on: only those scale without rounding")
    return value


def _program_for(operation: str) -> AfterValidator:
    """Marks the name of a collective program for an operation."""
    algorithms = (*COLLECTIVE_ALGORITHMS[operation], *ALGORITHM_ALIASES.get(operation, {}))

    def check(text: str) -> str:
        if text == "native" or text in algorithms or re.fullmatch("@.+", text):
            return text
        raise ValueError(unknown(f"{operation} algorithm", text, ("native", "@FILE", *algorithms)))

    return AfterValidator(check)


RunName = Annotated[str, matching(r"[^/\\.][^/\\]*", "a plain directory name")]
Rendezvous = Annotated[str, matching(r"tcp://[^/:]+:[0-9]+|file:///.+", "tcp://HOST:PORT or file:///PATH")]
Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Name = Annotated[str, Field(min_length=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]  # of a running average: 1 would never forget


class RunRecipe(Table):
    """[run]: where it runs and where it leaves its files."""

    name: RunName = "run"  # the name of the recipe's file unless said
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    directory: Name | None = None  # runs/NAME unless said
    rendezvous: Rendezvous | None = None  # the environment's (torchrun, SLURM) unless said
    device: Annotated[str, named("device", DEVICES)] = "auto"
    threads: Count | None = None  # per rank; the processors shared out unless said
    collective_timeout: Positive = 600.0  # seconds


class ModelRecipe(Table):
    """[model]: a preset, a Hugging Face directory (`from`), or a family; sizes given here override what those say."""

    preset: Name | None = None
    from_path: Name | None = Field(default=None, alias="from")  # a directory or a config.json
    load_weights: bool = False  # with `from`: start from its weights
    family: Annotated[str, named("family", FAMILIES)] | None = None
    layers: Count | None = None
    hidden: Count | None = None
    heads: Count | None = None
    kv_heads: Count | None = None
    head_dim: Count | None = None
    intermediate: Count | None = None
    vocabulary: Count | None = None  # the tokenizer's unless said
    max_positions: Count | None = None  # data.sequence unless said
    rope_theta: Positive | None = None
    rope_scaling: dict[str, bool | int | float | str] | None = None
    sliding_window: Count | None = None
    tied: bool | None = None
    norm_epsilon: Positive | None = None
    experts: Count | None = None  # of each layer; families with experts only
    experts_per_token: Count | None = None
    expert_intermediate: Count | None = None
    shared_intermediate: CountOrZero | None = None  # 0: no shared expert
    dense_layers: list[CountOrZero] | None = None  # layers without experts
    router_loss: NotNegative | None = None  # weight of the loss that balances experts

    @model_validator(mode="after")
    def _one_architecture(self) -> Self:
        said = [
            key for key, value in (("preset", self.preset), ("from", self.from_path), ("family", self.family)) if value
        ]
        if not said:
            raise ValueError("says no architecture: give preset, from, or family with layers, hidden and heads")
        if len(said) > 1:
            raise ValueError(f"says the architecture twice, by {said[0]} and by {said[1]}: keep one")
        if self.family:
            missing = [key for key in ("layers", "hidden", "heads") if getattr(self, key) is None]
            if missing:
                raise ValueError(f"family {self.family} needs {' and '.join(missing)} as well")
        if self.load_weights and not self.from_path:
            raise ValueError("load_weights needs from: the directory that holds the weights")
        return self


class CleanRecipe(Table):
    """[data.clean]: which documents are dropped, and what in the others is masked."""

    minimum_characters: CountOrZero = 1
    maximum_characters: Count | None = None
    maximum_control_fraction: Fraction = 0.01  # control characters other than white space
    maximum_repetition: Fraction = 0.75  # of a document's lines, those that stood earlier in it
    exact_duplicates: bool = True  # drop them
    encoding: Name = "utf-8"
    required_keys: dict[str, Annotated[str, named("type", RECORD_TYPES)]] = {}  # of a record, and what their values are
    languages: list[Name] = []  # kept; all unless given
    minimum_language_probability: Fraction = 0.65
    heuristics: list[Annotated[str, named("heuristic", HEURISTICS)]] = []  # published rules for prose
    heuristics_on_code: bool = False  # and the languages: ask them of files of source code too
    mask: list[Annotated[str, named("kind", PERSONAL_DATA)]] = []
    evaluation_sets: list[Name] = []  # text or JSON Lines that training must not have seen
    contamination_words: Count = 13  # in a run that counts as shared
    maximum_contamination: Fraction = 0.0  # of a document's words, those in shared runs
    near_duplicates: bool = False  # drop them
    minhash_bands: Annotated[int, Field(ge=1, le=256)] = 14
    minhash_rows: Annotated[int, Field(ge=1, le=64)] = 8
    minhash_words: Count = 5  # in a shingle


class SourceRecipe(Table):
    """[[data.sources]]: one of several sources, and its share of the samples."""

    path: Name  # as data.source
    name: Name | None = None  # what counts call it; its path unless said
    weight: Positive | None = None  # its share of the samples, relative to the others'
    format: Annotated[str, named("format", DATA_FORMATS)] = "auto"  # data.format unless said
    text_key: Name | None = None  # data.text_key unless said


class DataRecipe(Table):
    """[data]: what is read, how it becomes tokens, and how tokens become samples."""

    source: Name | Annotated[list[Name], Field(min_length=1)] | None = None  # "stdlib", a path, URL, glob, or several
    sources: Annotated[list[SourceRecipe], Field(min_length=1)] | None = None  # in place of source
    format: Annotated[str, named("format", DATA_FORMATS)] = "auto"
    text_key: Name = "text"  # of a JSONL line, or the column of a Parquet file; "a.b": the key b inside a
    tokenizer: Name = "bpe"  # a kind of names.TOKENIZERS, a tokenizer.json or a Hugging Face directory
    vocabulary: Annotated[int, Field(ge=257, le=2**24)] = 2048  # of a tokenizer that is trained on the data
    sequence: Count  # tokens in a sample
    document_mask: bool = True  # documents packed into one sample do not see each other
    validation_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.05  # of the documents
    cache: Name | None = None  # the user's cache directory unless said
    shard_tokens: Count = 2**26  # tokens in one file of the cache
    clean: CleanRecipe = CleanRecipe()

    @model_validator(mode="after")
    def _sources_agree(self) -> Self:
        if (self.source is None) == (self.sources is None):
            raise ValueError(
                "says no text to read: give source, or a [[data.sources]] table for each of several"
                if self.source is None
                else "says its text twice, by source and by sources: keep one"
            )
        weighted = [source.weight is not None for source in self.sources or []]
        if any(weighted) and not all(weighted):
            without = self.all_sources[weighted.index(False)].path
            raise ValueError(f'sources: "{without}" has no weight and another has: give every source one, or none')
        names = [source.name or source.path for source in self.sources or []]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f'sources: two are called "{twice}": give each a name of its own')
        return self

    @property
    def source_key(self) -> str:
        """The key that says what is read."""
        return "data.source" if self.sources is None else "data.sources"

    @property
    def all_sources(self) -> tuple[SourceRecipe, ...]:
        if self.sources is not None:
            return tuple(self.sources)
        paths = [self.source] if isinstance(self.source, str) else self.source or []
        return tuple(SourceRecipe(path=path) for path in paths)

    @property
    def weights(self) -> tuple[float, ...] | None:
        """The share of each source in the samples, relative to the others'; None: they are read as one text."""
        said = tuple(source.weight for source in self.all_sources if source.weight is not None)
        return said or None


_IN_PLACE_OF = {"data.source": "sources", "data.sources": "source"}


class TrainRecipe(Table):
    """[train]: one optimizer step after another."""

    steps: Count
    batch: Count  # sequences in a step, over all ranks
    optimizer: Annotated[str, named("optimizer", OPTIMIZERS)] = "adamw"
    learning_rate: Positive  # at the peak
    betas: Annotated[list[Decay], Field(min_length=2, max_length=2)] = [0.9, 0.95]
    epsilon: Positive = 1e-8
    weight_decay: NotNegative = 0.1
    momentum: Decay = 0.0  # sgd
    router_bias_rate: NotNegative = 0.001  # a step of the biases that balance experts, where a family has them
    schedule: Annotated[str, named("schedule", LEARNING_RATE_SCHEDULES)] = "cosine"
    warmup: CountOrZero = 0  # steps
    decay: CountOrZero = 0  # steps of the wsd tail
    minimum_learning_rate: Fraction = 0.1  # of the peak
    clip: NotNegative = 1.0  # global gradient norm; 0 = off
    compile: bool = False
    deterministic: bool = False
    validate_every: CountOrZero = 0  # steps; 0 = never
    validation_sequences: Count = 64
    maximum_skipped: CountOrZero = 10  # steps in a row whose loss or gradient is not finite
    loss_scale: Annotated[Positive, AfterValidator(_power_of_two)] = 65536.0  # fp16: at the start
    loss_scale_every: Count = 2000  # fp16: finite steps in a row after which it is doubled
    log_every: Count = 1
    slow_rank_factor: Annotated[float, Field(gt=1)] = 1.5  # times the median rank

    @model_validator(mode="after")
    def _steps_fit(self) -> Self:
        if self.warmup + self.decay > self.steps:
            parts = f"warmup = {self.warmup}" + (f" and decay = {self.decay}" if self.decay else "")
            raise ValueError(
                f"{parts} do not fit into steps = {self.steps}"
                if self.decay
                else f"{parts} is more than steps = {self.steps}"
            )
        if self.schedule == "wsd" and not self.decay:
            raise ValueError('schedule "wsd" needs decay: the number of steps of its tail')
        if self.decay and self.schedule != "wsd":
            raise ValueError(f'decay is the tail of schedule "wsd"; schedule "{self.schedule}" has none')
        if self.momentum and self.optimizer != "sgd":
            raise ValueError(f'momentum belongs to optimizer "sgd"; "{self.optimizer}" has betas')
        return self


class CollectivesRecipe(Table):
    """[collectives]: the programs that gradients and parameters travel by over the data, shard and replica axes.

    "native": what torch.distributed does; an algorithm's name; "auto": by the size of each vector; "@FILE": a program.
    """

    all_reduce: Annotated[str, _program_for("all-reduce")] = "native"
    reduce_scatter: Annotated[str, _program_for("reduce-scatter")] = "native"
    all_gather: Annotated[str, _program_for("all-gather")] = "native"


class CheckpointRecipe(Table):
    """[checkpoint]: what is kept."""

    every: CountOrZero = 0  # steps; 0 = at the end only
    keep: Count = 2
    keep_best: bool = True
    dtype: Annotated[str, named("dtype", CHECKPOINT_DTYPES)] = "float32"
    background: bool = True


class Recipe(Table):
    """A whole recipe, read by `load_recipe` from a file or by `Recipe.from_tables` from dictionaries.

    Relative paths in it start at the current directory.
    """

    layout: Annotated[str, AfterValidator(_layout)] = "dp1"
    run: RunRecipe = RunRecipe()
    model: ModelRecipe
    data: DataRecipe
    train: TrainRecipe
    collectives: CollectivesRecipe = CollectivesRecipe()
    checkpoint: CheckpointRecipe = CheckpointRecipe()

    _source_path: Path | None = PrivateAttr(default=None)
    _overrides: dict[str, str] = PrivateAttr(default_factory=dict)  # dotted key -> the override that said it

    @model_validator(mode="after")
    def _tables_agree(self) -> Self:
        if self.train.validate_every and not self.data.validation_fraction:
            raise ValueError("train.validate_every needs validation data, and data.validation_fraction is 0")
        return self

    def __eq__(self, other: object) -> bool:
        """Equal recipes say the same; from which file does not matter."""
        return isinstance(other, Recipe) and self.model_dump() == other.model_dump()

    @property
    def parsed_layout(self) -> Layout:
        """`UserError` where it is still to be chosen."""
        if self.layout == "auto":
            raise UserError(
                f'{self.where("layout")}: layout "auto" is chosen by `meshwright train`; here name one, such as '
                '"dp2 zero1" (`meshwright plan` says which is the fastest)'
            )
        return Layout.parse(self.layout)

    @property
    def source_path(self) -> Path | None:
        """The file it was read from."""
        return self._source_path

    def where(self, key: str) -> str:
        """Where a person said the value of `key`: an override or the file."""
        return _said_where(self._overrides, key, str(self._source_path or "recipe"))

    @property
    def run_directory(self) -> Path:
        return Path(self.run.directory) if self.run.directory else Path("runs") / self.run.name

    @classmethod
    def from_tables(cls, tables: Mapping[str, Any], where: str = "recipe") -> Recipe:
        """Check a recipe given as nested dictionaries. `UserError` in one line that starts with `where`."""
        return SCHEMA.check(tables, lambda key: where)

    def to_toml(self) -> str:
        """The whole recipe, defaults included, as TOML that reads back equal."""
        return write_toml(self.to_tables())

    def to_tables(self) -> dict[str, Any]:
        """The whole recipe, defaults included, as nested dictionaries that `from_tables` reads back equal."""
        return self.model_dump(by_alias=True, exclude_none=True)


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read the recipe at `path` with `overrides` such as `train.steps=100` or `layout=dp2 zero1`; the last one counts.

    Values of overrides are TOML; a bare word is a string. `UserError`: one line with the file or the override, the key,
    and what would be right.
    """
    path = Path(path)
    tables = read_toml(path, "recipe")
    said_by: dict[str, str] = {}
    for override in overrides:
        key = SCHEMA.override(tables, override)
        if key in _IN_PLACE_OF:  # what is said last takes the place of what the file says
            tables["data"].pop(_IN_PLACE_OF[key], None)
        said_by.pop(key, None)  # the last one counts, and is the last in an error line too
        said_by[key] = override
    run = tables.setdefault("run", {})
    if isinstance(run, dict) and re.fullmatch(r"[^.].*", path.stem):
        run.setdefault("name", path.stem)

    recipe = SCHEMA.check(tables, lambda key: _said_where(said_by, key, str(path)))
    recipe._source_path, recipe._overrides = path, said_by
    return recipe


def _said_where(said_by: Mapping[str, str], key: str, file: str) -> str:
    """The override that said `key`, else the file; for a table of which both said something, both."""
    own = [text for name, text in said_by.items() if key == name or key.startswith(f"{name}.")]
    if own:
        return f'override "{own[-1]}"'
    inside = [f'"{text}"' for name, text in said_by.items() if not key or name.startswith(f"{key}.")]
    if not inside:
        return file
    return f"{file} with override{'s' if len(inside) > 1 else ''} {', '.join(inside)}"


def load_recipe_text(text: str, where: str) -> Recipe:
    """A recipe from its text, as `Recipe.to_toml` writes it; a `UserError` starts with `where`."""
    recipe = Recipe.from_tables(parse_toml(text, where), where)
    recipe._source_path = Path(where)
    return recipe


SCHEMA = Schema(
    Recipe,
    elsewhere={
        "batch_size": "train.batch",
        "d_model": "model.hidden",
        "dtype": "layout",
        "eps": "train.epsilon",
        "grad_clip": "train.clip",
        "hidden_size": "model.hidden",
        "intermediate_size": "model.intermediate",
        "lr": "train.learning_rate",
        "max_grad_norm": "train.clip",
        "max_steps": "train.steps",
        "min_lr": "train.minimum_learning_rate",
        "n_embd": "model.hidden",
        "n_head": "model.heads",
        "n_layer": "model.layers",
        "num_attention_heads": "model.heads",
        "num_hidden_layers": "model.layers",
        "num_key_value_heads": "model.kv_heads",
        "output_dir": "run.directory",
        "precision": "layout",
        "save_every": "checkpoint.every",
        "seq_len": "data.sequence",
        "tie_word_embeddings": "model.tied",
        "vocab_size": "data.vocabulary",
        "warmup_steps": "train.warmup",
    },
)
