"""Flight recorder: a ring of collective calls for each rank, and the hang report about the rank the others wait for.
Torch-free."""
