"""Training task of a recipe's language model: transformer, sharded parameters, prepared data and objective."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from meshwright.adapters.attach import adapters_off, make_initial_values, make_zeros
from meshwright.adapters.dropout import sample_keys
from meshwright.adapters.peft_directory import read_peft_adapter
from meshwright.checkpoint.agreement import agree_on_adapter
from meshwright.comm import collectives
from meshwright.comm.mesh import Mesh
from meshwright.comm.products import choose_product_overlap
from meshwright.data import PackedDataset, PackedExamples, PreparedData
from meshwright.data.files import to_canonical_json
from meshwright.layout import Layout
from meshwright.model.checkpoint_files import CheckpointFiles
from meshwright.model.documents import Documents, MicroBatch, move
from meshwright.model.huggingface import match_entries, read_entry
from meshwright.monitoring.records import Metrics, RunDescription, Validation
from meshwright.monitoring.resuming import check_base
from meshwright.parallel.context import shard_sequences
from meshwright.parallel.flat_buffers import TensorSlice, make_slice_reader
from meshwright.parallel.parallelize import parallelize
from meshwright.parallel.stage_compute import Divisor
from meshwright.parallel.step import ForwardBackward, TermCount
from meshwright.planner.cost.data_calls import Work
from meshwright.planner.cost.engines import choose_run_engine
from meshwright.planner.cost.traffic import predicted_traffic, predicted_traffic_by_axis
from meshwright.recipe import Recipe
from meshwright.spec.config import ModelConfig
from meshwright.spec.config_json import config_to_huggingface
from meshwright.spec.flops import training_flops_per_token
from meshwright.spec.parameters import parameter_table
from meshwright.training.batch_prefetch import BatchPrefetcher
from meshwright.training.cuda_graphs import CAPTURING_DEVICES, FixedDocuments, RunPasses, graph_passes
from meshwright.training.distillation import Distillation
from meshwright.training.distillation_loss import make_distillation
from meshwright.training.exposed_layers import format_exposed_layers
from meshwright.training.objective import NextToken, Objective
from meshwright.training.precision import PARAMETER_DTYPES, Arithmetic, set_matmul_precision
from meshwright.training.preference import MISMATCHED, Preferences
from meshwright.training.preference_loss import make_preference
from meshwright.training.reference import frozen_slices, hash_sample
from meshwright.training.task import RunStart


class LanguageModelTask:
    """Task of training a Meshwright language model, on one rank of a run: the model with its data and loss (implements
    `Task`).

    recipe: settings of the run. layout: degrees of parallelism and precision. config: model architecture. data:
    tokenized splits. mesh: device mesh of this rank. initialise: True: draw initial parameters from the recipe's seed;
    False: the caller loads them. arithmetic: dtypes of parameters and master weights; None: the dtypes of the layout's
    precision."""

    def __init__(
        self,
        recipe: Recipe,
        layout: Layout,
        config: ModelConfig,
        data: PreparedData,
        mesh: Mesh,
        *,
        initialise: bool = True,
        arithmetic: Arithmetic | None = None,
    ) -> None:
        """Build the model with its sharded parameters, the data splits and the objective; arguments: see the class."""
        self.recipe, self.layout, self.config, self.data, self.mesh = recipe, layout, config, data, mesh
        self.table = parameter_table(config)
        arithmetic = arithmetic or Arithmetic(PARAMETER_DTYPES[layout.precision or "fp32"])
        set_matmul_precision(layout.precision, mesh.device)
        graphs = recipe.train.cuda_graphs and mesh.device.type in CAPTURING_DEVICES
        may_fuse = layout.tensor_sequence_parallel and not graphs  # symmetric memory in a graph is untested
        mesh.communicator.product_overlap = choose_product_overlap(recipe.train.tensor_overlap, mesh.tp, may_fuse)
        self.model, self.parallel, program = parallelize(
            config,
            mesh,
            recipe.data.sequence,
            # A checkpoint with an adapter lacks the frozen base, which was drawn from the seed if it was not loaded.
            seed=recipe.run.seed if initialise or (config.adapter and not recipe.base_directory) else None,
            parameter_dtype=arithmetic.parameter_dtype,
            master_dtype=arithmetic.master_dtype,
            compile_backend=arithmetic.compile_backend if recipe.train.compile else None,
        )
        self.tokens: PackedDataset = data.split("train")
        self.validation_tokens: PackedDataset = data.split("validation")
        self.order = data.make_sample_order()
        self.splits: dict[str, Any] = {"train": self.tokens, "validation": self.validation_tokens}
        if recipe.data.records == "unpaired":
            self.splits |= {name + MISMATCHED: split.mismatched for name, split in self.splits.items()}
        self.objective = make_objective(recipe, self.splits, config.layers)
        self.passes = ForwardBackward(
            self.model,
            self.parallel,
            program,
            fused_accumulation_min_numel=arithmetic.fused_accumulation_min_numel,
            preference=self.objective.pair_loss,
        )
        self._batches = BatchPrefetcher(self._load_step, torch.device(mesh.device))
        self._run_passes: RunPasses = self._launch_passes
        self._fixed_documents: FixedDocuments | None = None
        self._base: Mapping[str, str] = {}
        if graphs:
            self._run_passes, self._fixed_documents = graph_passes(self._launch_passes, self.passes, recipe, config)

    # --- a step

    def load_step(self, step: int) -> list[MicroBatch]:
        """Return this rank's micro-batches (tokens, targets, document boundaries) of the step with index `step` (from
        0): those of `prefetch_step`, or loaded now."""
        return self._batches.take(step)

    def prefetch_step(self, step: int) -> None:
        """Load the micro-batches of the step with index `step` in advance, if there is such a step and they do not
        depend on the parameters (next-token training without a teacher)."""
        if step < self.recipe.train.steps and type(self.objective) is NextToken:
            self._batches.prefetch(step)

    def _load_step(self, step: int) -> list[MicroBatch]:
        """Load this rank's micro-batches of the step with index `step`."""
        rows = np.split(self.samples_of_step(step), self.layout.micro_batches)
        self.objective.begin(self, "train", [rows])
        if self.recipe.objective == "kto":  # it has run the forward passes of the mismatched responses
            self.passes.mark("forward")
        loaded = [self._load_micro_batch("train", each) for each in rows]
        loaded = self.objective.complete(self, loaded, rows, step)
        if self.config.adapter is None or not self.config.adapter.dropout:
            return loaded
        keys = sample_keys(self.recipe.run.seed, torch.from_numpy(self._sample_numbers(step)))
        parts = move(keys, self.mesh.device).chunk(len(loaded))
        return [
            batch._replace(documents=dataclasses.replace(batch.documents, samples_B=part))
            for batch, part in zip(loaded, parts, strict=True)
        ]

    def samples_of_step(self, step: int) -> NDArray[np.int64]:
        """Return the training-split indices of the sequences that this rank reads in the step with index `step` (from
        0), in the order of its micro-batches: int64 [batch / dp].
        """
        return self.order.sample(self._sample_numbers(step))

    def _sample_numbers(self, step: int) -> NDArray[np.int64]:
        """Return the global sample numbers that this rank reads in the step with index `step`, counted from 0 over all
        steps of the run: int64 [batch / dp]. Sample numbers determine the data order and the dropout masks.
        """
        share = self.recipe.train.batch // self.mesh.dp.size
        return step * self.recipe.train.batch + self.mesh.dp.rank * share + np.arange(share)

    def count_terms(self, micro_batches: Sequence[MicroBatch]) -> TermCount:
        """Start to count the loss terms (target tokens, pairs or single responses) of a step: their number in this
        rank's `micro_batches`, summed over all ranks. Return a function that waits for this sum and returns it (1 if it
        is 0). The summed loss is divided by it. Collective."""
        return self.objective.count_terms(micro_batches, self.mesh)

    def forward_backward(self, micro_batches: Sequence[MicroBatch], divisor: Divisor) -> torch.Tensor:
        """Run forward and backward of this rank's `micro_batches`. divisor: number by which the loss, summed over all
        terms (target tokens or pairs), is divided.

        Returns float64 [1 + metrics]: this rank's contributions to the divided loss and to the metric sums (which are
        not divided). Summed over all ranks they are the loss and the metric sums of the step."""
        return self._run_passes(micro_batches, divisor)

    def _launch_passes(self, micro_batches: Sequence[MicroBatch], divisor: Divisor) -> torch.Tensor:
        """Run forward and backward as `forward_backward`, with one launch for each kernel."""
        return self._compute_rank_contributions(self.passes.train(micro_batches, divisor))

    def discard_step(self) -> None:
        """Do nothing: a skipped step has changed neither parameters nor optimizer state, and this model has no other
        state to restore."""

    def report(self, means: Sequence[float]) -> Metrics:
        """Return the step's metrics by name. means [metrics]: the step's metric sums over all ranks divided by its
        number of loss terms, in the order of the objective's `metric_names`."""
        return self.objective.report(means)

    # --- around steps

    def describe(self) -> RunDescription:
        """Return the description of model and data for the run's report: names, parameters, tokens per step, FLOPs per
        token."""
        config, sequence, names = self.config, self.recipe.data.sequence, self.objective.metric_names
        exposed = format_exposed_layers(self.model, self.mesh, self.recipe.train.compile)
        return RunDescription(
            model=f"{config.family}, {self.table.numel / 1e6:.2f} M parameters, {config.layers} layers, "
            f"hidden {config.hidden}, vocabulary {config.vocabulary}",
            data=f"{self.tokens.tokens:,} training tokens",
            parameters=self.table.numel,
            unit="tokens",
            units_per_step=self.recipe.train.batch * sequence,
            notes=(*self.data.format_packing_lines(), *exposed),
            metric_names=(*names, *(f"validation_{name}" for name in names)),
            flops_per_unit=training_flops_per_token(config, sequence)
            + (0.0 if (teacher := self.objective.teacher_work) is None else teacher.forward_flops_per_token(sequence)),
        )

    def prepare(self, start: RunStart) -> None:
        """Check that an adapter's base is that of the resumed run; compute or load the objective's inputs, such as
        reference log-probabilities. start: run directory, resumed state and log. Collective."""
        check_base(self.recipe, start.saved, self._base)
        self.objective.prepare(self, start)

    def validate(self) -> Validation:
        """Return the mean loss (nats per target token or pair) and the metrics of the first
        `train.validation_sequences` sequences of the validation split. Collective."""
        count = min(self.recipe.train.validation_sequences, self.validation_tokens.sequences)
        mesh, objective = self.mesh, self.objective
        padding_index = self.validation_tokens.rows  # padding without targets
        objective.begin(self, "validation", self.split_sequences(count, padding_index))
        sums = torch.zeros(2 + objective.metric_count, dtype=torch.float64, device=mesh.device)
        for group in self.split_sequences(count, padding_index):
            loaded = [self._load_micro_batch("validation", rows, padded=True) for rows in group]
            micro_batches = self.objective.complete(self, loaded, group, None)
            shares = self._compute_rank_contributions(self.passes.evaluate(micro_batches))
            sums[0] += shares[0]
            sums[1] += objective.terms_share(micro_batches, mesh)
            sums[2:] += shares[1:]
        collectives.all_reduce(sums, mesh.world, "validation.loss")
        loss, _, *means = (sums / sums[1]).tolist()
        return Validation(loss, objective.report(means))

    def score_responses(
        self, split: str, passes: Iterable[Sequence[NDArray[np.int64]]], sequences: int
    ) -> Iterator[list[tuple[int, torch.Tensor]]]:
        """Compute the log-probabilities of the responses in the sequences of a split such as "train".

        passes: for each forward pass, this rank's micro-batches as arrays of sequence indices; sequences: number of
        sequences of the split; indices from this number on are padding.

        Yields after each forward pass a list of (sequence index, log-probabilities of the sequence's responses in
        nats); the list is empty on ranks that do not hold the last pipeline stage. Collective.
        """
        for group in passes:
            # Indices beyond the last are replaced by sequence 0, so that every rank runs the same number of passes.
            micro_batches = [self._load_micro_batch(split, np.where(rows < sequences, rows, 0)) for rows in group]
            yield [
                (row, values_D)
                for number, found_BD in self.passes.log_probabilities(micro_batches).items()
                for row, values_D in zip(group[number].tolist(), found_BD, strict=True)
                if row < sequences
            ]

    @property
    def identity(self) -> Mapping[str, str]:
        """Inputs of the reference log-probabilities except the weights, {name: value}: "data_sha256", SHA-256 of the
        data; "model", SHA-256 of the model configuration; "precision". Stored log-probabilities are reused only if all
        values are equal.
        """
        return {
            "data_sha256": self.data.sha256,
            "model": hashlib.sha256(to_canonical_json(dict(config_to_huggingface(self.config)))).hexdigest(),
            "precision": self.layout.precision or "fp32",
        }

    @property
    def recomputes_reference(self) -> bool:
        """True if the reference model of preference training is the base model without its adapter, which can be run at
        any step; False if it is the initial model, which training overwrites.
        """
        return self.config.adapter is not None

    def reference_weights(self) -> AbstractContextManager[None]:
        """Return a context manager in which forward passes run the reference model of preference training: the base
        model without its adapter. For a model without an adapter the context manager changes nothing."""
        return adapters_off(self.model)

    def reference_slices(self) -> list[TensorSlice]:
        """Return the weights of the reference model of preference training as slices of checkpoint tensors: the weights
        of the frozen base model if there is an adapter, else all weights. Over all ranks, each element is in exactly
        one slice."""
        return frozen_slices(self.parallel) if self.config.adapter else self.parallel.master_slices(owned=True)

    def load_weights(self, directory: Path, resumes: bool = False) -> None:
        """Load the weights of a Hugging Face model directory into the parameters, in place of initial values. An
        adapter gets its initial values, or those in the PEFT directory `adapter.from`, or zeros if the run `resumes`
        from a checkpoint. Projections to a teacher's hidden states, in no directory, are drawn from the seed."""
        base = dataclasses.replace(self.config, adapter=None, projections=())
        files = CheckpointFiles(directory)
        names = match_entries(files, parameter_table(base), base)
        read = partial(read_entry, files, names=names)
        self._base = {} if self.config.adapter is None else {"base_sha256": hash_sample(files)}
        if not resumes and self.recipe.adapter.from_path is not None:
            place = agree_on_adapter(self.recipe.adapter.from_path, self.mesh)
            others = read_peft_adapter(place, self.config, self.recipe.run.seed)
        else:
            values = self.table, read, self.recipe.run.seed, self.parallel.parameter_dtype
            others = make_zeros if resumes else make_initial_values(*values)
        self.parallel.load(make_slice_reader(lambda entry: (read if entry.name in names else others)(entry)))

    def state(self) -> dict[str, Any]:
        """Return this task's entries of a checkpoint's `state.json`: digests of the data, of an adapter's base and, for
        preference training, of the reference log-probabilities. A run resumes only if they are unchanged."""
        return {"data_sha256": self.data.sha256, **self._base, **self.objective.state()}

    @property
    def can_launch_ahead(self) -> bool:
        """True unless the start of a step computes a figure that is among its metrics, such as KTO's KL estimate."""
        return not self.objective.estimates

    def buffer_slices(self, owned: bool) -> list[TensorSlice]:
        """Return an empty list: the model has no buffers or frozen parameters to save. owned: ignored."""
        return []

    def buffer_bytes(self) -> dict[str, int]:
        """Return an empty dict: the model has no buffers or frozen parameters."""
        return {}

    def predicted_traffic(self) -> dict[str, int]:
        """Return the predicted bytes that this rank sends in a step, by call site (label of a collective call in the
        code)."""
        return predicted_traffic(self.config, self.layout, self._make_workload(), self.mesh.rank)

    def predicted_traffic_by_axis(self) -> dict[str, int]:
        """Return the predicted bytes that this rank sends in a step, by mesh axis ("data", "tp" ...)."""
        return predicted_traffic_by_axis(self.config, self.layout, self._make_workload(), self.mesh.rank)

    def document_starts(self, first: int, steps: int) -> tuple[tuple[int, ...], ...]:
        """Return the document boundaries of the sequences that this rank reads in the steps `first` to `first` +
        `steps` - 1: for each sequence, the positions at which documents begin.
        """
        samples = [self.samples_of_step(step) for step in range(first, first + steps)]
        return tuple(
            tuple(row.tolist()) for row in self.tokens.read_batch(np.concatenate(samples)).list_document_starts()
        )

    def _make_workload(self) -> Work:
        """Return the workload (global batch, sequence length, dtype sizes, device) from which the planner predicts
        traffic."""
        return Work(
            self.recipe.train.batch,
            self.recipe.data.sequence,
            parameter_bytes=self.parallel.parameter_dtype.itemsize,
            master_bytes=self.parallel.master_dtype.itemsize,
            device=self.mesh.device.type,
            collectives=self.mesh.communicator.programs.named,
            responses=self.objective.max_terms * (loss.responses if (loss := self.objective.pair_loss) else 0),
            estimates_kl=self.recipe.objective == "kto",
            teacher=self.objective.teacher_work,
            engine=choose_run_engine(
                self.recipe.train.tensor_overlap, self.mesh.device.type, self.recipe.train.compile
            ),
        )

    def _compute_rank_contributions(self, loss: torch.Tensor) -> torch.Tensor:
        """Return this rank's contributions to the loss and the metric sums of the last forward passes, float64 [1 +
        metrics]: each contribution is this rank's value, divided by the number of ranks that compute the same value, so
        that an all-reduce over all ranks gives the totals.

        loss: scalar, summed over this rank's micro-batches."""
        metric_sums = self.passes.metric_sums if self.objective.metric_sums is None else self.objective.metric_sums
        metrics = metric_sums[: self.objective.metric_count]
        return self.objective.loss_share(torch.cat([loss.reshape(1), metrics]), self.mesh)

    def split_sequences(self, count: int, padding_index: int) -> Iterator[list[NDArray[np.int64]]]:
        """Split the sequences 0 to `count` - 1 of a data split over the dp ranks. Yield, for each forward pass, this
        rank's micro-batches as arrays of sequence indices.

        All ranks get equally many arrays of equal length; the last arrays are padded with `padding_index`, which is not
        the index of a sequence.
        """
        rows = max(1, self.recipe.train.batch // (self.layout.dp * self.layout.micro_batches))
        starts = range(self.mesh.dp.rank * rows, count + self.mesh.dp.rank * rows, rows * self.mesh.dp.size)
        for first in range(0, len(starts), self.layout.micro_batches):
            wanted = [start + np.arange(rows) for start in starts[first : first + self.layout.micro_batches]]
            yield [np.where(part < count, part, padding_index) for part in wanted]

    def _load_micro_batch(self, split: str, rows: NDArray[np.int64], padded: bool = False) -> MicroBatch:
        """Load the sequences with the indices `rows` of a split ("train" or "validation") as one micro-batch; return
        this rank's context-parallel slice of it.

        padded: True: an index beyond the last sequence gives a sequence of padding; False: such an index is an
        error."""
        batch = self.splits[split].read_batch(rows, padded=padded)
        documents = self.objective.annotate(Documents.from_ids(batch.document_ids), batch, split, rows)
        parts = [move(torch.from_numpy(part), self.mesh.device) for part in (batch.tokens, batch.targets)]
        documents = documents.to(self.mesh.device)
        if self._fixed_documents is not None and split == "train":
            documents = self._fixed_documents.fix(documents, parts[0])
        return shard_sequences(parts[0], parts[1], documents, self.mesh)


def make_objective(recipe: Recipe, splits: Mapping[str, PackedDataset], layers: int = 0) -> Objective:
    """Build the training objective that a recipe selects: preference training, distillation, or next-token prediction.
    splits: {split: data}, with "train", "validation" ... layers: number of layers of the model, needed for
    distillation."""
    pair_loss = make_preference(recipe)
    if pair_loss is None:
        distillation = make_distillation(recipe, layers)
        return NextToken() if distillation is None else Distillation(recipe, distillation)
    return Preferences(pair_loss, cast(Mapping[str, PackedExamples], splits))
