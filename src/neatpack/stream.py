"""PackedStream: the data wing's row stream as torch's DataLoader knows one.

DataLoader tells a stream by its class alone, and the data wing imports no torch; so the two meet here, on the roof.
"""

from __future__ import annotations

from torch.utils.data import IterableDataset, get_worker_info

from neatpack.data.lane import Row
from neatpack.data.stream import RowStream

__all__ = ["PackedStream"]


class PackedStream(RowStream, IterableDataset[Row]):
    """Packed rows from a source without random access: an iterable dataset for DataLoader and `StatefulDataLoader`.

    Every document is read by exactly one worker of one rank, drawn from a shuffle buffer, and packed by a `StreamPlanner`
    in bounded memory: `shuffle_buffer + lookahead` documents and `open_rows` rows a worker. Rows are those of
    `PackedDataset`; all further columns are packed alike (a value a token) or carried (one value a document), also those that
    `neatpack pack` leaves out unless they are named. Tell the collator of each, or leave it out with `ignore_columns`.

    A stream stops and resumes at any row: `state_dict()`, here or through `StatefulDataLoader`, holds no tokens; the source
    is read again up to where it was (from the start of the file it was in, or from the beginning where it has no files).
    Rows a rank may differ by a few: stop all ranks after the same number of steps.

    Args:
        source: an iterable of documents that can be read more than once, or a function that returns one (a document is its
            token ids, or a mapping with `input_ids` and further columns); a `datasets.IterableDataset`; or the path of a
            file or folder that `neatpack pack` can read.
        capacity: tokens a row can hold.
        rank: which of the data-parallel processes this is; leave it where something else shares rows out (accelerate does).
        world_size: data-parallel processes in all.
        lanes: shares that a rank's documents are split into, each packed on its own; None takes one a worker. With more
            lanes than workers, rows stay the same for any number of workers.
        shuffle_buffer: documents to draw from at random; 0 keeps the source's order.
        seed: of the shuffling; `set_epoch` changes it from epoch to epoch (call it before workers start).
        overflow: what to do with a document longer than `capacity`, as in `plan_rows`.
        open_rows: unfinished rows kept, see `StreamPlanner`.
        lookahead: documents gathered before they are placed, see `StreamPlanner`.
        max_docs_per_row: the most documents in one row.
        ignore_columns: columns to leave out knowingly; any other is carried, or refused by name.
        **reading: for paths: `tokenizer`, `text_column`, `include`, `eos` and the like, see `neatpack.data.PackOptions`.

    Raises:
        SourceError: a source that can be read only once, or cannot be read as asked.
        PlanError: options that mean nothing, or (while iterating) a document over the capacity under `overflow="error"`.
        MissingDependencyError: the tokenizer of a path's texts needs a package that is not installed.

    Example:
        >>> documents = [[11, 12], [21, 22, 23], [31], [41, 42], [51, 52, 53]]
        >>> stream = PackedStream(documents, 6)
        >>> rows = iter(stream)
        >>> next(rows)["seq_lengths"].tolist()
        [3, 3]
        >>> state = stream.state_dict()
        >>> stream.load_state_dict(state)
        >>> next(iter(stream))["seq_lengths"].tolist()
        [2, 2, 1]
    """

    def worker(self) -> tuple[int, int]:
        """Which DataLoader worker of how many this process is."""
        info = get_worker_info()
        return (0, 1) if info is None else (info.id, info.num_workers)
