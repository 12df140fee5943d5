"""Choice of the instruction set of the kernels: measured once for each processor model and version of the kernels, and
stored with the other measurements of this machine. Torch-free."""

from __future__ import annotations

import ctypes
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from meshwright.errors import UserError
from meshwright.kernels import build, structures
from meshwright.kernels.build import KernelsUnavailable
from meshwright.kernels.library import Kernels
from meshwright.kernels.operations import Attention, LayerCache, Linear
from meshwright.layout import Layout
from meshwright.machine import may_measure, parse_measurement, write_measurement
from meshwright.planner.serving.ledger import KERNEL_DTYPES

PLAIN_TORCH = "torch"
"""Value in place of an instruction set: plain torch, without compiled kernels."""
INSTRUCTION_SET_VARIABLE = "MESHWRIGHT_INSTRUCTION_SET"
"""Environment variable that overrides the measured choice of the instruction set."""

_TURNS = 6
_PROCESSOR_FIELDS = ("vendor_id", "cpu family", "model", "model name", "stepping")


def load_kernels(instruction_set: str | None = None) -> Kernels | None:
    """Load the compiled library for an instruction set; build it first if necessary.

    instruction_set: "amx", "avx512_bf16", "avx512" or "avx2"; None: the instruction set in the environment variable
    `INSTRUCTION_SET_VARIABLE` or, if it is not set, the fastest on this processor.

    If the library cannot be used (no compiler, no supported instruction set, or a failed build), returns None without
    `instruction_set`; else raises UserError, as whoever chose it does not compute in plain torch either."""
    try:
        return open_kernels(instruction_set)
    except KernelsUnavailable as error:
        if instruction_set is None:
            return None
        raise UserError(f"the chosen {instruction_set} kernels cannot be used here: {error}") from None


def open_kernels(instruction_set: str | None = None, log: Callable[[str], None] = lambda line: None) -> Kernels:
    """Load the compiled library for an instruction set; build it first if necessary.

    instruction_set: "amx", "avx512_bf16", "avx512" or "avx2"; None: the fastest, from `choose_instruction_set`. log:
    called with lines before and after compiling.

    Raises `KernelsUnavailable` without a C++ compiler, on a processor other than x86-64 with AVX2, or where the system
    denies AMX. Raises `ValueError` for an instruction set that the processor lacks. If the environment variable
    `INSTRUCTION_SET_VARIABLE` names the instruction set, `UserError` is raised if the processor lacks it or it cannot
    be built."""
    name = choose_instruction_set(log) if instruction_set is None else instruction_set
    supported = build.list_supported_instruction_sets()
    if name not in supported:
        raise ValueError(f"this processor runs {', '.join(supported) or 'none of the kernels'}, not {name}")
    try:
        return _open_library(name, log)
    except KernelsUnavailable as error:
        if os.environ.get(INSTRUCTION_SET_VARIABLE) == name:
            reason = f"these kernels cannot be built or run here: {error}; leave it unset"
            raise UserError(f"{INSTRUCTION_SET_VARIABLE}={name}: {reason}") from None
        raise


