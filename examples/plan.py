"""What does each ZeRO stage leave room for? Predicts memory and step time of Llama-3 8B on 8 H100; needs no GPU.

python examples/plan.py
"""

import meshwright as mw

MODEL, CLUSTER = "llama-3-8b", "8xh100-sxm"
PARTS = ("parameters", "gradients", "optimizer", "activations", "workspace", "peak")

print("layout".ljust(22), *(part.rjust(11) for part in PARTS), "  fits  step s")
for stage in range(4):
    plan = mw.plan(MODEL, CLUSTER, f"dp8 zero{stage} ac:full", sequence=4096, batch=8)
    [record] = plan.layouts
    sizes = (f"{record['memory_gib'][part]:7.2f} GiB" for part in PARTS)
    print(record["layout"].ljust(22), *sizes, f"{record['fits']!s:>6}  {record['step_seconds']:.3f}")
