"""The estimate of one layout, and the search over all of them."""
