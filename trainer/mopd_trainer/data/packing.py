"""Pack training examples into micro-batches of tensors under a token budget.

Examples of similar length share a micro-batch: one behind the other in a single row (packed), if
the student supports it, or one per row, padded on the right. No trained position depends on other
examples or on padding, so packing changes memory and time, never the gradient.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mopd_losses.core.cross_entropy import IGNORED
from mopd_losses.core.loss import AlignedPair
from mopd_losses.sampled.clipped_ratio import AdvantageTargets
from mopd_trainer.config.settings import LossAverage
from mopd_trainer.data.averaging import SampleWeights, sample_weights
from mopd_trainer.data.examples import AlignedScore, TrainingExample
from mopd_trainer.data.importance import ImportanceWeights


@dataclass(frozen=True, eq=False)
class TeacherPart:
    """One teacher's scores of a micro-batch, from which its loss builds targets."""

    comparisons: tuple[AlignedPair, ...]
    slot_offsets: tuple[int, ...]  # first slot of each comparison in the micro-batch
    slot_weights: Tensor  # float32 [slots]: as the micro-batch's, of the teacher; 0 where unscored
    importance: Tensor  # float32 [slots]: from 0 to 1, see ``importance``; 0 where unscored


@dataclass(frozen=True, eq=False)
class RewardPart:
    """The sampled tokens of a micro-batch with an advantage."""

    targets: AdvantageTargets
    slot_weights: Tensor  # float32 [slots]: as the micro-batch's, of the reward term; else 0


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Rows of tokens, and the positions whose output rows predict completion tokens.

    A slot is a completion token; prompts and padding have no slot, so they enter no loss.
    """

    input_ids: Tensor  # int64 [rows, length]; [1, tokens of all examples] if packed
    attention_mask: Tensor  # int64 [rows, length]; 0 on padding
    slot_rows: Tensor  # int64 [slots]
    slot_columns: Tensor  # int64 [slots]: the position *before* the slot's token, which predicts it
    labels: Tensor  # int64 [slots]: the slot's token in a reference answer, else -100 (ignored)
    slot_weights: Tensor  # float32 [slots]: weight in the step's average, times the step's tokens
    teachers: dict[str, TeacherPart]
    rewards: RewardPart | None = None
    examples: tuple[int, ...] = ()  # index of each example in the step
    example_slots: tuple[int, ...] = ()  # completion tokens of each example
    position_ids: Tensor | None = None  # int64 [1, tokens], from 0 in each example, if packed

    @property
    def slots(self) -> int:
        """Number of completion tokens in the micro-batch."""
        return len(self.slot_rows)

    @property
    def has_labels(self) -> bool:
        """True if some completion tokens are of reference answers."""
        return bool((self.labels != IGNORED).any())

    def inputs(self, device: torch.device) -> dict[str, Tensor]:
        """Return the model's inputs; positions restart at each example of a row."""
        if self.position_ids is None:
            tensors = {"input_ids": self.input_ids, "attention_mask": self.attention_mask}
        else:
            tensors = {"input_ids": self.input_ids, "position_ids": self.position_ids}
        return {name: tensor.to(device) for name, tensor in tensors.items()}


