"""`meshwright plan`: one document, a table for people, a page, requests by line, one-line errors."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from meshwright.cli.main import main, meshwright
from meshwright.spec.config_json import config_to_huggingface
from meshwright.spec.presets import preset

REQUEST = ("plan", "llama-3-8b", "--cluster", "16xh100-sxm", "--sequence", "4096", "--batch", "64")


def run(*arguments: str, text: str | None = None) -> str:
    result = CliRunner().invoke(meshwright, list(arguments), input=text, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return str(result.stdout)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1 and captured.err.startswith("meshwright: error: ")
    return captured.err


def test_search_json_has_documented_keys():
    document = json.loads(run(*REQUEST, "--top", "3", "--json"))
    assert document["schema"] == 1 and document["searched"] > 1000 and document["search_seconds"] > 0
    assert document["model"] == {"parameters": 8030261248, "active_parameters": 8030261248}
    assert len(document["layouts"]) == 3
    for one in document["layouts"]:
        assert set(one) >= {
            "layout", "fits", "memory_gib", "step_seconds", "step_seconds_low", "step_seconds_high", "mfu",
            "tokens_per_second_per_device", "model_tflops_per_device", "flops_convention", "breakdown_seconds",
        }  # fmt: skip
        assert set(one["memory_gib"]) >= {
            "parameters", "gradients", "optimizer", "activations", "workspace", "peak",
        }  # fmt: skip
        assert set(one["breakdown_seconds"]) == {
            "compute", "tensor", "context", "expert", "data", "pipeline", "bubble", "optimizer",
        }  # fmt: skip


def test_text_output_is_a_table_parts_and_memory():
    text = run(*REQUEST, "--top", "2", "--explain")
    for words in ("searched", "the fastest", "time: compute", "of which", "activations", "bound by", "mlp.up"):
        assert words in text, words
    assert max(map(len, text.splitlines())) <= 200


def test_a_page_has_every_picture(tmp_path: Path):
    page = tmp_path / "plan.html"
    run(*REQUEST, "--layout", "dp2 tp2 pp4:zb-v mb8", "--html", str(page))
    text = page.read_text()
    for title in ("Time by component", "Memory of each pipeline rank", "The pipeline", "Memory of pipeline rank"):
        assert title in text, title
    assert "Memory of a device: " in text and ", does not fit: " in text and "Set these keys" not in text
    assert text.count("<svg") == 7 and "Step by step" in text and "http" not in text.replace("http://www.w3.org", "")
    run(*REQUEST, "--top", "2", "--html", str(page))
    text = page.read_text()
    assert ", fits" in text and "does not fit: " not in text and "Set these keys in your recipe" in text
    assert "Memory against time" in text and text.count('class="best"') == 4  # for wide screens and for phones
    for chart in re.findall(r'<div class="chart">.*?</svg></div></div>', text, re.DOTALL):
        assert [float(width) for width in re.findall(r'class="picture" width="(\d+)"', chart)][1:] == [380]
    assert text.count('<div class="chart">') >= 3
    legends = re.findall(r'<p class="muted key">.*?</p>', text, re.DOTALL)
    memory = re.findall(r"</i>(.*?)</span>", legends[1])
    assert memory == [part for part in re.findall(r"<th>(.*?)</th>", text) if part in memory]


def test_recipe_supplies_options_missing_on_command_line(tmp_path: Path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        'layout = "dp2"\n[model]\nfamily = "llama"\nlayers = 2\nhidden = 64\nheads = 2\n'
        '[data]\nsource = "stdlib"\ntokenizer = "bytes"\nsequence = 64\n[train]\nsteps = 3\nbatch = 8\n'
        "learning_rate = 1e-3\n"
    )
    document = json.loads(run("plan", str(recipe), "--cluster", "2xa100-80", "--json"))
    assert (document["sequence"], document["batch"]) == (64, 8) and document["layouts"][0]["fits"]
    own, first = document["recipe_layout"], document["layouts"][0]
    assert own["layout"] == "dp2 bf16" and own["step_seconds"] >= first["step_seconds"]
    text = run("plan", str(recipe), "--cluster", "2xa100-80")
    assert "the recipe's own layout: dp2 bf16, " in text and "times the first" in text
    text = run("plan", str(recipe), "--cluster", "4xa100-80")
    assert "the recipe's own layout: " in text and "2" in text.partition("own layout: ")[2].partition("\n")[0]
    assert "recipe_layout" not in json.loads(
        run("plan", str(recipe), "--cluster", "2xa100-80", "--layout", "dp2", "--json")
    )
    answer = json.loads(run("plan", "--jobs", "-", text=json.dumps({"model": str(recipe), "cluster": "2xa100-80"})))
    assert answer["recipe_layout"]["layout"] == "dp2 bf16" and len(answer["layouts"]) > 1
    line = json.dumps({"model": str(recipe), "cluster": "2xa100-80", "layout": "dp2"})
    document = json.loads(run("plan", "--jobs", "-", text=line + "\n"))
    assert (document["sequence"], document["batch"]) == (64, 8)


def test_recipe_from_model_with_smaller_vocabulary_is_planned(tmp_path: Path):
    config = {
        **config_to_huggingface(preset("llama-tiny")),
        "vocab_size": 300,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        f'layout = "auto"\n[model]\nfrom = "{tmp_path}"\nload_weights = true\n'
        '[data]\nsource = "stdlib"\nsequence = 64\n[train]\nsteps = 3\nbatch = 8\nlearning_rate = 1e-3\n'
    )
    assert json.loads(run("plan", str(recipe), "--cluster", "1xa100-80", "--json"))["layouts"][0]["fits"]


@pytest.mark.parametrize(
    ("data", "model", "parameters_of", "said"),
    [
        ('tokenizer = "TOKENS"', 'family = "llama"', 1234, None),
        ('tokenizer = "bytes"', 'family = "llama"', 257, None),
        (
            'tokenizer = "wordpiece"\nvocabulary = 999',
            'family = "llama"',
            999,
            "assumed vocabulary 999, the maximum of the wordp",
        ),
        (
            'tokenizer = "nowhere/of/mine"',
            'preset = "llama-tiny"',
            2048,
            "assumed vocabulary 2,048, that of llama-tiny: data.tok",
        ),
        ('tokenizer = "nowhere"', 'family = "llama"\nvocabulary = 700', 700, None),
    ],
)
def test_vocabulary_is_read_or_reported_as_assumed(
    tmp_path: Path, data: str, model: str, parameters_of: int, said: str | None
):
    (tmp_path / "tokenizer.json").write_text(
        json.dumps({"model": {"vocab": {"a": 0, "b": 1200}}, "added_tokens": [{"id": 1233, "content": "</s>"}]})
    )
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        f'layout = "dp1"\n[model]\n{model}\nlayers = 2\nhidden = 64\nheads = 2\nkv_heads = 2\nhead_dim = 32\n'
        f'intermediate = 192\ntied = false\n[data]\nsource = "stdlib"\n{data.replace("TOKENS", str(tmp_path))}\n'
        "sequence = 64\n[train]\nsteps = 3\nbatch = 8\nlearning_rate = 1e-3\n"
    )
    document = json.loads(run("plan", str(recipe), "--cluster", "1xa100-80", "--json"))
    of_layer = 4 * 64 * 64 + 3 * 64 * 192 + 2 * 64
    assert document["model"]["parameters"] == 2 * of_layer + 64 + 2 * 64 * parameters_of
    warnings = " ".join(document["layouts"][0].get("warnings", ()))
    assert (said in warnings) if said else "vocabulary" not in warnings


@pytest.mark.parametrize(
    ("content", "why"),
    [(None, "no such file"), ("{", "not a tokenizer.json"), ('{"model": {"vocab": 3}}', "not a tokenizer")],
)
def test_unspecified_vocabulary_is_refused(
    tmp_path: Path, content: str | None, why: str, capsys: pytest.CaptureFixture[str]
):
    tokenizer, recipe = tmp_path / "tokens.json", tmp_path / "recipe.toml"
    if content is not None:
        tokenizer.write_text(content)
    recipe.write_text(
        'layout = "dp1"\n[model]\nfamily = "llama"\nlayers = 2\nhidden = 64\nheads = 2\n[data]\nsource = "stdlib"\n'
        f'tokenizer = "{tokenizer}"\nsequence = 64\n[train]\nsteps = 3\nbatch = 8\nlearning_rate = 1e-3\n'
    )
    said = refused(capsys, "plan", str(recipe), "--cluster", "1xa100-80")
    assert f'data.tokenizer: "{tokenizer}" cannot be read' in said and why in said and "set model.vocabulary" in said


def test_each_request_line_gets_one_answer_line(tmp_path: Path):
    good: dict[str, Any] = {
        "model": "gpt2",
        "cluster": "8xa100-40",
        "sequence": 1024,
        "batch": 64,
        "layout": "dp8 zero1",
    }
    lines = [json.dumps(good), "{", json.dumps({**good, "cluster": "8xa1000"})]
    jobs = tmp_path / "rows.jsonl"
    jobs.write_text("\n".join(lines) + "\n")
    for answers in (run("plan", "--jobs", str(jobs)), run("plan", "--jobs", "-", text=jobs.read_text())):
        first, second, third = map(json.loads, answers.splitlines())
        assert first["schema"] == 1 and first["layouts"][0]["layout"] == "dp8 zero1 bf16"
        assert "not JSON" in second["error"] and "a100-40" in third["error"]


def test_preference_recipe_is_priced_with_its_reference_model(tiny_recipe: Path):
    def seconds(*more: str) -> float:
        arguments = ("plan", str(tiny_recipe), "--cluster", "1xh100-sxm", "--json", *more)
        return float(json.loads(run(*arguments))["layouts"][0]["step_seconds"])

    before = seconds("--layout", "dp1"), seconds()
    tiny_recipe.write_text(tiny_recipe.read_text().replace("[data]", '[data]\nrecords = "preference"'))
    assert seconds("--layout", "dp1") > before[0] and seconds() > before[1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("plan", "llama-3-8b"), "--cluster is missing"),
        (("plan", "llama-3-8x"), 'unknown model "llama-3-8x"; did you mean "llama-3-8b"?'),
        (("plan", "--cluster", "8xh100-sxm"), "MODEL is missing"),
        (("plan", "llama-3-8b", "--cluster", "8xh100-sxm"), "--sequence is missing"),
        (("plan", "llama-3-8x", *REQUEST[2:]), 'unknown model "llama-3-8x"; did you mean "llama-3-8b"?'),
        ((*REQUEST, "--layout", "dp8 tp3"), "it has 24 ranks (dp x tp x cp x pp), but there are 16"),
        ((*REQUEST, "--layout", "dp16 zero9"), "zero9"),
        ((*REQUEST, "--layout", "dp3"), "3 ranks"),
        ((*REQUEST, "--engine", "megatrn"), 'did you mean "megatron"'),
        (("plan", "--jobs", "nowhere.jsonl"), "nowhere.jsonl: no such file"),
        (("plan", "--jobs", __file__, "--html", __file__), "--jobs is the same file, which would be lost"),
        (("plan", "gpt2", "--cluster", __file__, "--html", __file__), "--cluster is the same file"),
        (
            ("plan", "gpt3-175b", "--cluster", "8xa100-40", "--sequence", "2048", "--batch", "8"),
            "no layout of 8 devices",
        ),
        (("plan", "nowhere/config.json", *REQUEST[2:]), "no such file"),
        ((*REQUEST, "--layot", "dp8"), "did you mean --layout?"),
        ((*REQUEST, "--layout", "dp16", "--html", "/nowhere/plan.html"), "cannot write /nowhere/plan.html"),
    ],
)
def test_invalid_requests_are_answered_in_one_line(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
):
    assert said in refused(capsys, *arguments)


def test_memory_of_server_is_printed_and_given_as_json(command_line: Callable[..., Any]):
    options = ["--layout", "tp2 dp2", "--dtype", "bf16", "--max-length", 99]
    outcome = command_line("plan", "llama-tiny", "--serve", *options)
    assert outcome.code == 0 and "sequences of 99 tokens" in outcome.output
    document = json.loads(command_line("plan", "llama-tiny", "--serve", "--json").output)
    assert document["concurrency"]["sequences"] * document["max_length"] <= document["kv_blocks"] * 16
    assert sum(size for name, size in document["memory_gib"].items() if name != "total") == pytest.approx(
        document["memory_gib"]["total"]
    )


def test_memory_of_server_on_gpus_elsewhere_is_planned_from_its_size(command_line: Callable[..., Any]):
    options = ["--device", "cuda", "--memory", "80GiB", "--dtype", "bf16", "--layout", "tp2", "--max-length", 8192]
    outcome = command_line("plan", "llama-3-8b", "--serve", *options, "--json")
    memory = json.loads(outcome.output)["memory_gib"]
    assert memory["packed"] == memory["front"] == 0 and memory["weights"] == pytest.approx(15.0, rel=0.01)
    assert memory["total"] <= 160
    refusal = command_line("plan", "llama-3-8b", "--serve", "--device", "cuda", "--memory", "0.9")
    assert refusal.code == 2 and 'device "cuda": this machine has no CUDA device' in refusal.errors


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["llama-3-8b", "--device", "cuda"], "--device: is an option of a server; add --serve"),
        (["llama-3-8b", "--serve", "--device", "tpu"], "tpu"),
        (["llama-3-8b", "--serve", "--memory", "lots"], "such as 0.9"),
        (["llama-3-8b", "--serve", "--layout", "cp2"], "serving runs on"),
        (["llama-3-8b", "--serve", "--cluster", "8xh100-sxm"], "--serve: cannot be combined with --cluster"),
        (["llama-3-8b", "--memory", "4GiB"], "add --serve"),
        (["--serve"], "takes one MODEL"),
        (["bert-base-uncased", "--serve"], "encoder"),
    ],
)
def test_server_option_mistakes_are_one_error_line(arguments: list[str], reason: str, command_line: Callable[..., Any]):
    outcome = command_line("plan", *arguments)
    assert outcome.code == 2 and reason in outcome.errors and outcome.errors.count("\n") == 1
