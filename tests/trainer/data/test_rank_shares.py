"""A step's micro-batches, dealt to ranks: all of them, as many for each, about as large at once."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from mopd_trainer.data.packing import MicroBatch, pack, split
from tests.trainer.data.test_packing import SIZES, examples_of, packed, slots_of


def dealt(sizes: list[tuple[int, int]], budget: int, ranks: int) -> list[list[MicroBatch]]:
    batches = pack(examples_of(sizes), tokens_per_micro_batch=budget, ranks=ranks)
    return split(list(batches), ranks)


@settings(deadline=None, max_examples=25)
@given(sizes=SIZES, budget=st.integers(1, 60), ranks=st.integers(2, 4))
def test_all_ranks_together_predict_what_one_rank_predicts(
    sizes: list[tuple[int, int]], budget: int, ranks: int
) -> None:
    parts = dealt(sizes, budget, ranks)
    contexts = [context for part in parts for batch in part for context in slots_of(batch)]
    unsharded = packed(examples_of(sizes), budget)
    assert sorted(contexts) == sorted(context for batch in unsharded for context in slots_of(batch))
    for part in parts:
        assert all(len(b.input_ids) == 1 or b.input_ids.numel() <= budget for b in part)


@settings(deadline=None, max_examples=25)
@given(sizes=SIZES, budget=st.integers(1, 60), ranks=st.integers(2, 4))
def test_ranks_work_in_as_few_rounds_as_one_budget_takes(
    sizes: list[tuple[int, int]], budget: int, ranks: int
) -> None:
    parts = dealt(sizes, budget, ranks)
    rounds = -(-len(packed(examples_of(sizes), budget)) // ranks)
    assert {len(part) for part in parts} == {rounds}
    tokens = [
        [batch.input_ids.numel() for batch in one_round] for one_round in zip(*parts, strict=True)
    ]
    for larger, smaller in pairwise(tokens):
        assert min(larger) >= max(smaller)


def test_one_micro_batch_is_cut_so_that_every_rank_has_a_part() -> None:
    parts = dealt([(3, 4)] * 4, 1000, 2)
    assert [[batch.slots for batch in part] for part in parts] == [[8], [8]]


def test_a_rank_without_an_example_takes_part_with_nothing_to_predict() -> None:
    parts = dealt([(3, 4)], 1000, 2)
    assert sorted(batch.slots for part in parts for batch in part) == [0, 4]
