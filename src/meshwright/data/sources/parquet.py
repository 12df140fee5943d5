"""Texts of one column of a Parquet file, read in batches of each row group, so that memory stays bounded."""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from meshwright.data.cleaning.schema import find_record_problem
from meshwright.data.sources.resolution import SourceFile
from meshwright.data.sources.stores import missing_package_error
from meshwright.data.sources.streams import Stream
from meshwright.errors import UserError
from meshwright.names import nearest

_BATCH = 1 << 20  # approximate bytes of text in a batch, which fit in the CPU cache
_MAX_ROWS = 8192
_READ = 1 << 20  # bytes read of a column at a time
_MAX_BYTES = 1 << 26  # decoded bytes of a batch if each of its rows repeats the longest value
_FIRST_ROWS = 64  # read of a row group to find its dictionaries
MAX_VALUE_BYTES = 1 << 28  # bytes; longer ones are refused, since a value is read whole


@contextmanager
def open_parquet(file: SourceFile, stream: Stream, encoded: Sequence[str] = (), metadata: Any = None) -> Iterator[Any]:
    """Context manager that opens a file as `pyarrow.parquet.ParquetFile`. Raises `UserError` for a file that is not
    Parquet, is truncated or damaged, or is compressed as a whole, such as "a.parquet.gz". Damage found while the
    context reads raises `UserError`, too.

    stream: the file's bytes, used if the file is not on a local disk. encoded: paths of the columns that are read as
    dictionary arrays (distinct texts, and for each row an index into them). metadata: the file's `FileMetaData`, if it
    was read before; None: it is read.
    """
    if not isinstance(stream, io.BufferedReader):
        raise UserError(f"{file.path}: Parquet is compressed internally, so decompress the file")
    try:
        arrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    except ImportError:
        raise missing_package_error("pyarrow", file.path) from None
    try:
        source = arrow.OSFile(str(file.path)) if isinstance(file.path, Path) else arrow.PythonFile(stream, mode="r")
        yield parquet.ParquetFile(
            source, metadata=metadata, read_dictionary=list(encoded), pre_buffer=False, buffer_size=_READ,
            page_checksum_verification=True,
        )  # fmt: skip
    except (arrow.ArrowException, OSError, KeyError, UnicodeDecodeError) as error:
        # pyarrow's KeyError: a name that only one of the file's two schemas has.
        reason = f"no column {error}" if type(error) is KeyError else " ".join(str(error).split())
        raise UserError(
            f"{file.path}: not a complete Parquet file ({reason[:200]}); if it was cut short, fetch or write it again"
        ) from None


def iterate_parquet_texts(
    file: SourceFile, stream: Stream, key: str, encoding: str, required: Mapping[str, str]
) -> Iterator[tuple[str, str, str | None]]:
    """Yield (position such as ":row 17", text, problem) for each row of a Parquet file. problem: how the row violates
    the schema `required`, as a clause; None if it does not. A null text is yielded as "", and is a problem if
    `required` is not empty.

    stream: the file's bytes, used if the file is not on a local disk. key: column of the text; "a.b" is field b of the
    struct column a. encoding: text encoding of binary columns; bytes that do not decode become lone surrogates.
    required: {further column: type of its values}. Raises `UserError` for files that are not Parquet, truncated or
    damaged, and if the column `key` is missing or not text.
    """
    with open_parquet(file, stream) as table:
        arrow = import_module("pyarrow")
        path = _resolve_column(file, table.schema_arrow, key, arrow)
        columns = [".".join(path), *_find_required_columns(required, table.schema_arrow)]
        row = 0
        for group in range(table.num_row_groups):
            leaves = find_leaves(file, table, group, columns)
            rows = _choose_batch_rows(leaves, table.metadata.row_group(group).num_rows, ".".join(path))
            rows = min(rows, bound_batch_rows(file, stream, table, group, leaves))
            for batch in table.iter_batches(rows, row_groups=[group], columns=columns, use_threads=False):
                column = _select_field(batch, path)
                problems = _find_problems(batch, column, key, required) if required else itertools.repeat(None)
                for text, problem in zip(_decode_column(column, encoding, arrow), problems, strict=False):
                    row += 1
                    yield f":row {row}", text, problem


def _find_required_columns(required: Mapping[str, str], schema: Any) -> list[str]:
    """Return the sorted top-level columns of the Arrow schema `schema` that contain the keys of `required` ("a.b" is in
    column a).
    """
    outermost = {key if key in schema.names else key.partition(".")[0] for key in required}
    return sorted(outermost.intersection(schema.names))


