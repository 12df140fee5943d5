"""One rank of a training run. `Trainer.step` is a training step from batch to update; everything else serves it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray

from meshwright.comm import collectives
from meshwright.comm.mesh import Mesh
from meshwright.data import PackedDataset, PackedExamples, PreparedData
from meshwright.errors import UserError
from meshwright.layout import Layout
from meshwright.model.documents import Documents
from meshwright.model.huggingface import CheckpointFiles, match_rows, read_row
from meshwright.model.pairs import Pairs
from meshwright.model.preference import Preference, Rewards, preference_of
from meshwright.model.transformer import Transformer
from meshwright.monitoring.clock import StepClock
from meshwright.parallel.context import part_of_rows
from meshwright.parallel.data import DataParallel, loss_share
from meshwright.parallel.pieces import Piece
from meshwright.parallel.pipeline import check_same_everywhere
from meshwright.parallel.stage_compute import MicroBatch
from meshwright.parallel.step import WORTH_ADDING_AT_ONCE, ForwardBackward, count_terms
from meshwright.planner.data_calls import Work
from meshwright.planner.traffic import PREFERENCE_FIGURES, predicted_traffic, predicted_traffic_by_axis
from meshwright.recipe import Recipe
from meshwright.spec.config import ModelConfig
from meshwright.spec.parameters import parameter_table
from meshwright.spec.partition import Partition
from meshwright.spec.stage_times import program_for
from meshwright.training.learning_rate import learning_rate
from meshwright.training.loss_scale import LossScale
from meshwright.training.optimizer import Optimizer
from meshwright.training.reference import Reference, Responses, together

PARAMETER_DTYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


class Dtypes(NamedTuple):
    """dtype of the parameters, in which the model computes, and of master weights, gradients and optimizer state."""

    parameters: torch.dtype
    masters: torch.dtype = torch.float32


class Verdict:
    """What all ranks agree on at the end of a step's backward, from one small all-reduce (sum, float64)."""

    def __init__(self, values: torch.Tensor, loss_scale: float = 1.0, of_pairs: bool = False) -> None:
        loss, squared_norm, stop, failed, *rest = values.tolist()
        figures, seconds = (rest[:PREFERENCE_FIGURES], rest[PREFERENCE_FIGURES:]) if of_pairs else ([], rest)
        self.rewards = Rewards(*figures) if of_pairs else None
        self.loss = loss
        self.gradient_norm = math.sqrt(squared_norm) if squared_norm >= 0 else math.nan
        self.stop = stop > 0
        self.save_failed = failed > 0
        self.rank_seconds = seconds
        self.finite = math.isfinite(loss) and math.isfinite(squared_norm)
        self.loss_scale = loss_scale
        """What loss and gradients were multiplied by while they were computed; those given here are divided by it."""


class Validation(NamedTuple):
    """loss: the mean (nats per token, or of a pair of responses); rewards: of pairs; measures: what else was measured
    of a foreign module, by name."""

    loss: float
    rewards: Rewards | None = None
    measures: Mapping[str, float] = {}

    def document(self) -> dict[str, float]:
        """By the keys of metrics.jsonl."""
        rewards = {} if self.rewards is None else self.rewards.document("validation_")
        return {
            "validation_loss": self.loss,
            **rewards,
            **{f"validation_{name}": value for name, value in self.measures.items()},
        }


def choose_products(precision: str | None, device: torch.device) -> None:
    """Have matrix products of float32 on CUDA done in TF32 or not, from now on. `UserError` where there is no TF32."""
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    elif precision == "tf32":
        raise UserError(
            f"tf32 is how CUDA devices multiply float32, and the ranks compute on {device.type}; write fp32"
        )


