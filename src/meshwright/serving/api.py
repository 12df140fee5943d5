"""`meshwright.load`: a model from a checkpoint that continues prompts, as `meshwright generate` does. Free of torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, overload

from meshwright.checkpoint import find_checkpoint
from meshwright.errors import UserError
from meshwright.launcher.device import refuse_device_of_layout
from meshwright.layout import Layout
from meshwright.names import unknown
from meshwright.threads import prepare_process

if TYPE_CHECKING:
    import torch

    from meshwright.serving.generate import Generation, Generator
    from meshwright.serving.sampling import Sampling
    from meshwright.serving.split import SplitGenerator

DTYPES = ("float32", "bfloat16", "float16", "float64")


class TextStream:
    """Iterator over the generated text of one prompt, in pieces of complete characters.

    Attributes:
        generation: Text, tokens and times so far; final once the iterator has ended.
    """

    def __init__(self, pieces: Iterator[tuple[str, Generation]], generation: Generation) -> None:
        self.generation = generation
        self._pieces = pieces

    def __iter__(self) -> TextStream:
        """Return the iterator itself."""
        return self

    def __next__(self) -> str:
        """Return the next piece of text."""
        piece, self.generation = next(self._pieces)
        return piece


class Model:
    """A model with its tokenizer, loaded by `meshwright.load`.

    Attributes:
        directory: Directory of the model: a checkpoint or a Hugging Face directory.
        layout: Layout over ranks of this machine; None for one process.
    """

    def __init__(self, directory: Path, generator: Generator | SplitGenerator, layout: Layout | None = None) -> None:
        self.directory, self.layout = directory, layout
        self._generator = generator

    @overload
    def generate(  # type: ignore[overload-overlap]  # a text is a sequence of texts, too
        self, prompts: str, *, max_tokens: int = ..., temperature: float = ..., top_k: int = ..., top_p: float = ...,
        seed: int = ..., chat: bool = ...,
    ) -> Generation: ...  # fmt: skip

    @overload
    def generate(
        self, prompts: Sequence[str], *, max_tokens: int = ..., temperature: float = ..., top_k: int = ...,
        top_p: float = ..., seed: int = ..., chat: bool = ...,
    ) -> list[Generation]: ...  # fmt: skip

    def generate(
        self, prompts: str | Sequence[str], *, max_tokens: int = 256, temperature: float = 0.0, top_k: int = 0,
        top_p: float = 1.0, seed: int = 0, chat: bool = False,
    ) -> Generation | list[Generation]:  # fmt: skip
        """Continue one prompt, or each of several.

        Args:
            prompts: A text, or several.
            max_tokens: New tokens of each, at most.
            temperature: Divisor of the logits; 0 takes the most likely token each time.
            top_k: Draw among the k most likely tokens; 0: among all.
            top_p: Draw among the most likely tokens that together reach this probability.
            seed: Seed of the draws, the same for each prompt.
            chat: Take the prompt as a user's turn and generate the answer, by the chat template of the directory.

        Returns:
            The generation of the prompt, or a list of them: `text`, `tokens`, `stopped`, `seconds_to_first_token`.

        Raises:
            UserError: A number is out of range, or the prompt leaves no position for a new token.

        Examples:
            >>> import meshwright as mw
            >>> model = mw.load("runs/tiny", device="cpu")
            >>> answer = model.generate("import ", max_tokens=4)
            >>> len(answer.tokens), answer.stopped
            (4, 'length')
            >>> [len(each.tokens) for each in model.generate(["def ", "class "], max_tokens=3)]
            [3, 3]
        """
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        for text in texts:
            _check_prompt(text)
        sampling = _sampling(temperature, top_k, top_p, seed)
        if self.layout is not None:
            found = self._split_generator.generate(texts, max_tokens, sampling, chat=chat) if texts else []
        else:
            found = [self._local_generator.generate(text, max_tokens, sampling, chat=chat) for text in texts]
        return found[0] if isinstance(prompts, str) else found

    def stream(
        self, prompt: str, *, max_tokens: int = 256, temperature: float = 0.0, top_k: int = 0, top_p: float = 1.0,
        seed: int = 0, chat: bool = False,
    ) -> TextStream:  # fmt: skip
        """Continue a prompt and yield the text as it is generated; arguments and errors as in `generate`.

        Examples:
            >>> import meshwright as mw
            >>> pieces = mw.load("runs/tiny", device="cpu").stream("import ", max_tokens=4)
            >>> "".join(pieces) == pieces.generation.text
            True
        """
        from meshwright.serving.generate import Generation

        _check_prompt(prompt)
        sampling = _sampling(temperature, top_k, top_p, seed)
        generator = self._local_generator if self.layout is None else self._split_generator
        pieces = generator.stream(prompt, max_tokens, sampling, chat=chat)
        return TextStream(pieces, Generation(prompt, checkpoint=self.directory))

    @property
    def _local_generator(self) -> Generator:
        """Generator of a model in this process; requires `layout` None."""
        from meshwright.serving.generate import Generator

        assert isinstance(self._generator, Generator)
        return self._generator

    @property
    def _split_generator(self) -> SplitGenerator:
        """Generator of a model split over local ranks; requires a `layout`."""
        from meshwright.serving.split import SplitGenerator

        assert isinstance(self._generator, SplitGenerator)
        return self._generator


def load(
    path: str | Path,
    layout: Layout | str | None = None,
    dtype: str | torch.dtype | None = None,
    device: str = "auto",
    *,
    log: Callable[[str], None] = lambda line: None,
) -> Model:
    """Load a model and its tokenizer to continue prompts.

    Args:
        path: Run directory (its newest complete checkpoint), checkpoint, or Hugging Face directory. Every byte of a
            checkpoint's model is checked against its hash.
        layout: Split over CPU ranks of this machine, by tp and pp alone, such as `"tp2 pp2"`. Each
            call then starts the ranks and loads the model on them.
        dtype: Dtype of the parameters, a name such as `"bfloat16"` or a torch dtype; float32 unless given.
        device: `"cpu"`, `"cuda"`, or `"auto"`: the GPU where there is one.
        log: Called with a line for each newer checkpoint that is damaged and passed over.

    Returns:
        The model, with `generate` and `stream`.

    Raises:
        UserError: No model or tokenizer is there, a checkpoint is damaged, or the layout does not fit the model.

    Examples:
        >>> import meshwright as mw
        >>> mw.load("runs/tiny", dtype="bfloat16", device="cpu").directory.name
        'step-000002'
    """
    prepare_process()  # before torch is loaded
    refuse_device_of_layout(device, layout)
    from meshwright.parallel.inference import parse_inference_layout
    from meshwright.serving.generate import Generator
    from meshwright.spec.config_json import config_from_path

    chosen = _parse_dtype(dtype)
    if layout is None:
        generator = Generator.from_directory(path, dtype=chosen, device=device, log=log)
        assert generator.directory is not None
        return Model(generator.directory, generator)
    directory = find_checkpoint(path, log)
    reading = parse_inference_layout(str(layout), config_from_path(directory))
    if reading.world_size == 1:
        generator = Generator.from_directory(directory, dtype=chosen, device=device, check_hashes=False)
        return Model(directory, generator)
    from meshwright.serving.split import SplitGenerator

    return Model(directory, SplitGenerator(directory, reading, chosen), reading)


def _sampling(temperature: float, top_k: int, top_p: float, seed: int) -> Sampling:
    """Build the sampling options."""
    from meshwright.serving.sampling import Sampling

    return Sampling(temperature, top_k, top_p, seed)


def _check_prompt(prompt: object) -> None:
    """Raise UserError unless the prompt is a string."""
    if not isinstance(prompt, str):
        raise UserError(f"prompt: takes a text, not {type(prompt).__name__}")


def _parse_dtype(wanted: str | torch.dtype | None) -> torch.dtype:
    """Return the torch dtype of a name or dtype; None: float32. Raises UserError for an unknown name."""
    import torch

    if isinstance(wanted, torch.dtype):
        return wanted
    name = "float32" if wanted is None else str(wanted)
    if name not in DTYPES:
        raise UserError(unknown("dtype", name, DTYPES))
    dtype: torch.dtype = getattr(torch, name)
    return dtype
