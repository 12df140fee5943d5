"""Emulated ranks as threads of one process: patches torch and Python so that each thread can run code written for a
process."""

from __future__ import annotations

import contextlib
import copy
import functools
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from meshwright.emulation.call_matcher import CallMatcher, Event
from meshwright.emulation.process_group import EmulatedGroup, EmulatedStore
from meshwright.emulation.process_state import ProcessState, World
from meshwright.emulation.scheduler import Failure, Scheduler
from meshwright.errors import UserError
from meshwright.terminal import print_message

_emulations: list[EmulatedRanks] = []


class EmulatedRanks:
    """Emulated ranks: threads of this process, of which one runs at a time. Use it as a context manager.

    world_size: number of ranks. initialized: True to initialize torch.distributed on each rank; False leaves that to
    the functions that run.

    Attributes:
        states: Process state of each rank, [rank].
        backend: Name that every process group reports as its backend; None: the name that the program requested.
    """

    backend: str | None = None  # reported backend of every group; None: the requested one

    def __init__(self, world_size: int, *, initialized: bool = True) -> None:
        """Store the arguments (see the class); the ranks are created by `with`."""
        self.world_size, self.initialized = world_size, initialized
        self.states: list[ProcessState] = []
        self._exits = contextlib.ExitStack()
        self._uncompiled = False
        self._without_signals = False

    def __enter__(self) -> EmulatedRanks:
        """Create the ranks and patch the process for them. Raises UserError if another emulation is running."""
        if _emulations:
            raise UserError("another emulation is running: one emulation at a time")
        outside = ProcessState.from_process()
        self.states = [ProcessState.create_for_rank(rank, self.world_size) for rank in range(self.world_size)]
        self.scheduler = Scheduler(self.states, outside)
        self.matcher = self._make_matcher()
        self._store = EmulatedStore(self.matcher)  # referenced here: torch's objects reference only its C++ half
        with contextlib.ExitStack() as stack:
            _emulations.append(self)
            stack.callback(_emulations.clear)
            self._patch_process(stack)
            stack.callback(self.scheduler.close)
            self._exits = stack.pop_all()
        if self.initialized:
            self.run(dist.init_process_group, "gloo")
        return self

    def __exit__(self, *_: object) -> None:
        """End the ranks' threads and undo the patches."""
        self._exits.close()

    @property
    def events(self) -> list[Event]:
        """All communication calls so far, in order."""
        return self.matcher.events

    @property
    def failure(self) -> Failure | None:
        """First error of the last call of `run` or `run_each`, with its rank and traceback; None if there was none."""
        return self.scheduler.failure

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call `function(*arguments)` on every rank, each with its own copy of the arguments; return the results,
        [rank].

        Raises the first error of a rank, after the other ranks have ended, and EmulationFailed for a deadlock. After an
        error, create a new `EmulatedRanks`: calls that were in flight stay incomplete.
        """
        copies: Sequence[tuple[Any, ...]] = [copy.deepcopy(arguments) for _ in range(self.world_size)]
        return self.run_each([partial(function, *of_rank) for of_rank in copies])

    def run_each(self, tasks: Sequence[Callable[[], Any]]) -> list[Any]:
        """Call tasks[r]() on rank r; return the results, indexed by rank. Raises the same errors as `run`."""
        return self.scheduler.run([partial(_run_task, task) for task in tasks])

    def _make_matcher(self) -> CallMatcher:
        """Return a new object that matches the communication calls of the ranks with each other."""
        return CallMatcher(self.scheduler)

    def _patch_process(self, stack: contextlib.ExitStack) -> None:
        """Patch functions of torch.distributed, torch and Python (process groups, store, sleep, signal handlers ...) so
        that each rank's thread can run code written for a process; closing `stack` restores them."""
        threads = torch.get_num_threads()
        stack.callback(torch.set_num_threads, threads)
        torch.set_num_threads(1)  # like ranks started by Meshwright
        for where, name, value in (
            (c10d, "_new_process_group_helper", self._make_group),
            (c10d, "rendezvous", self._rendezvous),
            (sys.modules["torch.distributed.rendezvous"], "rendezvous", _refuse_rendezvous),
            (dist, "TCPStore", _refuse_rendezvous),
            (torch, "compile", self._leave_uncompiled),
            (torch.multiprocessing, "spawn", _refuse_spawn),
            (torch.cuda, "is_available", lambda: False),
            (time, "sleep", self.scheduler.sleep),
            (threading.Event, "wait", self._make_event_wait()),
            (sys, "excepthook", sys.excepthook),
            (signal, "signal", self._make_signal()),
            (functools.cached_property, "__get__", _get_cached),
        ):
            stack.enter_context(mock.patch.object(where, name, value))
        isolate = torch._C._distributed_c10d._set_thread_isolation_mode  # type: ignore[attr-defined]
        isolate(True)
        stack.callback(isolate, False)

    def _rendezvous(self, url: str, rank: int = -1, world_size: int = -1, **_: Any) -> Iterator[tuple[Any, int, int]]:
        """Yield (store, rank, world size) of the running rank. Stand-in for torch.distributed's `rendezvous`; the
        arguments are those of `rendezvous`, and are ignored."""
        yield self._store, self.scheduler.current().index, self.world_size

    def _make_group(
        self, size: int, rank: int, ranks: list[int], backend: Any, store: Any, group_name: Any, **options: Any
    ) -> tuple[Any, Any]:
        """Make a process group for the running rank. Stand-in for torch.distributed's `_new_process_group_helper`,
        whose arguments it takes.

        size, rank: number of ranks, and rank in the group. ranks: global ranks of the group, empty for the default
        group. backend: name of the backend, which is only recorded. store: key-value store. group_name: name of the
        group. options: of these only `pg_tag` is used, the tag under which torch.distributed finds an existing group.
        Returns (group, store), or (torch's non-member marker, None) if this rank is not in `ranks`.
        """
        world: Any = c10d._world
        tag = options.get("pg_tag")
        if tag and (existing := c10d._find_pg_by_ranks_and_tag(tag, ranks)):
            return existing, world.pg_map[existing][1]
        if ranks and self.scheduler.current().index not in ranks:
            return c10d.GroupMember.NON_GROUP_MEMBER, None
        if not ranks and size != self.world_size:
            raise UserError(f"the script starts {size} ranks, {self.world_size} are emulated")
        if not ranks and isinstance(world, World):
            world.generation += 1
        group = EmulatedGroup(self.matcher, (world.generation, group_name), rank, tuple(ranks or range(size)))
        group._set_group_name(group_name)
        asked = "gloo" if backend == "undefined" else backend
        config = f"cpu:{self.backend}" if self.backend else str(c10d.BackendConfig(c10d.Backend(asked)))
        names = {"pg_tag": f"user:{tag}"} if tag else {"add_to_default_tag": True}
        c10d._register_pg_in_world(
            group, backend_name=backend, store=store, group_name=group_name, backend_config=config, **names
        )
        return group, store

    def _make_event_wait(self) -> Callable[..., bool]:
        """Return a stand-in for `threading.Event.wait`. A rank's wait with a timeout, as in programs that poll an
        event, first lets other ranks run; any other wait is unchanged."""
        wait, scheduler = threading.Event.wait, self.scheduler

        def wait_or_yield(event: threading.Event, timeout: float | None = None) -> bool:
            """Wait for `event` for at most `timeout` seconds (None: without limit); return True if it is set. With a
            timeout, other ranks run meanwhile.
            """
            rank = scheduler.running
            if timeout is None or rank is None or rank.thread is not threading.current_thread():
                return wait(event, timeout)  # without a timeout, another thread of the program sets the event
            if not event.is_set():
                scheduler.sleep(timeout)
            return event.is_set()

        return wait_or_yield

    def _make_signal(self) -> Callable[[int, Any], Any]:
        """Return a stand-in for `signal.signal`. The stand-in ignores handlers that a rank's thread sets, because
        Python allows only the main thread to set handlers."""
        set_handler = signal.signal

        def set_or_ignore(number: int, handler: Any) -> Any:
            """Set the handler of signal `number` outside the ranks' threads, and return the previous one. In a rank's
            thread, change nothing, print one message and return the present handler.
            """
            if not any(rank.thread is threading.current_thread() for rank in self.scheduler.ranks):
                return set_handler(number, handler)
            if not self._without_signals:
                self._without_signals = True
                print_message("meshwright: signal handlers of emulated ranks are not installed")
            return signal.getsignal(number)

        return set_or_ignore

    def _leave_uncompiled(self, model: Any = None, **_: Any) -> Any:
        """Stand-in for `torch.compile`, without compilation: return the model or function `model` unchanged; for None,
        as in `@torch.compile(mode=...)`, return a decorator that returns its argument. The first call prints a message.
        """
        if not self._uncompiled:
            self._uncompiled = True
            print_message("meshwright: torch.compile is not emulated: the model runs uncompiled")
        return (lambda function: function) if model is None else model


