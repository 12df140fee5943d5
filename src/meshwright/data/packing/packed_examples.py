"""Whole examples of records packed into rows, with response masks and counts of truncated and dropped examples.

Shapes: B rows, S tokens in a row. A packed row has a capacity of S + 1 tokens: the last one is only a target.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from meshwright.data.packing.packed import NO_TARGET, PackedDataset, StoredTokens, TokenBatch
from meshwright.data.packing.packing_plan import (
    PackingPlan,
    PackingSettings,
    describe_pairs,
    pack_best_fit,
    truncate_lengths,
)
from meshwright.data.packing.shards import TRAINED
from meshwright.data.packing.token_flags import TRAINED_BIT, UNDESIRABLE_BIT, count_by_role
from meshwright.errors import UserError


class PackedExamples(PackedDataset):
    """One split of records as packed rows. A row contains whole examples (parsed records), with padding at its end.
    With `document_mask`, documents do not attend to each other, and positions restart at each document.

    An example has one document, or two for a preference pair: document 2k of a row is the prompt with the chosen
    response of pair k, and 2k + 1 the prompt with the rejected one. Targets are the tokens of responses, or with
    `train_on` "all" every token but a document's first. Padding has no targets and a separate document id.

    Rows are filled by best fit (see `pack_best_fit`), which depends on the lengths alone; with `pack` false each row
    has one example. `too_long` determines what happens to an example longer than a row: "truncate" cuts the end of its
    document (both documents of a pair are cut to the same limit), "drop" drops the example, "refuse" raises
    `UserError`. An example is also dropped if one of its documents has no target left.
    """

    def __init__(
        self,
        stored: StoredTokens,
        sequence: int,
        document_mask: bool,
        padding: int,
        packing: PackingSettings,
    ) -> None:
        """Store the options; rows are planned on first use. stored: the split's shards. sequence: S, tokens in a row.
        document_mask: number the documents of a row, so that they do not attend to each other; False: all have id 0.
        padding: token id that fills rows. packing: the options of packing.
        """
        super().__init__(stored, sequence, document_mask, padding)
        self.packing = packing

    @property
    def sequences_by_source(self) -> list[int]:
        """Number of packed rows of each data source; a list of one number, for all sources, if rows may mix sources."""
        return self.plan.rows_by_source

    @property
    def rows(self) -> int:
        """Number of packed rows."""
        return len(self.plan.bounds) - 1

    @property
    def examples_by_row(self) -> NDArray[np.int64]:
        """Number of examples (for preferences: pairs) in each packed row, int64 [rows]."""
        return np.diff(self.plan.bounds)

    @property
    def report(self) -> dict[str, int]:
        """Counts of packing, by name. `examples`: all examples; `trained`: examples in rows; `truncated`: examples in
        rows that were cut; `too_long`, `without_response`: examples dropped for this reason; `targets`: target tokens
        in rows; `lost_targets`: target tokens of truncated and dropped examples; `padding`: padding tokens in all rows.
        Preference pairs also have the counts of `describe_pairs`, labelled examples the counts `desirable` and
        `undesirable`.
        """
        return self.plan.report

    @property
    def mismatched(self) -> MismatchedRows:
        """The packed rows with the response of each labelled example replaced by the response of another example; KTO
        estimates a KL divergence from these rows. Raises `UserError` if a data source has only one labelled example."""
        self.check_partners()
        return MismatchedRows(self)

    def check_partners(self) -> None:
        """Raise `UserError` if a data source has only one labelled example: KTO combines each prompt with the response
        of another example."""
        if (self.plan.partners == np.arange(len(self.plan.numbers))).any():
            raise UserError(
                f"the {self.directory.name} split has a data source with a single labelled example, and KTO estimates "
                "the KL divergence from the responses to other prompts: give more, or change data.validation_fraction"
            )

    def iterate_texts(self) -> Iterator[str]:
        """Yield the text of each record in order, all of its messages joined (see `Example.join_texts`)."""
        # The text of a record is stored with its first document.
        return itertools.islice(super().iterate_texts(), 0, None, self.packing.documents_per_example)

    @property
    def rows_sha256(self) -> str:
        """Hex SHA-256 of the packing plan, which fixes the token at each position of every row."""
        digest = hashlib.sha256()
        plan = self.plan
        for part in (plan.numbers, plan.kept, plan.order, plan.bounds, plan.prompts, plan.partners):
            digest.update(f"{part.shape} ".encode() + np.ascontiguousarray(part, "<i8").tobytes())
        return digest.hexdigest()

    @cached_property
    def _documents(self) -> NDArray[np.int64]:
        """Token range [begin, end) of each document in the split's token stream, int64 [documents, 2]."""
        begins = self._document_begins
        return np.stack([begins, np.append(begins[1:], self.tokens)[: len(begins)]], axis=1)

    @cached_property
    def plan(self) -> PackingPlan:
        """Assignment of examples to packed rows, computed once. Raises `UserError` for an example longer than a row if
        data.too_long is "refuse".
        """
        assert self.packing.documents_per_example >= 1
        capacity = self.sequence + 1
        begins = self._documents[:, 0].reshape(-1, self.packing.documents_per_example)
        lengths = np.diff(self._documents).reshape(-1, self.packing.documents_per_example)
        long = lengths.sum(axis=1) > capacity
        if self.packing.too_long == "refuse" and long.any():
            raise self._too_long_error(
                int(np.flatnonzero(long)[0]), int(long.sum()), int(lengths.sum(axis=1).max()), capacity
            )
        targets = self._count_document_targets()
        before, kept = targets.copy(), lengths.copy()
        for number in np.flatnonzero(long).tolist():
            kept[number] = truncate_lengths(lengths[number], capacity)
            spans = zip(begins[number].tolist(), kept[number].tolist(), strict=True)
            flags = [self._read_document(begin, begin + length)[1] for begin, length in spans]
            targets[number] = [(one & TRAINED_BIT).sum() for one in flags]
        answered = (before > 0).all(axis=1)
        dropped = long & answered if self.packing.too_long == "drop" else np.zeros(len(long), bool)
        identical = self._find_identical_pairs(begins, lengths)
        used = (targets > 0).all(axis=1) & ~dropped & ~identical
        numbers = np.flatnonzero(used)
        sizes = kept[numbers].sum(axis=1)
        padding = -int(sizes.sum())
        prompts, partners = np.zeros((2, 0), np.int64)
        labels: dict[str, int] = {}
        if self.packing.labelled:
            prompts, undesirable = self._find_responses(begins[numbers, 0], kept[numbers, 0])
            partners = self._choose_partners(numbers)
            sizes = np.maximum(sizes, np.minimum(prompts + (kept[numbers, 0] - prompts)[partners], capacity))
            labels = {"desirable": int((~undesirable).sum()), "undesirable": int(undesirable.sum())}
        rows: list[list[int]] = []
        by_source = []
        for first, end in self._list_example_ranges():
            own = slice(*np.searchsorted(numbers, [first, end]))
            places = range(len(numbers))[own]
            packed = (
                pack_best_fit(sizes[own].tolist(), capacity)
                if self.packing.pack
                else [[place] for place in range(len(places))]
            )
            rows += [[places[place] for place in row] for row in packed]
            by_source.append(len(packed))
        return PackingPlan(
            kept[numbers],
            numbers,
            np.array([place for row in rows for place in row], np.int64),
            np.cumsum([0, *map(len, rows)], dtype=np.int64),
            by_source,
            {
                "examples": len(lengths),
                "trained": len(numbers),
                "truncated": int((used & long).sum()),
                "too_long": int(dropped.sum()),
                "without_response": int((~used & ~dropped & ~identical).sum()),
                **describe_pairs(targets[numbers], int(identical.sum())),
                **labels,
                "targets": int(targets[numbers].sum()),
                "lost_targets": int(before.sum() - targets[numbers].sum()),
                "padding": len(rows) * capacity + padding,
            },
            prompts,
            partners,
        )

    def _find_responses(
        self, begins: NDArray[np.int64], lengths: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Find the responses of K documents; return (number of tokens before the first target; True if the response is
        labelled undesirable), [K] each. begins: positions of the documents' first tokens in the token stream, [K].
        lengths: numbers of tokens of the documents, [K]."""
        prompts, undesirable = np.zeros(len(begins), np.int64), np.zeros(len(begins), bool)
        for place, (begin, length) in enumerate(zip(begins.tolist(), lengths.tolist(), strict=True)):
            flags = self._read_document(begin, begin + length)[1]
            prompts[place] = int(np.argmax(flags & TRAINED_BIT))
            undesirable[place] = bool(flags[prompts[place]] & UNDESIRABLE_BIT)
        return prompts, undesirable

    def _choose_partners(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Choose a partner for each of K labelled examples: another example of the same data source. For KTO's KL
        estimate, the partner's response is combined with the example's prompt. Return the partners' indices in [0, K),
        [K]. In a source of n examples the partner comes n / 2 examples later (cyclically), as neighbours often have the
        same prompt. A single example is its own partner.

        numbers: indices of the K examples among all, ascending.
        """
        partners = np.zeros(len(numbers), np.int64)
        for first, end in self._list_example_ranges():
            begin, stop = np.searchsorted(numbers, [first, end]).tolist()
            count = max(1, stop - begin)
            partners[begin:stop] = begin + (np.arange(stop - begin) + max(1, count // 2)) % count
        return partners

    def _find_identical_pairs(self, begins: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return a mask, bool [examples], of the pairs whose two documents have the same tokens. begins, lengths:
        position of the first token, and number of tokens, of each document, [examples, documents per example]."""
        same = np.zeros(len(lengths), bool)
        if lengths.shape[1] == 2:
            for number in np.flatnonzero(lengths[:, 0] == lengths[:, 1]).tolist():
                first, second = (
                    self._read_document(begin, begin + int(lengths[number, 0]))[0] for begin in begins[number].tolist()
                )
                same[number] = np.array_equal(first, second)
        return same

    def read_batch(self, numbers: ArrayLike, *, padded: bool = False) -> TokenBatch:
        """Read the packed rows with the indices `numbers` [B], each in [0, rows). padded: allow any index >= 0; rows
        from `rows` on then consist of padding, without targets.
        """
        rows = np.asarray(numbers, dtype=np.int64)
        assert rows.ndim == 1, rows.shape
        assert padded or rows.size == 0 or 0 <= rows.min() <= rows.max() < self.sequences, (rows, self.sequences)
        return self._make_batch(*self._read_rows(rows))

    def _make_batch(self, values: NDArray[np.int64], flags: NDArray[np.uint8], ids: NDArray[np.int32]) -> TokenBatch:
        """Build a `TokenBatch` from the arrays that `_read_rows` returns, [B, S + 1] each. values: token ids. flags:
        token flags, which mark loss targets. ids: document ids."""
        targets = np.where(flags[:, 1:] & TRAINED_BIT, values[:, 1:], NO_TARGET)
        ids = ids[:, :-1] if self.document_mask else np.zeros_like(ids[:, :-1])
        undesirable = flags[:, 1:] & UNDESIRABLE_BIT != 0 if self.packing.labelled else None
        return TokenBatch(np.ascontiguousarray(values[:, :-1]), targets, np.ascontiguousarray(ids), undesirable)

    def read_flagged_documents(self, number: int) -> list[tuple[NDArray[Any], NDArray[np.uint8]]]:
        """Read the documents of the packed row with index `number`, without padding. Return for each (token ids
        [tokens], flags uint8 [tokens]); flags mark loss targets and store the role of each token's turn
        (`token_flags`)."""
        [values], [flags], [ids] = self._read_rows(np.array([number]))
        lengths = self.plan.kept[self.plan.order[slice(*self.plan.bounds[number : number + 2])]].ravel()
        return [
            (values[ids == document][:length], flags[ids == document][:length])
            for document, length in enumerate(lengths.tolist())
        ]

    def count_by_role(self) -> dict[str, Any]:
        """Count turns, trained spans and tokens by role in all examples, before any truncation; return JSON with the
        keys "spans", "turns", "tokens" and "trained_tokens" (see `token_flags.count_by_role`)."""
        counts: dict[str, Any] = {}
        for number, (first, end) in enumerate(itertools.pairwise(self._bounds.tolist())):
            begins = self._document_begins[slice(*np.searchsorted(self._document_begins, [first, end]))] - first
            flags = self._select_targets(self._map_shard(number, TRAINED), begins)
            for name, more in count_by_role(flags, begins).items():
                held = counts.get(name, 0 if name == "spans" else {})
                counts[name] = held + more if name == "spans" else dict(Counter(held) + Counter(more))
        return counts

    def _read_rows(
        self, rows: NDArray[np.int64], mismatched: bool = False
    ) -> tuple[NDArray[np.int64], NDArray[np.uint8], NDArray[np.int32]]:
        """Read packed rows; return (token ids, token flags, document ids), [rows, S + 1] each. Flags mark loss targets
        and store the role of each token's turn (`token_flags`). Padding has the flags 0 and a separate document id.
        rows: row indices; an index beyond the last row gives padding. mismatched: True: replace each response by the
        response of the example's partner.
        """
        plan, capacity = self.plan, self.sequence + 1
        values = np.full((len(rows), capacity), self.padding, dtype=np.int64)
        flags = np.zeros((len(rows), capacity), dtype=np.uint8)
        ids = np.zeros((len(rows), capacity), dtype=np.int32)
        for place, row in enumerate(rows.tolist()):
            if row >= self.rows:
                continue
            at = document = 0
            for example in plan.order[plan.bounds[row] : plan.bounds[row + 1]].tolist():
                for ranges in self._list_ranges(example, mismatched):
                    for begin, end in ranges:
                        here = slice(at, at + end - begin)
                        values[place, here], flags[place, here] = self._read_document(begin, end)
                        ids[place, here] = document
                        at += end - begin
                    document += 1
            ids[place, at:] = document
        return values, flags, ids

    def _list_ranges(self, example: int, mismatched: bool) -> list[list[tuple[int, int]]]:
        """Return, for each document of an example, a list of token ranges [begin, end) in the split's token stream;
        their tokens, joined, are the document.

        example: index among the examples in rows. mismatched: False: the example itself; True: the example's prompt
        with the response of the example's partner, cut to fit into a row.
        """
        plan, documents = self.plan, self.packing.documents_per_example
        first = int(plan.numbers[example]) * documents
        begins = self._documents[first : first + documents, 0].tolist()
        if not mismatched:
            return [[(at, at + length)] for at, length in zip(begins, plan.kept[example].tolist(), strict=True)]
        other, prompt = int(plan.partners[example]), int(plan.prompts[example])
        length = min(int(plan.kept[other, 0] - plan.prompts[other]), self.sequence + 1 - prompt)
        response = int(self._documents[plan.numbers[other], 0] + plan.prompts[other])
        return [[(begins[0], begins[0] + prompt), (response, response + length)]]

    def _read_document(self, begin: int, end: int) -> tuple[NDArray[Any], NDArray[np.uint8]]:
        """Read the tokens [begin, end) of the split's token stream, which are one document; return (token ids [n],
        their flags, uint8 [n])."""
        number = int(np.searchsorted(self._bounds, begin, side="right")) - 1
        span = slice(begin - int(self._bounds[number]), end - int(self._bounds[number]))
        flags = self._select_targets(self._map_shard(number, TRAINED)[span], slice(1))
        return self._map_shard(number)[span], flags

    def _select_targets(self, flags: NDArray[np.uint8], begins: NDArray[np.int64] | slice) -> NDArray[np.uint8]:
        """Apply the setting `train_on` to stored flags, uint8 [tokens]: with "all", every token becomes a loss target,
        except the first of each document, which nothing predicts; with "responses" the flags are returned unchanged.
        begins: index of the first token of each document."""
        if self.packing.train_on == "all":
            flags = flags | np.uint8(TRAINED_BIT)
            flags[begins] ^= TRAINED_BIT
        return flags

    def _count_document_targets(self) -> NDArray[np.int64]:
        """Return the number of target tokens of each document before any truncation, int64 [examples, documents per
        example].
        """
        if self.packing.train_on == "all":
            return np.diff(self._documents).reshape(-1, self.packing.documents_per_example) - 1
        counts = [self._map_index(shard)[:, 2].astype(np.int64) for shard in self.shards]
        return np.concatenate([np.zeros(0, np.int64), *counts]).reshape(-1, self.packing.documents_per_example)

    def _list_example_ranges(self) -> list[tuple[int, int]]:
        """List the range [first, end) of example indices of each data source; one range of all examples if rows may mix
        sources."""
        ends = np.cumsum([0, *(shard.documents for shard in self.shards)])[self._shards_before].tolist()
        return list(itertools.pairwise(ends))

    def _too_long_error(self, number: int, count: int, longest: int, capacity: int) -> UserError:
        """Build the error for examples longer than a row. number: index of the first such example; count: number of
        such examples; longest: tokens in the longest example; capacity: tokens in a row.
        """
        documents = self.packing.documents_per_example
        own = self._documents[number * documents : (number + 1) * documents]
        begin, end = int(own[0, 0]), int(own[-1, 1])
        beginning = self.packing.decode(self._read_document(begin, min(end, begin + 40))[0])
        more = f"; {count - 1:,} more are too long as well" if count > 1 else ""
        return UserError(
            f"data.too_long: example {number + 1:,} of the {self.directory.name} split has {end - begin:,} tokens, "
            f"more than the {capacity:,} of a row{more}; it begins with {beginning[:80]!r}; raise data.sequence to "
            f'{longest - 1}, or set data.too_long to "truncate" or "drop"'
        )


class MismatchedRows:
    """Packed rows of labelled examples in which each response is replaced by the response of another example. KTO
    estimates the KL divergence of policy and reference from these rows. examples: the rows with the original responses.
    """

    def __init__(self, examples: PackedExamples) -> None:
        """Wrap the packed rows of labelled examples."""
        self._examples = examples
        self.sequences, self.rows = examples.sequences, examples.rows

    @property
    def examples_by_row(self) -> NDArray[np.int64]:
        """Number of examples in each packed row, int64 [rows]; the same as in the original rows."""
        return self._examples.examples_by_row

    @property
    def rows_sha256(self) -> str:
        """Hex SHA-256 of the packing plan, the same value as for the original rows."""
        return self._examples.rows_sha256

    def read_batch(self, numbers: ArrayLike, *, padded: bool = False) -> TokenBatch:
        """Read the packed rows with the indices `numbers` [B]. padded: allow any index >= 0; rows from `rows` on are
        padding."""
        rows = np.asarray(numbers, dtype=np.int64)
        assert padded or rows.size == 0 or 0 <= rows.min() <= rows.max() < self.sequences, (rows, self.sequences)
        return self._examples._make_batch(*self._examples._read_rows(rows, mismatched=True))
