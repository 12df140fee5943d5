"""Every picture, chart and HTML page: one writer of markup, the charts made of it, one page shell. Free of torch."""
