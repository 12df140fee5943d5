"""Tokenizers, trained here or existing, always stored as a directory that `transformers` loads."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from meshwright.data.files import write_atomic
from meshwright.data.tokenizers.kinds import END_OF_TEXT, KINDS, create_byte_tokenizer
from meshwright.data.tokenizers.library import convert_library_errors, parse_tokenizer
from meshwright.data.tokenizers.special_tokens import (
    find_special_tokens,
    find_unknown_token,
    get_token_text,
    make_text_encoder,
    parse_special_tokens,
)
from meshwright.errors import UserError
from meshwright.names import TOKENIZERS, nearest
from meshwright.untrusted import read_file, read_json

FILES = ("tokenizer.json", "tokenizer_config.json")
# Usual end-of-text tokens, the most specific first; used only if no file names one.
_USUAL_ENDS = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>", "<|im_end|>", "<|eot_id|>", "[EOS]", "[SEP]")


class TextTokenizer:
    """A tokenizer that encodes a document as start token, text, end token, and never encodes text as a special token.

    start: id of the BOS token, or of the EOS token if there is no BOS. With document masks, the start token is an input
    of training, but no target. end: id of the EOS token. vocabulary: largest token id + 1. special: all special tokens.
    """

    def __init__(self, tokenizer: Tokenizer, start: int, end: int, named: Iterable[str] = ()) -> None:
        """Disable padding and truncation of `tokenizer`, and find its special tokens. start, end: ids of the tokens
        that frame a document. named: tokens that the other files of a tokenizer list as special (see
        `parse_special_tokens`).
        """
        self.tokenizer, self.start, self.end = tokenizer, start, end
        self.vocabulary = _count_vocabulary(tokenizer)
        tokenizer.no_padding()
        tokenizer.no_truncation()
        frame = {str(tokenizer.id_to_token(token)) for token in (start, end)}
        self.special = find_special_tokens(tokenizer, {*named, *frame})
        self._plain_bytes = _is_plain_bytes(tokenizer)
        self._encoder = tokenizer if self._plain_bytes else make_text_encoder(tokenizer, self.special)
        unknown = find_unknown_token(tokenizer)
        self._never = np.zeros(self.vocabulary, dtype=bool)  # tokens that text must not become
        for token in self.special:
            self._never[tokenizer.token_to_id(token)] = token != unknown or token in frame

    @property
    def special_ids(self) -> list[int]:
        """Ids of the special tokens, ascending."""
        return sorted(token for token in map(self.tokenizer.token_to_id, self.special) if token is not None)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Smallest little-endian dtype for token ids on disk: uint16 or uint32."""
        return np.dtype("<u2" if self.vocabulary <= 1 << 16 else "<u4")

    def encode(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        """Return the token ids of each of `texts`, [tokens] of type `dtype`, without start and end tokens. Raises
        `UserError` if a part of a text would be encoded as a special token, or cannot be encoded.
        """
        if self._plain_bytes:
            return [np.frombuffer(text.encode(), dtype=np.uint8).astype(self.dtype) for text in texts]
        with convert_library_errors("text cannot be tokenized"):
            encodings = self._encoder.encode_batch_fast(list(texts), add_special_tokens=False)
        tokens = [np.array(encoding.ids, dtype=self.dtype) for encoding in encodings]
        for text, ids in zip(texts, tokens, strict=True):
            if self._never[ids].any():
                token = self.tokenizer.id_to_token(int(ids[self._never[ids]][0]))
                raise UserError(
                    f'data.tokenizer: text becomes the special token "{token}" of this tokenizer, in a document that '
                    f"begins with {text[:40]!r}; use a tokenizer that has another token for unknown text"
                )
        return tokens

    def decode(self, tokens: Sequence[int] | NDArray[Any]) -> str:
        """Return the text of a sequence of token ids, in which special tokens appear as their names, such as "</s>"."""
        with convert_library_errors("tokens cannot be decoded"):
            return str(self.tokenizer.decode([int(token) for token in tokens], skip_special_tokens=False))


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """Files of a tokenizer as bytes. tokenizer: tokenizer.json. config: tokenizer_config.json, which always names the
    EOS token.
    """

    tokenizer: bytes
    config: bytes

    def sha256(self) -> list[str]:
        """Return the hex SHA-256 of tokenizer.json and of tokenizer_config.json."""
        return [hashlib.sha256(data).hexdigest() for data in (self.tokenizer, self.config)]

    @property
    def chat_template(self) -> str | None:
        """Jinja source of the tokenizer's chat template, of several templates the one named "default"; None if it has
        none."""
        template = json.loads(self.config).get("chat_template")
        if isinstance(template, list):
            named = [one for one in template if isinstance(one, dict) and one.get("name") == "default"]
            template = named[-1].get("template") if named else None
        return template if isinstance(template, str) else None

    def with_chat_template(self, template: str) -> TokenizerFiles:
        """Return a copy whose tokenizer_config.json contains the Jinja source `template` as chat template."""
        return TokenizerFiles(self.tokenizer, _serialize_json({**json.loads(self.config), "chat_template": template}))

    def list_named_tokens(self) -> dict[str, str]:
        """Return {variable of chat templates: special token}, such as {"bos_token": "<s>"}."""
        config = json.loads(self.config)
        texts = {key: get_token_text(value) for key, value in config.items() if key.endswith("_token")}
        return {key: text for key, text in texts.items() if text is not None}

    def load(self) -> TextTokenizer:
        """Build the tokenizer from the files. Raises `UserError` if tokenizer.json is invalid."""
        return _make_text_tokenizer(parse_tokenizer(self.tokenizer, Path(FILES[0])), json.loads(self.config))


def find_tokenizer(name: str) -> TokenizerFiles | None:
    """Read the files of the existing tokenizer that data.tokenizer = `name` selects, the path of a tokenizer.json or of
    its directory. Returns None if `name` is a kind that Meshwright creates, such as "bpe". Raises `UserError` if there
    are no such files, or no file names the EOS token.
    """
    if name in TOKENIZERS:
        return None
    path = Path(name).expanduser()
    directory = path if path.is_dir() else path.parent
    file = directory / "tokenizer.json" if path.is_dir() else path
    if not path.exists():
        close = nearest(name, TOKENIZERS)
        hint = f'; did you mean "{close}"?' if close else f"; known: {', '.join(TOKENIZERS)}, or such a path"
        raise UserError(f'data.tokenizer: "{name}" is neither a tokenizer.json nor a directory with one{hint}')
    if not file.is_file():
        raise UserError(
            f"data.tokenizer: {directory} has no tokenizer.json; "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...) writes one"
        )
    try:
        data = read_file(file)
    except OSError as error:
        raise UserError(f"data.tokenizer: {file} cannot be read ({error.strerror or error})") from None
    tokenizer = parse_tokenizer(data, file)
    config = _load_json_object(directory / "tokenizer_config.json")
    eos = _find_special_token(tokenizer, directory, config, "eos")
    if eos is None:
        added = [token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special]
        eos = next((token for token in _USUAL_ENDS if token in added), None)
    if eos is None:
        raise UserError(
            f'data.tokenizer: {file} does not name the end-of-text token; write {{"eos_token": "..."}} into '
            f"{directory / 'tokenizer_config.json'}"
        )
    bos = _find_special_token(tokenizer, directory, config, "bos")
    for key, token in (("eos_token", eos), ("bos_token", bos)):
        if token is not None and tokenizer.token_to_id(token) is None:
            raise UserError(f'data.tokenizer: the {key} "{token}" of {directory} is not a token of {file.name}')
    if config.get("eos_token") is None or (bos is not None and config.get("bos_token") is None):
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **config, "eos_token": eos, "bos_token": bos}
    # The map is not copied: add the special tokens that it alone names to the configuration.
    mapped = find_special_tokens(
        tokenizer, parse_special_tokens(_load_json_object(directory / "special_tokens_map.json"))
    )
    if unlisted := mapped - find_special_tokens(tokenizer, parse_special_tokens(config)):
        config = {
            **config,
            "additional_special_tokens": [*(config.get("additional_special_tokens") or []), *sorted(unlisted)],
        }
    if (template := directory / "chat_template.jinja").is_file():  # takes precedence over that of the configuration
        try:
            config = {**config, "chat_template": read_file(template, "config_bytes").decode()}
        except UnicodeDecodeError as error:
            raise UserError(f"data.tokenizer: {template}: byte {error.start} is not UTF-8 text") from None
        except OSError as error:
            raise UserError(f"data.tokenizer: {template} cannot be read ({error.strerror or error})") from None
    return TokenizerFiles(data, _serialize_json(config))


