"""Tokenizers: a kind made here, or one that exists; always a directory that `transformers` loads."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from meshwright.data.files import write_whole
from meshwright.data.tokenizers.kinds import END_OF_TEXT, KINDS, byte_tokenizer
from meshwright.data.tokenizers.special_tokens import named_special, special_tokens, text_encoder, unknown_token
from meshwright.errors import UserError
from meshwright.names import TOKENIZERS, nearest
from meshwright.untrusted import read_file, read_json

FILES = ("tokenizer.json", "tokenizer_config.json")
# What publishers call the end of a text, most telling first; asked only when no file says it.
_USUAL_ENDS = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>", "<|im_end|>", "<|eot_id|>", "[EOS]", "[SEP]")


class TextTokenizer:
    """A tokenizer with the tokens that frame a document: `start` (its begin token, else its end token) and `end`.

    A document is written as start, text, end. So every token of the text is predicted, the first from `start`, and so
    is its end; where the next document begins is not. Text never becomes a special token, whatever it spells.
    """

    def __init__(self, tokenizer: Tokenizer, start: int, end: int, named: Iterable[str] = ()) -> None:
        """`named`: tokens that the files beside tokenizer.json say are special (see `named_special`)."""
        self.tokenizer, self.start, self.end = tokenizer, start, end
        self.vocabulary = _vocabulary(tokenizer)
        tokenizer.no_padding()
        tokenizer.no_truncation()
        frame = {str(tokenizer.id_to_token(token)) for token in (start, end)}
        self.special = special_tokens(tokenizer, {*named, *frame})
        self._plain_bytes = _is_plain_bytes(tokenizer)
        self._encoder = tokenizer if self._plain_bytes else text_encoder(tokenizer, self.special)
        unknown = unknown_token(tokenizer)
        self._never = np.zeros(self.vocabulary, dtype=bool)  # tokens that text must not become
        for token in self.special:
            self._never[tokenizer.token_to_id(token)] = token != unknown or token in frame

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest type of a token on disk, little-endian."""
        return np.dtype("<u2" if self.vocabulary <= 1 << 16 else "<u4")

    def encode(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        """The tokens of each text, unframed, as `dtype`."""
        if self._plain_bytes:
            return [np.frombuffer(text.encode(), dtype=np.uint8).astype(self.dtype) for text in texts]
        with _panics_refused("text becomes no tokens"):
            encodings = self._encoder.encode_batch_fast(list(texts), add_special_tokens=False)
        tokens = [np.array(encoding.ids, dtype=self.dtype) for encoding in encodings]
        for text, ids in zip(texts, tokens, strict=True):
            if self._never[ids].any():
                token = self.tokenizer.id_to_token(int(ids[self._never[ids]][0]))
                raise UserError(
                    f'data.tokenizer: text becomes the special token "{token}" of this tokenizer, in a document that '
                    f"begins with {text[:40]!r}; take a tokenizer that has another token for unknown text"
                )
        return tokens

    def decode(self, tokens: Sequence[int] | NDArray[Any]) -> str:
        """The text of `tokens`, special ones shown by name."""
        with _panics_refused("tokens become no text"):
            return str(self.tokenizer.decode([int(token) for token in tokens], skip_special_tokens=False))


@contextmanager
def _panics_refused(what: str) -> Iterator[None]:
    """Make a `UserError` of a panic of the tokenizers library, which is no `Exception`: files can bring it about."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise UserError(f"data.tokenizer: {what} (the tokenizers library: {str(error)[:200]})") from None


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """A tokenizer that exists: the bytes of its tokenizer.json, and of its tokenizer_config.json with its end named."""

    tokenizer: bytes
    config: bytes

    def sha256(self) -> list[str]:
        return [hashlib.sha256(data).hexdigest() for data in (self.tokenizer, self.config)]

    @property
    def chat_template(self) -> str | None:
        """The Jinja template that comes with it; of several the one called default."""
        template = json.loads(self.config).get("chat_template")
        if isinstance(template, list):
            named = {one.get("name"): one.get("template") for one in template if _is_named(one)}
            template = named.get("default")
        return template if isinstance(template, str) else None

    def with_chat_template(self, template: str) -> TokenizerFiles:
        return TokenizerFiles(self.tokenizer, _pretty({**json.loads(self.config), "chat_template": template}))

    def named_tokens(self) -> dict[str, str]:
        """The special tokens that its files name by their use (`bos_token` ...), as templates know them."""
        config = json.loads(self.config)
        return {key: _content(value) for key, value in config.items() if key.endswith("_token") and _is_token(value)}

    def load(self) -> TextTokenizer:
        """`UserError`: the file is no tokenizer."""
        return _text_tokenizer(_parse(self.tokenizer, Path(FILES[0])), json.loads(self.config))


def find_tokenizer(name: str) -> TokenizerFiles | None:
    """The files of data.tokenizer = `name`; None for a kind made here. `UserError`: no such files, or no end named."""
    if name in TOKENIZERS:
        return None
    path = Path(name).expanduser()
    directory = path if path.is_dir() else path.parent
    file = directory / "tokenizer.json" if path.is_dir() else path
    if not path.exists():
        close = nearest(name, TOKENIZERS)
        hint = f'; did you mean "{close}"?' if close else f"; known: {', '.join(TOKENIZERS)}, or such a path"
        raise UserError(f'data.tokenizer: "{name}" is no tokenizer.json and no directory with one{hint}')
    if not file.is_file():
        raise UserError(
            f"data.tokenizer: {directory} holds no tokenizer.json; "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...) writes one"
        )
    try:
        data = read_file(file)
    except OSError as error:
        raise UserError(f"data.tokenizer: {file} cannot be read ({error.strerror or error})") from None
    tokenizer = _parse(data, file)
    config = _json_object(directory / "tokenizer_config.json")
    eos = _special_token(tokenizer, directory, config, "eos")
    if eos is None:
        added = [token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special]
        eos = next((token for token in _USUAL_ENDS if token in added), None)
    if eos is None:
        raise UserError(
            f'data.tokenizer: {file} does not say how a text ends; write {{"eos_token": "..."}} into '
            f"{directory / 'tokenizer_config.json'}"
        )
    bos = _special_token(tokenizer, directory, config, "bos")
    for key, token in (("eos_token", eos), ("bos_token", bos)):
        if token is not None and tokenizer.token_to_id(token) is None:
            raise UserError(f'data.tokenizer: the {key} "{token}" of {directory} is not a token of {file.name}')
    if config.get("eos_token") is None or (bos is not None and config.get("bos_token") is None):
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **config, "eos_token": eos, "bos_token": bos}
    # What only the map says, and only one file is copied.
    mapped = special_tokens(tokenizer, named_special(_json_object(directory / "special_tokens_map.json")))
    if unsaid := mapped - special_tokens(tokenizer, named_special(config)):
        config = {
            **config,
            "additional_special_tokens": [*(config.get("additional_special_tokens") or []), *sorted(unsaid)],
        }
    if (template := directory / "chat_template.jinja").is_file():  # newer than what the configuration says
        try:
            config = {**config, "chat_template": read_file(template, "config_bytes").decode()}
        except UnicodeDecodeError as error:
            raise UserError(f"data.tokenizer: {template}: byte {error.start} is not UTF-8 text") from None
        except OSError as error:
            raise UserError(f"data.tokenizer: {template} cannot be read ({error.strerror or error})") from None
    return TokenizerFiles(data, _pretty(config))


def least_vocabulary(name: str) -> int:
    """How many tokens data.tokenizer = `name` has at least, before any text is read: for "bpe" the bytes and the end.
    `UserError` as `find_tokenizer`."""
    found = find_tokenizer(name)
    return KINDS[name].least if found is None else _vocabulary(Tokenizer.from_buffer(found.tokenizer))


def write_tokenizer(
    directory: Path,
    name: str,
    vocabulary: int,
    found: TokenizerFiles | None,
    texts: Iterator[str],
    chat_template: str | None = None,
) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` into `directory`: those `found`, else a tokenizer of the kind
    `name`, trained on `texts` where it is a kind that is trained (see `tokenizer_kinds`). It has `vocabulary` tokens,
    fewer where the text does not offer so many. `chat_template`: what its configuration is to hold as such."""
    if found is None:
        kind = KINDS[name]
        found = TokenizerFiles(kind.make(vocabulary, texts).to_str(pretty=True).encode(), _pretty(kind.config()))
    if chat_template is not None:
        found = found.with_chat_template(chat_template)
    for file, data in zip(FILES, (found.tokenizer, found.config), strict=True):
        write_whole(directory / file, data)


def load_tokenizer(directory: Path) -> TextTokenizer:
    """The tokenizer that `write_tokenizer` left in `directory`."""
    tokenizer = _parse((directory / FILES[0]).read_bytes(), directory / FILES[0])
    return _text_tokenizer(tokenizer, _json_object(directory / FILES[1]))


def _text_tokenizer(tokenizer: Tokenizer, config: dict[str, Any]) -> TextTokenizer:
    eos, bos = config["eos_token"], config.get("bos_token")
    start, end = (tokenizer.token_to_id(_content(token)) for token in (bos or eos, eos))
    assert start is not None and end is not None, (eos, bos)
    return TextTokenizer(tokenizer, start, end, named_special(config))


def _vocabulary(tokenizer: Tokenizer) -> int:
    return int(max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1)


def _is_plain_bytes(tokenizer: Tokenizer) -> bool:
    """Whether encoding is just the UTF-8 bytes, which needs no tokenizer."""
    reference = byte_tokenizer()
    return tokenizer.get_vocab() == reference.get_vocab() and bool(
        json.loads(tokenizer.to_str()) == json.loads(reference.to_str())
    )


def _parse(data: bytes, file: Path) -> Tokenizer:
    try:
        with _panics_refused(f"{file} is not a tokenizer that can be read"):
            return Tokenizer.from_buffer(data)
    except UserError:
        raise
    except Exception as error:  # the library raises bare exceptions
        raise UserError(
            f"data.tokenizer: {file} is not a tokenizer that can be read ({str(error).splitlines()[0]})"
        ) from None


def _json_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = read_json(path)
    except OSError as error:
        raise UserError(f"data.tokenizer: {path} cannot be read ({error.strerror or error})") from None
    except ValueError as error:
        raise UserError(f"data.tokenizer: {path} is not JSON ({error})") from None
    if not isinstance(value, dict):
        raise UserError(f"data.tokenizer: {path} holds no JSON object")
    return value


def _special_token(tokenizer: Tokenizer, directory: Path, config: dict[str, Any], kind: str) -> str | None:
    """The "eos" or "bos" token as the directory's files name it, the tokenizer's own first."""
    for values in (config, _json_object(directory / "special_tokens_map.json")):
        if (token := values.get(f"{kind}_token")) is not None:
            if not _is_token(token):
                raise UserError(
                    f"data.tokenizer: the {kind}_token in {directory} must be text, or an object with its content, not "
                    f"{str(token)[:80]}"
                )
            return _content(token)
    for name in ("generation_config.json", "config.json"):
        number = _json_object(directory / name).get(f"{kind}_token_id")
        if isinstance(number, list):
            number = number[0] if number else None
        if isinstance(number, int) and 0 <= number < 2**32 and (found := tokenizer.id_to_token(number)) is not None:
            return str(found)
    return None


def _content(token: Any) -> str:
    """The text of a token as Hugging Face writes it: a string, or an object with its `content`."""
    return str(token["content"] if isinstance(token, dict) else token)


def _is_token(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, dict) and isinstance(value.get("content"), str))


def _is_named(template: Any) -> bool:
    return isinstance(template, dict) and isinstance(template.get("name"), str)


def _pretty(value: dict[str, Any]) -> bytes:
    try:
        return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
    except UnicodeEncodeError:
        raise UserError("data.tokenizer: its tokenizer_config.json holds half a character (a lone surrogate)") from None
