from __future__ import annotations

import json
import zipfile
from pathlib import Path

import numpy as np
import pytest

from neatpack import plan_rows
from neatpack.errors import PlanError, StoreError
from neatpack.planning import PackPlan, balance_rows, load_plan, save_plan
from neatpack.planning.plan import PlanCounts

FIELDS = ("capacity", "lower_bound", "counts", "strategy", "overflow", "seed", "align", "max_docs_per_row", "fingerprint")
LENGTHS = np.random.default_rng(0).integers(0, 300, 5000)


def saved(tmp_path: Path, plan: PackPlan) -> Path:
    path = tmp_path / "plan.npz"
    save_plan(plan, path)
    return path


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"strategy": "in_order", "seed": 3, "align": 8, "max_docs_per_row": 5},
        {"strategy": "wrapped"},
        {"overflow": "drop"},
        {"overflow": "truncate"},
        {"seed": np.int64(3), "align": np.uint8(8), "max_docs_per_row": np.int16(5)},
    ],
)
def test_a_plan_comes_back_as_it_was(tmp_path, options) -> None:
    plan = plan_rows(LENGTHS, 128, **{"overflow": "split", **options})
    back = load_plan(saved(tmp_path, plan))
    for name in ("row_offsets", "doc", "start", "length"):
        assert np.array_equal(getattr(back, name), getattr(plan, name))
        assert getattr(back, name).dtype == getattr(plan, name).dtype
    for name in FIELDS:
        assert getattr(back, name) == getattr(plan, name)
    back.check_source(LENGTHS)


def test_an_empty_and_a_balanced_plan_come_back(tmp_path) -> None:
    assert load_plan(saved(tmp_path, plan_rows([], 8))).num_rows == 0
    balanced = balance_rows(plan_rows(LENGTHS, 300), 4, 2, tail="repeat").plan
    assert list(load_plan(saved(tmp_path, balanced))) == list(balanced)


def test_a_file_of_whole_documents_takes_eight_bytes_a_document(tmp_path) -> None:
    plan = plan_rows(np.full(100_000, 10), 1000)
    assert saved(tmp_path, plan).stat().st_size < 100_000 * 8 + plan.num_rows * 8 + 4000


def test_equal_plans_are_equal_files(tmp_path) -> None:
    first, second = tmp_path / "a.npz", tmp_path / "b.npz"
    for path in (first, second):
        save_plan(plan_rows(LENGTHS, 300, seed=1), path)
    assert first.read_bytes() == second.read_bytes()
    save_plan(plan_rows(LENGTHS, 300, seed=2), second)
    assert first.read_bytes() != second.read_bytes()


def test_numpy_opens_it_without_pickle(tmp_path) -> None:
    path = saved(tmp_path, plan_rows(LENGTHS, 300))
    with np.load(path, allow_pickle=False) as members:
        assert json.loads(str(members["header"]))["capacity"] == 300
        assert members["doc"].dtype == np.int32


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, ">i8", np.uint64])
def test_a_source_of_another_dtype_still_fits(dtype) -> None:
    plan_rows(LENGTHS, 300).check_source(LENGTHS.astype(dtype))
    plan_rows(LENGTHS.tolist(), 300).check_source(LENGTHS[:].astype(dtype))


@pytest.mark.parametrize("options", [{}, {"overflow": "truncate"}, {"overflow": "drop"}, {"strategy": "wrapped"}])
def test_another_source_is_refused(options) -> None:
    plan = plan_rows(LENGTHS, 200, **{"overflow": "split", **options})
    longer = LENGTHS.copy()
    longer[np.argmax(LENGTHS)] += 1  # a token that truncate and drop never place
    swapped = LENGTHS[::-1]
    for other in (longer, swapped, LENGTHS[:-1], [*LENGTHS, 0], []):
        with pytest.raises(PlanError, match=r"does not fit its source: made for 5000 documents, .*; got \d+ documents"):
            plan.check_source(other)


def test_a_plan_without_a_fingerprint_is_not_taken_on_trust() -> None:
    whole = plan_rows([1, 2], 8)
    by_hand = PackPlan(
        capacity=8,
        row_offsets=whole.row_offsets,
        doc=whole.doc,
        start=whole.start,
        length=whole.length,
        lower_bound=1,
        counts=PlanCounts(documents=2, tokens=3),
        strategy="stream",
        overflow="error",
    )
    with pytest.raises(PlanError, match="no fingerprint"):
        by_hand.check_source([1, 2])


@pytest.mark.parametrize("kept", [0, 1, 100, 0.5, 0.99])
def test_a_truncated_file_is_refused(tmp_path, kept) -> None:
    path = saved(tmp_path, plan_rows(LENGTHS, 300))
    content = path.read_bytes()
    path.write_bytes(content[: kept if isinstance(kept, int) else int(len(content) * kept)])
    with pytest.raises(StoreError, match=r"plan\.npz is not a whole neatpack plan"):
        load_plan(path)


def test_a_flipped_byte_is_refused(tmp_path) -> None:
    path = saved(tmp_path, plan_rows(LENGTHS, 300))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(StoreError, match="CRC"):
        load_plan(path)


def rewritten(path: Path, **changes: object) -> Path:
    with np.load(path) as file:
        members = dict(file)
    header = json.loads(str(members["header"]))
    header |= {name: value for name, value in changes.items() if name in header}
    members |= {name: value for name, value in changes.items() if name in members}
    np.savez(path, **{**members, "header": json.dumps(header)})
    return path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "other"}, "its format is 'other'"),
        ({"version": 2}, "plan of version 2; this release reads version 1"),
        ({"counts": {"documents": 2, "tokens": 3}}, "do not fit"),
        ({"counts": {"files": 2}}, "unexpected keyword"),
        ({"capacity": 100}, "do not fit its rows"),
        ({"row_offsets": np.array([0, 9, 3])}, "do not describe rows"),
        ({"row_offsets": np.zeros(0, np.int64)}, "do not describe rows"),
        ({"doc": np.zeros(3, np.int32)}, "do not describe rows"),
        ({"length": np.zeros(5000, float)}, "do not describe rows"),
    ],
)
def test_a_file_that_contradicts_itself_is_refused(tmp_path, changes, message) -> None:
    path = rewritten(saved(tmp_path, plan_rows(LENGTHS, 300)), **changes)
    with pytest.raises(StoreError, match=message):
        load_plan(path)
    assert load_plan(rewritten(saved(tmp_path, plan_rows(LENGTHS, 300)))).num_rows > 0


def test_foreign_files_are_refused(tmp_path) -> None:
    text, array, arrays, objects, folder = (tmp_path / name for name in ("text", "a.npy", "a.npz", "o.npz", "folder"))
    text.write_text("not a plan")
    np.save(array, LENGTHS)
    np.savez(arrays, LENGTHS)
    np.savez(objects, header=np.array([{}], dtype=object))
    folder.mkdir()
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as archive:
        archive.writestr("readme", "hello")
    for path in (text, array, arrays, objects, folder, tmp_path / "other.zip"):
        with pytest.raises(StoreError, match="is not a whole neatpack plan"):
            load_plan(path)
    with pytest.raises(StoreError, match="there is no plan at"):
        load_plan(tmp_path / "missing.npz")


def test_a_failed_save_leaves_the_old_plan_and_no_litter(tmp_path, monkeypatch) -> None:
    path = saved(tmp_path, plan_rows([1, 2], 8))
    before = path.read_bytes()

    def full_disk(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("neatpack.planning.store.os.fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        save_plan(plan_rows(LENGTHS, 300), path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
