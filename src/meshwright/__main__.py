"""`python -m meshwright` is the `meshwright` command."""

from __future__ import annotations

import sys

from meshwright.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
