"""`--memory`, and the number of KV blocks that it allows."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from meshwright.errors import UserError
from meshwright.launcher.host_memory import GPU, HostMemory
from meshwright.layout import Layout
from meshwright.planner.serving.ledger import ServingSizes
from meshwright.planner.serving.runners import CONTEXT_BYTES, serving_ledger
from meshwright.serving.memory import DEFAULT_POOL, parse_memory, plan_memory
from meshwright.spec.presets import preset

GIB = 2**30
BFLOAT16 = ServingSizes(dtype="bfloat16")
HOST = HostMemory(16 * GIB, 12 * GIB, "control group")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *(("0.5", 8 * GIB), ("0.9", 12 * GIB), ("1", 12 * GIB), ("12GiB", 12 * GIB), (" 1.5 gib", 1.5 * GIB)),
        *(("3GB", 3e9), ("2.3GiB", 2.3 * GIB)),
    ],
)
def test_memory_is_fraction_of_limit_or_size(text: str, expected: float):
    assert parse_memory(text, HOST) == int(expected)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("13GiB", "12.00 GiB are available now, of the control group's 16.00 GiB"),
        ("0", "above 0"),
        ("12", "such as 12GiB"),
        ("-1", "such as 0.9"),
        ("lots", "such as 0.9"),
        ("nan", "such as 0.9"),
        ("1e3GiB", "12.00 GiB are available"),
        ("5 parsecs", "such as 0.9"),
    ],
)
def test_invalid_memory_sizes_are_refused(text: str, reason: str):
    with pytest.raises(UserError, match=reason):
        parse_memory(text, HOST)


def test_kv_pool_has_default_bound_and_fills_given_memory():
    config = preset("llama-3.2-1b")
    ledger = plan_memory(config, Layout(), BFLOAT16, max_length=4096, hosts=[HOST])
    assert ledger.sizes.blocks == DEFAULT_POOL // ledger.kv_block
    ledger = plan_memory(config, Layout(), BFLOAT16, "0.75", 8192, hosts=[HOST])
    assert ledger.total <= 12 * GIB < ledger.total + ledger.kv_block
    tiny = plan_memory(preset("llama-tiny"), Layout(), ServingSizes(64, 4), "0.75", 64, hosts=[HOST])
    assert tiny.sizes.blocks == 2 * 4 * 4  # twice what four sequences hold


def test_memory_on_gpus_is_bounded_by_gpu_memory_only():
    config, host = preset("llama-3.2-1b"), HostMemory(80 * GIB, 78 * GIB, GPU)
    ledger = plan_memory(config, Layout(), BFLOAT16, "0.9", 4096, hosts=[host])
    assert ledger.total <= 72 * GIB < ledger.total + ledger.kv_block or ledger.sizes.blocks == 2 * 64 * 256
    assert ledger.front == 0 and ledger.stages[0].slack > CONTEXT_BYTES
    pair = plan_memory(config, Layout(tp=2), BFLOAT16, "0.9", 4096, hosts=[host, host])
    assert pair.items()["slack"] == 2 * pair.stages[0].slack
    smaller = HostMemory(40 * GIB, 38 * GIB, GPU)
    for layout, hosts in ((Layout(pp=2), [host, host]), (Layout(tp=2), [host, smaller])):
        ledger = plan_memory(
            config, layout, replace(BFLOAT16, token_budget=512, max_sequences=512), "0.9", 131072, hosts=hosts
        )
        least = 0.9 * min(each.total for each in hosts)
        taken = [stage.fixed + ledger.sizes.blocks * stage.kv_block for stage in ledger.stages]
        assert max(taken) <= least < max(taken) + max(stage.kv_block for stage in ledger.stages)
    with pytest.raises(UserError, match="of the GPU's 80.00 GiB"):
        plan_memory(config, Layout(), BFLOAT16, "79GiB", 4096, hosts=[host])


def test_memory_without_kernels_is_that_of_plain_torch():
    config, layout = preset("llama-3.2-1b"), Layout()
    sizes = replace(BFLOAT16, max_length=4096)
    plan = partial(plan_memory, config, layout, max_length=4096, hosts=[HOST])
    for ledger, expected in (
        (plan(BFLOAT16), serving_ledger(config, layout, sizes)),
        (plan(BFLOAT16, compiled=False), serving_ledger(config, layout, sizes, "torch")),
        (
            plan(replace(BFLOAT16, dtype="float16")),
            serving_ledger(config, layout, replace(sizes, dtype="float16"), "torch"),
        ),
    ):
        assert ledger.stages == expected.stages and ledger.total <= 0.9 * HOST.total
    assert serving_ledger(config, layout, sizes).stages != serving_ledger(config, layout, sizes, "torch").stages


def test_default_length_is_largest_that_fits():
    config = preset("llama-3.1-8b")
    host = HostMemory(18 * GIB, 18 * GIB, "machine")
    ledger = plan_memory(config, Layout(), BFLOAT16, "1", hosts=[host])
    assert 16 <= ledger.sizes.max_length < config.max_positions
    assert ledger.sizes.blocks >= ledger.blocks_of_longest
    with pytest.raises(UserError, match="does not fit"):
        plan_memory(config, Layout(), BFLOAT16, "1", 131072, hosts=[host])
    with pytest.raises(UserError, match="1 to 131072"):
        plan_memory(config, Layout(), BFLOAT16, "1", 131073, hosts=[host])
    with pytest.raises(UserError, match="--max-sequences 0"):
        plan_memory(config, Layout(), ServingSizes(512, 0), hosts=[host])
