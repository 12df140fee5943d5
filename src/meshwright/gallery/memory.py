"""Worked examples of memory: activations of a layer, ZeRO, training and serving models of 7B and 175B parameters."""

from __future__ import annotations

from math import ceil

from meshwright.gallery.charts import compute_zero_bytes, draw_zero_memory
from meshwright.gallery.explanation import ExampleWriter, format_size
from meshwright.layout import Layout
from meshwright.planner.cost.engines import ENGINES
from meshwright.planner.cost.micro_batch import MicroBatch
from meshwright.planner.memory.ledger import Ledger, ledger
from meshwright.planner.memory.published import published_layer, state_bytes
from meshwright.planner.serving.ledger import ServingSizes
from meshwright.planner.serving.runners import serving_ledger
from meshwright.spec.block_tables import BLOCK_TOKENS
from meshwright.spec.config import ModelConfig
from meshwright.spec.parameters import parameter_table
from meshwright.spec.presets import preset

GIB = 2**30


def explain_activation_memory(writer: ExampleWriter) -> None:
    """Compute a worked example and append it to `writer`: activation bytes that one GPT-3 layer saves for backward, by
    Megatron-LM's published formula and, for Meshwright's layer, by the planner."""
    config, rows, s = preset("gpt3-175b"), 1, 2048
    h, a = config.hidden, config.heads
    engine = ENGINES["megatron"]
    parts = published_layer(MicroBatch.of(config, Layout(), rows, s, engine=engine, kernel="scores"))
    unit = s * rows * h
    writer.add_text(f"b = {rows}, s = {s:,}, h = {h:,}, a = {a}: s b h = {unit:,}.")
    lines = [(name, f"{size / unit:g} sbh", round(size)) for name, size in parts.items()]
    total = sum(parts.values())
    lines.append(("total", f"{total / unit:g} sbh", round(total)))
    title = "What Megatron-LM's layer keeps for its backward, in 16 bits, with dropout:"
    writer.add_table(title, ("operation", "", "bytes"), lines)
    core = 5 * a * s / h
    writer.add_text(
        f"34 sbh = {34 * unit:,} and 5 a s² b = {5 * a * s * s * rows:,}: 5as/h = {core:g}, so that recomputing "
        f"attention alone (selective) saves {core / (34 + core):.0%}, or never writing the scores (flash)."
    )
    shared = []
    for words, notation, form in (
        ("tensor parallel", "tp8:nosp", "sbh (10 + 24/t + 5as/(ht))"),
        ("and sequence parallel", "tp8", "sbh/t (34 + 5as/h)"),
        ("and selective recomputation", "tp8 ac:selective", "34 sbh/t"),
        ("full recomputation, tp8", "tp8 ac:full", "2 sbh/t; 2 sbh in the paper"),
    ):
        at = MicroBatch.of(config, Layout.parse(notation), rows, s, engine=engine, kernel="scores")
        size = sum(published_layer(at).values())
        shared.append((words, form, format_size(size)))
        writer.record_result(notation, size)
    writer.add_table("With t = 8 (Table 2 of the paper):", ("", "formula", "bytes a layer"), shared)
    found = ledger(config, Layout.parse("dp1 bf16"), batch=rows, sequence=s, device="cuda")
    own = sum(
        item.bytes for item in found.items if item.name.startswith("layers.3.") and item.category == "activations"
    )
    writer.add_text(
        f"The planner's ledger of Meshwright's own layer (flash attention, no dropout), tensor by tensor: "
        f"{own:,} bytes, {own / unit:.4g} sbh: 34 less 2 for the dropout masks, plus the norms' statistics and a "
        "logarithm a row of scores."
    )
    writer.record_result("megatron", total)
    writer.record_result("5as/h", core)
    writer.record_result("meshwright", own)


def explain_zero_memory(writer: ExampleWriter) -> None:
    """Compute a worked example and append it to `writer`: Figure 1 of the ZeRO paper, model states per rank under ZeRO
    0 to 3."""
    parameters, ranks = 7.5e9, 64
    writer.add_text(
        "Ψ = 7.5 billion parameters, N = 64 GPUs, mixed precision with Adam: 2 Ψ bytes of parameters, 2 Ψ of "
        "gradients, K Ψ = 12 Ψ of optimizer states (fp32 parameters, momentum, variance)."
    )
    formulas = ("(2 + 2 + K) Ψ", "2Ψ + 2Ψ + KΨ/N", "2Ψ + (2 + K)Ψ/N", "(2 + 2 + K)Ψ/N")
    rows = []
    for level, formula in enumerate(formulas):
        parts = compute_zero_bytes(parameters, ranks, level)
        rows.append((f"zero{level}", formula, *(f"{size / 1e9:.2f}" for size in parts.values()),
                     f"{sum(parts.values()) / 1e9:.1f}"))  # fmt: skip
        writer.record_result(f"zero{level}, GB", sum(parts.values()) / 1e9)
    writer.add_table("GB on each GPU:", ("", "formula", "parameters", "gradients", "optimizer", "total"), rows)
    writer.add_figure("zero-memory", "Model states on a GPU under ZeRO 0 to 3", draw_zero_memory)
    wide = [state_bytes(level, ranks, wide_gradients=True).total * parameters / 1e9 for level in range(4)]
    writer.add_text(
        "Meshwright sums gradients in fp32: 2 + 4 + 12 = 18 bytes a parameter, and "
        + ", ".join(f"{size:.1f}" for size in wide)
        + " GB here. Communication: ZeRO 1 and 2 as data parallelism "
        "(2 Ψ a step of one micro-batch), ZeRO 3 half as much again."
    )


