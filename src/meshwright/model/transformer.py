"""Decoder-only transformer for every supported family.

It computes on local tensors; all communication is in the operations passed to it and in the hooks around its FSDP units
(model/axis_operations.py). Parameter names are those of the parameter table (spec/parameters.py).

Shapes: B sequences, S tokens of a sequence, T = B x S, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from meshwright.model import weight_gradients
from meshwright.model.attention_inputs import AttentionCache, AttentionInputBuilder, TokenInput
from meshwright.model.axis_operations import NO_UNITS, SINGLE_DEVICE, AxisOperations, Units
from meshwright.model.block import Block, compile_around_dispatch
from meshwright.model.documents import ONE_DOCUMENT, Documents, MicroBatch
from meshwright.model.experts import Mixture
from meshwright.model.layers import Embedding, Linear, make_norm, scale_embedding
from meshwright.model.loss import IGNORED, OutputHead, cap_logits_, linear_cross_entropy, token_cross_entropy
from meshwright.model.pairs import RESPONSES_SITE
from meshwright.model.prediction import PredictionModule, shift_by_one
from meshwright.model.weight_gradients import attach_taps
from meshwright.spec.chunks import keeps_head_gradient
from meshwright.spec.config import ModelConfig
from meshwright.spec.stages import Stage, whole_model


class StageOutput(NamedTuple):
    """Output of a pipeline stage for one micro-batch.

    `x`: on the last stage the summed loss or, with preference pairs, the responses' log-probabilities; on other stages
    the hidden states [B, S, H] (with sequence parallelism only this rank's tokens). `balance`: load-balancing loss,
    which the caller adds to the summed loss; None if the stage has none, or if `x` already includes it.
    """

    x: Tensor
    balance: Tensor | None


class Transformer(nn.Module):
    """Decoder-only language model of configuration `config`. Parameters are uninitialised: `initialise`,
    `load_huggingface` or an engine fills them.

    `axes`: communication and activation checkpointing (those of a mesh: `parallel.parallelize.build_axes`). `device`,
    `dtype`: of the parameters (None: torch's defaults). `stages`: pipeline stages that this rank holds (None: the whole
    model); parameter names do not depend on them. Attribute `token_keys`: random-number keys of the current
    micro-batch's tokens, from which adapters derive dropout (`adapters.dropout.TokenKeys`).
    """

    token_keys: Any = None

    def __init__(
        self, config: ModelConfig, *, axes: AxisOperations = SINGLE_DEVICE, device: torch.device | str | None = None,
        dtype: torch.dtype | None = None, stages: Iterable[Stage] | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        assert config.planning_only is None, config.planning_only
        self.config = config
        self.axes = axes
        dtype = torch.get_default_dtype() if dtype is None else dtype
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        width = -(-config.vocabulary // axes.tensor.size)  # of this rank's slice of the vocabulary
        self._first_token = axes.tensor.rank * width
        stages = (whole_model(config),) if stages is None else tuple(stages)
        first = any(stage.first for stage in stages)
        last = any(stage.last for stage in stages)
        held = {layer for stage in stages for layer in stage.layers}
        self._whole = len(held) == config.layers and first and last
        looked_up = first or (last and (config.tied or config.prediction_layers > 0))
        self.embedding: Any = Embedding(width, config.hidden, axes.tensor, **options) if looked_up else None
        self.positions: Embedding | None = None
        if first and config.positions == "learned":
            self.positions = Embedding(config.max_positions, config.hidden, None, **options)
        self.layers: Any = nn.ModuleList()
        for layer in range(config.layers):  # None for a layer of another stage
            block = Block(config, axes, layer, **options) if layer in held else None
            self.layers.add_module(str(layer), block)
        self.final_norm = make_norm(config, **options) if last else None
        self.prediction = PredictionModule(config, axes, **options) if last and config.prediction_layers else None
        self.head = Linear(config.hidden, width, bias=False, **options) if last and not config.tied else None
        self.attention_inputs = AttentionInputBuilder(config, axes.context, dtype)
        self._run_block: Callable[..., Any] = axes.recompute.wrap_block(axes.recompute.wrap(Block.__call__))
        self._norm: Callable[..., Tensor] = nn.Module.__call__
        self.compiled = False
        self.layer_outputs: dict[int, Any] = {}
        """Layer -> its output in the last forward pass, which distillation compares; only for the keys given."""
        self._loss_backend: Any = None
        self._widest = min(width, config.vocabulary)

    @property
    def head_weight(self) -> Tensor:
        """Weight of the output head, [V, H] (the embedding's weight if head and embedding are tied). With tensor
        parallelism it is this rank's vocabulary slice, without the rows that pad the vocabulary."""
        weight_VH = self._head_module.weight
        real = self.config.vocabulary - self._first_token
        return weight_VH if real >= len(weight_VH) else weight_VH[: max(0, real)]

    def output_head(self) -> OutputHead:
        """Return the `OutputHead` of the model for the loss functions: with tensor parallelism, this rank's vocabulary
        slice of the output head."""
        shape = self._first_token, self._widest
        cap = self.config.logit_softcap or 0.0
        return OutputHead(self.head_weight, self.axes.tensor, None, *shape, self._loss_backend, cap)

    @property
    def _head_module(self) -> Any:
        """Module that owns the weight of the output head."""
        return self.embedding if self.head is None else self.head

    def forward(
        self, tokens_BS: Tensor, targets_BS: Tensor, documents: Documents | None = None, units: Units = NO_UNITS
    ) -> Tensor:
        """Return the sum of the token losses (nats, a scalar in float32 or float64) of the tokens `tokens_BS` with the
        targets `targets_BS`, over targets that are not -100. With preference pairs, return the log-probability of each
        response instead, float64 [B, D] for D responses per sequence. Load-balancing losses of experts contribute to
        the gradient, but not to the value.

        `documents`: document boundaries in packed sequences, and preference pairs (None: each sequence is one
        document); `units`: hooks around FSDP units."""
        batch = MicroBatch(tokens_BS, targets_BS, documents or ONE_DOCUMENT)
        return self.run_stage(self._whole_model_stage(), None, batch, units).x

    def run_stage(
        self, stage: Stage, x_BSH: Tensor | None, batch: MicroBatch, units: Units, at_once: bool = True
    ) -> StageOutput:
        """Run pipeline stage `stage` on `x_BSH`, the previous stage's output (None: first stage), and return its
        output. The last stage returns the summed loss of the micro-batch's targets that are not -100 or, with
        preference pairs in its documents, the log-probabilities of the responses; other stages return hidden states.
        The last stage's load-balancing loss adds to the gradient of its summed loss, but not to the value.

        `batch`: the micro-batch; `units`: hooks around FSDP units; `at_once`: True if the backward pass of this forward
        follows immediately. If not, the loss saves the gradient of the output head only if it is small; otherwise
        backward recomputes the logits.
        """
        tokens_BS, targets_BS, documents = batch
        pairs = documents.pairs
        counted_B = None
        predicts = stage.last and self.prediction is not None and torch.is_grad_enabled()
        if torch.is_grad_enabled() and (predicts or any(self.config.has_experts(layer) for layer in stage.layers)):
            counted_B = (targets_BS != IGNORED).sum(dim=1) if pairs is None else pairs.counted_BP.sum(dim=1)
            if self.config.router_loss and pairs is None:  # sequences are weighted by their targets on all cp ranks
                counted_B = self.axes.context.reduce(counted_B, "router.targets")
        x_BSH, losses = self._forward_blocks(stage, x_BSH, TokenInput(tokens_BS, documents), units, counted_B)
        balance = torch.stack(losses).sum() if losses else None
        if not stage.last:
            return StageOutput(x_BSH, balance)
        x_BSH = self._normalise(units.enter("head", x_BSH))
        normed_BSH = x_BSH if predicts else None  # nothing else may hold the states while the loss is computed
        x_BSH = self.axes.tensor.enter(x_BSH, "head.input")
        states_TH = x_BSH.flatten(0, 1)
        targets_T = targets_BS.flatten()
        if pairs is not None:
            losses_T = token_cross_entropy(states_TH, targets_T, self.output_head())
            responses_BD = self.axes.context.reduce(pairs.log_probabilities(losses_T), RESPONSES_SITE)
            return StageOutput(units.leave("head", responses_BD), balance)
        keep = keeps_head_gradient(len(targets_T), self._widest, len(stage.layers), self.axes.recompute.kind, at_once)
        teacher = documents.teacher
        loss = linear_cross_entropy(states_TH, targets_T, self.output_head()._replace(teacher=teacher), keep)
        if teacher is not None:
            loss = loss + teacher.compute_hidden_loss(self, targets_BS)
        if normed_BSH is not None:
            later, later_balance = self._predict_token_after_next(normed_BSH, batch, counted_B, keep)
            balance = later_balance if balance is None else balance + later_balance
            loss = loss + self.config.prediction_loss * (later - later.detach())
        if balance is not None:
            loss = loss + (balance - balance.detach())
        return StageOutput(units.leave("head", loss), None)

    def hidden(
        self, tokens_BS: Tensor, documents: Documents | None = None, units: Units = NO_UNITS,
        cache: AttentionCache | None = None, positions: Tensor | None = None, stage: Stage | None = None,
        x_BSH: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Return the output of the final norm, [B, S, H], which is the input of the output head, for the token IDs
        `tokens_BS`.

        `documents`: document boundaries in packed sequences; `units`: hooks around FSDP units; `cache`: KV cache of the
        preceding tokens (None: none).

        `positions` [B, S]: position IDs; None: 0, 1, 2 ... within each document, or continuing after the cached tokens.
        `stage`: run only this pipeline stage on `x_BSH`, the previous stage's output; every stage but the last returns
        hidden states for the next stage."""
        stage = self._whole_model_stage() if stage is None else stage
        given = TokenInput(tokens_BS, documents or ONE_DOCUMENT, cache, positions)
        x_BSH, _ = self._forward_blocks(stage, x_BSH, given, units)
        if not stage.last:
            return x_BSH
        return units.leave("head", self.axes.tensor.enter(self._normalise(units.enter("head", x_BSH)), "head.input"))

    def logits(self, tokens_BS: Tensor, documents: Documents | None = None, **inputs: Any) -> Tensor:
        """Return the next-token logits, [B, S, V], in the model's dtype, for the token IDs `tokens_BS`. `documents`:
        document boundaries in packed sequences; `inputs`: further arguments of `hidden`, such as a KV cache."""
        return self.output_logits(self.hidden(tokens_BS, documents, **inputs))

    def output_logits(self, hidden_BSH: Tensor) -> Tensor:
        """Return the next-token logits [B, S, V] for `hidden_BSH`, the output of the final norm."""
        local_BSV = nn.functional.linear(hidden_BSH, self._head_module.weight)
        if self.config.logit_softcap:
            local_BSV = cap_logits_(local_BSV, self.config.logit_softcap)
        return self.axes.tensor.gather(local_BSV, "head.output", dim=2)[..., : self.config.vocabulary]

    def compile_blocks(self, **options: Any) -> None:
        """Compile blocks, final norm and loss with torch.compile.

        `options`: keyword arguments of torch.compile (`dynamic` is False by default). Blocks of the same structure
        share one graph of static shapes; another batch shape, or the first batch that packs several documents, triggers
        another compilation."""
        weight_gradients.exclude_from_compiled_graphs()
        options = {"dynamic": False, **options}
        recompute = self.axes.recompute
        run_block = self._with_taps(recompute.wrap(Block.forward, options))
        if self.axes.dispatcher is not None:
            attend = self._with_taps(recompute.wrap(Block.attend, options))
            run_block = compile_around_dispatch(run_block, attend, recompute.wrap(Mixture.__call__))
        self._run_block = recompute.wrap_block(run_block)
        if self.final_norm is not None:
            self._norm = torch.compile(type(self.final_norm).forward, **options)
        self.compiled = True
        self._loss_backend = options.get("backend", "inductor")

    def _with_taps(self, run_block: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the compiled function `run_block` so that its backward can defer weight gradients to a queue. During
        each call, the block's linear layers with a queue get taps: two dummy inputs, whose gradients carry the operands
        of the weight gradient (dy and x) out of the compiled backward.
        """
        ranks = self.axes.tensor.size if self.axes.tensor.sequence_parallel else 1

        def run(block: Block, x_BSH: Tensor, *rest: Any) -> Any:
            """Run the compiled `block` while its linear layers have taps (dummy inputs, as whose gradients backward
            returns dy and x). `rest`: further arguments of `Block.forward`."""
            with attach_taps(block.linear_layers(), (x_BSH.shape[0], x_BSH.shape[1] * ranks)):
                return run_block(block, x_BSH, *rest)

        return run

    def _whole_model_stage(self) -> Stage:
        """Return the stage that spans the whole model; assert that this rank holds all of it."""
        assert self._whole, "this rank holds only some of the stages"
        return whole_model(self.config)

    def _forward_blocks(
        self, stage: Stage, x_BSH: Tensor | None, given: TokenInput, units: Units,
        counted_B: Tensor | None = None,
    ) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
        """Run the embedding and blocks of a stage; return the hidden states [B, S, H] and the load-balancing loss of
        each block that has one.

        `x_BSH`: the previous stage's output (None: first stage); `given`: the tokens; `units`: hooks around FSDP units;
        `counted_B`: number of target tokens of each sequence, by which the load-balancing losses are weighted; None:
        these losses are not computed."""
        inputs = self.attention_inputs.build(stage.layers, given)
        if stage.first:
            assert x_BSH is None and self.embedding is not None
            units.enter("embedding", None)
            x_BSH = units.leave("embedding", self._embed(given.tokens_BS, "embedding"))
            if self.positions is not None:
                x_BSH = units.enter("positions", x_BSH) + self.positions(self._find_positions(given))
                x_BSH = units.leave("positions", x_BSH)
        assert x_BSH is not None, "the output of the previous stage is missing"
        losses = []
        run_block = self._run_block if given.cache is None else Block.__call__
        for layer in stage.layers:
            x_BSH = units.enter(f"layers.{layer}", x_BSH)
            x_BSH, balance = run_block(self.layers[layer], x_BSH, inputs[layer], counted_B)
            if balance is not None:
                losses.append(balance)
            x_BSH = units.leave(f"layers.{layer}", x_BSH)
            if layer in self.layer_outputs:
                self.layer_outputs[layer] = x_BSH
        if given.cache is not None:
            given.cache.advance(given.tokens_BS.shape[1])
        return x_BSH, losses

    def _find_positions(self, given: TokenInput) -> Tensor:
        """Return the position IDs of the tokens of `given` for learned positions, [B or 1, S]; with sequence
        parallelism, only the position IDs of this tp rank's token slice."""
        positions_BS = given.documents.positions_BS() if given.positions_BS is None else given.positions_BS
        if positions_BS is None:
            cached = 0 if given.cache is None else given.cache.length
            tokens_BS = given.tokens_BS
            positions_BS = torch.arange(cached, cached + tokens_BS.shape[1], device=tokens_BS.device)[None]
        tensor = self.axes.tensor
        return positions_BS.chunk(tensor.size, dim=1)[tensor.rank] if tensor.sequence_parallel else positions_BS

    def _embed(self, tokens_BS: Tensor, site: str) -> Tensor:
        """Return the scaled embeddings [B, S, H] of `tokens_BS` (with sequence parallelism this rank's token slice).
        `site`: label of the sum over tp in traces."""
        x_BSH = self.axes.tensor.leave(self.embedding(tokens_BS), site)
        return scale_embedding(x_BSH, self.config.embedding_factor)

    def _predict_token_after_next(
        self, normed_BSH: Tensor, batch: MicroBatch, counted_B: Tensor | None, keep: bool
    ) -> tuple[Tensor, Tensor]:
        """Predict the token after the next one (multi-token prediction). Return (summed loss of these predictions,
        load-balancing loss of the prediction module).

        `normed_BSH`: output of the final norm; `batch`: the micro-batch; `counted_B`: number of target tokens of each
        sequence, or None for a model without experts; `keep`: True to compute the loss's gradients in forward and save
        them; False: backward recomputes the logits.
        """
        assert self.prediction is not None and self.axes.context.size == 1, "refused with cp"
        next_BS, after_BS = shift_by_one(batch)
        x_BSH = self.prediction.project(normed_BSH, self._embed(next_BS, "prediction.embedding"))
        layer = self.config.layers
        inputs = self.attention_inputs.build([layer], TokenInput(batch.tokens_BS, batch.documents))
        x_BSH, balance = self._run_block(self.prediction.block, x_BSH, inputs[layer], counted_B)
        states_BSH = self.axes.tensor.enter(self.prediction.norm(x_BSH), "prediction.head")
        assert balance is not None, "the module has experts"
        return linear_cross_entropy(states_BSH.flatten(0, 1), after_BS.flatten(), self.output_head(), keep), balance

    def _normalise(self, x_BSH: Tensor) -> Tensor:
        """Return the final norm of `x_BSH` [B, S, H], the input of the output head. With sequence parallelism `x_BSH`
        is this rank's token slice, and the result has the tokens of all tp ranks."""
        x_BSH = self._norm(self.final_norm, x_BSH)
        if self.config.logit_divisor != 1:
            x_BSH = x_BSH / self.config.logit_divisor
        return x_BSH
