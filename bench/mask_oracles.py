"""Which tokens of a conversation are trained on: here, by TRL and by axolotl, token by token on the same records.

    python bench/mask_oracles.py TRL_TEMPLATES AXOLOTL_TEMPLATES...

TRL_TEMPLATES: the folder `trl/chat_templates` of TRL, which has the templates of models and, of most, a second one
(`NAME_training.jinja`) with {% generation %} marks. Other folders, such as axolotl's, have only the first kind. Needs
`pip install trl datasets` and axolotl's source in `PYTHONPATH` (`pip install axolotl` needs a GPU's packages).

The same records go through `SFTTrainer` with `assistant_only_loss` (which takes the second template), through its mask
of prompt and completion, and through axolotl's `chat_template` strategy with its defaults (`roles_to_train:
[assistant]`, `train_on_eos: turn`, `message_field_training: train`; `eot_tokens`: the tokens that end a turn in the
template). Every run of tokens that only one side trains is put into one of `REASONS` by its text; a run that none
explains is "unexplained". Writes `bench/results/mask_oracles.json`.
"""

from __future__ import annotations

import copy
import itertools
import json
import logging
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent))
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from bench.shared.chat_templates import STYLES
from chat_templates import CONVERSATIONS, SPECIAL
from common import write_result
from meshwright.data.packing.token_flags import TRAINED_BIT
from meshwright.data.records.chat_template import ChatTemplate
from meshwright.data.records.conversations import RecordFormat
from meshwright.data.records.examples import ExampleEncoder
from meshwright.data.records.messages import MalformedRecord, Message
from meshwright.data.records.template_rendering import TemplateError
from meshwright.errors import UserError

ENDS = (
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<turn|>", "<|end|>", "<|return|>", "<|call|>",
    "<|eot|>", "<|END_OF_TURN_TOKEN|>", "<|end_of_turn|>", "<|endofturn|>", "[|endofturn|]", "<|end_of_text|>",
    "<｜end▁of▁sentence｜>", "<end_of_utterance>", "</s>", "<eos>", "<|endoftext|>",
)  # fmt: skip
REASONS = {
    "marks": "the template has {% generation %} marks, which are followed here; the peer does not look at them",
    "after the end": "theirs: white space or an end-of-text token that the template writes after the token that ends "
    "the turn. A model stops at that token, so nothing after it is ever generated",
    "header": "theirs: text of the header that add_generation_prompt writes, which a model is given",
    "between": "ours: what the template writes between that header and the answer, such as an empty thought, a space "
    "or a channel. The model has to generate it, as the prompt does not have it",
    "second end": "ours: one more token that the template writes at the end of the turn, if a conversation ends there",
    "empty answers": "axolotl locates a turn by its content, so that calls without content are not trained, or more is",
    "parts": "axolotl trains a token with letters of a part that is not trained, against its documentation",
    "special tokens": "text of a message that spells a special token is ordinary text here, and that token there",
    "another template": "TRL trains with another template than the model has, which keeps earlier thoughts",
    "dropped calls": "axolotl gives a template only the fields of messages that it finds in its source",
    "parts of a content": "the template takes only lists of parts as a content, which the peer does not write",
}
RECORDED = Path(__file__).parent.parent / "tests" / "data" / "records" / "mask_oracles.json"
Labels = tuple[list[int], list[bool]]  # token ids, and which of them are trained


class Run(NamedTuple):
    """Tokens that only one side trains. before: text before them. continues: the token before them is trained here."""

    side: str
    before: str
    text: str
    continues: bool


