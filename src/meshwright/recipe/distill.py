"""Recipe table [distill]."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from meshwright.names import DISTILLATION_LOSSES, TEACHER_DTYPES, TEACHER_LAYOUTS
from meshwright.tables import Fraction, Name, NotNegative, Positive, Size, Table, named

Layer = Annotated[int, Size("layers", 0)]


class DistillRecipe(Table):
    """Table [distill] of a recipe: a teacher, a Hugging Face directory, whose next-token distribution the model learns
    besides the text.

    Attributes:
        teacher: Directory of the teacher; None: no distillation.
        loss: Divergence of the student from the teacher, "forward_kl", "reverse_kl" or "jsd" (with beta).
        temperature: Divides the logits of student and teacher.
        mixing: Weight of the cross-entropy of the text; temperature² times the divergence has the weight 1 - mixing.
        hidden: Also match hidden states through learned projections, with the loss weight hidden_weight. layer_map
            lists the pairs of layers [student's, teacher's]; empty: pairs spread evenly over both models.
        top_k: Number of most probable tokens whose teacher logits are read from the cache that `meshwright data
            teacher` wrote; 0: no cache, the teacher runs in the training steps.
        on_policy: Fraction of the steps in which the student continues the sequences itself, after on_policy_prompt
            tokens (None: half of a sequence), sampled at on_policy_temperature.
        layout: Distribution of the teacher over the run's ranks: "same" (tp, pp, cp and ep of the run; sharded under
            zero3, else replicated), "replicated" or "zero3"; "replicated tp1" and "zero3 tp1" leave it unsharded over
            tp.
        dtype: Dtype of the teacher's parameters; None: the dtype of the run's parameters.
    """

    teacher: Name | None = None
    loss: Annotated[str, named("loss", DISTILLATION_LOSSES)] = "forward_kl"
    temperature: Positive = 1.0
    mixing: Fraction = 0.5
    beta: Annotated[float, Field(gt=0, lt=1)] = 0.5  # jsd: weight of the teacher in the mixture
    hidden: bool = False
    hidden_weight: NotNegative = 1.0
    layer_map: list[Annotated[list[Layer], Field(min_length=2, max_length=2)]] = []
    top_k: Annotated[int, Size("vocabulary", 0)] = 0
    on_policy: Fraction = 0.0
    on_policy_prompt: Annotated[int, Size("sequence")] | None = None
    on_policy_temperature: Positive = 1.0
    layout: Annotated[str, named("layout", TEACHER_LAYOUTS)] = "same"
    dtype: Annotated[str, named("dtype", TEACHER_DTYPES)] | None = None

    @model_validator(mode="after")
    def _check_keys(self) -> Self:
        """Check that keys are set only where they have an effect, and that they do not contradict each other; return
        the table. Raises ValueError otherwise."""
        changed = {name for name, field in type(self).model_fields.items() if getattr(self, name) != field.default}
        if self.teacher is None and changed:
            raise ValueError(f"{sorted(changed)[0]} is set without teacher: give the directory of the teacher")
        if "beta" in changed and self.loss != "jsd":
            raise ValueError(f'beta belongs to loss "jsd"; "{self.loss}" has none')
        if not self.hidden and (wrong := changed & {"hidden_weight", "layer_map"}):
            raise ValueError(f"{sorted(wrong)[0]} is set without hidden = true")
        if not self.on_policy and (wrong := changed & {"on_policy_prompt", "on_policy_temperature"}):
            raise ValueError(f"{sorted(wrong)[0]} is set without on_policy")
        students = [pair[0] for pair in self.layer_map]
        if len(students) != len({*students}):
            raise ValueError("layer_map names a layer of the student twice")
        if self.top_k and (wrong := changed & {"hidden", "on_policy", "layout", "dtype"}):
            raise ValueError(
                f"{sorted(wrong)[0]} needs a running teacher; top_k reads the teacher's logits from a cache"
            )
        return self
