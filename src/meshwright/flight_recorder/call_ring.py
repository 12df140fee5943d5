"""Ring buffer of one rank's collective calls in a memory-mapped file that outlives the process: written without locks
or system calls, readable by another process at any time. Torch-free.

    header | number of calls of each group | records, the oldest overwritten first | text area

A record is one cache line. Most of it is written once, with a checksum by which a reader detects a record that is being
written; the two times that are set later (wait, completion) are aligned words. Each text (sites, groups, code
locations, shapes) is written once, to the text area; records refer to texts by number.
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
import tempfile
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic_ns
from types import CodeType, FrameType
from typing import Any
from zlib import crc32

from meshwright.flight_recorder.call_log import Call, Group, RankCalls

CAPACITY = 2048  # records: one or two steps of a deep model
GROUPS = 512  # groups and pairs of ranks whose calls are counted
HEAP_BYTES = 2**17
FORM_BYTES = HEAP_BYTES // 2  # part of the heap for dtypes and shapes, whose number is unbounded; other names are few

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
_INTERNAL = tuple(os.path.join(_PACKAGE, name) + os.sep for name in ("comm", "flight_recorder"))


def _compute_records_offset(groups: int) -> int:
    """Return the byte offset of the call records in a ring buffer file. The records follow the header and the call
    counters. groups: number of counters, one for each group of ranks that make the same calls."""
    return _COUNTS + 8 * groups


def compute_file_bytes() -> int:
    """Return the size in bytes of the file that holds one rank's ring buffer of `CAPACITY` calls."""
    return _compute_records_offset(GROUPS) + CAPACITY * _RECORD_BYTES + HEAP_BYTES


