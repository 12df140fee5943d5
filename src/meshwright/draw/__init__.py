"""Pictures, charts and HTML pages, written as SVG, HTML or text. Free of torch."""
