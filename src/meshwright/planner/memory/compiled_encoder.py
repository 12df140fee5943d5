"""Compiled encoder block, whose norms follow the residual additions and whose attention is PyTorch's own: saved
activations and kernels in inductor's order (torch 2.13), as `compiled_blocks` has them of decoders.

A norm's result is the next product's input: the backward computes it again beside the norm's gradient. The kernel of
attention that a CPU has draws random numbers, as far as the compiler knows: where it runs again, the state that they
begin from is kept.
"""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.planner.memory.compiled_blocks import GRADIENT, INPUT, INPUT_GRADIENT, RESULT, CompiledBlock
from meshwright.planner.memory.inductor import Kernel

RANDOM_STATE = 632
"""Numbers of eight bytes in the state of a CPU's random numbers."""


class CompiledEncoderBlock(CompiledBlock):
    """Model of one encoder block (post-norm) compiled by torch.compile, on one rank: its kernels and saved
    activations."""

    def _values(self) -> Iterator[tuple[str, tuple[tuple[int, ...], str]]]:
        """Yield (name, (shape, element type)) of each tensor of the block: those of `CompiledBlock`, of norms after
        residual additions, and of PyTorch's attention."""
        at = self.at
        yield from super()._values()
        for name in ("attention_norm.sums", "mlp_norm.sums"):
            yield name, ((at.rows, at.slice, 2), "wide")
        yield "attention.log_sum.again", ((at.rows, at.heads, at.tokens), "wide")
        yield "attention_norm.known", ((at.rows, at.slice, 2), "x")
        yield "mlp_norm.known", ((at.rows, at.slice, 2 if at.narrow else 1), "x")
        yield "mlp_norm.sum", ((at.rows, at.slice, at.config.hidden), "x")
        yield "attention.random_state", ((RANDOM_STATE,), "index")

    def kept(self) -> list[str]:
        """Return the names of the activations that the block's forward saves for the backward; under full recompute,
        those that the recomputed forward saves."""
        products = ["attention.output.product", "mlp.up.output", "mlp.down.product"]
        if self.again == "selective":
            state = [] if self.cuda else ["attention.random_state"]
            return ["attention.qkv.output", *products, *state]
        core = ["attention.output.input", "attention.log_sum"]
        if self.again == "none":
            return ["attention.qkv.output", *core, *products]
        norms = ["attention_norm.known", "mlp_norm.known", "mlp_norm.sum"]
        return ["attention.qkv.output", *core, *products[:2], *norms, "mlp.up.input", "mlp.down.input"]

    def forward(self) -> Iterator[Kernel]:
        """Yield the kernels of the encoder block's forward in inductor's order."""
        yield self._kernel(INPUT, "attention.qkv.output")
        yield from self._encoded()
        yield self._kernel("attention.output.input", "attention.output.product")
        known = "attention_norm.known, attention_norm.sums" if self.again == "full" else "attention_norm.scale"
        yield self._kernel(f"{INPUT}, attention.output.product", f"{known}, mlp.up.input")
        yield self._kernel("mlp.up.input", "mlp.up.output")
        yield self._kernel("mlp.up.output", "mlp.down.input")
        yield self._kernel("mlp.down.input", "mlp.down.product")
        if self.again == "full":
            made, over = f"mlp_norm.sums, mlp_norm.known, mlp_norm.sum, {RESULT}", {"mlp_norm.sum": "mlp.down.product"}
        else:
            made, over = f"mlp_norm.scale, {RESULT}", {RESULT: "mlp.up.input"}
        yield self._kernel("mlp.down.product, mlp.up.input", made, over=over)

    def _encoded(self) -> Iterator[Kernel]:
        """Yield the kernel of PyTorch's scaled_dot_product_attention, which reads the QKV product's output."""
        found = self._operator("attention.qkv.output", "attention.output.input, attention.log_sum")
        if self.again == "selective" and not self.cuda:  # then it gives its place to others
            found = found._replace(makes=tuple(made._replace(operator=False) for made in found.makes))
        yield found

    def backward(self) -> Iterator[Kernel]:
        """Yield the kernels of the encoder block's backward in inductor's order, recomputed ones included."""
        kept, made = set(self.kept()), "mlp.up.output.gradient"
        given, product = "mlp.down.product.gradient", "attention.output.product"
        over = {made: "mlp.down.input.gradient"}
        known = "attention_norm.known" if self.again == "full" else "attention_norm.scale"
        if self.again == "full":
            yield self._kernel(f"mlp_norm.sum, mlp_norm.known, {GRADIENT}", f"mlp_norm.sums, {given}")
            yield self._kernel(given, "mlp.down.input.gradient")
            yield self._kernel(f"{given}, mlp.down.input", "weight gradient of down")
            yield self._kernel("mlp.up.output, mlp.down.input.gradient", made, over=over)
        else:
            again = "attention_norm.scale, mlp_norm.scale, mlp_norm.sums, mlp.up.input"
            yield self._kernel(f"{INPUT}, {product}, mlp.down.product, {GRADIENT}", f"{again}, {given}")
            yield self._kernel(given, "mlp.down.input.gradient")
            yield self._kernel("mlp.up.output, mlp.down.input.gradient", f"mlp.down.input, {made}", over=over)
            yield self._kernel(f"{given}, mlp.down.input", "weight gradient of down")
        yield self._kernel(made, "mlp.up.input.gradient")
        yield self._kernel(f"{made}, mlp.up.input", "weight gradient of up")
        yield self._kernel(
            f"{given}, {made}, mlp.up.input.gradient, {INPUT}, {product}, {known}",
            "attention_norm.sums, gradient between", over={"gradient between": given},
        )  # fmt: skip
        yield self._kernel("gradient between", "attention.output.input.gradient")
        if "attention.output.input" not in kept:
            yield from self._encoded()
        yield self._kernel("gradient between, attention.output.input", "weight gradient of output")
        yield self._kernel("attention.log_sum, gradient between", "attention.log_sum.again")
        parts = "gradient of queries, gradient of keys, gradient of values"
        reads = "attention.output.input.gradient, attention.qkv.output, attention.output.input, attention.log_sum.again"
        yield self._operator(reads, parts)
        yield self._kernel(parts, "attention.qkv.output.gradient")
        yield self._kernel("attention.qkv.output.gradient", "attention.qkv.input.gradient")
        yield self._kernel(f"attention.qkv.output.gradient, {INPUT}", "weight gradient of qkv")
        yield self._kernel(
            "gradient between, attention.qkv.output.gradient, attention.qkv.input.gradient", INPUT_GRADIENT,
            over={INPUT_GRADIENT: "gradient between"},
        )  # fmt: skip
