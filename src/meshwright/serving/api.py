"""`meshwright.load`: a model from a checkpoint that continues prompts, as `meshwright generate` does. Free of torch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack, overload

from meshwright.checkpoint import find_checkpoint
from meshwright.data.records.messages import Message
from meshwright.data.records.template_inputs import Conversation
from meshwright.documents import to_json_dict
from meshwright.errors import UserError
from meshwright.launcher.device import choose_single_device, refuse_device_of_layout
from meshwright.layout import Layout
from meshwright.limits import check_count
from meshwright.names import check_options
from meshwright.planner.serving.ledger import parse_dtype
from meshwright.serving.choices import Choice, StopRule
from meshwright.serving.prompts import Prompts
from meshwright.serving.request import Output, Request
from meshwright.serving.sampling import Sampling, TokenResult
from meshwright.spec.config import ModelConfig
from meshwright.spec.config_json import config_from_path
from meshwright.spec.refuse import serving_layout
from meshwright.threads import prepare_process

if TYPE_CHECKING:
    import torch

Prompt = str | Sequence[int]
"""A text, or token IDs."""
_NO_LIST = str | Mapping | bytes | bytearray | memoryview
"""Types that can be iterated, but are no list of prompts or of token IDs."""


RunRequests = Callable[[Sequence[Request], Callable[[str], bool]], Iterator[Output]]
"""Function that runs requests and yields their outputs, interleaved, until every request has finished; the second
argument returns True for the ID of a request whose answer is complete, which is then cancelled."""


class GenerationOptions(TypedDict, total=False):
    """Options of `Model.generate` and `Model.stream`; all may be left out.

    Attributes:
        max_tokens: Maximum number of new tokens for each prompt; default 256.
        temperature: Divisor of the logits; 0, the default: greedy.
        top_k: Sample from the k most likely tokens; 0, the default: from all.
        top_p: Sample from the most likely tokens that together reach this probability (nucleus); default 1: off.
        min_p: Sample from tokens with at least this fraction of the highest probability; default 0: off.
        repetition_penalty: Divides positive logits, and multiplies negative logits, of tokens in prompt and answer;
            default 1: off.
        presence_penalty: Subtracted from the logits of tokens that are in the answer; default 0: off.
        frequency_penalty: Subtracted from the logits of tokens for each time they are in the answer; default 0: off.
        logit_bias: {token ID: number from -100 to 100 that is added to its logit}; default: none.
        min_tokens: Minimum number of new tokens, before which no end token or stop string ends the text; default 0.
        stop: A text, or several texts; the generated text ends before the first occurrence of one of these texts.
            Default: none.
        logprobs: Number of most likely tokens that `Generation.logprobs` reports for each token, 0: only the token's
            log-probability; default None: no log-probabilities.
        n: Answers to each prompt, which differ in their draws; default 1, at most 128. Only `generate` takes more.
        seed: Seed of sampling, the same for each prompt.
        chat: The prompt is a user message, put into the chat template, and the text is the assistant's answer.
        ignore_eos: Generate up to `max_tokens`; end tokens do not end the text.
    """

    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    min_tokens: int
    stop: str | Sequence[str]
    logprobs: int | None
    n: int
    seed: int
    chat: bool
    ignore_eos: bool


@dataclass(slots=True)
class Generation:
    """Result of generation for one prompt.

    Attributes:
        prompt: Text of the prompt.
        text: Generated text, without the prompt.
        tokens: IDs of the generated tokens.
        stopped: Reason why generation ended: `"end"` (end token), `"stop"` (stop string), `"length"` (`max_tokens`) or
            `"context"` (the model has no more positions).
        prompt_tokens: Number of prompt tokens, start token included.
        seconds_to_first_token: Time to first token (TTFT) from the call on, which may include other prompts' work.
        tokens_per_second: Generated tokens per second after the first token.
        checkpoint: Directory of the model.
        logprobs: Each of `tokens` with its log-probability, and the most likely tokens with theirs; empty unless the
            option `logprobs` is given.
        others: The further answers to the prompt, if `n` is more than 1.
    """

    prompt: str
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    stopped: str = "length"
    prompt_tokens: int = 0
    seconds_to_first_token: float = 0.0
    tokens_per_second: float = 0.0
    checkpoint: Path | None = None
    logprobs: list[TokenResult] = field(default_factory=list)
    others: list[Generation] = field(default_factory=list)

    def to_json_dict(self) -> dict[str, Any]:
        """Return the JSON object of `meshwright generate --json`; `tokens` is the number of new tokens."""
        others = [each.to_json_dict() for each in self.others]
        return to_json_dict({**asdict(self), "tokens": len(self.tokens), "others": others})


class Answer(Choice):
    """Builder of the `Generation` of one request from the engine's outputs.

    request: request that the engine runs. prompts: tokenizer. stop: stop strings. generation: object to fill. wanted:
    maximum number of new tokens that the caller asked for; the limit in `request` is lower if the model has too few
    positions left.

    Attributes:
        generation: Text, token IDs and times so far."""

    def __init__(self, request: Request, prompts: Prompts, stop: StopRule, generation: Generation, wanted: int) -> None:
        """Start with no output; arguments: see the class."""
        super().__init__(0, request, prompts, stop)
        self.generation = generation
        self._cut = request.sampling.max_tokens < wanted

    def add(self, output: Output) -> str:
        """Add an output of the engine to the generation; return the new text, whole characters only, perhaps empty.
        Outputs after the end are ignored."""
        if self.finish_reason is not None:
            return ""
        generation, piece = self.generation, self.push(output)
        by_string = isinstance(self.stop_reason, str)
        by_token = piece.finish_reason == "stop" and not by_string  # the end token is no part of the answer
        results = [each.result for each in piece.tokens[: len(piece.tokens) - by_token]]
        generation.text += piece.text
        generation.tokens += [result.token for result in results]
        generation.logprobs += [result for result in results if result.logprob is not None]
        generation.seconds_to_first_token = self.first_token - self.created
        if self.last_token > self.first_token:
            generation.tokens_per_second = (self.completion_tokens - 1) / (self.last_token - self.first_token)
        if piece.finish_reason is not None:
            limit = "context" if self._cut else "length"
            generation.stopped = "stop" if by_string else "end" if by_token else limit
        return piece.text


class TextStream(Iterator[str]):
    """Iterator over the generated text of one prompt, in pieces of whole characters (a token may end inside a
    character).

    outputs: the engine's outputs for the prompt. answer: object that converts the outputs to text.

    Attributes:
        generation: Text, token IDs and times so far; complete when the iterator is exhausted.
    """

    def __init__(self, outputs: Iterator[Output], answer: Answer) -> None:
        """Start with no output read; arguments: see the class."""
        self.generation = answer.generation
        self._pieces = filter(None, map(answer.add, outputs))

    def __next__(self) -> str:
        """Return the next piece of text, at least one character; `StopIteration` at the end."""
        return next(self._pieces)


class Model:
    """A loaded model with its tokenizer, which generates text from prompts. `meshwright.load` creates it.

    config: configuration of the model. run: function that runs requests on the model and yields their outputs.

    Attributes:
        directory: Directory of the model, a checkpoint or a Hugging Face directory.
        layout: Layout over several rank processes of this machine; None: the model runs in this process.
    """

    def __init__(self, directory: Path, config: ModelConfig, run: RunRequests, layout: Layout | None = None) -> None:
        """Load tokenizer and chat template of `directory`; arguments and attributes: see the class."""
        self.directory, self.layout = directory, layout
        self._run, self._positions, self._numbers = run, config.max_positions, itertools.count()
        self._prompts = Prompts.from_directory(directory, config, config.max_positions)

    @overload
    def generate(  # type: ignore[overload-overlap]  # a text is a sequence of texts, too
        self, prompts: str, **options: Unpack[GenerationOptions]
    ) -> Generation:
        """Generate text after a single prompt. prompts: the prompt's text. options: fields of `GenerationOptions`."""

    @overload
    def generate(self, prompts: Sequence[Prompt], **options: Unpack[GenerationOptions]) -> list[Generation]:
        """Generate text after several prompts in one batch. prompts: texts or lists of token IDs. options: fields of
        `GenerationOptions`."""

    def generate(
        self, prompts: str | Sequence[Prompt], **options: Unpack[GenerationOptions]
    ) -> Generation | list[Generation]:
        """Generate text after one prompt, or after several in one batch; each result is as for its prompt alone.

        Args:
            prompts: A text, or several texts or lists of token IDs.
            **options: Fields of `GenerationOptions`.

        Returns:
            The generation of the prompt, or a list of them: `text`, `tokens`, `stopped`, `logprobs`,
            `seconds_to_first_token`; with `n` above 1 the further answers to a prompt as `others`.

        Raises:
            UserError: A number is out of range, or a prompt leaves no position for a new token.

        Examples:
            >>> import meshwright as mw
            >>> model = mw.load("runs/tiny", device="cpu")
            >>> answer = model.generate("import ", max_tokens=4)
            >>> len(answer.tokens), answer.stopped
            (4, 'length')
            >>> [len(each.tokens) for each in model.generate(["def ", "class "], max_tokens=3)]
            [3, 3]
        """
        check_options(self.generate, options, GenerationOptions)
        # Neither an array without dims nor a sparse tensor can be iterated.
        rows = getattr(prompts, "ndim", 1) > 0 and str(getattr(prompts, "layout", "torch.strided")) == "torch.strided"
        several = rows and isinstance(prompts, Iterable) and not isinstance(prompts, _NO_LIST)
        given = [self._make_answers(each, options) for each in (prompts if several else [prompts])]
        answers = {answer.request.id: answer for each in given for answer in each}
        requests = [answer.request for answer in answers.values()]
        for output in self._run(requests, lambda request_id: answers[request_id].finish_reason is not None):
            answers[output.request_id].add(output)
        found = [first.generation for first, *_ in given]
        return found if several else found[0]

    def stream(self, prompt: Prompt, **options: Unpack[GenerationOptions]) -> TextStream:
        """Generate text after a single prompt; return an iterator over the text. prompt: a text or a list of token IDs.
        options: fields of `GenerationOptions`. Raises UserError if a number is out of range, `n` is not 1, or the
        prompt leaves no position for a new token.

        Examples:
            >>> import meshwright as mw
            >>> pieces = mw.load("runs/tiny", device="cpu").stream("import ", max_tokens=4)
            >>> "".join(pieces) == pieces.generation.text
            True
        """
        check_options(self.stream, options, GenerationOptions)
        answer, *others = self._make_answers(prompt, options)
        if others:
            raise UserError(f"n {len(others) + 1}: should be 1, as a stream has one answer; generate takes more")
        return TextStream(self._run([answer.request], lambda _: answer.finish_reason is not None), answer)

    def _make_answers(self, prompt: object, options: GenerationOptions) -> list[Answer]:
        """Create the engine's requests for one prompt (a text or token IDs), as many as the option `n`, and return the
        objects that collect their outputs. options: options of `generate`. Raises UserError for an invalid prompt or
        option."""
        chosen: dict[str, Any] = dict(options)
        chat, ignore_eos = (chosen.pop(name, False) for name in ("chat", "ignore_eos"))
        wanted, n = chosen.pop("max_tokens", 256), chosen.pop("n", 1)
        stop = StopRule.parse(chosen.pop("stop", ()))
        check_count("max_tokens", wanted, "new_tokens")
        check_count("n", n, "choices")
        tokens = self._encode(prompt, chat)
        if len(tokens) >= self._positions:
            raise UserError(
                f"the prompt has {len(tokens)} tokens with its start token, and the model {self._positions} positions: "
                "none is left for a new token; shorten the prompt"
            )
        ends = frozenset() if ignore_eos else (self._prompts.chat_ends if chat else self._prompts.ends)
        known = frozenset(token for token in ends if token < self._prompts.vocabulary)
        sampling = Sampling(**chosen, max_tokens=min(wanted, self._positions - len(tokens)), stop_tokens=known)
        sampling.check_vocabulary(self._prompts.vocabulary)
        text = prompt if isinstance(prompt, str) else self._prompts.decode(tokens)
        answers = []
        for number in range(n):
            request = Request(f"offline-{next(self._numbers)}", tuple(tokens), sampling, choice=number)
            generation = Generation(text, prompt_tokens=len(tokens), checkpoint=self.directory)
            answers.append(Answer(request, self._prompts, stop, generation, wanted))
        answers[0].generation.others = [answer.generation for answer in answers[1:]]
        return answers

    def _encode(self, prompt: object, chat: bool) -> list[int]:
        """Return the token IDs of a prompt, which is a text or already a list of token IDs. chat: True if the text is a
        user message, which is put into the chat template. Raises UserError for a prompt of another type, or if there is
        no template."""
        if isinstance(prompt, str):
            turns = [Message("user", prompt)]
            return self._prompts.encode_chat(Conversation(turns)) if chat else self._prompts.encode(prompt)
        given: Any = None if isinstance(prompt, _NO_LIST) else prompt
        with suppress(RuntimeError, TypeError):  # of a tensor without values (meta) or that is sparse
            given = given.tolist() if hasattr(given, "tolist") else given  # an array of NumPy or torch
        if isinstance(given, Sequence) and all(isinstance(i, Integral) and not isinstance(i, bool) for i in given):
            return self._prompts.check([*map(int, given)])
        raise UserError(f"prompt: takes a text or a list of token IDs, not {type(prompt).__name__}")


