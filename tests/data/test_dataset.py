"""Virtual rows hold exactly the tokens of the source, wherever it lies; a plan or column that does not fit is refused."""

import pickle
from collections import Counter
from dataclasses import replace

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from data.corpora import packed_rows, random_ids, write_arrow
from neatpack import PackedCollator, plan_rows
from neatpack.data import PackedDataset, lengths_of, pack
from neatpack.errors import PackError, PlanError, SourceError
from neatpack.planning import balance_rows

CAPACITY = 40
DOCUMENTS = random_ids(0, 60, 30)


def table_of(documents: list[list[int]], **columns) -> pa.Table:
    return pa.table({"input_ids": pa.array(documents, pa.list_(pa.int32())), **columns})


def saved(tmp_path, documents=DOCUMENTS, **columns) -> datasets.Dataset:
    """A dataset of several memory-mapped Arrow files, with a few records in each record batch."""
    dataset = datasets.Dataset(table_of(documents, **columns))
    dataset.save_to_disk(tmp_path / "saved", num_shards=3)
    return datasets.load_from_disk(tmp_path / "saved")


def as_list(tmp_path):
    return DOCUMENTS


def as_arrays(tmp_path):
    return [np.array(document, np.uint16) for document in DOCUMENTS]


def as_records(tmp_path):
    return [{"input_ids": document} for document in DOCUMENTS]


def as_table_of_many_chunks(tmp_path):
    return pa.concat_tables([table_of(DOCUMENTS[:20]), table_of([]), table_of(DOCUMENTS[15:60]).slice(5)])


def as_large_lists(tmp_path):
    return pa.table({"input_ids": pa.array(DOCUMENTS, pa.large_list(pa.int64()))})


def as_dataset(tmp_path):
    return saved(tmp_path)


def as_shuffled_dataset(tmp_path):
    order = np.random.default_rng(0).permutation(len(DOCUMENTS))
    return saved(tmp_path, [DOCUMENTS[i] for i in order]).select(np.argsort(order))


def as_slice_of_a_slice(tmp_path):
    return saved(tmp_path, [[1], [2, 3], *DOCUMENTS, [4]]).select(range(1, 63)).select(range(1, 61))


def as_saved_folder(tmp_path):
    saved(tmp_path)
    return tmp_path / "saved"


def as_arrow_files(tmp_path):
    (tmp_path / "files").mkdir()
    write_arrow(tmp_path / "files" / "a.arrow", table_of(DOCUMENTS[:30]), batch_rows=7, stream=True)
    write_arrow(tmp_path / "files" / "b.arrow", table_of(DOCUMENTS[30:]), batch_rows=4, stream=False)
    return tmp_path / "files"


def as_parquet(tmp_path):
    pq.write_table(table_of(DOCUMENTS), tmp_path / "a.parquet", row_group_size=7)
    return str(tmp_path / "a.parquet")


SOURCES = [function for name, function in list(globals().items()) if name.startswith("as_")]


def documents_of(dataset: PackedDataset) -> dict[int, list[int]]:
    """The documents put together again from the rows, by the plan's numbers."""
    found: dict[int, list] = {}
    for row, slices in zip(dataset.__getitems__(range(len(dataset))), dataset.plan, strict=True):
        assert row["seq_lengths"].tolist() == [slice_.length for slice_ in slices]
        assert row["seq_lengths"].sum() == len(row["input_ids"])
        ends = row["seq_lengths"].cumsum()
        for slice_, end in zip(slices, ends, strict=True):
            found.setdefault(slice_.doc, []).append((slice_.start, row["input_ids"][end - slice_.length : end].tolist()))
    return {doc: [token for _, part in sorted(parts) for token in part] for doc, parts in found.items()}