def list_records() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (name, record): the conversations of `chat_templates.py` as records, and one with marks of turns."""
    for name, (messages, tools) in CONVERSATIONS.items():
        yield name, {"messages": messages} | ({"tools": tools} if tools else {})
    messages = copy.deepcopy(CONVERSATIONS["two turns"][0])
    messages[1]["train"] = False
    yield "a turn marked as context", {"messages": messages}
    for name, texts in (
        ("parts", ("Some are.", " Not", " all.")),
        ("parts cut within words", ("Some a", "re. No", "t all.")),
    ):
        parts = [
            {"type": "text", "text": text, "train": mark} for text, mark in zip(texts, (True, False, True), strict=True)
        ]
        yield (
            f"{name} marked as context",
            {"messages": [*CONVERSATIONS["two turns"][0][:3], {"role": "assistant", "content": parts}]},
        )


def write_tokenizer(directory: Path, source: str) -> set[str]:
    """Write a byte-level BPE tokenizer with the template `source` and its special tokens; return its turn ends."""
    text = json.dumps([*CONVERSATIONS.values()]) * 4
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        [text], trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    )
    ends = [end for end in ENDS if end in source]
    named = {"bos_token": "<s>", "eos_token": ends[0] if ends and "eos_token" not in source else "</s>"}
    special = sorted({*SPECIAL.findall(source), *named.values(), *ends})
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=source, **named).save_pretrained(directory)
    config = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": source}))
    return {*ends, named["eos_token"]}


def find_ours(encoder: ExampleEncoder, record: dict[str, Any], kind: str = "chat") -> Labels:
    """Return the labels of a record here."""
    (example,) = RecordFormat(kind).parse_examples(copy.deepcopy(record))
    messages = *example.prompt, *example.branches[0]
    given: dict[str, Any] = {"tools": example.tools, "variables": example.variables}
    rendered = encoder.template.render_with_spans(messages, len(example.prompt), **given)
    ((tokens, marks),) = encoder._tokenize([rendered])
    return tokens.tolist(), (marks & TRAINED_BIT != 0).tolist()


class Trl:
    """Labels of `SFTTrainer`."""

    def __init__(self, directory: Path, assistant_only: bool) -> None:
        from datasets import Dataset
        from transformers import LlamaConfig, LlamaForCausalLM
        from trl import SFTConfig, SFTTrainer

        self._tokenizer = AutoTokenizer.from_pretrained(directory)
        size = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=len(self._tokenizer), **size))
        self._arguments = SFTConfig(
            str(directory / "run"),
            assistant_only_loss=assistant_only,
            max_length=None,
            report_to=[],
            use_cpu=True,
            bf16=False,
            eos_token=self._tokenizer.eos_token,
            disable_tqdm=True,
        )
        first = Dataset.from_list(
            [{"messages": CONVERSATIONS["one turn"][0]}] if assistant_only else [split(CONVERSATIONS["one turn"][0])]
        )
        self.trainer = SFTTrainer(model, self._arguments, train_dataset=first, processing_class=self._tokenizer)

    def find(self, record: dict[str, Any]) -> Labels:
        """Return the labels of a record."""
        from datasets import Dataset

        rows = self.trainer._prepare_dataset(
            Dataset.from_list([copy.deepcopy(record)]), self._tokenizer, self._arguments, False, None, "train"
        )
        return list(rows[0]["input_ids"]), [label != -100 for label in rows[0]["labels"]]


def split(messages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return a conversation as TRL's record of prompt and completion."""
    return {"prompt": list(messages[:-1]), "completion": list(messages[-1:])}


class Axolotl:
    """Labels of axolotl's `chat_template` strategy."""

    def __init__(self, directory: Path, source: str, ends: set[str]) -> None:
        from axolotl.prompt_strategies.chat_template import ChatTemplatePrompter, ChatTemplateStrategy

        tokenizer = AutoTokenizer.from_pretrained(directory)
        prompter = ChatTemplatePrompter(tokenizer, source, message_field_training="train")
        self._strategy = ChatTemplateStrategy(
            prompter,
            tokenizer,
            False,
            1 << 20,
            roles_to_train=["assistant"],
            train_on_eos="turn",
            train_on_eot="turn",
            eot_tokens=sorted(ends),
        )

    def find(self, record: dict[str, Any]) -> Labels:
        """Return the labels of a record."""
        found = self._strategy._tokenize_single_prompt(copy.deepcopy(record))
        return list(found["input_ids"]), [label != -100 for label in found["labels"]]


def list_runs(tokenizer: Tokenizer, ours: Labels, theirs: Labels) -> Iterator[Run]:
    """Yield the runs of tokens that only one side trains."""
    ids, at = ours[0], 0
    while at < len(ids):
        end = at
        while end < len(ids) and ours[1][end] != theirs[1][end] and ours[1][end] == ours[1][at]:
            end += 1
        if end > at:
            parts = [
                tokenizer.decode(ids[a:b], skip_special_tokens=False) for a, b in ((max(0, at - 9), at), (at, end))
            ]
            yield Run("ours" if ours[1][at] else "theirs", *parts, at > 0 and ours[1][at - 1])
        at = max(end, at + 1)


def explain(run: Run, template: ChatTemplate, kind: str, peer: str, ends: set[str]) -> str:
    """Return the key in `REASONS` of a run of tokens."""
    if template.marks_responses:
        return "marks"
    plain, asked = (template.render([Message("user", "Q")], prompt=prompt) for prompt in (False, True))
    others = template._special_pattern.sub("", run.text).strip()
    if run.side == "theirs" and not others and any(run.before.rstrip().endswith(end) for end in ends):
        return "after the end"
    if run.side == "theirs" and not run.continues and run.text.strip() in asked.removeprefix(plain):
        return "header"
    if run.side == "ours" and run.continues and run.text.strip() and (not others or others in template.source):
        return "second end"
    if run.side == "ours" and not run.continues:
        return "between"
    if "cut within words" in kind:
        return "parts"
    if kind == "tool call" and peer == "axolotl":
        return "empty answers"
    return "unexplained"


