"""Process-wide state that emulated ranks share (such as torch.distributed's groups and random generators): it is saved
and replaced whenever another rank runs."""

from __future__ import annotations

import ctypes
import os
import random
import sys
import sysconfig
from dataclasses import dataclass
from itertools import islice
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed.distributed_c10d as c10d

from meshwright.comm import mesh
from meshwright.flight_recorder import call_ring

_numpy: Any = np.random  # Any: the stubs do not export get_bit_generator

TORCH_SEED = 67280421310721  # of a new process (c10::detail default_rng_seed_val)
PYTHON = tuple(
    os.path.join(path, "")
    for path in {sys.prefix, sys.base_prefix, *map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib"))}
)
"""Directories of the Python installation and of its packages, each with a separator at its end."""


class World:
    """Stand-in for torch.distributed's private class `_World`, which holds the process groups of a process: one object
    per emulated rank, with the fields of `_World`."""

    def __init__(self) -> None:
        """Start without process groups."""
        self.default_pg: Any = None
        self.pg_map: dict[Any, Any] = {}
        self.pg_names: dict[Any, str] = {}
        self.pg_group_ranks: dict[Any, dict[int, int]] = {}
        self.pg_backend_config: dict[Any, str] = {}
        self.group_count = 0
        self.tags_to_pg: dict[str, list[Any]] = {}
        self.pg_to_tag: dict[Any, str] = {}
        self.pg_coalesce_state: dict[Any, list[Any]] = {}
        self.comms: list[Any] = []
        self.generation = 0  # default groups made so far


class ProcessState:
    """Process-wide state, such as random generators, of one emulated rank. Emulated ranks share a process, so the state
    of a rank is loaded into the process when the rank runs, and saved when it stops.

    The state is torch.distributed's process groups, environment variables, `__main__`, `sys.argv`, the modules of the
    script's directory, random states, default dtype, deterministic mode, and the mesh axes and call records of
    Meshwright's package `comm`.

    Attributes:
        world: Process groups, an object with the fields of torch.distributed's `_World`.
        environment: Environment variables, as the private dictionary of `os.environ` stores them.
        main: The module `__main__`.
        arguments: `sys.argv`.
    """

    def __init__(self, world: Any, environment: dict[Any, Any], main: ModuleType, arguments: list[str]) -> None:
        """Store the arguments (see the class); all other state is as in a new process."""
        self.world, self.environment, self.main, self.arguments = world, environment, main, arguments
        self.directory = ""  # of the script: modules below it are imported once for each rank
        self.modules: dict[str, ModuleType] = {}
        self._known_modules = len(sys.modules)
        self.axes: dict[str, list[mesh.Axis]] = {}
        self.writers: list[call_ring.CallWriter] = []
        self.dtype, self.deterministic = torch.get_default_dtype(), torch._C._get_deterministic_algorithms()
        self.torch_random, self.numpy_random, self.python_random = (
            torch.get_rng_state(), NumpyRandom.read(), random.getstate(),
        )  # fmt: skip

    @classmethod
    def from_process(cls) -> ProcessState:
        """Capture the process-wide state of this process as it is now: process groups, environment variables,
        `__main__` and `sys.argv`. Call this method while no emulated rank runs."""
        return cls(c10d._world, _environment().__dict__["_data"], sys.modules["__main__"], sys.argv)

    @classmethod
    def create_for_rank(cls, rank: int, ranks: int) -> ProcessState:
        """Create the state (environment variables, process groups, random generators) of a process that torchrun has
        just started as rank `rank` of `ranks` on one host.

        Python's and NumPy's generators, which a real process seeds at random, are seeded by the rank, so that runs can
        be repeated.
        """
        variables = {
            "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "GROUP_RANK": 0,
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500,
        }  # fmt: skip
        environment = dict(_environment().__dict__["_data"])
        environment |= {os.fsencode(name): os.fsencode(str(value)) for name, value in variables.items()}
        state = cls(World(), environment, sys.modules["__main__"], list(sys.argv))
        state.dtype, state.deterministic = torch.float32, False
        state.torch_random = torch.Generator().manual_seed(TORCH_SEED).get_state()
        state.numpy_random = NumpyRandom.from_seed(rank)
        state.python_random = random.Random(rank).getstate()
        return state

    def save(self) -> None:
        """Copy the process-wide state into this object when its rank stops running: torch.distributed's process groups,
        `__main__`, the script's modules, default dtype, deterministic mode, random states, mesh axes and call
        records."""
        self.world = c10d._world
        self.main, self.arguments = sys.modules["__main__"], sys.argv
        if self.directory:
            later = list(islice(sys.modules.items(), self._known_modules, None))
            own = [name for name, module in later if _is_below(module, self.directory)]
            self.modules = {name: sys.modules.pop(name) for name in own}
        self.axes, self.writers = dict(mesh._axes), list(call_ring._of_process)
        self.dtype, self.deterministic = torch.get_default_dtype(), torch._C._get_deterministic_algorithms()
        self.torch_random, self.python_random = torch.get_rng_state(), random.getstate()
        self.numpy_random = self.numpy_random.read_again()

    def load(self) -> None:
        """Install the rank's state in the process, before the rank runs."""
        c10d._world = self.world
        self._load_environment()
        sys.modules["__main__"], sys.argv = self.main, self.arguments
        self._known_modules = len(sys.modules)
        sys.modules.update(self.modules)
        mesh._axes.clear()
        mesh._axes.update(self.axes)
        call_ring._of_process[:] = self.writers
        torch.set_default_dtype(self.dtype)
        torch._C._set_deterministic_algorithms(self.deterministic)
        torch.set_rng_state(self.torch_random)
        self.numpy_random.write()
        random.setstate(self.python_random)

    def _load_environment(self) -> None:
        """Install this state's environment variables in the process, for `os.environ`, C code and child processes."""
        before = _environment().__dict__["_data"]
        for name, _ in before.items() ^ self.environment.items():
            if name in self.environment:
                os.putenv(name, self.environment[name])
            else:
                os.unsetenv(name)
        _environment().__dict__["_data"] = self.environment


def _environment() -> Any:
    """Return `os.environ`, typed as Any for access to its private dictionary `_data`, which is replaced as a whole when
    another rank runs."""
    return os.environ


def _is_below(module: ModuleType, directory: str) -> bool:
    """Return True if a module is the user's own: imported from a file below the script's `directory`, and not part of
    Python, of an installed package or of meshwright."""
    file = getattr(module, "__file__", None) or ""
    python = (path for path in PYTHON if path.startswith(directory))  # excludes one that contains the script
    installed = (
        "site-packages" in file
        or (module.__name__ or "").partition(".")[0] == "meshwright"
        or file.startswith(tuple(python))
    )
    return file.startswith(directory) and not installed


@dataclass(frozen=True, slots=True)
class NumpyRandom:
    """State of NumPy's global random generator.

    words: copy of the memory of an MT19937 generator, which is copied and compared 50 times as fast as `state`; empty
    for another kind of generator. state: as `numpy.random.get_state` returns it. generator: the bit generator object,
    which a program may replace."""

    words: bytes
    state: dict[str, Any]
    generator: Any

    @classmethod
    def read(cls) -> NumpyRandom:
        """Return the current state of NumPy's global generator."""
        return cls(_copy_generator_memory(), np.random.get_state(legacy=False), _numpy.get_bit_generator())

    @classmethod
    def from_seed(cls, seed: int) -> NumpyRandom:
        """Return the state that `numpy.random.seed(seed)` gives the global generator."""
        seeded = np.random.RandomState(seed)
        return cls(b"", seeded.get_state(legacy=False), seeded._bit_generator)

    def read_again(self) -> NumpyRandom:
        """Return the current state of NumPy's global generator. If no number was drawn since this state was read or
        written, return this object; otherwise return a new object."""
        # NumPy draws normals in pairs: the second call returns the cached one without changing the memory.
        words = _copy_generator_memory()
        same = words and words == self.words and not self.state["has_gauss"]
        return self if same and _numpy.get_bit_generator() is self.generator else self.read()

    def write(self) -> None:
        """Set NumPy's global generator to this state."""
        if _numpy.get_bit_generator() is not self.generator:
            _numpy.set_bit_generator(self.generator)
        if not self.words or self.state["has_gauss"] or self.words != _copy_generator_memory():
            np.random.set_state(self.state)


def _copy_generator_memory() -> bytes:
    """Return a copy of the memory of NumPy's global generator if it is MT19937 (624 words and the position in them),
    else b""."""
    generator = _numpy.get_bit_generator()
    if not isinstance(generator, np.random.MT19937):
        return b""
    return ctypes.string_at(generator.ctypes.state_address, 4 * 625)