@pytest.mark.parametrize("make", SOURCES, ids=lambda make: make.__name__)
@pytest.mark.parametrize("options", [{}, {"strategy": "wrapped"}, {"strategy": "in_order", "seed": 3}])
def test_every_document_is_in_the_rows_as_it_is_in_the_source(make, options, tmp_path):
    source = make(tmp_path)
    lengths = lengths_of(source)
    assert lengths.tolist() == [len(document) for document in DOCUMENTS]
    dataset = PackedDataset(source, plan_rows(lengths, CAPACITY, **options))
    assert documents_of(dataset) == {doc: ids for doc, ids in enumerate(DOCUMENTS) if ids}
    assert documents_of(pickle.loads(pickle.dumps(dataset))) == documents_of(dataset)


def test_the_comparison_sees_a_neighbours_tokens(tmp_path):
    dataset = PackedDataset(DOCUMENTS, plan_rows(lengths_of(DOCUMENTS), CAPACITY))
    other = [[0, *document[1:]] if document else [] for document in DOCUMENTS]
    assert documents_of(dataset) != {doc: ids for doc, ids in enumerate(other) if ids}


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.integers(0, 12), max_size=30),
    st.integers(1, 15),
    st.sampled_from(["drop", "truncate", "split"]),
    st.integers(0, 2**32),
    st.booleans(),
)
def test_tokens_are_conserved_under_every_policy(lengths, capacity, overflow, seed, shuffled):
    rng = np.random.default_rng(seed)
    documents = [rng.integers(0, 1000, length).tolist() for length in lengths]
    source = datasets.Dataset(table_of(documents))
    if shuffled and documents:
        source = source.shuffle(seed=seed)
        documents = source["input_ids"][:]
    plan = plan_rows(lengths_of(source), capacity, overflow=overflow, seed=seed)
    rows = PackedDataset(source, plan).__getitems__(range(plan.num_rows))
    expected = [
        document[:capacity] if overflow == "truncate" else document
        for document in documents
        if overflow != "drop" or len(document) <= capacity
    ]
    got = Counter(token for row in rows for token in row["input_ids"].tolist())
    assert got == Counter(token for document in expected for token in document)
    assert all(0 < len(row["input_ids"]) <= capacity for row in rows)


@pytest.mark.parametrize("strategy", ["best_fit", "in_order", "wrapped"])
@pytest.mark.parametrize("file_format", ["arrow", "parquet"])
def test_rows_equal_those_that_pack_stores(strategy, file_format, tmp_path):
    labels = [[-100 if token % 3 == 0 else token for token in document] for document in DOCUMENTS]
    labels[:30] = DOCUMENTS[:30]  # rows of these alone are stored with null labels
    source = saved(tmp_path, labels=labels)
    pack(tmp_path / "saved", tmp_path / "packed", CAPACITY, strategy=strategy, seed=None, file_format=file_format)
    virtual = PackedDataset(source, plan_rows(lengths_of(source), CAPACITY, strategy=strategy))
    stored = PackedDataset(tmp_path / "packed", ignore_columns=[])
    assert len(virtual) == len(stored)
    for ours, theirs in zip(virtual.__getitems__(range(len(virtual))), stored.__getitems__(range(len(stored))), strict=True):
        assert {name: values.tolist() for name, values in ours.items()} == {
            name: values.tolist() for name, values in theirs.items()
        }


def test_stored_rows_without_a_plan_are_those_that_datasets_reads(tmp_path):
    saved(
        tmp_path,
        labels=[[-100, *document[1:]] if document and index % 5 == 0 else document for index, document in enumerate(DOCUMENTS)],
    )
    pack(tmp_path / "saved", tmp_path / "packed", CAPACITY, seed=1, unit_tokens=300)
    stored, expected = PackedDataset(tmp_path / "packed"), packed_rows(tmp_path / "packed")
    assert None in [row["labels"] for row in expected]
    for row, other in zip(stored.__getitems__(range(len(stored))), expected, strict=True):
        assert row["input_ids"].tolist() == other["input_ids"]
        assert row["seq_lengths"].tolist() == other["seq_lengths"]
        assert row["labels"].tolist() == (other["input_ids"] if other["labels"] is None else other["labels"])


