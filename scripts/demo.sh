#!/usr/bin/env bash
# The main job, command by command: train a small model of Python code on two processes, evaluate, generate, report.
set -euo pipefail
cd "$(dirname "$0")/.."

run() {
    printf '\n$' && printf ' %q' "$@" && printf '\n'
    "$@"
}

SECONDS=0
run meshwright train recipes/quickstart.toml
run meshwright evaluate runs/quickstart --data recipes/quickstart.toml
run meshwright generate runs/quickstart --prompt 'def __init__(self, ' --max-tokens 200 --temperature 0.7 --seed 1
run meshwright report runs/quickstart
printf '\nThe demo took %d min %02d s. The page: runs/quickstart/report.html\n' $((SECONDS / 60)) $((SECONDS % 60))
