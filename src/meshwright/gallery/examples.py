"""Table of the worked examples, and the function that runs one: `meshwright.explain`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from meshwright.errors import UserError
from meshwright.gallery import memory, numerics, parameters, pipelines, products, reductions, speed
from meshwright.gallery.explanation import ExampleWriter, Explanation
from meshwright.names import unknown


@dataclass(frozen=True)
class Example:
    """Definition of a worked example: a published number or formula, and the function that recomputes it step by step.

    Attributes:
        title: Heading.
        published: The number or formula that is recomputed, as papers print it.
        source: Paper and section.
        run: Function that computes the example and appends its steps and results to an `ExampleWriter`.
        commands: `meshwright` command lines that show more on the subject.
        files: Source files with Meshwright's own code for the same computation, relative to the package.
        mistake: Frequent error in texts, and what is right; empty if none is known.
    """

    title: str
    published: str
    source: str
    run: Callable[[ExampleWriter], None]
    commands: tuple[str, ...]
    files: tuple[str, ...]
    mistake: str = ""


MEGATRON = "Shoeybi et al. 2019, Megatron-LM, arXiv:1909.08053, section 3"
THAKUR = "Thakur, Rabenseifner, Gropp 2005, IJHPCA 19(1)"
NARAYANAN = "Narayanan et al. 2021, arXiv:2104.04473"
KAPLAN = "Kaplan et al. 2020, arXiv:2001.08361, section 2.1 (6 FLOPs a parameter and token)"

EXAMPLES: dict[str, Example] = {
    "column-split": Example(
        "Column-split product of a linear layer",
        "Y = X [W₁ W₂] = [X W₁, X W₂]: no communication forward; the input's gradient is summed over ranks.",
        f"{MEGATRON}, Figure 3",
        products.explain_column_parallel_linear,
        ("meshwright collective all-gather ring --ranks 2 --bytes 64",
         "meshwright verify --layout tp2 --model llama-tiny"),
        ("parallel/tensor.py", "model/axis_operations.py", "spec/parameters.py"),
    ),
    "row-split": Example(
        "Row-split product of a linear layer",
        "Y = (X₁ X₂) (W₁; W₂) = X₁ W₁ + X₂ W₂: one all-reduce forward, none backward.",
        f"{MEGATRON}, Figure 3",
        products.explain_row_parallel_linear,
        ("meshwright collective all-reduce ring --ranks 2 --bytes 64",
         "meshwright verify --layout tp2 --model llama-tiny"),
        ("parallel/tensor.py", "model/axis_operations.py"),
        "to believe that split and unsplit products are equal bit for bit: floating-point sums depend on their order, "
        "so that about half of the entries differ in the last bit; compare with a tolerance.",
    ),
    "ring-all-reduce": Example(
        "Ring all-reduce on 4 ranks, number by number",
        "2(n − 1) rounds; each rank sends 2(n − 1)/n of the vector.",
        "Patarasuk and Yuan 2009, Bandwidth optimal all-reduce algorithms, J. Parallel Distrib. Comput. 69(2)",
        reductions.explain_ring_all_reduce,
        ("meshwright collective all-reduce ring --ranks 4 --bytes 1MiB",),
        ("collectives/ring.py", "program/collective.py"),
        "a ring all-gather in one round: it takes n − 1, and the all-reduce 2(n − 1).",
    ),
    "tree-all-reduce": Example(
        "Tree all-reduce on 4 ranks, number by number",
        "A reduce and a broadcast over a binomial tree: 2 log₂ n rounds of the whole vector.",
        f"{THAKUR}, section 4",
        reductions.explain_tree_all_reduce,
        ("meshwright collective all-reduce binomial-tree --ranks 4 --bytes 1MiB",),
        ("collectives/binomial_tree.py",),
    ),
    "ring-tree-crossover": Example(
        "Vector size from which a ring beats a tree",
        "ring 2(n−1)α + 2(n−1)/n Sβ; tree 2 log₂ n (α + Sβ): trees win for short vectors, rings for long ones.",
        f"{THAKUR}, section 4",
        reductions.explain_ring_tree_crossover,
        ("meshwright collective all-reduce auto --ranks 8 --bytes 1MiB",),
        ("collectives/cost.py", "collectives/crossover.py"),
    ),
    "hierarchical-all-reduce": Example(
        "All-reduce on two tiers of links",
        "Reduce-scatter in the node, all-reduce across nodes of 1/g of the vector, all-gather in the node: "
        "RS_g(S) + AR_k(S/g) + AG_g(S).",
        "Cho et al. 2019, BlueConnect, MLSys 2019; the sum is the closed form of collectives/cost.py",
        reductions.explain_hierarchical_all_reduce,
        ("meshwright collective all-reduce hierarchical-scatter --ranks 8 --bytes 64MiB --topology nodes:2x4",),
        ("collectives/hierarchical.py", "collectives/cost.py"),
    ),
    "top-k-sparsification": Example(
        "Top-k sparsification with error feedback",
        "Each step sends the k largest of gradient + memory, and keeps the rest: nothing is lost, it is sent later.",
        "Stich et al. 2018, Sparsified SGD with Memory, arXiv:1809.07599, Algorithm 1",
        numerics.explain_top_k_sparsification,
        (),
        ("gallery/numerics.py",),
    ),
    "gradient-accumulation": Example(
        "Gradient accumulation equals one large batch",
        "The gradient of a batch is the mean of the gradients of its micro-batches, if all hold as many tokens.",
        "Goyal et al. 2017, arXiv:1706.02677, section 3",
        numerics.explain_gradient_accumulation,
        ('meshwright verify --layout "dp1 mb4" --model llama-tiny',),
        ("parallel/gradient_accumulation.py", "training/objective.py"),
        "a mean of micro-batch means where micro-batches hold different numbers of target tokens: sum the losses and "
        "divide once by all targets of the step.",
    ),
    "vocabulary-softmax": Example(
        "Softmax and loss over a vocabulary split between two ranks",
        "Ranks exchange a maximum, a sum and the target's logit per token, never the logits.",
        f"{MEGATRON} (fused cross entropy)",
        numerics.explain_vocabulary_softmax,
        ("meshwright verify --layout tp2 --model llama-tiny",),
        ("model/loss.py",),
    ),
    "online-softmax": Example(
        "Online softmax of ring attention over two blocks",
        "m = max(m₁, m₂), l = l₁ e^(m₁−m) + l₂ e^(m₂−m), o = (o₁ l₁ e^(m₁−m) + o₂ l₂ e^(m₂−m)) / l.",
        "Milakov and Gimelshein 2018, arXiv:1805.02867, section 3; Liu et al. 2023, Ring Attention, arXiv:2310.01889",
        numerics.explain_online_softmax,
        ("meshwright verify --layout cp2 --model llama-tiny",),
        ("parallel/ring_spans.py", "model/tiled_attention.py"),
    ),
    "expert-routing": Example(
        "Eight tokens, four experts, a capacity of two",
        "capacity = tokens / experts × capacity factor; tokens beyond it are dropped.",
        "Fedus et al. 2021, Switch Transformers, arXiv:2101.03961, section 2.2, equations 3 and 4",
        numerics.explain_expert_routing,
        ("meshwright verify --layout ep2 --model mixtral-tiny",),
        ("model/experts.py", "parallel/expert.py"),
        "to believe that a mixture needs only its active experts in memory: Mixtral 8x7B in 16 bits takes 93 GB, not "
        "26 GB, as all experts are resident.",
    ),
    "lora-parameters": Example(
        "Trainable parameters of LoRA",
        "GPT-3 175B: 4.7 M at rank 1 and 37.7 M at rank 8 on queries and values; Llama-2-7B at rank 8: 4,194,304.",
        "Hu et al. 2021, arXiv:2106.09685, section 4.2 and Table 4; Llama as the PEFT library prints it",
        parameters.explain_lora_parameters,
        ("meshwright plan llama-2-7b --cluster 2xa100-80 --sequence 4096 --batch 2",),
        ("spec/parameters.py", "gallery/parameters.py"),
    ),
    "gpt3-parameters": Example(
        "Parameters of GPT-3 175B, block by block",
        "175.0 billion: 12 L h² = 173.9 billion in the layers, the rest embeddings, biases and norms.",
        f"Brown et al. 2020, arXiv:2005.14165, Table 2.1; {NARAYANAN}, equation 2",
        parameters.explain_gpt3_parameters,
        ("meshwright plan gpt3-175b --cluster 1024xa100-80 --sequence 2048 --batch 1536 --layout 'dp16 tp8 pp8 mb96'",),
        ("spec/parameters.py", "spec/presets.json"),
    ),
    "llama-parameters": Example(
        "Parameters of Llama-3-8B and Llama-2-7B, block by block",
        "8,030,261,248 and 6,738,415,616.",
        "model files of meta-llama/Meta-Llama-3-8B and Llama-2-7b-hf; Dubey et al. 2024, arXiv:2407.21783, Table 3",
        parameters.explain_llama_parameters,
        ("meshwright plan llama-3-8b --cluster 8xh100-sxm --sequence 8192 --batch 64",),
        ("spec/parameters.py", "spec/presets.json"),
    ),
    "activation-memory": Example(
        "Activations of a transformer layer",
        "sbh (34 + 5 a s / h) bytes a layer; 5as/h = 80 for GPT-3, so that not storing attention saves 70%.",
        "Korthikanti et al. 2022, arXiv:2205.05198, equation 1, Table 2 and section 5",
        memory.explain_activation_memory,
        ("meshwright plan gpt3-175b --cluster 1024xa100-80 --sequence 2048 --batch 128 --layout 'dp2 tp8 pp64 mb64' "
         "--engine megatron",),
        ("planner/memory/published.py", "planner/memory/saved.py"),
    ),
    "zero-memory": Example(
        "ZeRO 1, 2 and 3: 7.5 billion parameters on 64 GPUs",
        "120 GB, 31.4 GB, 16.6 GB, 1.9 GB a GPU.",
        "Rajbhandari et al. 2020, ZeRO, arXiv:1910.02054, Figure 1",
        memory.explain_zero_memory,
        ("meshwright plan llama-2-7b --cluster 64xv100 --sequence 2048 --batch 64 --layout 'dp64 zero3'",),
        ("planner/memory/published.py", "parallel/zero.py"),
    ),
    "training-memory-7b": Example(
        "Memory to train a 7B model",
        "16 bytes a parameter in mixed precision with Adam: 2 + 2 + 12, and the activations.",
        "Rajbhandari et al. 2020, arXiv:1910.02054, section 3.1",
        memory.explain_training_memory_7b,
        ("meshwright plan llama-2-7b --cluster 8xa100-80 --sequence 4096 --batch 8 --layout 'dp8 zero3' --ledger",),
        ("planner/memory/ledger.py", "planner/memory/states.py"),
        "4 + 4 + 12 bytes for fp32 AdamW: fp32 keeps no master copy, 4 + 4 + 8 = 16 bytes (8.03 billion: 119.7 GiB). "
        "And 8 billion × 4 bytes = 30 GB: those are GiB.",
    ),
    "training-memory-175b": Example(
        "Memory to train a 175B model",
        "2.8 TB of model states: 35 GPUs of 80 GB for those alone.",
        "16 bytes a parameter: Rajbhandari et al. 2020, arXiv:1910.02054, section 3.1; 174.6 billion of them",
        memory.explain_training_memory_175b,
        ("meshwright plan gpt3-175b --cluster 64xa100-80 --sequence 2048 --batch 8 --layout 'tp8 pp8 mb8' --ledger",),
        ("planner/memory/ledger.py", "planner/memory/states.py"),
        "700 GB of fp32 weights on 10 GPUs of 80 GB: 9 are enough for weights alone.",
    ),
    "inference-memory-7b": Example(
        "Memory to serve a 7B model: weights and KV cache",
        "A token's keys and values take 2 · layers · kv width · 2 bytes: 800 KB for OPT-13B, 512 KiB for Llama-2-7B.",
        "Kwon et al. 2023, vLLM, arXiv:2309.06180, section 3",
        memory.explain_inference_memory_7b,
        ("meshwright plan llama-2-7b --serve --dtype bf16 --max-length 4096",),
        ("planner/serving/runners.py",),
    ),
    "inference-memory-175b": Example(
        "Memory to serve a 175B model",
        "350 GB of 16-bit weights: at least 5 GPUs of 80 GB; 4.7 MB of KV cache a token.",
        "Frantar et al. 2022, GPTQ, arXiv:2210.17323, section 1 (326 GB in multiples of 1024)",
        memory.explain_inference_memory_175b,
        ("meshwright plan gpt3-175b --serve --layout tp8 --device cuda --memory 80GiB --dtype bf16",),
        ("planner/serving/runners.py",),
    ),
    "bubble-gpipe": Example(
        "Bubble of GPipe",
        "(p − 1)/(m + p − 1) of the step, (p − 1)/m of the ideal time; all m micro-batches are in memory.",
        "Huang et al. 2019, GPipe, arXiv:1811.06965, section 2.3",
        pipelines.explain_gpipe_bubble,
        ("meshwright schedule gpipe --stages 4 --microbatches 8 --text",),
        ("schedules/synchronous.py",),
        "(1 − m)/(m + p − 1) for (p − 1)/(m + p − 1); and one of the two ratios printed where the other is meant: "
        "say which.",
    ),
    "bubble-1f1b": Example(
        "Bubble and memory of 1F1B",
        "The bubble of GPipe, with at most p micro-batches in memory in place of m.",
        f"{NARAYANAN}, section 2.2.1, equation of t_pb / t_id",
        pipelines.explain_1f1b_bubble,
        ("meshwright schedule 1f1b --stages 4 --microbatches 8 --text",),
        ("schedules/synchronous.py",),
        "to believe that 1F1B needs several weight versions: PipeDream does; PipeDream-flush, which all call 1F1B, "
        "does not.",
    ),
    "bubble-interleaved": Example(
        "Bubble of interleaved 1F1B",
        "(p − 1)/(v m) of the ideal time with v chunks per rank, for v times the transfers.",
        f"{NARAYANAN}, section 2.2.2",
        pipelines.explain_interleaved_bubble,
        ("meshwright schedule interleaved --stages 4 --microbatches 8 --chunks 2 --text",),
        ("schedules/interleaved.py",),
    ),
    "training-days-gpt3": Example(
        "Days to train GPT-3 175B",
        "3.14·10²³ FLOPs; on 1,024 A100 at 140 TFLOP/s each, 34 days.",
        f"Brown et al. 2020, arXiv:2005.14165, Table D.1; {NARAYANAN}, section 5.1; {KAPLAN}",
        speed.explain_training_days_gpt3,
        ("meshwright plan gpt3-175b --cluster 1024xa100-80 --sequence 2048 --batch 1536 "
         "--layout 'dp16 tp8 pp8 mb96 ac:full' --engine megatron",),
        ("spec/flops.py", "spec/work.py"),
        "800 GPUs for 30 days at an achieved 160 TFLOP/s: 760; 160 is achieved already, so no further utilisation "
        "factor.",
    ),
    "training-days-llama": Example(
        "Days to train Llama",
        "65B on 1.4 trillion tokens: 380 tokens/s a GPU on 2,048 A100, 21 days; Llama-2-7B: 184,320 GPU hours.",
        "Touvron et al. 2023, arXiv:2302.13971, section 2.4; Touvron et al. 2023, Llama 2, arXiv:2307.09288, Table 2",
        speed.explain_training_days_llama,
        ("meshwright plan llama-2-7b --cluster 64xa100-80 --sequence 4096 --batch 1024 --layout 'dp64 zero1 mb16'",),
        ("spec/flops.py", "spec/work.py"),
    ),
    "mfu": Example(
        "Model FLOPs utilisation from tokens per second",
        "PaLM 540B: 238.3 thousand tokens/s on 6,144 TPU v4 (275 TFLOP/s) is 46.2% MFU, 45.7% without attention.",
        "Chowdhery et al. 2022, PaLM, arXiv:2204.02311, section 4.1, Table 3 and appendix B",
        speed.explain_mfu,
        ("meshwright plan llama-3-8b --cluster 8xh100-sxm --sequence 8192 --batch 64 "
         "--layout 'dp8 zero3 mb8 ac:selective'",),
        ("spec/flops.py",),
        "1,979 TFLOP/s (bf16) as the peak of an H100: that is with 2:4 sparsity; dense is half, and so an MFU computed "
        "with it is half the true one.",
    ),
}  # fmt: skip


def explain(name: str) -> Explanation:
    """Recompute a published number or formula step by step.

    Args:
        name: An example such as `"ring-all-reduce"`; `meshwright explain` lists them.

    Returns:
        The published number or formula, its source, the steps with every number, and the results by name.

    Raises:
        UserError: The name is unknown.

    Examples:
        >>> import meshwright as mw
        >>> mw.explain("zero-memory").results["zero3, GB"]
        1.875
        >>> mw.explain("llama-parameters").results["llama-3-8b"]
        8030261248.0
    """
    if not isinstance(name, str) or name not in EXAMPLES:
        raise UserError(unknown("example", str(name), EXAMPLES, '"meshwright explain" lists them'))
    found, writer = EXAMPLES[name], ExampleWriter()
    found.run(writer)
    return Explanation(
        name, found.title, found.published, found.source, tuple(writer.steps), writer.results, found.mistake,
        found.commands, found.files,
    )  # fmt: skip
