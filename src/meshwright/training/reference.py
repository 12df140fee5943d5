"""Reference log-probabilities of preference data: the log-probabilities of all responses under the initial policy,
computed before the first step and stored in the run directory, since a resumed run has no longer the initial weights.

Shapes: B sequences, D the maximum responses of a sequence.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from meshwright.checkpoint.agreement import Agreement
from meshwright.checkpoint.files import replace_file
from meshwright.comm import collectives
from meshwright.comm.mesh import Mesh
from meshwright.errors import UserError, error_reason
from meshwright.model.checkpoint_files import CheckpointFiles
from meshwright.parallel.flat_buffers import TensorSlice, cut_slices, split_evenly
from meshwright.parallel.zero_engine import ZeroEngine

FILE = "reference.safetensors"
FORMAT = 1
SAMPLED = 256  # consecutive elements of a tensor that are hashed together
REFERENCE_SITE = "start.reference"
WEIGHTS_SITE = "start.weights"
_CHUNK_ELEMENTS = 1 << 20
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)  # 2^64 over the golden ratio, as int64


@dataclass(frozen=True, slots=True)
class ResponseLogProbabilities:
    """Log-probabilities of all responses of one data split. values: float64, in nats, the responses of all sequences
    one after another. bounds: int64 [sequences + 1]; the responses of sequence i are values[bounds[i] : bounds[i + 1]].
    """

    values: NDArray[np.float64]
    bounds: NDArray[np.int64]

    @classmethod
    def zeros(cls, responses_per_sequence: NDArray[np.int64]) -> ResponseLogProbabilities:
        """Create zeros for all responses of a split. responses_per_sequence [sequences]: number of responses in each
        sequence."""
        bounds = np.cumsum([0, *responses_per_sequence], dtype=np.int64)
        return cls(np.zeros(int(bounds[-1])), bounds)

    @property
    def sequences(self) -> int:
        """Number of sequences in the split."""
        return len(self.bounds) - 1

    def select_sequences(self, rows: NDArray[np.int64], max_responses: int) -> torch.Tensor:
        """Return the log-probabilities of the responses in the sequences with the indices `rows` [B], as float64 [B, D]
        with D = `max_responses`. Missing responses (of a sequence that has fewer, or of an index beyond the last
        sequence) get 0."""
        found = torch.zeros(len(rows), max_responses, dtype=torch.float64)
        for place, row in enumerate(rows.tolist()):
            if row < self.sequences:
                values = self.values[self.bounds[row] : self.bounds[row + 1]]
                found[place, : len(values)] = torch.from_numpy(values)
        return found

    def store(self, row: int, values_D: torch.Tensor) -> None:
        """Store the log-probabilities of the responses of the sequence with index `row`: the first elements of
        `values_D` [D], as many as the sequence has responses; further elements are padding."""
        first, end = int(self.bounds[row]), int(self.bounds[row + 1])
        self.values[first:end] = values_D[: end - first].cpu().numpy()


@dataclass(frozen=True, slots=True)
class Reference:
    """Log-probabilities of all responses under the reference policy.

    splits: {split, such as "train": log-probabilities}. inputs: {name: value} that identifies what the
    log-probabilities were computed from: checksums of data and weights, and the precision."""

    splits: Mapping[str, ResponseLogProbabilities]
    inputs: Mapping[str, str]

    @property
    def sha256(self) -> str:
        """SHA-256 checksum of all log-probabilities and of `inputs`."""
        digest = hashlib.sha256(json.dumps(dict(self.inputs), sort_keys=True).encode())
        for name in sorted(self.splits):
            digest.update(name.encode() + b"\0")
            digest.update(np.ascontiguousarray(self.splits[name].values, dtype="<f8").tobytes())
        return digest.hexdigest()

    def write(self, path: Path) -> None:
        """Write the log-probabilities and `inputs` to the safetensors file `path`, atomically (temporary file, fsync,
        rename). Raises OSError."""
        tensors = {name: np.ascontiguousarray(found.values) for name, found in self.splits.items()}
        metadata = {"format": str(FORMAT), "sha256": self.sha256, **self.inputs}
        replace_file(path, save(tensors, metadata=metadata))


def read_reference(path: Path, responses_per_sequence: Mapping[str, NDArray[np.int64]]) -> Reference:
    """Read the reference log-probabilities from the file `path`, which `Reference.write` wrote.

    responses_per_sequence: {split: number of responses in each sequence}. `UserError` if the file is missing or
    damaged, or its splits have other numbers of responses."""
    if not path.is_file():
        raise UserError(f"{path} is missing")
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = dict(file.metadata() or {})
            values = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(f"{path} is damaged: {error}") from None
    written, sha256 = metadata.pop("format", ""), metadata.pop("sha256", "")
    if written != str(FORMAT):
        raise UserError(f'{path} has format "{written}", and this version reads {FORMAT}')
    empty = {name: ResponseLogProbabilities.zeros(counts) for name, counts in responses_per_sequence.items()}
    if {name: found.shape for name, found in values.items()} != {name: e.values.shape for name, e in empty.items()}:
        raise UserError(f"{path} does not have the responses of the data")
    found = Reference(
        {name: ResponseLogProbabilities(values[name], each.bounds) for name, each in empty.items()}, metadata
    )
    if found.sha256 != sha256:
        raise UserError(f"{path} is damaged: its values do not match its sha256")
    return found


def all_reduce_responses(responses: ResponseLogProbabilities, mesh: Mesh) -> None:
    """Sum the log-probabilities `responses` over all ranks of `mesh`, in place. Before the call each value is set on
    one rank and 0 on all other ranks; after it every rank has all values. Collective."""
    if not responses.values.size:
        return
    values = torch.from_numpy(responses.values).to(mesh.device)
    collectives.all_reduce(values, mesh.world, REFERENCE_SITE)
    responses.values[:] = values.cpu().numpy()


def frozen_slices(engine: ZeroEngine) -> list[TensorSlice]:
    """Return the frozen parameters of a model with an adapter as slices of checkpoint tensors, dequantized if they are
    quantized. Over all ranks, each element is in exactly one slice. engine: ZeRO engine that holds the parameters."""
    slices: list[TensorSlice] = []
    for unit in engine.frozen:
        low, high = unit.start, min(unit.stop, unit.flat.numel)
        low, high = split_evenly(low, max(low, high), unit.replica, unit.replicas)
        values = unit.flat.storage_format.unpack(unit.master, torch.float32, unit.start)
        slices += cut_slices(
            unit.flat, "frozen", values, unit.start, low, high, engine.mesh.layout.coordinates(engine.mesh.rank)
        )
    return slices


def compute_weights_checksum(owned: Iterable[TensorSlice], mesh: Mesh) -> str:
    """Return a 64-bit checksum (hex) of weights that does not depend on the layout: the sum over all elements, modulo
    2^64, of (the element's bits as an integer + 1) x (an odd number derived from parameter name and element position).

    owned: slices of the weights; over all ranks of `mesh`, each element is in exactly one slice. Collective.
    """
    total = torch.zeros((), dtype=torch.int64, device=mesh.device)
    for item in owned:
        name = int.from_bytes(hashlib.sha256(item.name.encode()).digest()[:8], "little", signed=True)
        flat = item.tensor.reshape(-1)
        bits = flat.view({8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}[flat.element_size()])
        for begin in range(0, len(bits), _CHUNK_ELEMENTS):
            part = bits[begin : begin + _CHUNK_ELEMENTS].to(torch.int64)
            places = torch.arange(len(part), device=part.device, dtype=torch.int64) + (item.start + begin)
            if (columns := item.columns) is not None:  # positions in the unsharded matrix
                places = places // columns.width * columns.total + columns.start + places % columns.width
            total += ((part + 1) * ((places + name) * _ODD | 1)).sum()
    collectives.all_reduce(total, mesh.world, WEIGHTS_SITE)
    return f"{int(total) % (1 << 64):016x}"


def hash_sample(files: CheckpointFiles) -> str:
    """Return a SHA-256 digest of a model's weights: of each tensor's name, dtype, shape and first, middle and last
    `SAMPLED` elements. Other weights have another digest, as training changes nearly all elements; to read all of a
    large model would delay each start. files: files of the model's directory."""
    digest = hashlib.sha256()
    for name in sorted(files.names):
        values = files.read(name).flatten()
        middle = max(0, values.numel() - SAMPLED) // 2
        sample = torch.cat((values[:SAMPLED], values[middle : middle + SAMPLED], values[-SAMPLED:]))
        digest.update(f"{name} {files.dtype(name)} {files.shape(name)}\n".encode())
        digest.update(sample.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def load_or_compute_reference(
    path: Path,
    responses_per_sequence: Mapping[str, NDArray[np.int64]],
    inputs: Mapping[str, str],
    compute: Callable[[], Reference],
    agreement: Agreement,
    leader: bool,
) -> tuple[Reference, bool]:
    """Return the reference log-probabilities, and True if they were loaded from `path`, False if they were computed.
    The file is loaded if every rank can read it and the inputs recorded in it equal `inputs`. Otherwise the
    log-probabilities are computed, and the leader writes them to `path`.

    responses_per_sequence: {split: number of responses in each sequence}. inputs: {name: value}: checksums of data and
    weights, and the precision. compute: function that returns the reference log-probabilities on this rank. agreement:
    exchanges flags between ranks. leader: True on the rank that writes the file. `UserError` if the file cannot be
    written. Collective."""
    earlier = None
    try:
        earlier = read_reference(path, responses_per_sequence)
    except UserError:
        pass  # missing or damaged: computed again
    if agreement.all_true(earlier is not None and earlier.inputs == inputs):
        assert earlier is not None
        return earlier, True
    computed, problem = compute(), None
    if leader:
        try:
            computed.write(path)
        except OSError as error:
            problem = f"{path} cannot be written: {error_reason(error)}"
    if (first := agreement.broadcast_first_text(problem)) is not None:
        raise UserError(first[1])
    return computed, False
