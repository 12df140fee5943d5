"""`meshwright.verify`: check from Python that a layout computes the same as one device. Free of torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.documents import to_json_dict
from meshwright.layout import Layout
from meshwright.recipe import Recipe
from meshwright.spec.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Verification:
    """Result of training small models on parallel layouts and on one device and comparing the two.

    Attributes:
        passed: True if every layout agrees with one device and every planted fault was detected.
        dtype: Parameter dtype of the comparison, `"float64"` or `"float32"`.
        tolerance: Largest relative error that passes in this dtype.
        worst: Name, relative error and layout of the tensor that differs most.
        loss_error: Largest relative error of a loss.
        gradient_norm_error: Largest relative error of a gradient norm.
        layouts: One record per layout and model: layout, model, passed, worst, cases, seconds.
        mutations: Report on planted faults (deliberate bugs): number planted, detected ("caught") and without effect on
            results ("neutral"), and list of faults that were not detected ("missed"); None without `mutate`.
        failure: First disagreement or missed fault in one line; None if all passed.
        seconds: Wall time.
        document: The JSON document of `meshwright verify --json`, which has all of these results and more.
    """

    passed: bool
    dtype: str
    tolerance: float
    worst: Mapping[str, Any]
    loss_error: float
    gradient_norm_error: float
    layouts: list[dict[str, Any]]
    mutations: Mapping[str, Any] | None
    failure: str | None
    seconds: float
    document: Mapping[str, Any]

    def to_json_dict(self) -> dict[str, Any]:
        """Return the JSON document of `meshwright verify --json`, which is the content of `document`, as a new dict."""
        return to_json_dict(self.document)


def verify(
    layout: Recipe | Layout | str | Path | None = None,
    *,
    model: Recipe | ModelConfig | str | Path | None = None,
    dtype: str = "float64",
    mutate: bool = False,
    thorough: bool = False,
    log: Callable[[str], None] = lambda line: None,
) -> Verification:
    """Train a small model on a layout and on one device, and compare losses, gradients, updates and optimizer state.

    Ranks are processes of this machine, on its CPU; a large layout is scaled down to at most 8 ranks first.

    Args:
        layout: Layout or its notation, a recipe or its file (its layout and its model), or None for a grid over every
            axis of parallelism.
        model: Preset, Hugging Face directory, config.json, configuration or recipe. The model is scaled down with all
            its features. Default: representative models.
        dtype: `"float64"`, in which relative errors up to 1e-10 pass, or `"float32"`, up to 1e-5.
        mutate: Plant faults (deliberate bugs) at every collective call site and in local code, one at a time; each must
            be detected.
        thorough: Run the slow cases, too; without `model`, on three models.
        log: Function called with a line of text for each layout.

    Returns:
        The comparison, the same as the document of `meshwright verify --json`; `passed` is False if something
        disagrees.

    Raises:
        UserError: A name is unknown, or the layout cannot run.

    Examples:
        >>> import meshwright as mw
        >>> proof = mw.verify("dp2", model="llama-tiny")
        >>> proof.passed, proof.worst["relative_error"] < 1e-10
        (True, True)
    """
    from meshwright.comm.local import PRELOADED, start_server

    start_server((*PRELOADED, "meshwright.verification.ranks"))  # it loads torch in parallel with this process
    from meshwright.verification import run

    document = run.run_verification(layout, model=model, dtype=dtype, mutate=mutate, thorough=thorough, log=log)
    names = ("passed", "dtype", "tolerance", "worst", "loss_error", "gradient_norm_error", "layouts", "mutations")
    figures = {name: document[name] for name in names}
    return Verification(
        **figures, failure=_describe_first_failure(document), seconds=document["seconds"], document=document
    )


def _describe_first_failure(document: Mapping[str, Any]) -> str | None:
    """Return the first failure in a result document as one line: the first layout that disagrees with one device, else
    the first planted bug that was not detected; None if all passed."""
    if document["passed"] or document["failure"]:
        return document["failure"]
    missed = document["mutations"]["missed"]
    return f"not detected: {missed[0]} (and {len(missed) - 1} more)"
