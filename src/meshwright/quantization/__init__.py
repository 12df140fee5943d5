"""Number formats of frozen weights, NF4 and int8: pack and unpack."""
