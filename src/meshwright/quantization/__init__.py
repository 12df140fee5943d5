"""Number formats of weights: NF4 and int8 of frozen weights, float8 in blocks of published ones."""
