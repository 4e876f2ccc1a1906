"""A stream loses and doubles nothing, whoever reads it, and goes on after any row as if it had never stopped."""

import json
import multiprocessing
import pickle
from collections import Counter
from functools import partial

import datasets
import numpy as np
import pyarrow as pa
import pytest
from torch.utils.data import DataLoader

from data.corpora import TEXTS, encoded, random_ids, write_arrow, write_jsonl, write_parquet
from neatpack import PackedCollator, PackedStream
from neatpack.data.stream import RowStream
from neatpack.errors import PlanError, SourceError

CAPACITY = 40
DOCUMENTS = random_ids(1, 90, 30)
SMALL = {"open_rows": 3, "lookahead": 4}
EXPECTED = Counter(tuple(document) for document in DOCUMENTS if document)


def rows_of(stream) -> list[tuple]:
    return [comparable(row) for row in stream]


def comparable(row: dict) -> tuple:
    return tuple((name, tuple(values.tolist() if isinstance(values, np.ndarray) else values)) for name, values in row.items())


def documents_of(rows: list[tuple]) -> Counter:
    """The documents in the rows."""
    found: Counter = Counter()
    for row in map(dict, rows):
        ends = np.cumsum(row["seq_lengths"])
        found.update(row["input_ids"][end - length : end] for end, length in zip(ends, row["seq_lengths"], strict=True))
    return found


def generate(documents):
    yield from documents


def streamed(shards: int) -> datasets.IterableDataset:
    return datasets.Dataset.from_dict({"input_ids": DOCUMENTS}).to_iterable_dataset(num_shards=shards)


def as_list(folder):
    return DOCUMENTS


def as_function(folder):
    return partial(generate, DOCUMENTS)


def as_streamed_dataset(folder):
    return streamed(1)


def as_streamed_shards(folder):
    return streamed(8)


def as_shuffled_stream(folder):
    return streamed(8).shuffle(seed=3, buffer_size=10)


def as_jsonl(folder):
    return write_jsonl(folder / "a.jsonl", [{"input_ids": document} for document in DOCUMENTS])


def as_folder_of_files(folder):
    (folder / "files").mkdir()
    for index in range(8):
        documents = DOCUMENTS[index * 12 : index * 12 + 12]
        table = pa.table({"input_ids": pa.array(documents, pa.list_(pa.int64()))})
        if index % 2:
            write_arrow(folder / "files" / f"{index}.arrow", table)
        else:
            write_parquet(folder / "files" / f"{index}.parquet", {"input_ids": table.column(0)})
    return folder / "files"


SOURCES = [function for name, function in list(globals().items()) if name.startswith("as_")]
every_source = pytest.mark.parametrize("make", SOURCES, ids=lambda make: make.__name__)


@every_source
@pytest.mark.parametrize("shuffle_buffer", [0, 20])
def test_every_document_is_in_one_row(make, shuffle_buffer, tmp_path):
    rows = rows_of(PackedStream(make(tmp_path), CAPACITY, shuffle_buffer=shuffle_buffer, **SMALL))
    assert documents_of(rows) == EXPECTED
    assert all(0 < len(dict(row)["input_ids"]) <= CAPACITY for row in rows)


@every_source
@pytest.mark.parametrize("lanes", [1, 3])
def test_ranks_and_workers_share_the_documents_out_without_overlap(make, lanes, tmp_path):
    source = make(tmp_path)
    shares = []
    for rank in range(2):
        for worker in range(2):
            stream = RowStream(source, CAPACITY, rank=rank, world_size=2, lanes=lanes * 2, shuffle_buffer=5, **SMALL)
            stream.worker = lambda worker=worker: (worker, 2)
            shares.append(documents_of(rows_of(stream)))
    assert sum(shares, Counter()) == EXPECTED
    assert all(shares)


@every_source
@pytest.mark.parametrize("lanes", [1, 3])
def test_resuming_after_any_row_gives_the_rows_of_a_stream_that_never_stopped(make, lanes, tmp_path):
    make_stream = partial(PackedStream, make(tmp_path), CAPACITY, lanes=lanes, shuffle_buffer=12, seed=5, **SMALL)
    whole = rows_of(make_stream())
    stream = make_stream()
    rows = iter(stream)
    for done in range(len(whole) + 1):
        state = json.loads(json.dumps(stream.state_dict()))
        again = make_stream()
        again.load_state_dict(state)
        assert rows_of(again) == whole[done:], done
        next(rows, None)


