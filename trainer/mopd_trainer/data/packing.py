"""Training examples -> micro-batches of tensors under a token budget. Numpy becomes torch here.

Examples of similar length share a micro-batch, one a row, padded on the right: under a causal
mask nothing that a trained position sees depends on its neighbours or on the padding, so how
examples are put together changes memory and time, never the gradient.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mopd_losses.core.cross_entropy import IGNORED
from mopd_losses.core.loss import AlignedPair
from mopd_trainer.data.examples import AlignedScore, TrainingExample


@dataclass(frozen=True, eq=False)
class TeacherPart:
    """What one teacher says about a micro-batch, for its loss to make targets of."""

    comparisons: tuple[AlignedPair, ...]
    slot_offsets: tuple[int, ...]  # each comparison's first slot in the micro-batch
    slot_weights: Tensor  # float32 [slots]: the teacher's share of each token; 0 where not asked


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Rows of tokens, and the positions whose output rows predict completion tokens.

    A slot is a completion token; prompts and padding have none, so they can enter no loss.
    """

    input_ids: Tensor  # int64 [rows, length]
    attention_mask: Tensor  # int64 [rows, length]; 0 on padding
    slot_rows: Tensor  # int64 [slots]
    slot_columns: Tensor  # int64 [slots]: the position *before* the slot's token, which predicts it
    labels: Tensor  # int64 [slots]: the slot's token in a reference answer, else -100 (ignored)
    teachers: dict[str, TeacherPart]
    #: Number of an example that is to be shown -> its slots.
    shown: Mapping[int, range] = field(default_factory=dict[int, range])

    @property
    def slots(self) -> int:
        """Completion tokens in the micro-batch."""
        return len(self.slot_rows)

    @property
    def answers(self) -> bool:
        """Whether there are tokens of reference answers among them."""
        return bool((self.labels != IGNORED).any())


