"""Small training problems for verification: the model scaled down with all its features, and the optimizer settings."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from dataclasses import dataclass
from typing import Any

from meshwright.layout import Layout
from meshwright.names import OBJECTIVES_OF_RECORDS
from meshwright.recipe import Recipe
from meshwright.spec.adapter_config import ALL_LINEAR, BLOCK, AdapterConfig
from meshwright.spec.adapter_entries import target_modules
from meshwright.spec.config import ModelConfig
from meshwright.spec.families import FAMILIES
from meshwright.spec.parameters import parameter_table
from meshwright.training.preference_loss import Preference
from meshwright.verification.teaching import DistillationSettings

SEQUENCE = 23  # tokens
VALIDATION_SEQUENCES = 5
MAX_RANKS = 8
MAX_MICRO_BATCHES = 4


@dataclass(frozen=True, slots=True)
class TrainingSettings:
    """Optimizer settings of a verification problem, named as the keys of a recipe's [train] table, and its dynamic loss
    scale.

    Attributes:
        optimizer: "sgd" or "adamw".
        learning_rate: Peak value.
        weight_decay: Coefficient, for matrices only.
        momentum: Momentum of SGD.
        betas, epsilon: Constants of AdamW.
        clip: Maximum gradient norm; 0: no clipping.
        schedule: Name of the learning-rate schedule.
        warmup: Number of warm-up steps.
        minimum_learning_rate: Final learning rate as a fraction of the peak.
        router_bias_rate: Change of a router bias per step.
        loss_scale: Initial loss scale; 1: no scaling.
        loss_scale_every: Number of consecutive finite steps after which the loss scale doubles (a non-finite step
            halves it); 0: the loss scale is constant.
    """

    optimizer: str = "sgd"
    learning_rate: float = 0.2
    weight_decay: float = 0.0
    momentum: float = 0.0
    betas: tuple[float, float] = (0.8, 0.9)
    epsilon: float = 1e-4  # far above rounding errors of zero gradients, which AdamW would turn into full updates
    clip: float = 0.0
    schedule: str = "constant"
    warmup: int = 0
    minimum_learning_rate: float = 0.1
    router_bias_rate: float = 0.01
    loss_scale: float = 1.0
    loss_scale_every: int = 0


SGD = TrainingSettings(momentum=0.9, weight_decay=0.05, clip=1e6, schedule="linear")
"""SGD with momentum and coupled weight decay; no gradient reaches the clip."""
ADAMW = TrainingSettings(
    *("adamw", 0.02, 0.3), clip=0.05, schedule="cosine", warmup=1, loss_scale=256.0, loss_scale_every=2
)  # fmt: skip
"""AdamW with decoupled weight decay; every gradient exceeds the clip, and the loss scale changes between steps."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Small training problem on which layouts are verified: a model trained for `steps` steps of `batch` sequences of
    `sequence` tokens.

    Attributes:
        config: The model.
        dtype: Dtype of parameters.
        master_dtype: Dtype of master weights, gradients and optimizer state; None: `dtype`.
        training: Optimizer settings.
        seed: Seed of initial weights and data.
        preference: Settings of the preference loss; None: next-token loss.
        teaching: Distillation; None: no teacher.
        nan_step: Step (from 0) in which the last rank produces NaN activations; None: no such step.
        resumed_at: Numbers of steps after which a checkpoint is saved and a new trainer resumes from this checkpoint.
        fused_gradient_accumulation: True if weight-gradient kernels accumulate directly into the gradient buffer, as in
            large models.
        compile_backend: Backend of torch.compile for layers, final norm and loss, such as "inductor"; None: they run
            eagerly.
        late_completion: True if collective calls complete only when they are waited for (`late_completion.py`).
        tensor_overlap: Value of the recipe's `train.tensor_overlap`.
    """

    config: ModelConfig
    batch: int
    dtype: str = "float64"
    sequence: int = SEQUENCE
    steps: int = 3
    training: TrainingSettings = TrainingSettings()
    seed: int = 11
    preference: Preference | None = None
    teaching: DistillationSettings | None = None
    master_dtype: str | None = None
    nan_step: int | None = None
    resumed_at: tuple[int, ...] = ()
    fused_gradient_accumulation: bool = True
    compile_backend: str | None = None
    late_completion: bool = False
    tensor_overlap: str = "off"

    @property
    def resolved_master_dtype(self) -> str:
        """Name of the dtype of master weights, gradients and optimizer state, such as "float32"."""
        return self.master_dtype or self.dtype

    @property
    def records(self) -> str:
        """Kind of data records that the loss of this training problem needs, as in a recipe: "text", "preference" or
        "unpaired"."""
        objective = None if self.preference is None else self.preference.objective
        return next((kind for kind, names in OBJECTIVES_OF_RECORDS.items() if objective in names), "text")

    @property
    def train_sequences(self) -> int:
        """Number of sequences in the training split. The number is so small that the third step crosses the end of an
        epoch."""
        return 2 * self.batch + 3

    def make_recipe(self, layout: Layout) -> Recipe:
        """Return the recipe of a training run of this problem on `layout`. Its [model] table and data source are
        placeholders: the trainer gets the model configuration and the data as separate arguments."""
        training = {key: value for key, value in dataclasses.asdict(self.training).items() if "loss_scale" not in key}
        preference: dict[str, Any] = {}
        if self.preference is not None:
            preference = {"preference_beta": self.preference.beta, "objective": self.preference.objective}
            preference["preference_smoothing"] = self.preference.label_smoothing
            if self.preference.objective == "simpo":
                preference["preference_margin"] = self.preference.margin
            preference |= dict(zip(("desirable_weight", "undesirable_weight"), self.preference.weights, strict=True))
        return Recipe.from_tables(
            {
                "layout": str(layout),
                "run": {"seed": self.seed},
                "model": {"family": "llama", "layers": 1, "hidden": 8, "heads": 1},
                "data": {
                    "source": "synthetic",
                    "sequence": self.sequence,
                    "records": self.records,
                },
                "train": {
                    **training,
                    **preference,
                    "betas": list(self.training.betas),
                    "steps": self.steps,
                    "batch": self.batch,
                    "compile": self.compile_backend is not None,
                    "tensor_overlap": self.tensor_overlap,
                    "validation_sequences": VALIDATION_SEQUENCES,
                },
                "distill": {} if self.teaching is None else self.teaching.to_table(),
            }
        )


def choose_sequence_length(layout: Layout, tokens: int = SEQUENCE) -> int:
    """Return the smallest sequence length of at least `tokens` tokens that is divisible by tp x cp of `layout`, or
    under ring attention by 2 x tp x cp."""
    pieces = layout.tp * layout.cp * (2 if layout.cp > 1 and layout.cp_method == "ring" else 1)
    return -(-tokens // pieces) * pieces


def scale_down_config(
    config: ModelConfig, tp: int = 1, ulysses: int = 1, layers: int = 5, ep: int = 1, etp: int = 1
) -> ModelConfig:
    """Return a model of a few thousand parameters with every feature of `config` and irregular sizes (such as a
    vocabulary of 499), which expose errors in sharding.

    tp, ep, etp: parallel degrees that must divide the sizes. ulysses: number of cp ranks that divide the heads. layers:
    number of layers. With grouped-query attention there are as few key-value heads as possible, so that tp ranks share
    them.
    """
    grouped = config.kv_heads < config.heads
    heads, kv_heads = _choose_heads(tp, ulysses)
    own_head_dim = config.head_dim * config.heads != config.hidden
    windowed = config.windowed_layers
    if windowed is not None:
        mixed = any(windowed) and not all(windowed)
        windowed = tuple(layer % 2 == 0 if mixed else windowed[0] for layer in range(layers))
    scaling = config.rope_scaling
    if scaling is not None and scaling.original_max_positions is not None:
        scaling = dataclasses.replace(scaling, original_max_positions=8)  # within the sequence length
    head_dim = 10 if own_head_dim else 6
    if config.rotary_fraction < 1:
        head_dim, config = 12, dataclasses.replace(config, rotary_fraction=0.5, head_dim=12, rope_scaling=None)
    if scaling is not None and scaling.kind == "longrope":
        pairs = int(head_dim * config.rotary_fraction) // 2
        scaling = dataclasses.replace(
            scaling,
            factor=32.0,
            short_factors=tuple(1.0 + 0.1 * pair for pair in range(pairs)),
            long_factors=tuple(2.0 + pair for pair in range(pairs)),
        )
    latent = config.latent
    if latent is not None:
        rank = None if latent.query_rank is None else 9
        latent = dataclasses.replace(latent, rank=7, rotary_dim=4, value_dim=5, query_rank=rank)
    experts = _scale_down_experts(config, tp, ep, etp)
    keys = FAMILIES[config.family].experts
    one_width = keys is not None and keys.width is None
    intermediate = experts.get("expert_intermediate", 0) if one_width else -(-37 // tp) * tp
    unit = 6
    if config.adapter is not None and config.adapter.packed:  # rows of whole blocks on every rank
        intermediate, unit = BLOCK * tp, BLOCK * tp // math.gcd(heads, BLOCK * tp)
        head_dim = unit
    return dataclasses.replace(
        config,
        **experts,
        vocabulary=499,
        hidden=unit * heads,
        layers=layers,
        heads=heads,
        kv_heads=(1 if config.kv_heads == 1 else kv_heads) if grouped else heads,
        head_dim=head_dim,
        intermediate=intermediate,
        max_positions=2 * SEQUENCE,
        latent=latent,
        rope_scaling=scaling,
        unrotated_layers=tuple(range(1, layers, 2)) if config.unrotated_layers else (),
        # Caps and scales that bend scores and logits of this size.
        attention_scale=None if config.attention_scale is None else 0.4,
        attention_softcap=None if config.attention_softcap is None else 1.5,
        logit_softcap=None if config.logit_softcap is None else 2.0,
        swiglu_limit=None if config.swiglu_limit is None else 0.7,
        temperature_scale=0.7 if config.temperature_scale else 0.0,
        temperature_floor=3 if config.temperature_tuning else 1,
        sliding_window=None if config.sliding_window is None else 7,
        windowed_layers=windowed,
        bos_token=None,
        eos_token=None,
        more_eos_tokens=(),
        initializer_range=0.15,  # large: far from the linear regime, an error in one gradient shows in others
        adapter=_scale_down_adapter(config),
    )


def _scale_down_adapter(config: ModelConfig) -> AdapterConfig | None:
    """Return the adapter settings of a scaled-down model: the adapter of `config` with a rank of at most 3 and random
    values of B and of frozen norms and biases, on the same kinds of linear layers; None if `config` has no adapter."""
    if (adapter := config.adapter) is None:
        return None
    entries = parameter_table(dataclasses.replace(config, adapter=None)).entries
    modules = target_modules(entries, [each for each in adapter.targets if each != ALL_LINEAR])
    # The numbers of layers and experts differ; the last parts alone would select routed experts with shared ones.
    kinds = dict.fromkeys(re.sub(r"\.\d+\b", ".*", module) for module in modules)
    targets = (*kinds, *([ALL_LINEAR] if ALL_LINEAR in adapter.targets else ()))
    return dataclasses.replace(adapter, rank=min(3, adapter.rank), targets=targets, random_constants=True, dropout=0.0)


def _choose_heads(tp: int, ulysses: int) -> tuple[int, int]:
    """Return the smallest (query heads, key-value heads), at least (4, 2), for `tp` tensor-parallel and `ulysses`
    context-parallel ranks. Query heads are divisible by tp x ulysses; key-value heads are divided or replicated evenly.
    """
    for heads in itertools.count(4):
        for kv_heads in range(2, heads):
            on_rank = max(1, kv_heads // tp)
            whole = heads % (tp * ulysses) == 0 and heads % kv_heads == 0
            shared = not (kv_heads % tp and tp % kv_heads) and not (on_rank % ulysses and ulysses % on_rank)
            if whole and shared:
                return heads, kv_heads
    raise AssertionError


def _scale_down_experts(config: ModelConfig, tp: int, ep: int, etp: int) -> dict[str, Any]:
    """Return the mixture-of-experts fields of a scaled-down configuration by ModelConfig field name: at most five
    experts (rounded up to a multiple of ep), at most three per token, and one dense layer if `config` has dense layers.
    Empty if `config` has no experts. tp, ep, etp: parallel degrees that must divide the sizes."""
    if not config.experts:
        return {}
    cut = tp if ep == etp == 1 else etp
    copies = 1 if config.experts_keys is not None and config.experts_keys.shared == "" else 2
    width = next(
        width
        for width in itertools.count(37 if config.intermediate == config.expert_intermediate else 11)
        if width % cut == 0 and (copies * width % tp == 0 or not config.shared_intermediate)
    )
    experts, step, groups = min(5, config.experts), ep, {}
    if config.expert_groups > 1:  # three groups of at least two
        experts, step = 6, math.lcm(ep, 3)
        groups = {"expert_groups": 3, "groups_per_token": min(2, config.groups_per_token)}
    return groups | {
        "experts": -(-experts // step) * step,
        "experts_per_token": min(3, config.experts_per_token, 2 * groups.get("groups_per_token", 2)),
        "expert_intermediate": width,
        "shared_intermediate": copies * width if config.shared_intermediate else 0,
        "dense_layers": (0,) if config.dense_layers else (),
        "router_loss": 0.1 if config.router_loss else 0.0,  # large enough to affect the gradients visibly
    }


def scale_down_layout(layout: Layout) -> Layout:
    """Return `layout` scaled down to at most 8 ranks such that every axis larger than 1 stays larger than 1 where the
    ranks suffice. A layout whose pipeline schedule is read from a file keeps its number of ranks. The precision is
    dropped, since the verification problem sets the dtypes."""
    layout = layout.with_(precision=None)
    if layout.schedule.startswith("@"):
        return layout
    pp, ranks = layout.pp, MAX_RANKS
    if layout.world_size > MAX_RANKS and pp > 1:
        pp = min(pp, MAX_RANKS if layout.world_size == pp else 2)
        ranks = MAX_RANKS // pp
    most = max(MAX_MICRO_BATCHES, 2 * pp if pp > 1 else 0)  # a schedule needs as many to fill and drain
    layout = layout.with_(pp=pp, micro_batches=min(layout.micro_batches, most))
    if layout.world_size <= MAX_RANKS:
        return layout
    groups = layout.hybrid is not None and layout.hybrid < layout.dp * layout.cp
    cp = min(layout.cp, ranks if layout.dp == layout.tp == 1 else 2)
    ranks //= cp
    tp = min(layout.tp, ranks if layout.dp == 1 else ranks // 4 if groups and cp == pp == 1 else max(1, ranks // 2))
    dp = min(layout.dp, ranks // tp)
    stage = tp * cp * dp
    etp = next(size for size in range(min(layout.etp, stage if layout.ep == 1 else 2), 0, -1) if stage % size == 0)
    ep = next(size for size in range(min(layout.ep, stage // etp), 0, -1) if stage // etp % size == 0)
    hybrid = dp * cp // 2 if groups and dp * cp > 3 else None
    return layout.with_(tp=tp, cp=cp, dp=dp, ep=ep, etp=etp, hybrid=hybrid)
