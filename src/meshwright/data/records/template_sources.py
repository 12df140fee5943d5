"""Chat templates by name: those of Meshwright, a tokenizer's own, and files."""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from importlib.resources import files
from pathlib import Path

from meshwright.errors import UserError
from meshwright.names import TEMPLATES, nearest
from meshwright.untrusted import read_file

_NEEDED = {"chatml": ("<|im_start|>", "<|im_end|>")}  # special tokens that a template writes itself


@cache
def load_own_sources() -> frozenset[str]:
    """Return the Jinja sources of all chat templates that come with Meshwright."""
    return frozenset(_load_own_source(name) for name in TEMPLATES if name != "model")


def _load_own_source(name: str) -> str:
    """Load the Jinja source of the chat template `name`, such as "chatml", that comes with Meshwright."""
    return (files("meshwright.data.records") / f"{name}.jinja").read_text("utf-8")


def find_template(name: str, own: str | None, tokenizer: str) -> tuple[str, str]:
    """Find the chat template that the setting data.template = `name` selects; return (its Jinja source, its name in
    error messages).

    own: Jinja source of the tokenizer's chat template; None: the tokenizer has none. tokenizer: the tokenizer's name,
    for errors. Raises `UserError` if the template does not exist.
    """
    if name == "model":
        if own is None:
            others = " or ".join(_describe_template(one) for one in TEMPLATES if one != "model")
            raise UserError(
                f'data.template = "model": the tokenizer "{tokenizer}" has no chat_template; '
                f"set data.template to {others}, or to a .jinja file"
            )
        return own, "the chat template of the tokenizer"
    if name in TEMPLATES:
        return _load_own_source(name), f'the template "{name}"'
    path = Path(name).expanduser()
    if not path.is_file():
        close = nearest(name, TEMPLATES)
        hint = (
            f'; did you mean "{close}"?' if close else f"; known: {', '.join(TEMPLATES)}, or the path of a .jinja file"
        )
        raise UserError(f'data.template: "{name}" is neither a template nor a file{hint}')
    try:
        return read_file(path, "config_bytes").decode(), str(path)
    except UnicodeDecodeError as error:
        raise UserError(f"data.template: {path} cannot be read: byte {error.start} is not UTF-8 text") from None
    except OSError as error:
        raise UserError(f"data.template: {path} cannot be read: {error.strerror or error}") from None


def _describe_template(name: str) -> str:
    """Return text that names a template of this project and the special tokens that a tokenizer needs for it."""
    needed = _NEEDED.get(name, ())
    return f'"{name}"' + (f" (for a tokenizer with the special tokens {' and '.join(needed)})" if needed else "")


def check_template_tokens(name: str, special: Collection[str], tokenizer: str) -> None:
    """Raise `UserError` if the chat template `name`, such as "chatml", writes special tokens that the tokenizer does
    not have. special: the tokenizer's special tokens. tokenizer: the tokenizer's name, for the error.
    """
    missing = [token for token in _NEEDED.get(name, ()) if token not in special]
    if missing:
        raise UserError(
            f'data.template = "{name}" writes {" and ".join(missing)}, which are not special tokens of the tokenizer '
            f'"{tokenizer}": any text could spell them; set data.template = "instruction", or add them to it'
        )
