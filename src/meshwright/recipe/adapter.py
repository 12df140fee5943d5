"""Recipe table [adapter]."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from meshwright.names import ADAPTER_BASES, ADAPTER_KINDS
from meshwright.tables import Name, Positive, Schema, Size, Table, named


class AdapterRecipe(Table):
    """Table [adapter] of a recipe: a LoRA adapter that is trained in place of the model, whose weights (`model.from`)
    are loaded and frozen.

    Attributes:
        kind: "none" trains the model itself; "lora", "rslora" (scale alpha / sqrt(rank)) and "dora" (trained
            magnitudes) train an adapter.
        rank: Inner size of the two adapter matrices A and B.
        alpha: Numerator of the adapter's scale (alpha / rank for "lora" and "dora"); None: 2 x rank.
        dropout: Probability with which an element of the adapter's input is set to 0.
        base: Number format of the frozen linear layers: "bf16" is the dtype of the run's parameters, "nf4" (QLoRA) and
            "int8" quantize the weights in blocks of 64.
        double_quantization: Quantize the scales of NF4 to 8 bits too.
        targets: Linear layers that get an adapter, by full name, last parts of the name, pattern with * ? or [], or
            "all-linear".
        from_path: PEFT directory, or run directory (its newest checkpoint), whose adapter initializes A and B; None: A
            is random, B is zero.
    """

    kind: Annotated[str, named("adapter", ADAPTER_KINDS)] = "none"
    rank: Annotated[int, Size("adapter_rank")] = 8
    alpha: Positive | None = None  # default: 2 x rank
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    base: Annotated[str, named("base", ADAPTER_BASES)] = "bf16"
    double_quantization: bool = False
    targets: Annotated[list[Name], Field(min_length=1)] = ["all-linear"]
    from_path: Name | None = Field(default=None, alias="from")  # a PEFT directory

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        """Check that keys are set only if `kind` uses them; return the table. Raises ValueError otherwise."""
        if self.kind == "none":
            for name, field in type(self).model_fields.items():
                if getattr(self, name) != field.default:
                    raise ValueError(f'{field.alias or name} is set without kind: give kind = "lora" (or rslora, dora)')
        if self.double_quantization and self.base != "nf4":
            raise ValueError(f'double_quantization quantizes the scales of base = "nf4", not of "{self.base}"')
        if self.dropout and self.kind == "dora":
            raise ValueError(f"dropout {self.dropout:g}: DoRA trains without dropout; set 0, or kind lora or rslora")
        return self


class _OneTable(Table):
    """Schema of a recipe that has only the table [adapter], by which `read_adapter` validates this table alone."""

    adapter: AdapterRecipe = AdapterRecipe()


_SCHEMA = Schema(_OneTable, {})


def read_adapter(given: Mapping[str, Any] | Sequence[str]) -> AdapterRecipe:
    """Parse and validate a table [adapter] that is not part of a recipe. given: its keys and values, or overrides such
    as "adapter.rank=16". Raises `UserError` with the key and the valid values."""
    tables: dict[str, Any] = {}
    if isinstance(given, Mapping):
        tables["adapter"] = dict(given)
    else:
        for override in given:
            _SCHEMA.override(tables, override)
    return _SCHEMA.check(tables, lambda key: "").adapter
