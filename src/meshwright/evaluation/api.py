"""`meshwright.evaluate`: loss of a checkpoint on held-out text, like the command `meshwright evaluate`. Free of
torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypedDict, Unpack

from meshwright.documents import to_json_dict
from meshwright.launcher.device import refuse_device_of_layout
from meshwright.layout import Layout
from meshwright.names import check_options
from meshwright.recipe import format_overrides
from meshwright.threads import prepare_process


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Loss of a checkpoint on held-out text.

    Attributes:
        loss: Mean loss in nats per target token; for records (SFT or preference data), over the response tokens.
        perplexity: exp(loss).
        bits_per_byte: Cross-entropy in bits per UTF-8 byte of text; None for records.
        tokens: Number of target tokens.
        bytes: Size of the text in UTF-8 bytes.
        documents: Number of documents, or of records.
        sequence: Context length in tokens.
        lossy_documents: Number of documents whose text changes when the tokenizer encodes and decodes it; None for
            records.
        xz_bits_per_byte: Bits per byte to which `xz -9` compresses the same text; None without `with_xz`.
        checkpoint: Directory of the model.
        document: JSON document of `meshwright evaluate --json`: the values above (if not None) and `data`.
    """

    loss: float
    perplexity: float
    bits_per_byte: float | None
    tokens: int
    bytes: int
    documents: int
    sequence: int
    lossy_documents: int | None
    xz_bits_per_byte: float | None
    checkpoint: Path
    document: Mapping[str, Any]

    def to_json_dict(self) -> dict[str, Any]:
        """Return the JSON document of `meshwright evaluate --json`: the content of `document`."""
        return to_json_dict(self.document)


class EvaluationOptions(TypedDict, total=False):
    """Options of `evaluate`.

    Attributes:
        with_xz: Compress the same text with `xz -9` for comparison; default: True.
        check_hashes: Verify every byte of a checkpoint's model against its SHA-256; default: True.
        progress: Called with (rows done, all rows), where a row is a sequence of packed documents; on one device only.
        log: Called with a line for each note, such as a damaged checkpoint that is skipped."""

    with_xz: bool
    check_hashes: bool
    progress: Callable[[int, int], None]
    log: Callable[[str], None]


def evaluate(
    checkpoint: str | Path,
    data: str | Path,
    overrides: Mapping[str, Any] | Sequence[str] = (),
    *,
    sequence: int | None = None,
    layout: Layout | str | None = None,
    device: str = "auto",
    **options: Unpack[EvaluationOptions],
) -> Evaluation:
    """Evaluate a checkpoint on held-out text, each token counted once.

    Args:
        checkpoint: Run directory (its newest complete checkpoint), checkpoint, or Hugging Face directory.
        data: Recipe (its validation split), or a data source, of which all text is used: a path, a glob, `"stdlib"`.
        overrides: Values of keys of that recipe by dotted name, `{"data.validation_fraction": 0.1}`.
        sequence: Context length in tokens; None: the recipe's or the model's.
        layout: Layout over CPU ranks of this machine (axes dp, tp, pp, ep), such as `"dp2 tp2"`; None: one device.
        device: `"cpu"`, `"cuda"`, or `"auto"`: the GPU if there is one.
        **options: `with_xz`, `check_hashes`, `progress` and `log`, see `EvaluationOptions`.

    Returns:
        Loss and derived figures, the same as the document of `meshwright evaluate --json`.

    Raises:
        UserError: No model, tokenizer or text is found, or the layout does not fit the model.

    Examples:
        >>> import meshwright as mw
        >>> found = mw.evaluate("runs/tiny", "text.txt", device="cpu", with_xz=False)
        >>> found.tokens == found.bytes + 1, 7.0 < found.bits_per_byte < 9.0
        (True, True)
    """
    check_options(evaluate, options, EvaluationOptions)
    prepare_process()  # before torch is loaded
    refuse_device_of_layout(device, layout)
    from meshwright.evaluation.evaluation import run_evaluation

    document = run_evaluation(
        checkpoint, str(data), sequence=sequence, overrides=format_overrides(overrides), device=device,
        layout=None if layout is None else str(layout), **options,
    )  # fmt: skip
    values: dict[str, Any] = {each.name: document.get(each.name) for each in fields(Evaluation)}
    values["checkpoint"], values["document"] = Path(document["checkpoint"]), document
    return Evaluation(**values)
