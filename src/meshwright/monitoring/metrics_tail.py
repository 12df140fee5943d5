"""Reader of a metrics file that another process is still writing. Free of torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshwright.untrusted import parse_json


class MetricsTail:
    """Reader that returns the lines added to `metrics.jsonl` since its last read. path: the file; it may not exist
    yet."""

    def __init__(self, path: Path) -> None:
        """Start at the beginning of the file `path`."""
        self._path, self._offset = path, 0

    def read(self) -> list[dict[str, Any]]:
        """Return the lines added since the last read as dicts; an incomplete last line is left for the next read. If
        the file has become shorter, because a resumed run removed the lines of steps after its checkpoint, read the
        file from the beginning."""
        try:
            with self._path.open("rb") as file:
                if file.seek(0, 2) < self._offset:
                    self._offset = 0
                file.seek(self._offset)
                content = file.read()
        except OSError:
            return []
        complete = content[: content.rfind(b"\n") + 1]
        self._offset += len(complete)
        parsed = map(parse_metrics_line, complete.splitlines())
        return [line for line in parsed if line is not None]


def parse_metrics_line(line: bytes) -> dict[str, Any] | None:
    """Parse one line of a metrics file; None if it is not a JSON object."""
    try:
        value = parse_json(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
