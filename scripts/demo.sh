#!/usr/bin/env bash
# The main job, command by command: train a small model of Python code on two processes, evaluate, generate, report.
set -euo pipefail
cd "$(dirname "$0")/.."

directory=runs/quickstart
evaluate=(meshwright evaluate "$directory" --data recipes/quickstart.toml)
generate=(meshwright generate "$directory" --prompt 'def __init__(self, ' --max-tokens 200 --temperature 0.7 --seed 1)

run() {
    printf '\n$' && printf ' %q' "$@" && printf '\n'
    "$@"
}

# Again as JSON, for the report; the seed makes the samples equal.
keep() {
    printf '\n$' && printf ' %q' "${@:2}" && printf ' > %s\n' "$1"
    "${@:2}" >"$1"
}

SECONDS=0
run meshwright train recipes/quickstart.toml
run "${evaluate[@]}"
run "${generate[@]}"
keep "$directory/evaluation.json" "${evaluate[@]}" --json
keep "$directory/sample.json" "${generate[@]}" --json
run meshwright report "$directory" --evaluation "$directory/evaluation.json" --sample "$directory/sample.json"
printf '\nThe demo took %d min %02d s. The page: %s/report.html\n' $((SECONDS / 60)) $((SECONDS % 60)) "$directory"
