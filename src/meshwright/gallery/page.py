"""The page docs/worked-examples.md: every example as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.gallery.explanation import Explanation, Figure, Step, Table, Text

INTRODUCTION = """# Worked examples

Figures that texts on distributed training print, recomputed by the code that plans, checks and trains. Every example is
`meshwright explain NAME` (`--json` for a document, `--svg FILE` for its picture) and `mw.explain(NAME)` in Python;
`meshwright explain` lists them. `make pages` writes this page, and a test compares it; results are tested against the
published figure or an independent computation. Sizes are decimal (1 GB = 10⁹ bytes) unless they say GiB."""


def render_page(explanations: Sequence[Explanation]) -> str:
    """Return the page docs/worked-examples.md in Markdown: a table of contents and the examples `explanations`."""
    contents = "\n".join(
        f"- [{one.title}](#{make_anchor(one.title)}): `meshwright explain {one.name}`" for one in explanations
    )
    return "\n\n".join([INTRODUCTION, contents, *map(render_example, explanations)]) + "\n"


def make_anchor(heading: str) -> str:
    """Return the link anchor that GitHub generates for a Markdown heading."""
    kept = "".join(letter for letter in heading.lower() if letter.isalnum() or letter in " -_")
    return kept.replace(" ", "-")


def render_example(explanation: Explanation) -> str:
    """Return the worked example `explanation` as a section of Markdown."""
    parts = [
        f"## {explanation.title}",
        f"**Published:** {_escape_markdown(explanation.published)}",
        f"**Source:** {_escape_markdown(explanation.source)}",
        *map(_render_step, explanation.steps),
    ]
    if explanation.mistake:
        parts.append(f"**Frequent error:** {_escape_markdown(explanation.mistake)}")
    if explanation.commands:
        parts.append("```console\n" + "\n".join(f"$ {command}" for command in explanation.commands) + "\n```")
    return "\n\n".join([*parts, "Code: " + ", ".join(f"`src/meshwright/{file}`" for file in explanation.source_files)])


def _escape_markdown(words: str) -> str:
    """Return `words` with the characters that Markdown would take as markup (`*`, `_`, `|`, `<`) escaped."""
    return words.replace("*", r"\*").replace("_", r"\_").replace("|", r"\|").replace("<", "&lt;")


def _render_step(step: Step) -> str:
    """Return one step (paragraph, table or figure) of an explanation as Markdown."""
    if isinstance(step, Text):
        return _escape_markdown(step.words)
    if isinstance(step, Table):
        lines = [step.head, ["---:" if number else "---" for number in step.numeric], *step.rows]
        rows = "\n".join(f"| {' | '.join(map(_escape_markdown, line))} |" for line in lines)
        return f"{_escape_markdown(step.title)}\n\n{rows}"
    assert isinstance(step, Figure)
    return f"![{_escape_markdown(step.caption)}](pictures/{step.name}.svg)"
