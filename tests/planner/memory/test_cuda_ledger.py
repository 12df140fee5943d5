"""Ledgers of CUDA devices match the engine, storage by storage, at the sizes of real models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from bench.shared.cuda_cases import CudaStep, Measured, NoCompiler, measured
from meshwright.layout import Layout
from tests.conftest import exhaustive

CAPPED = {"layers": 2, "vocabulary": 4096, "windowed_layers": None, "sliding_window": None}
TWO, FOUR, NO_HEAD = {"layers": 2}, {"layers": 4}, {"layers": 2, "vocabulary": 2048}
SMALL = {"layers": 1, "vocabulary": 512, "hidden": 256, "heads": 4, "kv_heads": 4, "head_dim": 64, "intermediate": 512}


def with_adapter(**settings: Any) -> dict[str, Any]:
    """Return the change of a model with an adapter on quantized weights."""
    return NO_HEAD | {"adapter": {"targets": ["all-linear"], "packed": "nf4"} | settings}


CASES = [
    # Peaks: in the final norm, whose weight is frozen; in the gradients of a frozen MLP; in a dropout mask.
    CudaStep("llama-1b", "bf16", 2, 4096, with_adapter(targets=["q_proj", "v_proj"])),
    CudaStep("mistral-7b-v0.1", "fp32", 2, 1024, with_adapter(targets=["q_proj", "v_proj"])),
    CudaStep("mistral-7b-v0.1", "bf16", 2, 1024, with_adapter(dropout=0.1)),
    CudaStep("llama-1b", "bf16", 8, 4096, TWO, documents=4, saved=True),
    CudaStep("gpt2-xl", "bf16", 8, 1024, TWO, saved=True, hopper=True),
    # Tokens are 0.6% of what stays between steps.
    CudaStep("llama-1b", "dp4 zero1 mb2 tp2 bf16", 32, 512, SMALL, graphs=True, documents=4),
    # Peak when the head is unsharded.
    CudaStep("llama-1b", "dp4 zero3 ac:full bf16", 8, 512, FOUR | {"tied": False}, rank=3),
    CudaStep("llama-1b", "pp2:zb-h1 mb2 bf16", 4, 4096, FOUR),
    CudaStep("mixtral-8x7b-v0.1", "dp4 ep4 bf16", 8, 4096, TWO, saved=True),
    CudaStep("llama-1b", "cp2 bf16", 8, 4096, TWO, documents=4, saved=True),
    CudaStep("mixtral-8x7b-v0.1", "dp2 ep2 ac:full mb2 bf16", 8, 4096, TWO),
    CudaStep("mistral-7b-v0.1", "bf16", 4, 4096, NO_HEAD),  # peak in the backward of the final norm
    CudaStep("llama-1b", "tp4 ac:selective bf16", 4, 4096, NO_HEAD, saved=True),  # peak when a layer is recomputed
    CudaStep("mistral-7b-v0.1", "tp8 ac:full bf16", 4, 4096, NO_HEAD),  # peak with a gradient gathered over tp
    CudaStep("mistral-7b-v0.1", "tp8:nosp bf16", 1, 4096, NO_HEAD, saved=True, overlap="chunks"),
]
MORE = [
    CudaStep("llama-1b", "ac:selective bf16", 8, 4096, TWO, saved=True),
    CudaStep("llama-1b", "dp4 zero3 mb2 tp2 bf16", 16, 4096, TWO, rank=3, saved=True),
    CudaStep("llama-1b", "pp2:zb-h1 mb4 bf16", 8, 4096, FOUR),
    CudaStep("llama-1b", "tp4:nosp bf16", 8, 4096, with_adapter(packed=None), overlap="chunks"),
    CudaStep("llama-1b", "tp4 bf16", 8, 4096, with_adapter(dropout=0.1), overlap="chunks"),
    CudaStep("llama-1b", "tp4 ac:selective bf16", 8, 4096, with_adapter(packed=None), overlap="chunks"),
    CudaStep("llama-1b", "mb2 bf16", 32, 512, SMALL, graphs=True),
    CudaStep("mixtral-8x7b-v0.1", "mb2 bf16", 8, 512, SMALL | {"experts": 4, "expert_intermediate": 512}, graphs=True),
    *(CudaStep("llama-1b", layout, 8, 4096, TWO, saved=True) for layout in ("bf16", "mb2 fp32")),
    CudaStep("llama-3-8b", "ac:full bf16", 2, 4096, TWO, saved=True),
    CudaStep("llama-1b", "cp2 bf16", 8, 4096, TWO, saved=True),
    CudaStep("llama-1b", "cp2:ulysses ac:full bf16", 8, 4096, TWO, saved=True),
    CudaStep("mistral-7b-v0.1", "cp4 bf16", 2, 16384, TWO, documents=3, rank=1, saved=True),
    CudaStep("llama-1b", "cp2 fp32", 2, 4096, TWO, documents=4, saved=True),
    CudaStep("mixtral-8x7b-v0.1", "dp4 ep2:etp2 ac:selective bf16", 8, 4096, TWO, saved=True),
    *(CudaStep("mistral-7b-v0.1", layout, 4, 4096, NO_HEAD) for layout in ("tp4:nosp ac:selective bf16", "tp8 bf16")),
    CudaStep("gemma-2-2b", "bf16", 2, 4096, CAPPED, saved=True),
]


def title(case: CudaStep) -> str:
    adapter = case.change.get("adapter", {})
    words = "documents" * (case.documents > 1), *(f"{name}={value}" for name, value in adapter.items())
    return " ".join([case.model, case.layout, *filter(None, words)])


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> Iterator[dict[str, Measured]]:
    """Measure all cases in one process."""
    cases = [*CASES, *(MORE if request.config.getoption("--exhaustive") else [])]
    try:
        yield {title(case): each for case, each in zip(cases, measured(cases), strict=True)}
    except NoCompiler as reason:
        pytest.skip(f"PyTorch's CPU build needs a few lines of C++ for this: {reason}")


@pytest.mark.parametrize("case", [*CASES, *exhaustive(*MORE)], ids=title)
def test_peak_of_cuda_step_matches_prediction(case: CudaStep, found: dict[str, Measured]) -> None:
    here = found[title(case)]
    assert here.predicted == pytest.approx(here.peak, rel=0.005), (here.moment, here.alive[:20], here.items[:20])
    assert here.predicted - here.predicted_between == pytest.approx(here.peak - here.between, rel=0.01)
    assert here.predicted_between == pytest.approx(here.between, rel=0.001)


@pytest.mark.parametrize("case", [*CASES, *exhaustive(*MORE)], ids=title)
def test_host_waits_once_a_mixture_and_micro_batch(case: CudaStep, found: dict[str, Measured]) -> None:
    """Between loading a batch and reading the outcome. Experts exchange counts of tokens, by which the host sizes their
    buffers; neither recompute nor ring attention nor documents need the host, nor does what a CUDA graph captures."""
    layout = Layout.parse(case.layout)
    mixtures = 2 * layout.micro_batches * layout.expert_parallel
    assert found[title(case)].host_waits == ["parallel/expert.py: _agree_on_routes"] * mixtures


@pytest.mark.parametrize("case", [*(case for case in CASES if case.saved), *exhaustive(*MORE)], ids=title)
def test_saved_activations_of_cuda_forward_match_prediction(case: CudaStep, found: dict[str, Measured]) -> None:
    here = found[title(case)]
    assert not here.unexpected and not here.missing
