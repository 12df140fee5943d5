"""Reference transformer on one device: plain float64 tensor operations and autograd, no kernels shared with the engine.

It shares with the engine's model the configuration, the names of the model parameters and the table of rotary
frequencies; no module, kernel, chunk, tile, mask or autograd function.

Shapes: B sequences, S tokens of each, H hidden, N query heads, K key-value heads, D head size, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F

from meshwright.model.rope import compute_inverse_frequencies
from meshwright.spec.config import ModelConfig
from meshwright.training.preference_loss import Preference
from meshwright.verification.plain_preferences import compute_preference_loss, compute_single_response_loss
from meshwright.verification.samples import IGNORED, Batch
from meshwright.verification.teaching import ReferenceTeacher, compute_distillation_loss, compute_hidden_loss

Weights = Mapping[str, torch.Tensor]  # model parameter -> its values, [output, input] for matrices


class BatchLoss(NamedTuple):
    """Losses of a batch, summed over its loss terms (target tokens, preference pairs or single responses).

    Attributes:
        loss: Reported loss in nats.
        objective: Loss plus load-balancing loss, to be differentiated.
        terms: Number of loss terms, by which `loss` and `objective` are to be divided.
        excess_loads: {router-bias name: [E], each expert's number of tokens minus the mean}.
    """

    loss: torch.Tensor
    objective: torch.Tensor
    terms: int
    excess_loads: dict[str, torch.Tensor]


def run_batch(
    config: ModelConfig,
    weights: Weights,
    batch: Batch,
    preference: Preference | None = None,
    taught: ReferenceTeacher | None = None,
) -> BatchLoss:
    """Run the forward pass of a batch of full sequences and return its losses. config: the model. weights: float64
    tensors by the names of the training engine, which fuses query, key and value, and gate and up. preference: settings
    of the preference loss (DPO or IPO); None: next-token loss. taught: distillation; None: no teacher."""
    tokens_BS, targets_BS, ids_BS = (
        torch.from_numpy(part) for part in (batch.tokens, batch.targets, batch.document_ids)
    )
    model = _Forward(config, weights, ids_BS)
    x_BSH = model.hidden(tokens_BS)
    logits_BSV, head = model.logits(x_BSH)
    log_probabilities_BSV = F.log_softmax(logits_BSV, dim=-1)
    counted_BS = targets_BS != IGNORED
    chosen_BS = log_probabilities_BSV.gather(2, targets_BS.clamp(min=0)[..., None])[..., 0]
    chosen_BS = torch.where(counted_BS, chosen_BS, 0.0)
    if preference is None:
        counted_B = counted_BS.sum(dim=1)
        losses_BS = -chosen_BS
        if taught is not None:
            teacher = _Forward(taught.teaching.teacher, taught.weights, ids_BS)
            wanted_BSV, _ = teacher.logits(teacher.hidden(tokens_BS))
            losses_BS = compute_distillation_loss(taught.teaching.loss, logits_BSV, wanted_BSV, losses_BS)
            losses_BS = losses_BS + compute_hidden_loss(taught.teaching.loss, weights, model.outputs, teacher.outputs)
        loss = torch.where(counted_BS, losses_BS, 0.0).sum()
    elif preference.objective == "kto":
        counted_B = count_responses(batch)
        loss = compute_single_response_loss(preference, sum_by_response(chosen_BS, batch), counted_B, batch)
    else:
        pairs_B = (ids_BS.amax(dim=1) + 1) // 2
        counted_B = pairs_B
        loss = compute_preference_loss(preference, chosen_BS, ids_BS, pairs_B, batch)
    objective = loss
    if config.prediction_layers:
        assert preference is None
        objective = objective + config.prediction_loss * model.predict_later(x_BSH, tokens_BS, targets_BS, head)
    if config.router_loss:
        for losses_B in model.balance_losses:
            objective = objective + config.router_loss / config.expert_layers * (losses_B * counted_B).sum()
    return BatchLoss(loss.detach(), objective, int(counted_B.sum()), model.excess_loads)


def count_responses(batch: Batch) -> torch.Tensor:
    """Return the number of responses (documents with a target) in each of the B sequences of `batch`: int64 [B]."""
    return torch.tensor(
        [
            len({*ids[targets != IGNORED].tolist()})
            for ids, targets in zip(batch.document_ids, batch.targets, strict=True)
        ]
    )


def sum_by_response(chosen_BS: torch.Tensor, batch: Batch) -> list[list[torch.Tensor]]:
    """Sum the log-probabilities of the target tokens of each response in `batch`; return [B][responses], scalars in
    nats. chosen_BS: log-probability of each target token."""
    ids_BS = torch.from_numpy(batch.document_ids)
    return [
        [chosen_BS[row][ids_BS[row] == document].sum() for document in range(int(count))]
        for row, count in enumerate(count_responses(batch))
    ]


def score_responses(config: ModelConfig, weights: Weights, batch: Batch) -> list[list[float]]:
    """Return log p / p_ref in nats of each response of each sequence of a batch, [B][responses], without gradients: p
    is the model's probability of the response, p_ref the reference policy's. config: the model. weights: float64
    tensors by the training engine's names."""
    assert batch.reference is not None
    tokens_BS, targets_BS = torch.from_numpy(batch.tokens), torch.from_numpy(batch.targets)
    with torch.no_grad():
        x_BSH = _Forward(config, weights, torch.from_numpy(batch.document_ids)).hidden(tokens_BS)
        head = weights["embedding.weight"] if config.tied else weights["head.weight"]
        chosen_BS = F.log_softmax(x_BSH @ head.T, dim=-1).gather(2, targets_BS.clamp(min=0)[..., None])[..., 0]
        sums = sum_by_response(torch.where(targets_BS != IGNORED, chosen_BS, 0.0), batch)
    return [
        [float(total) - float(known) for total, known in zip(row, batch.reference[number], strict=False)]
        for number, row in enumerate(sums)
    ]


def apply_softcap(x: torch.Tensor, limit: float | None) -> torch.Tensor:
    """Apply a tanh softcap to scores or logits: limit tanh(x / limit); `x` itself if the limit is None."""
    return x if limit is None else limit * torch.tanh(x / limit)


class _Forward:
    """Forward pass of a reference transformer on one batch. Tensor names end with their dims: B batch, S sequence, H
    hidden size, N heads, D head size, E experts.

    config: the model. weights: float64 tensors by the training engine's names. ids_BS: document number of each token.

    Attributes:
        balance_losses: Load-balancing loss [B] of each mixture of experts.
        excess_loads: {router-bias name: [E], each expert's number of tokens minus the mean}.
        outputs: Output [B, S, H] of each layer."""

    def __init__(self, config: ModelConfig, weights: Weights, ids_BS: torch.Tensor) -> None:
        """Compute attention visibility and position ids from the document numbers."""
        self.config, self.weights = config, weights
        self.balance_losses: list[torch.Tensor] = []
        self.excess_loads: dict[str, torch.Tensor] = {}
        self.outputs: list[torch.Tensor] = []
        places_S = torch.arange(ids_BS.shape[1])
        same_BSS = ids_BS[:, :, None] == ids_BS[:, None, :]
        self.distance_SS = places_S[:, None] - places_S[None, :]
        self.visible_BSS = same_BSS & (self.distance_SS >= 0)
        self.lengths_BS = same_BSS.sum(dim=2)  # tokens of the document of each
        self.positions_BS = (self.visible_BSS.sum(dim=2) - 1).long()  # tokens of the same document before each

    def hidden(self, tokens_BS: torch.Tensor) -> torch.Tensor:
        """Return the final hidden states [B, S, H] of the tokens `tokens_BS`."""
        config = self.config
        factor = config.hidden**0.5 if config.embedding_scale is None else config.embedding_scale
        x_BSH = factor * self.weights["embedding.weight"][tokens_BS]
        if self.config.positions == "learned":
            x_BSH = x_BSH + self.weights["positions.weight"][self.positions_BS]
        for layer in range(self.config.layers):
            name = f"layers.{layer}"
            before, after = (
                self.norm if wanted else lambda x, _: x for wanted in (config.pre_norms, config.post_norms)
            )
            y_BSH = self.attention(before(x_BSH, f"{name}.attention_norm"), layer)
            x_BSH = x_BSH + config.residual_scale * after(y_BSH, f"{name}.attention_post_norm")
            mlp = self.mixture if config.has_experts(layer) else self.feed_forward
            y_BSH = mlp(before(x_BSH, f"{name}.mlp_norm"), f"{name}.mlp")
            x_BSH = x_BSH + config.residual_scale * after(y_BSH, f"{name}.mlp_post_norm")
            self.outputs.append(x_BSH)
        return self.norm(x_BSH, "final_norm")

    def logits(self, x_BSH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (next-token logits [B, S, V], weight of the output head [V, H]) for the final hidden states
        `x_BSH`."""
        config = self.config
        head = self.weights["embedding.weight" if config.tied else "head.weight"]
        return apply_softcap(x_BSH @ head.T / config.logit_divisor, config.logit_softcap), head

    def predict_later(
        self, x_BSH: torch.Tensor, tokens_BS: torch.Tensor, targets_BS: torch.Tensor, head: torch.Tensor
    ) -> torch.Tensor:
        """Return the summed loss of the multi-token prediction module (arXiv:2412.19437, eqs. 21 to 24), which predicts
        the token after the next. x_BSH: final hidden states; head: weight of the output head, [V, H]. tokens_BS: tokens
        of the batch. targets_BS: target tokens, -100 where ignored."""
        name, length = "prediction", tokens_BS.shape[1]
        embedded = self.weights["embedding.weight"][tokens_BS[:, [*range(1, length), 0]]]
        parts = self.norm(embedded, f"{name}.embedding_norm"), self.norm(x_BSH, f"{name}.hidden_norm")
        y_BSH = self.linear(torch.cat(parts, dim=-1), f"{name}.projection")
        y_BSH = y_BSH + self.attention(self.norm(y_BSH, f"{name}.block.attention_norm"), self.config.layers)
        y_BSH = y_BSH + self.mixture(self.norm(y_BSH, f"{name}.block.mlp_norm"), f"{name}.block.mlp")
        log_probabilities_BSV = F.log_softmax(self.norm(y_BSH, f"{name}.norm") @ head.T, dim=-1)
        after_BS = targets_BS[:, 1:]
        same_BS = torch.stack([self.visible_BSS[:, place + 1, place] for place in range(length - 1)], dim=1)
        chosen_BS = log_probabilities_BSV[:, :-1].gather(2, after_BS.clamp(min=0)[..., None])[..., 0]
        return -torch.where((after_BS != IGNORED) & same_BS, chosen_BS, 0.0).sum()

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """Apply the norm called `name`, an RMSNorm or LayerNorm as the model has, over the last dim of `x`."""
        weight, epsilon = self.weights[f"{name}.weight"], self.config.norm_epsilon
        if self.config.zero_centred_norms:
            weight = 1 + weight
        if self.config.norm == "rmsnorm":
            return x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt() * weight
        centred = x - x.mean(-1, keepdim=True)
        normed = centred / (centred.square().mean(-1, keepdim=True) + epsilon).sqrt() * weight
        return normed + self.weights[f"{name}.bias"] if self.config.norm_bias else normed

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """Apply the linear layer called `name`: x W^T, plus b if it has a bias."""
        y = x @ self.weights[f"{name}.weight"].T
        bias = self.weights.get(f"{name}.bias")
        return y if bias is None else y + bias

    def attention(self, x_BSH: torch.Tensor, layer: int) -> torch.Tensor:
        """Return the attention output [B, S, H] of the layer with index `layer` for the input `x_BSH`: causal attention
        within documents, over a sliding window if the layer has one."""
        config, name = self.config, f"layers.{layer}.attention"
        if config.latent:
            return self.latent_attention(x_BSH, layer)
        heads, kv_heads, size = config.heads, config.kv_heads, config.head_dim
        sizes = [heads * size, kv_heads * size, kv_heads * size]
        q, k, v = self.linear(x_BSH, f"{name}.qkv").split(sizes, dim=-1)
        if config.projection_norm:
            q, k = self.norm(q, f"{name}.query_norm"), self.norm(k, f"{name}.key_norm")
        q, k, v = (part.unflatten(-1, (-1, size)) for part in (q, k, v))
        if config.query_key_norm and not config.projection_norm:
            q, k = self.norm(q, f"{name}.query_norm"), self.norm(k, f"{name}.key_norm")
        if config.positions == "rope" and layer not in config.unrotated_layers:
            q, k = self.rotate(q, layer), self.rotate(k, layer)
            if config.rotated_norm:
                q, k = (x / (x.square().mean(-1, keepdim=True) + config.norm_epsilon).sqrt() for x in (q, k))
        elif config.temperature_tuning:
            steps_BS = torch.floor((self.positions_BS.double() + 1) / config.temperature_floor)
            q = q * (1 + config.temperature_scale * torch.log(1 + steps_BS))[..., None, None]
        k, v = (x.repeat_interleave(heads // kv_heads, dim=2) for x in (k, v))
        scale = size**-0.5 if config.attention_scale is None else config.attention_scale
        scores_BNSS = apply_softcap(scale * torch.einsum("bqnd,bknd->bnqk", q, k), config.attention_softcap)
        visible_BSS, window = self.visible_BSS, config.layer_window(layer)
        if window is not None and config.window_chunks:
            chunk_BS = self.positions_BS // window
            visible_BSS = visible_BSS & (chunk_BS[:, :, None] == chunk_BS[:, None, :])
        elif window is not None:
            visible_BSS = visible_BSS & (self.distance_SS < window)
        scores_BNSS = scores_BNSS.masked_fill(~visible_BSS[:, None], float("-inf"))
        if config.attention_sinks:  # one more key, whose value is zero
            sinks_BNS1 = self.weights[f"{name}.sinks"][:, None, None].expand(*scores_BNSS.shape[:3], 1)
            p_BNSS = torch.cat([scores_BNSS, sinks_BNS1], dim=-1).softmax(dim=-1)[..., :-1]
        else:
            p_BNSS = scores_BNSS.softmax(dim=-1)
        return self.linear(torch.einsum("bnqk,bknd->bqnd", p_BNSS, v).flatten(2), f"{name}.output")

    def latent_attention(self, x_BSH: torch.Tensor, layer: int) -> torch.Tensor:
        """Return the output [B, S, H] of the multi-head latent attention of the layer with index `layer` for the input
        `x_BSH`. Source: arXiv:2405.04434, eqs. 9 to 19; without a latent vector of queries, section 3.1."""
        config, latent = self.config, self.config.latent
        name = f"layers.{layer}.attention" if layer < config.layers else "prediction.block.attention"
        assert latent is not None
        plain = config.head_dim - latent.rotary_dim
        projected = self.linear(x_BSH, f"{name}.qkv")
        q, c_BSR, k_BSE = projected.tensor_split([-latent.cached_dim, -latent.rotary_dim], dim=-1)
        if latent.query_rank is not None:
            q = self.linear(self.scale_to_unit(q) * self.weights[f"{name}.query_norm.weight"], f"{name}.query_up")
        q_BSND = q.unflatten(-1, (config.heads, -1))
        c_BSR = self.scale_to_unit(c_BSR) * self.weights[f"{name}.latent_norm.weight"]
        up_BSNO = self.linear(c_BSR, f"{name}.latent_up").unflatten(-1, (config.heads, -1))
        q_BSNE, k_BS1E = self.rotate(q_BSND[..., plain:], layer), self.rotate(k_BSE[:, :, None], layer)
        scores_BNSS = torch.einsum("bqnp,bknp->bnqk", q_BSND[..., :plain], up_BSNO[..., :plain])
        scores_BNSS = scores_BNSS + torch.einsum("bqne,bke->bnqk", q_BSNE, k_BS1E[:, :, 0])
        scale, scaling = config.head_dim**-0.5, config.rope_scaling
        if scaling is not None and scaling.mscale_all_dim:
            scale *= (1 + 0.1 * scaling.mscale_all_dim * math.log(scaling.factor)) ** 2
        scores_BNSS = scale * scores_BNSS
        p_BNSS = scores_BNSS.masked_fill(~self.visible_BSS[:, None], float("-inf")).softmax(dim=-1)
        return self.linear(torch.einsum("bnqk,bknv->bqnv", p_BNSS, up_BSNO[..., plain:]).flatten(2), f"{name}.output")

    def scale_to_unit(self, x: torch.Tensor, epsilon: float = 1e-6) -> torch.Tensor:
        """Apply RMSNorm without weights: divide `x` by its root mean square over the last dim. epsilon: added to the
        mean square."""
        return x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt()

    def rotate(self, x_BSND: torch.Tensor, layer: int) -> torch.Tensor:
        """Apply RoPE to the queries or keys `x_BSND` of the layer with index `layer`. Of the R rotated features,
        feature f is paired with feature f + R / 2 or, in interleaved models, with its neighbour. Each pair is rotated
        by an angle: as a complex number, it is multiplied by e^(i angle)."""
        rotation = self.config.layer_rotation(layer)
        assert rotation is not None
        frequencies = compute_inverse_frequencies(rotation, torch.float64)
        if rotation.scaling is not None and rotation.scaling.kind == "longrope":  # each document by its own length
            long = compute_inverse_frequencies(rotation, torch.float64, 1 << 62)
            trained = rotation.scaling.original_max_positions or 0
            frequencies = torch.where(self.lengths_BS[..., None, None] > trained, long, frequencies)
        scale = rotation.scaling.attention_scale if rotation.scaling else 1.0
        angles = self.positions_BS[..., None, None] * frequencies
        turned, kept = x_BSND[..., : 2 * rotation.pairs], x_BSND[..., 2 * rotation.pairs :]
        interleaved = self.config.rotary_interleaved
        first, second = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, dim=-1)
        product = torch.complex(first, second) * torch.polar(torch.full_like(angles, scale), angles)
        parts = torch.view_as_real(product)
        pairs = parts.flatten(-2) if interleaved else torch.cat([parts[..., 0], parts[..., 1]], dim=-1)
        return torch.cat([pairs, kept], dim=-1)

    def activate(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the model's activation function elementwise to `x`."""
        match self.config.activation:
            case "silu":
                return x * torch.sigmoid(x)
            case "relu":
                return x.clamp(min=0)
            case "gelu_tanh":
                return 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))
            case _:
                return 0.5 * x * (1 + torch.erf(x / 2**0.5))

    def feed_forward(self, x_BSH: torch.Tensor, name: str) -> torch.Tensor:
        """Apply the MLP called `name`, gated or not, to `x_BSH`; return a tensor of the same shape."""
        up = self.linear(x_BSH, f"{name}.up")
        if not self.config.gated:
            return self.linear(self.activate(up), f"{name}.down")
        gate, up = up.chunk(2, dim=-1)
        return self.linear(self.activate(gate) * up, f"{name}.down")

    def mixture(self, x_BSH: torch.Tensor, name: str) -> torch.Tensor:
        """Apply the mixture of experts called `name` to `x_BSH`; return a tensor of the same shape. Every expert
        computes every token; the results of experts that the router did not choose have weight 0."""
        config = self.config
        logits_BSE = x_BSH @ self.weights[f"{name}.router.weight"].T
        if config.mlp_bias:
            logits_BSE = logits_BSE + self.weights[f"{name}.router.bias"]
        scores_BSE = logits_BSE.sigmoid() if config.router == "sigmoid" else logits_BSE.softmax(dim=-1)
        ranking_BSE = (logits_BSE if config.routed_input else scores_BSE).detach()
        if config.router_bias:
            ranking_BSE = ranking_BSE + self.weights[f"{name}.router.bias"].detach()
        if config.expert_groups > 1:
            ranking_BSE = self.keep_groups(ranking_BSE)
        chosen_BSE = torch.zeros_like(ranking_BSE)
        chosen_BSE.scatter_(2, ranking_BSE.topk(config.experts_per_token, dim=-1).indices, 1.0)
        weights_BSE = scores_BSE * chosen_BSE
        if config.normalise_choice:
            weights_BSE = weights_BSE / weights_BSE.sum(dim=-1, keepdim=True)
        weights_BSE = weights_BSE * config.routed_scale
        y_BSH = torch.zeros_like(x_BSH)
        for expert in range(config.experts):
            weight_BS1 = weights_BSE[..., expert, None]
            input_BSH = weight_BS1 * x_BSH if config.routed_input else x_BSH
            both = self.expert_product(input_BSH, f"{name}.experts.up", expert)
            gate, up = (both[..., ::2], both[..., 1::2]) if config.experts_interleaved else both.chunk(2, dim=-1)
            if config.swiglu_limit is not None:
                gate, up = gate.clamp(max=config.swiglu_limit), up.clamp(-config.swiglu_limit, config.swiglu_limit)
                inner_BSF = gate / (1 + torch.exp(-config.swiglu_alpha * gate)) * (up + 1)
            else:
                inner_BSF = self.activate(gate) * up
            result_BSH = self.expert_product(inner_BSF, f"{name}.experts.down", expert)
            y_BSH = y_BSH + (result_BSH if config.routed_input else weight_BS1 * result_BSH)
        load_BE = chosen_BSE.sum(dim=1)
        # Fedus et al. 2021, arXiv:2101.03961, eq. 4, per sequence.
        self.balance_losses.append(config.experts * (load_BE / x_BSH.shape[1] * scores_BSE.mean(dim=1)).sum(dim=1))
        if config.router_bias:
            load_E = load_BE.sum(dim=0)
            self.excess_loads[f"{name}.router.bias"] = load_E - load_E.mean()
        if config.shared_intermediate:
            shared_BSH = self.feed_forward(x_BSH, f"{name}.shared")
            if config.shared_gate:
                shared_BSH = torch.sigmoid(x_BSH @ self.weights[f"{name}.shared_gate.weight"].T) * shared_BSH
            y_BSH = y_BSH + shared_BSH
        return y_BSH

    def expert_product(self, x: torch.Tensor, name: str, expert: int) -> torch.Tensor:
        """Apply the linear layer `name` of the expert with index `expert` to `x`. Weights and biases of all experts are
        stacked along dim 0."""
        y = x @ self.weights[f"{name}.weight"].chunk(self.config.experts)[expert].T
        bias = self.weights.get(f"{name}.bias")
        return y if bias is None else y + bias.chunk(self.config.experts)[expert]

    def keep_groups(self, ranking_BSE: torch.Tensor) -> torch.Tensor:
        """Apply group-limited routing: return the router scores `ranking_BSE` with -inf for experts outside the
        `groups_per_token` best groups of each token (arXiv:2412.19437, section 2.1.2)."""
        config = self.config
        groups_BSGE = ranking_BSE.unflatten(-1, (config.expert_groups, -1)).sort(dim=-1, descending=True).values
        score_BSG = groups_BSGE[..., : 2 if config.router == "sigmoid" else 1].sum(dim=-1)
        least_BS1 = score_BSG.sort(dim=-1, descending=True).values[..., config.groups_per_token - 1, None]
        hidden_BSE = (score_BSG < least_BS1).repeat_interleave(config.experts // config.expert_groups, dim=-1)
        return ranking_BSE.masked_fill(hidden_BSE, float("-inf"))
