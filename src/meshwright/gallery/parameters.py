"""Worked examples of parameter counts, from the parameter table: GPT-3, Llama, LoRA."""

from __future__ import annotations

from collections import Counter

from meshwright.gallery.explanation import ExampleWriter
from meshwright.spec.parameters import parameter_table
from meshwright.spec.presets import PRESETS, preset


def _count_by_tensor_kind(model: str) -> Counter[str]:
    """Count the parameters of a preset (`model`, such as "gpt3-175b") by kind of tensor; return {kind: number of
    parameters, summed over all layers}.

    A kind is the tensor's name without layer number, such as "self_attn.q_proj"; biases of a matrix have their own
    kind.
    """
    found: Counter[str] = Counter()
    for entry in parameter_table(preset(model)).entries:
        parts = entry.name.removeprefix("model.").removeprefix("transformer.").split(".")
        name = ".".join(part for part in parts if not part.isdigit() and part not in ("h", "layers"))
        kind = name.removesuffix(".weight").removesuffix(".bias")
        found[f"{kind}, biases" if name.endswith(".bias") and not kind.startswith("ln") else kind] += entry.numel
    return found


def explain_gpt3_parameters(writer: ExampleWriter) -> None:
    """Compute a worked example and append it to `writer`: parameters of GPT-3 175B, tensor by tensor."""
    config, found = preset("gpt3-175b"), _count_by_tensor_kind("gpt3-175b")
    h, layers, vocabulary = config.hidden, config.layers, config.vocabulary
    writer.add_text(
        f"h = {h:,}, L = {layers}, vocabulary V = {vocabulary:,}, {config.max_positions:,} positions; the output "
        "head shares the embedding's matrix."
    )
    formulas = {
        "wte": "V h", "wpe": "2048 h", "attn.c_attn": "L · 3 h²", "attn.c_attn, biases": "L · 3 h",
        "attn.c_proj": "L · h²", "attn.c_proj, biases": "L · h", "mlp.c_fc": "L · 4 h²", "mlp.c_fc, biases": "L · 4 h",
        "mlp.c_proj": "L · 4 h²", "mlp.c_proj, biases": "L · h", "ln_1": "L · 2 h", "ln_2": "L · 2 h", "ln_f": "2 h",
    }  # fmt: skip
    total = sum(found.values())
    rows = [(name, formulas[name], count, f"{count / total:.2%}") for name, count in found.items()]
    head = ("tensor", "formula", "parameters", "share")
    writer.add_table("Tensors of the parameter table, summed over the layers:", head, [*rows, ("total", "", total, "")])
    closed = 12 * layers * h * h * (1 + 13 / (12 * h) + (vocabulary + config.max_positions) / (12 * layers * h))
    writer.add_text(
        f"12 L h² = {12 * layers * h * h:,}. Narayanan's equation 2, 12 L h² (1 + 13/(12 h) + (V + s)/(12 L h)) = "
        f"{closed:,.0f}; the table has {total - round(closed):,} more: the final norm, 2 h. Rounded: 175 billion."
    )
    writer.record_result("parameters", total)
    writer.record_result("12 L h²", 12 * layers * h * h)


def explain_llama_parameters(writer: ExampleWriter) -> None:
    """Compute a worked example and append it to `writer`: parameters of Llama-3-8B and Llama-2-7B, tensor by tensor."""
    for model in ("llama-3-8b", "llama-2-7b"):
        config, found = preset(model), _count_by_tensor_kind(model)
        kv = config.kv_heads * config.head_dim
        writer.add_text(
            f"{model}: h = {config.hidden:,}, L = {config.layers}, {config.heads} heads of {config.head_dim}, "
            f"{config.kv_heads} for keys and values (kv = {kv:,}), f = {config.intermediate:,}, V = "
            f"{config.vocabulary:,}."
        )
        formulas = {
            "embed_tokens": "V h", "self_attn.q_proj": "L · h²", "self_attn.k_proj": "L · h kv",
            "self_attn.v_proj": "L · h kv", "self_attn.o_proj": "L · h²", "mlp.gate_proj": "L · h f",
            "mlp.up_proj": "L · h f", "mlp.down_proj": "L · f h", "input_layernorm": "L · h",
            "post_attention_layernorm": "L · h", "norm": "h", "lm_head": "V h",
        }  # fmt: skip
        total = sum(found.values())
        rows = [(name, formulas[name], count, f"{count / total:.2%}") for name, count in found.items()]
        writer.add_table(f"{model}:", ("tensor", "formula", "parameters", "share"), [*rows, ("total", "", total, "")])
        published = PRESETS[model].parameters
        writer.add_text(f"Published: {published:,}; difference {total - (published or 0):,}.")
        writer.record_result(model, total)


def _count_adapters(model: str, names: tuple[str, ...], rank: int) -> int:
    """Return the number of parameters of LoRA adapters of rank `rank` on all matrices of a preset (`model`) whose name
    ends with one of `names`: rank x (rows + columns) each."""
    entries = [one for one in parameter_table(preset(model)).entries if one.name.endswith(names)]
    return sum(rank * sum(entry.shape) for entry in entries)


def explain_lora_parameters(writer: ExampleWriter) -> None:
    """Compute a worked example and append it to `writer`: parameters of LoRA adapters on GPT-3 175B and Llama-2-7B."""
    config = preset("gpt3-175b")
    h, layers = config.hidden, config.layers
    writer.add_text(
        "W + (α/r) B A: B has h × r numbers and A r × h; W is frozen. A matrix m × n gets r (m + n) parameters."
    )
    writer.add_text(
        f"GPT-3 175B, queries and values of {layers} layers: 2 · {layers} · r · ({h:,} + {h:,}). Its table has the "
        "three projections as one tensor, c_attn of h × 3h; LoRA takes two h × h blocks of it."
    )
    rows = []
    for rank in (1, 2, 4, 8, 64):
        count = 2 * layers * rank * 2 * h
        rows.append((f"{rank}", count, f"{count / parameter_table(config).numel:.4%}", f"{2 * count / 1e6:.1f} MB"))
        writer.record_result(f"gpt3-175b, rank {rank}", count)
    writer.add_table("GPT-3 175B:", ("rank", "parameters", "of the model", "fp16 checkpoint"), rows)
    names = ("q_proj.weight", "v_proj.weight")
    found, whole = _count_adapters("llama-2-7b", names, 8), parameter_table(preset("llama-2-7b")).numel
    writer.add_text(
        f"Llama-2-7B, rank 8 on q_proj and v_proj, from the table's shapes: {found:,}; of {whole + found:,} with "
        f"the adapter {found / (whole + found):.4%}, as PEFT prints them. All seven matrices of a layer: "
        f"{_count_adapters('llama-2-7b', ('_proj.weight',), 8):,}."
    )
    writer.add_text(
        "Memory: gradients and Adam states, 14 of the 16 bytes a parameter, are needed for the adapter alone; the "
        "frozen weights keep 2 bytes each. Adapters are trained by [adapter] of a recipe."
    )
    writer.record_result("llama-2-7b, rank 8", found)
    writer.record_result("llama-2-7b, share", found / (whole + found))
