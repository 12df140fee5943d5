"""Worked examples of numerics over ranks: sparsified gradients, accumulation, softmax in parts, expert routing.

The training code for these computes on torch tensors (files named in `examples.py`); here the same formulas run on
few numbers. Top-k sparsification and a capacity of experts exist in this file alone: Meshwright sends gradients whole
and drops no token.
"""

from __future__ import annotations

import numpy as np

from meshwright.gallery.execution import Floats, check_program, execute, format_vector
from meshwright.gallery.explanation import ExampleWriter
from meshwright.spec.presets import preset


def _cite_training_code(writer: ExampleWriter, files: str, more: str = "") -> None:
    """Append to `writer` a sentence that names the source files in which the training code does the same computation as
    this NumPy example.

    files: paths relative to the package, joined as text: "model/loss.py and model/experts.py". more: end of the
    sentence.
    """
    writer.add_text(f"The arithmetic is the example's own, in numpy; training computes it in {files}{more}.")


def keep_largest(values: Floats, k: int) -> Floats:
    """Return a copy of the vector `values` with all but the k entries of largest magnitude set to zero (top-k
    sparsification)."""
    kept = np.zeros_like(values)
    largest = np.argsort(-np.abs(values), kind="stable")[:k]
    kept[largest] = values[largest]
    return kept


def explain_top_k_sparsification(writer: ExampleWriter) -> None:
    """Compute a worked example and append it to `writer`: top-k sparsified gradients with error feedback. Each of four
    steps sends the two largest of eight entries and adds the unsent rest to the gradient of the next step."""
    gradients = np.array([
        [0.9, -0.1, 0.2, 0.05, -1.2, 0.3, 0.0, 0.1], [0.1, -0.4, 0.2, 0.05, 0.1, 0.3, 0.6, 0.1],
        [0.0, -0.4, 0.3, 0.05, -0.1, 0.3, 0.1, 0.1], [0.1, 0.1, 0.2, 0.05, 0.2, 0.0, 0.1, 0.5],
    ])  # fmt: skip
    writer.add_text("No command of this project sparsifies gradients: the computation is this example's own.")
    k, memory, sent, forgetful = 2, np.zeros(8), np.zeros(8), np.zeros(8)
    writer.add_text(
        "8 gradients, k = 2. Each step: u = gradient + memory; send the 2 largest entries of u; memory = the rest "
        "of u. Meshwright sends gradients whole: these lines are the example's own."
    )
    for step, gradient in enumerate(gradients):
        corrected = gradient + memory
        message = keep_largest(corrected, k)
        memory = corrected - message
        sent += message
        forgetful += keep_largest(gradient, k)
        rows = [("gradient", format_vector(gradient)), ("+ memory", format_vector(corrected)),
                ("sent", format_vector(message)), ("memory", format_vector(memory))]  # fmt: skip
        writer.add_table(f"Step {step + 1}:", ("", "values"), rows)
    total = gradients.sum(axis=0)
    writer.add_text(
        f"Sent so far + memory = {format_vector(sent + memory)}, the sum of all gradients: "
        f"{format_vector(total)}. Without the memory {format_vector(forgetful)} would have been sent: entry 5, 0.3 in "
        "three of the four steps, never."
    )
    writer.add_text(
        "Bytes: 2 values and 2 indices, 4 bytes each, are 16 in place of 32. k = 0.1% of a large gradient is "
        "0.2% of the bytes; ranks choose different entries, so that they all-gather in place of all-reduce."
    )
    writer.record_result("largest error of sent + memory", float(np.abs(sent + memory - total).max()))
    writer.record_result("sent, entry 5", sent[5])
    writer.record_result("sent without memory, entry 5", forgetful[5])
    writer.record_result("bytes of a step", 2 * k * 4)


