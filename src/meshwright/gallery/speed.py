"""Worked examples of training time: FLOPs, days on a cluster, utilisation."""

from __future__ import annotations

from meshwright.gallery.explanation import ExampleWriter
from meshwright.planner.hardware.devices import peak_flops
from meshwright.spec.flops import forward_flops_per_token, training_flops_per_token
from meshwright.spec.parameters import parameter_table
from meshwright.spec.presets import preset

DAY = 86400.0


def explain_training_days_gpt3(writer: ExampleWriter) -> None:
    """Compute a worked example and append it to `writer`: FLOPs of GPT-3's training, and the days that it takes on
    1,024 GPUs."""
    tokens, parameters, config = 300e9, 175e9, preset("gpt3-175b")
    rough = 6 * parameters * tokens
    exact = training_flops_per_token(config, 2048) * tokens
    numel = parameter_table(config).numel
    writer.add_text(
        f"6 N T = 6 · 175·10⁹ · 300·10⁹ = {rough:.3g} FLOPs; with the {numel:,} parameters of the table "
        f"{6 * numel * tokens:.3g}, which is the paper's figure ({6 * numel * tokens / 1e15 / DAY:,.0f} PFLOP/s-days)."
    )
    forward = forward_flops_per_token(config, 2048)
    rows = [(name, f"{flops:.4g}", f"{flops / sum(forward.values()):.1%}") for name, flops in forward.items()]
    writer.add_table(
        "Forward FLOPs of a token, operation by operation (2,048 tokens, causal):", ("", "FLOPs", "share"), rows
    )
    writer.add_text(
        f"Three times that (backward: twice the forward) and 300 billion tokens: {exact:.4g}, {exact / rough - 1:+.1%} "
        "against 6 N T: the attention's products, and embeddings that are only looked up."
    )
    seconds = 8 * tokens * parameters / (1024 * 140e12)
    writer.add_text(
        "With full recomputation a step runs the forward twice: 8 T P / (n X) = 8 · 300·10⁹ · 175·10⁹ / "
        f"(1024 · 140·10¹²) = {seconds:,.0f} s = {seconds / DAY:.1f} days."
    )
    gpus = rough / (160e12 * 30 * DAY)
    writer.add_text(f"In 30 days at an achieved 160 TFLOP/s: {rough:.3g} / (160·10¹² · 30 · 86,400) = {gpus:.0f} GPUs.")
    writer.record_result("6NT", 6 * numel * tokens)
    writer.record_result("FLOPs, operation by operation", exact)
    writer.record_result("days on 1024 A100", seconds / DAY)
    writer.record_result("GPUs for 30 days", gpus)


def explain_training_days_llama(writer: ExampleWriter) -> None:
    """Compute a worked example and append it to `writer`: days that Llama 65B's training takes at its published tokens
    per second, and the model FLOPs utilisation of Llama-2-7B's training."""
    days = 1.4e12 / (380 * 2048) / DAY
    writer.add_text(f"65B: 1.4·10¹² tokens / (380 tokens/s · 2,048 GPUs) = {days:.1f} days.")
    peak = peak_flops("a100-80", "bf16")
    assert peak
    achieved = 6 * 65.2e9 * 380
    writer.add_text(
        f"6 N per token: 6 · 65.2·10⁹ · 380 = {achieved / 1e12:.1f} TFLOP/s a GPU, {achieved / peak:.1%} of the "
        f"{peak / 1e12:g} of an A100."
    )
    config, tokens, hours = preset("llama-2-7b"), 2e12, 184320
    numel = parameter_table(config).numel
    rough, exact = 6 * numel * tokens, training_flops_per_token(config, 4096) * tokens
    rate = exact / (hours * 3600)
    rows = [("6 N T", f"{rough:.4g}"), ("operation by operation, causal", f"{exact:.4g}"), ("GPU hours", f"{hours:,}"),
            ("TFLOP/s a GPU", f"{rate / 1e12:.1f}"), ("of the A100's peak", f"{rate / peak:.1%}"),
            ("days on 1,024 GPUs", f"{hours / 1024 / 24:.1f}")]  # fmt: skip
    writer.add_table("Llama-2-7B, 2·10¹² tokens of 4,096:", ("", "value"), rows)
    writer.record_result("65B, days", days)
    writer.record_result("65B, TFLOP/s a GPU", achieved / 1e12)
    writer.record_result("llama-2-7b, 6NT", rough)
    writer.record_result("llama-2-7b, TFLOP/s a GPU", rate / 1e12)


def explain_mfu(writer: ExampleWriter) -> None:
    """Compute a worked example and append it to `writer`: model FLOPs utilisation (MFU) of PaLM 540B by the formula of
    its paper's appendix, and of Llama-3-8B on H100 under three conventions."""
    parameters, layers, heads, head_dim, sequence = 540.35e9, 118, 48, 256, 2048
    rate, chips, peak = 238.3e3, 6144, 275e12
    dense, attention = 6 * parameters, 12 * layers * heads * head_dim * sequence
    share, without = ((rate * flops) / (chips * peak) for flops in (dense + attention, dense))
    writer.add_table(
        "PaLM 540B, L = 118, 48 heads of 256, 2,048 tokens:", ("", "value"),
        [("6 N", f"{dense:.5g} FLOPs a token"), ("attention, 12 L H Q T", f"{attention:.4g} FLOPs a token"),
         ("tokens per second", f"{rate:,.0f}"), ("peak of 6,144 chips", f"{chips * peak:.4g} FLOP/s"),
         ("MFU", f"{share:.1%}"), ("MFU without attention", f"{without:.1%}")],
    )  # fmt: skip
    writer.add_text(
        "12 L H Q T counts attention as if every token saw the whole sequence; causal attention needs half of it. "
        f"By that count: {rate * (dense + attention / 2) / (chips * peak):.1%}. Say which."
    )
    config, measured = preset("llama-3-8b"), 5762
    causal, full = (training_flops_per_token(config, 8192, causal) for causal in (True, False))
    h100 = peak_flops("h100-sxm", "bf16")
    assert h100
    rows = [("causal attention", f"{causal:.4g}", f"{measured * causal / h100:.1%}"),
            ("full attention", f"{full:.4g}", f"{measured * full / h100:.1%}"),
            ("full, 1,979 TFLOP/s (sparse): wrong", f"{full:.4g}", f"{measured * full / (2 * h100):.1%}")]  # fmt: skip
    writer.add_table(f"Llama-3-8B at {measured:,} tokens/s on each H100 ({h100 / 1e12:g} TFLOP/s dense), 8,192 tokens "
               "(torchtitan's figure for FSDP on 8 GPUs):", ("convention", "FLOPs a token", "MFU"), rows)  # fmt: skip
    writer.record_result("palm, MFU", share)
    writer.record_result("palm, MFU without attention", without)
    writer.record_result("llama-3-8b, MFU causal", measured * causal / h100)
