"""What generates begins without what only training needs."""

from __future__ import annotations

import subprocess
import sys


def test_generation_does_not_load_the_compiler():
    """It takes over a second, and nothing is compiled there."""
    program = (
        "import sys, torch, meshwright.serve.generate, meshwright.train.evaluation\n"
        "assert 'torch._dynamo' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