class Trainer:
    """One rank's part of a training run: model, data parallel state, optimizer, data, and the step that joins them.

    initialise: whether it starts from the initial values of the recipe's seed; if not, its parameters are to be loaded.
    dtypes: those of the layout's precision unless given.
    """

    fused_accumulation_min_numel = WORTH_ADDING_AT_ONCE
    """Minimum weight elements for which the wgrad kernel accumulates directly into the gradient buffer."""
    preference: Preference | None = None
    """What is learnt from pairs of responses, where it is."""

    def __init__(
        self,
        recipe: Recipe,
        layout: Layout,
        config: ModelConfig,
        data: PreparedData,
        mesh: Mesh,
        *,
        initialise: bool = True,
        dtypes: Dtypes | None = None,
    ) -> None:
        self.recipe, self.layout, self.config, self.data, self.mesh = recipe, layout, config, data, mesh
        self.device = torch.device(mesh.device)
        self.table = parameter_table(config)
        dtypes = dtypes or Dtypes(PARAMETER_DTYPES[layout.precision or "fp32"])
        choose_products(layout.precision, self.device)
        program = program_for(layout, config, recipe.data.sequence)
        check_same_everywhere(program, mesh)
        partition = Partition.of(program, config, self.table, recipe.data.sequence)
        # Without memory of its own: the parameters become views of the flat buffers, and no rank holds a whole model.
        self.model = Transformer(
            config,
            axes=mesh,
            device="meta",
            dtype=dtypes.parameters,
            recompute=layout.recompute,
            stages=partition.held(mesh.pp.rank),
        )
        self.parallel = DataParallel(
            self.model,
            self.table,
            mesh,
            seed=recipe.run.seed if initialise else None,
            parameter_dtype=dtypes.parameters,
            master_dtype=dtypes.masters,
            partition=partition,
        )
        self._stand_by()
        if recipe.train.compile:
            self.model.compile_blocks()
        self.tokens: PackedDataset = data.split("train")
        self.validation_tokens: PackedDataset = data.split("validation")
        self.preference = preference_of(recipe)
        self.reference: Reference | None = None
        """Of preference data: to be made (`make_reference`) or read before the first step."""
        rows = {"train": self.tokens, "validation": self.validation_tokens}
        self.pair_rows = {} if self.preference is None else cast(dict[str, PackedExamples], rows)
        self.pairs_by_row = {name: tokens.examples_by_row for name, tokens in self.pair_rows.items()}
        self.most_pairs = max((int(pairs.max(initial=1)) for pairs in self.pairs_by_row.values()), default=0)
        self.order = data.make_sample_order()
        self.passes = ForwardBackward(
            self.model, self.parallel, program, self.clock.mark, self.fused_accumulation_min_numel, self.preference
        )

    def _stand_by(self) -> None:
        """What every trainer has, whatever it trains, once there is something to train: `self.parallel`."""
        train, mesh = self.recipe.train, self.mesh
        self.optimizer = Optimizer(self.parallel.shards, train)
        half = self.parallel.parameter_dtype == torch.float16
        self.loss_scale = LossScale(train.loss_scale, train.loss_scale_every) if half else LossScale()
        self.clock = StepClock(self.device, lambda: mesh.communicator.waited_seconds)
        self.steps_done = 0
        self.skipped = self.skipped_in_a_row = 0
        """Steps that changed nothing because a loss or gradient was not finite; in a row, those that a lower scale of
        the loss was not tried against."""

    def step(self, *, stop: bool = False, save_failed: bool = False) -> Verdict:
        """One step: forward and backward of every micro-batch, one agreement of all ranks, one update.

        The loss is the sum of token losses over the target tokens of the whole step (of pairs of responses, over its
        pairs), so that gradients are summed and never averaged. A step whose loss or gradient norm is not finite on any
        rank is skipped on all. `stop` and `save_failed` are this rank's news; the verdict says whether any rank had
        such news.
        """
        train, clock = self.recipe.train, self.clock
        clock.start()
        micro_batches = self._micro_batches()
        terms = self._terms(micro_batches)
        clock.mark("data")

        loss_sum = self.passes.train(micro_batches, terms / self.loss_scale.value)

        verdict = self._agree(loss_sum, terms, stop, save_failed)
        clock.mark("agree")
        if verdict.finite:
            self.optimizer.step(learning_rate(self.steps_done, train), self._gradient_scale(verdict))
            self.parallel.publish()
        else:
            self._take_back()
            self.skipped += 1
        searching = self.loss_scale.note(verdict.loss, verdict.finite)
        if not searching:
            self.skipped_in_a_row = 0 if verdict.finite else self.skipped_in_a_row + 1
        self.parallel.zero_gradients()
        self.steps_done += 1
        clock.mark("update")
        return verdict

    def validate(self) -> Validation:
        """Of the first `train.validation_sequences` rows of the validation split, without an update."""
        count = min(self.recipe.train.validation_sequences, self.validation_tokens.sequences)
        mesh, paired = self.mesh, self.preference is not None
        sums = torch.zeros(2 + PREFERENCE_FIGURES * paired, dtype=torch.float64, device=self.device)
        # Rows beyond the split hold nothing.
        for group in self._shares(count, beyond=self.validation_tokens.rows):
            micro_batches = [self._micro_batch("validation", rows, padded=True) for rows in group]
            sums[0] += loss_share(self.passes.evaluate(micro_batches), mesh, paired)
            if paired:
                sums[2:] += loss_share(self.passes.figures, mesh, paired)
            terms = sum(
                (targets != -100).sum() if documents.pairs is None else documents.pairs.count / mesh.cp.size
                for _, targets, documents in micro_batches
            )
            sums[1] += terms / (mesh.tp.size * mesh.pp.size)  # which all see the same
        collectives.all_reduce(sums, self.mesh.world, "validation.loss")
        loss, *figures = (sums / sums[1]).tolist()
        return Validation(loss, Rewards(*figures[1:]) if paired else None)

    def make_reference(self, made_of: Mapping[str, str], progress: Callable[[int], None]) -> Reference:
        """How probable the responses of all rows are now; `progress` hears how many rows are done."""
        splits = {name: Responses.unknown(pairs) for name, pairs in self.pairs_by_row.items()}
        done = 0
        mesh, first_of_copies = self.mesh, self.mesh.tp.rank == self.mesh.cp.rank == 0
        for name, responses in splits.items():
            count = responses.rows
            for group in self._shares(count, beyond=count):
                # A row in the place of one that is not there: every rank computes as much.
                micro_batches = [self._micro_batch(name, np.where(rows < count, rows, 0)) for rows in group]
                for number, found_BD in self.passes.log_probabilities(micro_batches).items():
                    for row, values_D in zip(group[number].tolist(), found_BD, strict=True):
                        if row < count and first_of_copies:
                            responses.put(row, values_D)
                done += mesh.dp.size * sum(map(len, group))
                progress(done)
            together(responses, mesh)
        return Reference(splits, made_of)

    def _shares(self, count: int, beyond: int) -> Iterator[list[NDArray[np.int64]]]:
        """Rows 0 ... `count` - 1, as this rank's micro-batches of one forward after another: every rank has as many, of
        the same shape, and `beyond` in the place of rows from `count` on."""
        rows = max(1, self.recipe.train.batch // (self.layout.dp * self.layout.micro_batches))
        starts = range(self.mesh.dp.rank * rows, count + self.mesh.dp.rank * rows, rows * self.mesh.dp.size)
        for first in range(0, len(starts), self.layout.micro_batches):
            wanted = [start + np.arange(rows) for start in starts[first : first + self.layout.micro_batches]]
            yield [np.where(part < count, part, beyond) for part in wanted]

    @property
    def threads(self) -> int | None:
        """Threads that compute on a CPU, on which the last bits of a result depend; None on another device."""
        return torch.get_num_threads() if self.device.type == "cpu" else None

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold beside tensors to go on bit for bit."""
        return {
            "step": self.steps_done,
            "samples": self.steps_done * self.recipe.train.batch,
            "optimizer_steps": self.optimizer.step_count,
            "skipped_steps": self.skipped,
            "skipped_in_a_row": self.skipped_in_a_row,
            "loss_scale": self.loss_scale.state(),
            "seed": self.recipe.run.seed,
            "data_sha256": self.data.sha256,
            "threads": self.threads,
            **({} if self.reference is None else {"reference_sha256": self.reference.sha256}),
            "layout": str(self.layout),
            "recipe": self.recipe.to_toml(),
        }

    def pieces(self, owned: bool) -> list[Piece]:
        """Masters and optimizer state as pieces: what this rank writes (`owned`) or everything that it must read."""
        pieces = self.parallel.master_pieces(owned)
        for kind, tensors in self.optimizer.state_tensors().items():
            pieces += self.parallel.pieces_like(kind, tensors, owned)
        return pieces

    def memory(self) -> dict[str, int]:
        """Bytes of state that this rank holds, by kind."""
        tensors = [tensor for kind in self.optimizer.state_tensors().values() for tensor in kind]
        return self.parallel.memory() | {"optimizer": sum(tensor.nbytes for tensor in tensors)}

    def predicted_bytes(self) -> dict[str, int]:
        """The same by shapes and dtypes alone, between steps."""
        elements = sum(shard.stop - shard.start for shard in self.parallel.shards)
        kinds = len(self.optimizer.state_tensors())
        return self.parallel.predicted_bytes() | {"optimizer": kinds * elements * self.parallel.master_dtype.itemsize}

    def predicted_traffic(self) -> dict[str, int]:
        """Bytes that this rank sends in a step, by call site."""
        return predicted_traffic(self.config, self.layout, self._work(), self.mesh.rank)

    def predicted_traffic_by_axis(self) -> dict[str, int]:
        """The same by axis of the mesh."""
        return predicted_traffic_by_axis(self.config, self.layout, self._work(), self.mesh.rank)

    def _work(self) -> Work:
        return Work(
            self.recipe.train.batch,
            self.recipe.data.sequence,
            parameter_bytes=self.parallel.parameter_dtype.itemsize,
            master_bytes=self.parallel.master_dtype.itemsize,
            device=self.device.type,
            collectives=self.mesh.communicator.programs.named,
            pairs=self.most_pairs,
        )

    def load_weights(self, directory: Path) -> None:
        """Start from the weights of a Hugging Face directory instead of initial values."""
        files = CheckpointFiles(directory)
        names = match_rows(files, self.table, self.config)
        for name, pieces in groupby(self.parallel.master_pieces(owned=False), key=lambda piece: piece.name):
            row = self.table.row(name)
            value = read_row(files, row, names)
            flat = (value.t() if row.transposed else value).reshape(-1)
            for piece in pieces:
                piece.tensor.copy_(piece.of(flat))
        self.parallel.publish()

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint whose tensors were just read into `pieces(owned=False)`."""
        self.steps_done, self.skipped = state["step"], state["skipped_steps"]
        self.skipped_in_a_row = state["skipped_in_a_row"]
        self.loss_scale.restore(state.get("loss_scale"))
        self.optimizer.restore_step_count(state["optimizer_steps"])
        self.parallel.publish()

    def _terms(self, micro_batches: list[MicroBatch]) -> int:
        """What the loss of the step is divided by, over all ranks."""
        return count_terms(micro_batches, self.mesh)

    def _gradient_scale(self, verdict: Verdict) -> float:
        """Factor of the gradients before the update: clips their global norm and undoes the loss scale."""
        clip = self.recipe.train.clip
        clipped = min(1.0, clip / (verdict.gradient_norm + 1e-6)) if clip else 1.0
        return clipped / verdict.loss_scale

    def _take_back(self) -> None:
        """The step is skipped: nothing but parameters and optimizer state changes in one, and these have not."""

    def _micro_batches(self) -> list[MicroBatch]:
        samples = self._samples(self.steps_done)
        return [self._micro_batch("train", part) for part in np.split(samples, self.layout.micro_batches)]

    def _samples(self, step: int) -> NDArray[np.int64]:
        """This rank's share of a step's samples: rank after rank, micro-batch after micro-batch."""
        share = self.recipe.train.batch // self.mesh.dp.size
        first = step * self.recipe.train.batch + self.mesh.dp.rank * share
        return self.order.sample(first + np.arange(share))

    def documents_of(self, steps: int) -> tuple[tuple[int, ...], ...]:
        """Where documents begin in this rank's rows of the next steps, row after row."""
        samples = [self._samples(self.steps_done + step) for step in range(steps)]
        return tuple(tuple(row.tolist()) for row in self.tokens.read_batch(np.concatenate(samples)).document_starts())

    def _micro_batch(self, split: str, rows: NDArray[np.int64], padded: bool = False) -> MicroBatch:
        """What this rank has of some rows."""
        batch = (self.tokens if split == "train" else self.validation_tokens).read_batch(rows, padded=padded)
        documents = Documents.from_ids(batch.document_ids)
        if self.preference is not None:
            pairs = Pairs.from_ids(torch.from_numpy(batch.document_ids), self.most_pairs)
            if self.reference is not None:
                pairs = pairs.known_from(self.reference.splits[split].of_rows(rows, self.most_pairs))
            documents = documents.in_pairs(pairs)
        parts = [torch.from_numpy(part) for part in (batch.tokens, batch.targets)]
        if self.device.type == "cuda":
            parts = [part.pin_memory().to(self.device, non_blocking=True) for part in parts]
        return part_of_rows(parts[0], parts[1], documents.to(self.device), self.mesh)

    def _agree(self, loss_sum: torch.Tensor, terms: int, stop: bool, save_failed: bool) -> Verdict:
        mesh, paired = self.mesh, self.preference is not None
        first = 4 + PREFERENCE_FIGURES * paired  # of the ranks' seconds
        values = torch.zeros(first + mesh.world_size, dtype=torch.float64, device=self.device)
        scale = self.loss_scale.value
        values[0] = loss_share(loss_sum, mesh, paired) / scale
        values[1] = self.parallel.squared_norm_share() / scale**2
        values[2], values[3] = float(stop), float(save_failed)
        if paired:
            values[4:first] = loss_share(self.passes.figures, mesh, paired) / terms
        values[first + mesh.rank] = self.clock.working_seconds()
        collectives.all_reduce(values, mesh.world, "step.verdict")
        return Verdict(values, scale, paired)