def _find_problems(batch: Any, text: Any, key: str, required: Mapping[str, str]) -> Iterator[str | None]:
    """Check each row of an Arrow record batch against a schema; yield how the row violates it, as a clause, or None.

    text: Arrow array of the texts. key: name of the column of the texts. required: the schema, {further column: type of
    its values}.
    """
    names = _find_required_columns(required, batch.schema)
    values = zip(*(batch.column(name).to_pylist() for name in names), strict=True) if names else itertools.repeat(())
    for there, record in zip(text.is_valid().to_pylist(), values, strict=False):
        held = dict(zip(names, record, strict=True))
        yield find_record_problem(held | {key: "" if there else None}, required, key)


def _decode_column(column: Any, encoding: str, arrow: Any) -> list[str]:
    """Return the texts of `column`, an Arrow array of strings or bytes; null becomes "". encoding: text encoding of
    bytes. arrow: the pyarrow module.
    """
    if arrow.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if not _is_bytes(column.type, arrow):
        try:
            texts: list[str] = column.to_pylist()
            return [text or "" for text in texts] if column.null_count else texts
        except UnicodeDecodeError:  # Parquet promises UTF-8, and not every writer keeps it
            encoding, column = "utf-8", column.cast(arrow.large_binary())
    return [(value or b"").decode(encoding, "surrogateescape") for value in column.to_pylist()]


def _is_bytes(kind: Any, arrow: Any) -> bool:
    """Return True if `kind` is an Arrow type of binary data. arrow: the pyarrow module."""
    types = arrow.types
    return bool(types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind))


def _is_text(kind: Any, arrow: Any) -> bool:
    """Return True if `kind` is an Arrow type of strings or binary data, dictionary-encoded or not. arrow: the pyarrow
    module.
    """
    types = arrow.types
    if types.is_dictionary(kind):
        kind = kind.value_type
    strings = types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)
    return bool(strings or _is_bytes(kind, arrow))


def find_leaves(file: SourceFile, table: Any, group: int, columns: Sequence[str]) -> list[Any]:
    """Return pyarrow's metadata (`ColumnChunkMetaData`) of the leaf columns of `columns` in row group `group`. table:
    the open `ParquetFile`. file: for errors. Raises pyarrow's errors for a damaged file, and `UserError` for a row
    group whose columns are not those of the file's schema.
    """
    # pyarrow ends the process if it is asked for damaged metadata of a column; its reader raises an error instead.
    next(table.iter_batches(1, row_groups=[group], columns=list(columns), use_threads=False), None)
    held, schema = table.metadata.row_group(group), table.schema
    numbers = range(len(schema))
    named = [n for n in numbers if any(f"{schema.column(n).path}.".startswith(f"{name}.") for name in columns)]
    for number in named:
        wanted = schema.column(number)
        right = f'"{wanted.path}" ({wanted.physical_type})'
        there = held.column(number) if number < held.num_columns else None
        found = "no column" if there is None else f'"{there.path_in_schema}" ({there.physical_type})'
        if found != right:
            row = 1 + sum(table.metadata.row_group(before).num_rows for before in range(group))
            raise UserError(
                f"{file.path}: row {row}: row group {group + 1} has {found} in place of the column {right}: all row "
                "groups of a file must have its schema; write the file again"
            )
    return [held.column(number) for number in named]