def test_the_rows_after_a_stop_depend_on_the_state():
    stream = PackedStream(DOCUMENTS, CAPACITY, shuffle_buffer=12, **SMALL)
    whole = rows_of(stream)
    rows = iter(stream)
    next(rows)
    state = stream.state_dict()
    state["lanes"][0]["rng"] = (
        PackedStream(DOCUMENTS, CAPACITY, shuffle_buffer=12, seed=1)._make_lane(0)._rng.bit_generator.state
    )
    again = PackedStream(DOCUMENTS, CAPACITY, shuffle_buffer=12, **SMALL)
    again.load_state_dict(state)
    assert rows_of(again) != whole[1:]


def test_a_resumed_stream_can_be_stopped_again():
    whole = rows_of(PackedStream(DOCUMENTS, CAPACITY, shuffle_buffer=12, **SMALL))
    state, found = PackedStream(DOCUMENTS, CAPACITY, shuffle_buffer=12, **SMALL).state_dict(), []
    for _ in range(len(whole)):
        stream = PackedStream(DOCUMENTS, CAPACITY, shuffle_buffer=12, **SMALL)
        stream.load_state_dict(state)
        assert stream.state_dict() == state  # before it goes on
        found.append(comparable(next(iter(stream))))
        state = stream.state_dict()
    assert found == whole


def test_the_state_of_a_stream_in_files_reads_again_from_the_file_it_was_in(tmp_path):
    stream = PackedStream(as_folder_of_files(tmp_path), CAPACITY, lookahead=1, open_rows=1)
    for _ in iter(stream):
        (lane,) = stream.state_dict()["lanes"]
    assert lane["mark"][1][0] >= 6  # the last file that held documents still waiting; of eight


def test_a_state_holds_no_tokens():
    documents = [[7] * 500 for _ in range(3000)]
    stream = PackedStream(documents, 4096, shuffle_buffer=1000)
    next(iter(stream))
    assert len(json.dumps(stream.state_dict())) < 100 * 3000
    assert len(pickle.dumps(stream.state_dict())) < 100 * 3000


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3), (3, 2), (4, 4)])
@pytest.mark.parametrize("lanes", [None, 4])
def test_another_number_of_workers_takes_up_what_is_left(before, after, lanes):
    def workers(count, state=None):
        streams = []
        for worker in range(count):
            stream = RowStream(DOCUMENTS, CAPACITY, lanes=lanes, shuffle_buffer=7, **SMALL)
            stream.worker = lambda worker=worker: (worker, count)
            if state is not None:
                stream.load_state_dict(state)
            streams.append(stream)
        return streams

    first = workers(before)
    rows = [comparable(row) for stream in first for _, row in zip(range(3), stream, strict=False)]
    state = {"workers": [stream.state_dict() for stream in first]}
    rest = [row for stream in workers(after, state) for row in rows_of(stream)]
    assert documents_of(rows + rest) == EXPECTED
    assert Counter(rows + rest) == Counter(row for stream in workers(before) for row in rows_of(stream))


def test_another_number_of_ranks_takes_up_what_is_left_and_needs_every_state():
    states, rows = [], []
    for rank in range(3):
        stream = PackedStream(DOCUMENTS, CAPACITY, rank=rank, world_size=3, **SMALL)
        rows += [comparable(row) for _, row in zip(range(2), stream, strict=False)]
        states.append(stream.state_dict())
    for rank in range(2):
        stream = PackedStream(DOCUMENTS, CAPACITY, rank=rank, world_size=2, **SMALL)
        stream.load_state_dict(states)
        rows += rows_of(stream)
    assert documents_of(rows) == EXPECTED
    stream = PackedStream(DOCUMENTS, CAPACITY, rank=0, world_size=2, **SMALL)
    stream.load_state_dict(states[0])
    with pytest.raises(PlanError, match=r"holds lanes 0 of 3; this worker needs also 2.*all of them together"):
        iter(stream)


def test_shuffling_changes_with_seed_and_epoch_and_with_nothing_else():
    stream = PackedStream(DOCUMENTS, CAPACITY, shuffle_buffer=30, **SMALL)
    first = rows_of(stream)
    assert rows_of(stream) == first
    stream.set_epoch(1)
    second = rows_of(stream)
    assert second != first
    assert documents_of(second) == EXPECTED
    assert rows_of(PackedStream(DOCUMENTS, CAPACITY, shuffle_buffer=30, seed=1, **SMALL)) not in (first, second)
    stream.set_epoch(0)
    assert rows_of(stream) == first


