"""`meshwright verify`: prove that a layout computes what one device computes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from meshwright.cli import plumbing
from meshwright.cli.plumbing import json_option, refuse_overrides, result_printer, split_overrides
from meshwright.errors import CheckFailed, UserError
from meshwright.terminal import print_row

if TYPE_CHECKING:
    from meshwright.verification.api import Verification


@plumbing.command(
    "verify",
    "meshwright verify recipe.toml",
    'meshwright verify recipe.toml "layout=dp2 zero2" model.layers=3',
    'meshwright verify --layout "dp4 zero3 hs2 mb2" --model qwen3-tiny --mutate',
    "meshwright verify",
)
@click.argument("arguments", nargs=-1, metavar="[RECIPE] [KEY=VALUE]...")
@click.option("--layout", metavar="L", help='Layout such as "dp2 zero1", in place of the recipe\'s.')
@click.option(
    "--model", metavar="M",
    help="Preset, Hugging Face directory, config.json or recipe.  [default: qwen3-0.6b; experts: qwen1.5-moe-a2.7b]",
)  # fmt: skip
@click.option("--dtype", default="float64", metavar="float64|float32", help="Parameter dtype.")
@click.option("--mutate", is_flag=True, help="Inject faults, one at a time; each must be detected.")
@click.option(
    "--thorough", is_flag=True,
    help="Also run SGD with autograd weight gradients, chunked loss, bf16, a resume on another layout and, with "
    "train.compile, Inductor's code; without --model, three models.",
)  # fmt: skip
@json_option
def command(
    arguments: tuple[str, ...], layout: str | None, model: str | None, dtype: str, mutate: bool, thorough: bool,
    as_json: bool,
) -> None:  # fmt: skip
    """Train a small model of the recipe's kind under its layout and on one device, and compare.

    Losses, gradients, norms, updates, optimizer state and checkpoint counters (steps, samples) must agree to 1e-10
    (--dtype float32: 1e-5); cases in lower precision have the tolerances of docs/verify.md. The cases include a skipped
    step, a resumed run, and short and long sequences. Without recipe and layout, a grid over every axis is verified.
    Needs no GPU and no data; a layout of many ranks is first replaced by a similar layout with fewer ranks. KEY=VALUE
    overrides one field of the recipe. Exit code 1 if anything differs.

    \f
    arguments: RECIPE, then overrides. layout: layout to verify in place of the recipe's layout. model: preset, Hugging
    Face directory, config.json or recipe. dtype: "float64" or "float32", of the parameters. mutate: also inject faults,
    one at a time, and check that each is detected. thorough: verify more cases. as_json: print JSON.
    """
    recipe, overrides = split_overrides(arguments)
    if recipe is not None and not recipe.endswith(".toml"):
        raise UserError(f'{recipe}: a recipe is a .toml file; a layout goes into --layout "{recipe}"')
    if recipe is not None and layout is not None:
        model = recipe if model is None else model
    refuse_overrides(overrides, recipe if recipe is not None else model)
    wanted: Any = layout if layout is not None else recipe
    asked: Any = model
    if overrides:
        from meshwright.recipe import load_recipe

        loaded = load_recipe(str(recipe or model), overrides)
        wanted = loaded if wanted == recipe else wanted
        asked = loaded if asked == (recipe or model) else asked
    from meshwright.verification.api import verify

    with result_printer(as_json) as answer:
        found = verify(wanted, model=asked, dtype=dtype, mutate=mutate, thorough=thorough, log=print_row)
        answer(found.to_json_dict(), _format_summary(found))
    if not found.passed:
        raise CheckFailed(str(found.failure))


def _format_summary(found: Verification) -> str:
    """Format the result of a verification as text: number of layouts that passed, the worst errors and, with --mutate,
    the number of injected faults that were detected. found: the result."""
    worst, layouts = found.worst, found.layouts
    passed = sum(entry["passed"] for entry in layouts)
    lines = [
        f"{passed} of {len(layouts)} runs compute what one device computes ({found.dtype}, tolerance "
        f"{found.tolerance:g}, {found.seconds:.0f} s after start-up)",
        f"worst relative error {worst['relative_error']:.1e} ({worst['name']}, {worst['layout']}); loss "
        f"{found.loss_error:.1e}, gradient norm {found.gradient_norm_error:.1e}",
    ]
    if mutations := found.mutations:
        lines.append(
            f"{mutations['planted']} faults planted: {mutations['caught']} caught, {mutations['neutral']} neutral, "
            f"{len(mutations['missed'])} missed"
        )
    return "\n".join(lines)
