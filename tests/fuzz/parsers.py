"""Every parser of untrusted files and notations: valid inputs, and readers.

A reader raises one of its `refusals` in one line, or returns; if there is a printer, it checks that a value
that is read, printed and read again is equal.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.errors import CheckFailed, UserError
from tests.conftest import TINY_RECIPE
from tests.fuzz.data_parsers import (
    ANSWER,
    BODIES,
    EVALUATION,
    SAMPLE,
    TRACKERS,
    answer_refusals,
    body_refusals,
    compressed_inputs,
    data_inputs,
    file_inputs,
    read_answer,
    read_body,
    read_data,
    read_evaluation_set,
    read_keys,
    read_printed,
    read_torch_file,
    read_trackers,
    torch_files,
)
from tests.fuzz.inputs import Inputs, one_of, spoiled, spoiled_json
from tests.fuzz.model_parsers import (
    INDEX,
    LAYOUT_WORDS,
    LAYOUTS,
    OVERRIDES,
    RECORDS,
    SPECIAL_TOKENS_MAP,
    TEMPLATE_WORDS,
    TEMPLATES,
    TOKENIZER_CONFIG,
    config_words,
    configs,
    read_blocked_words,
    read_config,
    read_generation_config,
    read_index,
    read_layout,
    read_overrides,
    read_recipe,
    read_records,
    read_rows,
    read_special_tokens_map,
    read_template,
    read_token_count,
    read_tokenizer,
    read_tokenizer_config,
    read_weight_file,
    recipe_keys,
    record_inputs,
    template_refusals,
    tokenizers,
    weights,
)
from tests.fuzz.run_parsers import (
    CLUSTER,
    CLUSTER_KEYS,
    HUGE_CLUSTER,
    JOB,
    JOB_CLUSTER,
    METRICS,
    RESULT,
    SLICES,
    csv_seeds,
    damaged,
    manifest_bytes,
    prepared_seed,
    program_json,
    program_seeds,
    read_calibrate,
    read_cluster,
    read_csv,
    read_job,
    read_manifest,
    read_prepared,
    read_program,
    read_report,
    read_shorthand,
    read_slices,
    read_state,
)


class Parser(NamedTuple):
    """`inputs()` generates inputs, `read(data, directory)` reads one; the directory is empty before the first."""

    inputs: Callable[[], Inputs]
    read: Callable[[bytes, Path], None]
    refusals: tuple[type[Exception], ...] = (UserError,)


def _text_of(seeds: Callable[[], Sequence[bytes]], words: Callable[[], Sequence[bytes]] | None = None) -> Any:
    return lambda: spoiled(seeds(), words() if words else ())


PARSERS: dict[str, Parser] = {
    "recipe": Parser(_text_of(lambda: [TINY_RECIPE.encode()], lambda: [b"[track]\n", b'to = ["a:b"]\n',
    *recipe_keys()]), read_recipe),
    "overrides": Parser(_text_of(lambda: OVERRIDES, recipe_keys), read_overrides),
    "layout": Parser(_text_of(lambda: LAYOUTS, lambda: LAYOUT_WORDS), read_layout),
    "config.json": Parser(lambda: spoiled_json(configs(), config_words()), read_config),
    "safetensors": Parser(weights, read_weight_file),
    "safetensors index": Parser(
        lambda: spoiled_json([INDEX], ["a", "b", "1.safetensors", "3.safetensors"]), read_index
    ),
    "tokenizer.json": Parser(lambda: spoiled_json(tokenizers(), ["BPE", "Unigram", "</s>", "vocab"]), read_tokenizer),
    "tokenizer_config.json": Parser(
        lambda: spoiled_json([TOKENIZER_CONFIG], ["eos_token", "unk_token", "content", "</s>"]), read_tokenizer_config
    ),
    "special_tokens_map.json": Parser(
        lambda: spoiled_json([SPECIAL_TOKENS_MAP], ["eos_token", "content", "<unk>"]), read_special_tokens_map
    ),
    "generation_config.json": Parser(
        lambda: spoiled_json([{"eos_token_id": [1, 2], "bos_token_id": 0}], ["eos_token_id"]), read_generation_config
    ),
    "tokenizer.json, token count": Parser(
        lambda: spoiled_json(tokenizers(), ["vocab", "added_tokens", "id"]), read_token_count
    ),
    "blocked words": Parser(_text_of(lambda: [b"drat\nc.r.u.d\ntwo  words\n"]), read_blocked_words),
    "chat template": Parser(_text_of(lambda: TEMPLATES, lambda: TEMPLATE_WORDS), read_template, template_refusals()),
    **{
        f"{kind} records, {form}": Parser(record_inputs(kind, form), read_records(kind, form))
        for kind in RECORDS
        for form in ("jsonl", "json")
    },
    "rows": Parser(record_inputs("chat", "jsonl"), read_rows),
    **{
        f"{dialect} program, text": Parser(
            _text_of(lambda dialect=dialect: program_seeds(dialect, "p.txt")), read_program(dialect, "p.txt")
        )
        for dialect in ("collective", "pipeline")
    },
    **{
        f"{dialect} program, JSON": Parser(
            lambda dialect=dialect: program_json(dialect), read_program(dialect, "p.json")
        )
        for dialect in ("collective", "pipeline")
    },
    "schedule of PyTorch": Parser(_text_of(csv_seeds, lambda: [b"0F0", b"1B3", b"0I1", b"0W1", b"SEND_F", b","]),
    read_csv),
    "cluster file": Parser(_text_of(lambda: [CLUSTER, HUGE_CLUSTER], lambda: CLUSTER_KEYS), read_cluster),
    "cluster shorthand": Parser(
        _text_of(lambda: [b"64xh100-sxm", b"2x8xa100-80"], lambda: [b"x", b"b200", b"h100-sxm"]), read_shorthand
    ),
    "jobs line": Parser(lambda: spoiled_json([JOB, {**JOB, "cluster": JOB_CLUSTER}], [*JOB, *JOB_CLUSTER, "gpt2"]),
    read_job),
    "checkpoint manifest": Parser(lambda: spoiled_json([json.loads(manifest_bytes())], ["size"]), read_manifest,
    damaged()),
    "checkpoint slices": Parser(lambda: spoiled_json([SLICES], ["files"]), read_slices, damaged()),
    "checkpoint state": Parser(lambda: spoiled_json([{"step": 3, "recipe": "a", "layout": "dp1"}]), read_state),
    "metrics": Parser(
        lambda: one_of(spoiled([METRICS]), spoiled_json([json.loads(METRICS.split(b"\n")[0])])),
        lambda data, directory: read_report(data, None, directory),
    ),
    "recipe of a run, report": Parser(
        _text_of(lambda: [TINY_RECIPE.encode()]), lambda data, directory: read_report(None, None, directory, data)
    ),
    "result of a run, report": Parser(
        lambda: spoiled_json([RESULT], [*RESULT, *RESULT["predicted"]]),
        lambda data, directory: read_report(None, data, directory),
    ),
    "result of a run, calibrate": Parser(
        lambda: spoiled_json([RESULT], [*RESULT, *RESULT["predicted"]]), read_calibrate, (UserError, CheckFailed)
    ),
    **{
        f"data, {kind}": Parser(data_inputs(kind), read_data(kind))
        for kind in ("jsonl", "json", "parquet", "text", "wet")
    },
    **{f"data, jsonl{suffix}": Parser(compressed_inputs(suffix), read_data("jsonl", suffix)) for suffix in (".gz",
    ".zst")},
    "evaluation set": Parser(lambda: spoiled_json([[{"question": "a", "choices": ["b", "c"]}], "a"], ["question"]),
    read_evaluation_set),
    "torch file": Parser(file_inputs(torch_files, [b"PK", b"storage", b"c__builtin__\neval\n"]), read_torch_file),
    "evaluation of a run, report": Parser(lambda: spoiled_json([EVALUATION], [*EVALUATION]), read_printed("evaluate")),
    "sample of a run, report": Parser(lambda: spoiled_json([SAMPLE], [*SAMPLE]), read_printed("generate")),
    "trackers of a run": Parser(lambda: spoiled_json([TRACKERS], ["mlflow", "run_id"]), read_trackers),
    "API keys": Parser(_text_of(lambda: [b"# of the team\nsk-1234\n\n  sk-5678  \n"]), read_keys),
    **{
        f"request, {name}": Parser(
            lambda name=name: spoiled_json(BODIES[name], sorted({key for each in BODIES[name] for key in each})),
            read_body(name), body_refusals(),
        )
        for name in BODIES
    },
    "answer of an endpoint": Parser(
        lambda: spoiled_json([ANSWER], ["choices", "message", "content", "refusal"]), read_answer, answer_refusals()
    ),
    "prepared data": Parser(lambda: spoiled_json([prepared_seed()], ["splits", "train"]), read_prepared),
}  # fmt: skip
