"""Text generation from a checkpoint: one prompt at a time, with a KV cache and streamed text."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from meshwright.checkpoint import find_checkpoint
from meshwright.data.records.conversations import Message
from meshwright.data.records.examples import ExampleEncoder
from meshwright.data.tokenizers.special_tokens import find_named_in, find_special_tokens, make_text_encoder
from meshwright.documents import to_json_dict
from meshwright.errors import UserError
from meshwright.launcher.device import one_device
from meshwright.limits import limit_error
from meshwright.model.cache import KeyValueCache
from meshwright.model.huggingface import load_huggingface
from meshwright.model.transformer import Transformer
from meshwright.parallel.inference import SplitModel
from meshwright.serving.sampling import Sampler, Sampling
from meshwright.serving.text import IncrementalDetokenizer
from meshwright.spec.config import ModelConfig
from meshwright.untrusted import read_file, read_json

_ROOM = 4096  # new tokens that the cache has room for at first; it grows


@dataclass(slots=True)
class Generation:
    """Continuation of a prompt.

    Attributes:
        prompt: Text that was continued.
        text: New text, without the prompt.
        tokens: IDs of the new tokens.
        stopped: `"end"` (the model ended the text), `"length"` (max_tokens), or `"context"` (no more positions).
        prompt_tokens: Tokens of the prompt, with the start token.
        seconds_to_first_token: Time to first token (TTFT).
        tokens_per_second: New tokens per second after the first.
        checkpoint: Directory of the model.
    """

    prompt: str
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    stopped: str = "length"
    prompt_tokens: int = 0
    seconds_to_first_token: float = 0.0
    tokens_per_second: float = 0.0
    checkpoint: Path | None = None

    def to_json_dict(self) -> dict[str, Any]:
        """Return the JSON object of `meshwright generate --json`; `tokens` is the number of new tokens."""
        return to_json_dict(
            {
                "prompt": self.prompt,
                "text": self.text,
                "tokens": len(self.tokens),
                "prompt_tokens": self.prompt_tokens,
                "stopped": self.stopped,
                "seconds_to_first_token": self.seconds_to_first_token,
                "tokens_per_second": self.tokens_per_second,
                "checkpoint": self.checkpoint,
            }
        )


class Generator:
    """Model and tokenizer that continue prompts."""

    def __init__(
        self,
        model: Transformer | SplitModel,
        tokenizer: Tokenizer,
        *,
        start: int | None = None,
        ends: Iterable[int] = (),
        directory: Path | None = None,
    ) -> None:
        """`model`: an unsharded model, or this rank's part of one (then every rank makes the same calls); `start`:
        token ID put before a prompt, as before each document in training; `ends`: token IDs that end the text;
        `directory`: source of the model. Special tokens are read from the tokenizer and the files beside it; text in a
        prompt never becomes one."""
        self.directory = directory
        self.model = model.eval() if isinstance(model, Transformer) else model
        self.tokenizer, self.start, self.ends = tokenizer, start, frozenset(ends)
        tokenizer.no_padding()
        tokenizer.no_truncation()
        named = find_named_in(directory) if directory is not None else set()
        added = tokenizer.get_added_tokens_decoder()  # what ends a text may be an ordinary token, such as a line's end
        named |= {added[token].content for token in {start, *self.ends} if token in added}
        self._encoder = make_text_encoder(tokenizer, find_special_tokens(tokenizer, named))

    @classmethod
    def from_directory(
        cls,
        directory: os.PathLike[str] | str,
        *,
        dtype: torch.dtype = torch.float32,
        device: str = "auto",
        check_hashes: bool = True,
        log: Callable[[str], None] = lambda line: None,
    ) -> Generator:
        """Load a generator from a Hugging Face directory with model and tokenizer, a checkpoint, or a run directory
        (its newest complete checkpoint; `log` gets a line for each newer one that is skipped).

        `device`: one of `names.DEVICES`. `check_hashes`: verify every byte of a checkpoint's model against its hash
        first.
        """
        device = one_device(device)
        directory = find_checkpoint(directory, log, check_hashes=check_hashes)
        model, config = load_huggingface(directory, dtype, device)
        return cls.of_model(model, config, directory)

    @classmethod
    def of_model(cls, model: Transformer | SplitModel, config: ModelConfig, directory: Path) -> Generator:
        """Build a generator from a loaded model and the tokenizer in `directory`."""
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise UserError(f"{directory} has no tokenizer.json: a prompt cannot become tokens")
        try:
            tokenizer = Tokenizer.from_buffer(read_file(path))
        except Exception as error:  # the library raises nothing more special
            raise UserError(f"{path} is not a tokenizer: {error}") from None
        start = config.bos_token if config.bos_token is not None else config.eos_token
        return cls(model, tokenizer, start=start, ends=_read_end_tokens(directory, config), directory=directory)

    def encode(self, prompt: str) -> list[int]:
        """Return the token IDs of a prompt after the start token; text in the prompt never becomes a special token."""
        tokens = ([] if self.start is None else [self.start]) + self._check_vocabulary(
            self._encoder.encode(prompt, add_special_tokens=False).ids
        )
        if not tokens:
            raise UserError("an empty prompt needs a model with a begin or end token; give a prompt")
        return tokens

    def encode_question(self, question: str) -> list[int]:
        """Return the token IDs of a user turn and the start of the answer, by the chat template in the directory; its
        end-of-turn token ends generation from now on. Raises UserError without a template."""
        assert self.directory is not None, "a chat template lies in a directory"
        template = ExampleEncoder.of_directory(self.directory)
        if (end := template.find_turn_end()) is not None:
            self.ends |= {end}
        if not (tokens := template.encode_prompt([Message("user", question)])):
            raise UserError(
                f"{template.template.where}: renders a user turn as an empty prompt; it must emit the text before the "
                "assistant's answer"
            )
        return self._check_vocabulary(tokens)

    def _check_vocabulary(self, tokens: list[int]) -> list[int]:
        """Return `tokens`; raise UserError if the model's vocabulary lacks one."""
        size = self.model.config.vocabulary
        if tokens and max(tokens) >= size:
            raise UserError(f"the tokenizer gives token {max(tokens)}, but the model's vocabulary has {size}")
        return tokens

    def stream(
        self,
        prompt: str,
        max_tokens: int = 256,
        sampling: Sampling | None = None,
        *,
        cached: bool = True,
        chat: bool = False,
    ) -> Iterator[tuple[str, Generation]]:
        """Continue `prompt`: yield each new piece of text (complete characters) with the generation so far.

        The last pair holds the final figures. `cached=False` recomputes all tokens for every new one. `chat`: the
        prompt is a user turn, and the text the answer to it. Raises UserError when the prompt leaves no position for a
        new token.
        """
        if max_tokens < 1:
            raise UserError(f"max-tokens {max_tokens}: should be 1 or more")
        if problem := limit_error("new_tokens", max_tokens, "max-tokens"):
            raise UserError(problem)
        tokens = self.encode_question(prompt) if chat else self.encode(prompt)
        positions = self.model.config.max_positions
        if len(tokens) >= positions:
            raise UserError(
                f"the prompt has {len(tokens)} tokens with its start, and the model {positions} positions: "
                "none is left for a new token; shorten the prompt"
            )
        generation = Generation(prompt, prompt_tokens=len(tokens), checkpoint=self.directory)
        text = IncrementalDetokenizer(self.tokenizer, tokens)
        for token in self._generate_tokens(tokens, max_tokens, Sampler(sampling or Sampling()), generation, cached):
            generation.tokens.append(token)
            piece = text.push(token)
            generation.text += piece
            if piece:
                yield piece, generation
        piece = text.rest()
        generation.text += piece
        yield piece, generation

    def generate(
        self,
        prompt: str,
        max_tokens: int = 256,
        sampling: Sampling | None = None,
        *,
        cached: bool = True,
        chat: bool = False,
    ) -> Generation:
        """Continue `prompt` and return the finished generation; arguments as in `stream`."""
        *_, (_, generation) = self.stream(prompt, max_tokens, sampling, cached=cached, chat=chat)
        return generation

    def _generate_tokens(
        self, tokens: list[int], max_tokens: int, sampler: Sampler, generation: Generation, cached: bool
    ) -> Iterator[int]:
        """Yield new token IDs one by one; update the times and `stopped` of `generation`."""
        positions = self.model.config.max_positions
        capacity = min(positions, len(tokens) + min(max_tokens, _ROOM))
        cache = KeyValueCache(self.model.config, capacity=capacity) if cached else None
        known, unread = list(tokens), list(tokens)
        begun = first = time.perf_counter()
        for number in range(max_tokens):
            if len(known) >= positions:
                generation.stopped = "context"
                break
            token = self._next_token(unread if cached else known, cache, sampler)
            now = time.perf_counter()
            if number == 0:
                first, generation.seconds_to_first_token = now, now - begun
            else:
                generation.tokens_per_second = number / (now - first)
            if token in self.ends:
                generation.stopped = "end"
                break
            known.append(token)
            unread = [token]
            yield token

    def _next_token(self, tokens: list[int], cache: KeyValueCache | None, sampler: Sampler) -> int:
        """Return the token that follows `tokens`, which follow the tokens in the cache."""
        if isinstance(self.model, SplitModel):
            batch_BS = torch.tensor([tokens], device=self.model.mesh.device)
            return self.model.next_token(batch_BS, cache, sampler.choose)
        with torch.no_grad():
            batch_BS = torch.tensor([tokens], device=self.model.embedding.weight.device)
            hidden_BSH = self.model.hidden(batch_BS, cache=cache)
            return sampler.choose(torch.nn.functional.linear(hidden_BSH[0, -1], self.model.head_weight))


def _read_end_tokens(directory: Path, config: ModelConfig) -> frozenset[int]:
    """Return the IDs of the tokens that end a text, from the configuration and generation_config.json."""
    path = directory / "generation_config.json"
    if not path.is_file():
        return frozenset(config.eos_tokens)
    try:
        said = read_json(path, "config_bytes").get("eos_token_id")
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"{path} is not a JSON object: {error}") from None
    ends = said if isinstance(said, list) else [said]
    return frozenset(config.eos_tokens) | {token for token in ends if isinstance(token, int)}
