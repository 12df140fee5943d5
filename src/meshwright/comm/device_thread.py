"""Threads that use the device of the thread that starts them."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch


def start_thread(run: Callable[[], object], name: str, cuda: bool) -> threading.Thread:
    """Start a daemon thread named `name` that calls `run`; return the thread.

    cuda: True if the thread must use the caller's current CUDA device. (A new thread uses the first GPU by default; its
    first CUDA call would open a context there.)
    """
    device = torch.cuda.current_device() if cuda else None

    def run_on_device() -> None:
        """Select the CUDA device of the starting thread, if `cuda` is True, then call `run`."""
        if device is not None:
            torch.cuda.set_device(device)
        run()

    thread = threading.Thread(target=run_on_device, name=name, daemon=True)
    thread.start()
    return thread
