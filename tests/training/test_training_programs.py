"""Training whose gradients are reduced by collective programs: the losses of native collectives, the same bits on every
rank, resumable."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from meshwright.comm.local import LocalRanks
from meshwright.comm.mesh import Mesh
from meshwright.recipe import load_recipe_text
from tests.training import training_cases as cases

RING = {"all_reduce": "ring", "reduce_scatter": "ring", "all_gather": "ring"}
OTHERS = {"all_reduce": "rabenseifner", "reduce_scatter": "recursive-halving", "all_gather": "recursive-doubling"}


def run(ranks: LocalRanks, place: Path, layout: str, **changes):
    return ranks.run(cases.train, cases.recipe(place, layout, train_steps=4, **changes).to_toml())


@pytest.mark.parametrize(
    ("layout", "table"),
    [("dp2 fp32", OTHERS), ("dp4 zero1 fp32 mb2", RING), ("dp4 zero3 hs2 fp32", OTHERS), ("dp2 zero2 mb2 bf16", RING)],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_programs_train_like_native_collectives(
    two: LocalRanks, four: LocalRanks, tmp_path: Path, layout: str, table: dict[str, str]
):
    ranks = two if "dp2" in layout else four
    native = run(ranks, tmp_path / "native", layout)
    named = run(ranks, tmp_path / "named", layout, collectives=table)
    assert not any(outcome["error"] for outcome in native + named)
    for one, other in zip(cases.trace(tmp_path / "native"), cases.trace(tmp_path / "named"), strict=True):
        assert one[:1] == other[:1] and one[1:4] == pytest.approx(other[1:4], rel=1e-4)
    before, after = cases.whole_state(native), cases.whole_state(named)
    for key, value in before.items():
        torch.testing.assert_close(after[key], value, rtol=1e-3, atol=1e-5 if "bf16" not in layout else 2e-3)


def masters(text: str) -> list[torch.Tensor]:
    """Return all master weights of this rank after a run."""
    from meshwright.collectives.named import load_named_programs
    from meshwright.monitoring.run_directory import RunDirectory
    from meshwright.training import loop

    recipe = load_recipe_text(text, "recipe")
    cases.loop.device_peak_flops = lambda mesh, precision: 1e9
    mesh = Mesh.create(recipe.parsed_layout, programs=load_named_programs(recipe.collectives, recipe.parsed_layout))
    directory = RunDirectory(recipe.run_directory)
    directory.create()
    run = loop.Run(recipe, mesh, directory, show_progress=False)
    run.run()
    found = [shard.master.clone() for shard in run.trainer.parallel.shards]
    mesh.close()
    return found


def test_every_rank_ends_bitwise_equal(tmp_path: Path):
    with LocalRanks(3) as ranks:
        for algorithm in ("ring", "butterfly", "all-pairs"):
            text = cases.recipe(
                tmp_path / algorithm, "dp3 fp32", train_steps=2, train_batch=9, collectives={"all_reduce": algorithm}
            ).to_toml()
            first, *others = ranks.run(masters, text)
            assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True)), algorithm


def test_run_resumes_with_another_program(two: LocalRanks, tmp_path: Path):
    text = cases.recipe(tmp_path, "dp2 zero1 fp32", train_steps=4, checkpoint_every=2, collectives=RING).to_toml()
    two.run(cases.train, text, 2)
    again = run(two, tmp_path, "dp2 zero1 fp32", checkpoint_every=2, collectives=OTHERS)
    assert not again[0]["error"] and again[0]["result"]["step"] == 4