def find_smallest_vocabulary(name: str) -> int:
    """Return the smallest vocabulary size that data.tokenizer = `name` allows: for "bpe" the 256 bytes and the
    end-of-text token, for an existing tokenizer its vocabulary size. Raises `UserError` if the tokenizer's files are
    missing or no file names the EOS token."""
    found = find_tokenizer(name)
    return (
        KINDS[name].smallest_vocabulary
        if found is None
        else _count_vocabulary(parse_tokenizer(found.tokenizer, Path(FILES[0])))
    )


def write_tokenizer(
    directory: Path,
    name: str,
    vocabulary: int,
    found: TokenizerFiles | None,
    texts: Iterator[str],
    chat_template: str | None = None,
) -> None:
    """Write tokenizer.json and tokenizer_config.json into `directory`. found: existing tokenizer whose files are
    written; None: a new tokenizer of kind `name` ("bpe" ...) is created.

    vocabulary: maximum number of tokens of a new tokenizer. texts: training texts of a new tokenizer. chat_template:
    Jinja source stored in the configuration (None: unchanged).
    """
    if found is None:
        kind = KINDS[name]
        found = TokenizerFiles(
            kind.make(vocabulary, texts).to_str(pretty=True).encode(), _serialize_json(kind.make_config())
        )
    if chat_template is not None:
        found = found.with_chat_template(chat_template)
    for file, data in zip(FILES, (found.tokenizer, found.config), strict=True):
        write_atomic(directory / file, data)


