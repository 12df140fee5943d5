"""Names that users may write (schedules, algorithms, model families ...), and the error message for an unknown one."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from inspect import Parameter, signature
from pathlib import Path

from meshwright.errors import UserError

PRECISIONS = ("fp32", "tf32", "bf16", "fp16", "fp8")
ZERO_LEVELS = (0, 1, 2, 3)
RECOMPUTE = ("none", "selective", "full")
OFFLOADS = ("cpu", "nvme")
CONTEXT_METHODS = ("ring", "ulysses")

# Model chunks of a rank under each pipeline schedule: (default, minimum, maximum). None: no maximum.
SCHEDULE_CHUNKS: dict[str, tuple[int, int, int | None]] = {
    "gpipe": (1, 1, 1),
    "1f1b": (1, 1, 1),
    "interleaved": (2, 2, None),
    "looped-bfs": (2, 2, None),
    "interleaved-zb": (2, 2, None),
    "zb-h1": (1, 1, 1),
    "zb-h2": (1, 1, 1),
    "zb-v": (2, 2, 2),
    "v-half": (2, 2, 2),
    "v-min": (2, 2, 2),
    "dualpipe": (1, 1, 1),
    "dualpipe-v": (2, 2, 2),
    "chimera": (1, 1, 1),
    "gems": (1, 1, 1),
    "pipedream": (1, 1, 1),
    "pipedream-2bw": (1, 1, 1),
    "auto": (1, 1, None),
}
SCHEDULES = tuple(SCHEDULE_CHUNKS)
ASYNCHRONOUS_SCHEDULES = ("pipedream", "pipedream-2bw")  # weights are updated while micro-batches are in flight
BIDIRECTIONAL_SCHEDULES = ("dualpipe", "chimera", "gems")

OPERATIONS = (
    "send-receive",
    "barrier",
    "broadcast",
    "scatter",
    "gather",
    "reduce",
    "all-gather",
    "reduce-scatter",
    "all-reduce",
    "all-to-all",
)
REDUCTIONS = ("sum", "mean", "minimum", "maximum")
# Algorithms of each collective operation. "auto" chooses among the others by size and topology.
COLLECTIVE_ALGORITHMS: dict[str, tuple[str, ...]] = {
    "send-receive": ("direct", "auto"),
    "barrier": ("dissemination", "binomial-tree", "auto"),
    "broadcast": ("binomial-tree", "ring", "scatter-all-gather", "double-binary-tree", "hierarchical", "auto"),
    "scatter": ("binomial-tree", "linear", "auto"),
    "gather": ("binomial-tree", "linear", "auto"),
    "reduce": ("binomial-tree", "ring", "reduce-scatter-gather", "double-binary-tree", "hierarchical", "auto"),
    "all-gather": (
        *("ring", "bidirectional-ring", "recursive-doubling", "bruck", "pairwise", "all-pairs", "hierarchical"),
        *("2d-torus", "3d-torus", "torus", "2d-mesh", "mesh", "auto"),
    ),
    "reduce-scatter": (
        *("ring", "bidirectional-ring", "recursive-halving", "pairwise", "all-pairs", "hierarchical"),
        *("2d-torus", "3d-torus", "torus", "2d-mesh", "mesh", "auto"),
    ),
    "all-reduce": (
        *("ring", "halving-doubling", "rabenseifner", "butterfly", "binomial-tree", "double-binary-tree"),
        *("hierarchical", "hierarchical-scatter", "2d-torus", "2d-mesh", "3d-torus", "torus", "mesh"),
        *("all-pairs", "bidirectional-ring", "auto"),
    ),
    "all-to-all": ("pairwise", "ring", "bruck", "all-pairs", "hierarchical", "auto"),
}
# Aliases in the literature.
ALGORITHM_ALIASES: dict[str, dict[str, str]] = {
    "all-reduce": {"recursive-doubling": "butterfly"},
    "broadcast": {"chain": "ring"},
    "reduce": {"chain": "ring"},
    "all-to-all": {"linear": "all-pairs"},
}

FAMILIES = (
    "llama", "mistral", "qwen2", "qwen3", "gpt2", "mixtral", "qwen2_moe", "qwen3_moe", "dots1", "deepseek_v2",
    "deepseek_v3", "granite", "olmo2", "olmo3", "smollm3", "gemma2", "gemma3_text", "phi3", "glm4", "glm4_moe",
    "gpt_oss", "granitemoe", "llama4_text",
)  # fmt: skip
ENCODER_FAMILIES = ("bert",)  # trained by `fit` in the user's own loop; supported by the planner
ROPE_SCALINGS = ("linear", "llama3", "yarn", "longrope")

CORPORA = ("stdlib",)
DATA_FORMATS = ("auto", "text", "jsonl", "json", "parquet", "wet", "warc")
EXTRACTORS = {"trafilatura": "web", "resiliparse": "resiliparse"}  # of main texts from HTML -> extra of pyproject.toml
RECORDS = ("text", "instruction", "chat", "preference", "unpaired")  # kind of a source's records
TEMPLATES = ("instruction", "chatml", "model")  # chat templates
ROLES = ("system", "user", "assistant", "tool", "developer")  # of messages
MESSAGE_KEYS = ("role", "content")  # that data.message_keys renames
THINKING = ("template", "all", "none", "last")  # reasoning of assistant turns that is kept
TRAINED = ("responses", "all")  # target tokens of the loss
TOO_LONG = ("truncate", "drop", "refuse")  # treatment of examples longer than a sequence
TOKENIZERS = ("bytes", "bpe", "word", "character", "wordpiece", "unigram")
HEURISTICS = ("gopher-quality", "gopher-repetition", "c4", "fineweb")  # families of rules for prose
HEURISTIC_VALUES = ("papers", "datatrove")  # whose thresholds and words the heuristics take
PERSONAL_DATA = ("key", "email", "phone", "ip")  # what can be masked
RECORD_TYPES = ("text", "number", "integer", "boolean", "list", "table")  # types of a value in a record

OPTIMIZERS = ("adamw", "sgd")
OBJECTIVES_OF_RECORDS = {  # of the records with preferences; the first is the default
    "preference": ("dpo", "ipo", "simpo", "orpo"),
    "unpaired": ("kto",),
}
OBJECTIVES = ("next-token", *(name for names in OBJECTIVES_OF_RECORDS.values() for name in names))
SAMPLERS = ("tpe", "random")  # of hyper-parameters
PRUNERS = ("median", "halving", "none")  # of trials of a hyper-parameter search
LEARNING_RATE_SCHEDULES = ("cosine", "linear", "wsd", "constant")
ADAPTER_KINDS = ("none", "lora", "rslora", "dora")
ADAPTER_BASES = ("bf16", "int8", "nf4")
DISTILLATION_LOSSES = ("forward_kl", "reverse_kl", "jsd")
TEACHER_LAYOUTS = ("same", "replicated", "zero3", "replicated tp1", "zero3 tp1")
TEACHER_DTYPES = ("float32", "bfloat16", "float16", "float64")
CHECKPOINT_DTYPES = ("float32", "bfloat16")
TENSOR_OVERLAPS = ("off", "auto", "chunks")
DEVICES = ("auto", "cpu", "cuda")


MAX_LISTED = 24
"""Maximum number of names that an error message lists; of a longer list it shows only similar ones."""

LISTED = '"meshwright plan --list" prints them'
"""Hint in error messages: the command that prints the names of presets and devices."""


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the name in `known` that is most similar to the misspelt `word`, ignoring case; None if no name is
    similar."""
    by_lower_case = {name.lower(): name for name in known}
    matches = difflib.get_close_matches(word.lower(), list(by_lower_case), n=1, cutoff=0.6)
    return by_lower_case[matches[0]] if matches else None


