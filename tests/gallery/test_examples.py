"""Every worked example against the published figure, or against an independent computation."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from meshwright.gallery.examples import EXAMPLES, explain
from meshwright.gallery.execution import check_program, execute
from meshwright.gallery.explanation import Table
from meshwright.gallery.numerics import ROUTER_LOGITS
from meshwright.gallery.products import W, X

# Published figures: (example, result, figure, digits after the point that the text prints).
PUBLISHED = [
    ("zero-memory", "zero0, GB", 120, 0),
    ("zero-memory", "zero1, GB", 31.4, 1),
    ("zero-memory", "zero2, GB", 16.6, 1),
    ("zero-memory", "zero3, GB", 1.9, 1),
    ("llama-parameters", "llama-3-8b", 8030261248, 0),
    ("llama-parameters", "llama-2-7b", 6738415616, 0),
    ("lora-parameters", "llama-2-7b, rank 8", 4194304, 0),
    ("lora-parameters", "llama-2-7b, share", 0.000622, 6),
    ("activation-memory", "5as/h", 80, 0),
    ("inference-memory-7b", "13B, bytes per token", 800 * 1024, 0),
    ("inference-memory-7b", "bytes per token", 512 * 1024, 0),
    ("inference-memory-175b", "weights, GiB", 326, 0),
    ("inference-memory-175b", "GPUs of 80 GB", 5, 0),
    ("training-memory-7b", "llama-3-8b in fp32, GiB", 119.7, 1),
    ("training-memory-175b", "GPUs of 80 GB for fp32 weights", 9, 0),
    ("training-days-gpt3", "days on 1024 A100", 34, 0),
    ("training-days-gpt3", "GPUs for 30 days", 760, 0),
    ("training-days-llama", "65B, days", 21, 0),
    ("mfu", "palm, MFU", 0.462, 3),
    ("mfu", "palm, MFU without attention", 0.457, 3),
]


@pytest.mark.parametrize(("name", "result", "figure", "digits"), PUBLISHED)
def test_result_is_the_published_figure(name: str, result: str, figure: float, digits: int):
    assert round(results(name)[result], digits) == figure


@cache
def results(name: str) -> dict[str, float]:
    return dict(explain(name).results)


@pytest.mark.parametrize("name", ["column-split", "row-split"])
def test_split_product_equals_the_whole_product(name: str):
    found = results(name)
    assert found["difference from X W"] == 0 and found["Y[0, 3]"] == sum(X[0] * W[:, 3])
    assert found["bytes sent"] == 2 * 4 * 4  # 2 (n - 1)/n of 8 numbers on n = 2 ranks, in fp32


def test_row_split_shows_that_rounding_depends_on_the_order():
    found = results("row-split")
    assert found["ten times 0.1, one by one"] != found["ten times 0.1, on two ranks"] == 1


@pytest.mark.parametrize(
    ("name", "rounds", "sent"), [("ring-all-reduce", 6, ("share of the vector sent", 1.5)),
                                 ("tree-all-reduce", 4, ("most sent, vectors", 2))],
)  # fmt: skip
def test_all_reduce_takes_the_closed_form_and_sums(name: str, rounds: int, sent: tuple[str, float]):
    found = results(name)
    assert (found["rounds"], found[sent[0]], found["sum of chunk 0"]) == (rounds, sent[1], 1111)


@pytest.mark.parametrize("reduction", ["sum", "maximum"])
@pytest.mark.parametrize("algorithm", ["ring", "binomial-tree", "rabenseifner", "butterfly"])
def test_executed_program_reduces_as_numpy(algorithm: str, reduction: str):
    checked = check_program("all-reduce", algorithm, 4, reduction)
    vectors = np.random.default_rng(0).integers(-9, 9, (4, checked.program.slots)).astype(float)
    wanted = vectors.sum(axis=0) if reduction == "sum" else vectors.max(axis=0)
    assert (execute(checked, vectors.tolist())[-1].values == wanted).all()


def test_ring_and_tree_are_equally_fast_at_the_crossover():
    found = results("ring-tree-crossover")
    assert found["ring at the crossover, s"] == pytest.approx(found["tree at the crossover, s"], rel=1e-5)
    assert found["crossover, bytes"] == pytest.approx(8 * 5e-6 * 25e9 / 4.25)


def test_two_tiers_take_the_sum_of_their_phases():
    found = results("hierarchical-all-reduce")
    share, inner, outer = 2**24, 450e9, 25e9  # bytes, bytes per second
    phases = 2 * 3 * (3e-6 + share / inner) + 2 * (5e-6 + share / 2 / outer)
    assert found["simulated, s"] == pytest.approx(phases) == pytest.approx(found["phases, s"])
    assert found["ring, s"] == pytest.approx(14 * (5e-6 + 2**26 / 8 / outer))


def test_error_feedback_loses_nothing():
    found = results("top-k-sparsification")
    assert found["largest error of sent + memory"] < 1e-12
    assert found["sent, entry 5"] == pytest.approx(0.9) and found["sent without memory, entry 5"] == 0


def test_accumulated_gradient_is_that_of_the_batch():
    found, x = results("gradient-accumulation"), np.arange(1, 9)
    y = np.array([3, 5, 8, 9, 12, 13, 14, 18])
    assert found["accumulated"] == found["whole batch"] == found["uneven, weighted"] == (2 * (1.5 * x - y) * x).mean()
    assert found["uneven, plain mean"] != found["whole batch"]


def test_split_softmax_gives_the_loss_of_one_device():
    logits = [2, -1, 0.5, 3, 1, 0]
    found, total = results("vocabulary-softmax"), sum(map(math.exp, logits))
    assert found["loss"] == pytest.approx(math.log(total) - 1)
    assert found["gradient of the target's logit"] == pytest.approx(math.e / total - 1)


def test_merged_blocks_are_the_attention_over_all_keys():
    found, weights = results("online-softmax"), [math.exp(score) for score in (1, 3, 5, 2)]
    assert found["o[0]"] == pytest.approx((weights[0] + 4 * weights[2] + 2 * weights[3]) / sum(weights))
    assert found["o[1]"] == pytest.approx((2 * weights[1] + weights[2] + 2 * weights[3]) / sum(weights))
    assert found["log-sum-exp"] == pytest.approx(math.log(sum(weights)))


def test_tokens_beyond_the_capacity_are_dropped():
    found, counts = results("expert-routing"), [0] * 4
    for row in ROUTER_LOGITS.tolist():
        counts[row.index(max(row))] += 1
    assert found["capacity"] == 8 / 4 and found["dropped"] == sum(max(0, count - 2) for count in counts)
    assert found["tokens of the fullest expert"] == max(counts)
    scores = np.exp(ROUTER_LOGITS) / np.exp(ROUTER_LOGITS).sum(axis=1, keepdims=True)
    assert found["balance loss"] == pytest.approx(
        4 * sum(c / 8 * m for c, m in zip(counts, scores.mean(axis=0), strict=True))
    )


def test_gpt3_has_the_parameters_of_the_closed_form():
    found, h, layers = results("gpt3-parameters"), 12288, 96
    closed = layers * (12 * h * h + 13 * h) + (50257 + 2048) * h + 2 * h
    assert found["parameters"] == closed and found["12 L h²"] == 12 * layers * h * h
    assert f"{found['parameters'] / 1e9:.0f}" == "175"


@pytest.mark.parametrize(("rank", "millions"), [(1, 4.7), (8, 37.7)])
def test_lora_of_gpt3_has_the_parameters_of_table_4(rank: int, millions: float):
    assert round(results("lora-parameters")[f"gpt3-175b, rank {rank}"] / 1e6, 1) == millions


def test_activations_are_those_of_korthikanti_table_2():
    found, s, h, a, t = results("activation-memory"), 2048, 12288, 96, 8
    sbh = s * h
    assert found["megatron"] == sbh * (34 + 5 * a * s / h)
    assert found["tp8:nosp"] == pytest.approx(sbh * (10 + 24 / t + 5 * a * s / (h * t)))
    assert found["tp8"] == pytest.approx(sbh / t * (34 + 5 * a * s / h))
    assert found["tp8 ac:selective"] == pytest.approx(34 * sbh / t)
    assert found["tp8 ac:full"] == 2 * sbh / t
    statistics = 4 * (4 * s + a * s) + 16  # two norms' mean and deviation, attention's log-sums, a random state
    assert found["meshwright"] == 32 * sbh + statistics


def test_training_memory_is_16_bytes_a_parameter():
    assert results("training-memory-7b")["states, GB"] == pytest.approx(16 * 6.738415616)
    found = results("training-memory-175b")
    assert found["states, GB"] == pytest.approx(16 * 174.604259328)
    assert found["GPUs of 80 GB for the states"] == math.ceil(16 * 174.604259328 / 80)


def test_ledger_of_7b_holds_18_bytes_a_parameter_and_activations():
    assert results("training-memory-7b")["dp1, GB"] > 18 * 6.738415616 + 20


def test_kv_cache_is_two_vectors_a_layer():
    found = results("inference-memory-7b")
    assert found["llama-3-8b, bytes per token"] == 2 * 32 * 8 * 128 * 2 == found["bytes per token"] / 4
    assert found["KV cache of a sequence, GB"] == 4096 * 2 * 32 * 4096 * 2 / 1e9
    assert results("inference-memory-175b")["bytes per token"] == 2 * 96 * 12288 * 2


@pytest.mark.parametrize("name", ["bubble-gpipe", "bubble-1f1b"])
def test_bubble_is_the_published_ratio(name: str):
    found, p, m = results(name), 4, 8
    assert found["bubble of the step"] == pytest.approx((p - 1) / (m + p - 1))
    assert found["bubble to ideal"] == pytest.approx((p - 1) / m)
    assert found["makespan"] == (m + p - 1) * 3


def test_1f1b_holds_at_most_p_micro_batches():
    found = results("bubble-1f1b")
    assert (found["peak of rank 0"], found["peak of gpipe"]) == (4, 8)


def test_interleaving_divides_the_bubble_by_the_chunks():
    found, p, m = results("bubble-interleaved"), 4, 8
    for chunks in (1, 2, 4):
        assert found[f"bubble to ideal, {chunks} chunks"] == pytest.approx((p - 1) / (chunks * m))
    assert found["peak of rank 0"] == p * (1 + (p - 1) / (2 * p))
    peaks = [found[f"peak activations, {chunks} chunks"] for chunks in (1, 2, 4)]
    assert peaks[0] == p and peaks[1] > peaks[2] > p


@pytest.mark.parametrize("name", ["bubble-gpipe", "bubble-1f1b"])
def test_every_simulated_bubble_equals_its_formula(name: str):
    table = next(step for step in explain(name).steps if isinstance(step, Table) and step.head[0] == "p")
    assert len(table.rows) == 5
    for row in table.rows:
        assert row[2] == row[3] and row[4] == row[5]


def test_training_flops_are_those_of_gpt3_and_llama():
    gpt3, llama = results("training-days-gpt3"), results("training-days-llama")
    assert f"{gpt3['6NT']:.2e}" == "3.14e+23"
    assert gpt3["FLOPs, operation by operation"] == pytest.approx(gpt3["6NT"], rel=0.02)
    assert llama["llama-2-7b, 6NT"] == 6 * 6738415616 * 2e12
    assert llama["llama-2-7b, TFLOP/s a GPU"] > llama["llama-2-7b, 6NT"] / (184320 * 3600) / 1e12 > 120
    assert llama["65B, TFLOP/s a GPU"] == pytest.approx(6 * 65.2e9 * 380 / 1e12)


def test_causal_mfu_counts_half_of_the_attention():
    h, layers, s, peak = 4096, 32, 8192, 989e12
    matrices = 6 * (8030261248 - 128256 * h)  # all but the embedding, which is looked up
    flops = matrices + 3 * layers * 2 * 2 * h * (s + 1) / 2
    assert results("mfu")["llama-3-8b, MFU causal"] == pytest.approx(5762 * flops / peak, rel=1e-3)


def test_every_example_has_steps_results_and_a_test():
    tested = {name for name, *_ in PUBLISHED}
    source = Path(__file__).read_text()
    for name in EXAMPLES:
        explanation = explain(name)
        assert any(isinstance(step, Table) for step in explanation.steps) and explanation.results, name
        assert explanation.source and explanation.published, name
        assert explanation.commands or name == "top-k-sparsification"
        assert name in tested or source.count(f'"{name}"') >= 1, name
