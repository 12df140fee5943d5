"""Kernels and saved activations of a compiled mixture-of-experts block, in one graph. Most of routing is recomputed in
the backward. Kernels are in inductor's order (torch 2.13)."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.planner.memory.compiled_blocks import GRADIENT, INPUT, INPUT_GRADIENT, RESULT, CompiledBlock
from meshwright.planner.memory.inductor import Kernel, highest

Value = tuple[str, tuple[tuple[int, ...], str]]


AT_ONCE, SHARED_FIRST, EXPERTS_FIRST = "at once", "shared first", "experts first"
"""Orders of a backward: by what comes first of it."""
OUTPUT_WEIGHT, SHARED = "weight gradient of output", ("mlp.shared.up.output", "mlp.shared.down.input")


def _named(before: str, shape: tuple[int, ...], kind: str, *names: str) -> Iterator[Value]:
    """Return an iterator over (name, (`shape`, element type `kind`)) of tensors. name: `before` + each of `names`."""
    return ((before + name, (shape, kind)) for name in names)


class CompiledMixture(CompiledBlock):
    """Model of a mixture-of-experts block compiled by torch.compile, without ep: its kernels and saved activations."""

    def _values(self) -> Iterator[Value]:
        """Yield (name, (shape, element type)) of each tensor of the block, including router, experts, shared expert."""
        yield from super()._values()
        at, config = self.at, self.at.config
        tokens, hidden, width = at.rows * at.tokens, config.hidden, config.expert_intermediate // at.layout.tp
        chosen, copies, columns = config.experts_per_token, tokens * config.experts_per_token, self.columns
        router, down = "mlp.router.", "experts.down.output"
        whole, scores = (at.rows, at.tokens, hidden), (tokens, config.experts)
        yield from _named(
            "mlp.", whole, "x", "input", "product", "product.gradient", "experts.gradient", "input.gradient.sum"
        )
        yield from _named("mlp.", whole, "wide" if self._wide else "x", "input.gradient")
        yield from _named("mlp.", (at.rows, at.slice, hidden), "x", "sum")
        yield from _named(router, (tokens, hidden), "wide", "input", "input.again", "input.gradient")
        yield from _named(router, scores, "wide", "exponentials", "scores", "scores.gradient", "choice.gradient")
        yield from _named(router, scores, "x" if config.router == "softmax" else "wide", "logits", "logits.gradient")
        yield from _named(router, (tokens, chosen), "wide", "weights")
        yield from _named(router, (tokens, chosen), "x", "weights.narrow", "weights.gradient")
        yield from _named(router, (tokens, chosen), "index", "chosen")
        yield from _named(router, (at.rows, config.experts), "wide", "load")
        yield from _named(router, (config.experts,), "wide", "above_mean")
        yield from _named(router, (config.experts, hidden), "wide", "weight")
        yield from _named("mlp.experts.", (copies,), "index", "sorted", "order", "inverse")
        yield from _named("mlp.experts.", (config.experts,), "int32", "ends")
        yield from _named("mlp.experts.", (copies, hidden), "x", "up.input", "up.input.gradient")
        yield from _named("mlp.", (copies, hidden), "x", down, f"{down}.gradient", f"{down}.gradient.copy")
        yield from _named("mlp.experts.", (copies, 2 * width), "x", "up.output", "up.output.gradient")
        yield from _named("mlp.experts.", (copies, width), "x", "down.input", "down.input.gradient")
        both, shared = (at.rows, at.tokens, 2 * columns), "mlp.shared."
        yield from _named(shared, both, "x", "up.output", "up.output.gradient")
        yield from _named(shared, (*whole[:2], columns), "x", "down.input", "down.input.gradient")
        yield from _named(shared, whole, "x", "down.output", "down.output.gradient", "input.gradient")
        yield from _named(shared, whole, "x", "gate.input.gradient")
        yield from _named(shared, (*whole[:2], 1), "x", "gate", "gate.gradient")
        weights = {
            "the router": (config.experts, hidden), "experts' up": (config.experts, 2 * width, hidden),
            "experts' down": (config.experts, width, hidden), "shared up": (2 * columns, hidden),
            "shared down": (columns, hidden),
        }  # fmt: skip
        yield from ((f"weight gradient of {name}", (shape, "x")) for name, shape in weights.items())

    @property
    def columns(self) -> int:
        """Hidden columns of the shared expert on this rank."""
        return self.at.config.shared_intermediate // self.at.layout.tp

    def kept(self) -> list[str]:
        """Return the names of the activations that the block's forward saves for the backward, without its input."""
        config = self.at.config
        added = "sum" if self.summed else "product"
        shared = ["mlp.shared.up.output"] if config.shared_intermediate else []
        shared += ["mlp.shared.down.output", "mlp.shared.gate"] if config.shared_gate else []
        products = ["mlp.router.logits", "mlp.experts.up.output", "mlp.experts.down.output", *shared]
        dense = [name for name in super().kept() if not name.startswith("mlp.")]
        gathered = ["mlp.input"] if self.gathers and self.again == "none" else []
        if self.again != "full":
            return [*dense, *gathered, *products]
        # What the partitioner has live from the second forward to the backward.
        dense = list(dict.fromkeys([*dense, f"attention.output.{added}", "mlp.input"]))
        wide = ["mlp.router.input", "mlp.router.weight"] if self._wide else []
        scores = ["mlp.router.scores"] if config.router == "softmax" else [*wide, "mlp.router.logits"]
        weights = ["mlp.router.weights" if config.normalise_choice else "mlp.router.weights.narrow"]
        loads = ["mlp.router.load"] if config.router_loss else []
        loads += ["mlp.router.above_mean"] if config.router_bias else []
        places = ["mlp.router.chosen", "mlp.experts.order", "mlp.experts.inverse", "mlp.experts.ends"]
        experts = [f"mlp.experts.{each}" for each in ("up.input", "up.output", "down.input", "down.output")]
        shared += ["mlp.shared.down.input"] if config.shared_intermediate else []
        return [*dense, *scores, *weights, *loads, *places, *experts, *shared]

    def forward(self) -> Iterator[Kernel]:
        """Yield the kernels of the block's forward in inductor's order."""
        added = f"attention.output.{'sum' if self.summed else 'product'}"
        yield from self._attention()
        yield from self._normed("mlp", f"{INPUT}, {added}", "mlp.input")
        yield from self._mixed()
        last = "mlp.experts.down.output, mlp.experts.inverse, mlp.router.weights"
        last += ", mlp.shared.down.output" if self.at.config.shared_intermediate else ""
        if self.summed:
            yield self._kernel(last, "mlp.product")
            yield self._operator("mlp.product", "mlp.sum")
            last = "mlp.sum"
        yield self._kernel(f"{last}, {INPUT}, {added}", RESULT)

    def _mixed(self) -> Iterator[Kernel]:
        """Yield the forward's kernels from the second norm's output to the outputs of experts and shared expert."""
        config = self.at.config
        yield from self._chosen("mlp.input")
        yield self._kernel("mlp.experts.order", "mlp.experts.inverse")
        yield self._kernel("mlp.experts.order, mlp.input", "mlp.experts.up.input")
        yield self._operator("mlp.experts.up.input, mlp.experts.ends", "mlp.experts.up.output")
        yield self._kernel("mlp.experts.up.output", "mlp.experts.down.input")
        yield self._operator("mlp.experts.down.input, mlp.experts.ends", "mlp.experts.down.output")
        if config.shared_intermediate:
            if config.shared_gate:
                yield self._kernel("mlp.input", "mlp.shared.gate")
            yield self._kernel("mlp.input", SHARED[0])
            yield self._kernel(*SHARED)
            yield self._kernel(SHARED[1], "mlp.shared.down.output")

    def _chosen(self, given: str) -> Iterator[Kernel]:
        """Yield the kernels that route tokens (top-k, sort). given: "mlp.input", or "mlp.router.logits" if saved."""
        softmax = self.at.config.router == "softmax"
        if given == "mlp.input":
            if not softmax and self.x < self.wide:
                yield self._kernel(given, "mlp.router.input, mlp.router.weight")
                given = "mlp.router.input, mlp.router.weight"
            yield self._kernel(given, "mlp.router.logits")
        made = "mlp.router.exponentials, mlp.router.scores" if softmax else "mlp.router.scores"
        yield self._kernel("mlp.router.logits", made)
        yield self._operator("mlp.router.scores", "mlp.router.weights, mlp.router.chosen")
        yield self._operator("mlp.router.chosen", "mlp.experts.sorted, mlp.experts.order")
        yield self._operator("mlp.experts.sorted", "mlp.experts.ends")

    def backward(self) -> Iterator[Kernel]:
        """Yield the kernels of the block's backward, in the order of inductor that has the lowest memory peak."""
        if "mlp.input" in self.kept():
            ways = [AT_ONCE]
        elif self._wide:
            ways = [EXPERTS_FIRST]
        else:
            ways = [SHARED_FIRST, *([EXPERTS_FIRST] if self.at.config.shared_intermediate else [])]
        yield from min((list(self._backward(way)) for way in ways), key=self._peak)

    def _peak(self, kernels: list[Kernel]) -> int:
        """Return the peak bytes of backward kernels in the given order, without temporaries inside custom operators."""
        given = {name: self.bytes(name) for name in (INPUT, GRADIENT, *self.kept())}
        weights = {made.name for kernel in kernels for made in kernel.makes if made.category == "gradients"}
        return highest([each._replace(inside=()) for each in kernels], given, {*weights, INPUT_GRADIENT}).bytes

    def _backward(self, way: str) -> Iterator[Kernel]:
        """Yield the kernels of the block's backward. way: their order, "at once", "shared first" or "experts first"."""
        kept, given = set(self.kept()), GRADIENT
        added = f"attention.output.{'sum' if self.summed else 'product'}"
        if way == AT_ONCE:
            yield from self._chosen_before(kept)
            if self.rotated and not self.exchanged and not self._wide and "attention.query" not in kept:
                yield self._rotated()
                kept.add("attention.query")
        if self.gathers:
            given = "mlp.product.gradient"
            yield self._operator(GRADIENT, given)
        mixtures = {AT_ONCE: self._at_once, SHARED_FIRST: self._shared_first, EXPERTS_FIRST: self._experts_first}
        yield from mixtures[way](given)
        normed = "mlp.input.gradient" if self._wide else ", ".join(self._parts())
        if self.summed:
            if normed != "mlp.input.gradient":
                yield self._kernel(normed, "mlp.input.gradient.sum")
                normed = "mlp.input.gradient.sum"
            yield self._operator(normed, "mlp_norm.gradient")
            normed = "mlp_norm.gradient"
        reads = f"{INPUT}, {added}, {normed}, {GRADIENT}"
        if "mlp_norm.scale" in kept:
            yield self._kernel(f"{reads}, mlp_norm.scale", "gradient between")
        elif way == AT_ONCE:
            yield self._kernel(reads, "mlp_norm.scale, gradient between")
        else:
            again = "mlp_norm.output" if self.gathers else "mlp.input"
            copies = ", mlp.experts.up.input" if way == EXPERTS_FIRST and not self._wide and not self.gathers else ""
            order = ", mlp.experts.order" if copies else ""
            yield self._kernel(reads + order, f"mlp_norm.scale, gradient between, {again}{copies}")
            if self.gathers:
                yield self._operator(again, "mlp.input")
            yield from self._weights_left(way)
        last = list(self._weights_last(given)) if way == EXPERTS_FIRST else []
        found = list(self._attention_backward(kept, added, normed))
        at = next(at for at, kernel in enumerate(found) if kernel.name == OUTPUT_WEIGHT)
        if way == AT_ONCE and "attention.output.input" in kept and (self.again == "full" or not self._wide):
            first = next(at for at, kernel in enumerate(found) if kernel.name == "attention.output.input.gradient")
            yield from [*found[:first], found[at], *found[first:at], *found[at + 1 :]]
        else:
            yield from [*found[:at], *last, *found[at:]]

    @property
    def _wide(self) -> bool:
        """True if the router multiplies float32 copies of its input and weight: sigmoid router, type below float32."""
        return self.at.config.router == "sigmoid" and self.x < self.wide

    def _copied(self, way: str) -> bool:
        """Return True if the experts' output gradient is written twice. way: order of the backward, "at once" ..."""
        config = self.at.config
        several = self.again == "none" and config.shared_intermediate > 0 and not config.normalise_choice
        return several and way != EXPERTS_FIRST

    def _parts(self) -> list[str]:
        """Return the names of the gradients (router and experts, shared expert, gate) that sum to the MLP input's."""
        config, found = self.at.config, ["mlp.input.gradient"]
        found += ["mlp.shared.input.gradient"] if config.shared_intermediate else []
        return found + (["mlp.shared.gate.input.gradient"] if config.shared_gate else [])

    def _chosen_before(self, kept: set[str]) -> Iterator[Kernel]:
        """Yield the kernels that recompute routing from the router's logits, unless `kept` (saved names) includes
        it."""
        if "mlp.router.chosen" in kept:
            return
        yield from self._chosen("mlp.router.logits")
        yield self._kernel("mlp.experts.order", "mlp.experts.inverse")

    def _shared_first(self, given: str) -> Iterator[Kernel]:
        """Yield the MLP's backward: shared expert, router, experts. given: name of the MLP's output gradient."""
        config, made = self.at.config, "mlp.experts.down.output.gradient"
        copied = self._copied(SHARED_FIRST)
        copy = f", {made}.copy" if copied else ""
        shared = config.shared_intermediate > 0
        if shared:
            yield from self._shared_backward(given, at_once=not config.shared_gate)
        yield from self._chosen("mlp.router.logits")
        reads = f"{given}, mlp.experts.order, mlp.router.weights"
        if shared:
            yield from self._choice_backward(f"{given}, mlp.experts.order")
            yield self._kernel(reads, f"{made}{copy}")
        else:
            made_too = f"mlp.experts.inverse, mlp.router.weights.gradient, {made}{copy}"
            yield self._kernel(f"{reads}, mlp.experts.down.output", made_too)
        yield from self._activation_backward(made)
        if not shared:
            yield self._weight_of_down(copied)
        yield self._operator("mlp.experts.up.output.gradient, mlp.experts.ends", "mlp.experts.up.input.gradient")
        reads = "mlp.experts.inverse, mlp.experts.up.input.gradient"
        if shared:
            yield self._kernel(reads, "mlp.experts.gradient")
        else:
            made = "mlp.router.scores.gradient, mlp.router.choice.gradient, mlp.router.logits.gradient"
            reads += ", mlp.router.chosen, mlp.router.weights, mlp.router.weights.gradient, mlp.router.scores"
            yield self._kernel(reads, f"{made}, mlp.experts.gradient")
        yield self._kernel("mlp.experts.gradient, mlp.router.logits.gradient", "mlp.input.gradient")
        if config.shared_gate:
            yield self._kernel("mlp.shared.gate.gradient", "mlp.shared.gate.input.gradient")

    def _choice_backward(self, given: str) -> Iterator[Kernel]:
        """Yield the kernel of the router logits' gradient. given: comma-separated names that it reads first."""
        scores = "mlp.router.scores" if self.at.config.router == "softmax" else "mlp.router.logits"
        reads = f"{given}, mlp.experts.down.output, mlp.router.weights, mlp.router.chosen, {scores}"
        made = "mlp.router.weights.gradient, mlp.router.scores.gradient, mlp.router.choice.gradient, "
        inverse = "" if "mlp.input" in self.kept() else "mlp.experts.inverse, "
        yield self._kernel(reads, f"{inverse}{made}mlp.router.logits.gradient")

    def _activation_backward(self, made: str) -> Iterator[Kernel]:
        """Yield the kernels from the experts' output gradient, called `made`, to their up product's output gradient."""
        yield self._operator(f"{made}, mlp.experts.ends", "mlp.experts.down.input.gradient")
        again = "" if self.again == "full" else "mlp.experts.down.input, "
        reads = "mlp.experts.up.output, mlp.experts.down.input.gradient"
        yield self._kernel(reads, f"{again}mlp.experts.up.output.gradient")

    def _weight_of_down(self, copied: bool = False) -> Kernel:
        """Return the kernel of the weight gradient of the experts' down product. copied: it reads a gradient's copy."""
        copy = ".copy" if copied else ""
        reads = f"mlp.experts.down.output.gradient{copy}, mlp.experts.down.input, mlp.experts.ends"
        return self._operator(reads, "weight gradient of experts' down")

    def _weight_of_up(self) -> Kernel:
        """Return the kernel of the weight gradient of the experts' up product."""
        reads = "mlp.experts.up.output.gradient, mlp.experts.up.input, mlp.experts.ends"
        return self._operator(reads, "weight gradient of experts' up")

    def _shared_backward(self, given: str, at_once: bool) -> Iterator[Kernel]:
        """Yield the shared expert's backward. given: name of its output gradient; at_once: weight gradients early."""
        there, weight = SHARED[1] in self.kept(), "weight gradient of shared down"
        if self.at.config.shared_gate:
            made = "mlp.shared.down.output.gradient"
            if self.again != "full":
                yield self._gate_backward(given)
            given = made
        if there:
            yield self._kernel(f"{given}, {SHARED[1]}", weight)
        yield self._kernel(given, "mlp.shared.down.input.gradient")
        again = "" if there else f"{SHARED[1]}, "
        yield self._kernel(f"{SHARED[0]}, mlp.shared.down.input.gradient", f"{again}mlp.shared.up.output.gradient")
        if at_once and not there:
            yield self._kernel(f"{given}, {SHARED[1]}", weight)
        if "mlp.input" in self.kept():
            yield self._kernel("mlp.shared.up.output.gradient, mlp.input", "weight gradient of shared up")
        yield self._kernel("mlp.shared.up.output.gradient", "mlp.shared.input.gradient")

    def _gate_backward(self, given: str) -> Kernel:
        """Return the kernel of the backward of the shared expert's gate. given: name of the MLP's output gradient."""
        made = "mlp.shared.gate.gradient, mlp.shared.down.output.gradient"
        return self._kernel(f"{given}, mlp.shared.gate, mlp.shared.down.output", made)

    def _weights_left(self, way: str) -> Iterator[Kernel]:
        """Yield weight gradients that wait for the recomputed norm. way: order, "shared first" or "experts first"."""
        config = self.at.config
        if way == EXPERTS_FIRST:
            yield self._weight_of_up()
            return
        if config.shared_intermediate:
            if config.shared_gate:
                yield self._kernel(f"mlp.shared.down.output.gradient, {SHARED[1]}", "weight gradient of shared down")
            yield self._kernel("mlp.shared.up.output.gradient, mlp.input", "weight gradient of shared up")
            yield self._weight_of_down(self._copied(way))
        yield self._kernel("mlp.experts.order, mlp.input", "mlp.experts.up.input")
        yield self._weight_of_up()
        yield self._kernel("mlp.router.logits.gradient, mlp.input", "weight gradient of the router")

    def _experts_first(self, given: str) -> Iterator[Kernel]:
        """Yield the MLP's backward: experts, router, shared expert. given: name of the MLP's output gradient."""
        config, made = self.at.config, "mlp.experts.down.output.gradient"
        yield from self._chosen("mlp.router.logits")
        yield self._kernel(f"{given}, mlp.experts.order, mlp.router.weights", made)
        yield from self._activation_backward(made)
        yield self._operator("mlp.experts.up.output.gradient, mlp.experts.ends", "mlp.experts.up.input.gradient")
        yield self._weight_of_down()
        yield from self._choice_backward(f"{given}, mlp.experts.order")
        if self._wide:
            yield self._kernel("mlp.router.logits.gradient", "mlp.router.input.gradient")
        else:
            yield self._kernel("mlp.experts.inverse, mlp.experts.up.input.gradient", "mlp.experts.gradient")
            yield self._kernel("mlp.experts.gradient, mlp.router.logits.gradient", "mlp.input.gradient")
        if config.shared_intermediate:
            yield from self._shared_backward(given, at_once=False)
        if config.shared_gate:
            yield self._kernel("mlp.shared.gate.gradient", "mlp.shared.gate.input.gradient")
        if self._wide:
            yield self._all_parts("mlp.input.gradient, mlp.experts.up.input")

    def _weights_last(self, given: str) -> Iterator[Kernel]:
        """Yield the weight gradients of router and shared expert. given: name of the MLP's output gradient."""
        router = "mlp.input"
        if self._wide:
            yield self._kernel("mlp.input", "mlp.router.input.again")
            router = "mlp.router.input.again"
        yield self._kernel(f"mlp.router.logits.gradient, {router}", "weight gradient of the router")
        if self.at.config.shared_intermediate:
            made = "mlp.shared.down.output.gradient" if self.at.config.shared_gate else given
            yield self._kernel(f"{made}, {SHARED[1]}", "weight gradient of shared down")
            yield self._kernel("mlp.shared.up.output.gradient, mlp.input", "weight gradient of shared up")

    def _at_once(self, given: str) -> Iterator[Kernel]:
        """Yield the MLP's backward, weight gradients as early as possible. given: name of the MLP's output gradient."""
        config, kept, made = self.at.config, self.kept(), "mlp.experts.down.output.gradient"
        if config.shared_gate and self.again == "full":
            yield self._gate_backward(given)
        yield from self._choice_backward(given)
        router = "mlp.router.input" if "mlp.router.input" in kept else "mlp.input"
        yield self._kernel(f"mlp.router.logits.gradient, {router}", "weight gradient of the router")
        if config.shared_intermediate:
            yield from self._shared_backward(given, at_once=True)
        if config.shared_gate:
            yield self._kernel("mlp.shared.gate.gradient", "mlp.shared.gate.input.gradient")
        there = "mlp.experts.up.input" in kept
        reads = f"{given}, mlp.experts.order, mlp.router.weights{'' if there else ', mlp.input'}"
        copied = self._copied(AT_ONCE)
        copy = f", {made}.copy" if copied else ""
        yield self._kernel(reads, f"{made}{copy}{'' if there else ', mlp.experts.up.input'}")
        if there:
            yield self._weight_of_down()
        yield from self._activation_backward(made)
        if not there:
            yield self._weight_of_down(copied)
        yield self._weight_of_up()
        yield self._operator("mlp.experts.up.output.gradient, mlp.experts.ends", "mlp.experts.up.input.gradient")
        if self._wide:
            yield self._kernel("mlp.router.logits.gradient", "mlp.router.input.gradient")
            yield self._all_parts("mlp.input.gradient")
            return
        yield self._kernel("mlp.experts.inverse, mlp.experts.up.input.gradient", "mlp.experts.gradient")
        yield self._kernel("mlp.experts.gradient, mlp.router.logits.gradient", "mlp.input.gradient")

    def _all_parts(self, made: str) -> Kernel:
        """Return the kernel that sums the gradients of the MLP's input. made: comma-separated names that it writes."""
        shared = ", mlp.shared.input.gradient" if self.at.config.shared_intermediate else ""
        reads = "mlp.router.input.gradient, mlp.experts.inverse, mlp.experts.up.input.gradient"
        over = {"mlp.input.gradient": "mlp.router.input.gradient"}
        return self._kernel(f"{reads}, mlp.experts.order{shared}", made, over=over)

    def _rotated(self, twice: bool = False) -> Kernel:
        """Return the kernel that rotates queries and keys by position. twice: with copies for recomputed attention."""
        return super()._rotated(twice and self.x < self.wide)

    def _core_again(self) -> Iterator[Kernel]:
        """Yield the kernels that recompute attention's output in the backward."""
        if self.x < self.wide or self.exchanged or not self.rotated:
            yield from super()._core_again()
        else:
            yield from self._attended("attention.qkv.output, attention.query, attention.key")
