"""The number of threads of a run: chosen by the recipe, the checkpoint that is resumed, or the rule."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import pytest
import torch

from meshwright import threads
from meshwright.errors import UserError
from meshwright.launcher import rank_threads
from meshwright.launcher.rank_threads import (
    agree_on_threads,
    choose_local_threads,
    compute_layer_flops,
    compute_min_cores_per_rank,
    format_thread_change,
    ranks_share_one_host,
    read_rank_cores,
    resolve_threads,
)
from meshwright.launcher.rendezvous import RendezvousInfo
from meshwright.recipe import Recipe, load_recipe
from meshwright.training import loop
from meshwright.training.worker import train_as_rank
from tests.training import training_cases as cases


@pytest.fixture
def recipe(tiny_recipe, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return lambda *overrides: load_recipe(tiny_recipe, overrides)


def test_resumed_run_keeps_threads_and_logs_different_default(recipe, monkeypatch):
    state = {"layout": "dp1 fp32", "threads": 2}
    assert resolve_threads(recipe(), 2, state) == rank_threads.ThreadChoice(2)
    monkeypatch.setattr(rank_threads, "count_available_cores", lambda: 1)
    kept = resolve_threads(recipe(), 1, state)
    assert kept.count == 2
    assert kept.note.startswith("threads: keeping 2 per rank from the checkpoint for bitwise reproducibility (")
    assert kept.note.endswith("(1 available cores would give 1; set run.threads=1 to change)")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert "OMP_NUM_THREADS would give 1" in resolve_threads(recipe(), 1, state).note


def test_run_threads_and_new_layout_override_saved_threads(recipe):
    state = {"layout": "dp1 fp32", "threads": 2}
    assert resolve_threads(recipe("run.threads=3"), 1, state) == rank_threads.ThreadChoice(3)
    assert resolve_threads(recipe("layout=dp2"), 1, state) == rank_threads.ThreadChoice(1)
    assert resolve_threads(recipe(), 1, state | {"threads": None}) == rank_threads.ThreadChoice(
        1
    )  # the run was on a GPU
    assert resolve_threads(recipe(), 1, {"layout": "dp1 fp32"}) == rank_threads.ThreadChoice(1)  # of an older version
    assert resolve_threads(recipe(), 1, None) == rank_threads.ThreadChoice(1)
    for absurd in (10**9, 0, -1, "2", 1.5):
        assert resolve_threads(recipe(), 1, state | {"threads": absurd}) == rank_threads.ThreadChoice(1)
    for layout in ({}, {"layout": "nonsense"}, {"layout": 5}):
        assert resolve_threads(recipe(), 1, {"threads": 2, **layout}) == rank_threads.ThreadChoice(1)


def test_thread_note_does_not_mention_variables_set_by_meshwright(recipe, monkeypatch):
    monkeypatch.setattr(rank_threads, "count_available_cores", lambda: 1)
    for name, value in (("OMP_NUM_THREADS", "1"), ("MESHWRIGHT_THREADS", "1")):
        monkeypatch.setenv(name, value)
    assert "1 available cores would give 1" in resolve_threads(recipe(), 1, {"layout": "dp1 fp32", "threads": 2}).note


class Store(dict[str, bytes]):
    """A store of one process."""

    def set(self, key: str, value: str) -> None:
        self[key] = value.encode()

    def get(self, key: str) -> bytes:  # type: ignore[override]
        return self[key]


@pytest.mark.parametrize("problem", [None, "the checkpoint's state is no JSON"])
def test_every_rank_gets_threads_or_error_of_rank_0(recipe, monkeypatch, problem):
    def state(recipe: Recipe) -> None:
        if problem is not None:
            raise UserError(problem)

    monkeypatch.setattr(rank_threads, "read_resumed_state", state)
    monkeypatch.setattr(rank_threads, "read_rank_cores", lambda _: {"host": "a", "cores": 6, "shared": True})
    store, places = Store(), [RendezvousInfo(rank, 2, rank, "env://", "torchrun", 2) for rank in (1, 0)]
    with suppress(KeyError):  # rank 1 comes first, and would wait
        agree_on_threads(recipe("layout=dp2"), places[0], store)
    for place in reversed(places):
        if problem is None:
            assert agree_on_threads(recipe("run.threads=3"), place, store).count == 3
        else:
            with pytest.raises(UserError, match=problem):
                agree_on_threads(recipe(), place, store)


def test_ranks_with_own_cores_do_not_divide_host_cores(monkeypatch):
    monkeypatch.delenv("SLURM_CPUS_PER_TASK", raising=False)
    place = RendezvousInfo(0, 4, 0, "env://", "SLURM", 4)
    assert ranks_share_one_host(place) and not ranks_share_one_host(replace(place, host_ranks=2))
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "4")
    assert not ranks_share_one_host(place)


def test_changed_thread_count_is_one_line_about_last_bits():
    line = format_thread_change(2, 1)
    assert line is not None and line.startswith("threads per rank changed from 2 to 1: ")
    assert "last bits" in line
    assert [format_thread_change(*pair) for pair in ((2, 2), (None, 2), (2, None))] == [None] * 3


def test_small_model_gets_one_thread_large_model_its_share(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr("meshwright.threads.count_available_cores", lambda: 8)
    elsewhere = f"run.directory={tmp_path}/none"
    small, large = recipe(elsewhere), recipe(elsewhere, "model.hidden=1024", "data.sequence=1024")
    assert [choose_local_threads(each, 2).count for each in (small, large)] == [1, 4]
    work = compute_layer_flops(large)
    assert work is not None
    for layout, part in (("dp2", 2), ("dp2 mb2", 4), ("tp2", 2), ("cp2", 2)):
        assert compute_layer_flops(
            recipe(elsewhere, "model.hidden=1024", "data.sequence=1024", f"layout={layout}")
        ) == (pytest.approx(work / part))


def test_ranks_on_several_hosts_use_smallest_core_count(monkeypatch):
    monkeypatch.setattr(rank_threads, "count_available_cores", lambda: 8)
    shared = read_rank_cores({})
    assert shared["cores"] == 8 and shared["shared"]
    own = read_rank_cores({"SLURM_CPUS_PER_TASK": "3"})
    assert own["cores"] == 3 and not own["shared"]
    there = {"host": "other", "cores": 4, "shared": True}
    assert compute_min_cores_per_rank([shared, shared]) == 4
    assert compute_min_cores_per_rank([shared, there, there]) == 2
    assert compute_min_cores_per_rank([own, own, own]) == 3
    assert compute_min_cores_per_rank([there] * 9) == 1


def test_resumed_run_reports_its_threads(tmp_path, monkeypatch, capsys):
    """In the real command path, where one core is available: kept, and changed by the recipe."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for module in (rank_threads, threads):
        monkeypatch.setattr(module, "count_available_cores", lambda: 1)
    monkeypatch.setattr(loop, "device_peak_flops", lambda mesh, precision: 1e9)
    before, said, found = torch.get_num_threads(), [], []
    try:
        for steps, chosen in ((1, {"run_threads": 2}), (2, {}), (3, {"run_threads": 1})):
            train_as_rank(cases.recipe(tmp_path, "dp1 fp32", train_steps=steps, train_warmup=0, **chosen), probe=False)
            said.append([line for line in capsys.readouterr().err.splitlines() if line.startswith("threads")])
            found.append(torch.get_num_threads())
    finally:
        torch.set_num_threads(before)
    assert found == [2, 2, 1]
    assert said == [
        [],
        [
            "threads: keeping 2 per rank from the checkpoint for bitwise reproducibility (1 available cores would give "
            "1; set run.threads=1 to change)"
        ],
        ["threads per rank changed from 2 to 1: results may differ in the last bits from an uninterrupted run"],
    ]
