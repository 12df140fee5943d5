"""The AMX kernels, with the tile instructions in software, on any processor with AVX512-BF16."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest

from meshwright.kernels import build, choice
from meshwright.kernels.library import Kernels
from meshwright.kernels.operations import Linear
from tests.kernels.conftest import compute_linear, one_sequence, unpack
from tests.kernels.product_checks import CONFIGS, check_experts, check_gated, check_heads, draw_floats

EMULATION = Path(__file__).with_name("amx_emulation.h")


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    """The kernels for AMX, compiled with the emulation, with 2 threads."""
    if "avx512_bf16" not in build.list_supported_instruction_sets():
        pytest.skip("no AVX512-BF16")
    library = tmp_path_factory.mktemp("amx") / "kernels.so"
    options = [f"-m{name}" for name in build.INSTRUCTION_SETS["avx512_bf16"]]
    sources = [str(path) for path in build.SOURCES if path.suffix == ".cpp"]
    command = [build.find_compiler(), *build.FLAGS, *options, "-w", "-include", str(EMULATION), "-o", str(library)]
    subprocess.run([*command, *sources], check=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "build", lambda *_: (library, "emulated"))
        kernels = choice._open_library("amx", print)
    kernels.set_threads(2)
    return kernels


def multiply_rounded(kernels: Kernels, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """x Wᵀ in float64, of both factors rounded to bfloat16 by the kernels."""

    def rounded(values: np.ndarray) -> np.ndarray:
        packed = kernels.pack(values.reshape(-1, 1), "bfloat16")
        found = unpack(packed)[0, : values.size, 0].astype(np.uint32) << 16
        return found.view(np.float32).astype(np.float64).reshape(values.shape)

    return rounded(x) @ rounded(weight).T


@pytest.mark.parametrize(("n", "k"), [(16, 32), (32, 64), (48, 64), (40, 33), (272, 1100), (1040, 96)])
def test_products_match_float64_and_rows_do_not_depend_on_the_batch(emulated: Kernels, n: int, k: int):
    """Odd numbers of panels, an incomplete last panel, depths beyond a section and not a multiple of a tile."""
    weight, x = draw_floats(1, n, k), draw_floats(0, 300, k)
    packed = emulated.pack(weight, "bfloat16")
    whole = compute_linear(emulated, x, packed)
    np.testing.assert_allclose(whole, multiply_rounded(emulated, x, weight), rtol=1e-4, atol=1e-4 * k**0.5)
    for begin, end in ((0, 1), (7, 8), (0, 33), (250, 300), (299, 300)):
        part = compute_linear(emulated, np.ascontiguousarray(x[begin:end]), packed)
        np.testing.assert_array_equal(part, whole[begin:end])


@pytest.mark.parametrize("accumulate", [False, True])
def test_products_leave_the_columns_beside_them(emulated: Kernels, accumulate: bool):
    x, out = draw_floats(0, 37, 70), draw_floats(2, 37, 96)
    packed, before = emulated.pack(draw_floats(1, 48, 70), "bfloat16"), out.copy()
    ops = emulated.create_op_list()
    ops.append(Linear(out[:, 16:64], x, packed, accumulate=accumulate))
    ops.run(one_sequence(37))
    np.testing.assert_array_equal(out[:, :16], before[:, :16])
    np.testing.assert_array_equal(out[:, 64:], before[:, 64:])
    product = compute_linear(emulated, x, packed)
    np.testing.assert_array_equal(out[:, 16:64], product + accumulate * before[:, 16:64])


@pytest.mark.parametrize(("name", "tokens"), [*((name, 50) for name in CONFIGS), ("normalised", 700)])
def test_experts_equal_the_model_layer(emulated: Kernels, name: str, tokens: int):
    check_experts(emulated, name, "bfloat16", tokens)


@pytest.mark.parametrize("rows", [5, 300])
def test_gated_products_and_those_of_heads_equal_float64(emulated: Kernels, rows: int):
    check_gated(emulated, "bfloat16", rows)
    check_heads(emulated, 3, "bfloat16", rows)
