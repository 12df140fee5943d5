"""Which documents are dropped or masked, by which rule."""
