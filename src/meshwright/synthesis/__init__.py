"""Generated instruction variants, labels and annotation exchange, by a served model."""
