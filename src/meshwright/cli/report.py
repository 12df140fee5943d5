"""`meshwright report`: write the HTML page of a training run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from meshwright.cli import plumbing
from meshwright.cli.plumbing import json_option, result_printer


@plumbing.command(
    "report",
    "meshwright report runs/quickstart",
    "meshwright report runs/quickstart --evaluation evaluation.json --sample sample.json",
)
@click.argument("run_directory", type=click.Path(path_type=Path))
@click.option("--evaluation", type=click.Path(path_type=Path), help="What `evaluate --json` printed.")
@click.option("--sample", type=click.Path(path_type=Path), help="What `generate --json` printed.")
@json_option
def command(run_directory: Path, evaluation: Path | None, sample: Path | None, as_json: bool) -> None:
    """Write RUN_DIRECTORY/report.html: loss curve, throughput, recipe, evaluation, sample, in one file."""
    from meshwright.monitoring.report import write_report

    with result_printer(as_json) as answer:
        page = write_report(
            run_directory,
            evaluation=_read_document(evaluation, "evaluate", ("loss", "perplexity", "bits_per_byte", "tokens")),
            sample=_read_document(sample, "generate", ("prompt", "text")),
        )
        answer({"report": page}, f"report: {page}")


def _read_document(path: Path | None, command: str, keys: tuple[str, ...]) -> dict[str, Any] | None:
    """Read a JSON object that `meshwright COMMAND --json` printed into a file; None if `path` is None.

    command: that command. keys: keys that the object must have; if one is missing, `UserError` says to run `command`.
    """
    from meshwright.errors import UserError
    from meshwright.untrusted import read_json

    if path is None:
        return None
    try:
        document = read_json(path)
    except FileNotFoundError:
        raise UserError(f"no such file: {path}") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is not the JSON document that --json printed: {error}") from None
    if not isinstance(document, dict):
        raise UserError(f"{path} is not the JSON document that --json printed: it holds no object")
    for key in keys:
        if key not in document:
            raise UserError(f'{path} holds no "{key}": it is not what `{command} --json` printed')
    return document