def pack(
    examples: Sequence[TrainingExample],
    *,
    tokens_per_micro_batch: int,
    ranks: int = 1,
    shown: Sequence[TrainingExample] = (),
) -> Iterator[MicroBatch]:
    """Micro-batches of all examples, longest first; an example over the budget stands alone.

    For several ranks they are made smaller where that lets all ranks have as many of them: one
    micro-batch for two ranks would leave one with nothing to do.

    The order is a function of the examples' order alone, not of when their scores arrived.

    Args:
        shown: those of the examples whose slots must be found again, by their place here.
    """
    numbers = {id(example): number for number, example in enumerate(shown)}
    longest_first = sorted(examples, key=lambda example: -example.length)
    lengths = [example.length for example in longest_first]
    budget = tokens_per_micro_batch
    if ranks > 1:
        rounds = -(-len(batch_sizes(lengths, budget)) // ranks)
        budget = _smallest_budget(lengths, budget, micro_batches=rounds * ranks)
    start = 0
    for size in batch_sizes(lengths, budget):
        yield micro_batch(longest_first[start : start + size], numbers)
        start += size


def split(micro_batches: Sequence[MicroBatch], ranks: int) -> list[list[MicroBatch]]:
    """Every rank's share: as many micro-batches for each, about as large at any one time.

    Ranks wait for each other at every layer of every micro-batch, so those of one round are of
    about one size; the one with the least so far gets the largest of a round. Who would have fewer
    gets empty ones, and takes part.
    """
    largest_first = sorted(micro_batches, key=lambda batch: -batch.input_ids.numel())
    parts: list[list[MicroBatch]] = [[] for _ in range(ranks)]
    tokens = [0] * ranks
    for start in range(0, len(largest_first), ranks):
        waiting = sorted(range(ranks), key=lambda rank: tokens[rank])
        given = [*largest_first[start : start + ranks], *[_EMPTY] * ranks][:ranks]
        for rank, batch in zip(waiting, given, strict=True):
            parts[rank].append(batch)
            tokens[rank] += batch.input_ids.numel()
    return parts


def batch_sizes(lengths: Sequence[int], budget: int) -> list[int]:
    """How many sequences go together under a budget of tokens, padding counted, for lengths that do
    not increase; one that is longer goes alone."""
    sizes: list[int] = []
    longest = 0
    for length in lengths:
        if sizes and (sizes[-1] + 1) * longest <= budget:
            sizes[-1] += 1
        else:
            sizes.append(1)
            longest = length
    return sizes


def _smallest_budget(lengths: Sequence[int], budget: int, *, micro_batches: int) -> int:
    """The smallest that makes at most so many, as ``budget`` does; fewer tokens, never fewer
    micro-batches."""
    below = 0
    while budget - below > 1:
        middle = (below + budget) // 2
        if len(batch_sizes(lengths, middle)) <= micro_batches:
            budget = middle
        else:
            below = middle
    return budget


def micro_batch(
    examples: Sequence[TrainingExample], numbers: Mapping[int, int] | None = None
) -> MicroBatch:
    """The examples as one micro-batch, one a row.

    Args:
        numbers: of those that are to be shown, by ``id``.
    """
    length = max(example.length for example in examples)
    input_ids = torch.zeros((len(examples), length), dtype=torch.int64)
    attention_mask = torch.zeros_like(input_ids)
    slot_rows: list[Tensor] = []
    slot_columns: list[Tensor] = []
    labels: list[Tensor] = []
    slot_offsets: list[int] = []
    shown: dict[int, range] = {}
    slots = 0
    for row, example in enumerate(examples):
        prompt = torch.tensor(example.rollout.prompt_token_ids, dtype=torch.int64)
        completion = torch.tensor(example.rollout.completion.token_ids, dtype=torch.int64)
        input_ids[row, : example.length] = torch.cat([prompt, completion])
        attention_mask[row, : example.length] = 1
        slot_rows.append(torch.full((len(completion),), row))
        slot_columns.append(torch.arange(len(completion)) + len(prompt) - 1)
        answer = example.rollout.source == "answers"
        labels.append(completion if answer else torch.full_like(completion, IGNORED))
        slot_offsets.append(slots)
        if numbers and id(example) in numbers:
            shown[numbers[id(example)]] = range(slots, slots + len(completion))
        slots += len(completion)
    return MicroBatch(
        input_ids=input_ids,
        attention_mask=attention_mask,
        slot_rows=torch.cat(slot_rows),
        slot_columns=torch.cat(slot_columns),
        labels=torch.cat(labels),
        teachers=_teacher_parts(examples, slot_offsets, slots),
        shown=shown,
    )


#: One token that predicts nothing: the work of a rank that has none.
_EMPTY = MicroBatch(
    input_ids=torch.zeros((1, 1), dtype=torch.int64),
    attention_mask=torch.ones((1, 1), dtype=torch.int64),
    slot_rows=torch.zeros(0, dtype=torch.int64),
    slot_columns=torch.zeros(0, dtype=torch.int64),
    labels=torch.zeros(0, dtype=torch.int64),
    teachers={},
)


def _teacher_parts(
    examples: Sequence[TrainingExample], slot_offsets: Sequence[int], slots: int
) -> dict[str, TeacherPart]:
    judged: dict[str, list[tuple[TrainingExample, AlignedScore, int]]] = {}
    for example, offset in zip(examples, slot_offsets, strict=True):
        for judgement in example.judgements:
            judged.setdefault(judgement.teacher, []).append((example, judgement, offset))
    found: dict[str, TeacherPart] = {}
    for teacher in sorted(judged):  # the sum of losses must not depend on who answered first
        weights = torch.zeros(slots)
        for example, judgement, offset in judged[teacher]:
            weights[offset : offset + len(example.rollout.completion)] = judgement.weight
        found[teacher] = TeacherPart(
            tuple(_comparison(example, judgement) for example, judgement, _ in judged[teacher]),
            tuple(offset for _, _, offset in judged[teacher]),
            weights,
        )
    return found


def _comparison(example: TrainingExample, judgement: AlignedScore) -> AlignedPair:
    return AlignedPair(
        student=judgement.view.completion,
        sampled_logprobs=example.rollout.sampled_logprobs,
        score=judgement.score,
        alignment=judgement.alignment,
    )
