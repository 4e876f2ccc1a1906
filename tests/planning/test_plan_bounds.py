"""What a plan counts, to the very last: pieces, tokens, documents; and what it copies to count them."""

from __future__ import annotations

import re

import numpy as np
import pytest

from neatpack import plan_rows
from neatpack.errors import PlanError
from neatpack.planning.lengths import check_lengths
from neatpack.planning.options import check_number, check_seed, check_slices
from neatpack.planning.overflow import apply_overflow
from neatpack.planning.plan import PlanCounts


def test_the_last_number_of_pieces_that_int32_counts_is_taken_and_the_next_is_refused() -> None:
    check_slices("split", 1, 2**31 - 1, 4)
    with pytest.raises(
        PlanError, match=r"split would cut 1 documents into 2147483648 pieces of up to 4 tokens: .* 2\*\*31 - 1"
    ):
        check_slices("split", 1, 2**31, 4)


def test_numbers_go_up_to_what_int32_counts() -> None:
    assert check_number("capacity", 2**31 - 1, "tokens") == 2**31 - 1
    assert check_number("capacity", 1, "tokens") == 1
    for value in (0, -1, 2**31, 2.0, True):
        with pytest.raises(PlanError, match="capacity must be a positive number of tokens below"):
            check_number("capacity", value, "tokens")


def test_zero_is_a_seed() -> None:
    assert check_seed(0) == plan_rows([1, 2], 2, seed=0).seed == 0


@pytest.mark.parametrize(("longest", "dtype"), [(2**30, np.int32), (2**31 - 1, np.int32), (2**31, np.int64)])
def test_starts_of_wrapped_slices_are_as_wide_as_the_longest_document_needs(longest, dtype) -> None:
    plan = plan_rows([longest], 2**30, strategy="wrapped")
    assert plan.start.dtype == dtype
    assert plan.start.tolist() == list(range(0, longest, 2**30))


@pytest.mark.parametrize("dtype", ["i1", "u1", "i4", "u4", "i8", ">i4"])
def test_lengths_that_are_an_integer_array_are_taken_without_a_copy(dtype) -> None:
    array = np.array([3, 0, 2], dtype)
    assert check_lengths(array) is array


def test_lengths_of_64_unsigned_bits_become_signed() -> None:
    array = check_lengths(np.array([3, 2**61], np.uint64))
    assert array.dtype == np.int64
    assert array.tolist() == [3, 2**61]


def test_lengths_that_fit_take_no_copy_of_the_policy() -> None:
    array = np.array([3, 8, 0], np.int32)
    pieces = apply_overflow(array, 8, "truncate")
    assert pieces.length is array
    assert pieces.doc is pieces.start is None
    assert pieces.counts == PlanCounts(documents=3, tokens=11, empty=1)


def test_counts_that_nothing_was_counted_for_are_zero() -> None:
    counts = PlanCounts()
    assert (counts.documents, counts.tokens, counts.empty, counts.split) == (0, 0, 0, 0)
    assert (counts.dropped, counts.dropped_tokens, counts.truncated, counts.truncated_tokens) == (0, 0, 0, 0)


@pytest.mark.parametrize("number", [1, 5, 6])
def test_an_error_names_five_overlong_documents_and_counts_the_others(number) -> None:
    named = ", ".join(f"document {doc} (9 tokens)" for doc in range(min(number, 5)))
    more = " and 1 more" if number == 6 else ""
    with pytest.raises(
        PlanError, match=re.escape(f"{number} of {number} documents") + ".*: " + re.escape(f"{named}{more}. Raise")
    ):
        plan_rows([9] * number, 8)
