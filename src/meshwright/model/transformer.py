"""Decoder-only transformer for every supported family.

It computes on local tensors; all communication is in the operations passed to it (model/axis_operations.py), and ZeRO
hooks into its FSDP units (model/units.py). Parameter names are those of the parameter table (spec/parameters.py).

Shapes: B sequences, S tokens of a sequence, T = B x S, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from meshwright.model import weight_gradients
from meshwright.model.axis_operations import SINGLE_DEVICE, AxisOperations
from meshwright.model.block import Block, compile_around_dispatch
from meshwright.model.cache import AttentionCache
from meshwright.model.documents import ONE_DOCUMENT, Documents
from meshwright.model.experts import Mixture
from meshwright.model.layers import Embedding, Linear, make_norm, scale_embedding
from meshwright.model.loss import IGNORED, OutputHead, cap_logits_, linear_cross_entropy, token_cross_entropy
from meshwright.model.pairs import RESPONSES_SITE
from meshwright.model.prediction import PredictionModule, shift_by_one
from meshwright.model.rope import RotaryTable, TemperatureTable, make_table
from meshwright.model.scaled_dot_product import AttentionMask, choose_mask_form
from meshwright.model.units import NO_UNITS, Units
from meshwright.model.weight_gradients import attach_taps
from meshwright.spec.chunks import keeps_head_gradient
from meshwright.spec.config import ModelConfig
from meshwright.spec.rope_scaling import Rotation, Temperature
from meshwright.spec.stages import Stage, whole_model

Rotated = tuple[torch.Tensor, torch.Tensor | None] | None
"""Rotary cosine and sine of each token, [B or 1, 1, S, D/2] each; factors on its queries [B or 1, 1, S, 1] and None;
None without either."""


class StageInput(NamedTuple):
    """Input of pipeline stage `stage` for one micro-batch.

    `x_BSH`: the previous stage's output; None on the first stage. `tokens_BS`: token IDs; `documents`: document
    boundaries in packed sequences (None: every sequence is one document)."""

    stage: Stage
    x_BSH: torch.Tensor | None
    tokens_BS: torch.Tensor
    documents: Documents | None


class StageOutput(NamedTuple):
    """Output of a pipeline stage for one micro-batch.

    `x`: hidden states [B, S, H] (with sequence parallelism only this rank's tokens); on the last stage the summed loss,
    or with preference pairs the responses' log-probabilities. `balance`: load-balancing loss, which the caller adds to
    the summed loss; None if the stage has none, or if `x` already includes it.
    """

    x: torch.Tensor
    balance: torch.Tensor | None


class Transformer(nn.Module):
    """Decoder-only language model of configuration `config`. Parameters are uninitialised: `initialise`,
    `load_huggingface` or an engine fills them.

    `axes`: communication and activation checkpointing (`parallel.axes.build_axes` builds them for a mesh). `device`,
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
        first, last = any(stage.first for stage in stages), any(stage.last for stage in stages)
        held = {layer for stage in stages for layer in stage.layers}
        self._whole = len(held) == config.layers and first and last
        looked_up = first or (last and (config.tied or config.prediction_layers > 0))
        self.embedding: Any = Embedding(width, config.hidden, axes.tensor, **options) if looked_up else None
        self.served_length: int | None = None  # of the longest sequence of a server, by which LongRoPE chooses
        learned = config.positions == "learned"
        self.positions = Embedding(config.max_positions, config.hidden, None, **options) if learned and first else None
        self.layers: Any = nn.ModuleList()
        for layer in range(config.layers):  # None for a layer of another stage
            block = Block(config, axes, layer, **options) if layer in held else None
            self.layers.add_module(str(layer), block)
        self.final_norm = make_norm(config, **options) if last else None
        self.prediction = PredictionModule(config, axes, **options) if last and config.prediction_layers else None
        self.head = Linear(config.hidden, width, bias=False, **options) if last and not config.tied else None
        self._dtype, self._rotary = dtype, dict[Rotation | Temperature, RotaryTable | TemperatureTable]()
        self._run_block: Callable[..., tuple[torch.Tensor, torch.Tensor | None]] = axes.recompute.wrap_block(
            axes.recompute.wrap(Block.__call__)
        )
        self._norm: Callable[..., torch.Tensor] = nn.Module.__call__
        self.compiled = False
        self.layer_outputs: dict[int, Any] = {}
        """Layer -> its output in the last forward pass, which distillation compares; only for the keys given."""
        self._loss_backend: Any = None
        self._widest = min(width, config.vocabulary)

    @property
    def head_weight(self) -> torch.Tensor:
        """Weight of the output head, [V, H] (the embedding's weight if they are tied). With tensor parallelism it is
        this rank's vocabulary slice, without the rows that pad the vocabulary."""
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
        self,
        tokens_BS: torch.Tensor,
        targets_BS: torch.Tensor,
        documents: Documents | None = None,
        units: Units = NO_UNITS,
    ) -> torch.Tensor:
        """Return the sum of the token losses (nats, a scalar in float32 or float64) of the tokens `tokens_BS` with the
        targets `targets_BS`, over targets that are not -100. With preference pairs, return the log-probability of each
        response instead, float64 [B, D] for D responses per sequence. Load-balancing losses of experts contribute to
        the gradient, but not to the value.

        `documents`: document boundaries in packed sequences, and preference pairs; `units`: hooks around FSDP units."""
        return self.run_stage(self._whole_model_stage(), None, tokens_BS, targets_BS, documents, units).x

    def run_stage(
        self, stage: Stage, x_BSH: torch.Tensor | None, tokens_BS: torch.Tensor, targets_BS: torch.Tensor,
        documents: Documents | None = None, units: Units = NO_UNITS, at_once: bool = True,
    ) -> StageOutput:  # fmt: skip
        """Run pipeline stage `stage` on `x_BSH`, the previous stage's output (None: first stage), and return its
        output. The last stage returns the summed loss of the targets `targets_BS` that are not -100 or, with preference
        pairs in `documents`, the log-probabilities of the responses; other stages return hidden states. The last
        stage's load-balancing loss adds to the gradient of its summed loss, but not to the value.

        `tokens_BS`: token IDs; `documents`: document boundaries in packed sequences; `units`: hooks around FSDP units;
        `at_once`: True if the backward pass of this forward follows immediately. If not, the loss saves the gradient of
        the output head only if it is small; otherwise backward recomputes the logits.
        """
        pairs = None if documents is None else documents.pairs
        counted_B = None
        predicts = stage.last and self.prediction is not None and torch.is_grad_enabled()
        if torch.is_grad_enabled() and (predicts or any(self.config.has_experts(layer) for layer in stage.layers)):
            counted_B = (targets_BS != IGNORED).sum(dim=1) if pairs is None else pairs.counted_BP.sum(dim=1)
            if self.config.router_loss and pairs is None:  # sequences are weighted by their targets on all cp ranks
                counted_B = self.axes.context.reduce(counted_B, "router.targets")
        given = StageInput(stage, x_BSH, tokens_BS, documents)
        x_BSH, losses = self._forward_blocks(given, units, counted_B=counted_B)
        balance = torch.stack(losses).sum() if losses else None
        if not stage.last:
            return StageOutput(x_BSH, balance)
        x_BSH = self._normalise(units.enter("head", x_BSH))
        normed_BSH = x_BSH if predicts else None  # nothing else may hold the states while the loss is computed
        x_BSH = self.axes.tensor.enter(x_BSH, "head.input")
        states_TH, targets_T = x_BSH.flatten(0, 1), targets_BS.flatten()
        if pairs is not None:
            losses_T = token_cross_entropy(states_TH, targets_T, self.output_head())
            responses_BD = self.axes.context.reduce(pairs.log_probabilities(losses_T), RESPONSES_SITE)
            return StageOutput(units.leave("head", responses_BD), balance)
        keep = keeps_head_gradient(len(targets_T), self._widest, len(stage.layers), self.axes.recompute.kind, at_once)
        teacher = None if documents is None else documents.teacher
        loss = linear_cross_entropy(states_TH, targets_T, self.output_head()._replace(teacher=teacher), keep)
        if teacher is not None:
            loss = loss + teacher.compute_hidden_loss(self, targets_BS)
        if normed_BSH is not None:
            later, more = self._predict_token_after_next(normed_BSH, tokens_BS, targets_BS, documents, counted_B, keep)
            balance = more if balance is None else balance + more
            loss = loss + self.config.prediction_loss * (later - later.detach())
        if balance is not None:
            loss = loss + (balance - balance.detach())
        return StageOutput(units.leave("head", loss), None)

    def hidden(
        self, tokens_BS: torch.Tensor, documents: Documents | None = None, units: Units = NO_UNITS,
        cache: AttentionCache | None = None, positions: torch.Tensor | None = None, stage: Stage | None = None,
        x_BSH: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Return the output of the final norm, [B, S, H], which is the input of the output head, for the token IDs
        `tokens_BS`.

        `documents`: document boundaries in packed sequences; `units`: hooks around FSDP units; `cache`: KV cache of the
        tokens before these.

        `positions` [B, S]: position IDs; None: 0, 1, 2 ... within each document, or continuing after the cached tokens.
        `stage`: run only this pipeline stage on `x_BSH`, the previous stage's output; every stage but the last returns
        hidden states for the next stage."""
        stage = self._whole_model_stage() if stage is None else stage
        x_BSH, _ = self._forward_blocks(StageInput(stage, x_BSH, tokens_BS, documents), units, cache, positions)
        if not stage.last:
            return x_BSH
        return units.leave("head", self.axes.tensor.enter(self._normalise(units.enter("head", x_BSH)), "head.input"))

    def logits(
        self,
        tokens_BS: torch.Tensor,
        documents: Documents | None = None,
        cache: AttentionCache | None = None,
        positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the next-token logits, [B, S, V], in the model's dtype, for the token IDs `tokens_BS`.

        `documents`: document boundaries in packed sequences; `cache`: KV cache of the tokens before these; `positions`
        [B, S]: position IDs; None: 0, 1, 2 ... within each document, or continuing after the cached tokens."""
        return self.output_logits(self.hidden(tokens_BS, documents, cache=cache, positions=positions))

    def output_logits(self, hidden_BSH: torch.Tensor) -> torch.Tensor:
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
        run_block = recompute.wrap(Block.forward, options, self._with_taps)
        if self.axes.dispatcher is not None:
            attend = recompute.wrap(Block.attend, options, self._with_taps)
            run_block = compile_around_dispatch(run_block, attend, recompute.wrap(Mixture.__call__))
        self._run_block = recompute.wrap_block(run_block)
        if self.final_norm is not None:
            self._norm = torch.compile(type(self.final_norm).forward, **options)
        self.compiled, self._loss_backend = True, options.get("backend", "inductor")

    def _with_taps(self, run_block: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the compiled function `run_block` so that its backward can defer weight gradients to a queue. During
        each call, the block's linear layers with a queue get taps: two dummy inputs, whose gradients carry the operands
        of the weight gradient (dy and x) out of the compiled backward.
        """
        ranks = self.axes.tensor.size if self.axes.tensor.sequence_parallel else 1

        def run(block: Block, x_BSH: torch.Tensor, *rest: Any) -> Any:
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
        self, given: StageInput, units: Units, cache: AttentionCache | None = None,
        positions_BS: torch.Tensor | None = None, counted_B: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:  # fmt: skip
        """Run the embedding and blocks of a stage on `given`; return the hidden states [B, S, H] and the load-balancing
        loss of each block that has one.

        `units`: hooks around FSDP units; `cache`: KV cache of the preceding tokens; `positions_BS`: position IDs; None:
        0, 1, 2 ... within each document, or continuing after the cached tokens. `counted_B`: number of target tokens of
        each sequence, by which the losses are weighted; None: they are not computed."""
        stage, x, tokens_BS, documents = given
        documents = ONE_DOCUMENT if documents is None else documents
        sequence, cached = tokens_BS.shape[1], 0 if cache is None else cache.length
        positions_BS, inputs = self._prepare_attention(stage.layers, tokens_BS, documents, cache, positions_BS)
        if stage.first:
            assert x is None and self.embedding is not None
            units.enter("embedding", None)
            x = units.leave("embedding", self._embed(tokens_BS, "embedding"))
            if self.positions is not None:
                x = units.enter("positions", x)
                if positions_BS is None:
                    positions_BS = torch.arange(cached, cached + sequence, device=tokens_BS.device)[None]
                if (tensor := self.axes.tensor).sequence_parallel:
                    positions_BS = positions_BS.chunk(tensor.size, dim=1)[tensor.rank]
                x = x + self.positions(positions_BS)
                x = units.leave("positions", x)
        assert x is not None, "the output of the previous stage is missing"
        x_BSH, losses = x, list[torch.Tensor]()
        for layer in stage.layers:
            block, (rotation, visible) = self.layers[layer], inputs[layer]
            x_BSH = units.enter(f"layers.{layer}", x_BSH)
            if cache is None:
                x_BSH, balance = self._run_block(block, x_BSH, rotation, visible, counted_B)
                if balance is not None:
                    losses.append(balance)
            else:
                x_BSH, _ = block(x_BSH, rotation, None, None, cache, layer)
            x_BSH = units.leave(f"layers.{layer}", x_BSH)
            if layer in self.layer_outputs:
                self.layer_outputs[layer] = x_BSH
        if cache is not None:
            cache.advance(sequence)
        return x_BSH, losses

    def _embed(self, tokens_BS: torch.Tensor, site: str) -> torch.Tensor:
        """Return the scaled embeddings [B, S, H] of `tokens_BS` (with sequence parallelism this rank's token slice).
        `site`: label of the sum over tp in traces."""
        x_BSH = self.axes.tensor.leave(self.embedding(tokens_BS), site)
        return scale_embedding(x_BSH, self.config.embedding_factor)

    def _prepare_attention(
        self,
        layers: Iterable[int],
        tokens_BS: torch.Tensor,
        documents: Documents,
        cache: AttentionCache | None,
        positions_BS: torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, dict[int, tuple[Rotated, AttentionMask]]]:
        """Compute positions and attention masks for the attention of the given `layers`. Return the position IDs (None:
        consecutive) and {layer: (rotary cosine and sine, attention mask)}. Cosine and sine are None without rotary
        positions; the mask is None for plain causal attention or with a KV cache.

        `tokens_BS`: token IDs; `documents`: document boundaries; `cache`: KV cache of the preceding tokens;
        `positions_BS`: position IDs; None: consecutive within each document."""
        sequence, cached = tokens_BS.shape[1], 0 if cache is None else cache.length
        windows = {layer: self.config.layer_window(layer) for layer in layers}
        turns = {layer: self.config.layer_rotation(layer) or self.config.layer_temperature(layer) for layer in windows}
        visible: dict[int | None, AttentionMask] = {}
        if cache is None:
            context = self.axes.context
            assert context.size == 1 or documents.indices_C is not None, "context parallelism needs indices_C"
            capped, size = self.config.attention_softcap is not None, max(self.config.head_dim, self.config.value_dim)
            form = choose_mask_form(tokens_BS.device, self._dtype, size, capped, self.config.attention_sinks)
            for each in set(windows.values()):
                inside, window = documents, each
                if each is not None and self.config.window_chunks:
                    whole = len(tokens_BS), sequence * context.size
                    inside, window = documents.cut_into_chunks(each, *whole, tokens_BS.device), None
                visible[each] = context.make_attention_mask(inside, sequence, window, tokens_BS.device, form)
        # The host would wait for a GPU to read the largest position: only a caller's own ones are unknown.
        stop = cached + sequence if positions_BS is None else int(positions_BS.max()) + 1
        if positions_BS is None and (positions_BS := documents.positions_BS()) is not None:
            stop = sequence * self.axes.context.size
        rotations: dict[Rotation | Temperature | None, Rotated] = {None: None}
        for turn in turns.values():
            if turn is not None and turn not in rotations:
                table = self._rotary.setdefault(turn, make_table(turn, self._dtype, self.served_length))
                rotations[turn] = table.look_up(positions_BS, cached, stop, tokens_BS.device, documents)
        return positions_BS, {layer: (rotations[turns[layer]], visible.get(windows[layer])) for layer in windows}

    def _predict_token_after_next(
        self, normed_BSH: torch.Tensor, tokens_BS: torch.Tensor, targets_BS: torch.Tensor, documents: Documents | None,
        counted_B: torch.Tensor | None, keep: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Predict the token after the next one (multi-token prediction). Return (summed loss of these predictions,
        load-balancing loss of the prediction module).

        `normed_BSH`: output of the final norm; `tokens_BS`, `targets_BS`: token IDs and targets of the next token;
        `documents`: document boundaries; `counted_B`: number of target tokens of each sequence; `keep`: True to compute
        the loss's gradients in forward and save them; False: backward recomputes the logits.
        """
        assert self.prediction is not None and self.axes.context.size == 1, "refused with cp"
        next_BS, after_BS = shift_by_one(tokens_BS, targets_BS, documents)
        x_BSH = self.prediction.project(normed_BSH, self._embed(next_BS, "prediction.embedding"))
        number, documents = self.config.layers, ONE_DOCUMENT if documents is None else documents
        _, inputs = self._prepare_attention([number], tokens_BS, documents, None, None)
        x_BSH, balance = self._run_block(self.prediction.block, x_BSH, *inputs[number], counted_B)
        states_BSH = self.axes.tensor.enter(self.prediction.norm(x_BSH), "prediction.head")
        assert balance is not None, "the module has experts"
        return linear_cross_entropy(states_BSH.flatten(0, 1), after_BS.flatten(), self.output_head(), keep), balance

    def _normalise(self, x_BSH: torch.Tensor) -> torch.Tensor:
        """Return the final norm of `x_BSH` [B, S, H], the input of the output head. With sequence parallelism `x_BSH`
        is this rank's token slice, and the result has the tokens of all tp ranks."""
        x_BSH = self._norm(self.final_norm, x_BSH)
        if self.config.logit_divisor != 1:
            x_BSH = x_BSH / self.config.logit_divisor
        return x_BSH