def test_a_packed_folder_is_planned_anew_at_another_length_and_in_another_order(tmp_path):
    saved(tmp_path)
    pack(tmp_path / "saved", tmp_path / "packed", CAPACITY)
    for source in (tmp_path / "packed", datasets.load_from_disk(tmp_path / "packed").shuffle(seed=1)):
        dataset = PackedDataset(source, plan_rows(lengths_of(source), 100))
        assert Counter(map(tuple, documents_of(dataset).values())) == Counter(tuple(ids) for ids in DOCUMENTS if ids)
        assert len(dataset) < len(PackedDataset(source))


def test_without_a_plan_each_document_is_a_row():
    dataset = PackedDataset([[1, 2], [], [3]])
    assert [row["input_ids"].tolist() for row in dataset.__getitems__([0, 1])] == [[1, 2], [3]]
    assert [row["seq_lengths"].tolist() for row in dataset.__getitems__([0, 1])] == [[2], [1]]
    assert len(PackedDataset([])) == 0


def test_columns_are_packed_with_tokens_or_one_value_a_document(tmp_path):
    mask = [[bool(token % 2) for token in document] for document in DOCUMENTS]
    columns = {
        "labels": DOCUMENTS,
        "completion_mask": mask,
        "advantages": [[token / 7 for token in document] for document in DOCUMENTS],
        "source": [f"text {index}" for index in range(60)],
        "reward": np.arange(60) / 3,
        "group": [index if index % 2 else None for index in range(60)],
    }
    source = saved(tmp_path, **columns)
    shuffled = source.shuffle(seed=3)
    listed = [
        dict(zip(["input_ids", *columns], record, strict=True)) for record in zip(DOCUMENTS, *columns.values(), strict=True)
    ]
    for given_source, order in ((source, range(60)), (shuffled, shuffled._indices.column(0).to_pylist()), (listed, range(60))):
        dataset = PackedDataset(given_source, plan_rows(lengths_of(given_source), CAPACITY, seed=1))
        assert set(dataset.column_names) == {"input_ids", "seq_lengths", *columns}
        for row, slices in zip(dataset.__getitems__(range(len(dataset))), dataset.plan, strict=True):
            assert list(row) == dataset.column_names
            docs = [order[slice_.doc] for slice_ in slices]
            for name in ("labels", "completion_mask", "advantages"):
                assert row[name].tolist() == [value for doc in docs for value in columns[name][doc]]
            for name in ("source", "reward", "group"):
                assert list(row[name]) == [columns[name][doc] for doc in docs]
        assert row["completion_mask"].dtype == bool


def test_pieces_of_a_split_document_each_carry_its_value():
    documents = [{"input_ids": [1] * 25, "reward": 0.5}, {"input_ids": [2] * 3, "reward": 1.0}]
    dataset = PackedDataset(documents, plan_rows([25, 3], 10, overflow="split"))
    values = {
        (length, reward)
        for row in map(dataset.__getitem__, range(3))
        for length, reward in zip(row["seq_lengths"], row["reward"], strict=True)
    }
    assert values == {(10, 0.5), (5, 0.5), (3, 1.0)}


