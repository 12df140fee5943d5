"""Code of each rank in the tests that execute our CSV with PyTorch's pipeline runtime."""

from __future__ import annotations

import torch
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from meshwright.program.pipeline import PipelineProgram


def model(stages: int) -> list[torch.nn.Module]:
    torch.manual_seed(0)
    return [torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Tanh()).double() for _ in range(stages)]


def gradient_error(program: PipelineProgram, path: str, form: str) -> float:
    """Run the CSV at `path` as this rank; return the largest relative error of a gradient against one device."""
    rank = torch.distributed.get_rank()
    last, mine = program.stages - 1, [stage for stage, home in enumerate(program.placement[0]) if home == rank]
    torch.manual_seed(1)
    inputs, targets = torch.randn(2, program.micro_batches, 6, dtype=torch.float64)

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output - target).square().sum()

    pieces, whole = model(program.stages), torch.nn.Sequential(*model(program.stages))
    stages = [PipelineStage(pieces[stage], stage, program.stages, torch.device("cpu")) for stage in mine]
    runtime = _PipelineScheduleRuntime(stages, program.micro_batches, loss_fn=loss, scale_grads=False)
    runtime._load_csv(path, format=form)
    runtime.step(*([inputs] if 0 in mine else []), **({"target": targets} if last in mine else {}))
    loss(whole(inputs), targets).backward()
    return max(
        float((ours.grad - right.grad).abs().max() / right.grad.abs().max())
        for stage in mine
        for ours, right in zip(pieces[stage].parameters(), whole[stage].parameters(), strict=True)
    )