def explain_gradient_accumulation(writer: ExampleWriter) -> None:
    """Compute a worked example and append it to `writer`: gradient accumulation, the gradient of a batch of eight
    samples compared with the mean over four micro-batches."""
    x, y, w = np.arange(1.0, 9.0), np.array([3.0, 5.0, 8.0, 9.0, 12.0, 13.0, 14.0, 18.0]), 1.5
    each = 2 * (w * x - y) * x
    writer.add_text(
        "Model y = w x at w = 1.5, loss = mean of (w x − y)², so that a sample's gradient is 2 (w x − y) x."
    )
    writer.add_table("Samples:", ("x", "y", "gradient"), list(zip(x.tolist(), y.tolist(), each.tolist(), strict=True)))
    parts = [part.mean() for part in np.split(each, 4)]
    whole, accumulated = each.mean(), np.mean(parts)
    writer.add_table("Four micro-batches of two samples:", ("micro-batch", "mean gradient"),
               [(f"{number}", float(part)) for number, part in enumerate(parts)])  # fmt: skip
    writer.add_text(f"Mean of the four: {accumulated:g}; gradient of all eight at once: {whole:g}.")
    uneven = [each[:6].mean(), each[6:].mean()]
    right = (6 * uneven[0] + 2 * uneven[1]) / 8
    writer.add_text(
        f"Micro-batches of 6 and 2 samples: means {uneven[0]:g} and {uneven[1]:g}; their plain mean "
        f"{np.mean(uneven):g} is wrong, the mean weighted by samples, {right:g}, is right. Meshwright sums the "
        "losses of tokens and divides once by the targets of the whole step, counted before the first backward."
    )
    _cite_training_code(writer, "training/objective.py and parallel/gradient_accumulation.py")
    writer.record_result("whole batch", float(whole))
    writer.record_result("accumulated", float(accumulated))
    writer.record_result("uneven, plain mean", float(np.mean(uneven)))
    writer.record_result("uneven, weighted", float(right))


def explain_vocabulary_softmax(writer: ExampleWriter) -> None:
    """Compute a worked example and append it to `writer`: vocabulary-parallel cross entropy, loss and gradient of one
    token with six logits on two ranks, and its three all-reduces."""
    logits, target = np.array([2.0, -1.0, 0.5, 3.0, 1.0, 0.0]), 4
    halves = np.split(logits, 2)
    writer.add_text(
        f"6 logits, rank 0 holds {format_vector(halves[0])}, rank 1 {format_vector(halves[1])}; target {target}."
    )
    largest = _execute_ring_all_reduce([float(half.max()) for half in halves], "maximum")
    sums = [float(np.exp(half - largest).sum()) for half in halves]
    total = _execute_ring_all_reduce(sums, "sum")
    found = [0.0, float(logits[target])]
    chosen = _execute_ring_all_reduce(found, "sum")
    writer.add_table(
        "Three all-reduces of one number a token:", ("", "rank 0", "rank 1", "all-reduced"),
        [("maximum", *(float(half.max()) for half in halves), largest), ("sum of e^(logit − maximum)", *sums, total),
         ("target's logit, 0 elsewhere", *found, chosen)],
    )  # fmt: skip
    loss = float(np.log(total)) + largest - chosen
    writer.add_text(
        f"loss = log {total:.6g} + {largest:g} − {chosen:g} = {loss:.6g}. Each token exchanges 3 "
        f"numbers in fp32, 12 bytes, in place of all its logits: {4 * preset('llama-3-8b').vocabulary:,} bytes for "
        "Llama 3's."
    )
    probabilities = [np.exp(half - largest) / total for half in halves]
    probabilities[1][target - 3] -= 1
    writer.add_text(
        f"Backward: softmax − one-hot, on each rank without communication: {format_vector(probabilities[0])} and "
        f"{format_vector(probabilities[1])}."
    )
    _cite_training_code(writer, "model/loss.py", ", and the all-reduces above are the ring program, executed")
    writer.record_result("loss", loss)
    writer.record_result("gradient of the target's logit", float(probabilities[1][target - 3]))


def _execute_ring_all_reduce(values: list[float], reduction: str) -> float:
    """Return the all-reduce of one number per rank, computed by executing the ring all-reduce program. values: [ranks].
    reduction: "sum" or "maximum"."""
    neutral = 0.0 if reduction == "sum" else -np.inf
    vectors = [[value] + [neutral] * (len(values) - 1) for value in values]
    return float(execute(check_program("all-reduce", "ring", len(values), reduction), vectors)[-1].values[0, 0])


