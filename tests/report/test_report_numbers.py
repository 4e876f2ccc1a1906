"""The numbers of a packing are those of its rows, whatever is drawn of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from packings_to_look_at import short_texts, write_texts

from neatpack.data import pack
from neatpack.errors import PlanError
from neatpack.planning import balance_rows, plan_rows, save_plan
from neatpack.report import open_packing, summarise
from neatpack.report.histogram import count_fill, count_values
from neatpack.report.rank_work import compare_ranks
from neatpack.report.terminal import bar, percent


def summary_of(lengths, capacity, path, **options):
    save_plan(plan_rows(lengths, capacity, **options), path)
    return summarise(open_packing(path), world_size=1)


def test_the_worked_example_in_numbers(tmp_path):
    """Documents of 2, 3, 1, 2 and 3 tokens in rows of 6: five documents, eleven tokens, one pad."""
    summary = summary_of([2, 3, 1, 2, 3], 6, tmp_path / "plan.npz", strategy="in_order")
    assert (summary.rows, summary.pieces, summary.tokens, summary.padding) == (2, 5, 11, 1)
    assert summary.padding_alone == 5 * 6 - 11
    assert summary.padding_saved == 18
    assert summary.attention_pairs == 3 + 6 + 1 + 3 + 6
    assert summary.attention_dense == 2 * 21
    assert summary.to_dict()["histograms"]["document_length"] == {"edges": [1, 2, 3, 4], "counts": [1, 2, 2], "sums": [1, 4, 6]}
    assert summary.to_dict()["histograms"]["row_tokens"] == {"edges": [5, 6, 7], "counts": [1, 1], "sums": [5, 6]}


def test_what_the_overflow_policy_did_is_told(tmp_path):
    lengths = [3, 20, 0, 9]
    fates = {
        policy: summary_of(lengths, 8, tmp_path / f"{policy}.npz", overflow=policy) for policy in ("drop", "truncate", "split")
    }
    assert fates["drop"].to_dict()["counts"]["kept_whole"] == 1
    assert fates["drop"].counts.dropped_tokens == 29
    assert fates["truncate"].counts.truncated_tokens == 12 + 1
    assert fates["split"].counts.split == 2
    assert fates["split"].tokens == 32
    assert {summary.counts.empty for summary in fates.values()} == {1}


@given(st.lists(st.integers(1, 5_000), min_size=1, max_size=200))
def test_histograms_lose_nothing(values):
    array = np.array(values)
    found = count_values(array)
    assert sum(found.counts) == len(values)
    assert sum(found.sums) == sum(values)
    for low, high, count in zip(found.edges, found.edges[1:], found.counts, strict=False):
        assert count == sum(low <= value < high for value in values)
    fill = count_fill(array, 5_000)
    assert sum(fill.counts) == len(values)
    assert (fill.edges[-2] == 5_000) == (max(values) == 5_000)


@pytest.mark.parametrize("capacity", [1, 2, 7, 64])
def test_small_rows_have_a_fill_histogram_too(capacity):
    found = count_fill(np.arange(1, capacity + 1), capacity)
    assert sum(found.counts) == capacity
    assert found.edges[-1] == capacity + 1


def test_ranks_are_measured_as_balance_rows_measures_them():
    rng = np.random.default_rng(2)
    plan = plan_rows(rng.integers(1, 500, 400), 512, seed=1)
    kept = plan.take_rows(np.arange(plan.num_rows - plan.num_rows % 8))
    compared = compare_ranks(kept, 4, 2)
    balanced = balance_rows(kept, 4, 2)
    assert compared.before.spread == pytest.approx(balanced.spread_before)
    assert compared.after.spread == pytest.approx(balanced.spread_after)
    assert compared.after.spread < compared.before.spread
    for side in (compared.before, compared.after):
        assert sum(side.work) == pytest.approx(4)
        assert [w + idle for w, idle in zip(side.work, side.waiting, strict=True)] == pytest.approx([side.spread] * 4)
    with pytest.raises(PlanError, match="a step needs ranks and rows"):
        compare_ranks(plan, 0)


def test_every_format_and_number_of_shards_gives_the_same_numbers(tmp_path):
    texts = write_texts(tmp_path / "texts", short_texts(120))
    unlike = {"path", "stored_bytes", "stored_bytes_per_token"}
    found = {}
    for name, options in {"arrow": {}, "parquet": {"file_format": "parquet"}}.items():
        pack([texts], tmp_path / name, 128, overflow="split", unit_tokens=4_000, **options)
        packing = open_packing(tmp_path / name)
        found[name] = {key: value for key, value in summarise(packing).to_dict().items() if key not in unlike}
    assert len(list((tmp_path / "parquet").glob("*.parquet"))) > 2
    assert found["arrow"] == found["parquet"]
    assert found["arrow"]["tokens"] == sum(len(text.encode()) + 1 for text in short_texts(120))
    assert found["arrow"]["tokenizer"] == "bytes"
    assert found["arrow"]["source_bytes_per_token"] == pytest.approx(1, abs=0.05)


def test_what_is_not_all_never_reads_as_all():
    assert [percent(part) for part in (0.0, 1.0, 0.5, 0.99996, 0.000004)] == ["0%", "100%", "50.0%", "99.996%", "0.0004%"]
    assert bar(1, 10**9) == "▏"
    assert bar(0, 5) == ""
    assert bar(5, 5, 4) == "████"