def create_memory_file(rank: int, ranks: int) -> int:
    """Create the ring buffer file of one rank in anonymous memory (memfd); return its file descriptor. The file exists
    as long as a process holds it open. rank: global rank. ranks: world size."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("meshwright-calls", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    _prepare_file(descriptor, rank, ranks)
    return descriptor


def create_named_file(path: Path | str, rank: int, ranks: int) -> int:
    """Create the ring buffer file of one rank at `path`, replacing an old file; return the file descriptor of the open
    file. rank: global rank. ranks: world size. Raises OSError if the disk is full."""
    with suppress(FileNotFoundError):
        os.unlink(path)  # instead of overwriting it: another process may have it mapped
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        _prepare_file(descriptor, rank, ranks)
    except OSError:
        os.close(descriptor)
        os.unlink(path)
        raise
    return descriptor


def _prepare_file(descriptor: int, rank: int, ranks: int) -> None:
    """Allocate the ring buffer file of one rank and write its header. descriptor: file descriptor, open for writing.
    rank: global rank. ranks: world size."""
    size = compute_file_bytes()
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)  # else a full disk would kill the writer later, by SIGBUS
    else:
        os.ftruncate(descriptor, size)
    os.pwrite(descriptor, _HEADER.pack(_MAGIC, rank, ranks, CAPACITY, GROUPS, 0), 0)


class CallWriter:
    """Recorder of this process's collective calls in a ring buffer; a call takes one to three microseconds to record.
    descriptor: open file of the rank's ring buffer (`create_memory_file`, `create_named_file`); None: private memory
    that no other process can read."""

    def __init__(self, descriptor: int | None = None) -> None:
        """Map the ring buffer file into memory; arguments: see the class."""
        if descriptor is None:
            self._memory = mmap.mmap(-1, compute_file_bytes())
            rank, ranks, capacity, groups = 0, 1, CAPACITY, GROUPS
        else:
            self._memory = mmap.mmap(descriptor, 0)
            magic, rank, ranks, capacity, groups, _ = _HEADER.unpack_from(self._memory)
            assert magic == _MAGIC, magic
        _HEADER.pack_into(self._memory, 0, _MAGIC, rank, ranks, capacity, groups, os.getpid())
        self.descriptor = descriptor
        self._words: Any = memoryview(self._memory).cast("Q")  # a word is written by one store
        self._capacity, self._records = capacity, _compute_records_offset(groups)
        self._heap = self._records + capacity * _RECORD_BYTES
        self._number = 0
        self._time_of_group: int | None = None
        self._names = 0
        self._groups: dict[Hashable, int] = {}
        self._counts: list[int] = []
        self._numbers: dict[Hashable, int] = {}  # numbers of names on the heap and of (site, operation, axis)
        self._forms: dict[Hashable, int] = {}
        self._form_bytes = 0
        self._places: dict[tuple[int, int], int] = {}
        self._skipped: set[int] = set()
        self._seen: list[CodeType] = []  # referenced, so that ids of code objects are not reused
        self._add_name("")

    @property
    def number(self) -> int:
        """Number of calls that this process has recorded since its start."""
        return self._number

    def _add_name(self, text: str) -> int:
        """Store a text (call site, group, code location or shape) in the area for texts at the end of the ring buffer
        file. Return the number by which call records refer to the text; 0, the number of the empty text, if the area is
        full."""
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

    def _add_form(self, dtype: Any, shape: Any) -> int:
        """Store dtype and shape as one text, such as "float32[128, 64]", in the ring buffer file. Return the number by
        which call records refer to the text; 0 if the space for such texts is full."""
        text = f"form\t{str(dtype).removeprefix('torch.')}[{', '.join(map(str, shape))}]"
        if self._form_bytes + len(text) + _NAME.size > FORM_BYTES:
            self._form_bytes = FORM_BYTES  # permanently: else shapes with shorter text would still be stored
            return 0
        self._form_bytes += len(text) + _NAME.size
        number = self._forms[dtype, shape] = self._add_name(text)
        return number

    def register_group(self, ranks: Sequence[int], pair: tuple[int, int] | None = None, purpose: str = "") -> int:
        """Register a group (ranks that make the same calls in the same order) at its first use; return the number of
        the group, an argument of `post`. Arguments: fields of `Group`."""
        key = (tuple(ranks), pair, purpose)
        if key not in self._groups:
            self._groups[key] = len(self._counts)
            self._add_name(f"group\t{len(self._counts)}\t{Group(*key).to_text()}")
            self._counts.append(0)
        return self._groups[key]

    def count_calls(self, group: int) -> int:
        """Return the number of calls that this rank has made so far in a group. group: number returned by
        `register_group`."""
        return self._counts[group]

    def post(self, group: int, site: str, operation: str, axis: str, payload_bytes: int, dtype: Any, shape: Any) -> int:
        """Record that this rank enters a call; return the number of the call for `wait` and `done`.

        group: number returned by `register_group`. site: label of the calling line, such as "data.gradients".
        operation: such as "all_reduce". axis: name of the mesh axis, such as "data". payload_bytes, dtype, shape: size,
        dtype and shape of the call's data on this rank. Give a dim that varies from call to call as "...": the file
        stores each distinct dtype and shape as a text that is never freed.
        """
        self._number = number = self._number + 1
        index = self._counts[group] = self._counts[group] + 1
        kind = self._numbers.get((site, operation, axis))
        if kind is None:
            kind = self._add_name(f"kind\t{site}\t{operation}\t{axis}")
            if kind:
                self._numbers[site, operation, axis] = kind
        form = self._forms.get((dtype, shape))
        if form is None:
            form = 0 if self._form_bytes == FORM_BYTES else self._add_form(dtype, shape)
        posted = self._time_of_group or monotonic_ns()
        body = _BODY.pack(number, kind, group, form, self._find_place(), index, payload_bytes, posted)
        start = self._records + number % self._capacity * _RECORD_BYTES
        self._memory[start : start + _BODY.size] = body
        words = self._words
        words[(start >> 3) + _CHECK] = crc32(body)
        if group < GROUPS:
            words[(_COUNTS >> 3) + group] = index
        return number

    @contextmanager
    def post_together(self) -> Iterator[None]:
        """Context manager around sends and receives that are posted as one group (between `ncclGroupStart` and
        `ncclGroupEnd`). All these calls are recorded with the time at which the context was entered."""
        self._time_of_group = monotonic_ns()
        try:
            yield
        finally:
            self._time_of_group = None

    def wait(self, number: int) -> None:
        """Record that the process begins to wait for the completion of a call. number: the call's number, returned by
        `post`."""
        if self._number - number < self._capacity:
            self._words[(self._records >> 3) + number % self._capacity * _WORDS + _WAITED] = monotonic_ns()

    def done(self, number: int) -> None:
        """Record the completion of a call. number: the call's number, returned by `post`."""
        if self._number - number < self._capacity:
            self._words[(self._records >> 3) + number % self._capacity * _WORDS + _DONE] = monotonic_ns()

    def give_up(self) -> None:
        """Record that a call of this rank timed out, which ends the process."""
        self._words[_GAVE_UP] = 1

    def read(self) -> RankCalls:
        """Return the calls that this process has recorded in its ring buffer, parsed from the bytes that other
        processes read."""
        return _parse_ring(bytes(self._memory))

    def _find_place(self) -> int:
        """Find the line of the program that makes the current call: the innermost stack frame outside comm/,
        flight_recorder/ and torch. Store file, line and function as text in the ring buffer file; return the number of
        the text, 0 if there is no such frame or no space."""
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            code = id(frame.f_code)
            if code not in self._skipped:
                place = self._places.get((code, frame.f_lasti))
                if place is not None:
                    return place
                self._seen.append(frame.f_code)
                file, function = frame.f_code.co_filename, frame.f_code.co_qualname
                if not _is_internal_file(file):
                    place = self._add_name(f"place\t{file.removeprefix(_PACKAGE)}:{frame.f_lineno} ({function})")
                    self._places[code, frame.f_lasti] = place
                    return place
                self._skipped.add(code)
            frame = frame.f_back
        return 0


