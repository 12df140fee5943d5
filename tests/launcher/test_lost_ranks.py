"""Training whose ranks diverge: one line names rank, call and code line, a report has details, all ranks end."""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
from pathlib import Path
from typing import Any

from meshwright.checkpoint import verify_checkpoint
from meshwright.monitoring.run_directory import RunDirectory
from meshwright.recipe import Recipe
from tests.forked_commands import ForkedCommand
from tests.rank_processes import read_ranks
from tests.training import training_cases as cases
from tests.training.faulty_ranks import COMMAND, LAUNCHER

PATIENCE = 2.0  # seconds, from the fault on


def recipe_of(place: Path, layout: str) -> Recipe:
    return cases.recipe(
        place,
        layout,
        model={"family": "llama", "layers": 1, "hidden": 16, "heads": 4, "kv_heads": 2, "intermediate": 24},
        data={"source": cases.SOURCES[0], "tokenizer": "bytes", "sequence": 16, "cache": str(place.parent / "cache")},
        run_collective_timeout=60.0,
        train_steps=5,
        train_batch=6,
        checkpoint_every=2,
        checkpoint_background=False,
    )


def train(place: Path, layout: str, restarts: int = 0, **fault: Any) -> tuple[list[str], dict[str, Any] | str]:
    """The launcher's log of a run with a fault, and its result or the line of its RankLost."""
    recipe, directory = recipe_of(place, layout), RunDirectory(place / "run")
    description = {"recipe": recipe.to_toml(), "source": "recipe", "options": {"show_progress": False}}
    description["fault"] = {**fault, "timeout": PATIENCE}
    launcher = ForkedCommand(
        ["-c", LAUNCHER, json.dumps(description), str(recipe.parsed_layout.world_size), str(restarts)], place.parent
    )
    output, errors = launcher.communicate(timeout=200)
    assert launcher.returncode == 0, errors
    log, result, line = json.loads(output)
    if result is None:
        assert "\n" not in line
        for process in read_ranks(directory.path).values():
            assert not Path(f"/proc/{process}").exists(), "no rank is left over"
        with directory:
            pass  # the lock is free
        assert [verify_checkpoint(path) for path in directory.checkpoints.glob("step-*")] == [[]]
    return log, line if result is None else result


def test_stopped_rank_0_is_named_with_missing_call(tmp_path):
    log, line = train(tmp_path, "dp3 fp32", rank=0, does="stop", site="data.targets", call=4)
    assert re.fullmatch(
        r"rank 0 has not entered call \d+ of ranks 0-2 \(all_reduce data\.targets over data\), where ranks 1, 2 have "
        r"been waiting for \d+\.\d s at parallel/\w+\.py:\d+ \(sum_over_data\); its last completed call was "
        r"call \d+ \(.*\), \d+\.\d "
        r"s ago, at training/trainer\.py:\d+ \(Trainer\._all_reduce_outcome\); its process is stopped \(state T\); "
        r"after step 3; the same command resumes from step-000002",
        line,
    ), line
    report = (tmp_path / "run/rank-lost.txt").read_text()
    assert log[-1] == f"full report: {tmp_path}/run/rank-lost.txt"
    assert report.startswith(line.partition("; the same command")[0])
    assert re.search(r"^> rank 0 \(process \d+, stopped \(state T\)\): waits in no call$", report, re.M)
    assert re.search(
        r"^  rank 2 \(process \d+, .*\): has been waiting for \d+\.\d s in call \d+ of ranks 0-2", report, re.M
    )
    assert re.search(
        r"^> +\d+  all_reduce data.targets over data int64\[\] \(ranks 1,2\); not entered \(rank 0\)$", report, re.M
    )


def test_killed_rank_is_named_and_run_resumes(tmp_path):
    log, result = train(tmp_path, "dp2 fp32", restarts=1, rank=1, does="kill", site="step.verdict", call=4)
    assert isinstance(result, dict) and result["step"] == 5
    assert re.fullmatch(
        r"rank 1 \(process \d+\) was killed by signal 9 \(SIGKILL\) after step 3, after call \d+ \(all_reduce "
        r"data\.gradients over data\); the same command resumes from step-000002; restarting \(1 of 1\)",
        log[-1],
    ), log[-1]
    report = (tmp_path / "run/rank-lost.txt").read_text()
    assert re.search(r"^> rank 1 \(process \d+, was killed by signal 9 \(SIGKILL\)\): waits in no call$", report, re.M)
    steps = [entry["step"] for entry in cases.metrics(tmp_path) if "loss" in entry]
    assert steps == [1, 2, 3, 4, 5]


def test_skipped_call_is_attributed_by_history_on_two_ranks(tmp_path):
    _, line = train(tmp_path, "dp2 zero1 fp32", rank=1, does="skip", site="data.targets", call=4)
    assert re.match(
        r"rank 1 has skipped call \d+ of ranks 0,1 \(all_reduce data\.targets over data\), at parallel/\w+\.py:\d+ "
        r"\(sum_over_data\) and is in reduce_scatter data\.gradients over shard, at parallel/\w+\.py:\d+ ",
        line,
    ), line
    assert "rank 0 has been waiting for " in line


def test_wrong_shape_is_attributed_by_history_on_two_ranks(tmp_path):
    """gloo ends the process that receives more than it expects: not the one at fault."""
    _, line = train(tmp_path, "dp2 fp32", rank=0, does="shape", site="step.verdict", call=4)
    assert re.match(
        r"rank 0 passes float64\[9\] to call \d+ of ranks 0,1 \(all_reduce step\.verdict over world\) where rank 1 "
        r"passes float64\[6\], at training/trainer\.py:\d+ \(Trainer\._all_reduce_outcome\)",
        line,
    ), line


def test_first_timed_out_external_rank_reports_its_host(tmp_path):
    recipe = recipe_of(tmp_path, "dp3 fp32")
    fault = {"rank": 1, "does": "stop", "site": "data.targets", "call": 3, "timeout": PATIENCE}
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(listener.getsockname()[1]), "WORLD_SIZE": "3"}
    code = COMMAND[2].replace("main()", "join()")
    ranks = [
        ForkedCommand(
            ["-c", code, recipe.to_toml(), json.dumps(fault), str(tmp_path / "struck")],
            tmp_path,
            os.environ | environment | {"RANK": str(rank)},
        )
        for rank in range(3)
    ]
    try:
        errors = {rank: ranks[rank].communicate(timeout=300)[1] for rank in (0, 2)}
        assert (ranks[0].returncode, ranks[1].poll(), ranks[2].returncode) == (3, None, 3), errors
    finally:
        for rank in ranks:
            rank.kill()
    verdict = r"rank 1 has not entered call \d+ of ranks 0-2 \(all_reduce data.targets over data\), where ranks? "
    reporting = [rank for rank, text in errors.items() if re.search(rf"^error: {verdict}.*\(state T\)$", text, re.M)]
    assert len(reporting) == 1, errors
    (kept,) = (tmp_path / "run").glob("rank-lost-*.txt")
    assert f"full report: {kept}" in errors[reporting[0]].splitlines()
    assert "> rank 1 (process" in kept.read_text() and "rank 2 (process" in kept.read_text()
    assert re.search(r"^error: rank \d had no answer from ranks", errors[2 - reporting[0]], re.M)
    assert not list(
        Path("/dev/shm").glob(f"meshwright-calls-*{hashlib.sha256(str(tmp_path / 'run').encode()).hexdigest()[:16]}*")
    )