def test_values_of_the_documents_of_packed_rows_are_told_from_those_of_tokens():
    rows = {"seq_lengths": [[2, 1], [3]], "group_ids": [[7, 8], [9]], "tags": [["a", "b"], ["c"]]}
    table = table_of([[1, 2, 3], [4, 5, 6]], **rows)
    for source in (table, table.to_pylist()):
        dataset = PackedDataset(source, plan_rows([2, 1, 3], 3, strategy="in_order", seed=0))
        found = {tuple(row["input_ids"]): (list(row["group_ids"]), row["tags"]) for row in dataset.__getitems__([0, 1])}
        assert found == {(1, 2, 3): ([7, 8], ["a", "b"]), (4, 5, 6): ([9], ["c"])}


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"spans": [[1, 2, 3]] * 2}, r"'spans' \(record 0 has 3 values for 2 tokens\)"),
        ({"messages": [[{"role": "user"}]] * 2}, r"'messages' \(it has type|'messages' \(its lists hold struct"),
        ({"meta": [{"a": 1}] * 2}, r"'meta' \(it has type struct"),
        ({"words": [["a", "b"], ["c"]]}, r"'words' \(its lists hold string"),
        ({"labels": [[1, 2], None]}, r"'labels' \(it has null lists\)"),
        ({"labels": [[1, None], [1]]}, r"'labels' \(its lists hold nulls\)"),
        ({"seq_lengths": [[1, 1], [1]], "title": ["a", "b"]}, r"'title' \(it has one value a row"),
    ],
)
def test_a_column_that_rows_cannot_carry_is_refused_by_name_and_left_out_on_request(columns, message):
    table = table_of([[1, 2], [3]], **columns)
    plan = plan_rows(lengths_of(table), 5)
    with pytest.raises(SourceError, match=message):
        PackedDataset(table, plan)
    name = list(columns)[-1]
    assert set(PackedDataset(table, plan, ignore_columns=[name])[0]) == {"input_ids", "seq_lengths"}


def test_columns_in_memory_are_refused_as_those_of_tables_are():
    for record, message in [
        ({"input_ids": [1, 2], "spans": [1, 2, 3]}, "record 0: packed rows cannot carry 'spans'.*list of 3"),
        ({"input_ids": [1, 2], "meta": {"a": 1}}, "cannot carry 'meta'"),
        ({"input_ids": [1, 2], "seq_lengths": [3]}, "must add up to its 2 'input_ids'"),
        ({"input_ids": [1.5]}, "must be a flat list of integers"),
        ({"input_ids": [[1], [2]]}, "must be a flat list of integers"),
        ({"text": "words"}, "has no 'input_ids', only text"),
    ]:
        with pytest.raises(SourceError, match=message):
            PackedDataset([record])
    with pytest.raises(SourceError, match="record 1 has columns input_ids; the first has input_ids, reward"):
        PackedDataset([{"input_ids": [1], "reward": 1}, {"input_ids": [1]}])


@pytest.mark.parametrize("as_table", [True, False])
def test_an_attention_mask_of_ones_is_left_out_and_padding_is_refused(as_table):
    good, bad = ([[1, 2], [3]], [[1, 1], [1]]), ([[1, 2], [3]], [[1, 0], [1]])
    make = [table_of(ids, attention_mask=mask) for ids, mask in (good, bad)]
    good_source, bad_source = make if as_table else [table.to_pylist() for table in make]
    assert set(PackedDataset(good_source)[0]) == {"input_ids", "seq_lengths"}
    with pytest.raises(SourceError, match=r"attention_mask.*padding"):
        PackedDataset(bad_source)[0]


def test_to_ignore_a_column_that_is_not_there_is_refused():
    with pytest.raises(SourceError, match="ignore_columns names lables; the source has labels"):
        PackedDataset(table_of([[1]], labels=[[1]]), ignore_columns=["lables"])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (pa.table({"text": ["a"]}), "expected a column 'input_ids', got 'text'"),
        (pa.table({"input_ids": ["a"]}), "'input_ids' cannot be used: it has type string"),
        (pa.table({"input_ids": [[1], None]}), "it has null lists"),
        (pa.table({"input_ids": [[1]], "seq_lengths": [[2]]}), "record 0: 'seq_lengths' does not add up"),
        (iter([[1]]), "type list_iterator has no rows that can be drawn at random.*PackedStream"),
        ("/nonexistent/path", "no such file or folder"),
        (
            datasets.Dataset.from_dict({"input_ids": [[1]]}).with_transform(lambda batch: batch),
            "transforms its records on the fly",
        ),
    ],
)
def test_a_source_that_cannot_be_read_is_one_error_with_a_way_out(source, message):
    with pytest.raises(SourceError, match=message):
        lengths_of(source)


