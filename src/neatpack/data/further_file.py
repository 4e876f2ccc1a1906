"""Further columns of a part, between reading and packing: an Arrow stream with a record a document.

A token column is a list a document there. JSON has one kind of number, so that a column may turn out to hold fractions late:
then what was written is written again with the wider type.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa

from neatpack.data.columns import Documents
from neatpack.data.further import join_types


class FurtherWriter:
    """Writes the further columns of documents; nothing is opened before there are any.

    Args:
        path: where to; the file is whole after `close`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.types: dict[str, str] = {}
        self._writer: pa.ipc.RecordBatchStreamWriter | None = None

    def append(self, documents: Documents) -> None:
        """Append the further columns of documents."""
        if not (documents.tokens or documents.values):
            return
        seen = documents.further_types()
        types = {name: join_types(name, [("the part", self.types.get(name, "null")), ("it", seen[name])]) for name in seen}
        schema = _schema(types, documents.tokens)
        if self._writer is None:
            self._writer = pa.ipc.new_stream(str(self.path), schema)
        elif types != self.types:
            self._writer.close()
            self._rewrite(schema)
        self.types = types
        self._writer.write_batch(_batch(documents, schema))

    def _rewrite(self, schema: pa.Schema) -> None:
        before = self.path.rename(self.path.with_name(f"{self.path.name}-before"))
        self._writer = pa.ipc.new_stream(str(self.path), schema)
        with pa.memory_map(str(before)) as file:
            for batch in pa.ipc.open_stream(file):
                self._writer.write_batch(batch.cast(schema))
        before.unlink()

    def close(self) -> None:
        """Complete the file."""
        if self._writer is not None:
            self._writer.close()


def _schema(types: Mapping[str, str], of_tokens: Mapping[str, np.ndarray]) -> pa.Schema:
    kinds = {name: pa.type_for_alias(kind) for name, kind in types.items()}
    return pa.schema([(name, pa.large_list(kind) if name in of_tokens else kind) for name, kind in kinds.items()])


def _batch(documents: Documents, schema: pa.Schema) -> pa.RecordBatch:
    offsets = pa.array(np.concatenate(([0], np.cumsum(documents.lengths))))
    arrays: dict[str, pa.Array] = {
        name: pa.LargeListArray.from_arrays(offsets, pa.array(values)) for name, values in documents.tokens.items()
    }
    arrays.update(documents.values)
    return pa.record_batch([arrays[field.name].cast(field.type) for field in schema], schema=schema)


def read_further(path: Path, first: int, count: int) -> Iterator[pa.RecordBatch]:
    """The further columns of documents `first` to `first + count`."""
    before = 0
    with pa.memory_map(str(path)) as file:
        for batch in pa.ipc.open_stream(file):
            begin, end = max(first - before, 0), min(first + count - before, batch.num_rows)
            if begin < end:
                yield batch.slice(begin, end - begin)
            before += batch.num_rows
            if before >= first + count:
                return
