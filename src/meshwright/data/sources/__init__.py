"""Where documents come from: files, globs, URLs; text, JSON Lines, Parquet and WET formats."""
