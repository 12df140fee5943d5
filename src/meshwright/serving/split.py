"""Text generation with a model split over local ranks of this machine."""

from __future__ import annotations

import json
import os
import select
import signal
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import torch

from meshwright.comm.local import LocalRanks
from meshwright.comm.mesh import Mesh
from meshwright.layout import Layout
from meshwright.parallel.inference import SplitModel
from meshwright.serving.generate import Generation, Generator
from meshwright.serving.sampling import Sampling
from meshwright.threads import choose_threads

_SECONDS = 24 * 3600.0  # that a call may take
_LOOK_SECONDS = 0.05  # between looks whether ranks that write no text have ended


class SplitGenerator:
    """Continues prompts with a model split over local ranks, connected by gloo. Each call starts the ranks and loads
    the model.

    `layout`: tp and pp alone, as `parallel.inference.parse_inference_layout` returns it.
    """

    def __init__(self, directory: Path, layout: Layout, dtype: torch.dtype = torch.float32) -> None:
        self.directory, self.layout, self.dtype = directory, layout, dtype

    def generate(
        self, prompts: Sequence[str], max_tokens: int = 256, sampling: Sampling | None = None, *, chat: bool = False
    ) -> list[Generation]:
        """Continue each prompt; arguments as in `Generator.generate`."""
        with self._make_ranks() as ranks:
            return ranks.run(
                _generate_on_rank, *self._rank_arguments(prompts, max_tokens, sampling, chat), None, timeout=_SECONDS
            )[0]

    def stream(
        self, prompt: str, max_tokens: int = 256, sampling: Sampling | None = None, *, chat: bool = False
    ) -> Iterator[tuple[str, Generation]]:
        """Yield each new piece of text with the generation so far, as `Generator.stream` does; the last pair holds the
        final figures."""
        so_far = Generation(prompt, checkpoint=self.directory)
        with tempfile.TemporaryDirectory(prefix="meshwright-text-") as directory, self._make_ranks() as ranks:
            pipe = os.path.join(directory, "pieces")
            os.mkfifo(pipe)
            descriptor = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)  # for writing, too: it never ends, so none waits
            given = self._rank_arguments([prompt], max_tokens, sampling, chat)
            pool = ThreadPoolExecutor(1)
            try:
                answer = pool.submit(ranks.run, _generate_on_rank, *given, pipe, timeout=_SECONDS)
                for piece in _read_pieces(descriptor, answer):
                    so_far.text += piece
                    yield piece, so_far
                yield "", answer.result()[0][0]
            finally:
                for process in ranks.pids:  # interrupted: `run` in the other thread then ends
                    with suppress(ProcessLookupError):
                        os.kill(process, signal.SIGKILL)
                pool.shutdown()
                os.close(descriptor)

    def _make_ranks(self) -> LocalRanks:
        """Return local ranks for the layout, not started yet."""
        return LocalRanks(self.layout.world_size, threads=choose_threads(self.layout.world_size))

    def _rank_arguments(
        self, prompts: Sequence[str], max_tokens: int, sampling: Sampling | None, chat: bool
    ) -> tuple[str, str, torch.dtype, list[str], int, Sampling | None, bool]:
        """Return the arguments of `_generate_on_rank`, without the pipe."""
        return str(self.directory), str(self.layout), self.dtype, list(prompts), max_tokens, sampling, chat


def _read_pieces(descriptor: int, answer: Future[list[list[Generation]]]) -> Iterator[str]:
    """Yield the text pieces that rank 0 writes to the pipe `descriptor`, one JSON string per line, until `answer` (of
    all ranks) is done."""
    unread = b""
    while True:
        ended = answer.done()  # before the last look: what was written before it is read
        if select.select([descriptor], [], [], 0.0 if ended else _LOOK_SECONDS)[0]:
            unread += os.read(descriptor, 65536)
            *lines, unread = unread.split(b"\n")
            yield from map(json.loads, lines)
        elif ended:
            return


def _generate_on_rank(
    directory: str, layout: str, dtype: torch.dtype, prompts: list[str], max_tokens: int, sampling: Sampling | None,
    chat: bool, pipe: str | None,
) -> list[Generation]:  # fmt: skip
    """Load this rank's part of the model and continue the prompts; rank 0 streams the first one's text to `pipe`, if
    given."""
    mesh = Mesh.create(Layout.parse(layout))
    split = SplitModel(Path(directory), mesh, dtype)
    generator = Generator.of_model(split, split.config, Path(directory))
    if pipe is None or mesh.rank > 0:
        generations = [generator.generate(prompt, max_tokens, sampling, chat=chat) for prompt in prompts]
    else:
        with open(pipe, "w") as pieces:
            for piece, generation in generator.stream(prompts[0], max_tokens, sampling, chat=chat):  # noqa: B007
                pieces.write(json.dumps(piece) + "\n")
                pieces.flush()
        generations = [generation]
    mesh.close()
    return generations
