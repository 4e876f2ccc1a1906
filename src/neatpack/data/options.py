"""What `neatpack pack` was asked to do, in one frozen record that is checked once and written into the manifest."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from neatpack.data.records import LISTS, ColumnChoice
from neatpack.errors import PackError, PlanError, SourceError, StoreError
from neatpack.planning import STRATEGIES, Overflow, Strategy
from neatpack.planning.options import check_align, check_max_docs, check_number
from neatpack.planning.overflow import POLICIES

FORMATS = ("arrow", "parquet")


@dataclass(frozen=True, kw_only=True)
class PackOptions:
    """Everything that decides the bytes of the output, and nothing that does not (workers, progress, paths).

    Attributes:
        seq_len: tokens a row holds.
        tokenizer: "bytes" (embedded: one token a byte), a `tokenizer.json`, a tokenizer's folder or a hub name.
        text_column: column that holds the text; None means "text", and `input_ids` wins where both are there.
        token_columns: further columns with a number a token, packed as `input_ids` are.
        document_columns: further columns with a number or text a document; a row has a list with one for each document.
        ignore_columns: columns of numbers beside `input_ids` that may be left out, by name or pattern. Other columns that
            are not named are left out too, and reported; but a list of numbers may be a value a token, and is refused.
        include: glob patterns; in folders only files whose name or path below the folder matches one are read.
        strategy: see `neatpack.plan_rows`.
        overflow: see `neatpack.plan_rows`.
        max_docs_per_row: see `neatpack.plan_rows`; None sets no limit.
        align: see `neatpack.plan_rows`. Rows are stored without the padding of their slots; the collator lays it out.
        seed: shuffles rows within a packing unit; None keeps the planner's order.
        eos: append the end-of-sequence token to every non-empty text document that does not end with it already. False
            leaves off what a tokenizer appends by itself too.
        eos_token: the end-of-sequence token, where the tokenizer does not say or another one is wanted.
        split_special_tokens: read `</s>` and the like in a text as the characters they are; False makes them the special
            tokens they name, as text with chat markup needs. The summary says which ones texts spelled out.
        trust_remote_code: let a hub tokenizer run the code that it ships.
        skip_bad: count and report records that cannot be read, and go on; False stops at the first.
        vocab_size: ids at or above it are refused; for text the tokenizer's own size is used.
        unit_tokens: tokens of a packing unit, which is planned, and written as one shard, on its own; None chooses.
        file_format: of the shards: "arrow" (for `datasets.load_from_disk`) or "parquet" (for `load_dataset("parquet")`).

    Raises:
        PlanError: a row length, strategy, overflow policy, align, seed, limit or unit size that no plan can honour.
        SourceError: a vocabulary below 1, columns named twice or that neatpack reads itself, or `eos_token` with `eos=False`.
        StoreError: an unknown `file_format`.
    """

    seq_len: int
    tokenizer: str = "bytes"
    text_column: str | None = None
    token_columns: tuple[str, ...] = ()
    document_columns: tuple[str, ...] = ()
    ignore_columns: tuple[str, ...] = ()
    include: tuple[str, ...] = ()
    strategy: Strategy = "best_fit"
    overflow: Overflow = "error"
    max_docs_per_row: int | None = None
    align: int = 1
    seed: int | None = 0
    eos: bool = True
    eos_token: str | None = None
    split_special_tokens: bool = False
    trust_remote_code: bool = False
    skip_bad: bool = False
    vocab_size: int | None = None
    unit_tokens: int | None = None
    file_format: str = "arrow"

    def __post_init__(self) -> None:
        _positive("seq_len", self.seq_len, PlanError)
        _positive("vocab_size", self.vocab_size, SourceError)
        _positive("unit_tokens", self.unit_tokens, PlanError)
        if self.strategy not in STRATEGIES:
            raise PlanError(f"unknown strategy {self.strategy!r}: choose one of {', '.join(STRATEGIES)}.")
        if self.overflow not in POLICIES:
            raise PlanError(f"unknown overflow policy {self.overflow!r}: choose one of {', '.join(POLICIES)}.")
        check_max_docs(self.max_docs_per_row, self.strategy)
        check_align(self.seq_len, check_number("align", self.align, "tokens"))
        if self.seed is not None and (not isinstance(self.seed, int) or self.seed < 0):
            raise PlanError(f"seed must be None or an integer of zero or more, got {self.seed!r}.")
        if self.file_format not in FORMATS:
            raise StoreError(f"unknown format {self.file_format!r}: choose one of {', '.join(FORMATS)}.")
        if not self.eos and self.eos_token is not None:
            raise SourceError(f"eos_token={self.eos_token!r} with eos=False: give one or the other.")
        self._check_columns()

    def _check_columns(self) -> None:
        carried = (*self.token_columns, *self.document_columns)
        twice = sorted({name for name in carried if carried.count(name) > 1})
        if twice:
            raise SourceError(f"columns named more than once to be carried: {', '.join(twice)}.")
        own = [name for name in carried if name in (*LISTS, self.text_column or "text")]
        if own:
            raise SourceError(
                f"{', '.join(own)}: neatpack reads these columns itself; token_columns and document_columns name further ones."
            )

    @property
    def columns(self) -> ColumnChoice:
        """The columns that the user named."""
        return ColumnChoice(self.text_column, self.token_columns, self.document_columns, self.ignore_columns)

    @property
    def tokens_a_unit(self) -> int:
        """Token budget of a packing unit: 2**25, more for long rows so that a unit has about a thousand, 2**27 at most."""
        return self.unit_tokens or min(max(2**25, 1024 * self.seq_len), max(2**27, self.seq_len))

    def to_json(self) -> dict[str, Any]:
        """The record as plain JSON values, for the manifest."""
        values = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}
        return {**values, "unit_tokens": self.tokens_a_unit}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> PackOptions:
        """The options that a manifest records."""
        fields: dict[str, Any] = {}
        for name, value in values.items():
            fields[name] = tuple(value) if isinstance(value, list) else value
        return cls(**fields)


def _positive(name: str, value: object, error: type[PackError]) -> None:
    if value is None and name != "seq_len":
        return
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
        raise error(f"{name} must be a positive integer below 2**31, got {value!r}.")
