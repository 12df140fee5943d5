"""`meshwright explain`: a published figure, recomputed step by step."""

from __future__ import annotations

import shutil
from pathlib import Path

import click

from meshwright.cli import plumbing
from meshwright.cli.plumbing import json_option, output_option, result_printer, write_file
from meshwright.errors import UserError


@plumbing.command(
    "explain",
    "meshwright explain",
    "meshwright explain ring-all-reduce",
    "meshwright explain bubble-1f1b --svg bubble.svg",
    "meshwright explain zero-memory --json",
)
@click.argument("name", required=False)
@output_option("--svg", help="Write the example's picture.")
@json_option
def command(name: str | None, svg: Path | None, as_json: bool) -> None:
    """Recompute a published number or formula of distributed training, step by step, with this package's own code.

    Without NAME: the list of examples. Each example shows every number, where the value was published, a common
    misstatement (if one is known), commands to try, and the source files that compute it.

    \f
    name: example such as "ring-all-reduce", None for the list. svg: picture to write, None for none. as_json: print
    JSON.
    """
    with result_printer(as_json) as answer:
        from meshwright.gallery.examples import EXAMPLES, explain
        from meshwright.gallery.explanation import Figure
        from meshwright.gallery.text import render_list, render_text

        width = max(20, shutil.get_terminal_size((80, 24)).columns)
        if name is None:
            if svg:
                raise UserError("--svg: give the name of an example, such as ring-all-reduce")
            examples = [{"name": key, "title": one.title, "published": one.published} for key, one in EXAMPLES.items()]
            answer({"examples": examples}, render_list({key: one.title for key, one in EXAMPLES.items()}, width))
            return
        explanation = explain(name)
        figures = [step for step in explanation.steps if isinstance(step, Figure)]
        text = render_text(explanation, width)
        if svg:
            if not figures:
                with_picture = [key for key in EXAMPLES if any(isinstance(s, Figure) for s in explain(key).steps)]
                raise UserError(f"--svg: {name} has no picture; these have one: {', '.join(with_picture)}")
            write_file(svg, figures[0].draw())
            text += f"\npicture: {svg}"
        answer(explanation.to_json_dict() | {"files": {"picture": str(svg)} if svg else {}}, text)
