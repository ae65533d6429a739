"""Random completions of pairs of real tiny tokenizers, for prefix KL."""

import random
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from mopd_losses.core.loss import AlignedPair, Targets
from tests.losses.permuted import permuted
from tests.losses.prefix_pairs import (
    PAIRS,
    ExactScore,
    ExactTopK,
    LongestMatch,
    Pair,
    Tongue,
    gapped_pair,
    random_completion,
    random_pair,
)
from tests.losses.problems import Problem, with_ids
from tests.reference import prefix_kl as slow


@dataclass(frozen=True, eq=False)
class PrefixProblem(Problem):
    """Completions of two tokenizers that are known by their bytes."""

    pair: Any = None
    bounds: bool = True

    def targets(self, divergence: str, mass_floor: float) -> Targets:
        """Build the targets of all completions."""
        loss = self.pair.loss(mass_floor, divergence=divergence, bounds=self.bounds)
        return loss.targets(self.comparisons, self.offsets)

    def of_twin(self) -> Self:
        """Return the problem without bounds."""
        return replace(self, bounds=False)

    def columns(self, targets: Any) -> list[int]:
        """Return a dozen of the student ids that the targets read."""
        ids = self.pair.preparation.student.ids
        ranges = zip(targets.named.starts.tolist(), targets.named.stops.tolist(), strict=True)
        named = {token for start, stop in ranges for token in ids[start:stop].tolist()}
        return sorted({*named, *targets.step_ids.tolist(), 0})[:12]

    def sides(self, number: int) -> tuple[slow.Side, slow.Side]:
        """Return one completion's student and teacher for the slow twin."""
        comparison, offset = self.comparisons[number], self.offsets[number]
        tokens = comparison.student.token_ids.tolist()
        logits = self.logits[offset : offset + len(tokens)].detach()
        table = self.pair.student.family.table
        every = [i for i in range(table.size) if table.present[i]]
        student = self.pair.student.side(
            tokens,
            logits.masked_fill(~self.pair.real_ids, -torch.inf).log_softmax(dim=1),
            [every] * len(tokens),
        )
        score: Any = comparison.score
        tokens = score.completion.token_ids.tolist()
        topk = score.topk
        width = self.pair.teacher.family.logit_width
        logprobs = torch.full((len(tokens), width), -torch.inf, dtype=torch.float64)
        logprobs.scatter_(1, torch.tensor(topk.ids), torch.tensor(topk.logprobs))
        logprobs[torch.arange(len(tokens)), tokens] = torch.tensor(topk.token_logprobs)
        kept = [[token for token in row if token >= 0] for row in topk.ids.tolist()]
        return student, self.pair.teacher.side(tokens, logprobs, kept)

    def renumbered(self, seed: int) -> tuple["PrefixProblem", NDArray[np.int64]]:
        """Permute the ids of both vocabularies; also return the old student id of each new one."""
        tongues: list[Tongue] = []
        numbers: list[NDArray[np.int64]] = []
        for tongue, number in zip((self.pair.student, self.pair.teacher), (0, 1), strict=True):
            ids = random.Random(seed + number).sample(range(tongue.end), tongue.end)
            ids.append(tongue.end)  # added tokens are numbered after the model's
            family = permuted(tongue.family, ids=dict(enumerate(ids)))
            tongues.append(Tongue(family, LongestMatch(family.table)))
            numbers.append(np.array(ids))
        comparisons = [self._renumbered(c, numbers) for c in self.comparisons]
        order = np.arange(self.logits.shape[1])
        order[numbers[0]] = np.arange(len(numbers[0]))
        logits = self.logits[:, torch.tensor(order)]
        pair = Pair(*tongues)
        return replace(self, logits=logits, comparisons=comparisons, pair=pair), order

    def _renumbered(self, comparison: AlignedPair, numbers: list[NDArray[np.int64]]) -> AlignedPair:
        score: Any = comparison.score
        return replace(
            comparison,
            student=with_ids(comparison.student, numbers[0][comparison.student.token_ids]),
            score=ExactScore(
                with_ids(score.completion, numbers[1][score.completion.token_ids]),
                ExactTopK(
                    numbers[1][score.topk.ids],
                    score.topk.logprobs,
                    score.topk.token_logprobs,
                    score.topk.tail_logprobs,
                ),
            ),
        )


def prefix_problem(seed: int, completions: int | None = None) -> PrefixProblem:
    """Any vocabularies, any cuts of the student's, a teacher that scores the text or another."""
    draw = random.Random(seed)
    pair = (random_pair if seed // PAIRS % 2 else gapped_pair)(seed % PAIRS)
    count = draw.randint(0, 2) if completions is None else completions
    parts = [random_completion(seed + number, pair=pair) for number in range(count)]
    width = pair.student.family.logit_width
    blocks = [torch.zeros(0, width, dtype=torch.float64)]
    offsets: list[int] = []
    for part in parts:
        gap = draw.randint(0, 1)  # a completion of another teacher between
        blocks += [torch.zeros(gap, width, dtype=torch.float64)]
        offsets.append(sum(map(len, blocks)))
        blocks.append(part.logits)
    return PrefixProblem(
        logits=torch.cat(blocks),
        real=pair.real_ids.numpy(),
        comparisons=[part.comparison for part in parts],
        offsets=offsets,
        teacher_size=pair.teacher.family.table.size,
        partner={},
        weights=np.zeros((0, 0)),
        pair=pair,
    )
