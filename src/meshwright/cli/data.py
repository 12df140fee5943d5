"""`meshwright data`: prepare a recipe's data, show samples, report on cleaning and on the tokenizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from meshwright.cli import data_records, plumbing
from meshwright.cli.plumbing import json_option, output_option, overrides_argument, result_printer, write_file
from meshwright.cli.sample_text import make_role_table, make_sample_table
from meshwright.cli.tables import make_fact_table, make_table
from meshwright.cli.tokenizer_text import make_report_tables, make_token_lines
from meshwright.errors import UserError
from meshwright.terminal import escape_in_table, print_message, render_tables

if TYPE_CHECKING:
    from meshwright.data import PreparedData


@plumbing.command(
    "data",
    "meshwright data prepare recipe.toml",
    "meshwright data show recipe.toml",
    "meshwright data report recipe.toml",
    group=True,
)
def command() -> None:
    """Prepare a recipe's data, show samples, report on cleaning and on the tokenizer. Label, balance, annotate and
    extend instruction and chat records.

    Prepared data are cached by content, so that recipes with the same data settings share them.
    """


@plumbing.command("prepare", "meshwright data prepare recipe.toml data.tokenizer=bytes")
@click.argument("recipe")
@overrides_argument
@json_option
def prepare(recipe: str, overrides: tuple[str, ...], as_json: bool) -> None:
    """Read, clean, tokenize and pack the data of RECIPE; check prepared data that exist already, byte for byte.

    If it was killed, the same command continues where it stopped.

    \f
    recipe: path of the recipe. overrides: KEY=VALUE for fields of the recipe. as_json: print JSON.
    """
    with result_printer(as_json) as answer:
        data, samples = _load_prepared(recipe, overrides, check=True)
        summary = data.summary(samples)
        answer(summary, render_tables([_make_summary_tables(summary)]))


@plumbing.command("show", "meshwright data show recipe.toml --rows 4")
@click.argument("recipe")
@overrides_argument
@click.option("--rows", default=2, type=click.IntRange(0, 1000), help="Number of samples to show.")
@output_option("--html", help="Also write the samples to this page.")
@json_option
def show(recipe: str, overrides: tuple[str, ...], rows: int, html: Path | None, as_json: bool) -> None:
    """Show counts of documents, tokens and dropped documents by rule, and samples as training reads them, one of them
    with a document boundary. For instruction or chat records, also show turns and tokens by role and which tokens are
    trained on.

    Data that are not prepared yet are prepared first.

    \f
    recipe: path of the recipe. overrides: KEY=VALUE for fields of the recipe. rows: number of samples to show. html:
    page to write, None for none. as_json: print JSON.
    """
    from meshwright.data.description import count_tokens_by_role, describe_samples
    from meshwright.data.sample_page import render_sample_page

    with result_printer(as_json) as answer:
        data, samples = _load_prepared(recipe, overrides, check=False)
        document = {**data.summary(samples), "rows": describe_samples(data, rows)}
        parts = [_make_summary_tables(document)]
        if marks := count_tokens_by_role(data):
            document["marks"] = marks
            parts += ["", make_role_table(marks)]
        parts += map(make_sample_table, document["rows"])
        if html is not None:
            write_file(html, render_sample_page(Path(recipe).name, document))
            document["files"] = {"page": str(html)}
            parts.append(f"page: {html}")
        answer(document, render_tables(parts))


@plumbing.command("report", "meshwright data report recipe.toml --output report.html")
@click.argument("recipe")
@overrides_argument
@output_option("--output", help="Page to write.  [default: report.html in the directory of the prepared data]")
@json_option
def report(recipe: str, overrides: tuple[str, ...], output: Path | None, as_json: bool) -> None:
    """Write an HTML page about the cleaning of RECIPE's data: counts by rule, samples, distributions.

    Data that are not prepared yet are prepared first.

    \f
    recipe: path of the recipe. overrides: KEY=VALUE for fields of the recipe. output: page to write, None for
    report.html in the directory of the prepared data. as_json: print JSON.
    """
    from meshwright.data.cleaning.report import render_cleaning_page

    with result_printer(as_json) as answer:
        data, _ = _load_prepared(recipe, overrides, check=False)
        page = output or data.directory / "report.html"
        write_file(page, render_cleaning_page(Path(recipe).name, data.cleaning))
        answer({"report": page, **data.cleaning}, f"report: {page}")


@plumbing.command(
    "tokenizer",
    "meshwright data tokenizer recipe.toml",
    "meshwright data tokenizer recipe.toml data.tokenizer=unigram --text 'Two words.' --html tokenizer.html",
)
@click.argument("recipe")
@overrides_argument
@click.option("--text", metavar="TEXT", help="Also show the tokens of this text.")
@output_option("--html", help="Write a page.")
@json_option
def tokenizer(recipe: str, overrides: tuple[str, ...], text: str | None, html: Path | None, as_json: bool) -> None:
    """Report how RECIPE's tokenizer encodes its data: bytes per token by source, token frequencies.

    Data that are not prepared yet are prepared first.

    \f
    recipe: path of the recipe. overrides: KEY=VALUE for fields of the recipe. text: text whose tokens are shown too,
    None for none. html: page to write, None for none. as_json: print JSON.
    """
    from meshwright.data.tokenizers.page import render_tokenizer_page
    from meshwright.data.tokenizers.report import describe_tokens, measure_tokenizer
    from meshwright.recipe import load_recipe

    with result_printer(as_json) as answer:
        data, _ = _load_prepared(recipe, overrides, check=False)
        report = measure_tokenizer(load_recipe(recipe, list(overrides)).data, data)
        shown = None if text is None else describe_tokens(data.tokenizer, text)
        document = report if shown is None else {**report, "shown": shown}
        parts = (
            [make_report_tables(report)] if shown is None else [make_token_lines(shown), "", make_report_tables(report)]
        )
        if html is not None:
            write_file(html, render_tokenizer_page(report, shown))
            document = {**document, "files": {"page": str(html)}}
            parts.append(f"page: {html}")
        answer(document, render_tables(parts))


@plumbing.command(
    "teacher",
    "meshwright data teacher recipe.toml distill.top_k=64",
    'meshwright data teacher recipe.toml distill.top_k=64 --layout "tp2 pp2"',
)
@click.argument("recipe")
@overrides_argument
@click.option("--layout", help='Run the teacher on ranks of this machine, such as "dp2 zero3" or "tp2 pp2".')
@json_option
def teacher(recipe: str, overrides: tuple[str, ...], layout: str | None, as_json: bool) -> None:
    """Run the teacher model of RECIPE's distillation over all training data, and cache its most probable tokens at each
    position (as many as the recipe's distill.top_k); distillation then reads these instead of running the teacher. If
    the cache exists already, check it byte for byte.

    If it was killed, the same command continues where it stopped.

    \f
    recipe: path of the recipe. overrides: KEY=VALUE for fields of the recipe. layout: layout of the ranks that run the
    teacher, None for one device. as_json: print JSON.
    """
    from meshwright.launcher.recipe_checks import check_recipe, check_teacher_tokenizer
    from meshwright.layout import Layout
    from meshwright.recipe import load_recipe

    with result_printer(as_json) as answer:
        loaded = load_recipe(recipe, list(overrides))
        if not loaded.distill.top_k:
            raise UserError(f"{loaded.where('distill.top_k')}: distill.top_k is 0: a teacher and top_k make a cache")
        check_recipe(loaded)
        parsed = None if layout is None else Layout.parse(layout)
        data, _ = _load_prepared(recipe, overrides, check=False)
        check_teacher_tokenizer(loaded, data)
        from meshwright.training.teacher_cache_writer import write_teacher_cache

        document = write_teacher_cache(loaded, data, print_message, parsed)
        facts = make_fact_table()
        for name, value in document.items():
            facts.add_row(name.replace("_", " "), str(value) if isinstance(value, str) else f"{value:,.6g}")
        answer(document, render_tables([facts]))


for one in (prepare, show, tokenizer, report, teacher, *data_records.COMMANDS):
    command.add_command(one)


def _load_prepared(recipe: str, overrides: Iterable[str], check: bool) -> tuple[PreparedData, int]:
    """Load a recipe's prepared data, or prepare them first if they are missing; return (prepared data, number of
    samples that the recipe's training run reads).

    recipe: path. overrides: KEY=VALUE for fields of the recipe. check: verify existing prepared files byte by byte.
    """
    from meshwright.data import prepare as prepare_data
    from meshwright.recipe import load_recipe

    loaded = load_recipe(recipe, list(overrides))
    data = prepare_data(loaded.data, loaded.run.seed, print_message, check=check)
    return data, loaded.train.steps * loaded.train.batch


def _make_summary_tables(summary: Mapping[str, Any]) -> Any:
    """Format `summary`, the facts about prepared data in `PreparedData.summary`, as rich tables: sizes by split and by
    source, documents dropped and passages masked by cleaning, vocabulary size."""
    from rich.console import Group

    from meshwright.data.prepared import format_packing_report

    samples = f"samples of {summary['sequence']:,}"
    splits = make_table("split", "documents", "tokens", "bytes", "bytes per token", samples, "shards")
    for name, split in summary["splits"].items():
        ratio = f"{split['bytes_per_token']:.3f}" if split["tokens"] else "-"
        counts = [f"{split[key]:,}" for key in ("documents", "tokens", "bytes", "sequences", "shards")]
        splits.add_row(name, *counts[:3], ratio, *counts[3:])

    facts = make_fact_table()
    for rule, count in summary["dropped"].items():
        example = summary["dropped_examples"].get(rule)
        facts.add_row(
            f"dropped by {rule}", f"{count:,}" + (f"  (first: {escape_in_table(example)})" if example else "")
        )
    for name, split in summary["splits"].items():
        if "packing" in split and split["documents"]:
            line = format_packing_report(split["packing"], split["sequences"], summary["sequence"])
            facts.add_row(f"packed {name}", line)
    for kind, count in summary["masked"].items():
        facts.add_row(f"removed by {kind}" if kind == "c4_lines" else f"masked {kind}", f"{count:,}")
    if thresholds := summary["language_thresholds"]:
        facts.add_row("language probability", f"at least {thresholds}")
    if removed := summary["removed_sentences"]:
        facts.add_row("removed sentences", f"{removed['sentences']:,} of {removed['documents']:,} documents")
    if unused := summary["unused_keys"]:
        listed = ", ".join(f"{escape_in_table(key)} ({count:,})" for key, count in unused.items())
        facts.add_row("keys not used", listed)
    facts.add_row("vocabulary", f"{summary['vocabulary']:,} tokens")
    facts.add_row("sha256", summary["sha256"])
    facts.add_row("directory", escape_in_table(summary["directory"]))
    return Group(splits, "", *_make_source_table(summary), facts)


def _make_source_table(summary: Mapping[str, Any]) -> list[Any]:
    """Format the data sources as a rich table: for each source its size, its share of the training samples, and how
    many times the run reads it (epochs). Return [table, ""], where "" is an empty line after the table; an empty list
    if there is only one source. summary: facts about prepared data, from `PreparedData.summary`."""
    if len(summary["sources"]) == 1:
        return []
    epochs = f"epochs in {summary['planned_samples']:,} samples"
    table = make_table("source", "files", "documents", "train tokens", "train bytes", "weight", "share", epochs)
    for source in summary["sources"]:
        train = source["train"]
        kept = train["documents"] + source["validation"]["documents"]
        table.add_row(
            escape_in_table(source["name"]),
            f"{source['files']:,}",
            f"{kept:,} of {source['documents']:,}",
            f"{train['tokens']:,}",
            f"{train['bytes']:,}",
            "-" if source["weight"] is None else f"{source['weight']:g}",
            f"{source['share']:.1%}",
            f"{source['epochs']:.2f}",
        )
    return [table, ""]
