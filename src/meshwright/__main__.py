"""`python -m meshwright` is the `meshwright` command."""

from __future__ import annotations

from meshwright.cli.main import run

if __name__ == "__main__":
    run()