def test_text_files_are_pointed_to_the_packer_and_the_stream(tmp_path):
    (tmp_path / "a.txt").write_text("words")
    with pytest.raises(SourceError, match=r"from Arrow or Parquet files, got text.*neatpack pack.*PackedStream"):
        lengths_of(tmp_path)


def test_files_of_different_columns_are_refused(tmp_path):
    write_arrow(tmp_path / "a.arrow", table_of([[1]]))
    write_arrow(tmp_path / "b.arrow", pa.table({"input_ids": pa.array([[1]], pa.list_(pa.int64()))}))
    with pytest.raises(SourceError, match=r"b.arrow: has input_ids list.*int64.*expected input_ids list.*int32"):
        lengths_of(tmp_path)


def test_a_dataset_shows_the_columns_that_its_format_shows():
    source = datasets.Dataset.from_dict({"input_ids": [[1, 2]], "text": ["a"]}).with_format("torch", columns=["input_ids"])
    assert set(PackedDataset(source)[0]) == {"input_ids", "seq_lengths"}


def test_a_plan_for_another_source_is_refused():
    plan = plan_rows([len(document) for document in DOCUMENTS], CAPACITY)
    dataset = PackedDataset(DOCUMENTS, plan)
    with pytest.raises(PlanError, match="does not fit its source"):
        PackedDataset(DOCUMENTS[::-1], plan)
    with pytest.raises(PlanError, match="does not fit its source"):
        dataset.with_plan(plan_rows([3, 4], CAPACITY))
    with pytest.raises(PlanError, match="must be a PackPlan, got BalancedPlan"):
        PackedDataset(DOCUMENTS, balance_rows(plan, 1, 1))
    with pytest.raises(PlanError, match="reach beyond their documents"):
        PackedDataset(DOCUMENTS, replace(plan, start=plan.start + 1))


def test_a_new_epoch_is_a_new_plan_over_the_source_that_is_open():
    dataset = PackedDataset(DOCUMENTS, plan_rows(lengths_of(DOCUMENTS), CAPACITY, seed=0))
    again = dataset.with_plan(plan_rows(dataset.lengths, CAPACITY, seed=1))
    assert documents_of(again) == documents_of(dataset)
    assert again[0]["input_ids"].tolist() != dataset[0]["input_ids"].tolist()


def test_rows_are_numbered_as_in_a_list_and_may_be_written_to():
    dataset = PackedDataset(DOCUMENTS, plan_rows(lengths_of(DOCUMENTS), CAPACITY))
    last = dataset[len(dataset) - 1]["input_ids"]
    assert dataset[-1]["input_ids"].tolist() == dataset[np.int64(len(dataset) - 1)]["input_ids"].tolist() == last.tolist()
    last[:] = 0
    assert dataset[-1]["input_ids"].any()
    assert dataset.__getitems__([]) == []
    for outside in (len(dataset), -len(dataset) - 1):
        with pytest.raises(IndexError, match=f"row {outside} of a dataset of {len(dataset)} rows"):
            dataset[outside]
    with pytest.raises(TypeError, match="row numbers must be integers"):
        dataset[1:3]


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_a_data_loader_gives_the_same_batches_on_any_number_of_workers(num_workers, tmp_path):
    source = saved(tmp_path)
    dataset = PackedDataset(source, plan_rows(lengths_of(source), CAPACITY, seed=0))
    context = "spawn" if num_workers else None
    loader = DataLoader(
        dataset, batch_size=4, collate_fn=PackedCollator(), num_workers=num_workers, multiprocessing_context=context
    )
    rows = dataset.__getitems__(range(len(dataset)))
    expected = [PackedCollator()(rows[begin : begin + 4]) for begin in range(0, len(rows), 4)]
    for batch, other in zip(loader, expected, strict=True):
        assert torch.equal(batch["input_ids"], other["input_ids"])
        assert torch.equal(batch["cu_seq_lens_q"], other["cu_seq_lens_q"])