def explain_text(encoder: ExampleEncoder, directory: Path, record: dict[str, Any], kind: str, peer: str) -> str:
    """Return the key in `REASONS` for another text: ours has to be that of `apply_chat_template`."""
    if kind == "special tokens in text":
        return "special tokens"
    messages = copy.deepcopy(record.get("messages") or [*record["prompt"], *record["completion"]])
    for message in messages:
        if isinstance(message["content"], list):
            message["content"] = "".join(part["text"] for part in message["content"])
    given = [{**one, "content": [{"type": "text", "text": one["content"]}]} for one in messages]
    theirs = AutoTokenizer.from_pretrained(directory).apply_chat_template(
        given if encoder.template._takes_parts else messages, tools=record.get("tools"), tokenize=False
    )
    (example,) = RecordFormat("chat").parse_examples({"messages": messages, "tools": record.get("tools")})
    if theirs != encoder.template.render(example.branches[0], tools=example.tools):
        return "unexplained"
    if encoder.template._takes_parts:
        return "parts of a content"
    return "another template" if peer == "TRL assistant_only_loss" else "dropped calls"


def compare(name: str, source: str, kinds: Sequence[str], results: dict[str, Any], trained: dict[str, Any]) -> None:
    """Compare one template with the peers `kinds`, and count the outcomes in `results`. trained: gets the trained
    texts of each side.
    """
    with tempfile.TemporaryDirectory() as folder:
        ends = write_tokenizer(Path(folder), source)
        encoder, peers = ExampleEncoder.from_directory(Path(folder)), {}
        for peer in kinds:
            result = results.setdefault(peer, {"records": Counter(), "runs": Counter(), "unexplained": []})
            try:
                peers[peer] = (
                    Axolotl(Path(folder), source, ends) if peer == "axolotl" else Trl(Path(folder), peer == kinds[0])
                )
            except Exception as error:  # whatever a peer raises
                result["records"][f"no trainer: {type(error).__name__}"] += len(list(list_records()))
        for kind, record in list_records():
            for peer, it in peers.items():
                result, given, of = results[peer], record, "chat"
                if peer != "axolotl" and "marked" in kind:  # TRL has no marks of turns
                    continue
                if peer == "TRL completion":
                    messages = record["messages"]
                    given = {key: value for key, value in record.items() if key != "messages"} | split(messages)
                    of = "instruction"
                try:
                    ours = find_ours(encoder, given, of)
                except (UserError, TemplateError, MalformedRecord):
                    result["records"]["refused here: the template leaves out text"] += 1
                    continue
                try:
                    theirs = it.find(given)
                except Exception:  # whatever a peer raises
                    result["records"]["refused there"] += 1
                    continue
                if ours[0] != theirs[0]:
                    reason = explain_text(encoder, Path(folder), given, kind, peer)
                    result["records"][f"another text: {reason}"] += 1
                    if reason == "unexplained":
                        result["unexplained"].append([name, kind, "another text"])
                    continue
                decode = encoder.tokenizer.tokenizer.decode
                trained.setdefault(name, {}).setdefault(kind, {})[peer] = [
                    decode([token for token, mark in side if mark], skip_special_tokens=False)
                    for _, side in itertools.groupby(zip(*theirs, strict=True), key=lambda each: each[1])
                    for side in [list(side)]
                    if side[0][1]
                ]
                result["records"]["equal" if ours == theirs else "differ"] += 1
                for run in list_runs(encoder.tokenizer.tokenizer, ours, theirs):
                    reason = explain(run, encoder.template, kind, peer, ends)
                    result["runs"][reason] += 1
                    if reason == "unexplained":
                        result["unexplained"].append([name, kind, *run])


def main() -> None:
    logging.disable(logging.WARNING)
    import datasets

    datasets.disable_progress_bars()
    first, *others = map(Path, sys.argv[1:])
    results: dict[str, Any] = {}
    began = time.perf_counter()
    paths = sorted([*first.glob("*.jinja"), *(path for folder in others for path in folder.glob("*.jinja"))])
    for path in paths:
        name = f"{'trl' if path.parent == first else 'axolotl'}/{path.stem}"
        trl = ("TRL assistant_only_loss", "TRL completion") if path.parent == first else ()
        compare(name, path.read_text(), (*trl, *(() if "training" in name else ("axolotl",))), results, {})
    styles: dict[str, Any] = {}
    for name, style in STYLES.items():  # those of the tests, in which the peers' texts are kept
        compare(name, style.template, ("TRL assistant_only_loss", "TRL completion", "axolotl"), {}, styles)
    records = {kind: record for kind, record in list_records() if any(kind in held for held in styles.values())}
    RECORDED.write_text(json.dumps({"records": records, "trained": styles}, indent=1, ensure_ascii=False) + "\n")
    print(f"{len(paths)} templates, {time.perf_counter() - began:.0f} s")
    print(json.dumps(results, indent=1, ensure_ascii=False))
    versions = {"trl": metadata.version("trl"), "axolotl": "0.19.0"}
    write_result(
        "mask_oracles", {"templates": len(paths), "peers": versions, "reasons": REASONS, "results": results}, quiet=True
    )


if __name__ == "__main__":
    main()