def load_tokenizer(directory: Path) -> TextTokenizer:
    """Load the tokenizer whose tokenizer.json and tokenizer_config.json `write_tokenizer` wrote into `directory`."""
    tokenizer = parse_tokenizer((directory / FILES[0]).read_bytes(), directory / FILES[0])
    return _make_text_tokenizer(tokenizer, _load_json_object(directory / FILES[1]))


def _make_text_tokenizer(tokenizer: Tokenizer, config: dict[str, Any]) -> TextTokenizer:
    """Build a `TextTokenizer` from the library's `tokenizer`. config: content of tokenizer_config.json, which names the
    EOS token.
    """
    eos, bos = config["eos_token"], config.get("bos_token")
    start, end = (tokenizer.token_to_id(get_token_text(token) or "") for token in (bos or eos, eos))
    assert start is not None and end is not None, (eos, bos)
    return TextTokenizer(tokenizer, start, end, parse_special_tokens(config))


def _count_vocabulary(tokenizer: Tokenizer) -> int:
    """Return the vocabulary size of `tokenizer`: the largest token id + 1."""
    return int(max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1)


def _is_plain_bytes(tokenizer: Tokenizer) -> bool:
    """Return True if a tokenizer encodes text as its UTF-8 bytes, as the tokenizer of `create_byte_tokenizer` does."""
    reference = create_byte_tokenizer()
    return tokenizer.get_vocab() == reference.get_vocab() and bool(
        json.loads(tokenizer.to_str()) == json.loads(reference.to_str())
    )


def _load_json_object(path: Path) -> dict[str, Any]:
    """Load the JSON object in the file `path`; {} if the file does not exist. Raises `UserError` if the file cannot be
    read, contains no object, or contains a lone surrogate, which no tokenizer accepts.
    """
    if not path.is_file():
        return {}
    try:
        value = read_json(path)
        _serialize_json(value)
    except UnicodeEncodeError:
        raise UserError(f"data.tokenizer: {path} contains a lone surrogate") from None
    except OSError as error:
        raise UserError(f"data.tokenizer: {path} cannot be read ({error.strerror or error})") from None
    except ValueError as error:
        raise UserError(f"data.tokenizer: {path} is not JSON ({error})") from None
    if not isinstance(value, dict):
        raise UserError(f"data.tokenizer: {path} is not a JSON object")
    return value


def _find_special_token(tokenizer: Tokenizer, directory: Path, config: dict[str, Any], kind: str) -> str | None:
    """Return the BOS (kind "bos") or EOS ("eos") token that the files in `directory` name, or None if no file names
    such a token. tokenizer: converts token ids in these files to text. Order of search: tokenizer_config.json (content:
    `config`), special_tokens_map.json, generation_config.json, config.json.
    """
    for values in (config, _load_json_object(directory / "special_tokens_map.json")):
        if (token := values.get(f"{kind}_token")) is not None:
            if (text := get_token_text(token)) is None:
                raise UserError(
                    f"data.tokenizer: the {kind}_token in {directory} must be text, or an object with its content, not "
                    f"{str(token)[:80]}"
                )
            return text
    for name in ("generation_config.json", "config.json"):
        number = _load_json_object(directory / name).get(f"{kind}_token_id")
        if isinstance(number, list):
            number = number[0] if number else None
        if isinstance(number, int) and 0 <= number < 2**32 and (found := tokenizer.id_to_token(number)) is not None:
            return str(found)
    return None


def _serialize_json(value: dict[str, Any]) -> bytes:
    """Serialize the JSON object `value` to UTF-8 with indentation, as `transformers` writes it."""
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
