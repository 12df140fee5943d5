"""`meshwright data label, balance, export, import, vary`: tools for records of instruction and chat data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from meshwright.cli import plumbing
from meshwright.cli.plumbing import FiniteRange, json_option, output_option, result_printer, write_file
from meshwright.cli.tables import make_fact_table, make_table
from meshwright.errors import UserError
from meshwright.names import unknown
from meshwright.terminal import escape_control_characters, print_message, render_tables

if TYPE_CHECKING:
    from meshwright.synthesis.chat_client import ChatClient

_METHODS = ("self-instruct", "evol-instruct")
_FILE = click.Path(path_type=Path)


def _output_option(*updates: str) -> Callable[[Any], Any]:
    """Return a decorator that adds the required option --output, a file path. updates: names of the parameters whose
    file may be this one, since the command writes all its records again."""
    return output_option("--output", required=True, updates=updates, help="JSON Lines file to write.")


def _served_model_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add to the click command `function` the options for requests to a served model: URL, model name, API key, journal
    file of the answers, maximum number of requests in flight, time-out, attempts, seed, prices. Used as a decorator."""
    price = FiniteRange(0)
    options = (
        click.option("--url", required=True, metavar="URL", help="Base URL, such as http://127.0.0.1:8000/v1."),
        click.option("--model", required=True, metavar="NAME", help="Name of the model in the API."),
        click.option("--key-variable", metavar="NAME", help="Environment variable with the server's API key."),
        output_option("--journal", help="File that keeps the answers.  [default: OUTPUT.journal]"),
        click.option("--concurrency", default=8, type=click.IntRange(1, 1024), help="Maximum requests in flight."),
        click.option("--timeout", default=120.0, type=FiniteRange(0.001), help="Seconds that a request may take."),
        click.option("--tries", default=6, type=click.IntRange(1), help="Attempts per request."),
        click.option("--seed", default=0, help="Random seed, also sent with requests."),
        click.option("--price-in", type=price, metavar="P", help="Price of a million prompt tokens."),
        click.option("--price-out", type=price, metavar="P", help="Price of a million completion tokens."),
    )
    for option in reversed(options):
        function = option(function)
    return function


@plumbing.command(
    "label",
    "meshwright data label chats.jsonl --url http://127.0.0.1:8000/v1 --model qwen3-8b --output labelled.jsonl",
    "meshwright data label chats.jsonl --url https://example.org/v1 --model m --key-variable API_KEY --output l.jsonl",
)
@click.argument("records", type=_FILE)
@_output_option("records")
@_served_model_options
@click.option("--again", is_flag=True, help="Replace labels that a model gave before.")
@json_option
def label(records: Path, output: Path, again: bool, as_json: bool, **served: Any) -> None:
    """Have a served model label speech acts and refusals in those RECORDS that no person has labelled.

    The labels are marked as a model's guesses. If the command was killed, the same command continues and repeats no
    answered request.

    \f
    records: JSON Lines file. output: file to write. again: replace labels that a model gave before. as_json: print
    JSON. served: the options for requests to the model (`_served_model_options`), by parameter name.
    """
    from meshwright.data.records.exchanges import read_records, write_records
    from meshwright.synthesis.labelling import label_records

    with result_printer(as_json) as answer:
        rows = read_records(records)
        with _make_client(served, output) as client:
            labelled, summary = label_records(rows, client, served["seed"], again)
            summary |= {"usage": client.summarize_usage(served["price_in"], served["price_out"]), "output": output}
            write_records(output, labelled)
        answer(summary, render_tables([_make_summary_table(summary)]))


@plumbing.command(
    "balance",
    "meshwright data balance labelled.jsonl",
    "meshwright data balance train.jsonl test.jsonl --by source --target assertive=2,directive=1 --html balance.html",
)
@click.argument("files", nargs=-1, required=True, type=_FILE, metavar="FILE...")
@click.option("--by", metavar="KEY", help="Key of the records; each of its values makes a separate group.")
@click.option("--target", metavar="ACT=WEIGHT,...", help="Wanted proportions.  [default: equal shares of all six acts]")
@output_option("--html", help="Write a page.")
@json_option
def balance(files: tuple[Path, ...], by: str | None, target: str | None, html: Path | None, as_json: bool) -> None:
    """Count labelled records by speech act (assertive, directive ...) and refusals, and report how many records each
    act lacks.

    Each FILE is reported separately. An act lacks records if its share of the records is below its target share.

    \f
    files: JSON Lines files of labelled records. by: key of the records, such as "topic"; records are then also reported
    separately for each of its values. target: wanted weight of each act as "ACT=WEIGHT,ACT=WEIGHT", None for equal
    shares. html: page to write, None for none. as_json: print JSON.
    """
    from meshwright.data.records.exchanges import iterate_records
    from meshwright.synthesis.balance import measure_balance, parse_target
    from meshwright.synthesis.balance_page import render_balance_page

    with result_printer(as_json) as answer:
        wanted = parse_target(target)
        records = ((str(file), where, record) for file in files for where, record in iterate_records(file))
        report = measure_balance(records, wanted, by)
        parts = [_make_balance_table(name, group) for name, group in report["groups"].items()]
        if html is not None:
            write_file(html, render_balance_page(", ".join(file.name for file in files), report))
            report = {**report, "files": {"page": str(html)}}
            parts.append(f"page: {html}")
        answer(report, render_tables(parts))


