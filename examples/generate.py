"""Continue prompts with a checkpoint in this process, without a server: one batch, then one prompt as a stream, whose
pieces are printed as they arrive.

python examples/generate.py runs/example "The " "In Python "
"""

import sys

import meshwright as mw

if __name__ == "__main__":
    path, *prompts = sys.argv[1:]
    model = mw.load(path)
    for answer in model.generate(prompts, max_tokens=40, temperature=0.7, seed=1):
        print(f"{answer.prompt}|{answer.text!r} ({len(answer.tokens)} tokens, {answer.stopped})")

    stream = model.stream(prompts[0], max_tokens=20, temperature=0.7, seed=2)
    for piece in stream:
        print(repr(piece), end=" ", flush=True)
    print(f"\nfirst token after {stream.generation.seconds_to_first_token * 1e3:.1f} ms")
