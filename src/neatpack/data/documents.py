"""A part of the source in, tokenised documents out: the one way in which packing and checking read a source."""

from __future__ import annotations

from collections.abc import Iterator

from neatpack.data.columns import Documents, checked_ids, checked_text
from neatpack.data.further import document_values
from neatpack.data.options import PackOptions
from neatpack.data.readers import read_part
from neatpack.data.records import Chunk, Problems
from neatpack.data.sources import Part
from neatpack.data.tokenize import Tokenizer, append_eos, load_tokenizer
from neatpack.errors import SourceError


class DocumentReader:
    """Reads parts under one set of options; the tokenizer is loaded when the first text arrives, and kept."""

    def __init__(self, options: PackOptions) -> None:
        self._options = options
        self._tokenizer: Tokenizer | None = None

    def chunks(self, part: Part, problems: Problems) -> Iterator[Chunk]:
        """Records of the part as they lie, in order.

        Raises:
            SourceError: a record or file cannot be read, and problems are not to be skipped.
        """
        return read_part(part, self._options.columns, problems)

    def documents(self, chunk: Chunk, problems: Problems) -> Documents:
        """The documents of a chunk: tokenised, or checked.

        Raises:
            SourceError: a record cannot be used, and problems are not to be skipped.
        """
        if chunk.layout.text is None:
            return checked_ids(chunk, self._options.vocab_size, problems)
        return self._encode(chunk, problems)

    def window(self, part: Part, first: int, count: int, *, labels: bool) -> Iterator[Documents]:
        """Documents `first` to `first + count` of a pre-tokenised part.

        Args:
            part: has no bad records.
            first: documents to pass over; chunks of nothing else are not looked at.
            count: documents to read.
            labels: read labels and masks too.

        Raises:
            SourceError: a record cannot be used.
        """
        problems = Problems()
        before = 0
        for chunk in self.chunks(part, problems):
            stop = before + chunk.num_documents
            if before >= first + count:
                return
            if stop > first:
                documents = self.documents(chunk if labels else chunk.without_labels(), problems)
                yield documents.take(max(first - before, 0), min(first + count, stop) - before)
            before = stop

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the options.

        Raises:
            SourceError: its ids do not fit the vocabulary of the options.
        """
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self._options)
            given, own = self._options.vocab_size, self._tokenizer.info.vocab_size
            if given is not None and given < own:
                raise SourceError(
                    f"vocab_size={given} is less than that of the tokenizer {self._options.tokenizer!r}, {own}. Leave it out "
                    "for text, or give the size of the model's embedding."
                )
        return self._tokenizer

    def _encode(self, chunk: Chunk, problems: Problems) -> Documents:
        texts, chunk = checked_text(chunk, problems)
        ids, lengths = self.tokenizer.encode(texts)
        problems.spelled.update(self.tokenizer.spelled_out(ids, lengths))
        eos_id = self.tokenizer.info.eos_id
        if eos_id is not None:
            ids, lengths = append_eos(ids, lengths, eos_id)
        values = {name: document_values(chunk, name) for name in chunk.layout.document_columns}
        return Documents(ids, lengths, None, chunk.places, values=values)