def choose_instruction_set(log: Callable[[str], None] = lambda line: None) -> str:
    """Return the instruction set whose kernels are the fastest on this processor, "amx", "avx512_bf16", "avx512" or
    "avx2". Raises `KernelsUnavailable` if no kernels can be built.

    If the processor has several instruction sets, the first call benchmarks their kernels and stores the result on
    disk; each call does where it cannot be stored. With MESHWRIGHT_PROBE=0 nothing is measured, and the most capable
    instruction set is returned. An instruction set named by the environment variable `INSTRUCTION_SET_VARIABLE` is
    returned instead; `UserError` if the processor lacks the named one. log: called with lines before and after
    compiling, and one after a benchmark.
    """
    supported = build.list_supported_instruction_sets()
    if named := os.environ.get(INSTRUCTION_SET_VARIABLE):
        if named not in supported:
            runs = ", ".join(supported) or "none of the kernels"
            raise UserError(f"{INSTRUCTION_SET_VARIABLE}={named}: this processor runs {runs}")
        return named
    if not supported:
        raise KernelsUnavailable("the processor is no x86-64 with AVX2")
    compiler = build.find_compiler()
    if len(supported) == 1:
        return supported[0]
    if not may_measure():
        return next(_open_libraries(supported, log, numbered=False))[0]
    versions = {name: build.compute_version(compiler, name) for name in supported}
    key = {"processor": describe_processor(), "system": platform.release(), "versions": versions}
    stored = parse_measurement("kernels", key, dict)
    if stored is None or stored.get("instruction_set") not in supported:
        libraries = dict(_open_libraries(supported, log))
        began = time.perf_counter()
        seconds = measure_kernels(libraries)
        stored = {"instruction_set": find_fastest(seconds), "seconds": seconds}
        again = "once for this version"
        try:
            write_measurement("kernels", key, stored)
        except OSError as error:
            again = f"again at each start, as the result cannot be stored ({error.strerror})"
        names = ", ".join(map(build.format_instruction_set, libraries))
        log(f"measured the kernels for {names} in {time.perf_counter() - began:.1f} s, {again}")
    return str(stored["instruction_set"])


def prepare_kernels(dtype: str, layout: Layout, log: Callable[[str], None]) -> tuple[str, str]:
    """Compile the kernels that CPU ranks will load, unless they are in the cache; return (instruction set, ""). If no
    kernels can be used on this machine or for this dtype, log a warning and return ("torch", reason): the
    model is then computed in plain PyTorch.

    dtype: dtype of the weights, such as "bfloat16". layout: parallel layout of the
    ranks. log: called with each line of text for the user. Raises UserError if the instruction set that the user chose
    is not available, or if the layout needs kernels and none can be used.
    """
    reason = f"there are no kernels for {dtype}, only for {' and '.join(KERNEL_DTYPES)}"
    if dtype in KERNEL_DTYPES:
        try:
            return open_kernels(log=log).instruction_set, ""
        except KernelsUnavailable as error:
            reason = str(error)
    if layout.expert_parallel:
        raise UserError(f"ep{layout.ep} needs the compiled kernels, and {reason}; leave ep out")
    log(f"warning: computing in plain torch, many times slower than with the compiled kernels: {reason}")
    return PLAIN_TORCH, reason


def describe_processor() -> dict[str, str]:
    """Return the fields of /proc/cpuinfo that identify the processor's model: {field name: value}."""
    lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return {name: fields.get(name, "") for name in _PROCESSOR_FIELDS}


def find_fastest(seconds: Mapping[str, Mapping[str, float]]) -> str:
    """Return the fastest instruction set of a benchmark: the instruction set with the smallest geometric mean of
    seconds over all cases. seconds: {instruction set: {case: seconds}}.
    """
    return min(seconds, key=lambda name: float(np.prod(list(seconds[name].values()))))


def measure_kernels(candidates: Mapping[str, Kernels]) -> dict[str, dict[str, float]]:
    """Benchmark the libraries of several instruction sets on one thread. Return {instruction set: {case: seconds}},
    where the processor time of a case is the smallest of several runs.

    candidates: {instruction set: library}. Cases: bfloat16 matrix products and attention at the shapes of decode and
    prefill. In each of several rounds every candidate runs every case once."""
    runs = {name: _make_cases(kernels) for name, kernels in candidates.items()}
    seconds = {name: dict.fromkeys(cases, float("inf")) for name, cases in runs.items()}
    for _ in range(_TURNS):
        for name, cases in runs.items():
            for case, run in cases.items():
                began = time.thread_time()
                run()
                seconds[name][case] = min(seconds[name][case], time.thread_time() - began)
    return seconds