def test_a_state_carries_its_epoch_and_another_epoch_lets_it_go():
    stream = PackedStream(DOCUMENTS, CAPACITY, shuffle_buffer=30, **SMALL)
    stream.set_epoch(4)
    whole = rows_of(stream)
    next(iter(stream))
    state = stream.state_dict()
    again = PackedStream(DOCUMENTS, CAPACITY, shuffle_buffer=30, **SMALL)
    again.load_state_dict(state)
    assert rows_of(again) == whole[1:]
    again.load_state_dict(state)
    again.set_epoch(5)
    assert documents_of(rows_of(again)) == EXPECTED


@pytest.mark.parametrize("overflow", ["drop", "truncate", "split"])
def test_documents_over_the_capacity_go_the_way_of_the_policy(overflow):
    stream = PackedStream(DOCUMENTS, 10, overflow=overflow, shuffle_buffer=4, **SMALL)
    rows = rows_of(stream)
    cut = {
        "drop": [document for document in DOCUMENTS if len(document) <= 10],
        "truncate": [document[:10] for document in DOCUMENTS],
        "split": [document[begin : begin + 10] for document in DOCUMENTS for begin in range(0, len(document), 10)],
    }[overflow]
    assert documents_of(rows) == Counter(tuple(document) for document in cut if document)
    counts = stream.counts
    assert counts.documents == len(DOCUMENTS)
    placed = sum(len(dict(row)["input_ids"]) for row in rows)
    assert counts.tokens == placed + counts.dropped_tokens + counts.truncated_tokens
    state = stream.state_dict()
    assert not state["lanes"][0]["held"]  # nothing is kept of what is in rows, or in none


def test_an_overlong_document_is_named_by_its_place_in_the_source():
    with pytest.raises(PlanError, match=r"record 3: a document of 50 tokens, and a row holds 40.*overflow='split'"):
        rows_of(PackedStream([[1], [2], [3], [4] * 50], CAPACITY, shuffle_buffer=4))
    stream = datasets.Dataset.from_dict({"input_ids": [[1], [2], [3], [4] * 50]}).to_iterable_dataset(num_shards=2)
    with pytest.raises(PlanError, match="record 1 of the shards of lane 1 of 2: a document of 50 tokens"):
        rows_of(PackedStream(stream, CAPACITY, lanes=2))


@pytest.mark.parametrize("lanes", [1, 2, 3])
def test_an_overlong_document_of_files_is_named_by_file_and_line_in_whatever_lane_it_lies(lanes, tmp_path, monkeypatch):
    monkeypatch.setattr("neatpack.data.jsonl.BLOCK_BYTES", 64)
    long = "long" * 20
    (tmp_path / "a.txt").write_text(long)
    columns = {"input_ids": pa.array([[1], [2] * 81], pa.list_(pa.int64()))}
    for path, where in (
        (write_jsonl(tmp_path / "a.jsonl", [*[{"text": "short"}] * 20, {"text": long}]), r"a\.jsonl line 21"),
        (write_parquet(tmp_path / "a.parquet", columns), r"a\.parquet row 1"),
        (tmp_path / "a.txt", r"a\.txt"),
    ):
        with pytest.raises(PlanError, match=rf"{where}: a document of 81 tokens, and a row holds 40\."):
            rows_of(PackedStream(path, CAPACITY, lanes=lanes, shuffle_buffer=4))


def test_documents_in_memory_are_bounded_by_the_options_not_the_source():
    alive, most = 0, 0

    class Counted(list):
        def __init__(self, *args):
            nonlocal alive, most
            super().__init__(*args)
            alive += 1
            most = max(most, alive)

        def __del__(self):
            nonlocal alive
            alive -= 1

    class Array(np.ndarray):
        pass

    def documents():
        for index in range(5000):
            array = np.full(1 + index % 20, index).view(Array)
            array.owner = Counted()
            yield array

    stream = PackedStream(documents, CAPACITY, shuffle_buffer=50, open_rows=10, lookahead=20)
    assert sum(len(row["input_ids"]) for row in stream) == sum(1 + index % 20 for index in range(5000))
    assert most <= 50 + 20 + 10 * CAPACITY


