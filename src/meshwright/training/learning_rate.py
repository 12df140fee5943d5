"""Learning rate as a function of the step alone, so that a resumed run needs no schedule state."""

from __future__ import annotations

import math

from meshwright.recipe import TrainRecipe


def learning_rate(step: int, train: TrainRecipe) -> float:
    """Return the learning rate of the optimizer update number `step`, counted from 0. train: the recipe's [train]
    table.

    The rate rises linearly during the first `warmup` updates; update number `warmup` is the first with the peak rate,
    `train.learning_rate`. Afterwards it depends on `train.schedule`; all but "constant" end at
    `minimum_learning_rate` × peak in the last step:
    - cosine: half a cosine wave (Loshchilov & Hutter, SGDR, arXiv 1608.03983, equation 5, one period);
    - linear: a straight line;
    - wsd: the peak, then a straight line over the last `decay` steps (Hu et al., MiniCPM, arXiv 2404.06395, section 4);
    - constant: the peak throughout.
    """
    peak = train.learning_rate
    if step < train.warmup:
        return peak * (step + 1) / (train.warmup + 1)
    if train.schedule == "constant":
        return peak
    last = train.steps - 1
    start = last - train.decay if train.schedule == "wsd" else train.warmup  # last step at the peak
    progress = min(1.0, max(0.0, (step - start) / max(1, last - start)))
    floor = peak * train.minimum_learning_rate
    if train.schedule == "cosine":
        return floor + (peak - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))
    return peak + (floor - peak) * progress