def _run_task(task: Callable[[], Any]) -> Any:
    """Call `task` in the thread of an emulated rank and return the result of `task`. Backward passes run in this thread
    too, not in autograd's own threads."""
    with torch.autograd.set_multithreading_enabled(False):
        return task()


def _refuse_rendezvous(*_: Any, **__: Any) -> None:
    """Raise UserError. Stand-in for torch.distributed's `rendezvous` and `TCPStore`, which emulated ranks do not
    support; they use `init_process_group` only."""
    raise UserError(
        "emulated ranks support no rendezvous but torch.distributed.init_process_group; start such a script with "
        "meshwright run --ranks N"
    )


def _get_cached(self: Any, instance: Any, owner: Any = None) -> Any:
    """Stand-in for `functools.cached_property.__get__` without its lock: return the value of a cached property of
    `instance`, or the property `self` if `instance` is None. (Before Python 3.12 the original holds a lock, which would
    block other ranks if a property communicates.) owner: ignored."""
    if instance is None:
        return self
    if self.attrname not in instance.__dict__:
        instance.__dict__[self.attrname] = self.func(instance)
    return instance.__dict__[self.attrname]


def _refuse_spawn(*_: Any, **__: Any) -> None:
    """Raise UserError. Stand-in for `torch.multiprocessing.spawn`, as emulated ranks are threads."""
    raise UserError(
        "the script starts processes (torch.multiprocessing.spawn), but emulated ranks are threads: write it for "
        "torchrun, which starts the script once per rank"
    )
