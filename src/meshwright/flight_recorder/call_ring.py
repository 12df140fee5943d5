"""The calls of one rank in a memory-mapped file that outlives it: written without locks or system calls, readable by
another process at any moment, whatever the rank is doing then. Free of torch.

    header | one count a group | records, the oldest overwritten first | heap of names

A record is one cache line. What does not change stands under a checksum, so a reader tells a record that is just being
written; the two times that come later are single aligned words. Names (sites, groups, places in the code, shapes) are
written once, to the heap, and records hold their numbers.
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
import tempfile
from collections.abc import Hashable, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic_ns
from types import CodeType, FrameType
from typing import Any
from zlib import crc32

from meshwright.flight_recorder.call_log import Call, Group, RankCalls

CAPACITY = 2048  # records: a step or two of a deep model
GROUPS = 512  # groups and pairs of ranks whose calls are counted
HEAP_BYTES = 2**17
FORM_BYTES = HEAP_BYTES // 2  # of the heap, for dtypes and shapes: these may be without end, all other names are few

_MAGIC = b"mwcalls1"
_HEADER = struct.Struct("<8sIIIIQ")  # magic, rank, ranks, capacity, groups, process
_BODY = struct.Struct("<Q4HQQQ")  # number; kind, group, shape, place; index in the group; payload bytes; posted
_NAME = struct.Struct("<HI")  # length, checksum
_GAVE_UP = 5  # word of the header
_COUNTS = 64
_RECORD_BYTES = 64
_WORDS = _RECORD_BYTES // 8
_CHECK, _WAITED, _DONE = 5, 6, 7  # words of a record behind its body

_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_MACHINERY = tuple(os.path.join(_PACKAGE, name) + os.sep for name in ("comm", "flight_recorder"))


def _records(groups: int) -> int:
    return _COUNTS + 8 * groups


def file_bytes(capacity: int = CAPACITY) -> int:
    """Size of the file of one rank."""
    return _records(GROUPS) + capacity * _RECORD_BYTES + HEAP_BYTES


def memory_file(rank: int, ranks: int) -> int:
    """The file of a rank as memory that has no name and is gone with the last process that holds it: its descriptor."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("meshwright-calls", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    _prepare(descriptor, rank, ranks)
    return descriptor


def named_file(path: Path | str, rank: int, ranks: int) -> int:
    """The file of a rank at `path`, made anew: its descriptor. Raises OSError where there is no room for it."""
    with suppress(FileNotFoundError):
        os.unlink(path)  # not written over: somebody may still have the old one mapped
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        _prepare(descriptor, rank, ranks)
    except OSError:
        os.close(descriptor)
        os.unlink(path)
        raise
    return descriptor


def _prepare(descriptor: int, rank: int, ranks: int) -> None:
    size = file_bytes()
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)  # now: a full disk would kill the writer later, by SIGBUS
    else:
        os.ftruncate(descriptor, size)
    os.pwrite(descriptor, _HEADER.pack(_MAGIC, rank, ranks, CAPACITY, GROUPS, 0), 0)


