"""Commands of documentation pages with the output that the pages show, and the comparison with what they print."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

EXACT = ("plan", "explain", "schedule", "collective")  # commands
EXACT_SCRIPTS = ("examples/plan.py", "examples/programs.py")
MEASURED = ("--run", "this")  # arguments with which they measure this machine, or read its measurements
_NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")
_FIGURE = re.compile(r"\d+(?:\.\d+)?")
_UNITS = {"s": r"(?:ns|µs|ms|s|min)", "B": r"(?:bytes|B|KiB|MiB|GiB)"}


@dataclass
class File:
    """Block with the content of a file that the text above names: "`tiny.toml`:"."""

    name: str
    text: str


@dataclass
class Command:
    """A command line after "$ " and the lines shown below it; none shown: the output is not compared."""

    line: str
    shown: list[str] = field(default_factory=list)

    @property
    def words(self) -> list[str]:
        """Words of the command up to a redirection."""
        words = shlex.split(self.line, comments=True)
        return words[: words.index(">")] if ">" in words else words

    @property
    def exact(self) -> bool:
        """True if numbers are compared too: the output depends only on the command. A time that is measured, such as
        that of the planner's search, is left out on the page: "in ..."."""
        kind, name = [*self.words, "", ""][:2]
        known = {"meshwright": EXACT, "python": EXACT_SCRIPTS}.get(kind, ())
        return name in known and not set(MEASURED) & set(self.words)


def read_page(page: Path) -> list[File | Command]:
    """Return files and commands of a page in the order of the text: named blocks, `console` and `sh` blocks."""
    found: list[File | Command] = []
    for above, language, text in re.findall(r"([^\n]*)\n+```([^\n]*)\n(.*?)^```$", page.read_text(), re.M | re.S):
        named = re.search(r"`([\w./-]+)`:$", above)
        if language in ("console", "sh"):
            for line in text.splitlines():
                if line.startswith("$ ") or language == "sh":
                    found.append(Command(line.removeprefix("$ ")))
                else:
                    found[-1].shown.append(line)  # type: ignore[union-attr]
        elif named:
            found.append(File(named[1], text))
    return found


def normalize(line: str, exact: bool = False) -> str:
    """Return a line with single spaces; unless `exact`, with # for every number, s for any unit of time, B of size, and
    with one precision for those that a run chooses by the CPU's instructions, without the rank of a prediction and the
    remark that the machine was busy."""
    if not exact:
        line = re.sub(r"\b[0-9a-f]{32,}\b", "#", re.sub(r"\bbf16(?= on \d+ cpu)", "fp32", line))
        line = re.sub(r" for rank \d+(?=, error)|; upper bound: the machine as busy as when it was measured", "", line)
        line = _NUMBER.sub("#", line)
        for unit, names in _UNITS.items():
            line = re.sub(rf"# {names}\b", f"# {unit}", line)
    return " ".join(line.split())


def find_difference(shown: Sequence[str], printed: Sequence[str], exact: bool = False) -> str | None:
    """Return the first shown line that was not printed at its position, None if all were.

    A line "..." stands for any lines, " ..." at the end of a line for the rest of it. Empty lines are not compared.
    """
    lines = [normalize(line, exact) for line in printed if line.strip()]
    at, anywhere = 0, False
    for expected in filter(str.strip, shown):
        if expected.strip() == "...":
            anywhere = True
            continue
        wanted = normalize(expected, exact)
        start = wanted.removesuffix(" ...")
        cut = start != wanted
        fits = [i for i, line in enumerate(lines) if i >= at and (line == wanted or (cut and line.startswith(start)))]
        if not fits or (fits[0] != at and not anywhere):
            return f"shown: {expected}\nprinted: {printed[:40]}"
        at, anywhere = fits[0] + 1, False
    return None if anywhere or at == len(lines) or not shown else f"printed, not shown: {lines[at]}"


def find_seconds_not_shown(text: str) -> list[str]:
    """Return the figures in s or ms, such as "0.25 s", that the prose of a page quotes and no block of it contains.
    text: Markdown. Tables and sections of a measured run are not prose of this kind."""
    blocks = re.compile(r"^```.*?^```$", re.M | re.S)
    shown = set(_FIGURE.findall("\n".join(blocks.findall(text))))
    prose = re.sub(r"^\|.*$", "", blocks.sub("", text), flags=re.M)
    quoted = re.finditer(r"(?<![\w.,])(\d+(?:\.\d+)?) (?:s|ms)\b", prose)
    return [match[0] for match in quoted if match[1] not in shown]