def pack(
    examples: Sequence[TrainingExample],
    *,
    tokens_per_micro_batch: int,
    ranks: int = 1,
    average: LossAverage = "tokens",
    importance: ImportanceWeights | None = None,
    packed: bool = False,
) -> Iterator[MicroBatch]:
    """Yield micro-batches of all examples, longest first.

    An example longer than the budget gets a separate micro-batch. For several ranks the budget
    shrinks if that gives every rank the same number of micro-batches. The order depends only on
    the order of the examples.

    Args:
        average: what counts the same in the loss of a step.
        importance: weights of sampled tokens; default: none.
        packed: put all examples of a micro-batch in one row, see ``Student.packs``.
    """
    longest_first = sorted(range(len(examples)), key=lambda index: -examples[index].length)
    lengths = [examples[index].length for index in longest_first]
    weights = sample_weights(examples, average)
    budget = tokens_per_micro_batch
    if ranks > 1:
        rounds = -(-len(batch_sizes(lengths, budget, packed=packed)) // ranks)
        budget = _smallest_budget(lengths, budget, micro_batches=rounds * ranks, packed=packed)
    start = 0
    for size in batch_sizes(lengths, budget, packed=packed):
        indices = longest_first[start : start + size]
        yield micro_batch(
            [examples[index] for index in indices],
            indices,
            [weights[index] for index in indices],
            importance,
            packed=packed,
        )
        start += size


def split(micro_batches: Sequence[MicroBatch], ranks: int) -> list[list[MicroBatch]]:
    """Distribute micro-batches over ranks: equal counts, similar sizes at any time.

    Ranks synchronize at every layer of every micro-batch, so the micro-batches of one round have
    similar sizes, and the rank with the fewest tokens so far gets the largest of a round. Missing
    micro-batches are replaced by empty ones.
    """
    largest_first = sorted(micro_batches, key=lambda batch: -batch.input_ids.numel())
    parts: list[list[MicroBatch]] = [[] for _ in range(ranks)]
    tokens = [0] * ranks
    for start in range(0, len(largest_first), ranks):
        fewest_first = sorted(range(ranks), key=lambda rank: tokens[rank])
        batches = [*largest_first[start : start + ranks], *[_EMPTY] * ranks][:ranks]
        for rank, batch in zip(fewest_first, batches, strict=True):
            parts[rank].append(batch)
            tokens[rank] += batch.input_ids.numel()
    return parts


def batch_sizes(lengths: Sequence[int], budget: int, *, packed: bool = False) -> list[int]:
    """Group sequences of non-increasing lengths under a token budget, padding included.

    A sequence longer than the budget forms a group of one.
    """
    sizes: list[int] = []
    longest = tokens = 0
    for length in lengths:
        tokens += length if packed else longest
        if sizes and tokens <= budget:
            sizes[-1] += 1
        else:
            sizes.append(1)
            longest = tokens = length
    return sizes


def _smallest_budget(
    lengths: Sequence[int], budget: int, *, micro_batches: int, packed: bool
) -> int:
    """Return the smallest budget that yields at most this many micro-batches."""
    below = 0
    while budget - below > 1:
        middle = (below + budget) // 2
        if len(batch_sizes(lengths, middle, packed=packed)) <= micro_batches:
            budget = middle
        else:
            below = middle
    return budget


def micro_batch(
    examples: Sequence[TrainingExample],
    indices: Sequence[int] | None = None,
    weights: Sequence[SampleWeights] | None = None,
    importance: ImportanceWeights | None = None,
    *,
    packed: bool = False,
) -> MicroBatch:
    """Build one micro-batch with an example per row, or with all in one row.

    Args:
        indices: of the examples in their step; default ``0, 1, …``.
        weights: of the examples in their step; default: every token counts the same.
        importance: weights of sampled tokens; default: none.
        packed: see ``pack``.
    """
    weights = sample_weights(examples, "tokens") if weights is None else weights
    lengths = [example.length for example in examples]
    starts = [sum(lengths[:index]) if packed else 0 for index in range(len(lengths))]
    shape = (1, sum(lengths)) if packed else (len(lengths), max(lengths))
    input_ids = torch.zeros(shape, dtype=torch.int64)
    attention_mask = torch.zeros_like(input_ids)
    slot_rows: list[Tensor] = []
    slot_columns: list[Tensor] = []
    labels: list[Tensor] = []
    slot_offsets: list[int] = []
    slots = 0
    for index, (example, start) in enumerate(zip(examples, starts, strict=True)):
        row = 0 if packed else index
        prompt = torch.tensor(example.rollout.prompt_token_ids, dtype=torch.int64)
        completion = torch.tensor(example.rollout.completion.token_ids, dtype=torch.int64)
        input_ids[row, start : start + example.length] = torch.cat([prompt, completion])
        attention_mask[row, start : start + example.length] = 1
        slot_rows.append(torch.full((len(completion),), row))
        slot_columns.append(torch.arange(len(completion)) + start + len(prompt) - 1)
        is_reference = example.rollout.source == "answers"
        labels.append(completion if is_reference else torch.full_like(completion, IGNORED))
        slot_offsets.append(slots)
        slots += len(completion)
    return MicroBatch(
        input_ids=input_ids,
        attention_mask=attention_mask,
        slot_rows=torch.cat(slot_rows),
        slot_columns=torch.cat(slot_columns),
        labels=torch.cat(labels),
        slot_weights=torch.cat(
            [
                torch.full((len(example.rollout.completion),), each.labels)
                for example, each in zip(examples, weights, strict=True)
            ]
        ),
        teachers=_teacher_parts(examples, slot_offsets, slots, weights, importance),
        examples=tuple(range(len(examples)) if indices is None else indices),
        rewards=_reward_part(examples, slot_offsets, slots, weights),
        example_slots=tuple(len(example.rollout.completion) for example in examples),
        position_ids=torch.cat([*map(torch.arange, lengths)])[None] if packed else None,
    )


#: A token that predicts nothing, for a rank without a micro-batch.
_EMPTY = MicroBatch(
    input_ids=torch.zeros((1, 1), dtype=torch.int64),
    attention_mask=torch.ones((1, 1), dtype=torch.int64),
    slot_rows=torch.zeros(0, dtype=torch.int64),
    slot_columns=torch.zeros(0, dtype=torch.int64),
    labels=torch.zeros(0, dtype=torch.int64),
    slot_weights=torch.zeros(0),
    teachers={},
)


def _teacher_parts(
    examples: Sequence[TrainingExample],
    slot_offsets: Sequence[int],
    slots: int,
    sample_weights: Sequence[SampleWeights],
    importance_weights: ImportanceWeights | None,
) -> dict[str, TeacherPart]:
    scored: dict[str, list[tuple[TrainingExample, AlignedScore, int, float]]] = {}
    for example, offset, each in zip(examples, slot_offsets, sample_weights, strict=True):
        for score in example.scores:
            part = (example, score, offset, each.teachers[score.teacher])
            scored.setdefault(score.teacher, []).append(part)
    parts: dict[str, TeacherPart] = {}
    for teacher in sorted(scored):  # the sum of losses must not depend on the order of responses
        weights, importance = torch.zeros((2, slots))
        for example, score, offset, weight in scored[teacher]:
            part = slice(offset, offset + len(example.rollout.completion))
            selected = torch.zeros(part.stop - offset)
            selected[: len(score.teacher_input.completion)] = (
                1.0 if score.selected is None else torch.from_numpy(score.selected).float()
            )
            weights[part] = weight * selected
            importance[part] = selected * (
                1.0
                if importance_weights is None
                else torch.from_numpy(importance_weights.of(example.rollout, score))
            )
        parts[teacher] = TeacherPart(
            tuple(_aligned_pair(example, score) for example, score, _, _ in scored[teacher]),
            tuple(offset for _, _, offset, _ in scored[teacher]),
            weights,
            importance,
        )
    return parts


def _reward_part(
    examples: Sequence[TrainingExample],
    slot_offsets: Sequence[int],
    slots: int,
    sample_weights: Sequence[SampleWeights],
) -> RewardPart | None:
    weights = torch.zeros(slots)
    positions: list[Tensor] = []
    columns: list[tuple[Tensor, Tensor, Tensor]] = []
    for example, offset, each in zip(examples, slot_offsets, sample_weights, strict=True):
        sampled = example.rollout.sampled_logprobs
        if example.advantage is None or sampled is None:
            continue
        tokens = len(sampled)
        weights[offset : offset + tokens] = each.reward
        positions.append(torch.arange(offset, offset + tokens))
        ids = torch.tensor(example.rollout.completion.token_ids, dtype=torch.int64)
        columns.append((ids, torch.tensor(sampled), torch.full((tokens,), example.advantage)))
    if not positions:
        return None
    ids, logprobs, advantages = map(torch.cat, zip(*columns, strict=True))
    targets = AdvantageTargets(torch.cat(positions), ids, logprobs, advantages)
    return RewardPart(targets, weights)


def _aligned_pair(example: TrainingExample, score: AlignedScore) -> AlignedPair:
    completion, sampled = score.teacher_input.completion, example.rollout.sampled_logprobs
    return AlignedPair(
        student=completion,
        sampled_logprobs=None if sampled is None else sampled[: len(completion)],
        score=score.score,
        alignment=score.alignment,
        lookaheads=score.lookaheads,
    )
