"""Sources of documents: files, globs, directories and URLs in text, JSON Lines, Parquet and WET formats."""
