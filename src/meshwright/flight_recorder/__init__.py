"""Flight recorder: a ring buffer of each rank's collective calls, and the report on a hang that names the rank at
fault. Torch-free."""
