"""Schedules by name, and errors for invalid requests."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from meshwright.errors import UserError
from meshwright.layout import Layout
from meshwright.names import BIDIRECTIONAL_SCHEDULES, SCHEDULE_CHUNKS
from meshwright.names import SCHEDULES as KNOWN
from meshwright.program.check_pipeline import check_pipeline
from meshwright.program.durations import Durations
from meshwright.program.pipeline_text import format_pipeline
from meshwright.schedules.library import SYNCHRONOUS, count_stages, generate, generate_for_layout
from meshwright.schedules.named import SCHEDULES
from meshwright.schedules.pytorch_csv import to_csv
from meshwright.schedules.synchronous import one_f_one_b


def test_every_known_name_has_a_generator():
    assert [*SCHEDULES, "auto"] == list(KNOWN)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_named_schedule_is_valid(name: str):
    program = generate(name, 4, 16)
    check_pipeline(program)
    assert (program.name, program.ranks, program.micro_batches) == (name, 4, 16)
    assert program.chunks == SCHEDULE_CHUNKS[name][0]
    assert not program.has_transfers


def test_auto_is_handed_durations_memory_and_chunks():
    durations = Durations.per_rank((3, 1), forward=[1, 1, 2])
    program = generate("auto", 3, 4, durations=durations, memory=2, chunks=1)
    assert program.chunks == 1
    assert check_pipeline(program).peak_activations.max() <= 2


def test_chunk_count_is_free_where_schedule_allows_any():
    assert generate("interleaved", 2, 4, chunks=5).chunks == 5
    assert generate("zb-v", 2, 4, chunks=2).chunks == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("1f1", 4, 8), 'unknown schedule "1f1"; did you mean "1f1b"?'),
        (("1f1b", 0, 8), "1f1b on 0 ranks: at least 1 is needed"),
        (("1f1b", 4, -1), "1f1b with -1 micro-batches: at least 1 is needed"),
        (("1f1b", None, 8), "1f1b: the number of ranks is missing"),
        (("1f1b", 4, 8, 2), "1f1b with 2 chunks per rank: it needs exactly 1"),
        (("interleaved", 4, 8, 1), "interleaved with 1 chunk per rank: it needs at least 2"),
        (("zb-v", 4, 8, 3), "zb-v with 3 chunks per rank: it needs exactly 2"),
        (("gpipe", 1000, 100_000), "gpipe on 1000 ranks with 100000 micro-batches has about 300,000,000 steps"),
        (("pipedream-2bw", 4, 3), "pipedream-2bw on 4 ranks needs at least 4 micro-batches, not 3"),
    ],
)
def test_unsupported_schedule_arguments_are_refused_with_correction(arguments: tuple, said: str):
    with pytest.raises(UserError) as caught:
        generate(*arguments)
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(("suffix", "write"), [(".txt", format_pipeline), (".csv", to_csv)])
def test_program_file_replaces_schedule_name(suffix: str, write, tmp_path: Path):
    program, path = one_f_one_b(3, 5), tmp_path / f"schedule{suffix}"
    path.write_text(write(program))
    read = generate(f"@{path}")
    assert read.steps == program.steps and read.placement == program.placement
    assert generate(f"@{path}", 3, 5, 1).steps == program.steps
    with pytest.raises(UserError, match=r"is written for 5 micro-batches, not 8"):
        generate(f"@{path}", 3, 8)
    with pytest.raises(UserError, match=r"is written for 3 ranks, not 4"):
        generate(f"@{path}", 4, 5)


@pytest.mark.parametrize("name", ["@", "@missing.csv", "@missing.txt"])
def test_missing_program_file_is_refused(name: str):
    with pytest.raises(UserError, match=r"missing|name"):
        generate(name)


@pytest.mark.parametrize("name", SCHEDULES)
def test_layout_and_schedule_refuse_the_same_arguments(name: str) -> None:
    refused = 0
    for ranks in range(2, 7):
        for micro_batches in range(1, 14):
            try:
                generate(name, ranks, micro_batches)
                fits = True
            except UserError:
                fits = False
                refused += 1
            try:
                Layout(pp=ranks, schedule=name, micro_batches=micro_batches)
                assert fits, (ranks, micro_batches)
            except UserError:
                assert not fits, (ranks, micro_batches)
    assert (refused > 0) == (name in (*BIDIRECTIONAL_SCHEDULES, "dualpipe-v", "pipedream-2bw"))


def test_a_file_that_was_edited_is_read_again(tmp_path: Path):
    file = tmp_path / "mine.txt"
    layout = Layout.parse(f"pp2:@{file} mb4")
    for name in ("gpipe", "1f1b", "gpipe"):
        file.write_text(format_pipeline(generate(name, 2, 4)) + "\n" * (name == "1f1b"))
        assert generate_for_layout(layout).steps == generate(name, 2, 4).steps
    file.unlink()
    with pytest.raises(UserError, match=r"mine\.txt"):
        generate_for_layout(layout)


@pytest.mark.parametrize("name", sorted(SYNCHRONOUS))
def test_stages_and_refusals_are_those_of_the_program(name: str):
    """Generators check their numbers themselves; the rule relies on the checks of `Layout`."""
    for ranks, micro_batches, chunks in product((2, 3, 4), (1, 2, 5, 8), (1, 2, 3)):
        try:
            layout = Layout(pp=ranks, schedule=name, chunks=chunks, micro_batches=micro_batches)
        except UserError:
            continue
        assert count_stages(layout) == generate_for_layout(layout).stages
    with pytest.raises(UserError) as program:
        generate_for_layout(long := Layout(pp=1000, schedule=name, micro_batches=100_000))
    with pytest.raises(UserError) as rule:
        count_stages(long)
    assert str(rule.value) == str(program.value)
