"""Compiled transformer block: the activations that its forward saves, and the kernels of its forward and backward with
the tensors that they read and write.

The engine says what a compiled block keeps (`parallel/recompute.py`): results of matrix products, attention and
collectives, as far as the backward reads them; everything between them is computed again inside of the backward's
kernels. Of blocks that are computed again whole ("full") the partitioner of torch.compile chooses what lives from the
second forward to the backward. The order of kernels is inductor's, as it came out for every shape that was looked at
(torch 2.13). Vectors, as gradients of norms and biases, are left out.

Names of values are those of `cost/blocks` where the same is kept there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from meshwright.planner.cost.micro_batch import ITEM_BYTES, LayerKind, MicroBatch
from meshwright.planner.cost.operators import SavedTensor
from meshwright.planner.memory.inductor import Buffer, Kernel
from meshwright.planner.memory.temporaries import ring_backward, tiled_backward

GRADIENT, RESULT, INPUT, INPUT_GRADIENT = "gradient of the output", "result", "input", "gradient of the input"
REPEATED = "attention.keys_repeated", "attention.values_repeated"


def known(at: MicroBatch, layer: int) -> bool:
    """Return True if the memory of this layer, compiled with torch.compile, is modelled: false for norms after
    sublayers or rotation, for experts whose inputs are weighted, and with an adapter.

    at: sizes and settings of one micro-batch on one rank; layer: the layer's index, unused so far.
    """
    config = at.config
    unknown = config.post_norms or config.rotated_norm or config.routed_input
    return not unknown and config.adapter is None


class CompiledBlock:
    """Model of one dense transformer block compiled by torch.compile (inductor), on one rank: the kernels of its
    forward and backward, and the activations that it saves.

    Tensors are identified by names such as "attention.qkv.output". at: sizes and settings of one micro-batch on the
    rank; kind: of the layer; x: bytes of an activation's element.
    """

    def __init__(self, at: MicroBatch, kind: LayerKind, x: int = 4) -> None:
        self.at, self.kind, self.x, self.wide = at, kind, x, max(4, x)
        window = self.window = kind.window
        config, layout = at.config, at.layout
        self.again = layout.recompute
        self.summed = layout.tp > 1
        self.gathers = self.summed and layout.tensor_sequence_parallel
        self.exchanged = layout.cp > 1 and layout.cp_method == "ulysses"
        self.rotated = kind.rotates or config.query_key_norm
        self.cuda = at.device == "cuda" and not at.ring
        """True if PyTorch's CUDA kernels compute attention: their backward reads what their forward returned."""
        self.repeated = at.repeats(window)
        """True if keys and values are repeated for every query head."""
        limited = self.cuda and at.dense_mask(window)
        self.made = ", ".join([*(REPEATED if self.repeated else ()), *(["attention.mask"] if limited else [])])
        """What is made for PyTorch's kernels alone."""
        self._shapes = dict(self._values())

    def _values(self) -> Iterator[tuple[str, tuple[tuple[int, ...], str]]]:
        """Yield (name, (shape, element type)) of each tensor of the block. Element types: "x" (activation), "wide" (at
        least float32), "index", "int32"."""
        at, config = self.at, self.at.config
        size, width = config.head_dim, config.intermediate // at.layout.tp
        stream, whole = (at.rows, at.slice, config.hidden), (at.rows, at.tokens, config.hidden)
        heads, kv_heads, length = at.heads, at.kv_heads, at.tokens
        for name in (INPUT, RESULT, GRADIENT, INPUT_GRADIENT, "gradient between", "attention_norm.output"):
            yield name, (stream, "x")
        for name in ("mlp_norm.output", "attention_norm.gradient", "mlp_norm.gradient"):
            yield name, (stream, "x")
        for name in ("attention_norm.scale", "mlp_norm.scale"):
            columns = 2 if config.norm == "layernorm" else 1  # mean and deviation, or one number
            yield name, ((at.rows, at.slice, columns), "wide")
        for name in ("attention.qkv.input", "attention.output.product", "mlp.up.input", "mlp.down.product"):
            yield name, (whole, "x")
        for name in ("attention.qkv.input.gradient", "attention.output.product.gradient", "mlp.up.input.gradient"):
            yield name, (whole, "x")
        yield "mlp.down.product.gradient", (whole, "x")
        for name in ("attention.output.sum", "mlp.down.sum"):
            yield name, (stream, "x")
        columns = (heads + 2 * kv_heads) * size
        for name in ("attention.qkv.output", "attention.qkv.output.gradient"):
            yield name, ((at.rows, at.tokens, columns), "x")
        for name, many in (("query", heads), ("key", kv_heads)):
            yield f"attention.{name}", ((at.rows, many, at.tokens, size), "x")
            yield f"attention.{name}.again", ((at.rows, many, at.tokens, size), "x")
            yield f"attention.{name}.wide", ((at.rows, many, at.tokens, size), "wide")
            yield f"attention.{name}.gradient", ((at.rows, many, at.tokens, size), "wide")
        for name in ("attention.output.input", "attention.output.input.gradient"):
            yield name, ((at.rows, at.tokens, heads * size), "x")
        if self.exchanged:
            copies = max(1, at.layout.cp // kv_heads)
            heads, kv_heads, length = heads // at.layout.cp, kv_heads * copies // at.layout.cp, at.whole
            for name in ("attention.exchanging", "attention.exchanged", "attention.exchanged.gradient"):
                yield name, ((at.rows, heads + 2 * kv_heads, length, size), "x")
            yield "attention.exchanging.gradient", ((at.rows, heads + 2 * kv_heads, length, size), "x")
        for name in ("attention.core", "attention.core.gradient"):
            yield name, ((at.rows, heads, length, size), "x")
        lines = -(-length // 32) * 32 if self.cuda and (at.dense_mask(self.window) or not at.narrow) else length
        yield "attention.log_sum", ((at.rows, heads, lines), "wide")
        for name in ("attention.keys_repeated", "attention.values_repeated"):
            yield name, ((at.rows, heads, length, size), "x")
        yield "attention.mask", ((at.rows if at.masked else 1, 1, length, length), "x")
        many_keys = heads if self.repeated else kv_heads
        for name, many in (("queries", heads), ("keys", many_keys), ("values", many_keys)):
            yield f"gradient of {name}", ((at.rows, many, length, size), "x")
        both = (at.rows, at.tokens, width * (2 if config.gated else 1))
        yield "mlp.up.output", (both, "x")
        yield "mlp.up.output.gradient", (both, "x")
        for name in ("mlp.down.input", "mlp.down.input.gradient"):
            yield name, ((at.rows, at.tokens, width), "x")
        for name, many in (("qkv", columns), ("output", at.heads * size), ("up", both[-1]), ("down", width)):
            yield f"weight gradient of {name}", ((many, config.hidden), "x")

    def entry(self, name: str) -> SavedTensor:
        """Return name, shape and element type of the block's tensor with a name such as "attention.qkv.output"."""
        shape, kind = self._shapes[name]
        return SavedTensor(name, shape, kind)

    def bytes(self, name: str) -> int:
        """Return the bytes of the block's tensor with a name such as "attention.qkv.output"."""
        shape, kind = self._shapes[name]
        return (
            math.prod(shape)
            * {"x": self.x, "wide": self.wide, "index": ITEM_BYTES["int64"], "int32": ITEM_BYTES["int32"]}[kind]
        )

    def kept(self) -> list[str]:
        """Return the names of the activations that the forward saves for the backward, without the block's input; under
        full recompute, those that the recomputed forward saves."""
        added = "sum" if self.summed else "product"
        if self.again == "selective":
            core = ["attention.output.input", "attention.log_sum"] if self.at.ring else []
            return ["attention.qkv.output", *core, f"attention.output.{added}", "mlp.up.output"]
        found = ["attention.qkv.input"] if self.gathers else []
        if self.exchanged:
            found += ["attention.exchanged", *(["attention.qkv.output"] if self.at.config.query_key_norm else [])]
        else:
            found.append("attention.qkv.output")
        found += ["attention.output.input", *(["attention.log_sum"] if self.at.ring or self.cuda else [])]
        found += ["attention.core"] if self.cuda and self.exchanged else []  # what its kernels' backward reads
        found += [f"attention.output.{added}", *(["mlp.up.input"] if self.gathers else []), "mlp.up.output"]
        if self.again == "none":
            return found
        inputs = ["attention.qkv.input", "mlp.up.input"]
        scales = ["attention_norm.scale", "mlp_norm.scale"]
        rotated = ["attention.query", "attention.key"] if self.rotated and not self.exchanged else []
        return [*dict.fromkeys([*scales, *inputs, *rotated, *found, "mlp.down.input"])]

    def gradients(self) -> tuple[str, ...]:
        """Return the names of the output gradients that the block's backward receives."""
        return (GRADIENT,)

    def results(self) -> tuple[str, ...]:
        """Return the names of the tensors that the block's forward returns."""
        return (RESULT,)

    # --- kernels

    def _buffer(self, name: str, operator: bool = False) -> Buffer:
        """Return the memory buffer of the tensor called `name`. operator: it is allocated by a custom operator, so
        inductor does not reuse it."""
        kind = self._shapes[name][1]
        kind = "wide" if kind == "x" and self.x == self.wide else kind
        category = "gradients" if name.startswith("weight gradient") else "activations"
        return Buffer(name, kind, self.bytes(name), category, operator)

    def _kernel(self, reads: str, makes: str, **more: object) -> Kernel:
        """Return a kernel. reads, makes: comma-separated names of the tensors that it reads and writes; more: further
        fields of `Kernel`."""
        made = [name.strip() for name in makes.split(",") if name.strip()]
        return Kernel(
            made[0] if made else reads, tuple(name.strip() for name in reads.split(",")),
            tuple(self._buffer(name) for name in made), **more,  # type: ignore[arg-type]
        )  # fmt: skip

    def _operator(self, reads: str, makes: str, inside: tuple = ()) -> Kernel:  # type: ignore[type-arg]
        """Return the kernel of a custom operator: a collective, or attention. reads, makes: comma-separated names of
        the tensors that it reads and returns; inside: temporary tensors while it runs."""
        found = self._kernel(reads, makes, inside=inside)
        return found._replace(makes=tuple(made._replace(operator=True) for made in found.makes))

    def _attention(self) -> Iterator[Kernel]:
        """Yield the forward's kernels of the attention sublayer: from the block's input to the output that is added to
        the residual stream."""
        yield from self._normed("attention", INPUT, "attention.qkv.input")
        yield self._kernel("attention.qkv.input", "attention.qkv.output")
        yield from self._core()
        yield self._kernel("attention.output.input", "attention.output.product")
        if self.summed:
            yield self._operator("attention.output.product", "attention.output.sum")

    def forward(self) -> Iterator[Kernel]:
        """Yield the kernels of the block's forward in order."""
        added = "sum" if self.summed else "product"
        yield from self._attention()
        yield from self._normed("mlp", f"{INPUT}, attention.output.{added}", "mlp.up.input")
        yield self._kernel("mlp.up.input", "mlp.up.output")
        yield self._kernel("mlp.up.output", "mlp.down.input")
        yield self._kernel("mlp.down.input", "mlp.down.product")
        if self.summed:
            yield self._operator("mlp.down.product", "mlp.down.sum")
        last = f"mlp.down.{added}"
        over = {} if self.summed else {RESULT: last}
        yield self._kernel(f"{last}, {INPUT}, attention.output.{added}", RESULT, over=over)

    def _normed(self, name: str, reads: str, made: str) -> Iterator[Kernel]:
        """Yield the forward's kernels of a norm and of the all-gather over tp after it, if any. name: "attention" or
        "mlp"; reads: comma-separated names of the tensors that it reads; made: name of the result."""
        if self.gathers:
            yield self._kernel(reads, f"{name}_norm.scale, {name}_norm.output")
            yield self._operator(f"{name}_norm.output", made)
        else:
            yield self._kernel(reads, f"{name}_norm.scale, {made}")

    def _core(self) -> Iterator[Kernel]:
        """Yield the forward's kernels between the QKV product and the output product: rotary positions, all-to-alls,
        attention."""
        given = "attention.qkv.output"
        if self.rotated:
            yield self._rotated()
            given += ", attention.query, attention.key"
        if self.exchanged:
            yield self._kernel(given, "attention.exchanging")
            yield self._operator("attention.exchanging", "attention.exchanged")
            given = "attention.exchanged"
        yield from self._attended(given)

    def _attended(self, given: str) -> Iterator[Kernel]:
        """Yield the kernels of softmax(q kᵀ) v, including the masks and repeated keys that PyTorch's CUDA kernels need
        and the all-to-all after it. given: comma-separated names of the tensors that hold queries, keys and values."""
        if self.made:
            yield self._kernel(given, self.made)
            given += f", {self.made}"
        more = ", attention.log_sum" if self.at.ring or self.cuda else ""
        if self.exchanged:
            yield self._operator(given, f"attention.core{more}")
            yield self._operator("attention.core", "attention.output.input")
        else:
            yield self._operator(given, f"attention.output.input{more}")

    def _rotated(self, twice: bool = False) -> Kernel:
        """Return the kernel that applies rotary positions or norms to queries and keys; for narrow types it also writes
        wide (at least float32) copies. twice: it also writes copies for attention that is recomputed, separate from
        those for attention's backward."""
        names = "attention.query, attention.key"
        made = [names]
        if twice:
            made.append("attention.query.again, attention.key.again")
        if self.x < self.wide:
            made.append("attention.query.wide, attention.key.wide")
        return self._kernel("attention.qkv.output", ", ".join(made))

    @property
    def _rotated_apart(self) -> bool:
        """True if recomputed attention reads rotated queries and keys of its own, not those of attention's backward:
        for types narrower than float32, on CPU and without all-to-alls."""
        return self.x < self.wide and not self.exchanged and not self.cuda

    def backward(self) -> Iterator[Kernel]:
        """Yield the kernels of the block's backward in inductor's order, recomputed ones included."""
        config, kept = self.at.config, set(self.kept())
        added = f"attention.output.{'sum' if self.summed else 'product'}"
        given = GRADIENT
        if self.gathers:
            given = "mlp.down.product.gradient"
            yield self._operator(GRADIENT, given)
        made = "mlp.up.output.gradient"
        yield self._kernel(given, "mlp.down.input.gradient")
        over = {} if config.gated else {made: "mlp.down.input.gradient"}
        if "mlp.down.input" in kept:
            yield self._kernel(f"{given}, mlp.down.input", "weight gradient of down")
            yield self._kernel("mlp.up.output, mlp.down.input.gradient", made, over=over)
            yield self._kernel(f"{made}, mlp.up.input", "weight gradient of up")
        else:
            yield self._kernel("mlp.up.output, mlp.down.input.gradient", f"mlp.down.input, {made}", over=over)
            yield self._kernel(f"{given}, mlp.down.input", "weight gradient of down")
        normed = yield from self._product_gradient(made, "mlp.up.input", "mlp_norm")
        reads = f"{INPUT}, {added}, {normed}, {GRADIENT}"
        if "mlp.up.input" in kept:
            scale = ", mlp_norm.scale" if "mlp_norm.scale" in kept else ""
            yield self._kernel(reads + scale, "gradient between")
        else:
            again = "mlp_norm.output" if self.gathers else "mlp.up.input"
            yield self._kernel(reads, f"mlp_norm.scale, {again}, gradient between")
            if self.gathers:
                yield self._operator("mlp_norm.output", "mlp.up.input")
        if "mlp.down.input" not in kept:
            yield self._kernel(f"{made}, mlp.up.input", "weight gradient of up")
        yield from self._attention_backward(kept, added, normed)

    def _product_gradient(self, made: str, name: str, norm: str):  # type: ignore[no-untyped-def]
        """Yield the kernels of the input gradient of a matrix product, and of its sum over tp; return the name of the
        tensor that holds the result.

        made: name of the gradient of the product's output; name: name of the product's input, such as "mlp.up.input";
        norm: name of the norm before the product, such as "mlp_norm".
        """
        yield self._kernel(made, f"{name}.gradient")
        if not self.summed:
            return f"{name}.gradient"
        yield self._operator(f"{name}.gradient", f"{norm}.gradient")
        return f"{norm}.gradient"

    def _attention_backward(self, kept: set[str], added: str, mlp_normed: str) -> Iterator[Kernel]:
        """Yield the kernels of the attention sublayer's backward. kept: names of saved tensors; added: name of the
        attention output that the forward added to the residual stream; mlp_normed: name of the gradient of the second
        norm's output."""
        given = "gradient between"
        if self.gathers:
            given = "attention.output.product.gradient"
            yield self._operator("gradient between", given)
        yield self._kernel(given, "attention.output.input.gradient")
        recomputed = "attention.output.input" not in kept
        turns = self.rotated and "attention.query" not in kept and "attention.exchanged" not in kept
        if turns:
            yield self._rotated(twice=recomputed and self._rotated_apart)
        yield from self._core_backward(kept, recomputed)
        made = "attention.qkv.output.gradient"
        normed = yield from self._product_gradient(made, "attention.qkv.input", "attention_norm")
        reads = f"{INPUT}, {normed}, {mlp_normed}, {added}"
        last = "" if "attention.qkv.input" in kept else ", attention.qkv.input"
        if self.gathers and last:
            last = ", attention_norm.output"
        if "attention_norm.scale" in kept:  # gradients of norms first, that of the input when all else is done
            yield self._kernel(f"{reads}, attention_norm.scale, mlp_norm.scale", "")
            yield self._kernel(f"{given}, attention.output.input", "weight gradient of output")
            yield self._kernel(f"{made}, attention.qkv.input", "weight gradient of qkv")
            over = {INPUT_GRADIENT: "gradient between"}
            yield self._kernel(f"{INPUT}, {normed}, gradient between", INPUT_GRADIENT, over=over)
            return
        yield self._kernel(f"{reads}, gradient between", f"attention_norm.scale{last}, {INPUT_GRADIENT}")
        if self.gathers and last:
            yield self._operator("attention_norm.output", "attention.qkv.input")
        if recomputed and not self.cuda:
            yield from self._core_again()
        yield self._kernel(f"{given}, attention.output.input", "weight gradient of output")
        if self.at.config.query_key_norm:
            yield self._kernel("attention.query.gradient, attention.key.gradient, attention.qkv.output", "")
        yield self._kernel(f"{made}, attention.qkv.input", "weight gradient of qkv")

    def _core_again(self) -> Iterator[Kernel]:
        """Yield the kernels that recompute attention's output in the backward, for the weight gradient of the output
        product."""
        again = ".again" if self._rotated_apart else ""
        rotated = f", attention.query{again}, attention.key{again}" if self.rotated else ""
        yield from self._attended("attention.exchanged" if self.exchanged else f"attention.qkv.output{rotated}")

    def _core_backward(self, kept: set[str], recomputed: bool) -> Iterator[Kernel]:
        """Yield the kernels of the backward from the output product's input to the QKV product's output. kept: names of
        saved tensors; recomputed: attention's output was not saved and is computed again."""
        at = self.at
        reads = "attention.output.input.gradient, attention.qkv.output"
        heads, kv_heads = at.heads, at.kv_heads
        if self.rotated:
            reads += ", attention.query, attention.key"
        if self.exchanged:
            copies = max(1, at.layout.cp // kv_heads)
            heads, kv_heads = heads // at.layout.cp, kv_heads * copies // at.layout.cp
            if "attention.exchanged" not in kept:
                yield self._kernel(reads.partition(", ")[2], "attention.exchanging")
                yield self._operator("attention.exchanging", "attention.exchanged")
            yield self._operator("attention.output.input.gradient", "attention.core.gradient")
            reads = "attention.core.gradient, attention.exchanged"
        if self.cuda:
            if recomputed:
                yield from self._attended(reads.partition(", ")[2])
            elif self.made:
                yield self._kernel(reads.partition(", ")[2], self.made)
            reads += f", attention.output.input, attention.log_sum{f', {self.made}' if self.made else ''}"
        parts = "gradient of queries, gradient of keys, gradient of values"
        if at.ring:
            inside = tuple(ring_backward(at, self.window, self.x, self.wide))
            yield Kernel("attention", tuple(reads.split(", ")), (), inside=inside)
            yield self._operator(f"{reads}, attention.output.input, attention.log_sum", parts)
        else:
            tiles = () if self.cuda else tiled_backward(at, heads, kv_heads, self.kind, self.x, self.wide)
            yield self._operator(reads, parts, tuple(tiles))
        made = "attention.qkv.output.gradient"
        if self.exchanged:
            yield self._kernel(parts, "attention.exchanged.gradient")
            yield self._operator("attention.exchanged.gradient", "attention.exchanging.gradient")
            yield self._kernel("attention.exchanging.gradient", made)
        elif self.rotated:  # back in the type of sums; norms of queries and keys need it once more
            yield self._kernel("gradient of queries", f"attention.query.gradient, {made}")
            yield self._kernel("gradient of keys", "attention.key.gradient")
            yield self._kernel("gradient of values", "")
        else:
            yield self._kernel("gradient of queries", made)
            yield self._kernel("gradient of keys", "")
            yield self._kernel("gradient of values", "")
