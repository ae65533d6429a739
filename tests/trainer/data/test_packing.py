"""Micro-batches: every completion token once, its weight and targets with it, under the budget."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mopd_losses.topk.topk_targets import TopKTargets, concatenate_targets, topk_targets
from mopd_trainer.data.examples import TrainingExample
from mopd_trainer.data.packing import MicroBatch, TeacherPart, pack
from tests.trainer.scored_examples import example
from tests.trainer.students import rollout

Slot = tuple[int, ...]

SIZES = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=8)


def targets_of(part: TeacherPart) -> TopKTargets:
    """Return a teacher's targets for a loss on the first rows of spans."""
    return concatenate_targets(
        [topk_targets(c.alignment, c.score.topk) for c in part.comparisons], part.slot_offsets
    )


def examples_of(sizes: list[tuple[int, int]]) -> list[TrainingExample]:
    """Examples with these many tokens of prompt and completion; every token its own id."""
    examples: list[TrainingExample] = []
    for index, (prompt, completion) in enumerate(sizes):
        first = 20 + 20 * index
        ids = range(first, first + prompt + completion)
        teachers = [{"math": 1.0}, {"code": 1.0}, {"math": 1.0, "code": 3.0}][index % 3]
        examples.append(
            example(
                rollout(
                    "digit",
                    ids[prompt:],
                    prompt_ids=ids[:prompt],
                    teachers=teachers,
                    index=index,
                ),
                seed=index,
            )
        )
    return examples


def packed(
    examples: list[TrainingExample], budget: int, *, in_one_row: bool = False
) -> list[MicroBatch]:
    return list(pack(examples, tokens_per_micro_batch=budget, packed=in_one_row))


def slots_of(batch: MicroBatch) -> list[Slot]:
    """For each slot all that a causal model sees where the slot is predicted."""
    contexts: list[Slot] = []
    for row, column in zip(batch.slot_rows.tolist(), batch.slot_columns.tolist(), strict=True):
        position = column if batch.position_ids is None else int(batch.position_ids[row, column])
        contexts.append(tuple(batch.input_ids[row, column - position : column + 1].tolist()))
    return contexts


@given(sizes=SIZES, budget=st.integers(1, 60), in_one_row=st.booleans())
def test_every_completion_token_is_predicted_once_from_its_prefix(
    sizes: list[tuple[int, int]], budget: int, in_one_row: bool
) -> None:
    examples = examples_of(sizes)
    batches = packed(examples, budget, in_one_row=in_one_row)
    actual = [context for batch in batches for context in slots_of(batch)]
    expected = [
        (*item.rollout.prompt_token_ids.tolist(), *item.rollout.completion.token_ids[:row].tolist())
        for item in examples
        for row in range(len(item.rollout.completion))
    ]
    assert sorted(actual) == sorted(expected)


@given(sizes=SIZES, budget=st.integers(1, 60))
def test_no_micro_batch_is_over_the_budget_but_a_single_example(
    sizes: list[tuple[int, int]], budget: int
) -> None:
    for batch in packed(examples_of(sizes), budget):
        assert batch.input_ids.numel() <= budget or len(batch.input_ids) == 1
        lengths = batch.attention_mask.sum(dim=1)
        assert (batch.attention_mask.diff(dim=1) <= 0).all()  # all padding is on the right
        assert int(lengths.max()) == batch.input_ids.shape[1]


@given(sizes=SIZES, budget=st.integers(1, 60))
def test_packed_rows_have_no_padding_and_are_full(
    sizes: list[tuple[int, int]], budget: int
) -> None:
    examples = examples_of(sizes)
    batches = packed(examples, budget, in_one_row=True)
    for batch in batches:
        assert batch.input_ids.shape[0] == 1
        assert batch.attention_mask.all()
        assert batch.input_ids.numel() <= budget or len(batch.examples) == 1
        assert sum(batch.example_slots) == batch.slots
    for batch, following in itertools.pairwise(batches):
        assert batch.input_ids.numel() + examples[following.examples[0]].length > budget


def test_a_generous_budget_takes_everything_at_once() -> None:
    sizes = [(3, 4), (2, 2), (7, 1)]
    assert len(packed(examples_of(sizes), 24)) == 1
    assert len(packed(examples_of(sizes), 23)) == 2


@given(sizes=SIZES, budget=st.integers(1, 60), in_one_row=st.booleans())
def test_weights_and_targets_go_with_their_tokens(
    sizes: list[tuple[int, int]], budget: int, in_one_row: bool
) -> None:
    examples = examples_of(sizes)
    expected: dict[str, dict[Slot, tuple[float, list[int]]]] = {"math": {}, "code": {}}
    for item in examples:
        prompt = item.rollout.prompt_token_ids.tolist()
        ids = item.rollout.completion.token_ids.tolist()
        for aligned_score in item.scores:
            alignment = aligned_score.alignment
            rows = dict(
                zip(
                    alignment.student_starts.tolist(),
                    alignment.teacher_starts.tolist(),
                    strict=True,
                )
            )
            for row in range(len(ids)):
                targets = aligned_score.score.topk.ids[rows[row]].tolist() if row in rows else []
                expected[aligned_score.teacher][(*prompt, *ids[:row])] = (
                    aligned_score.weight,
                    targets,
                )
    for batch in packed(examples, budget, in_one_row=in_one_row):
        contexts = slots_of(batch)
        for name, part in batch.teachers.items():
            targets = targets_of(part)
            by_slot = dict(zip(targets.positions.tolist(), targets.ids.tolist(), strict=True))
            for slot, context in enumerate(contexts):
                weight, targets = expected[name].get(context, (0.0, []))
                assert float(part.slot_weights[slot]) == pytest.approx(weight)
                assert by_slot.get(slot, []) == targets


def test_the_order_of_equal_lengths_does_not_depend_on_arrival() -> None:
    batch, *_ = packed(examples_of([(2, 3), (2, 3), (2, 3)]), 100)
    assert batch.input_ids[:, 0].tolist() == [20, 40, 60]
    assert list(batch.teachers) == ["code", "math"]


def test_targets_keep_their_values() -> None:
    [item] = examples_of([(2, 3)])
    [batch] = packed([item], 100)
    topk = item.scores[0].score.topk
    targets = targets_of(batch.teachers["math"])
    np.testing.assert_array_equal(targets.logprobs.numpy(), topk.logprobs)
    np.testing.assert_array_equal(targets.tail_logprobs.numpy(), topk.tail_logprobs)
    assert batch.slots == 3
    assert torch.equal(batch.teachers["math"].slot_weights, torch.ones(3))
