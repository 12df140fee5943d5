"""Unknown names: the nearest known name is suggested, or none if none is similar."""

from __future__ import annotations

from meshwright.names import OPTIMIZERS, SCHEDULE_CHUNKS, SCHEDULES, nearest, unknown


def test_unknown_name_error_lists_nearest_and_all_known():
    assert (
        unknown("optimizer", "adamq", OPTIMIZERS)
        == 'unknown optimizer "adamq"; did you mean "adamw"? (known: adamw, sgd)'
    )


def test_dissimilar_word_gets_no_suggestion():
    assert nearest("zzz", OPTIMIZERS) is None
    assert "did you mean" not in unknown("optimizer", "zzz", OPTIMIZERS)


def test_case_does_not_hide_a_name():
    assert nearest("AdamW", OPTIMIZERS) == "adamw"
    assert nearest("model.safetensor", ["Model.safetensors"]) == "Model.safetensors"


def test_every_schedule_declares_its_chunk_range():
    for name in SCHEDULES:
        unless_said, least, most = SCHEDULE_CHUNKS[name]
        assert least <= unless_said and (most is None or unless_said <= most), name


def test_long_lists_are_replaced_by_similar_names_and_their_place():
    known = [f"model-{number}b" for number in range(30)]
    said = unknown("model", "model-3", known, "somewhere prints them")
    assert said.startswith('unknown model "model-3"; did you mean "model-3b"? (30 are known; similar: model-')
    assert said.endswith("; somewhere prints them)") and len(said) < 160
    assert unknown("model", "zzz", known) == 'unknown model "zzz" (30 are known)'
