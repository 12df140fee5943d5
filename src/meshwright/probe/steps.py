"""Training steps of a small reference model, which calibrate the planner: it multiplies its predictions from single
kernels by the ratio of measured to predicted time of these steps (`planner/cost/reference_step.py`)."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch

from meshwright.comm import collectives
from meshwright.comm.mesh import Mesh
from meshwright.errors import UserError
from meshwright.layout import Layout
from meshwright.model.documents import Documents, MicroBatch
from meshwright.parallel.context import shard_sequences
from meshwright.parallel.parallelize import parallelize
from meshwright.parallel.step import ForwardBackward, count_targets
from meshwright.planner.cost.reference_step import batch_of, reference_model
from meshwright.planner.hardware.measured import ReferenceStep
from meshwright.probe.points import DTYPES, MeasurementPlan, ReferenceKernel, synchronize, use_precision
from meshwright.probe.stopwatch import DISTURBED, Stopwatch
from meshwright.spec.refuse import refuse

_SITE = "probe"
LONGEST_SECONDS = 5.0
"""Duration of a layout's steps in one round, without waits for cores, after which no further step begins if one was
timed: a CPU without instructions for a precision takes several seconds for each."""


def measure_reference_steps(
    mesh: Mesh, plan: MeasurementPlan, kernel: ReferenceKernel, usual_seconds: float
) -> list[ReferenceStep]:
    """Measure the step time of the reference model (a small transformer for calibration) under each reference layout;
    return one result per layout, equal on all ranks. All ranks must call this function.

    mesh: from `probe.rank.make_probe_mesh`. plan: gives the numbers of steps and rounds, the precisions and the mesh
    axes. kernel: reference matrix product, timed between steps to correct their times for the CPU's current speed.
    usual_seconds: duration of this product at the CPU's usual speed. The layouts alternate in `plan.rounds` rounds, so
    that disturbances affect all of them."""
    found, steps = [], plan.steps
    layouts: list[Layout] = []
    if steps:
        layouts = list_reference_layouts(mesh.device.type, mesh.tp.size, mesh.dp.size, plan.precisions, plan.axes)
    runs = [_ReferenceRun(layout, mesh) for layout in layouts]
    seconds: list[list[float]] = [[] for _ in runs]
    if runs:
        rounds = min(plan.rounds, steps)
        for _ in range(rounds):
            for run, times in zip(runs, seconds, strict=True):
                with use_precision(run.layout.precision or "fp32"):
                    times += run.measure(mesh, steps // rounds, kernel, usual_seconds)
        for run, times in zip(runs, seconds, strict=True):
            found.append(ReferenceStep(str(run.layout), statistics.median(times)))
    for run in runs:
        run.mesh.close()  # collective; not reached if a rank failed
    return found


class _ReferenceRun:
    """Reference model (a small transformer for calibration) under one parallel layout, ready to train on random data.
    layout: the layout, which uses all ranks. world: mesh of all ranks."""

    def __init__(self, layout: Layout, world: Mesh) -> None:
        """Build the sharded model and its random data; arguments: see the class."""
        self.layout = layout
        self.mesh = Mesh.create(layout, str(world.device), world.communicator.timeout_seconds)
        model = reference_model(world.device.type)
        dtype = DTYPES[layout.precision or "fp32"]
        built = parallelize(model.config, self.mesh, model.sequence, seed=0, parameter_dtype=dtype)
        self.engine, self.passes = built.engine, ForwardBackward(*built)
        self.batch = self._make_batch(batch_of(layout, model) // layout.dp, model.sequence, model.config.vocabulary)

    def _make_batch(self, rows: int, sequence: int, vocabulary: int) -> list[MicroBatch]:
        """Return a list of one micro-batch for this rank: `rows` random sequences of `sequence` tokens. vocabulary:
        number of token ids."""
        generator = torch.Generator().manual_seed(self.mesh.dp.rank)
        tokens = torch.randint(vocabulary, (rows, sequence + 1), generator=generator).to(self.mesh.device)
        return [shard_sequences(tokens[:, :-1], tokens[:, 1:], Documents(), self.mesh)]

    def measure(self, world: Mesh, steps: int, kernel: ReferenceKernel, usual_seconds: float) -> list[float]:
        """Train one warm-up step, then up to `steps` timed steps, as many as begin within `LONGEST_SECONDS` (at least
        one). Return the seconds of each timed step on the slowest rank, [steps].

        Time in which ranks waited for a CPU core is subtracted if it exceeds the fraction `DISTURBED` of the step. The
        remaining time is scaled to the CPU's usual speed, at which the reference matrix product `kernel` takes
        `usual_seconds`. world: mesh of all ranks."""
        targets = count_targets((batch.targets_BS for batch in self.batch), self.mesh)
        times, local = list[tuple[float, float]](), [kernel.measure_seconds()]
        for at in range(1 + steps):
            passed = torch.tensor([sum(taken - waited for taken, waited in times)], dtype=torch.float64)
            passed = passed.to(world.device)
            collectives.all_reduce(passed, world.world, _SITE, op="max").wait()  # all ranks start together
            if at > 1 and float(passed) > LONGEST_SECONDS:
                break
            synchronize(world.device)
            watch = Stopwatch()
            self.passes.train(self.batch, targets)
            synchronize(world.device)
            times.append(watch.read())
            self.engine.begin_step(0)
            local.append(kernel.measure_seconds())
        slowest, waited = torch.tensor(times[1:], dtype=torch.float64, device=world.device).T.contiguous()
        collectives.all_reduce(slowest, world.world, _SITE, op="max").wait()
        # Ranks that communicate in every layer add up their waits for cores; others wait for the slowest at the end.
        together = "max" if self.layout.dp == world.world.size else "sum"
        collectives.all_reduce(waited, world.world, _SITE, op=together).wait()
        slowest -= torch.where(waited > DISTURBED * slowest, waited.clamp(max=0.9 * slowest), 0.0)
        usual = torch.tensor(local[1:], dtype=torch.float64, device=world.device)
        collectives.all_reduce(usual, world.world, _SITE).wait()
        around = (usual[1:] + usual[:-1]) / (2 * world.world.size)  # mean over ranks, before and after each step
        return [float(each) for each in (slowest * usual_seconds / around).tolist()]


def list_reference_layouts(
    kind: str, host_ranks: int, hosts: int, precisions: Sequence[str], axes: Sequence[str] = ("tp", "cp")
) -> list[Layout]:
    """Return the layouts under which `meshwright probe` measures a training step: data parallelism in every precision,
    and tp and cp over all ranks of a host.

    kind: "cpu" or "cuda"; host_ranks: ranks of each host; hosts: number of hosts; precisions: such as "bf16"; axes:
    which of "tp" and "cp" are measured."""
    ranks, model = host_ranks * hosts, reference_model(kind)
    # CPU ranks wait equally in every type; on GPUs waiting is measurable only in 16-bit types, which are much faster.
    waiting = "bf16" if kind == "cuda" and "bf16" in precisions else precisions[0]
    found = [Layout(dp=ranks, precision=precision) for precision in precisions]
    for axis in axes:
        layout = Layout(dp=hosts, precision=waiting).with_(**{axis: host_ranks})
        try:
            refuse(layout, model.config, model.rows * ranks, model.sequence)
        except UserError:  # heads or tokens are not divisible by the number of ranks
            continue
        found += [layout] if host_ranks > 1 else []
    return found
