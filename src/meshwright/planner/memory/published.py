"""Activation memory of a layer under other engines, as published, and the bytes of model states per parameter.

`published.toml` lists them, with two bytes per number of a 16-bit type. These are closed forms from papers, not
measured here; those of the engine `meshwright` are in `saved.py`.

Megatron-LM (Korthikanti et al. 2022, arXiv:2205.05198, section 4): fused kernels that save their inputs. For a GPT (f =
4h, multi-head, dropout, no flash attention) the sum is sbh (34 + 5as/h), and with tensor and sequence parallelism its
published parts (equations 1, 2, 4 and 6); grouped queries, SwiGLU and flash attention are counted in the same way.
Eager PyTorch, as in Hugging Face and torchtitan: counted from the operations; float32 norms, all operands of products,
norms and activations saved. torchtitan's selective recomputation "op" saves every second matrix product, but no grouped
product of experts, and the results of dispatch and combine (models/deepseek_v3/infra/parallelize.py, _op_sac_save_list:
`mm` and `all_to_all_single`, not `_grouped_mm`). DeepSeek-V3 in fp8 (arXiv:2412.19437): norms, SwiGLU and the
up-projections of latent attention are recomputed (section 3.2.3), inputs of linear layers and of SwiGLU are saved in 8
bits, that of attention's output projection in 12 (section 3.3.3).
"""

from __future__ import annotations

from typing import NamedTuple

from meshwright.layout import Layout
from meshwright.planner.cost.dimensions import Dimensions
from meshwright.planner.cost.engines import Engine
from meshwright.planner.cost.micro_batch import LayerKind, MicroBatch, Number
from meshwright.planner.cost.tables import select_items
from meshwright.toml import read_packaged_toml


def published_layer(batch: MicroBatch, mixture: bool = False) -> dict[str, Number]:
    """Return {operation: bytes} of the activations that one layer saves on one rank under the micro-batch's engine, as
    published (`Engine.saves`). mixture: True if the layer's MLP is a mixture of experts."""
    config, engine, recompute = batch.config, batch.engine, batch.layout.recompute
    latent = config.latent
    numbers = (latent.query_rank or 0) + latent.cached_dim if latent else 3 * config.heads * config.head_dim
    flags = {
        "alternate": engine.selective == "every second product" and recompute == "selective",
        "stores_scores": batch.kernel == "scores" and recompute == "none", "compiled": engine.fusion == "compiled",
        "gathered": saves_gathered(batch.layout, batch.engine),
    }  # fmt: skip
    kind = LayerKind(None, mixture, rotates=False)
    dimensions = Dimensions(batch, kind, {"latent_numbers": numbers}, flags)
    table = read_packaged_toml("planner/memory/published.toml")
    found = select_items(table[engine.saves], dimensions.true, table["groups"])
    return {item.name: dimensions[item.value] for item in found}


def saves_gathered(layout: Layout, engine: Engine) -> bool:
    """Return True if products save their all-gathered inputs under sequence parallelism, as those of DTensors do;
    Megatron-LM gathers them again in the backward."""
    return layout.tp > 1 and layout.tensor_sequence_parallel and engine.name.startswith("torchtitan")


def loss_bytes(batch: MicroBatch) -> Number:
    """Return the bytes of a micro-batch's logits and of what the loss allocates for them, with the head's gathered
    input if it is saved (`saves_gathered`). The loss over sharded logits also holds their product with the exponential
    (torch/distributed/tensor/parallel/loss.py, _nll_loss_and_log_softmax_backward)."""
    rows, columns, engine = batch.predictions, batch.vocabulary, batch.engine
    if engine.gathers_logits:
        rows = rows * batch.tp
    gathered = saves_gathered(batch.layout, engine)
    input_bytes = batch.config.hidden * batch.itemsize + 4 * columns if gathered else 0
    return rows * (columns * (batch.itemsize + engine.loss_holds) + input_bytes)


class StateBytes(NamedTuple):
    """Bytes of model states per parameter. weights, gradients: bytes of weights and of gradients; optimizer: bytes of
    optimizer state, fp32 master weights included."""

    weights: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        """Sum of all bytes per parameter."""
        return sum(self)

    def sharded(self, zero: int, ranks: Number) -> tuple[Number, Number, Number]:
        """Return (weights, gradients, optimizer state) in bytes per parameter of the full model, on each of `ranks`
        ranks over which ZeRO stage `zero` shards."""
        first, second, third = (ranks if zero >= level else 1 for level in (1, 2, 3))
        return self.weights / third, self.gradients / second, self.optimizer / first


def state_bytes(zero: int, ranks: int, narrow: bool = True, wide_gradients: bool = False) -> StateBytes:
    """Return Adam's bytes per parameter of the full model, on each of `ranks` ranks under ZeRO (Rajbhandari et al.
    2020, arXiv:1910.02054, section 3.1, figure 1). zero: ZeRO stage, 0 to 3.

    narrow: True for mixed precision: 2 + 2 + 12 bytes of weight, gradient and optimizer state, or 2 + 4 + 12 with
    `wide_gradients` (float32 gradients). False for float32: 4 + 4 + 8 bytes."""
    each = StateBytes(2.0, 4.0 if wide_gradients else 2.0, 12.0) if narrow else StateBytes(4.0, 4.0, 8.0)
    return StateBytes(*each.sharded(zero, ranks))
