"""Compares a layout with one device: loss, gradients and updates of a small model in float64, on this machine's CPU.

python examples/verify.py "tp2 zero1 dp2"
"""

import sys

import meshwright as mw

if __name__ == "__main__":
    layout = sys.argv[1] if len(sys.argv) > 1 else "dp2 zero1"
    proof = mw.verify(layout, model="llama-tiny")
    for record in proof.layouts:
        print(f"{record['layout']}: {len(record['cases'])} cases, passed: {record['passed']}")
    worst = proof.worst
    print(f"largest relative error {worst['relative_error']:.1e}, in {worst['name']}; tolerance {proof.tolerance:g}")
    sys.exit(not proof.passed)
