"""Maximal update parametrization (µP): initial values and learning rates that keep the activations and their changes of
equal size at every width, so that settings tuned on a narrow model suit a wide one. Torch-free.

Yang & Hu et al., Tensor Programs V (arXiv:2203.03466), table 3, for Adam; widths are measured in units of the base
width. Heads have to keep their size (`model.head_dim`), so that the scale 1 / sqrt(head_dim) of the scores stays.
"""

from __future__ import annotations

INPUT_WEIGHTS = ("embedding", "token_types", "positions")
"""Matrices from a finite number of inputs to the width: the row of a token is one input."""
OUTPUT_WEIGHTS = ("head", "router", "shared_expert_gate")
"""Matrices from the width to a finite number of outputs."""


def compute_initial_std_factor(part: str, width_ratio: float) -> float:
    """Return the factor that µP applies to the standard deviation of a matrix's initial values: 1 for input weights
    (embeddings), 1 / ratio for output weights (the head), 1 / sqrt(ratio) for matrices from hidden size to hidden size.

    part: the matrix's role, such as "query". width_ratio: hidden size / base hidden size.
    """
    if part in INPUT_WEIGHTS:
        return 1.0
    return 1.0 / width_ratio if part in OUTPUT_WEIGHTS else width_ratio**-0.5


def compute_learning_rate_factor(part: str, dims: int, width_ratio: float) -> float:
    """Return the factor that µP applies to Adam's learning rate of a parameter: 1 / ratio for matrices whose input size
    grows with the hidden size, 1 for input weights (embeddings) and vectors.

    part: the parameter's role, such as "query". dims: its number of dimensions. width_ratio: hidden size / base hidden
    size.
    """
    return 1.0 if dims < 2 or part in INPUT_WEIGHTS else 1.0 / width_ratio
