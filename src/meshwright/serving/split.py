"""Text from a model that is cut over ranks of this machine."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from meshwright.checkpoint import find_checkpoint
from meshwright.comm.local import LocalRanks
from meshwright.comm.mesh import Mesh
from meshwright.layout import Layout
from meshwright.parallel.inference import SplitModel, reading_layout
from meshwright.serving.generate import Generation, Generator
from meshwright.serving.sampling import Sampling
from meshwright.spec.config_json import config_from_path
from meshwright.terminal import escape_on_terminal
from meshwright.threads import choose_threads


def generate_split(
    directory: os.PathLike[str] | str,
    layout: str,
    prompt: str,
    max_tokens: int = 256,
    sampling: Sampling | None = None,
    *,
    chat: bool = False,
    echo: bool = False,
    check_hashes: bool = True,
    log: Callable[[str], None] = lambda line: None,
) -> tuple[Generation, Path]:
    """Continue `prompt` with the model in `directory` on local ranks, over gloo: the generation, and where the model
    lies. Other arguments as in `Generator`. echo: prompt (unless it is a `chat`) and text go to
    standard output as they come.

    Raises UserError for a layout of more than tp and pp, or one that does not fit the model.
    """
    directory = find_checkpoint(directory, log, check_hashes=check_hashes)
    reading = reading_layout(layout, config_from_path(directory))
    with LocalRanks(reading.world_size, threads=choose_threads(reading.world_size)) as ranks:
        given = str(directory), str(reading), prompt, max_tokens, sampling, chat, echo
        return ranks.run(_on_rank, *given, timeout=24 * 3600.0)[0], directory


def _on_rank(
    directory: str, layout: str, prompt: str, max_tokens: int, sampling: Sampling | None, chat: bool, echo: bool
) -> Generation:
    mesh = Mesh.create(Layout.parse(layout))
    split = SplitModel(Path(directory), mesh)
    generator = Generator.of_model(split, split.config, Path(directory))
    generation = Generation(prompt)
    echo = echo and mesh.rank == 0
    pieces = generator.stream(prompt, max_tokens, sampling, chat=chat)
    for number, (piece, generation) in enumerate(pieces):  # noqa: B007
        if echo:
            print(escape_on_terminal(piece if number or chat else prompt + piece), end="", flush=True)
    if echo:
        print(flush=True)
    mesh.close()
    return generation
