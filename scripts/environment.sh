#!/bin/sh
# Create the Python environment $1 and install Meshwright into it with the extras named by $2 ("run": none).
# Safe to repeat: existing packages are kept. $PYTHON: interpreter that creates a new environment.
set -eu
cd "$(dirname "$0")/.."
environment=$1
extras=$2
torch=2.13.0 # version of the tests; a plain `pip install torch` may install gigabytes of CUDA libraries

say() { printf '%s\n' "$*" >&2; }
is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

if ! [ -x "$environment/bin/python" ]; then
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.14}; do
        if is_new_enough "$candidate"; then
            python=$candidate
            break
        fi
    done
    if [ -z "${python:-}" ]; then
        say "Meshwright needs Python 3.11 or newer, and ${PYTHON:-no python3 on the PATH} is: install one, or say make PYTHON=/path/to/python3"
        exit 1
    fi
    say "making the environment $environment with $("$python" --version) ..."
    if ! "$python" -m venv "$environment"; then
        rm -rf "$environment"
        say "$python cannot make an environment (on Debian and Ubuntu: apt install python3-venv)"
        exit 1
    fi
fi

pip() { "$environment/bin/python" -m pip --disable-pip-version-check --no-input "$@"; }

if ! "$environment/bin/python" - <<'CHECK'; then
import sys
from importlib.metadata import PackageNotFoundError, version
try:
    installed = version("torch")
except PackageNotFoundError:
    sys.exit(1)
sys.exit(tuple(map(int, installed.split("+")[0].split(".")[:2])) < (2, 13))
CHECK
    say "installing torch $torch (some hundred megabytes, once) ..."
    pip install -qq "torch==$torch" || {
        say "torch $torch cannot be installed here; trying a newer one ..."
        pip install -qq "torch>=$torch"
    }
fi

if [ "$extras" = run ]; then
    say "installing meshwright ..."
    pip install -qq --editable .
else
    say "installing meshwright with what ${extras} needs ..."
    pip install -qq --editable ".[$extras]"
fi
