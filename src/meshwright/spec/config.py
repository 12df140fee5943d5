"""The architecture of a model as data: one frozen, validated dataclass.

`config_json` converts it from and to a Hugging Face configuration, `config_from_recipe` builds it from a recipe."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from meshwright.errors import UserError
from meshwright.limits import LIMITS, make_limit_error
from meshwright.names import unknown
from meshwright.spec.adapter_config import AdapterConfig
from meshwright.spec.config_problems import find_experts_problem, find_number_problem, find_rotation_problem
from meshwright.spec.families import FAMILIES, OPTIONS, Experts
from meshwright.spec.latent_attention import LatentAttention
from meshwright.spec.rope_scaling import RopeScaling, Rotation, Temperature

Norm = Literal["rmsnorm", "layernorm"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"]
Positions = Literal["rope", "learned", "alibi"]
Router = Literal["softmax", "sigmoid"]
Head = Literal["next", "masked", "classes", "none"]
_WHOLE_HEADS = ("llama", "gemma2", "gemma3_text")  # transformers refuses a remainder in these families only
_SIZES = ("vocabulary", "hidden", "layers", "heads", "kv_heads", "head_dim", "intermediate", "max_positions")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Architecture of a transformer: a decoder, or an encoder (bidirectional attention, post-norm layers) if its family
    is one. Sizes are in elements, layer indices count from 0. The constructor raises ``UserError`` if fields contradict
    each other or the family.

    Attributes:
        family: Model family, the ``model_type`` of ``config.json``, such as "llama".
        vocabulary, hidden, layers: Number of token ids, hidden size, and number of layers.
        heads, kv_heads: Number of query heads; number of key-value heads, each shared by heads / kv_heads query heads.
        head_dim: Size of a head. With ``latent``, size of a head's query, its features with position included.
        intermediate: Width of a dense MLP.
        max_positions: Longest sequence in tokens.
        norm, norm_epsilon: Kind of the norms, and number added to the variance or mean square.
        activation, gated: Activation function of the MLP, which computes activation(gate) * up if ``gated`` (SwiGLU).
        positions: Position encoding: "rope", "learned" or "alibi".
        rope_theta, rope_scaling: Base and scaling method of rotary positions.
        sliding_window: Number of tokens that a token attends to, itself included, in windowed layers; None: no limit.
        windowed_layers: For each layer, True if it has the sliding window; None: all have it.
        rotary_fraction, rotary_interleaved: Fraction of a head's features that is rotated, from the first on; True to
            rotate pairs of neighbouring features, False to rotate pairs that are half of the rotated features apart.
        window_rope_theta: Rotary base of windowed layers, without scaling; None: ``rope_theta``.
        unrotated_layers: Indices of the layers without positions.
        attention_scale: Factor on attention scores; None: 1 / sqrt(head_dim).
        attention_softcap, logit_softcap: Cap c that turns attention scores, or logits, x into c tanh(x / c).
        attention_sinks: Each query head has a learned score that is one more term of the softmax's denominator.
        swiglu_limit, swiglu_alpha: A gated MLP computes gate * sigmoid(``swiglu_alpha`` * gate) * (up + 1) (gpt-oss);
            gate is capped at ``swiglu_limit``, up is clamped to [-limit, limit]. ``swiglu_limit`` None: the MLP is as
            ``gated`` says.
        window_chunks: A token attends to tokens of its chunk of ``sliding_window`` positions, cut from the document's
            start.
        rotated_norm: Rotated queries and keys are divided by their root mean square.
        temperature_tuning, temperature_scale, temperature_floor: If the first is True, queries of layers without rotary
            positions are multiplied by 1 + scale * log(1 + floor((position + 1) / floor)).
        routed_input: An expert's weight multiplies its input instead of its output (Llama 4).
        embedding_scale, residual_scale: Factors on embeddings (None: sqrt(hidden)) and on the output of each sublayer.
        logit_divisor: Number by which logits are divided.
        qkv_bias, output_bias: Biases of the projections to queries, keys and values, and of attention's output
            projection.
        mlp_bias, norm_bias: Biases of the linear layers of MLPs, experts and their router included, and of norms.
        query_key_norm: A norm on the queries and keys of each head.
        projection_norm: The norm on queries spans all heads together, and so does that on keys.
        pre_norms, post_norms: Norms on the input of each sublayer; norms on its output.
        zero_centred_norms: Norms multiply by 1 + weight.
        embedding_norm: Norm on the embeddings. Decoders with it (BLOOM) can be planned but not run.
        tied: The output head shares the embedding matrix.
        bos_token, eos_token, more_eos_tokens, pad_token: Ids of special tokens: beginning and end of a sequence,
            further end-of-sequence tokens, padding; None: the model has no such token.
        initializer_range, mup_base_hidden: Standard deviation of initial weights; hidden size at which it holds under
            µP (None: no µP).
        experts, experts_per_token, expert_intermediate: Number of experts in a layer (0: dense MLPs); number of experts
            that a token uses; width of an expert.
        shared_intermediate, shared_gate: Width of the shared expert (0: none); True if it has a sigmoid gate.
        dense_layers: Indices of the layers with a dense MLP instead of experts.
        router: Scores are a "softmax" over the experts, or a "sigmoid" of each.
        router_bias, router_loss: Load balancing by a bias on the scores, or by a loss with this coefficient (0: none).
        normalise_choice, routed_scale: True if the weights of a token's experts are normalised to sum 1; factor on all
            these weights.
        expert_groups, groups_per_token: The experts form groups of equal size, and a token's experts are in at most
            ``groups_per_token`` of them (DeepSeek-V2, arXiv:2405.04434, section 2.2.2).
        latent: Sizes of multi-head latent attention; None: grouped-query attention.
        prediction_layers, prediction_loss: 1 to train a module of multi-token prediction (DeepSeek-V3,
            arXiv:2412.19437, section 2.2), 0 for none; factor on its loss.
        token_types, head, labels: Only for encoders: number of segment types; output head: "masked" (masked language
            model), "classes" (sequence classification) or "none"; names of the classes. The head of a decoder is "next"
            (next token).
        adapter: LoRA adapter, with which the model's own parameters are frozen. Not in ``config.json``.
        projections: (layer, teacher's hidden size) of each layer that distillation compares. Not in ``config.json``.
    """

    family: str
    vocabulary: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    max_positions: int
    norm: Norm
    norm_epsilon: float
    activation: Activation
    gated: bool
    positions: Positions
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    sliding_window: int | None = None
    windowed_layers: tuple[bool, ...] | None = None
    rotary_fraction: float = 1.0
    rotary_interleaved: bool = False
    window_rope_theta: float | None = None
    unrotated_layers: tuple[int, ...] = ()
    attention_scale: float | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    attention_sinks: bool = False
    swiglu_limit: float | None = None
    swiglu_alpha: float = 1.0
    window_chunks: bool = False
    rotated_norm: bool = False
    temperature_tuning: bool = False
    temperature_scale: float = 0.0
    temperature_floor: int = 1
    routed_input: bool = False
    embedding_scale: float | None = 1.0
    residual_scale: float = 1.0
    logit_divisor: float = 1.0
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    norm_bias: bool = False
    query_key_norm: bool = False
    projection_norm: bool = False
    pre_norms: bool = True
    post_norms: bool = False
    zero_centred_norms: bool = False
    embedding_norm: bool = False
    tied: bool = False
    bos_token: int | None = None
    eos_token: int | None = None
    more_eos_tokens: tuple[int, ...] = ()  # some models end a turn and a text with different tokens
    initializer_range: float = 0.02
    experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int = 0
    shared_intermediate: int = 0
    shared_gate: bool = False
    dense_layers: tuple[int, ...] = ()
    router: Router = "softmax"
    router_bias: bool = False
    router_loss: float = 0.0
    normalise_choice: bool = False
    routed_scale: float = 1.0
    expert_groups: int = 1
    groups_per_token: int = 1
    latent: LatentAttention | None = None
    prediction_layers: int = 0
    prediction_loss: float = 0.3
    token_types: int = 0
    head: Head = "next"
    labels: tuple[str, ...] = ()
    pad_token: int | None = None
    adapter: AdapterConfig | None = None
    mup_base_hidden: int | None = None  # see spec.width_scaling
    projections: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        """Raise ``UserError`` if the fields contradict each other or the family."""
        problem = self._find_problem()
        if problem:
            raise UserError(f"model: {problem}")

    def _find_problem(self) -> str | None:
        """Return an error message for the first invalid or contradictory field; None if all fields are valid."""
        if self.family not in FAMILIES:
            return unknown("family", self.family, FAMILIES)
        for name in _SIZES:
            if getattr(self, name) < 1:
                return f"{name} must be at least 1, not {getattr(self, name)}"
        if problem := find_number_problem(self):
            return problem
        family = FAMILIES[self.family]
        of_encoder = family.find_encoder_problem(self.head, self.token_types, self.labels)
        if problem := self._find_size_problem() or find_experts_problem(self) or of_encoder:
            return problem
        if self.heads % self.kv_heads:
            return f"heads {self.heads} must be a multiple of kv_heads {self.kv_heads}"
        if self.hidden % self.heads and self.family in _WHOLE_HEADS:
            return f"hidden {self.hidden} must be a multiple of heads {self.heads} in family {self.family}"
        if FAMILIES[self.family].latent != (self.latent is not None):
            return f"family {self.family} {'has' if FAMILIES[self.family].latent else 'has no'} latent attention"
        if self.latent and (problem := self.latent.find_problem(self.head_dim, self.heads, self.kv_heads)):
            return problem
        predicts = self.prediction_layers in (0, int(self.family == "deepseek_v3"))
        if not predicts or not 0 <= self.prediction_loss < math.inf:
            return "prediction_layers is 0, or 1 in family deepseek_v3, and prediction_loss at least 0"
        if problem := find_rotation_problem(self):
            return problem
        for name, value in self._fixed_values().items():
            if getattr(self, name) != value:
                return f"{name} is always {value!r} in family {self.family}, not {getattr(self, name)!r}"
        if self.activation == "relu2" and self.family != "nemotron":
            return f"activation relu2 belongs to family nemotron, not to {self.family}"
        alike = self.kv_heads == self.heads and self.head_dim * self.heads == self.hidden
        if not self.gated and not alike and self.family != "nemotron":
            return (
                f"family {self.family} has kv_heads = heads and head_dim = hidden / heads, "
                f"not kv_heads {self.kv_heads} and head_dim {self.head_dim}"
            )
        if FAMILIES[self.family].attention_bias and self.qkv_bias != self.output_bias:
            return f"family {self.family} has both attention biases or none"
        if self.sliding_window is not None and self.sliding_window < 1:
            return f"sliding_window must be at least 1, not {self.sliding_window}"
        if self.windowed_layers is not None and (
            self.sliding_window is None or len(self.windowed_layers) != self.layers
        ):
            return f"windowed_layers needs a sliding_window and one entry for each of {self.layers} layers"
        return None

    def _fixed_values(self) -> dict[str, object]:
        """Return {field: its only allowed value in this family}: values that the family prescribes, and the default of
        each option that the family does not offer. Rotary fields are checked by `find_rotation_problem` instead.
        """
        family = FAMILIES[self.family]
        kept = {*family.settings, *(("rotary_fraction",) if family.partial_rotation else ())}
        kept |= {"unrotated_layers"} if family.windows is not None and family.windows.unrotated else set()
        defaults = {each.name: each.default for each in dataclasses.fields(self) if each.name in OPTIONS}
        return {name: value for name, value in defaults.items() if name not in kept} | dict(family.fixed)

    def _find_size_problem(self) -> str | None:
        """Return an error message for the first size, such as ``layers``, that exceeds its limit in
        `meshwright.limits`; None if all sizes are within their limits."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name in LIMITS}
        values |= {"labels": len(self.labels), "all_experts": self.layers * self.experts}
        return next(filter(None, (make_limit_error(name, value) for name, value in values.items())), None)

    def has_experts(self, layer: int) -> bool:
        """Return True if the MLP of the layer with index `layer` is a mixture of experts."""
        return self.experts > 0 and layer not in self.dense_layers

    @property
    def experts_keys(self) -> Experts | None:
        """The `config.json` keys by which files of this family describe a mixture of experts; None: the family has
        none."""
        return FAMILIES[self.family].experts

    @property
    def experts_interleaved(self) -> bool:
        """True if outputs of the experts' gate and up projections alternate (gate 0, up 0, gate 1, ...) in their common
        matrix, on disk and in memory."""
        return self.experts_keys is not None and self.experts_keys.interleaved

    @property
    def expert_layers(self) -> int:
        """The number of mixture-of-experts layers."""
        return sum(self.has_experts(layer) for layer in range(self.layers)) if self.experts else 0

    @property
    def encoder(self) -> bool:
        """True for an encoder: bidirectional attention and post-norm layers."""
        return FAMILIES[self.family].encoder

    @property
    def tied_head(self) -> bool:
        """True if the output head shares the embedding matrix; always False for heads without a projection to the
        vocabulary."""
        return self.tied and self.head in ("next", "masked")

    @property
    def pooled(self) -> bool:
        """True if the model has a pooler (a dense layer with tanh on the first token, as in BERT), which turns a
        sequence into one vector."""
        return self.encoder and self.head != "masked"

    @property
    def value_dim(self) -> int:
        """Size of a head's values."""
        return self.head_dim if self.latent is None else self.latent.value_dim

    @property
    def planning_only(self) -> str | None:
        """The reason why Meshwright can only plan this model (predict memory and step time) and not run it; None if it
        can run it."""
        return FAMILIES[self.family].planning_only

    @property
    def eos_tokens(self) -> tuple[int, ...]:
        """All end-of-sequence token ids."""
        return (() if self.eos_token is None else (self.eos_token,)) + self.more_eos_tokens

    @property
    def score_scale(self) -> float:
        """Factor by which attention scores are multiplied before the softmax."""
        if self.latent is not None and self.rope_scaling is not None:
            return float(self.head_dim**-0.5) * self.rope_scaling.latent_score_scale
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    @property
    def embedding_factor(self) -> float:
        """Factor by which token embeddings are multiplied."""
        return self.hidden**0.5 if self.embedding_scale is None else self.embedding_scale

    @property
    def layer_norms(self) -> int:
        """Number of norms over the hidden dimension in a layer."""
        return 2 * (self.pre_norms + self.post_norms)

    @property
    def rotary_dim(self) -> int:
        """Number of features of a head that rotary positions rotate, rounded up to whole pairs."""
        return self._rotation_size + self._rotation_size % 2

    @property
    def _rotation_size(self) -> int:
        """Number of rotated features of a head from which the wavelengths follow."""
        return int(self.head_dim * self.rotary_fraction) if self.latent is None else self.latent.rotary_dim

    def layer_rotation(self, layer: int) -> Rotation | None:
        """Return the rotary positions of the layer with index `layer`; None if it has none."""
        if self.positions != "rope" or layer in self.unrotated_layers:
            return None
        if self.window_rope_theta is not None and self.layer_window(layer) is not None:
            return Rotation(self._rotation_size, self.window_rope_theta)
        return Rotation(self._rotation_size, self.rope_theta, self.rope_scaling)

    def layer_temperature(self, layer: int) -> Temperature | None:
        """Return the position-dependent factor on the queries of the layer with index `layer`; None if the queries have
        no such factor."""
        if not self.temperature_tuning or layer not in self.unrotated_layers:
            return None
        return Temperature(self.temperature_scale, self.temperature_floor)

    def layer_positions(self, layer: int) -> Rotation | Temperature | None:
        """Return the settings of the position-dependent factors on the queries and keys of the layer with index
        `layer`: its rotary positions or, without them, the temperature of its queries; None if it has neither."""
        return self.layer_rotation(layer) or self.layer_temperature(layer)

    def layer_rotated_norm(self, layer: int) -> tuple[float, float] | None:
        """Return (weight, epsilon) of an RMSNorm before the rotation that is equal to the norm of the rotated queries
        and keys of the layer; None if it has none. A rotation keeps the mean square, but for its attention scale."""
        if not self.rotated_norm or (rotation := self.layer_rotation(layer)) is None:
            return None
        return 1 / rotation.attention_scale, self.norm_epsilon / rotation.attention_scale**2

    def rotations(self, layers: Iterable[int]) -> tuple[Rotation, ...]:
        """Return the distinct rotary settings (size, base, scaling) of the `layers` (indices), in order of
        first use.
        """
        found = dict.fromkeys(self.layer_rotation(layer) for layer in layers)
        return tuple(rotation for rotation in found if rotation is not None)

    @property
    def plain_residual(self) -> bool:
        """True if sublayer outputs are added to the residual stream without a factor."""
        return not self.post_norms and self.residual_scale == 1

    def layer_window(self, layer: int) -> int | None:
        """Return the sliding window, in tokens with the token itself included, of the layer with index `layer`; None:
        full attention."""
        if self.windowed_layers is not None and not self.windowed_layers[layer]:
            return None
        return self.sliding_window

    def first_key(self, layer: int, position: int) -> int:
        """Return the first position that the token at `position` attends to in the layer with index `layer`, under its
        sliding window or chunk; 0 if the layer has neither.
        """
        window = self.layer_window(layer)
        if window is None:
            return 0
        return position // window * window if self.window_chunks else max(0, position + 1 - window)