def test_columns_come_with_their_documents():
    records = [
        {"input_ids": document, "labels": [-100, *document[1:]], "reward": index / 2, "source": f"text {index}"}
        for index, document in enumerate(DOCUMENTS)
        if document
    ]
    table = datasets.Dataset.from_list(records).to_iterable_dataset()
    by_ids = {tuple(record["input_ids"]): record for record in records}
    for source in (records, table):
        rows = list(PackedStream(source, CAPACITY, shuffle_buffer=9, **SMALL))
        for row in rows:
            assert set(row) == {"input_ids", "labels", "reward", "source", "seq_lengths"}
            ends = row["seq_lengths"].cumsum()
            for nth, (length, end) in enumerate(zip(row["seq_lengths"], ends, strict=True)):
                record = by_ids[tuple(row["input_ids"][end - length : end].tolist())]
                assert row["labels"][end - length : end].tolist() == record["labels"]
                assert (row["reward"][nth], row["source"][nth]) == (record["reward"], record["source"])


def test_rows_that_are_packed_already_are_packed_anew():
    rows = list(PackedStream(DOCUMENTS, CAPACITY, **SMALL))
    assert documents_of(rows_of(PackedStream(rows, 100, **SMALL))) == EXPECTED


def test_columns_that_rows_cannot_carry_are_refused_by_name(tmp_path):
    record = {"input_ids": [1, 2], "spans": [1, 2, 3]}
    with pytest.raises(SourceError, match="record 0: packed rows cannot carry 'spans'"):
        rows_of(PackedStream([record], CAPACITY))
    assert rows_of(PackedStream([record], CAPACITY, ignore_columns=["spans"])) == [
        (("input_ids", (1, 2)), ("seq_lengths", (2,)))
    ]
    with pytest.raises(SourceError, match="record 1 has columns input_ids; the first has input_ids, reward"):
        rows_of(PackedStream([{"input_ids": [1], "reward": 1}, {"input_ids": [1]}], CAPACITY))
    with pytest.raises(SourceError, match=r"record 1 has columns .*, reward .a value a token.; those before it .*one value"):
        rows_of(PackedStream([{"input_ids": [1], "reward": 1}, {"input_ids": [1], "reward": [1]}], CAPACITY))
    for name, record, refused in [
        ("a", {"text": "words", "tags": ["x"]}, "'tags' .neither one value a token nor one a document"),
        ("b", {"input_ids": [1, 2], "spans": [1, 2, 3]}, "'spans' .neither one value a token nor one a document"),
        ("c", {"input_ids": [1, 2], "text": "words"}, "'text' .text, where tokens are read"),
    ]:
        path = write_jsonl(tmp_path / f"{name}.jsonl", [record])
        with pytest.raises(SourceError, match=rf"{name}.jsonl: columns that packed rows cannot carry: {refused}"):
            rows_of(PackedStream(path, CAPACITY))
        ignored = [column for column in record if column in refused]
        assert len(rows_of(PackedStream(path, CAPACITY, ignore_columns=ignored))) == 1


def test_text_files_are_tokenised_on_the_way(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])
    rows = rows_of(PackedStream(path, 100, tokenizer="bytes"))
    assert documents_of(rows) == Counter(tuple(encoded(text)) for text in TEXTS if text)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"capacity": 0}, "capacity must be a positive"),
        ({"rank": 2, "world_size": 2}, "rank 2 of a world of 2"),
        ({"overflow": "fold"}, "unknown overflow policy"),
        ({"source": iter([[1]])}, "list_iterator cannot be read from the start again"),
        ({"source": generate([[1]])}, "generator cannot be read from the start again"),
        ({"tokenizer": "bytes"}, "tokenizer: options of reading files, but the source is a list"),
    ],
)
def test_what_cannot_work_is_refused_before_the_first_row(options, message):
    with pytest.raises((PlanError, SourceError), match=message):
        PackedStream(**{"source": [[1]], "capacity": 4, **options})


def test_a_bad_record_in_a_stream_of_files_comes_with_a_way_out_that_there_is(tmp_path):
    """A stream has no --skip-bad: packing has."""
    source = write_jsonl(tmp_path / "a.jsonl", [{"input_ids": [1, 2]}, {"input_ids": [3, -4]}])
    with pytest.raises(SourceError, match=r"line 2: .*pack the files first, with neatpack pack --skip-bad,"):
        list(PackedStream(source, 8))