class CallWriter:
    """Writes the calls of this process. `descriptor`: of the rank's file; without one, nobody else reads them.

    `post`, `wait` and `done` together take one to three microseconds.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        if descriptor is None:
            self._memory = mmap.mmap(-1, file_bytes())
            rank, ranks, capacity, groups = 0, 1, CAPACITY, GROUPS
        else:
            self._memory = mmap.mmap(descriptor, 0)
            magic, rank, ranks, capacity, groups, _ = _HEADER.unpack_from(self._memory)
            assert magic == _MAGIC, magic
        _HEADER.pack_into(self._memory, 0, _MAGIC, rank, ranks, capacity, groups, os.getpid())
        self.descriptor = descriptor
        self._words: Any = memoryview(self._memory).cast("Q")  # one store a word
        self._capacity, self._records = capacity, _records(groups)
        self._heap = self._records + capacity * _RECORD_BYTES
        self._number = 0
        self._names = 0
        self._groups: dict[Hashable, int] = {}
        self._counts: list[int] = []
        self._numbers: dict[Hashable, int] = {}  # of names that are on the heap, and of kinds
        self._forms: dict[Hashable, int] = {}
        self._form_bytes = 0
        self._places: dict[tuple[int, int], int] = {}
        self._passed_over: set[int] = set()
        self._seen: list[CodeType] = []  # kept: their ids must not be others'
        self.name("")

    @property
    def number(self) -> int:
        """How many calls there have been."""
        return self._number

    def name(self, text: str) -> int:
        """Write a name to the heap and return its number; 0, the empty name's, when the heap is full."""
        if (known := self._numbers.get(text)) is not None:
            return known
        data = text.encode()[:60_000]
        start = self._heap + _NAME.size
        if start + len(data) + _NAME.size > len(self._memory) or self._names > 0xFFFF:
            return 0
        self._memory[start : start + len(data)] = data
        _NAME.pack_into(self._memory, self._heap, len(data), crc32(data) ^ 1)
        self._heap = start + len(data)
        number, self._names = self._names, self._names + 1
        self._numbers[text] = number
        return number

    def _form(self, dtype: Any, shape: Any) -> int:
        """The number of a dtype and shape that are new; 0, which is like any other, when their part of the heap is
        full."""
        text = f"form\t{str(dtype).removeprefix('torch.')}[{', '.join(map(str, shape))}]"
        if self._form_bytes + len(text) + _NAME.size > FORM_BYTES:
            self._form_bytes = FORM_BYTES  # for good: smaller ones would come and go
            return 0
        self._form_bytes += len(text) + _NAME.size
        number = self._forms[dtype, shape] = self.name(text)
        return number

    def group(self, ranks: Sequence[int], pair: tuple[int, int] | None = None) -> int:
        """The number of a group, whose calls are counted: all `ranks` of it make the same ones, in the same order.
        pair: the two of them (global ranks: from, to) between which messages keep their order."""
        key = (tuple(ranks), pair)
        if key not in self._groups:
            self._groups[key] = len(self._counts)
            self.name(f"group\t{len(self._counts)}\t{Group(*key).to_text()}")
            self._counts.append(0)
        return self._groups[key]

    def count(self, group: int) -> int:
        """How many calls of a group there have been."""
        return self._counts[group]

    def post(self, group: int, site: str, operation: str, axis: str, payload_bytes: int, dtype: Any, shape: Any) -> int:
        """Note that a call of `group` begins; returns its number, for `wait` and `done`. All names are written at their
        first use. A length that is another in every call stands in `shape` as "...": shapes take room for ever."""
        self._number = number = self._number + 1
        index = self._counts[group] = self._counts[group] + 1
        kind = self._numbers.get((site, operation, axis))
        if kind is None:
            kind = self.name(f"kind\t{site}\t{operation}\t{axis}")
            if kind:
                self._numbers[site, operation, axis] = kind
        form = self._forms.get((dtype, shape))
        if form is None:
            form = 0 if self._form_bytes == FORM_BYTES else self._form(dtype, shape)
        body = _BODY.pack(number, kind, group, form, self._place(), index, payload_bytes, monotonic_ns())
        start = self._records + number % self._capacity * _RECORD_BYTES
        self._memory[start : start + _BODY.size] = body
        words = self._words
        words[(start >> 3) + _CHECK] = crc32(body)
        if group < GROUPS:
            words[(_COUNTS >> 3) + group] = index
        return number

    def wait(self, number: int) -> None:
        """Note that the process waits for a call from now on."""
        if self._number - number < self._capacity:
            self._words[(self._records >> 3) + number % self._capacity * _WORDS + _WAITED] = monotonic_ns()

    def done(self, number: int) -> None:
        """Note that a call has come through."""
        if self._number - number < self._capacity:
            self._words[(self._records >> 3) + number % self._capacity * _WORDS + _DONE] = monotonic_ns()

    def pass_over(self, function: Any) -> None:
        """A call from `function` is one from its caller."""
        self._seen.append(function.__code__)
        self._passed_over.add(id(function.__code__))

    def give_up(self) -> None:
        """Note that this rank waited in vain and is about to end."""
        self._words[_GAVE_UP] = 1

    def read(self) -> RankCalls:
        """What another process would read."""
        return _read(bytes(self._memory))

    def _place(self) -> int:
        """The place in the code, outside comm/, that makes the call. A line number is looked up once a place."""
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            code = id(frame.f_code)
            if code not in self._passed_over:
                place = self._places.get((code, frame.f_lasti))
                if place is not None:
                    return place
                self._seen.append(frame.f_code)
                file, function = frame.f_code.co_filename, frame.f_code.co_qualname
                if not _is_machinery(file):
                    place = self.name(f"place\t{file.removeprefix(_PACKAGE)}:{frame.f_lineno} ({function})")
                    self._places[code, frame.f_lasti] = place
                    return place
                self._passed_over.add(code)
            frame = frame.f_back
        return 0


