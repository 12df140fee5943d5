"""Records that describe a model family and how its ``config.json`` holds a configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Setting:
    """A ``config.json`` key that holds one optional ModelConfig field.

    Attributes:
        key: Name of the key.
        kind: Type of the key's value. "flag": a boolean; "switch": a boolean or a number, of which 0 is false;
            "factor": a number above 0; "count": a whole number above 0; "limit": a number above 0, or null for none;
            "inverse_square": a number x above 0; the field is x ** -0.5; "nested": a value inside ``rope_parameters``,
            which `read_rope` reads; `key` then only selects its default in ``Family.defaults``.
    """

    key: str
    kind: Literal["flag", "factor", "limit", "inverse_square", "nested", "switch", "count"] = "factor"


@dataclass(frozen=True, slots=True)
class Windows:
    """Rule by which the ``config.json`` of a family says which layers have a sliding window.

    Attributes:
        layers: Layers with a window if the key ``layer_types`` is missing or not read: "all"; "late": from
            ``max_window_layers`` on; "early": every other layer before ``max_window_layers``; "periodic": all layers
            but every ``period``-th; "unrotated": layers without rotary positions, by default every ``period``-th;
            "rotated": layers with rotary positions.
        period, period_key: Period of the pattern of layers, and the key that overrides it.
        switch: True if layers have a window only where ``use_sliding_window`` is true.
        listed: True if ``layer_types``, when present, lists the layers with a window. False if the family does not read
            that key, as in transformers.
        chunked: True if windows are chunks: the key ``attention_chunk_size`` has their size, and ``layer_types`` calls
            them ``chunked_attention``."""

    layers: Literal["all", "late", "early", "periodic", "unrotated", "rotated"]
    period: int = 1
    period_key: str | None = None
    switch: bool = False
    listed: bool = True
    chunked: bool = False

    @property
    def key(self) -> str:
        """``config.json`` key of the window's size in tokens."""
        return "attention_chunk_size" if self.chunked else "sliding_window"

    @property
    def layer_type(self) -> str:
        """Name by which the ``config.json`` list ``layer_types`` marks layers with a window."""
        return "chunked_attention" if self.chunked else "sliding_attention"

    @property
    def unrotated(self) -> bool:
        """True if some layers have no rotary positions."""
        return self.layers in ("unrotated", "rotated")


@dataclass(frozen=True, slots=True)
class Experts:
    """Format in which the ``config.json`` and the tensor files of a family describe mixtures of experts.

    Attributes:
        count: Keys of the number of experts (in transformers 4, then 5).
        width: Key of an expert's MLP width; None: it equals the width of the dense MLPs.
        normalised: Key of ``ModelConfig.normalise_choice``; None: the family fixes it.
        loss: Key of the coefficient of the load-balancing loss; None: there is none.
        loss_switched: True: there is a loss only where ``output_router_logits`` is true, as in transformers.
        scale: Key of ``ModelConfig.routed_scale``; None: it is 1.
        shared: Key of the shared expert's width. If ``shared_copies``, the key holds that width divided by the width of
            an expert. "": the shared expert is as wide as a routed expert, and there is no key. None: there is no
            shared expert.
        dense: Layers with a dense MLP. "first": as many of the first layers as ``first_k_dense_replace`` says;
            "listed": the layers given by ``mlp_only_layers`` and ``decoder_sparse_step``; "interleaved": the layers not
            in ``moe_layers``, by default all but every ``interleave_moe_layer_step``-th; None: no layer.
        groups: Condition under which the experts form ``n_group`` groups for routing: "always"; "method": if
            ``topk_method`` says so; None: never.
        stacked: True: one tensor on disk holds the matrix, or bias, of all experts of a layer.
        transposed: True: expert matrices on disk are [input, output].
        interleaved: True: outputs of the gate and up projections alternate.
    """

    count: tuple[str, ...]
    width: str | None = "moe_intermediate_size"
    normalised: str | None = "norm_topk_prob"
    loss: str | None = "router_aux_loss_coef"
    loss_switched: bool = False
    shared: str | None = None
    shared_copies: bool = False
    scale: str | None = None
    dense: Literal["first", "listed", "interleaved"] | None = None
    groups: Literal["always", "method"] | None = None
    stacked: bool = False
    transposed: bool = False
    interleaved: bool = False


@dataclass(frozen=True, slots=True)
class Family:
    """Architecture choices that all models of a family share.

    Attributes:
        name: ``model_type`` in config.json.
        architecture: Class name in transformers.
        fixed: {ModelConfig field: the only value that it may have}.
        defaults: {config.json key: value if the key is missing}.
        settings: {ModelConfig field: the config.json key that holds it}, for optional fields. An optional field (one of
            `OPTIONS`) that is neither here nor in ``fixed`` keeps its default.
        keys: {ModelConfig field: its config.json keys}, for fields with other keys than most families use.
        windows: Layers with a sliding window; None: no layer has a window.
        partial_rotation: True if the key ``partial_rotary_factor`` may be below 1.
        planning_only: Reason why models of the family can only be planned (memory and step time predicted), not run;
            None if they can.
        experts: Keys of its mixtures of experts; None: every MLP is dense.
        latent: True for multi-head latent attention.
        heads: For an encoder, {class name in transformers: its ``ModelConfig.head``}; empty for a decoder.
        nested: ``model_type`` of multimodal models whose ``text_config`` is a model of this family.
    """

    name: str
    architecture: str
    fixed: Mapping[str, object]
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of keys a config.json may leave out
    settings: Mapping[str, Setting] = field(default_factory=dict)
    keys: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    windows: Windows | None = None
    partial_rotation: bool = False
    planning_only: str | None = None
    experts: Experts | None = None
    latent: bool = False
    heads: Mapping[str, str] = field(default_factory=dict)  # of an encoder: architecture -> ``ModelConfig.head``
    nested: str | None = None

    @property
    def attention_bias(self) -> bool:
        """True if the ``config.json`` key ``attention_bias`` sets the biases of all attention projections together."""
        return self.fixed["positions"] == "rope" and not {"qkv_bias", "output_bias"} & {*self.fixed, *self.settings}

    @property
    def encoder(self) -> bool:
        """True if models of this family are encoders: bidirectional attention and post-norm layers."""
        return bool(self.heads)

    def find_encoder_problem(self, head: str, token_types: int, labels: Sequence[str]) -> str | None:
        """Return an error message for the first invalid or contradictory ModelConfig field among `head`, `token_types`
        and `labels`, which only encoders have; None if all three are valid."""
        if not self.encoder:
            given = [name for name, value in (("token_types", token_types), ("labels", labels)) if value]
            given += [f"head {head!r}"] if head != "next" else []
            return f"family {self.name} is a decoder: leave {given[0]} out" if given else None
        heads = self.heads.values()
        if head not in heads:
            return f"head must be one of {', '.join(heads)} in family {self.name}, not {head!r}"
        if token_types < 1:
            return f"token_types must be at least 1 in family {self.name}, not {token_types}"
        if (head == "classes") != bool(labels):
            return 'labels name the classes of head "classes": give them with this head and with no other'
        if head == "classes" and len(labels) < 2:
            return f"labels must name at least 2 classes, not {len(labels)}"
        return None