def unknown(kind: str, word: str, known: Iterable[str], listed: str = "") -> str:
    """Return the error message for an unknown name: `unknown optimizer "adamq"; did you mean "adamw"? (known: adamw,
    sgd)`.

    kind: noun for what is named, such as "optimizer". word: the unknown name. known: all valid names. listed: command
    or page that lists them, which replaces the list in the message if there are more than `MAX_LISTED` names.
    """
    known = list(known)
    close = nearest(word, known)
    suggestion = f'; did you mean "{close}"?' if close else ""
    if len(known) <= MAX_LISTED:
        return f'unknown {kind} "{word}"{suggestion} (known: {", ".join(known)})'
    like = [name for name in difflib.get_close_matches(word.lower(), known, n=5, cutoff=0.4) if name != close]
    others = f"; similar: {', '.join(like)}" if like else ""
    return f'unknown {kind} "{word}"{suggestion} ({len(known)} are known{others}{f"; {listed}" if listed else ""})'


def list_other_steps(path: Path) -> str:
    """Format the end of the error message about a missing checkpoint: the names of the newest checkpoints in the
    directory that contains `path`, at most `MAX_LISTED`, such as "; checkpoints there: step-000200, step-000300".
    Returns "" if `path` is not named like a checkpoint, or there are none."""
    others = sorted(one.name for one in path.parent.glob("step-*")) if path.name.startswith("step-") else []
    return f"; checkpoints there: {', '.join(others[-MAX_LISTED:])}" if others else ""


def refuse_unknown(table: Iterable[object], known: Sequence[str], where: str, kind: str = "field") -> None:
    """Raise `UserError`, with the most similar name, if `table` has a key that is not in `known`. where: beginning of
    the error text, such as the name of a file; kind: noun for a key in the error text."""
    for key in table:
        if key not in known:
            raise UserError(f"{where}: {unknown(kind, str(key), known)}")


def check_options(function: Callable[..., object], given: Iterable[str], options: type) -> None:
    """Check that the names `given` are options of `function`: its named parameters, or keys of `options`, the
    `TypedDict` that types its `**` parameter. Raises `UserError` for the first name that is not an option."""
    parameters = signature(function).parameters.values()
    known = [*(each.name for each in parameters if each.kind is not Parameter.VAR_KEYWORD), *options.__annotations__]
    for name in given:
        if name not in known:
            raise UserError(f"{function.__name__}: {unknown('option', name, known)}")
