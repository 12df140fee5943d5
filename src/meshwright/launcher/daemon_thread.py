"""Work in a thread that the process does not wait for when it ends. Free of torch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def run_in_daemon_thread(work: Callable[[], T], name: str) -> Future[T]:
    """Call `work` in a daemon thread called `name`; return the future of its result."""
    future = Future[T]()
    future.set_running_or_notify_cancel()

    def run() -> None:
        """Call `work`, and set the future to its result or exception."""
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