def explain_training_memory_7b(writer: ExampleWriter) -> None:
    """Compute a worked example and append it to `writer`: memory for training Llama-2-7B, by formula and by the planner
    on one and on eight ranks."""
    config = preset("llama-2-7b")
    _show_states(writer, config, "llama-2-7b")
    one = ledger(config, Layout.parse("dp1 bf16"), batch=1, sequence=4096, device="cuda")
    eight = ledger(config, Layout.parse("dp8 zero3 bf16"), batch=8, sequence=4096, device="cuda")
    again = ledger(config, Layout.parse("dp8 zero3 ac:full bf16"), batch=8, sequence=4096, device="cuda")
    _show_memory_table(writer, "One sequence of 4,096 tokens a rank:", {
        "dp1": one, "dp8 zero3": eight, "dp8 zero3 ac:full": again,
    })  # fmt: skip
    fp32 = parameter_table(preset("llama-3-8b")).numel * state_bytes(0, 1, narrow=False).total
    writer.add_text(f"In fp32, Llama-3-8B: 4 + 4 + 8 bytes of 8,030,261,248 parameters are {fp32 / GIB:.1f} GiB.")
    writer.record_result("dp1, GB", one.peak_bytes / 1e9)
    writer.record_result("llama-3-8b in fp32, GiB", fp32 / GIB)


def explain_training_memory_175b(writer: ExampleWriter) -> None:
    """Compute a worked example and append it to `writer`: memory for training GPT-3 175B, by formula and by the planner
    for one rank under layouts with tensor parallelism over 8 and pipeline parallelism over 8 ranks."""
    config = preset("gpt3-175b")
    total = _show_states(writer, config, "gpt3-175b")
    writer.add_text(f"{total / 1e9:,.0f} GB on GPUs of 80 GB: at least {ceil(total / 80e9)}, for the states alone.")
    layouts = ("tp8 pp8 mb8 bf16", "tp8 pp8 mb8 ac:full bf16", "dp8 zero1 tp8 pp8 mb8 bf16")
    found = {}
    for notation in layouts:
        layout = Layout.parse(notation)
        found[notation.removesuffix(" bf16")] = ledger(
            config, layout, batch=8 * layout.dp, sequence=2048, device="cuda"
        )
    _show_memory_table(writer, "A rank of the first stage, one sequence of 2,048 tokens a micro-batch:", found)
    weights = 175e9 * 4
    writer.add_text(
        f"Weights alone in fp32: 175 billion × 4 bytes = {weights / 1e9:g} GB: {ceil(weights / 80e9)} GPUs of 80 GB."
    )
    writer.record_result("GPUs of 80 GB for the states", ceil(total / 80e9))
    writer.record_result("GPUs of 80 GB for fp32 weights", ceil(weights / 80e9))


def _show_states(writer: ExampleWriter, config: ModelConfig, name: str) -> float:
    """Append to `writer` a table of the memory of a model's states (parameters, gradients, Adam's states) at 2 + 2 + 12
    bytes a parameter; return the sum of these states in bytes. config: the model. name: name of the model, for the
    heading."""
    numel, each = parameter_table(config).numel, state_bytes(0, 1)
    parts = {"parameters, bf16": each.weights, "gradients, bf16": each.gradients,
             "fp32 master weights": each.optimizer / 3, "Adam's first moment, fp32": each.optimizer / 3,
             "Adam's second moment, fp32": each.optimizer / 3}  # fmt: skip
    rows = [(part, f"{size:g}", format_size(size * numel)) for part, size in parts.items()]
    total = each.total * numel
    writer.add_table(f"{name}, {numel:,} parameters:", ("", "bytes each", "size"),
               [*rows, ("sum", f"{each.total:g}", f"{format_size(total)} ({total / GIB:,.1f} GiB)")])  # fmt: skip
    writer.record_result("states, GB", total / 1e9)
    return total


