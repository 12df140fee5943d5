"""Which package of Python's standard library is this passage from? A small BERT learns it from scratch.

    meshwright run --ranks 2 examples/bert_classifier.py
    torchrun --nproc-per-node 2 examples/bert_classifier.py
    python examples/bert_classifier.py layout=dp1

The text is the library's own source, which every Python has. A passage is 62 word pieces; a fifth of the files is held
out, so that no passage of a file that was trained on is asked for. What follows the script's name are overrides of the
recipe below, such as `train.steps=100` or "layout=dp2 zero3 bf16".
"""

from __future__ import annotations

import dataclasses
import random
import sys
import sysconfig
from collections import Counter
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.trainers import WordPieceTrainer

from meshwright.model.encoder import Encoder
from meshwright.model.initialise import initialise
from meshwright.spec.parameters import parameter_table
from meshwright.spec.presets import preset
from meshwright.training.module import exit_codes, fit

PACKAGES = ("asyncio", "ctypes", "email", "importlib", "multiprocessing", "xml")
LENGTH = 64  # word pieces of a passage, with [CLS] before and [SEP] behind it
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
RECIPE = {
    "layout": "dp2 zero1",
    "run": {"seed": 1},
    "train": {
        "steps": 240,
        "batch": 64,
        "learning_rate": 1e-3,
        "warmup": 20,
        "weight_decay": 0.05,
        "validate_every": 60,
        "validation_sequences": 1000,
        "log_every": 20,
    },
    "checkpoint": {"every": 120},
}


def files() -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """Texts and classes of the files to train on, and of those held out."""
    training, held_out = [], []
    library = Path(sysconfig.get_path("stdlib"))
    for label, package in enumerate(PACKAGES):
        paths = sorted(path for path in (library / package).rglob("*.py") if "test" not in path.parts)
        for number, path in enumerate(paths):
            text = path.read_text(encoding="utf-8", errors="replace")
            (held_out if number % 5 == 2 else training).append((text, label))
    return training, held_out


def passages(texts: list[tuple[str, int]], tokenizer: Tokenizer) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Token ids [LENGTH] and the class of each whole passage."""
    first, last, found = tokenizer.token_to_id("[CLS]"), tokenizer.token_to_id("[SEP]"), []
    for text, label in texts:
        ids = tokenizer.encode(text).ids
        for start in range(0, len(ids) - (LENGTH - 2) + 1, LENGTH - 2):
            tokens = [first, *ids[start : start + LENGTH - 2], last]
            found.append((torch.tensor(tokens), torch.tensor(label)))
    return found


def learn_word_pieces(texts: list[tuple[str, int]], vocabulary: int = 2000) -> Tokenizer:
    """BERT's kind of tokenizer, learnt from the texts."""
    tokenizer = Tokenizer(WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = BertNormalizer()
    tokenizer.pre_tokenizer = BertPreTokenizer()
    trainer = WordPieceTrainer(vocab_size=vocabulary, special_tokens=SPECIAL, show_progress=False)
    tokenizer.train_from_iterator((text for text, _ in texts), trainer)
    return tokenizer


def main() -> None:
    training_files, held_out_files = files()
    tokenizer = learn_word_pieces(training_files)
    training, held_out = passages(training_files, tokenizer), passages(held_out_files, tokenizer)
    random.Random(0).shuffle(held_out)  # the validation takes the first thousand

    config = dataclasses.replace(
        preset("bert-tiny"),
        vocabulary=tokenizer.get_vocab_size(),
        max_positions=LENGTH,
        head="classes",
        labels=PACKAGES,
    )

    def build() -> Encoder:
        model = Encoder(config)
        initialise(model, parameter_table(config), seed=0)
        return model

    result = fit(
        build,
        lambda model, batch: model(batch[0], batch[1]),  # the sum of the passages' losses
        training,
        recipe=RECIPE,
        overrides=sys.argv[1:],
        reduction="sum",
        validation=held_out,
        measures={"accuracy": lambda model, batch: (model.logits(batch[0]).argmax(-1) == batch[1]).sum()},
    )
    if result is not None and result["validation_accuracy"] is not None:  # rank 0, which has validated
        most = max(Counter(int(label) for _, label in held_out).values()) / len(held_out)
        print(
            f"accuracy on passages of held-out files: {result['validation_accuracy']:.1%} "
            f"(always the most frequent package: {most:.1%})"
        )


if __name__ == "__main__":
    with exit_codes():
        main()
