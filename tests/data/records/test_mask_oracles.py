"""Trained tokens against those of TRL and axolotl, as `bench/mask_oracles.py` recorded them for the same records.

The texts of the recorded tokens are compared. TRL also trains the line feed that a template writes after the token that
ends a turn; axolotl does not train the spaces that Llama 2's template writes around an answer.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from bench.shared.chat_templates import STYLES, write_tokenizer
from meshwright.data.packing.token_flags import TRAINED_BIT
from meshwright.data.records.conversations import RecordFormat
from meshwright.data.records.examples import ExampleEncoder
from meshwright.data.sources.reading import Document

RECORDED = json.loads((Path(__file__).parent / "mask_oracles.json").read_text())
AXOLOTL, TRL, COMPLETION = "axolotl", "TRL assistant_only_loss", "TRL completion"


def find_trained(encoder: ExampleEncoder, record: dict, kind: str) -> list[str]:
    """Return the texts of the runs of trained tokens."""
    (example,) = RecordFormat(kind).parse_examples(record)
    [[piece]] = encoder.encode_documents([Document("d", "", None, example)])
    pairs = zip(piece.tokens.tolist(), (piece.flags & TRAINED_BIT != 0).tolist(), strict=True)
    runs = ((mark, [token for token, _ in run]) for mark, run in itertools.groupby(pairs, key=lambda pair: pair[1]))
    return [encoder.tokenizer.tokenizer.decode(run, skip_special_tokens=False) for mark, run in runs if mark]


@pytest.mark.parametrize("style", list(RECORDED["trained"]))
def test_trained_text_is_that_of_trl_and_axolotl(style: str, tmp_path: Path):
    encoder = ExampleEncoder.from_directory(write_tokenizer(tmp_path, STYLES[style], "byte-level"))
    compared = set()
    for kind, by_peer in RECORDED["trained"][style].items():
        if "cut within words" in kind:  # depends on the vocabulary
            continue
        for peer, theirs in by_peer.items():
            record = dict(RECORDED["records"][kind])
            if peer == COMPLETION:
                messages = record.pop("messages")
                record |= {"prompt": messages[:-1], "completion": messages[-1:]}
            ours = find_trained(encoder, record, "instruction" if peer == COMPLETION else "chat")
            if (style, peer) == ("llama-2", AXOLOTL):
                ours, theirs = (["".join("".join(runs).split())] for runs in (ours, theirs))
            elif peer != AXOLOTL:
                theirs = [run.removesuffix("\n") for run in theirs]
            assert ours == theirs, (kind, peer)
            compared.add(peer)
    assert {AXOLOTL, COMPLETION} <= compared and (TRL in compared) == (style in ("llama-3", "gemma", "marked"))