def _make_cases(kernels: Kernels) -> dict[str, Callable[[], None]]:
    """Return the benchmark cases by which the instruction set is chosen, as {name: function that runs the case once}.
    There are a matrix product and an attention for each of T = 1, 8 and 128 tokens (decode to prefill).

    Case "product T" multiplies T rows by a [1536, 1536] weight. Case "attention T" computes attention of the last T
    tokens of a sequence of 1,024 tokens, with 8 query heads of size 64 and 2 key-value heads. kernels: the compiled
    library to be timed.
    """
    random, heads, kv_heads, size, context = np.random.default_rng(0), 8, 2, 64, 1024
    matrix = kernels.pack(random.standard_normal((1536, 1536), np.float32), "bfloat16")
    keys, values = (
        kernels.allocate(shape, np.uint16) for shape in LayerCache.compute_shapes(context // 16, kv_heads, size)
    )
    cache = LayerCache(keys, values, size)
    cases: dict[str, Callable[[], None]] = {}
    for tokens in (1, 8, 128):
        x, out = random.standard_normal((tokens, 1536), np.float32), np.zeros((tokens, 1536), np.float32)
        products, attention = kernels.create_op_list(), kernels.create_op_list()
        products.append(Linear(out, x, matrix))
        qkv = x[:, : (heads + 2 * kv_heads) * size]
        attention.append(Attention(out[:, : heads * size], qkv, cache, heads, size**-0.5))
        step = _LastTokens(tokens, context)
        cases[f"product {tokens}"] = partial(products.run, step)
        cases[f"attention {tokens}"] = partial(attention.run, step)
    return cases


class _LastTokens:
    """Batch for benchmarks with one sequence of `context` tokens. Its last `tokens` tokens are computed; keys and
    values of the earlier tokens are in the cache. Has the arrays of `StepArrays`; token IDs are arbitrary."""

    def __init__(self, tokens: int, context: int) -> None:
        self.positions = np.arange(context - tokens, context, dtype=np.int32)
        self.tokens = self.slots = self.positions
        self.starts = np.array([0, tokens], np.int32)
        self.block_tables = np.arange(context // 16, dtype=np.int32)[None]
        self.output_rows = self.positions[:0]


def _open_libraries(
    instruction_sets: Sequence[str], log: Callable[[str], None], numbered: bool = True
) -> Iterator[tuple[str, Kernels]]:
    """Open the compiled libraries for `instruction_sets` in order; yield (instruction set, library) for each that can
    be opened. Raises `KernelsUnavailable` at the end if none could. log: called with lines before and after compiling.
    numbered: number these lines, as the caller opens all libraries and not only the first that can be opened."""
    missing = build.find_uncached(instruction_sets) if numbered else []
    reasons = []
    for name in instruction_sets:
        count = (missing.index(name) + 1, len(missing)) if name in missing else (1, 1)
        try:
            kernels = _open_library(name, log, count)
        except KernelsUnavailable as error:
            reasons.append(error)
        else:
            yield name, kernels
    if len(reasons) == len(instruction_sets):
        raise reasons[-1]


def _open_library(instruction_set: str, log: Callable[[str], None], count: tuple[int, int] = (1, 1)) -> Kernels:
    """Open the compiled library for `instruction_set` ("avx2" ...), from the cache or compiled now, and return it.
    Raises `KernelsUnavailable` if the library cannot be built or the system denies the use of AMX. log, count: as
    `build.build` takes them."""
    path, version = build.build(instruction_set, log, count)
    library = ctypes.CDLL(str(path))
    library.kernels_new_pool.restype = ctypes.c_void_p
    library.kernels_new_pool.argtypes = [ctypes.c_long]
    library.kernels_delete_pool.argtypes = [ctypes.c_void_p]
    library.kernels_run.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long, ctypes.c_void_p]
    library.kernels_size_of.restype = ctypes.c_long
    for which, structure in enumerate((structures.Op, structures.Step)):
        assert library.kernels_size_of(which) == ctypes.sizeof(structure), structure
    if not library.kernels_prepare():
        raise KernelsUnavailable("the system denies the use of AMX")
    return Kernels(library, instruction_set, version)