def explain_online_softmax(writer: ExampleWriter) -> None:
    """Compute a worked example and append it to `writer`: ring attention of one query on two blocks of two keys each,
    whose partial results are merged by their maxima and sums of exponentials (online softmax)."""
    scores, values = np.array([1.0, 3.0, 5.0, 2.0]), np.array([[1.0, 0.0], [0.0, 2.0], [4.0, 1.0], [2.0, 2.0]])
    writer.add_text(
        "One query, four keys with scores 1 3 5 2; two ranks hold two keys and values each, and the blocks travel "
        "around the ring. A block yields m (maximum), l (sum of e^(s − m)) and o (weighted mean of values)."
    )
    maximum, total, output = -np.inf, 0.0, np.zeros(2)
    rows = []
    for step, block in enumerate((slice(0, 2), slice(2, 4))):
        m = scores[block].max()
        weights = np.exp(scores[block] - m)
        o = weights @ values[block] / weights.sum()
        rows.append((f"block {step}", float(m), float(weights.sum()), format_vector(o)))
        higher = max(maximum, m)
        old, new = total * np.exp(maximum - higher), float(weights.sum()) * np.exp(m - higher)
        output = (output * old + o * new) / (old + new)
        maximum, total = higher, old + new
        rows.append((f"after ring step {step}", float(maximum), float(total), format_vector(output)))
    writer.add_table("Blocks, and the merged state:", ("", "m", "l", "o"), rows)
    weights = np.exp(scores - scores.max())
    direct = weights @ values / weights.sum()
    writer.add_text(
        f"All four keys at once: o = {format_vector(direct)}, log-sum-exp = m + log l = "
        f"{scores.max() + np.log(weights.sum()):.6g}. The old state is multiplied by e^(3 − 5) = "
        f"{np.exp(-2):.6g} when the maximum rises from 3 to 5."
    )
    _cite_training_code(writer, "parallel/ring_spans.py and model/tiled_attention.py")
    writer.record_result("o[0]", float(output[0]))
    writer.record_result("o[1]", float(output[1]))
    writer.record_result("log-sum-exp", float(maximum + np.log(total)))


ROUTER_LOGITS = np.array([
    [2.0, 0.1, 0.3, 0.0], [1.5, 0.2, 0.1, 0.4], [0.3, 1.9, 0.2, 0.1], [2.2, 0.3, 0.6, 0.2],
    [0.1, 0.2, 0.4, 1.7], [0.2, 2.1, 0.3, 0.5], [1.8, 0.4, 0.5, 0.3], [0.6, 0.1, 1.4, 0.2],
])  # fmt: skip
"""Router logits of 8 tokens for 4 experts."""


def explain_expert_routing(writer: ExampleWriter) -> None:
    """Compute a worked example and append it to `writer`: mixture-of-experts routing of eight tokens, each to the best
    of four experts, with a capacity of two tokens an expert; tokens beyond it are dropped."""
    logits = ROUTER_LOGITS
    exps = np.exp(logits - logits.max(axis=1, keepdims=True))
    scores = exps / exps.sum(axis=1, keepdims=True)
    chosen = scores.argmax(axis=1)
    tokens, experts, factor = len(logits), logits.shape[1], 1.0
    capacity = int(tokens / experts * factor)
    writer.add_text(
        f"{tokens} tokens, {experts} experts, top 1, capacity factor {factor:g}: capacity = {tokens}/{experts} × "
        f"{factor:g} = {capacity} tokens an expert. Tokens are taken in order."
    )
    used, rows, dropped = [0] * experts, [], 0
    for token, expert in enumerate(chosen.tolist()):
        used[expert] += 1
        fits = used[expert] <= capacity
        dropped += not fits
        place = f"place {used[expert] - 1} of expert {expert}" if fits else f"dropped: expert {expert} is full"
        rows.append((f"{token}", format_vector(logits[token]), f"{expert}", float(scores[token, expert]), place))
    writer.add_table("Router logits, choice, weight, place:", ("token", "logits", "expert", "weight", ""), rows)
    fractions, means = np.bincount(chosen, minlength=experts) / tokens, scores.mean(axis=0)
    balance = experts * float(fractions @ means)
    writer.add_text(
        f"Chosen by {' '.join(map(str, used))} tokens: {dropped} of {tokens} dropped (their layer's output is the "
        f"residual alone), and {experts * capacity - (tokens - dropped)} places stay empty. Load-balancing loss "
        f"(equation 4, α = 1): {experts} Σ f·P = {balance:.6g}; 1 if balanced."
    )
    writer.add_text(
        "Meshwright drops no token: its dispatcher sends each expert as many as chose it (dropless), here up to "
        f"{max(used)} in place of {capacity}."
    )
    _cite_training_code(writer, "model/experts.py")
    writer.record_result("capacity", capacity)
    writer.record_result("dropped", dropped)
    writer.record_result("balance loss", balance)
    writer.record_result("tokens of the fullest expert", max(used))