def test_a_pickled_dataset_holds_the_plan_and_no_tokens(tmp_path):
    documents = [[7] * 1000 for _ in range(2000)]
    source = saved(tmp_path, documents)
    for given_source in (
        source,
        source.shuffle(seed=0, indices_cache_file_name=str(tmp_path / "order.arrow")),
        tmp_path / "saved",
    ):
        dataset = PackedDataset(given_source, plan_rows(lengths_of(given_source), 4096))
        size = len(pickle.dumps(dataset))
        assert size < 2000 * 8 + 500 * 8 + 5000  # doc and length a document, an offset a row, and the rest


def test_a_source_that_changed_is_refused_where_it_is_opened_again(tmp_path):
    source = write_arrow(tmp_path / "a.arrow", table_of(DOCUMENTS))
    pickled = pickle.dumps(PackedDataset(source))
    write_arrow(tmp_path / "b.arrow", table_of(DOCUMENTS[1:])).replace(source)
    with pytest.raises(SourceError, match=r"a.arrow: changed since the dataset was opened"):
        pickle.loads(pickled)
    source.unlink()
    with pytest.raises(PackError, match=r"a.arrow: cannot be read"):
        pickle.loads(pickled)


def documents_in_slots(batch, align: int) -> list[list[int]]:
    """What lies in each slot of a batch by its map, every document from a multiple of `align` on."""
    found = []
    for ids, doc_ids in zip(batch["input_ids"], batch["doc_ids"], strict=True):
        for doc in range(1, int(doc_ids.max()) + 1):
            places = torch.nonzero(doc_ids == doc).flatten()
            assert int(places[0]) % align == 0
            assert len(places) == int(places[-1] - places[0]) + 1
            found.append(ids[places].tolist())
    return found


@pytest.mark.parametrize("align", [4, 8])
def test_the_rows_of_an_aligned_plan_are_laid_out_in_slots_by_the_collator(align):
    dataset = PackedDataset(DOCUMENTS, plan_rows(lengths_of(DOCUMENTS), CAPACITY, align=align, seed=1))
    collator = PackedCollator(row_length=CAPACITY, align=dataset.align, return_doc_ids=True)
    found = []
    for batch in DataLoader(dataset, batch_size=3, collate_fn=collator):
        assert batch["input_ids"].shape[1] == CAPACITY
        found += documents_in_slots(batch, align)
    assert sorted(found) == sorted(document for document in DOCUMENTS if document)
    plan = dataset.plan
    batch = collator(dataset.__getitems__(range(len(dataset))))
    firsts = [torch.nonzero((row[1:] != row[:-1]) & (row[1:] > 0)).flatten() + 1 for row in batch["doc_ids"]]
    starts = np.split(plan.slot_starts(), plan.row_offsets[1:-1])
    for first, expected in zip(firsts, starts, strict=True):
        assert [0, *first.tolist()] == expected.tolist()


def test_the_check_of_slots_sees_rows_collated_without_them():
    dataset = PackedDataset([[1, 2, 3], [4, 5]], plan_rows([3, 2], 8, align=4))
    assert dataset.align == 4
    dense = PackedCollator(row_length=8, return_doc_ids=True)(dataset.__getitems__([0]))
    with pytest.raises(AssertionError):
        documents_in_slots(dense, 4)


def test_a_collator_with_wider_slots_than_the_plan_is_refused():
    dataset = PackedDataset([[1, 2, 3], [4, 5]], plan_rows([3, 2], 8, align=4))
    with pytest.raises(PackError, match="in slots of 8, more than row_length=8"):
        PackedCollator(row_length=8, align=8)(dataset.__getitems__([0]))
