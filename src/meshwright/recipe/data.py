"""Recipe tables about data: [data], [data.clean] and [[data.sources]]."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from meshwright.names import (
    DATA_FORMATS,
    EXTRACTORS,
    HEURISTIC_VALUES,
    HEURISTICS,
    MESSAGE_KEYS,
    OBJECTIVES_OF_RECORDS,
    PERSONAL_DATA,
    RECORD_TYPES,
    RECORDS,
    ROLES,
    THINKING,
    TOO_LONG,
    TRAINED,
    unknown,
)
from meshwright.tables import Fraction, Name, Positive, Size, Table, named

# Keys of each kind of record; data.record_keys renames them.
RECORD_KEYS: dict[str, tuple[str, ...]] = {
    "text": (),
    "instruction": ("instruction", "input", "output"),
    "chat": ("messages",),
    "preference": ("prompt", "chosen", "rejected"),
    "unpaired": ("prompt", "completion", "label"),
}
# Further keys that records of each kind may have.
MORE_RECORD_KEYS: dict[str, tuple[str, ...]] = {
    "instruction": ("system", "history", "prompt", "completion", "tools", "chat_template_kwargs"),
    "chat": ("conversations", "system", "tools", "functions", "chat_template_kwargs"),
    "preference": ("conversations", "system", "tools", "chat_template_kwargs"),
    "unpaired": (
        "instruction",
        "input",
        "output",
        "history",
        "conversations",
        "messages",
        "kto_tag",
        "system",
        "tools",
        "chat_template_kwargs",
    ),
}
# Keys that do not apply to text.
_OF_RECORDS = (
    "record_keys", "message_keys", "record_roles", "template", "thinking", "train_on", "pack", "too_long",
)  # fmt: skip


class CleanRecipe(Table):
    """Table [data.clean] of a recipe: rules that drop documents, and masks over personal data in kept documents.

    Attributes:
        minimum_characters, maximum_characters: Limits on the length of a document (None: no limit).
        maximum_control_fraction: Largest fraction of control characters (white space aside) among a document's
            characters.
        maximum_repetition: Largest fraction of a document's lines that repeat an earlier line.
        exact_duplicates: Drop documents that repeat an earlier document.
        near_duplicates: Drop documents similar to an earlier document, found by MinHash with minhash_bands bands of
            minhash_rows hash functions over shingles (n-grams) of minhash_words words.
        sentence_duplicates: Remove spans of three sentences that occur earlier in the corpus.
        encoding: Text encoding of the source files.
        required_keys: {key that every record must have: type of its value}.
        languages: ISO 639-1 codes; a document is kept if it is in one of these languages with a probability of at least
            minimum_language_probability (less for short texts); empty: all languages are kept.
        heuristics: Published rule sets that a document must pass, such as "c4" or "gopher-quality".
        heuristics_like: Source of the rules' thresholds and words: "papers", or "datatrove" for that library's
            defaults.
        blocked_words: Path of a file with one word or phrase per line; a document that contains any of them is dropped.
        heuristics_on_code: Apply languages, heuristics and blocked_words to source code too.
        mask: Kinds of personal data to replace, such as "email".
        evaluation_sets: Paths of data that training must not see.
        contamination_words: n; a document's n-gram of n words that also occurs in an evaluation set counts as shared.
        maximum_contamination: Largest fraction of a document's words in shared n-grams.
    """

    minimum_characters: Annotated[int, Size("characters", 0)] = 1
    maximum_characters: Annotated[int, Size("characters")] | None = None
    maximum_control_fraction: Fraction = 0.01  # control characters except white space
    maximum_repetition: Fraction = 0.75  # of a document's lines: those that repeat an earlier one
    exact_duplicates: bool = True  # drop them
    encoding: Name = "utf-8"
    required_keys: dict[str, Annotated[str, named("type", RECORD_TYPES)]] = {}  # key of a record -> type of its value
    languages: list[Name] = []  # ISO 639-1 codes to keep; empty: all
    minimum_language_probability: Fraction = 0.65
    heuristics: list[Annotated[str, named("heuristic", HEURISTICS)]] = []  # published rules for prose
    heuristics_like: Annotated[str, named("choice", HEURISTIC_VALUES)] = "papers"  # whose thresholds and words
    heuristics_on_code: bool = False  # apply heuristics and languages to source code too
    blocked_words: Name | None = None  # file with one word or phrase per line; documents with one are dropped
    mask: list[Annotated[str, named("kind", PERSONAL_DATA)]] = []
    evaluation_sets: list[Name] = []  # data that training must not see
    contamination_words: Annotated[int, Size("words")] = 13  # in an n-gram that counts as shared
    maximum_contamination: Fraction = 0.0  # of a document's words: those in shared n-grams
    near_duplicates: bool = False  # drop them
    minhash_bands: Annotated[int, Field(ge=1, le=256)] = 14
    minhash_rows: Annotated[int, Field(ge=1, le=64)] = 8
    minhash_words: Annotated[int, Size("words")] = 5  # in a shingle
    sentence_duplicates: bool = False  # remove spans of three sentences that occur before


class SourceRecipe(Table):
    """Table [[data.sources]] of a recipe: one of several data sources, and its weight in the mixture.

    Attributes:
        path: File, directory, glob or URL.
        name: Label in reports (default: the path).
        weight: Share of the training samples, relative to the other weights; either all sources have a weight or none,
            and without weights the sources are concatenated.
        format, text_key: File format, and JSON key or Parquet column of the text; None: the values of [data].
    """

    path: Name  # as data.source
    name: Name | None = None  # label in reports; default: path
    weight: Positive | None = None  # share of the samples, relative to the other weights
    format: Annotated[str, named("format", DATA_FORMATS)] = "auto"  # auto: as data.format
    text_key: Name | None = None  # default: data.text_key


class DataRecipe(Table):
    """Table [data] of a recipe: sources, tokenizer, records, packing and cache.

    Attributes:
        source: "stdlib", a path, URL or glob, or a list of them; `sources` replaces it for mixtures.
        format: Format of the files, such as "text" or "jsonl"; "auto": determined by their names.
        extractor: Library that extracts the main text of each web page in a WARC file.
        text_key: JSON key or Parquet column of the text.
        tokenizer: Kind to be trained, such as "bpe", a tokenizer.json or a Hugging Face directory.
        vocabulary: Maximum tokens of a tokenizer trained here.
        sequence: Tokens in a sample.
        document_mask: True: no attention between the documents of a sample.
        validation_fraction: Fraction of the documents that is held out for validation.
        cache: Directory of prepared data; None: the user's cache directory.
        shard_tokens: Tokens per cache file.
        clean: Rules that drop and mask documents.
        records: "text", or the kind of fine-tuning examples: "instruction", "chat", "preference", "unpaired". All
            options below are for such examples only.
        record_keys: {standard key such as "instruction": key in the sources}.
        message_keys: {"role" or "content": key in messages}.
        record_roles: {role in the sources: standard role}.
        template: Name or .jinja file of the chat template; None: the default template.
        thinking: Which reasoning of assistant turns is kept: "template" (what the template renders), "last" (of the
            last turn), "none", or "all" (of every turn; each turn ends a separate example).
        train_on: Tokens in the loss, "responses" or "all".
        pack: True: several examples per sample; False: one.
        too_long: "truncate", "drop" or "refuse" examples longer than a sample.
    """

    source: Name | Annotated[list[Name], Field(min_length=1)] | None = None  # "stdlib", a path, URL, glob, or several
    sources: Annotated[list[SourceRecipe], Field(min_length=1)] | None = None  # instead of source
    format: Annotated[str, named("format", DATA_FORMATS)] = "auto"
    extractor: Annotated[str, named("extractor", EXTRACTORS)] = "trafilatura"  # of main texts from the pages of WARC
    text_key: Name = "text"  # of a JSONL line, or the column of a Parquet file; "a.b": the key b inside a
    records: Annotated[str, named("kind", RECORDS)] = "text"
    record_keys: dict[str, Name] = {}  # key of RECORD_KEYS -> key in the sources
    message_keys: dict[Annotated[str, named("key", MESSAGE_KEYS)], Name] = {}  # "role", "content" -> key in messages
    record_roles: dict[Name, Annotated[str, named("role", ROLES)]] = {}  # role in the sources -> standard role
    thinking: Annotated[str, named("choice", THINKING)] = "template"  # reasoning that is kept
    template: Name | None = None  # a name of names.TEMPLATES or a .jinja file; default: by the kind of records
    train_on: Annotated[str, named("choice", TRAINED)] = "responses"
    pack: bool = True  # several examples in a row
    too_long: Annotated[str, named("choice", TOO_LONG)] | None = None  # examples longer than a row
    tokenizer: Name = "bpe"  # a kind of names.TOKENIZERS, a tokenizer.json or a Hugging Face directory
    vocabulary: Annotated[int, Size("vocabulary", 257)] = 2048  # size of a tokenizer trained on the data
    sequence: Annotated[int, Size("sequence")]  # tokens in a sample
    document_mask: bool = True  # documents in one sample do not attend to each other
    validation_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.05  # of the documents
    cache: Name | None = None  # default: the user's cache directory
    shard_tokens: Annotated[int, Size("shard_tokens")] = 2**26  # tokens in one file of the cache
    clean: CleanRecipe = CleanRecipe()

    @model_validator(mode="after")
    def _check_sources(self) -> Self:
        """Check the sources; return the table. Raises ValueError unless exactly one of source and sources is given, the
        names of sources are unique, and either all sources or none have a weight.
        """
        if (self.source is None) == (self.sources is None):
            raise ValueError(
                "names no source: give source, or a [[data.sources]] table for each of several"
                if self.source is None
                else "has both source and sources: keep one"
            )
        weighted = [source.weight is not None for source in self.sources or []]
        if any(weighted) and not all(weighted):
            without = self.all_sources[weighted.index(False)].path
            raise ValueError(
                f'sources: "{without}" has no weight but another source has: give every source one, or none'
            )
        names = [source.name or source.path for source in self.sources or []]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f'sources: two are called "{twice}": give each a unique name')
        return self

    @model_validator(mode="after")
    def _check_records(self) -> Self:
        """Check that every option that is set applies to the kind of records ("text", "instruction", "chat",
        "preference" or "unpaired"); return the table. Raises ValueError otherwise."""
        if self.records == "text":
            if wrong_key := next((key for key in _OF_RECORDS if self._differs_from_default(key)), None):
                kinds = ", ".join(f'"{kind}"' for kind in RECORDS[1:])
                raise ValueError(f'{wrong_key} applies to records, but records is "text": set it to one of {kinds}')
            return self
        keys = (*RECORD_KEYS[self.records], *MORE_RECORD_KEYS[self.records])
        if wrong := next((key for key in self.record_keys if key not in keys), None):
            raise ValueError(f"record_keys: {unknown(f'key of {self.records} records', wrong, keys)}")
        if self._differs_from_default("text_key") or any(source.text_key for source in self.sources or []):
            raise ValueError(f"text_key applies to text; {self.records} records have record_keys ({', '.join(keys)})")
        for format in (self.format, *(source.format for source in self.sources or [])):
            if format in ("text", "wet", "warc"):
                raise ValueError(
                    f'format "{format}" is text, but records is "{self.records}": those must be JSON Lines, '
                    "a JSON list or Parquet"
                )
        if "c4" in self.clean.heuristics:
            raise ValueError(
                f'clean.heuristics "c4" removes lines of pages, but {self.records} records must stay whole: remove it'
            )
        if self.clean.sentence_duplicates:
            raise ValueError(
                f"clean.sentence_duplicates removes sentences, but {self.records} records must stay whole: remove it"
            )
        if self.has_preferences and self.thinking == "all":
            raise ValueError(f'thinking "all" makes an example of each turn, but {self.records} records stay whole')
        if self.has_preferences and (self.train_on != "responses" or not self.document_mask):
            raise ValueError(
                f"{self.records} records are trained on their responses, which must not attend to each other: "
                'train_on = "responses" and document_mask = true'
            )
        return self

    def _differs_from_default(self, key: str) -> bool:
        """Return True if the field `key`, such as "pack", has a value other than its default."""
        return bool(getattr(self, key) != type(self).model_fields[key].default)

    @property
    def has_preferences(self) -> bool:
        """True for records with preferences: pairs of responses, or single responses with labels."""
        return self.records in OBJECTIVES_OF_RECORDS

    @property
    def too_long_examples(self) -> str:
        """Resolved value of `too_long`, the treatment of examples longer than a sample. Default: "drop" for records
        with preferences, because a cut response is no longer the response that was judged; "truncate" for other
        records."""
        return self.too_long or ("drop" if self.has_preferences else "truncate")

    @property
    def template_name(self) -> str | None:
        """Name (or .jinja file) of the chat template for the records, defaults filled in; None for plain text."""
        if self.records == "text":
            return None
        return self.template or ("instruction" if self.records == "instruction" else "model")

    @property
    def source_key(self) -> str:
        """Name of the recipe key that lists the sources, "data.source" or "data.sources", for error messages."""
        return "data.source" if self.sources is None else "data.sources"

    @property
    def all_sources(self) -> tuple[SourceRecipe, ...]:
        """All data sources as `SourceRecipe`, whether given by `source` (one or more paths) or by `sources`."""
        if self.sources is not None:
            return tuple(self.sources)
        paths = [self.source] if isinstance(self.source, str) else self.source or []
        return tuple(SourceRecipe(path=path) for path in paths)

    @property
    def weights(self) -> tuple[float, ...] | None:
        """Weight of each source in the mixture, in the order of `all_sources`; None if sources are concatenated without
        weights."""
        return tuple(source.weight for source in self.all_sources if source.weight is not None) or None
