"""`meshwright tune`: search the hyper-parameters of a recipe."""

from __future__ import annotations

import click

from meshwright.cli import plumbing
from meshwright.cli.plumbing import json_option, overrides_argument, result_printer, trust_option


@plumbing.command(
    "tune",
    "meshwright tune recipes/tune.toml",
    "meshwright tune recipes/tune.toml tune.trials=40 layout=dp2 --directory /shared/study",
    "meshwright tune wide.toml model.mup_base_hidden=64 --check-widths 1,2,4,8",
)
@click.argument("recipe")
@overrides_argument
@click.option("--directory", metavar="DIR", help="Directory of the study (default: the run's name and -tune).")
@click.option(
    "--check-widths",
    metavar="N,N,...",
    help="Instead of a search, train a few steps at these multiples of the model's width and draw how the activations "
    "change (the coordinate check of µP).",
)
@trust_option
@json_option
def command(
    recipe: str, overrides: tuple[str, ...], directory: str | None, check_widths: str | None, trust: bool, as_json: bool
) -> None:
    """Search the recipe keys of [tune.space] for the lowest validation loss.

    Each trial is a training run with one set of values; all trials together are the study. Start the command several
    times, on one host or several, with the same directory, and the processes share the study's trials. Stopped by
    SIGTERM or Ctrl-C, it saves the running trial; the same command continues it.

    \f
    recipe: path of the recipe. overrides: KEY=VALUE for fields of the recipe. directory: directory of the study; None:
    the recipe's run directory with "-tune" appended to the name. check_widths: instead of a search, train at these
    multiples of the width, such as "1,2,4", to check the size of activations (µP's coordinate check); None: search.
    trust: True to allow the recipe to import and run Python code that it names. as_json: print JSON.
    """
    from meshwright.tuning.api import tune

    with result_printer(as_json) as answer:
        if check_widths is not None:
            from meshwright.tuning.api import check_widths as check

            checked, picture = check(
                recipe, _parse_width_factors(check_widths), overrides, directory=directory, trust=trust
            )
            growth = checked.find_growth()
            lines = [f"{part:<10} {' '.join(f'{value:10.3g}' for value in checked.changes[part])}  width^{power:.2f}"
                     for part, power in growth.items()]  # fmt: skip
            heading = f"{'hidden':<10} {' '.join(f'{hidden:10}' for hidden in checked.hidden)}"
            answer(
                {"schema": 1, "hidden": checked.hidden, "steps": checked.steps, "sizes": checked.sizes,
                 "changes": checked.changes, "growth": growth, "picture": str(picture)},
                "\n".join([f"root mean square of the change of activations in {checked.steps} steps", heading, *lines,
                           f"picture: {picture}"]),
            )  # fmt: skip
            return
        found = tune(recipe, overrides, directory=directory, trust=trust)
        values = "\n".join(f"  {key} = {value}" for key, value in found.best["parameters"].items())
        answer(
            found.to_json_dict(),
            f"best: validation loss {found.best['value']:.4f} (trial {found.best['trial']})\n{values}\n"
            f"{found.trials} trials, {found.pruned} pruned, {found.failed} failed, {found.seconds:,.0f} s of training\n"
            f"recipe: {found.document['recipe']}\npage: {found.document['page']}",
        )


def _parse_width_factors(text: str) -> tuple[int, ...]:
    """Parse the text of --check-widths, multiples of the recipe's width such as "1,2,4". Raises `click.BadParameter`
    unless they are two or more different integers from 1 to 1024."""
    parts = text.split(",")
    valid = all(part.isdecimal() and 1 <= int(part) <= 1024 for part in parts) and len(set(parts)) == len(parts)
    if len(parts) < 2 or not valid:
        raise click.BadParameter(f'takes two or more different multiples of the width, as "1,2,4", not "{text}"',
                                 param_hint="--check-widths")  # fmt: skip
    return tuple(map(int, parts))
