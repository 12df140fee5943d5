"""`meshwright generate`: continue a prompt with a checkpoint."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from meshwright.cli import plumbing
from meshwright.cli.plumbing import answering, device_option, device_or_layout, json_option, reading_layout_option
from meshwright.errors import UserError
from meshwright.terminal import escape_on_terminal, print_message


@plumbing.command(
    "generate",
    "meshwright generate runs/quickstart --prompt 'def main(' --max-tokens 100",
    "meshwright generate runs/quickstart --prompt 'import ' --temperature 0.8 --top-p 0.95 --seed 7",
    "meshwright generate runs/quickstart --prompt 'import ' --layout pp2",
    "meshwright generate runs/fine_tune --chat --prompt 'What is a mesh?'",
    "meshwright generate runs/quickstart --prompt - --device cpu < prompt.txt",
)
@click.argument("checkpoint")
@click.option("--prompt", required=True, help="The text to continue; -: standard input, without its last line's end.")
@click.option("--chat", is_flag=True, help="The prompt is a user's turn, the text the answer, by the chat template.")
@click.option("--max-tokens", type=int, default=256, show_default=True, help="New tokens, at most.")
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0: always the most likely token.")
@click.option("--top-k", type=int, default=0, show_default=True, help="Draw among the k most likely; 0: all.")
@click.option("--top-p", type=float, default=1.0, show_default=True, help="Draw among the most likely that reach p.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the draws.")
@device_option
@reading_layout_option
@json_option
def command(
    checkpoint: str,
    prompt: str,
    chat: bool,
    max_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
    device: str,
    layout: str | None,
    as_json: bool,
) -> None:
    """Continue a prompt with CHECKPOINT: a run directory (its newest whole checkpoint), a checkpoint, or a Hugging Face
    directory. The text is written as it comes."""
    from meshwright.serving.generate import Generator
    from meshwright.serving.sampling import Sampling
    from meshwright.serving.split import generate_split

    with answering(as_json) as answer:
        sampling = Sampling(temperature, top_k, top_p, seed)
        if prompt == "-":
            prompt = _standard_input()
        directory: Path | None
        if layout is not None:
            device_or_layout(device, layout)
            generation, directory = generate_split(
                checkpoint, layout, prompt, max_tokens, sampling, chat=chat, echo=not as_json, log=print_message
            )
        else:
            generator = Generator.from_directory(checkpoint, device=device, log=print_message)
            directory = generator.directory
            pieces = generator.stream(prompt, max_tokens, sampling, chat=chat)
            for number, (piece, generation) in enumerate(pieces):  # noqa: B007
                if not as_json:
                    print(escape_on_terminal(piece if number or chat else prompt + piece), end="", flush=True)
            if not as_json:
                print(flush=True)
        if not as_json:
            rate = f", {generation.tokens_per_second:,.0f} tokens/s" if generation.tokens_per_second else ""
            print(
                f"{len(generation.tokens)} tokens, the first after {generation.seconds_to_first_token:.3f} s{rate}",
                file=sys.stderr,
            )
        document: dict[str, Any] = {
            "prompt": prompt,
            "text": generation.text,
            "tokens": len(generation.tokens),
            "prompt_tokens": generation.prompt_tokens,
            "stopped": generation.stopped,
            "seconds_to_first_token": generation.seconds_to_first_token,
            "tokens_per_second": generation.tokens_per_second,
            "checkpoint": directory,
        }
        answer(document, "")


def _standard_input() -> str:
    """All of standard input; one end of line at its end is the shell's, not the prompt's."""
    if sys.stdin is None:
        raise UserError("--prompt -: standard input is closed; give the text as --prompt TEXT")
    try:
        return sys.stdin.buffer.read().decode("utf-8").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"--prompt -: standard input is not UTF-8 text (byte {error.start})") from None