def _choose_batch_rows(leaves: Sequence[Any], rows: int, path: str) -> int:
    """Return the number of rows of a row group to read at a time, for about 1 MiB of text. leaves: metadata of the row
    group's leaf columns, from `find_leaves`. rows: number of rows in the row group. path: name of the text column."""
    size: int = next((leaf.total_uncompressed_size for leaf in leaves if leaf.path_in_schema == path), _BATCH)
    return max(1, min(_MAX_ROWS, _BATCH * max(1, rows) // max(1, size)))


def bound_batch_rows(file: SourceFile, stream: Stream, table: Any, group: int, leaves: Sequence[Any]) -> int:
    """Return the number of rows of row group `group`, at least 1, that may be decoded at a time. No column then takes
    more than 64 MiB, even if every row holds the column's longest value. Without this limit some hundred bytes could
    decode to many GiB, since a dictionary-encoded value is stored once for many rows.

    file, stream: the Parquet file and its bytes, as for `open_parquet`. table: the open `ParquetFile`. leaves: metadata
    of the leaf columns to be read, from `find_leaves`. Raises `UserError` for a value of more than 256 MiB
    (`MAX_VALUE_BYTES`).
    """
    leaves = [leaf for leaf in leaves if leaf.physical_type == "BYTE_ARRAY"]
    encoded = [leaf.path_in_schema for leaf in leaves if any("DICTIONARY" in each for each in leaf.encodings)]
    # Shared prefixes are stored once, too, but no value is longer than its column; 16 times `_MAX_BYTES` is bounded.
    prefixed = [leaf.total_uncompressed_size // 16 for leaf in leaves if "DELTA_BYTE_ARRAY" in leaf.encodings]
    longest = max(prefixed, default=0)
    if encoded:
        longest = max(longest, _measure_longest_values(file, stream, table, group, encoded))
    return max(1, _MAX_BYTES // max(1, longest))


def _measure_longest_values(file: SourceFile, stream: Stream, table: Any, group: int, encoded: Sequence[str]) -> int:
    """Return the size in bytes of the longest value in the dictionaries of some columns of row group `group`. encoded:
    paths of these columns. file, stream: the Parquet file and its bytes, as for `open_parquet`. table: the open
    `ParquetFile`. Raises `UserError` for a value of more than 256 MiB (`MAX_VALUE_BYTES`).
    """
    longest = 0
    with open_parquet(file, stream, encoded, table.metadata) as other:
        for path in encoded:
            try:
                # The first rows may hold no value at all (empty lists), and then no dictionary has been read yet.
                for batch in other.iter_batches(_FIRST_ROWS, row_groups=[group], columns=[path], use_threads=False):
                    if own := max(map(_measure_longest_value, batch.columns), default=0):
                        longest = max(longest, own)
                        break
            except import_module("pyarrow").ArrowNotImplementedError:
                return _MAX_BYTES  # later pages have an encoding without dictionary form: one row at a time
    if longest > MAX_VALUE_BYTES:
        raise UserError(f"{file.path}: a value of {longest:,} bytes; at most {MAX_VALUE_BYTES:,} are read")
    return longest


def _measure_longest_value(array: Any) -> int:
    """Return the size in bytes of the longest text or binary value in the dictionaries of an Arrow array, 0 if it has
    none. Dictionaries inside structs, lists and maps count too.
    """
    array = getattr(array, "storage", array)  # of an extension type
    types = import_module("pyarrow").types
    if types.is_dictionary(array.type):
        lengths = import_module("pyarrow.compute").binary_length(array.dictionary)
        return max(lengths.to_pylist(), default=0) or 0
    if types.is_struct(array.type):
        return max(map(_measure_longest_value, array.flatten()), default=0)
    return _measure_longest_value(array.values) if hasattr(array, "values") else 0


def _select_field(batch: Any, path: list[str]) -> Any:
    """Return the Arrow array at `path` of a record batch: a column, or a field of a column of structs."""
    column = batch.column(path[0])
    for name in path[1:]:
        column = import_module("pyarrow.compute").struct_field(column, name)
    return column


def _resolve_column(file: SourceFile, schema: Any, key: str, arrow: Any) -> list[str]:
    """Split the column name `key` ("a.b": field b of the struct column a) into the names from the outermost to the
    innermost, by the Arrow schema of `file`. Raises `UserError` if the column is missing or not text. arrow: the
    pyarrow module.
    """
    path, fields = ([key], schema) if key in schema.names else (key.split("."), schema)
    for depth, name in enumerate(path):
        there = {one.name: one for one in fields}
        if name not in there:
            close_to = [one.name for one in fields if _is_text(one.type, arrow)]
            held = ", ".join(f'"{one}"' for one in list(there)[:8]) or "none"
            close = nearest(name, close_to) or (close_to[0] if len(close_to) == 1 else None)
            hint = f"set {file.key_setting}"
            hint += f' = "{".".join([*path[:depth], close])}"' if close else ""
            raise UserError(f'{file.path}: no column "{key}" (columns {held}); {hint}')
        fields, kind = there[name].type, there[name].type
        if depth < len(path) - 1 and not arrow.types.is_struct(kind):
            raise UserError(f'{file.path}: the column "{".".join(path[: depth + 1])}" is {kind}, without fields')
    if not _is_text(kind, arrow):
        texts = ", ".join(f'"{one.name}"' for one in schema if _is_text(one.type, arrow))
        hint = f"columns of text: {texts}; set {file.key_setting}" if texts else "it has no column of text"
        raise UserError(f'{file.path}: the column "{key}" is {kind}, not text ({hint})')
    return path