def _is_internal_file(file: str) -> bool:
    """Return True if stack frames of this source file are skipped in the search for the code that makes a call: files
    of comm/, flight_recorder/, torch and generated code."""
    return file.startswith((*_INTERNAL, "<")) or "/torch/" in file or "torchinductor" in file


def read_calls(descriptor: int) -> RankCalls | None:
    """Read the calls recorded in a rank's ring buffer file. descriptor: the open file. Return None if the file is no
    ring buffer, or if no process has recorded calls in the file."""
    try:
        with mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) as memory:
            data = bytes(memory)
            if len(data) < _HEADER.size or data[: len(_MAGIC)] != _MAGIC:
                return None
            calls = _parse_ring(data, bytes(memory))
            return calls if calls.process else None
    except (ValueError, OSError, struct.error):
        return None


def _parse_ring(data: bytes, again: bytes | None = None) -> RankCalls:
    """Parse the calls in the bytes of a ring buffer file.

    data: copy of the file. again: second copy, taken later. Records that were overwritten between the two copies are
    dropped, because their times may be wrong. None: there is no second copy.
    """
    _, rank, ranks, capacity, groups, process = _HEADER.unpack_from(data)
    records = _compute_records_offset(groups)
    names = _parse_names(data, records + capacity * _RECORD_BYTES)
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
            continue  # overwritten since: one of the oldest
        number, kind, group, form, place, index, payload, posted = _BODY.unpack(body)
        if max(kind, form, place) >= len(names):
            torn += 1
            continue
        site, operation, axis = (names[kind] or "kind\t?\t?\t?").split("\t")[1:]
        calls.append(
            Call(
                number, site, operation, axis, known.get(group, Group(())), index, payload,
                names[form].removeprefix("form\t"), names[place].removeprefix("place\t"), posted / 1e9,
                # Times before `posted` belong to the overwritten record.
                waited / 1e9 if waited >= posted else None, done / 1e9 if done >= posted else None,
            )
        )  # fmt: skip
    calls.sort(key=lambda call: call.number)
    for at in range(len(calls) - 1, 0, -1):  # keep the newest consecutive calls
        if calls[at].number != calls[at - 1].number + 1:
            del calls[:at]
            break
    totals = {slot: struct.unpack_from("<Q", data, _COUNTS + 8 * slot)[0] for slot in known if slot < groups}
    counts = {known[slot]: count for slot, count in totals.items() if count}
    return RankCalls(rank, ranks, process, tuple(calls), counts, torn, any(data[8 * _GAVE_UP : 8 * _GAVE_UP + 8]))


def _parse_names(data: bytes, start: int) -> list[str]:
    """Parse the text area of a ring buffer file. Return its texts (sites, groups, shapes ...), indexed by the numbers
    by which call records refer to them; parsing ends at the first incomplete text. data: bytes of the file. start: byte
    offset of the text area."""
    names = []
    while start + _NAME.size <= len(data):
        length, check = _NAME.unpack_from(data, start)
        text = data[start + _NAME.size : start + _NAME.size + length]
        if check != crc32(text) ^ 1:
            break
        names.append(text.decode(errors="replace"))
        start += _NAME.size + length
    return names


# --- recorder of this process

_of_process: list[CallWriter] = []  # at most one; a forked process that attaches its own file drops its parent's


def get_process_writer() -> CallWriter:
    """Return the call recorder of this process, which writes to the file given to `attach_process_writer`, or to
    private memory if none was given."""
    if not _of_process:
        _of_process.append(CallWriter())
    return _of_process[0]


def attach_process_writer(descriptor: int) -> CallWriter:
    """Make this process record its calls in the open file `descriptor` from now on; return the recorder."""
    _of_process[:] = [CallWriter(descriptor)]
    return _of_process[0]
