"""Reasons why well-known model families are not read, beyond the missing record."""

from __future__ import annotations

_STATES = "layers with a recurrent state in place of attention are not computed"
_PARALLEL = "attention and MLP in parallel on one input are not computed"
_SPARSE = "attention to tokens that an indexer chooses is not computed"
_ENCODER = "models with an encoder and a decoder are not computed"
_ALIBI = "ALiBi positions are not computed"

UNREAD: dict[str, str] = {
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_moe", "kimi_linear", "olmo_hybrid"),
        "gated delta attention, with a recurrent state, is not computed"),
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba", "jamba", "bamba", "zamba", "zamba2", "nemotron_h", "falcon_h1",
        "granitemoehybrid", "rwkv", "recurrent_gemma", "lfm2", "lfm2_moe", "xlstm", "minimax"), _STATES),
    **dict.fromkeys(("cohere", "cohere2", "falcon", "gpt_neox", "gptj", "codegen", "phi"), _PARALLEL),
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), _SPARSE),
    **dict.fromkeys(("t5", "mt5", "umt5", "bart", "mbart", "t5gemma", "t5gemma2", "whisper"), _ENCODER),
    **dict.fromkeys(("mpt",), _ALIBI),
    **dict.fromkeys(("gemma3n", "gemma3n_text"), "embeddings of each layer and alternating updates are not computed"),
    "stablelm": "LayerNorm in layers with rotary positions and gated MLPs has no record",
    "granitemoeshared": "its shared expert, in addition to the routed ones, is not computed",
    "phimoe": "its routing (sparse mixer) is not computed",
    "dbrx": "its limit on queries, keys and values is not computed",
    "longcat_flash": "experts that return their input are not computed",
}  # fmt: skip
"""``model_type`` in ``config.json`` -> computation of the family that Meshwright lacks."""
