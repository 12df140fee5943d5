"""`meshwright report`: write the HTML page of a training run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from meshwright.cli import plumbing
from meshwright.cli.plumbing import file_option, json_option, result_printer


@plumbing.command(
    "report",
    "meshwright report runs/quickstart",
    "meshwright report runs/quickstart --prompt 'import ' --prompt 'def '",
    "meshwright report runs/quickstart --evaluation evaluation.json --sample sample.json",
    "meshwright report runs/first runs/second runs/third",
)
@click.argument("runs", nargs=-1, required=True, metavar="RUN...", type=click.Path(path_type=Path))
@file_option("--evaluation", help="Output of `evaluate --json`, for one run.")
@file_option("--sample", help="Output of `generate --json`, for one run.")
@click.option("--samples", type=click.IntRange(0, 20), help="Number of texts to generate; 0: none.  [default: 3]")
@click.option("--prompt", "prompts", multiple=True, metavar="TEXT", help="Prompt to continue; may be repeated.")
@json_option
def command(
    runs: tuple[Path, ...],
    evaluation: Path | None,
    sample: Path | None,
    samples: int | None,
    prompts: tuple[str, ...],
    as_json: bool,
) -> None:
    """Write RUN/report.html: curves of loss, throughput, learning rate, gradient norm, memory and time, recipe,
    evaluation, samples, in one file. For several runs, write comparison.html to the directory of the first RUN instead.

    evaluation.json and sample.json in the run directory are shown by default. Without sample.json, the newest
    checkpoint generates samples from the beginnings of validation documents, or from --prompt.

    \f
    runs: run directories. evaluation, sample: files that `evaluate --json` and `generate --json` printed. samples:
    number of texts to generate; None: the default number, or 0 for a large model. prompts: texts to continue. as_json:
    print JSON.
    """
    from meshwright.errors import UserError
    from meshwright.monitoring.report import write_report
    from meshwright.monitoring.run_comparison import write_run_comparison

    with result_printer(as_json) as answer:
        if len(runs) > 1:
            if evaluation or sample or samples or prompts:
                raise UserError("--evaluation, --sample, --samples and --prompt: only for the page of one run")
            page = write_run_comparison(runs)
        else:
            page = write_report(
                runs[0],
                evaluation=_find_document(evaluation, runs[0] / "evaluation.json", "evaluate"),
                samples=_find_samples(runs[0], sample, samples, prompts),
            )
        answer({"report": page}, f"report: {page}")


def _find_samples(run: Path, given: Path | None, count: int | None, prompts: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return texts that the run's model has generated, as documents of `generate --json`: the text in the file `given`,
    else the text in the run's sample.json, else `count` texts that the newest checkpoint generates now. The list is
    empty if `count` is 0, if there is no checkpoint, or, with a warning, if generation fails.

    count: None for the default number. prompts: texts to continue, in place of beginnings of validation documents. If
    `count` or `prompts` is given, sample.json is not read.
    """
    from meshwright.errors import UserError, make_out_of_memory_message
    from meshwright.monitoring.run_directory import CHECKPOINTS
    from meshwright.terminal import print_message

    if given and (count or prompts):
        raise UserError("--sample: shows the text of a file, --samples and --prompt generate texts; give one of them")
    own = None if count is not None or prompts else run / "sample.json"
    if document := _find_document(given, own, "generate"):
        return [document]
    asked = bool(count or prompts)
    if count == 0 or not (asked or (run / CHECKPOINTS).is_dir()):
        return []
    from meshwright.evaluation.samples import generate_samples
    from meshwright.serving.sampling import InvalidLogits

    reason: str | None
    try:
        return generate_samples(run, count, prompts, print_message)
    except (UserError, InvalidLogits, OSError) as error:  # OSError: a run in progress deletes its older checkpoints
        reason = str(error)
    except (MemoryError, RuntimeError) as error:
        reason = make_out_of_memory_message(error)
        if reason is None:
            raise
    print_message(f"warning: no samples: {reason}")
    return []


def _find_document(given: Path | None, own: Path | None, command: str) -> dict[str, Any] | None:
    """Read the JSON document that `meshwright COMMAND --json` printed into a file; return None if there is no such
    file.

    given: file that the user named. `UserError` if it is missing or not such a document. own: file in the run
    directory, read if `given` is None. If it is not such a document, print a warning and return None. command: the
    COMMAND, "evaluate" or "generate".
    """
    from meshwright.errors import UserError
    from meshwright.terminal import print_message

    if given is not None:
        return _read_document(given, command)
    try:
        return _read_document(own, command) if own and own.exists() else None
    except UserError as error:
        print_message(f"warning: ignored: {error}")
        return None


def _read_document(path: Path, command: str) -> dict[str, Any]:
    """Read and check the JSON object in the file `path`, which `meshwright COMMAND --json` printed. command: "evaluate"
    or "generate". `UserError` if the file does not contain such a document."""
    from meshwright.errors import UserError
    from meshwright.monitoring.report_inputs import check_evaluation, check_sample
    from meshwright.untrusted import read_json

    keys = ("loss", "perplexity", "bits_per_byte", "tokens") if command == "evaluate" else ("prompt", "text")
    try:
        document = read_json(path)
    except FileNotFoundError:
        raise UserError(f"no such file: {path}") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is not the JSON document that --json printed: {error}") from None
    if not isinstance(document, dict):
        raise UserError(f"{path} is not the JSON document that --json printed: it is not an object")
    for key in keys:
        if key not in document:
            raise UserError(f'{path} has no "{key}": it is not the output of `{command} --json`')
    (check_evaluation if command == "evaluate" else check_sample)(document)
    return document