@plumbing.command(
    "export",
    "meshwright data export chats.jsonl --to doccano --output chats.doccano.jsonl",
    "meshwright data export chats.jsonl --to prodigy --task spans --output chats.prodigy.jsonl",
)
@click.argument("records", type=_FILE)
@click.option("--to", "tool", required=True, metavar="doccano|prodigy", help="The annotation tool.")
@click.option("--task", default="classify", metavar="classify|spans|rewrite", help="Annotation task.")
@_output_option()
@json_option
def export(records: Path, tool: str, task: str, output: Path, as_json: bool) -> None:
    """Write RECORDS in an annotation tool's format, with their labels as suggestions.

    Task classify: label whole records; spans: mark passages that perform a speech act; rewrite: write a better
    response.

    \f
    records: JSON Lines file. tool: "doccano" or "prodigy". task: "classify", "spans" or "rewrite". output: file to
    write, in the tool's format. as_json: print what was written as JSON: number of rows, tool, task, path.
    """
    from meshwright.data.records.exchanges import read_records, write_records
    from meshwright.synthesis.annotation import check_tool_and_task, export_rows

    with result_printer(as_json) as answer:
        check_tool_and_task(tool, task)
        rows = list(export_rows(read_records(records), tool, task))
        write_records(output, rows)
        answer({"rows": len(rows), "tool": tool, "task": task, "output": output}, f"{len(rows):,} rows: {output}")


@plumbing.command(
    "import",
    "meshwright data import all.jsonl --from doccano --records chats.jsonl --output labelled.jsonl",
    "meshwright data import ann.jsonl ben.jsonl --from prodigy --records chats.jsonl --output labelled.jsonl",
)
@click.argument("files", nargs=-1, required=True, type=_FILE, metavar="FILE...")
@click.option("--from", "tool", required=True, metavar="doccano|prodigy", help="The annotation tool.")
@click.option("--records", required=True, type=_FILE, metavar="F", help="Records that were exported.")
@click.option("--leave-out-rejected", is_flag=True, help="Omit records that annotators rejected.")
@_output_option("records")
@json_option
def import_(
    files: tuple[Path, ...], tool: str, records: Path, leave_out_rejected: bool, output: Path, as_json: bool
) -> None:
    """Add the annotations to the records: labels, spans, rewritten responses.

    With several annotators (several FILEs, or several rows for a record) the majority decides.

    \f
    files: exports of the annotation tool, by one or several annotators. tool: "doccano" or "prodigy". records: the
    records that were annotated. leave_out_rejected: write no record that annotators rejected. output: file to write.
    as_json: print JSON.
    """
    from meshwright.data.records.exchanges import read_records, write_records
    from meshwright.synthesis.annotation import TASKS, check_tool_and_task, import_rows

    with result_printer(as_json) as answer:
        check_tool_and_task(tool, TASKS[0])
        rows = [row for file in files for row in read_records(file)]
        labelled, summary = import_rows(read_records(records), rows, tool, leave_out_rejected)
        write_records(output, labelled)
        answer({**summary, "output": output}, render_tables([_make_summary_table({**summary, "output": output})]))


