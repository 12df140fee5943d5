"""Compiled block with expert-parallel experts: the part before its mixture is one graph; the mixture is not compiled
(`model/transformer.py`) and is priced as eager ones are."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.planner.memory.compiled_blocks import GRADIENT, INPUT, CompiledBlock
from meshwright.planner.memory.inductor import Kernel

NORMED, NORMED_GRADIENT, BETWEEN = "mlp.input", "gradient of the mixture's input", "input of the sum"


class CompiledFront(CompiledBlock):
    """Model of the compiled part of a block whose experts are expert-parallel: norm, attention, second norm, with
    kernels and saved activations. Its forward returns two tensors: the residual stream and the mixture's input."""

    def _values(self) -> Iterator[tuple[str, tuple[tuple[int, ...], str]]]:
        """Yield (name, (shape, element type)) of each tensor: those of `CompiledBlock`, the two results, and the
        gradient of the mixture's input."""
        yield from super()._values()
        for name in (NORMED, NORMED_GRADIENT, BETWEEN):
            yield name, ((self.at.rows, self.at.slice, self.at.config.hidden), "x")

    def kept(self) -> list[str]:
        """Return the names of the activations that the compiled part's forward saves for its backward."""
        return [name for name in super().kept() if not name.startswith("mlp.")]

    def gradients(self) -> tuple[str, ...]:
        """Return the names of the output gradients that the compiled part's backward receives."""
        return GRADIENT, NORMED_GRADIENT

    def forward(self) -> Iterator[Kernel]:
        """Yield the kernels of the compiled part's forward in order."""
        added = f"attention.output.{'sum' if self.summed else 'product'}"
        yield from self._attention()
        yield self._kernel(f"{INPUT}, {added}", f"mlp_norm.scale, {BETWEEN}, {NORMED}")

    def results(self) -> tuple[str, ...]:
        """Return the names of the tensors that the compiled part's forward returns."""
        return BETWEEN, NORMED

    def backward(self) -> Iterator[Kernel]:
        """Yield the kernels of the compiled part's backward in order."""
        kept = set(self.kept())
        added = f"attention.output.{'sum' if self.summed else 'product'}"
        scale = "" if "mlp_norm.scale" in kept else "mlp_norm.scale, "
        reads = f"{INPUT}, {added}, {NORMED_GRADIENT}, {GRADIENT}{'' if scale else ', mlp_norm.scale'}"
        yield self._kernel(reads, f"{scale}gradient between")
        yield from self._attention_backward(kept, added, NORMED_GRADIENT)
