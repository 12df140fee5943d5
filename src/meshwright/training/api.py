"""`meshwright.train`: train a recipe from Python, like the command `meshwright train`. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.documents import to_json_dict
from meshwright.emulation.scheduler import is_emulated_rank
from meshwright.errors import UserError, ignore_model_warnings
from meshwright.launcher.rendezvous import check_port_free, is_started_by_others, read_rendezvous_info
from meshwright.layout import Layout
from meshwright.recipe import Recipe, resolve_recipe
from meshwright.terminal import print_message
from meshwright.training.start import launch_recipe


@dataclass(frozen=True, slots=True)
class Result:
    """Outcome of a training run.

    Attributes:
        step: Number of steps done, including steps before a resume.
        loss: Training loss of the last step, in nats per token; None if no step was logged.
        validation_loss: Last validation loss, in nats per token; None without validation.
        tokens_per_second: Median throughput of the logged steps, all ranks together; None if no step was logged.
        mfu: Model FLOP utilisation, 0 to 1, of all devices' dense peak; None if no step was logged.
        predicted: Predictions made before the run: step time in seconds, memory and traffic in bytes.
        measured: Measurements of these quantities in the run, mostly under the keys that they have in `predicted`.
        checkpoint: Newest complete checkpoint.
        best_checkpoint: Checkpoint with the lowest validation loss.
        run_directory: Directory of metrics, result and checkpoints.
        document: All these figures and more as a JSON object, which `meshwright train --json` prints.
    """

    step: int
    loss: float | None
    validation_loss: float | None
    tokens_per_second: float | None
    mfu: float | None
    predicted: Mapping[str, Any]
    measured: Mapping[str, Any]
    checkpoint: Path | None
    best_checkpoint: Path | None
    run_directory: Path
    document: Mapping[str, Any]

    @classmethod
    def from_document(cls, document: Mapping[str, Any], run_directory: Path) -> Result:
        """Build the result from a result document (the JSON object in `result.json`, which `meshwright train --json`
        prints): step, loss, predicted and measured figures, checkpoint paths. run_directory: directory of the run's
        files."""
        checkpoint, best = (document[key] and Path(document[key]) for key in ("checkpoint", "best_checkpoint"))
        figures = {key: document.get(key) for key in ("loss", "validation_loss", "tokens_per_second", "mfu")}
        return cls(
            step=document["step"], **figures, predicted=document["predicted"], measured=document["measured"],
            checkpoint=checkpoint, best_checkpoint=best, run_directory=run_directory, document=document,
        )  # fmt: skip

    def to_json_dict(self) -> dict[str, Any]:
        """Return the result document (`document`), which `meshwright train --json` prints, as a JSON dict."""
        return to_json_dict(self.document)


def train(
    recipe: Recipe | Mapping[str, Any] | str | Path,
    overrides: Mapping[str, Any] | Sequence[str] = (),
    *,
    layout: Layout | str | None = None,
    restarts: int = 0,
    probe: bool = True,
    trust: bool = False,
) -> Result:
    """Train a recipe, or resume it from its newest complete checkpoint; missing data are prepared first.

    Ranks are started as processes of this machine. In a process that torchrun, Kubernetes or SLURM started, and on
    emulated ranks (`meshwright run --emulate`, `mw.emulate`), every rank calls this function.

    Args:
        recipe: Path of a recipe, its tables as nested dictionaries, or a `Recipe`.
        overrides: Values of recipe keys by dotted name, `{"train.steps": 20}`, which replace the recipe's values.
            Strings as on the command line, `["train.steps=20"]`, are accepted, too.
        layout: Layout in place of the recipe's: notation such as `"dp2 zero1"`, `"auto"`, or a `Layout`.
        restarts: Maximum number of restarts after a rank was lost.
        probe: Measure this machine first (10 to 20 seconds) if predictions need it and it was never measured; emulated
            ranks measure nothing.
        trust: Allow the recipe to run code that it names, such as a tracker's class.

    Returns:
        The outcome. If another launcher started the ranks, all figures are complete on rank 0 only.

    Raises:
        UserError: A key, value or file is wrong, or the layout does not fit model, batch or machine.
        CheckFailed: Too many steps in a row had a loss or gradient that was not finite.
        RankLost: A rank died or stopped answering, more often than `restarts`.
        Terminated: SIGTERM arrived; the state has been saved.

    Examples:
        >>> import meshwright as mw
        >>> result = mw.train("tiny.toml", {"train.steps": 2, "run.directory": "runs/tiny"}, layout="dp1 mb2")
        >>> result.step, result.checkpoint.name
        (2, 'step-000002')
        >>> result.loss < 6.0
        True
    """
    resolved = resolve_recipe(recipe, overrides, trust=trust)
    if layout is not None:
        resolved = resolve_recipe(resolved, {"layout": str(layout)})
    started = read_rendezvous_info(resolved.run.rendezvous) if is_started_by_others() else None
    if started is not None and started.rank > 0:
        ignore_model_warnings()
    if resolved.layout == "auto":
        if is_emulated_rank():
            raise UserError('layout = "auto" is not emulated: give a layout, such as "dp2 tp2"')
        from meshwright.launcher.rank_threads import ranks_share_one_host
        from meshwright.training.automatic import search_fastest_layout

        if started is None:
            check_port_free(resolved.run.rendezvous or "")  # before the search, which may measure this machine
        log = print_message if started is None or started.rank == 0 else lambda line: None
        measure = probe and (started is None or ranks_share_one_host(started))
        chosen = search_fastest_layout(resolved, None if started is None else started.ranks, log, probe=measure)
        resolved = resolve_recipe(resolved, {"layout": chosen})
    if started is not None:
        from meshwright.training.worker import train_as_rank

        return Result.from_document(train_as_rank(resolved, probe=probe), resolved.run_directory)
    return Result.from_document(launch_recipe(resolved, restarts=restarts, probe=probe), resolved.run_directory)


def reports_result() -> bool:
    """Return True if this process prints the result of `train`. It does if it is rank 0 of ranks that torchrun,
    Kubernetes or SLURM started, or if it starts the ranks itself.
    """
    if not is_started_by_others():
        return True
    return read_rendezvous_info("file:///").rank == 0  # the rank does not depend on the rendezvous
