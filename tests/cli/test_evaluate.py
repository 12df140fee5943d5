"""`meshwright evaluate`: figures for people, one document for programs, one line for a mistake."""

from __future__ import annotations

import json

import pytest


def test_evaluate_prints_text_or_one_json_document(command_line, shared_data, tmp_path):
    model, text = shared_data / "stories260k", tmp_path / "story.txt"
    text.write_text((shared_data / "stories260k/greedy_200_tokens.txt").read_text())
    outcome = command_line("evaluate", model, "--data", text, "--json")
    assert outcome.code == 0, outcome.errors
    answer = json.loads(outcome.output)
    assert outcome.output.count("\n") == 1 and answer["schema"] == 1
    assert {"loss", "perplexity", "bits_per_byte", "tokens", "xz_bits_per_byte"} <= answer.keys()
    shown = command_line("evaluate", model, "--data", text, "--no-xz").output
    assert f"loss           {answer['loss']:.4f} nats per token ({answer['tokens']:,} tokens)" in shown
    assert f"bits per byte  {answer['bits_per_byte']:.3f} ({answer['bytes']:,} bytes of 1 documents)" in shown
    assert f"perplexity     {answer['perplexity']:.2f}" in shown and "xz" not in shown


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["{tmp}/none", "--data", "{tmp}/text.txt"], "{tmp}/none: no such directory; a run directory, a checkpoint"),
        (["{tmp}", "--data", "{tmp}/text.txt"], "{tmp}: no checkpoint in it"),
        (["{model}", "--data", "{tmp}/none.txt"], 'data.source: "{tmp}/none.txt" does not exist'),
        (["{model}", "--data", "{tmp}/none.toml"], "{tmp}/none.toml"),
        (["{model}", "--data", "{tmp}/text.txt", "--sequence", "0"], "--sequence"),
        (["{model}"], "--data"),
        (
            ["{model}", "--data", "{tmp}/text.txt", "--layout", "tp2", "--device", "cuda"],
            "--layout with --device cuda: the ranks of a layout compute on the CPU",
        ),
    ],
)
def test_mistake_is_one_line(command_line, shared_data, tmp_path, arguments, said):
    (tmp_path / "text.txt").write_text("Once upon a time, there was a little girl.")
    names = {"tmp": tmp_path, "model": shared_data / "stories260k"}
    outcome = command_line("evaluate", *(argument.format(**names) for argument in arguments))
    assert (outcome.code, outcome.output) == (2, "")
    assert outcome.errors.startswith("meshwright: error: ") and outcome.errors.count("\n") == 1
    assert said.format(**names) in outcome.errors
