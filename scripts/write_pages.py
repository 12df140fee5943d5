"""Write the generated page and pictures of docs/ (`make pages`); tests/gallery/test_pages.py compares them."""

from __future__ import annotations

from pathlib import Path

from meshwright.gallery.examples import EXAMPLES, explain
from meshwright.gallery.page import render_page
from meshwright.gallery.pictures import PICTURES

DOCS = Path(__file__).resolve().parent.parent / "docs"


def main() -> None:
    """Write docs/worked-examples.md and docs/pictures/*.svg."""
    (DOCS / "worked-examples.md").write_text(render_page(list(map(explain, EXAMPLES))), encoding="utf-8")
    directory = DOCS / "pictures"
    directory.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (directory / f"{name}.svg").write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
