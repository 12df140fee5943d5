"""Ranks emulated as threads of one process, one running at a time, to learn and debug distributed programs."""