def _show_memory_table(writer: ExampleWriter, title: str, found: dict[str, Ledger]) -> None:
    """Append to `writer` a table of planned memory per rank at its peak, in GB: one line per category (parameters,
    activations ...), one column per layout.

    title: beginning of the table's title. found: {layout, such as "dp8 zero3": the planner's list of all allocations of
    a rank (ledger)}.
    """
    names = ("parameters", "gradients", "optimizer", "activations", "logits", "workspace", "communication")
    rows = [(name, *(f"{one.by_category()[name] / 1e9:.2f}" for one in found.values())) for name in names]
    rows.append(("peak", *(f"{one.peak_bytes / 1e9:.2f}" for one in found.values())))
    writer.add_table(f"{title} the planner's ledger at the peak, GB:", ("", *found), rows)
    writer.add_text(
        "Meshwright sums gradients in fp32 (4 bytes): 18 bytes a parameter in place of 16. Its ledger adds what the "
        "formula leaves out: activations, logits, kernels' workspaces, gathered parameters."
    )


def explain_inference_memory_7b(writer: ExampleWriter) -> None:
    """Compute a worked example and append it to `writer`: memory of Llama-2-7B's weights and KV cache for serving,
    compared with the KV cache of a 13B model and of a model with grouped-query attention."""
    token = _show_serving(writer, "llama-2-7b", 4096, 16)
    other = preset("llama-2-13b")
    opt = 2 * other.layers * other.kv_heads * other.head_dim * 2
    writer.add_text(
        f"The vLLM paper's 800 KB a token are OPT-13B's, with the shape of Llama-2-13B: 2 · {other.layers} · "
        f"{other.hidden:,} · 2 = {opt:,} bytes, 800 KiB."
    )
    grouped = preset("llama-3-8b")
    small = 2 * grouped.layers * grouped.kv_heads * grouped.head_dim * 2
    writer.add_text(
        f"Grouped queries: Llama-3-8B has {grouped.kv_heads} key-value heads in place of {grouped.heads}: "
        f"{small:,} bytes, a quarter of {token:,}."
    )
    writer.record_result("13B, bytes per token", opt)
    writer.record_result("llama-3-8b, bytes per token", small)


def explain_inference_memory_175b(writer: ExampleWriter) -> None:
    """Compute a worked example and append it to `writer`: memory of GPT-3 175B's weights and KV cache for serving, and
    the number of 80 GB GPUs."""
    token = _show_serving(writer, "gpt3-175b", 2048, 16)
    weights = 175e9 * 2
    total = parameter_table(preset("gpt3-175b")).numel * 2 + 16 * 2048 * token
    writer.add_text(
        f"175 billion × 2 bytes = {weights / 1e9:g} GB = {weights / GIB:.0f} GiB: {ceil(weights / 80e9)} GPUs of "
        "80 GB for the weights alone. The ranks of tp must divide the 96 heads, as 6 and 8 do; with the KV cache of 16 "
        f"such sequences {format_size(total)} exceed the 480 GB of 6: 8 GPUs."
    )
    four = parameter_table(preset("gpt3-175b")).numel / 2
    writer.add_text(f"In 4 bits the weights are {format_size(four)}: two GPUs of 80 GB.")
    writer.record_result("weights, GiB", weights / GIB)
    writer.record_result("GPUs of 80 GB", ceil(weights / 80e9))


def _show_serving(writer: ExampleWriter, model: str, length: int, sequences: int) -> int:
    """Append to `writer` the memory for serving a model in bf16: its weights, and its KV cache per token, per sequence
    and in all; return the KV cache's bytes per token.

    model: preset, such as "llama-2-7b". length: tokens of a sequence. sequences: number of sequences.
    """
    config = preset(model)
    found = serving_ledger(config, Layout(), ServingSizes(512, sequences, length, "bfloat16"))
    token = found.kv_block // BLOCK_TOKENS
    width = config.kv_heads * config.head_dim
    numel = parameter_table(config).numel
    writer.add_text(
        f"{model}: L = {config.layers}, {config.kv_heads} key-value heads of {config.head_dim}. KV cache of a token: "
        f"keys and values, 2 · {config.layers} · {width:,} · 2 bytes = {2 * config.layers * width * 2:,}; the "
        f"serving ledger's block of {BLOCK_TOKENS} tokens has {found.kv_block:,} bytes, {token:,} a token."
    )
    rows = [("weights", f"2 bytes × {numel:,}", format_size(2 * numel)),
            (f"KV cache of {length:,} tokens", f"{token:,} × {length:,}", format_size(token * length)),
            (f"KV cache of {sequences} such", "", format_size(token * length * sequences)),
            ("sum", "", format_size(2 * numel + token * length * sequences))]  # fmt: skip
    writer.add_table("bf16:", ("", "", "size"), rows)
    writer.record_result("bytes per token", token)
    writer.record_result("weights, GB", 2 * numel / 1e9)
    writer.record_result("KV cache of a sequence, GB", token * length / 1e9)
    return token
