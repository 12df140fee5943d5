"""`meshwright serve`: serve a checkpoint over HTTP."""

from __future__ import annotations

from typing import Any

import click

from meshwright.cli import plumbing
from meshwright.cli.plumbing import FiniteRange, device_option_of_ranks, file_option, json_option, result_printer


@plumbing.command(
    "serve",
    "meshwright serve runs/quickstart",
    'meshwright serve ./Llama-3.2-1B --dtype bf16 --memory 12GiB --layout "tp2 dp2" --api-key-file keys.txt',
    'curl http://127.0.0.1:8000/v1/completions -d \'{"prompt": "def main(", "max_tokens": 32}\'',
    'torchrun --nnodes 2 --nproc-per-node 2 ... -m meshwright serve ./Llama-3.1-8B --layout "tp2 pp2"',
)
@click.argument("checkpoint")
@click.option(
    "--layout", default="", show_default=False,
    help='Ranks: "tp2 pp2 dp2", with "ep2" for experts.  [default: one rank]',
)  # fmt: skip
@device_option_of_ranks
@click.option("--batch-invariant", is_flag=True, help="On a GPU: bitwise the same output for every batch; slower.")
@click.option("--dtype", help="Dtype of parameters and KV cache: fp32 or bf16.  [default: fp32]")
@click.option("--memory", help='Fraction of the memory, "0.9", or a size, "12GiB".  [default: 0.9, on CPUs ≤ 4 GiB KV]')
@click.option("--max-length", type=int, help="Maximum tokens of a sequence.  [default: the model's, or what fits]")
@click.option("--max-sequences", type=int, help="Maximum sequences per step.  [default: 64]")
@click.option("--token-budget", type=click.IntRange(min=1), help="Maximum tokens per step.  [default: 576]")
@click.option("--host", default="127.0.0.1", help="Address to listen on.")
@click.option("--port", default=8000, type=click.IntRange(0, 65535), help="Port; 0: any free one.")
@click.option("--served-model-name", help="Name in the API.  [default: the directory's]")
@file_option("--api-key-file", help="File with one API key per line; requests must have one.")
@click.option("--cors-origin", "cors_origins", multiple=True, help="Origin whose pages may call the API; repeatable.")
@click.option("--queue-requests", type=click.IntRange(min=0), help="Maximum queued requests; others are refused (429).")
@click.option("--queue-seconds", type=FiniteRange(min=0), help="Maximum predicted queueing time of a request.")
@click.option("--threads", type=click.IntRange(1, 1024), help="Threads per rank.  [default: the cores, shared]")
@click.option("--step-seconds", type=FiniteRange(min=0.1), default=60.0, help="Step time after which a rank is lost.")
@click.option("--drain-seconds", type=FiniteRange(min=0), default=60.0, help="Time limit of requests at shutdown.")
@json_option
def command(checkpoint: str, layout: str, as_json: bool, **options: Any) -> None:
    """Serve CHECKPOINT over HTTP: a run directory (its newest complete checkpoint), a checkpoint, or a Hugging Face
    directory.

    The API is OpenAI's (/v1/completions, /v1/chat/completions) and llama.cpp's (/completion). SIGTERM and Ctrl-C finish
    the requests in flight and stop, with exit code 143 or 130; a second signal stops immediately. --json prints one
    document as soon as requests are accepted.

    \f
    layout: ranks, such as "tp2 dp2", empty for one rank. options: all other options, passed as keyword arguments to
    `serving.serve.serve`. as_json: print a JSON document when requests are accepted.
    """
    from meshwright.comm.local import PRELOADED_TO_SERVE, start_server
    from meshwright.launcher.rendezvous import is_started_by_others
    from meshwright.threads import prepare_process

    prepare_process()
    if not is_started_by_others():
        start_server(PRELOADED_TO_SERVE)  # it imports torch while this process imports the HTTP server
    from meshwright.serving.serve import serve

    with result_printer(as_json) as answer:
        serve(checkpoint, layout, on_ready=answer, **options)
