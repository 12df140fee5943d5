"""The flight recorder: a ring of collective calls per rank, and the report of which rank the others wait for. Free of
torch.
"""
