"""`meshwright generate`: continue a prompt with a checkpoint."""

from __future__ import annotations

import sys

import click

from meshwright.cli import plumbing
from meshwright.cli.plumbing import device_option, json_option, reading_layout_option, result_printer
from meshwright.errors import UserError
from meshwright.limits import check_count
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
@click.option("--prompt", required=True, help="Text to continue; -: standard input, without the final newline.")
@click.option("--chat", is_flag=True, help="Format the prompt as a user's turn by the chat template.")
@click.option("--max-tokens", type=int, default=256, help="Maximum new tokens.")
@click.option("--temperature", type=float, default=0.0, help="0: greedy.")
@click.option("--top-k", type=int, default=0, help="Sample from the k most likely tokens; 0: all.")
@click.option("--top-p", type=float, default=1.0, help="Sample from the most likely tokens with total probability p.")
@click.option("--seed", type=int, default=0, help="Random seed of sampling.")
@device_option
@reading_layout_option
@json_option
def command(
    checkpoint: str, prompt: str, chat: bool, max_tokens: int, temperature: float, top_k: int, top_p: float, seed: int,
    device: str, layout: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Continue a prompt with CHECKPOINT: a run directory (its newest complete checkpoint), a checkpoint, or a Hugging
    Face directory. The text is printed as it is generated.

    \f
    prompt: text to continue, "-" for standard input. chat: format the prompt as a user's turn. max_tokens: maximum
    number of new tokens. temperature, top_k, top_p, seed: of sampling; temperature 0 is greedy, top_k 0 means all
    tokens. device: "auto", "cpu" or "cuda". layout: run on local ranks with this layout, None for one process. as_json:
    print JSON.
    """
    from meshwright.serving.api import load
    from meshwright.serving.sampling import Sampling

    with result_printer(as_json) as answer:
        check_count("max_tokens", max_tokens, "new_tokens")  # before a model is loaded and kernels are compiled
        Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
        if prompt == "-":
            prompt = _read_standard_input()
        model = load(checkpoint, layout, device=device, log=print_message)
        pieces = model.stream(
            prompt, max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, chat=chat
        )
        for number, piece in enumerate(pieces):
            if not as_json:
                print(escape_on_terminal(piece if number or chat else prompt + piece), end="", flush=True)
        generation = pieces.generation
        if not as_json:
            print(flush=True)
            rate = f", {generation.tokens_per_second:,.0f} tokens/s" if generation.tokens_per_second else ""
            print(
                f"{len(generation.tokens)} tokens, the first after {generation.seconds_to_first_token:.3f} s{rate}",
                file=sys.stderr,
            )
        answer(generation.to_json_dict(), "")


def _read_standard_input() -> str:
    """Return standard input as text, without the newline at its end. Raises `UserError` if it is closed or not
    UTF-8."""
    if sys.stdin is None:
        raise UserError("--prompt -: standard input is closed; give the text as --prompt TEXT")
    try:
        return sys.stdin.buffer.read().decode("utf-8").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"--prompt -: standard input is not UTF-8 text (byte {error.start})") from None