def load(
    path: str | Path,
    layout: Layout | str | None = None,
    dtype: str | torch.dtype | None = None,
    device: str = "auto",
    *,
    log: Callable[[str], None] = lambda line: None,
) -> Model:
    """Load a model and its tokenizer, to generate text from prompts.

    Args:
        path: Run directory (its newest complete checkpoint), checkpoint, or Hugging Face directory. Every byte of a
            checkpoint's model is checked against its hash.
        layout: Layout over CPU ranks of this machine, by dp, tp, pp and ep, such as `"tp2 pp2"`. Each call then starts
            the ranks and loads the model on them.
        dtype: Dtype of weights and KV cache, a name such as `"bfloat16"` or a torch dtype; default float32.
        device: `"cpu"`, `"cuda"`, or `"auto"`: the GPU if the machine has a GPU, else the CPU.
        log: Called with one line of text in three cases: a newer checkpoint is skipped because it is damaged; the CPU
            kernels are about to be compiled; there are no kernels for this machine or dtype.

    Returns:
        The model, with `generate` and `stream`.

    Raises:
        UserError: The model or tokenizer is missing or damaged, the model is an encoder, or the layout does not fit the
            model.

    Examples:
        >>> import meshwright as mw
        >>> mw.load("runs/tiny", dtype="bfloat16", device="cpu").directory.name
        'step-000002'
    """
    prepare_process()  # before torch is loaded
    refuse_device_of_layout(device, layout)
    name = parse_dtype(None if dtype is None else str(dtype).removeprefix("torch."))
    device, directory = choose_single_device(device), find_checkpoint(path, log)
    config = config_from_path(directory)
    reading = serving_layout("" if layout is None else str(layout), config)
    from meshwright.comm.mesh import Mesh
    from meshwright.kernels.choice import prepare_kernels
    from meshwright.serving.offline import build_offline_engine, run_on_ranks, run_requests

    kernels = prepare_kernels(name, reading, log)[0] if device == "cpu" else None
    if reading.world_size > 1:
        return Model(directory, config, partial(run_on_ranks, directory, reading, name, kernels), reading)
    engine = build_offline_engine(directory, Mesh.single(device=device), name, instruction_set=kernels)
    return Model(directory, config, partial(run_requests, engine))