def _is_machinery(file: str) -> bool:
    """Whether a file of code is between the caller and us: comm/, torch's own, what a compiler has generated."""
    return file.startswith((*_MACHINERY, "<")) or "/torch/" in file or "torchinductor" in file


def read_calls(descriptor: int) -> RankCalls | None:
    """What the file behind `descriptor` says at this moment; None where it is no such file, or no process has opened
    it yet."""
    try:
        with mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) as memory:
            data = bytes(memory)
            if len(data) < _HEADER.size or data[: len(_MAGIC)] != _MAGIC:
                return None
            calls = _read(data, bytes(memory))
            return calls if calls.process else None
    except (ValueError, OSError, struct.error):
        return None


def _read(data: bytes, again: bytes | None = None) -> RankCalls:
    """The calls in a copy of the file. `again`: a second copy, taken after it, whose times count only where the record
    has not been replaced between the two."""
    _, rank, ranks, capacity, groups, process = _HEADER.unpack_from(data)
    records = _records(groups)
    names = _names(data, records + capacity * _RECORD_BYTES)
    slots = [name.split("\t") for name in names if name.startswith("group\t")]
    known = {int(slot): Group.from_text(text) for _, slot, text in slots}
    later = data if again is None else again
    calls: list[Call] = []
    torn = 0
    for start in range(records, records + capacity * _RECORD_BYTES, _RECORD_BYTES):
        body = data[start : start + _BODY.size]
        check, waited, done = struct.unpack_from("<3Q", data, start + _BODY.size)
        if check == 0 and body == bytes(_BODY.size):
            continue
        if check != crc32(body):
            torn += 1
            continue
        if body != later[start : start + _BODY.size]:
            continue  # overwritten meanwhile: one of the oldest
        number, kind, group, form, place, index, payload, posted = _BODY.unpack(body)
        if max(kind, form, place) >= len(names):
            torn += 1
            continue
        site, operation, axis = (names[kind] or "kind\t?\t?\t?").split("\t")[1:]
        calls.append(
            Call(
                number, site, operation, axis, known.get(group, Group(())), index, payload,
                names[form].removeprefix("form\t"), names[place].removeprefix("place\t"), posted / 1e9,
                # Times from before `posted` are those of the record that lay here before.
                waited / 1e9 if waited >= posted else None, done / 1e9 if done >= posted else None,
            )
        )  # fmt: skip
    calls.sort(key=lambda call: call.number)
    for at in range(len(calls) - 1, 0, -1):  # what is missing is either just being written or older than all of this
        if calls[at].number != calls[at - 1].number + 1:
            del calls[:at]
            break
    totals = {slot: struct.unpack_from("<Q", data, _COUNTS + 8 * slot)[0] for slot in known if slot < groups}
    counts = {known[slot]: count for slot, count in totals.items() if count}
    return RankCalls(rank, ranks, process, tuple(calls), counts, torn, any(data[8 * _GAVE_UP : 8 * _GAVE_UP + 8]))


def _names(data: bytes, start: int) -> list[str]:
    names = []
    while start + _NAME.size <= len(data):
        length, check = _NAME.unpack_from(data, start)
        text = data[start + _NAME.size : start + _NAME.size + length]
        if check != crc32(text) ^ 1:
            break
        names.append(text.decode(errors="replace"))
        start += _NAME.size + length
    return names


# --- of this process

_of_process: list[CallWriter] = []  # one at most; forked processes that attach their own file drop the parent's


def process_calls() -> CallWriter:
    """The writer of this process: to the file that `attach` named, else to memory of its own."""
    if not _of_process:
        _of_process.append(CallWriter())
    return _of_process[0]


def attach(descriptor: int) -> CallWriter:
    """Have this process write its calls to the file behind `descriptor`, from now on."""
    _of_process[:] = [CallWriter(descriptor)]
    return _of_process[0]