@plumbing.command(
    "vary",
    "meshwright data vary seeds.jsonl --method self-instruct --count 500 --url http://127.0.0.1:8000/v1 --model m "
    "--output new.jsonl",
    "meshwright data vary seeds.jsonl --method evol-instruct --rounds 2 --url http://127.0.0.1:8000/v1 --model m "
    "--output harder.jsonl",
)
@click.argument("seeds", type=_FILE)
@click.option("--method", required=True, metavar="|".join(_METHODS), help="Generate new tasks, or harder ones.")
@click.option("--count", default=100, type=click.IntRange(1), help="Self-Instruct: number of new tasks.")
@click.option("--instances", default=1, type=click.IntRange(1, 5), help="Self-Instruct: examples per task.")
@click.option("--rounds", default=4, type=click.IntRange(1), help="Evol-Instruct: rewrites of each instruction.")
@click.option("--temperature", type=FiniteRange(0, 2), help="Default: 0.7 for Self-Instruct, 1 for Evol-Instruct.")
@click.option("--max-tokens", default=1024, type=click.IntRange(1), help="Maximum tokens of an answer.")
@_output_option()
@_served_model_options
@json_option
def vary(
    seeds: Path, method: str, count: int, instances: int, rounds: int, temperature: float | None, max_tokens: int,
    output: Path, as_json: bool, **served: Any,
) -> None:  # fmt: skip
    """Have a served model generate new instructions with responses from the seed instructions in SEEDS.

    If the command was killed, the same command continues and repeats no answered request.

    \f
    seeds: JSON Lines file of seed instructions. method: "self-instruct" (new tasks) or "evol-instruct" (harder ones).
    count, instances: for Self-Instruct, number of new tasks and of examples of each task. rounds: for Evol-Instruct,
    number of rewrites of each instruction. temperature, max_tokens: sampling settings (temperature None: the method's
    default). output: file to write. as_json: print JSON. served: the options for requests to the model, by parameter
    name.
    """
    from meshwright.data.records.exchanges import read_records, write_records
    from meshwright.synthesis.endpoint import Sampling
    from meshwright.synthesis.evol_instruct import evol_instruct
    from meshwright.synthesis.self_instruct import self_instruct

    with result_printer(as_json) as answer:
        if method not in _METHODS:
            raise UserError(f"--method: {unknown('method', method, _METHODS)}")
        rows = read_records(seeds)
        with _make_client(served, output) as client:
            if method == _METHODS[0]:
                sampling = Sampling(0.7 if temperature is None else temperature, max_tokens, served["seed"])
                outcome = self_instruct(rows, client, count, sampling, instances, print_message)
                records, summary = outcome.records, outcome.summarize()
            else:
                sampling = Sampling(1.0 if temperature is None else temperature, max_tokens, served["seed"])
                records, summary = evol_instruct(rows, client, rounds, sampling, log=print_message)
            summary |= {"usage": client.summarize_usage(served["price_in"], served["price_out"]), "output": output}
            write_records(output, records)
        answer(summary, render_tables([_make_summary_table(summary)]))


COMMANDS = (label, balance, export, import_, vary)


def _make_client(served: Mapping[str, Any], output: Path) -> ChatClient:
    """Create the client of a model server from the options --url, --model ...

    served: value of each option that `_served_model_options` adds, by parameter name. output: output file of the
    command. Without --journal, the journal file of the model's answers is named after `output`.
    """
    from meshwright.synthesis.chat_client import ChatClient
    from meshwright.synthesis.endpoint import Endpoint, read_key

    key = read_key(served["key_variable"])
    endpoint = Endpoint(served["url"], served["model"], key, served["timeout"], served["tries"])
    journal = served["journal"] or output.with_name(f"{output.name}.journal")
    return ChatClient(endpoint, journal, served["concurrency"], print_message)


def _make_summary_table(summary: Mapping[str, Any]) -> Any:
    """Format `summary`, the result of a command as a JSON object, as a rich table with one line for each key; counts of
    0 inside a value are left out."""
    table = make_fact_table()
    for key, value in summary.items():
        if isinstance(value, Mapping):
            value = ", ".join(f"{name} {count:,}" for name, count in value.items() if count)
        elif isinstance(value, list):
            value = f"{len(value):,}" + (f": {', '.join(value[:5])}" if value else "")
        elif isinstance(value, int):
            value = f"{value:,}"
        table.add_row(key.replace("_", " "), escape_control_characters(str(value)) or "-")
    return table


def _make_balance_table(name: str, group: Mapping[str, Any]) -> Any:
    """Format the balance report of one group of labelled records (such as one file) as rich text: counts and shares by
    speech act, and refusals. name: name of the group; group: entry of the group in the report."""
    from rich.console import Group
    from rich.text import Text

    guessed = f", {group['guessed']:,} by a model's guess" if group["guessed"] else ""
    title = Text.assemble(
        (escape_control_characters(name), "bold"),
        f": {group['labelled']:,} of {group['records']:,} records labelled{guessed}",
    )
    if not group["labelled"]:
        return Group(title, "")
    table = make_table("act", "prompt", "share", "to add", "response", "share", "to add")
    prompt, response = group["prompt"], group["response"]
    for act, row in prompt["acts"].items():
        cells = [
            (f"{one['count']:,}", f"{one['share']:.1%}", f"{one['add']:,}") for one in (row, response["acts"][act])
        ]
        table.add_row(act, *cells[0], *cells[1])
    table.add_row("effective number", f"{prompt['effective']:.2f}", "", "", f"{response['effective']:.2f}", "", "")
    counts = group["refusals"]
    lines = [
        f"prompts to refuse: {counts['should_refuse']:,}, of which {counts['refused']:,} refused, "
        f"{counts['answered']:,} answered",
        f"prompts to answer: {counts['harmless']:,}, of which {counts['refused_harmless']:,} refused, "
        f"{counts['answered_harmless']:,} answered",
    ]
    if counts["not_judged"]:
        lines.append(f"{counts['not_judged']:,} records have no refusal label")
    return Group(title, table, *lines, "")