def test_a_source_that_changed_is_refused_by_a_resumed_stream(tmp_path):
    stream = PackedStream(DOCUMENTS, CAPACITY, shuffle_buffer=12, **SMALL)
    next(iter(stream))
    for other, message in [
        ([[9, *document] for document in DOCUMENTS], r"document \d+: it has other tokens"),
        (DOCUMENTS[:3], "document 3: it has no such document"),
    ]:
        again = PackedStream(other, CAPACITY, shuffle_buffer=12, **SMALL)
        again.load_state_dict(stream.state_dict())
        with pytest.raises(SourceError, match=message):
            iter(again)
    path = as_jsonl(tmp_path)
    state = PackedStream(path, CAPACITY).state_dict()
    write_jsonl(path, [{"input_ids": [1]}])
    with pytest.raises(PlanError, match="the state is that of a stream with source="):
        PackedStream(path, CAPACITY).load_state_dict(state)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: {}, "holds no state of a PackedStream"),
        (lambda state: {**state, "version": 9}, "version 9"),
        (lambda state: {**state, "options": {**state["options"], "seed": 7}}, "a stream with seed=7"),
        (lambda state: [state, {**state, "epoch": 2}], "of different runs"),
        (lambda state: [state, {**state, "lanes": [{**state["lanes"][0], "position": 1}]}], "of different moments"),
        (lambda state: {"_steps_since_snapshot": 3, "workers": [state]}, "3 steps older than the rows it gave"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(change, message):
    stream = PackedStream(DOCUMENTS, CAPACITY, **SMALL)
    next(iter(stream))
    with pytest.raises(PlanError, match=message):
        stream.load_state_dict(change(stream.state_dict()))


def context_of(num_workers: int):
    """Workers get a pickled stream, as spawned ones do, from a server that has imported what they need."""
    if not num_workers:
        return None
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["neatpack.stream", "datasets"])
    return context


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_a_data_loader_gives_every_document_once(num_workers):
    loader = DataLoader(
        PackedStream(streamed(3), CAPACITY, shuffle_buffer=7, **SMALL),
        batch_size=4,
        collate_fn=list,
        num_workers=num_workers,
        multiprocessing_context=context_of(num_workers),
    )
    assert documents_of([comparable(row) for batch in loader for row in batch]) == EXPECTED


def test_batches_come_collated_out_of_a_loader():
    loader = DataLoader(
        PackedStream(DOCUMENTS, CAPACITY, **SMALL), batch_size=4, collate_fn=PackedCollator(row_length=CAPACITY)
    )
    tokens = sum(int((batch["input_ids"] != 0).sum()) for batch in loader)
    assert tokens == sum(np.count_nonzero(document) for document in DOCUMENTS)


# What torchdata calls on torch, and torch has deprecated, is not ours.
torchdata_as_it_is = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")


def stateful_loader(num_workers: int, state=None, stream=None):
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    stream = stream or PackedStream(DOCUMENTS, CAPACITY, shuffle_buffer=7, **SMALL)
    loader = torchdata.StatefulDataLoader(
        stream,
        batch_size=2,
        collate_fn=list,
        num_workers=num_workers,
        multiprocessing_context=context_of(num_workers),
    )
    if state is not None:
        loader.load_state_dict(state)
    return loader


def batches_of(loader) -> list:
    return [tuple(comparable(row) for row in batch) for batch in loader]


@torchdata_as_it_is
@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_a_stateful_loader_resumes_to_the_next_batch(num_workers):
    whole = batches_of(stateful_loader(num_workers))
    for stop in (1, 4, len(whole) - 2):
        loader = stateful_loader(num_workers)
        batches = iter(loader)
        for _ in range(stop):
            next(batches)
        state = loader.state_dict()
        del batches
        assert batches_of(stateful_loader(num_workers, state)) == whole[stop:]


@torchdata_as_it_is
@pytest.mark.parametrize(("before", "after"), [(2, 1), (2, 0), (1, 2), (0, 2)])
def test_a_stateful_loaders_state_is_taken_up_by_another_number_of_workers(before, after):
    loader = stateful_loader(before)
    batches = iter(loader)
    done = [tuple(comparable(row) for row in next(batches)) for _ in range(5)]
    state = loader.state_dict()
    del batches
    stream = PackedStream(DOCUMENTS, CAPACITY, shuffle_buffer=7, **SMALL)
    stream.load_state_dict(state)
    rest = batches_of(stateful_loader(after, stream=stream))
    assert documents_of([row for batch in done + rest for row in batch]) == EXPECTED
