"""Protection against untrusted files. `SECURITY.md` refers to these and other tests line by line."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.checkpoint.manifest import DamagedCheckpoint
from meshwright.checkpoint.slices import check_bounds, read_index
from meshwright.data.records.chat_template import ChatTemplate
from meshwright.data.records.messages import Message
from meshwright.data.records.template_rendering import TemplateError
from meshwright.data.sources.resolution import find_files
from meshwright.errors import UserError, make_out_of_memory_message
from meshwright.inspection.files import TensorFiles
from meshwright.launcher.launcher import LaunchSpec, launch
from meshwright.launcher.recipe_checks import check_memory
from meshwright.layout import Layout
from meshwright.limits import LIMITS, get_limit, make_limit_error, shorten_repr
from meshwright.monitoring.report import write_report
from meshwright.monitoring.trackers import check_trackers, load_tracker_class
from meshwright.planner.hardware.cluster import cluster
from meshwright.planner.models import tokenizer_vocabulary
from meshwright.program.load import load_program
from meshwright.recipe import SCHEMA, load_recipe, load_recipe_text
from meshwright.spec.config_json import config_from_huggingface, config_from_path
from meshwright.tables import Size, _list_plain_types
from meshwright.terminal import escape_on_terminal, print_message
from meshwright.toml import parse_toml, read_toml
from meshwright.untrusted import parse_json, read_file, read_json

LLAMA = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 128, "max_position_embeddings": 64,
}  # fmt: skip
MIXTURE = LLAMA | {"model_type": "qwen3_moe", "num_key_value_heads": 4}
TURNS = [Message("user", "Q"), Message("assistant", "A")]
DEEP = "[" * 100_000


# --- sizes


@pytest.mark.parametrize("number", [10**9 + 7, 10**12, 2**63, 2**64, 10**400])
@pytest.mark.parametrize(
    "key",
    [
        *("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
        *("intermediate_size", "vocab_size", "max_position_embeddings"),
    ],
)
def test_oversized_config_value_is_refused_before_allocation(key: str, number: int):
    if key == "max_position_embeddings" and number < 2**30:
        number = 2**31
    with pytest.raises(UserError, match=rf'^config.json: "{key}" .* is too large: at most [\d,]+ \('):
        config_from_huggingface(LLAMA | {key: number})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_experts": 10**9}, '"num_experts" 1000000000 is too large'),
        ({"num_experts": 16_384, "num_hidden_layers": 1000}, "all_experts 16384000 is too large"),
        ({"num_experts": 1024, "num_hidden_layers": 65}, "all_experts 66560 is too large: at most 65,536"),
        ({"num_experts": 8, "num_experts_per_tok": 10**9}, '"num_experts_per_tok" 1000000000 is too large'),
        ({"num_experts": 8, "moe_intermediate_size": 10**12}, '"moe_intermediate_size" 1000000000000 is too large'),
        ({"num_experts": 8, "decoder_sparse_step": 10**12}, '"decoder_sparse_step" 1000000000000 is too large'),
    ],
)
def test_config_experts_are_bounded_per_layer_and_in_total(changes: dict, said: str):
    with pytest.raises(UserError, match=re.escape(said)):
        config_from_huggingface(MIXTURE | changes)


def test_a_long_list_of_layers_is_looked_through_once():
    class Listed(list):
        def __contains__(self, layer: object) -> bool:
            raise AssertionError("looked through once for each layer")

    listed = {"num_experts": 8, "num_hidden_layers": 3, "mlp_only_layers": Listed([1, 5])}
    assert config_from_huggingface(MIXTURE | listed).dense_layers == (1,)


@pytest.mark.parametrize("value", ["1e400", "NaN", "-1", "1" + "0" * 400])
def test_numbers_of_a_config_json_are_finite(value: str):
    for key in ("rope_theta", "rms_norm_eps", "initializer_range"):
        with pytest.raises(UserError, match=f'"{key}"'):
            config_from_huggingface(LLAMA | {key: parse_json(value)})
    with pytest.raises(UserError, match='"factor" must be'):
        scaling = {"rope_type": "linear", "factor": parse_json(value)}
        config_from_huggingface(LLAMA | {"rope_scaling": scaling})


def numbers_of_the_recipe() -> list[str]:
    kinds = {key: _list_plain_types(field.annotation) for key, field in SCHEMA.keys.items()}
    return [key for key, kind in kinds.items() if int in kind or float in kind]


@pytest.mark.parametrize("key", numbers_of_the_recipe())
def test_every_number_of_a_recipe_is_bounded(tiny_recipe: Path, key: str):
    """Each value is accepted or refused in one line; integers beyond every limit and non-finite values are refused."""
    for value in ("0", "-1", "1000000000000", str(2**63), str(2**64), "1" + "0" * 400, "nan", "inf", "1e308"):
        try:
            found = load_recipe(tiny_recipe, [f"{key}={value}"])
        except UserError as error:
            assert "\n" not in str(error) and key.rpartition(".")[2] in str(error) and len(str(error)) < 1000
            continue
        table, _, name = key.rpartition(".")
        taken = found.model_dump(by_alias=True)
        for part in (*table.split("."), name):
            taken = taken[part]
        assert abs(taken) < float("inf") and (isinstance(taken, float) or taken < 2**63), (key, value)


def test_whole_numbers_of_a_recipe_name_their_limit(tiny_recipe: Path):
    for override, limit in (("train.batch=10000000000", "16,777,216"), ("model.hidden=1000000000000", "1,048,576")):
        with pytest.raises(UserError, match=rf"{override.split('=')[0]}: \d+ is too large: at most {limit} \("):
            load_recipe(tiny_recipe, [override])
    sized = [item.name for field in SCHEMA.keys.values() for item in field.metadata if isinstance(item, Size)]
    assert set(sized) <= set(LIMITS)


def test_limits_have_reasons_and_are_enforced(repository: Path):
    source = "".join(path.read_text() for path in (repository / "src").rglob("*.py") if path.name != "limits.py")
    assert [name for name in LIMITS if f'"{name}"' not in source] == []  # a limit that nothing reads has no effect
    for name, limit in LIMITS.items():
        assert limit.reason and make_limit_error(name, limit.most) is None, name
        assert limit.reason in str(make_limit_error(name, limit.most + 1)), name
    assert shorten_repr(10**5000) == "a number of about 5,001 digits"
    assert len(shorten_repr("x" * 1000)) == 60


@pytest.mark.parametrize("layout", ["dp99999999", "dp1024 tp1024 pp1024", "mb99999999"])
def test_layouts_beyond_any_cluster_are_refused(layout: str):
    with pytest.raises(UserError, match="(ranks:|must be) at most 1,048,576"):
        Layout.parse(layout)


def test_more_ranks_than_a_machine_runs_are_not_started(tmp_path: Path):
    spec = LaunchSpec({}, 100_000, tmp_path / "run", command=("false",))
    with pytest.raises(UserError, match=r"100,000 ranks are more than the \d+ processes"):
        launch(spec)
    with pytest.raises(UserError, match=r"64 ranks x 1,024 threads are more than the [\d,]+ threads allowed"):
        launch(replace(spec, ranks=64, threads=1024))
    assert not (tmp_path / "run").exists()


def test_model_beyond_any_memory_is_refused_before_ranks_start(tiny_recipe: Path):
    large = ["model.hidden=1048576", "model.heads=2", "model.kv_heads=2", "run.device=cpu"]
    with pytest.raises(UserError, match=r"parameters with gradients and optimizer state take at least [\d,]+ GiB"):
        check_memory(load_recipe(tiny_recipe, large), 24 * 2**30)
    many = ["train.batch=16777216", "data.sequence=4096", "run.device=cpu"]
    with pytest.raises(UserError, match=r"hidden states of the [\d,]+ tokens of a micro-batch take at least"):
        check_memory(load_recipe(tiny_recipe, many), 24 * 2**30)
    check_memory(load_recipe(tiny_recipe, ["run.device=cpu"]), 24 * 2**30)


def test_failed_allocation_is_one_error_line():
    assert "out of memory" in str(make_out_of_memory_message(MemoryError()))
    assert "out of memory" in str(
        make_out_of_memory_message(RuntimeError("DefaultCPUAllocator: can't allocate memory: 1"))
    )
    assert make_out_of_memory_message(RuntimeError("shapes differ")) is None


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ([["master", "a", "0", 4, "F32", 0]], "wrong types"),
        ([["master", "a", 0, 4, "XX", 0]], 'dtype "XX"'),
        ([["master", "a", 0, 4, "F32", 0, 0, 0, 0]], "invalid range or offset"),
        ([["master", "a", 0, 4, "F32", -4]], "invalid range or offset"),
        ([["master", "a", 0, 4, "F32", 2]], "invalid range or offset"),
        ([["master", "a", 0, 4]], "cannot be read"),
        ([["master", "a", 0, 10**30, "F32", 0]], "beyond the 16 bytes"),
        ([["master", "a", 0, 4, "F32", 10**30]], "beyond the 16 bytes"),
    ],
)
def test_checkpoint_index_entries_are_checked(tmp_path: Path, entries: list, said: str):
    (tmp_path / "training").mkdir()
    (tmp_path / "training/index.json").write_text(json.dumps({"files": {"f": entries}}))
    with pytest.raises(DamagedCheckpoint, match=said):
        check_bounds(read_index(tmp_path), {"f": 16})


@pytest.mark.parametrize(
    "content",
    [
        '{"model": {"vocab": {"a": 1e400}}}',
        '{"model": {"vocab": {"a": 1.5}}}',
        '{"model": {"vocab": {"a": 1000000000000}}}',
        '{"model": {"vocab": {"a": 1}}, "added_tokens": [{"id": true}]}',
        '{"model": {"vocab": {}}}',
    ],
)
def test_token_ids_are_bounded_whole_numbers(tmp_path: Path, content: str):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(UserError, match=r"data\.tokenizer: .*(not a tokenizer\.json|too large: at most 16,777,216)"):
        tokenizer_vocabulary(str(tmp_path))


# --- JSON and TOML


@pytest.mark.parametrize("text", [DEEP, '{"a":' * 100_000, "[" * 65 + "]" * 65, "1" * 5000, "\ud800", '{"a"', ""])
def test_invalid_json_raises_only_value_error(text: str):
    with pytest.raises(ValueError):
        parse_json(text)
    with pytest.raises(ValueError):
        parse_json(text.encode("utf-8", "surrogatepass"))


def test_json_of_usual_depth_is_read():
    assert parse_json("[" * 60 + "]" * 60)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_deep_json_in_a_model_directory_is_one_line(tmp_path: Path, name: str):
    (tmp_path / name).write_text(DEEP)
    with pytest.raises(UserError, match=re.escape(name)):
        config_from_path(tmp_path) if name == "config.json" else TensorFiles(tmp_path)


def test_deeply_nested_program_or_request_is_one_error_line(tmp_path: Path, command_line):
    program, jobs = tmp_path / "p.json", tmp_path / "jobs.jsonl"
    program.write_text('{"a":' * 100_000)
    with pytest.raises(UserError, match="nested deeper"):
        load_program(program, "pipeline")
    jobs.write_text(DEEP + "\n")
    outcome = command_line("plan", "--jobs", jobs)
    assert outcome.code == 0 and "nested deeper" in json.loads(outcome.output)["error"]


def test_oversized_and_endless_files_are_not_read(tmp_path: Path):
    large, pipe = tmp_path / "large.json", tmp_path / "pipe.json"
    with large.open("wb") as file:
        file.truncate(get_limit("config_bytes") + 1)
    os.mkfifo(pipe)
    for path, said in ((large, "16,777,216 bytes"), (pipe, "device or a pipe"), (Path("/dev/zero"), "device")):
        with pytest.raises(OSError, match=said):
            read_file(path, "config_bytes")
    (tmp_path / "config.json").symlink_to("/dev/zero")
    with pytest.raises(UserError, match="a device or a pipe, not a file"):
        config_from_path(tmp_path)
    (tmp_path / "whole.json").write_text("[1]")
    assert read_json(tmp_path / "whole.json") == [1]


@pytest.mark.parametrize(
    "text",
    [f"a = {DEEP}", f"a = {'{b = ' * 5000}", ".".join("a" * 200) + " = 1", f"a = {'1' * 5000}", "a = 2025-02-30"],
)
def test_hostile_toml_is_one_line(tmp_path: Path, text: str):
    with pytest.raises(UserError, match="not valid TOML") as caught:
        parse_toml(text, "recipe.toml")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300
    (tmp_path / "c.toml").write_text(text)
    with pytest.raises(UserError, match="not valid TOML"):
        cluster(str(tmp_path / "c.toml"))


def test_a_recipe_of_megabytes_is_not_parsed(tmp_path: Path):
    (tmp_path / "r.toml").write_text("a = 1\n" * 200_000)
    with pytest.raises(UserError, match="more than 1,048,576 bytes"):
        read_toml(tmp_path / "r.toml", "recipe")


# --- chat templates


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'x' * 10**10 }}",
        "{% set n = 10**10 %}{{ 'x' * n }}",
        "{% set n = 10**10 %}{{ [0] * n }}",
        "{{ '{:9999999999}'.format(1) }}",
        "{{ 'x'.center(10**10) }}",
        "{{ ('x' * 1000)|join('y' * 10**7) }}",
        "{{ ('x' * 10**6)|replace('x', 'x' * 10**5) }}",
        "{% for i in range(100000) %}{{ 'x' * 100 }}{% endfor %}",
    ],
)
def test_template_memory_and_output_are_bounded(source: str):
    with pytest.raises(UserError, match="the template (needs more than 2 GiB of memory|writes [0-9,]+ characters)"):
        ChatTemplate(source, {}, frozenset(), "the template").render(TURNS)


def test_endless_template_times_out(monkeypatch):
    from meshwright.data import limited_process

    slow = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    template = ChatTemplate("{% if messages|length > 1 %}" + slow + "{% endif %}ok", {}, frozenset(), "it")
    template.check()
    # A wall-clock limit of one second instead of ten of CPU time: the same code path.
    monkeypatch.setattr(limited_process, "_WAIT_SECONDS", 1.0)
    with pytest.raises(UserError, match="it gave no answer within 1 s"):
        template.render(TURNS)
    monkeypatch.setattr(limited_process, "_WAIT_SECONDS", 300.0)
    assert template.render(TURNS[:1]) == "ok"  # in a new process


def test_an_interrupted_template_answers_no_later_request():
    from meshwright.data.records.template_process import RenderProcess

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    slow = "{% if prompt %}{% endif %}{% if messages|length > 1 %}{% for a in range(999) %}{% for b in range(999) %}"
    process = RenderProcess(slow + "{% endfor %}{% endfor %}{% endif %}{{ messages|length }}", {})
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        with pytest.raises(KeyboardInterrupt):
            process.render_marked([{"content": "a"}, {"content": "b"}], False)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert process.render_marked([{"content": "a"}], False) == "1"


@pytest.mark.exhaustive
def test_endless_chat_template_is_killed_after_ten_cpu_seconds():
    source = "{% set n = 9**9 %}{{ 9**n }}"
    with pytest.raises(UserError, match="takes more than 10 s of CPU time"):
        ChatTemplate(source, {}, frozenset(), "it").render(TURNS)


@pytest.mark.parametrize(
    "source",
    ["{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ range(10**12)|list }}", "{{ ''.__class__.mro() }}"],
)
def test_template_sandbox_escape_is_a_record_error(source: str):
    with pytest.raises(TemplateError, match="^cannot render it"):
        ChatTemplate(source, {}, frozenset(), "it").render(TURNS)


@pytest.mark.parametrize(
    "source", ["{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "{{ " + "9" * 5000 + " }}", "{% if %}"]
)
def test_a_template_that_cannot_be_compiled_is_one_line(source: str):
    with pytest.raises(UserError, match=r"^it(, line 1)?: not a Jinja template"):
        ChatTemplate(source, {}, frozenset(), "it").check()


def test_a_template_has_none_of_the_environment(monkeypatch):
    from meshwright.data.records.template_process import RenderProcess

    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    process = RenderProcess("{{ 1 }}", {})
    assert process._process is not None
    environment = Path(f"/proc/{process._process.pid}/environ")
    if environment.exists():
        assert b"hunter2" not in environment.read_bytes()
    assert process.render_marked([], False) == "1"


# --- code and keys


def untrusted(to: str, options: str = "") -> str:
    return f'[model]\nfamily = "llama"\nlayers = 1\nhidden = 8\nheads = 1\n[data]\nsource = "x"\nsequence = 8\n[train]\nsteps = 1\nbatch = 1\nlearning_rate = 1\n[track]\nto = ["{to}"]\n{options}'  # noqa: E501


def test_untrusted_recipe_imports_no_code(tmp_path: Path, monkeypatch):
    """Not even the module is imported, which would run it."""
    (tmp_path / "planted.py").write_text("raise SystemExit('ran')\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("os:system", "planted:Tracker", "subprocess:Popen"):
        with pytest.raises(UserError, match=r'"\w+:\w+" is code that the recipe names; .* add --trust-recipe'):
            check_trackers(load_recipe_text(untrusted(name), "shared.toml"))
    assert "planted" not in sys.modules


@pytest.mark.parametrize("name", ["os:system", "subprocess:Popen", "builtins:eval", "pathlib:Path"])
def test_class_that_is_no_tracker_is_never_called(name: str):
    with pytest.raises(UserError, match="is not a tracker: it must be a class with the methods start"):
        load_tracker_class(load_recipe_text(untrusted(name), "shared.toml", trust=True), name)


def test_train_runs_no_custom_code_without_option(tiny_recipe: Path, command_line):
    outcome = command_line("train", tiny_recipe, 'track.to=["os:system"]')
    assert outcome.code == 2 and "add --trust-recipe" in outcome.errors and outcome.errors.count("\n") == 1


@pytest.mark.parametrize("uri", ["http://evil.example", "HTTPS://evil.example", "databricks", "postgresql://h/db"])
def test_mlflow_credentials_need_trusted_recipe(uri: str, tmp_path: Path, monkeypatch):
    """Wherever MLflow would find credentials: here in a file, with none in the environment."""
    pytest.importorskip("mlflow")
    (tmp_path / ".mlflow").mkdir()
    (tmp_path / ".mlflow" / "credentials").write_text("[mlflow]\nmlflow_tracking_password = secret\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    options = f'[track.options.mlflow]\nuri = "{uri}"\n'
    with pytest.raises(UserError, match=r"options\.mlflow\.uri: your credentials .* could be sent to the server"):
        load_tracker_class(load_recipe_text(untrusted("mlflow", options), "shared.toml"), "mlflow")
    assert load_tracker_class(load_recipe_text(untrusted("mlflow", options), "shared.toml", trust=True), "mlflow")
    for local in ("sqlite:///runs.db", "mlruns", "file:///tmp/runs"):
        options = f'[track.options.mlflow]\nuri = "{local}"\n'
        assert load_tracker_class(load_recipe_text(untrusted("mlflow", options), "shared.toml"), "mlflow")


def test_servers_of_entry_point_trackers_need_trusted_recipe(monkeypatch):
    """An entry point is the user's own choice; the server in its options is the recipe's."""
    from meshwright.monitoring import trackers

    monkeypatch.setattr(trackers, "_list_entry_points", lambda: {"theirs": trackers.BUILT_IN["mlflow"]})
    options = '[track.options.theirs]\nuri = "http://evil.example"\n'
    with pytest.raises(UserError, match=r"options\.theirs\.uri: your credentials .* could be sent to the server"):
        load_tracker_class(load_recipe_text(untrusted("theirs", options), "shared.toml"), "theirs")


@pytest.mark.parametrize(
    "url",
    ["sftp://host/a.txt", "ssh://host/a", "reference://::file:///x.json", "simplecache::sftp://host/a", "dask::x://a"],
)
def test_credentialed_stores_need_allowlist(url: str, monkeypatch):
    pytest.importorskip("fsspec")
    with pytest.raises(UserError, match="may log in with your keys .* MESHWRIGHT_STORES="):
        find_files([url])
    monkeypatch.setenv("MESHWRIGHT_STORES", "sftp")
    with pytest.raises(UserError) as caught:
        find_files(["sftp://localhost:1/a.txt"])
    assert "MESHWRIGHT_STORES" not in str(caught.value)


# --- paths, terminals, pages


@pytest.mark.parametrize("place", ["../secret.safetensors", "/etc/passwd", "a/b.safetensors", 5, None])
def test_an_index_names_no_file_outside_its_directory(tmp_path: Path, place: object):
    inside = tmp_path / "model"
    inside.mkdir()
    (tmp_path / "secret.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
    (inside / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": place}}))
    with pytest.raises(UserError, match=r"index\.json: (.* is not in the directory|not an index)"):
        TensorFiles(inside)


@pytest.mark.parametrize(
    "header",
    [DEEP[:1000], '{"w": {"dtype": "F32", "shape": [1000000000000], "data_offsets": [0, 4000000000000]}}', "[]"],
)
def test_header_with_false_sizes_is_one_error_line(tmp_path: Path, header: str):
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode())
    with pytest.raises(UserError, match=r"model\.safetensors: (cut short|not a safetensors file)"):
        TensorFiles(path)
    path.write_bytes((1 << 62).to_bytes(8, "little"))
    with pytest.raises(UserError, match="not a safetensors file"):
        TensorFiles(path)


def test_pickle_executes_no_code(tmp_path: Path):
    import torch

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    torch.save({"w": Evil()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match="could run code"):
        TensorFiles(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_error_lines_are_escaped_and_truncated(tmp_path: Path, command_line):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "\x1b]0;owned\x07\x1b[2J" + "x" * 10_000}))
    outcome = command_line("plan", tmp_path, "--cluster", "8xh100-sxm", "--sequence", 8, "--batch", 8)
    assert outcome.code == 2 and "\x1b" not in outcome.errors and "\x07" not in outcome.errors
    assert outcome.errors.count("\n") == 1 and len(outcome.errors) < 2100
    outcome = command_line("train", f"{tmp_path}/\x1b[2J.toml")
    assert outcome.code == 2 and "\x1b" not in outcome.errors and "\\x1b[2J" in outcome.errors


def test_generated_text_is_escaped_on_a_terminal_alone(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdout", Terminal())
    assert escape_on_terminal("a\x1b[2J") == "a\\x1b[2J"
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert escape_on_terminal("a\x1b[2J") == "a\x1b[2J"


@pytest.mark.parametrize("layout", [None, "pp2"])
def test_generate_escapes_text_on_a_terminal(monkeypatch, shared_data: Path, layout: str | None):
    from meshwright.cli.generate import command

    out = io.StringIO()
    monkeypatch.setattr(out, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stdout", out)
    arguments = [str(shared_data / "stories260k"), "--prompt", "Once \x1b[2J", "--max-tokens", "1", "--device", "cpu"]
    command.main([*arguments, *(["--layout", layout] if layout else [])], standalone_mode=False)
    assert out.getvalue().startswith("Once \\x1b[2J") and "\x1b" not in out.getvalue()


def test_messages_are_escaped(capsys):
    print_message("a\x1b[2J")
    assert capsys.readouterr().err == "a\\x1b[2J\n"


def test_report_page_escapes_html(tmp_path: Path):
    evil = "<script>alert(1)</script>"
    line = {
        "step": 1, "loss": 1.0, "tokens_per_second": 1.0, "memory_gib": 1.0, "seconds_by_part": {evil: 1.0},
        "seconds": 1.0,
    }  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    (tmp_path / "recipe.toml").write_text(evil)
    (tmp_path / "result.json").write_text(json.dumps({"layout": evil, "predicted": {"seconds_by_part": {evil: 1.0}}}))
    page = write_report(tmp_path, samples=[{"prompt": evil, "text": evil}]).read_text()
    assert "<script" not in page and "&lt;script&gt;" in page


@pytest.mark.parametrize(
    "content", ['{"loss": 1}', '{"step": "a", "loss": "b", "tokens_per_second": 1}', '{"loss": [1]}']
)
def test_a_run_directory_of_another_program_is_one_line(tmp_path: Path, content: str):
    (tmp_path / "metrics.jsonl").write_text(content + "\n")
    with pytest.raises(UserError, match=r"metrics\.jsonl"):
        write_report(tmp_path)


# --- SECURITY.md


def test_security_md_names_tests_that_exist(repository: Path):
    text = (repository / "SECURITY.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("|") and "tests/" in line]
    assert len(rows) >= 20
    for row in rows:
        for path, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row):
            source = (repository / path).read_text()
            assert re.search(rf"^def {name}\(", source, re.M), f"{path} has no {name}"
        assert re.search(r"`tests/[\w/]+\.py::test_\w+`", row), row
    here = set(re.findall(r"^def (test_\w+)\(", Path(__file__).read_text(), re.M))
    named = set(re.findall(r"tests/test_security\.py::(\w+)", text))
    assert here - named == {"test_security_md_names_tests_that_exist"}
