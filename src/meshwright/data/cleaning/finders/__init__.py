"""Finders of personal data in texts: one module per kind, each a generator of spans."""
