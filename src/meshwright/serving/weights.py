"""Weights of a serving rank, read one model parameter at a time from a memory-mapped checkpoint, whose pages are
dropped after use, so that memory never holds much more than the converted weights and one tensor.

A model parameter is one in memory; it may combine several of the checkpoint's tensors, such as query, key and value.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from meshwright.adapters.merging import open_weights
from meshwright.comm.mesh import Mesh
from meshwright.kernels.memory_pages import release_pages
from meshwright.model.axis_operations import AxisOperations
from meshwright.model.huggingface import match_entries, read_entry
from meshwright.model.transformer import Transformer
from meshwright.parallel.flat_buffers import FlatLayout, PlacedTensor, make_flat_layout, make_slice_reader
from meshwright.spec.block_tables import serving_stages
from meshwright.spec.config_json import read_decoder_config
from meshwright.spec.parameters import ParameterEntry, parameter_table
from meshwright.spec.stages import Stage, list_stage_units


class RankWeights:
    """Reader of the weights of one rank: its tensor-parallel shards of its pipeline stage, one model parameter (such as
    fused query, key and value) at a time.

    directory: Hugging Face directory or checkpoint. mesh: gives the rank's coordinates. Raises UserError, which names
    file and tensor, if a tensor of the checkpoint is missing, damaged or of another shape than expected.

    Attributes:
        config: Configuration of the model.
        stage: Pipeline stage of this rank.
        first_expert: Index of the first routed expert that this rank computes; the number of experts if none, as an
            earlier tensor-parallel rank computes all experts that this rank holds.
    """

    def __init__(self, directory: Path, mesh: Mesh) -> None:
        """Map the checkpoint's files and list this rank's parameters; no weight is read yet. Arguments: see the
        class."""
        self.config = read_decoder_config(directory)
        self.stage: Stage = serving_stages(self.config, mesh.pp.size)[mesh.pp.rank]
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._mapped: torch.Tensor | None = None  # the entry read last
        table = parameter_table(self.config)
        self._files = open_weights(directory)
        self._names = match_entries(self._files, table, self.config)
        self._buffers: dict[str, tuple[FlatLayout, PlacedTensor]] = {}  # of each model parameter, and its place there
        layout, coordinates = mesh.layout, mesh.layout.coordinates(mesh.rank)
        repeats = layout.expert_parallel and coordinates["tp"] >= layout.ep * layout.etp
        self.first_expert = self.config.experts if repeats else coordinates["ep"] * (self.config.experts // layout.ep)
        needed = {name for unit in list_stage_units(table, self.stage) for name in table.needed_by(unit)}
        for unit in (unit for unit in table.units if unit in needed):
            for part in table.unit_buffers(unit, layout):
                flat = make_flat_layout(table, unit, 1, layout, coordinates, part)
                self._buffers |= {placed.tensor.name: (flat, placed) for placed in flat.tensors}

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of the model parameters, in forward order."""
        return iter(self._buffers)

    def is_bfloat16(self, name: str) -> bool:
        """Return True if the model parameter `name` is stored in bfloat16 in the checkpoint's files."""
        flat, placed = self._buffers[name]
        parts = flat.find_slices(placed.offset, placed.offset + placed.numel)
        tensors = {name for part, _, _ in parts for name in self._files.stored_names(self._names[part.entry.name])}
        return all(self._files.dtype(name) == "BF16" for name in tensors)

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Return this rank's shard of the model parameter `name` in `dtype`; vocabulary padding is 0. The tensor is
        valid until the next call. It is a view of the memory-mapped file if no conversion is needed."""
        self._release_pages()
        flat, placed = self._buffers[name]
        found = list(flat.find_slices(placed.offset, placed.offset + placed.numel))
        entries = [part.entry for part, _, _ in found]  # none where all is padding
        if len(entries) == 1 and found[0][0].numel == entries[0].numel == placed.numel and not entries[0].transposed:
            value = self._read_entry(entries[0]).reshape(-1)
            values = value if value.dtype == dtype else self._make_scratch(placed.numel, dtype).copy_(value)
        else:
            values = self._make_scratch(placed.numel, dtype)
            if sum(last - first for _, first, last in found) < placed.numel:
                values.zero_()
            flat.fill(values, placed.offset, make_slice_reader(self._read_entry))
        return values.view(placed.shape)

    def build_model(self, axes: AxisOperations, device: torch.device | str, dtype: torch.dtype) -> Transformer:
        """Return the module of this rank's pipeline stage on `device`, for inference, with this rank's shards as its
        parameters, converted to `dtype`. axes: communication of the mesh axes."""
        model = Transformer(self.config, axes=axes, device=device, dtype=dtype, stages=[self.stage])
        model.requires_grad_(False).eval()
        for name in self:
            parameter = model.get_parameter(name)
            parameter.copy_(self.read(name, dtype).view_as(parameter))
        return model

    def _read_entry(self, entry: ParameterEntry) -> torch.Tensor:
        """Return the full (unsharded) value of a parameter entry, one tensor of the checkpoint, as a view of the
        memory-mapped file; release the memory pages of the entry read before."""
        self._release_pages()
        self._mapped = read_entry(self._files, entry, self._names)
        return self._mapped

    def _make_scratch(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialized tensor of `numel` elements of `dtype` in a buffer that all calls share, as fresh
        pages would cost as much as the copy into them."""
        size = numel * dtype.itemsize
        if self._scratch.numel() < size:
            self._scratch = torch.empty(size, dtype=torch.uint8)
        return self._scratch[:size].view(dtype)

    def _release_pages(self) -> None:
        """Release the memory pages of the memory-mapped checkpoint tensor that was read last. A later access reads the
        pages from the file again."""
        if self._mapped is not None and self._files.mapped:
            release_pages(self._mapped.data_ptr(), self._mapped.nbytes)
            self._mapped = None
