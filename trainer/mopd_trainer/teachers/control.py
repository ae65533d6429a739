"""Control arms: a teacher that costs the same and has nothing to teach (``teachers.NAME.control``).

``shuffled`` scores each completion after the prompt of another line of the data. ``random`` moves
the probabilities of each row to other ids. ``constant_negative`` replaces the teacher by a policy
gradient with one advantage. What a control arm reaches is not due to the teacher.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from mopd_losses.alignment.byte_alignment import identity_alignment
from mopd_protocol.errors import ConfigError, DataError
from mopd_protocol.samples import Message, Prompt, Rollout, TeacherScore, messages_for
from mopd_protocol.tokenizers.token_table import TokenTable
from mopd_protocol.topk_logprobs import ABSENT_ID, TopKLogprobs
from mopd_trainer.config.teacher import TeacherConfig
from mopd_trainer.data.examples import AlignedScore
from mopd_trainer.data.teacher_input import token_view

#: ``constant_negative``: sampled tokens of a smaller probability have this advantage in nats.
UNLIKELY, ADVANTAGE = 0.5, -1.0


@dataclass(frozen=True)
class Controls:
    """The control arms of a run, by teacher."""

    arms: Mapping[str, str] = field(default_factory=dict[str, str])
    seed: int = 0
    prompts: Mapping[str, Mapping[int, tuple[Message, ...]]] = field(
        default_factory=dict[str, Mapping[int, tuple[Message, ...]]]
    )
    """Teacher -> index of a prompt -> messages of another prompt, for ``shuffled``."""

    @classmethod
    def of(
        cls, configs: Mapping[str, TeacherConfig], prompts: Sequence[Prompt], seed: int
    ) -> "Controls":
        """Assign other prompts to the prompts of each shuffled teacher.

        Raises:
            ConfigError: if all prompts of such a teacher are the same.
        """
        arms = {name: each.control for name, each in configs.items() if each.control is not None}
        others = {
            name: _other_prompts(name, [p for p in prompts if name in p.teachers], seed)
            for name, arm in arms.items()
            if arm == "shuffled"
        }
        return cls(arms, seed, others)

    def scored_rollout(self, teacher: str, rollout: Rollout) -> Rollout:
        """Return the rollout that the teacher scores: of another prompt, for ``shuffled``."""
        if self.arms.get(teacher) != "shuffled":
            return rollout
        prompt = rollout.prompt
        other = self.prompts[teacher].get(prompt.index)
        if other is None:
            raise DataError(
                f"teacher {teacher!r}: control 'shuffled' has no other prompt for prompt "
                f"{prompt.index}, which is not in the data",
                key="control",
            )
        return replace(rollout, prompt=replace(prompt, teacher_messages={teacher: other}))

    def aligned(self, aligned: AlignedScore, rollout: Rollout, table: TokenTable) -> AlignedScore:
        """Return the score of the control arm in place of a teacher's."""
        arm = self.arms.get(aligned.teacher)
        if arm == "random":
            seed = _seed(self.seed, rollout)
            score = random_score(aligned.score, table, np.random.default_rng(seed))
            return replace(aligned, score=score)
        if arm == "constant_negative":
            score = constant_negative_score(aligned.score.manifest_id, rollout)
            alignment = identity_alignment(len(rollout.completion))
            teacher_input = token_view(rollout)
            return replace(aligned, teacher_input=teacher_input, score=score, alignment=alignment)
        return aligned


def random_score(
    score: TeacherScore, table: TokenTable, generator: np.random.Generator
) -> TeacherScore:
    """Return a score whose rows have the same probabilities, of ids drawn at random.

    The completion's token has the probability of its entry, or an even share of the tail.
    """
    topk = score.topk
    ids = np.full_like(topk.ids, ABSENT_ID)
    known = np.flatnonzero(table.present)
    token_logprobs = np.empty(len(topk), dtype=np.float32)
    for row, token in enumerate(score.completion.token_ids.tolist()):
        count = int((topk.ids[row] >= 0).sum())
        ids[row, :count] = _distinct(known, count, generator)
        places = np.flatnonzero(ids[row] == token)
        rest = math.log(max(len(known) - count, 1))
        token_logprobs[row] = (
            topk.logprobs[row, places[0]] if len(places) else topk.tail_logprobs[row] - rest
        )
    changed = TopKLogprobs(ids, topk.logprobs, token_logprobs, topk.tail_logprobs)
    return TeacherScore(score.manifest_id, score.completion, changed)


def constant_negative_score(manifest_id: str, rollout: Rollout) -> TeacherScore:
    """Return a score of the student's tokens for a policy gradient: an advantage of ``ADVANTAGE``
    where the sampled token had a probability below ``UNLIKELY``, else 0."""
    assert rollout.sampled_logprobs is not None  # checked with the settings
    sampled = rollout.sampled_logprobs
    logprobs = sampled + np.where(sampled < math.log(UNLIKELY), ADVANTAGE, 0.0).astype(np.float32)
    rest = np.log1p(-np.exp(np.minimum(logprobs, -1e-6).astype(np.float64)))
    topk = TopKLogprobs(
        ids=rollout.completion.token_ids[:, None],
        logprobs=logprobs[:, None],
        token_logprobs=logprobs,
        tail_logprobs=rest.astype(np.float32),
    )
    return TeacherScore(manifest_id, rollout.completion, topk)


def _distinct(
    known: NDArray[np.int64], count: int, generator: np.random.Generator
) -> NDArray[np.int64]:
    """Return ``count`` distinct ids, in random order."""
    if count * 4 > len(known):
        return generator.permutation(known)[:count]
    drawn = np.empty(0, dtype=np.int64)
    while len(drawn) < count:  # faster than a permutation of a large vocabulary
        more = np.concatenate([drawn, generator.choice(known, count)])
        drawn = more[np.sort(np.unique(more, return_index=True)[1])]
    return drawn[:count]


def _other_prompts(
    name: str, prompts: Sequence[Prompt], seed: int
) -> dict[int, tuple[Message, ...]]:
    """Return for each prompt the messages of the next different prompt in a random order."""
    order = [prompts[n] for n in np.random.default_rng(seed).permutation(len(prompts))]
    others: dict[int, tuple[Message, ...]] = {}
    for place, prompt in enumerate(order):
        following = (order[(place + step) % len(order)] for step in range(1, len(order)))
        cycle = (messages_for(each, name) for each in following)
        other = next((each for each in cycle if each != messages_for(prompt, name)), None)
        if other is None:
            raise ConfigError(
                f"teachers.{name}.control: 'shuffled' needs different prompts of this teacher "
                f"(found {len(prompts)}, all the same). Add prompts, or use 'random'.",
                key=f"teachers.{name}.control",
            )
        others[prompt.index] = other
    return others


def _seed(seed: int, rollout: Rollout) -> int:
    """Return a seed of a completion; the same completion of later weights has another."""
    position = f"{seed},{rollout.prompt.index},{rollout.policy_version}".encode()
    digest = hashlib.sha256(position + rollout.completion.token_ids.tobytes()).digest()
    return int.from_bytes(digest[:8], "big")
