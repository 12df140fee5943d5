"""`meshwright report`: writes the page with the output of other commands, and reports unreadable files."""

from __future__ import annotations

import json

import pytest


@pytest.fixture
def run(tmp_path):
    step = {"step": 1, "loss": 2.5, "tokens_per_second": 100.0, "memory_gib": 0.5, "seconds_by_part": {"forward": 1.0}}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(step) + "\n")
    return tmp_path


def test_report_page_contains_evaluation_and_generated_sample(command_line, run):
    figures = {"schema": 1, "loss": 1.5, "perplexity": 4.48, "bits_per_byte": 1.234, "tokens": 10}
    (run / "evaluation.json").write_text(json.dumps(figures))
    (run / "sample.json").write_text(json.dumps({"schema": 1, "prompt": "def ", "text": "f(x):"}))
    outcome = command_line("report", run, "--json")  # by default the files of the run directory
    assert (outcome.code, outcome.errors) == (0, "")
    assert json.loads(outcome.output) == {"schema": 1, "report": str(run / "report.html")}
    page = (run / "report.html").read_text()
    assert "1.234" in page and "<b>def </b>f(x):" in page
    assert command_line("report", run, "--sample", run / "sample.json").output == f"report: {run / 'report.html'}\n"


def test_failed_samples_are_omitted_with_a_warning(command_line, run):
    (run / "checkpoints").mkdir()
    outcome = command_line("report", run)
    assert outcome.code == 0 and "Samples" not in (run / "report.html").read_text()
    assert outcome.errors.startswith("warning: no samples: ") and outcome.errors.count("\n") == 1
    assert command_line("report", run, "--samples", 0).errors == ""


def test_prompt_that_cannot_be_continued_is_a_warning_without_checkpoints_too(command_line, run):
    assert command_line("report", run).errors == ""
    assert command_line("report", run, "--prompt", "def ").errors.startswith("warning: no samples: ")


def test_checkpoint_deleted_during_reading_is_a_warning(command_line, run, monkeypatch):
    def read(*given):
        raise FileNotFoundError(2, "No such file or directory", "model.safetensors")

    monkeypatch.setattr("meshwright.evaluation.samples.generate_samples", read)
    outcome = command_line("report", run, "--samples", 1)
    assert (outcome.code, outcome.errors.count("\n")) == (0, 1) and "'model.safetensors'" in outcome.errors


def test_sample_of_a_file_and_generated_ones_exclude_each_other(command_line, run):
    (run / "sample.json").write_text(json.dumps({"schema": 1, "prompt": "def ", "text": "f(x):"}))
    refused = command_line("report", run, "--sample", run / "sample.json", "--prompt", "def ")
    assert refused.code == 2 and "give one of them" in refused.errors


def test_report_of_several_runs_writes_their_comparison(command_line, run, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    (other / "metrics.jsonl").write_text((run / "metrics.jsonl").read_text())
    assert command_line("report", run, other).output == f"report: {run / 'comparison.html'}\n"
    refused = command_line("report", run, other, "--sample", run / "metrics.jsonl")
    assert refused.code == 2 and "only for the page of one run" in refused.errors


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "no such file: {file}"),
        ("{not json", "{file} is not the JSON document that --json printed"),
        ("[1, 2]", "{file} is not the JSON document that --json printed: it is not an object"),
        ('{"schema": 1}', '{file} has no "prompt": it is not the output of `generate --json`'),
    ],
)
def test_invalid_sample_file_is_one_error_line(command_line, run, text, said):
    file = run / "sample.json"
    if text is not None:
        file.write_text(text)
    outcome = command_line("report", run, "--sample", file)
    assert (outcome.code, outcome.output, outcome.errors.count("\n")) == (2, "", 1)
    assert said.format(file=file) in outcome.errors


def test_directory_without_a_run_is_one_line(command_line, tmp_path):
    outcome = command_line("report", tmp_path / "none")
    assert (outcome.code, outcome.errors.count("\n")) == (2, 1) and "no metrics.jsonl in" in outcome.errors
