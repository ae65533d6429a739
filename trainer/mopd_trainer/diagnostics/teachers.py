"""Teachers on the student's completions: agreement of repeated scores, row order, coverage."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from mopd_losses.topk.full_vocabulary import HiddenScore
from mopd_protocol.requests import SequenceRequest
from mopd_protocol.topk_logprobs import TopKLogprobs
from mopd_trainer.data.examples import TrainingExample
from mopd_trainer.diagnostics.case import Case, loss_of
from mopd_trainer.diagnostics.finding import Finding
from mopd_trainer.teachers.connect import teacher_pool

_REPEATS = 8
#: Largest difference between two scores of one sequence, in nats.
_AGREEMENT = {"float32": 1e-3, "float64": 1e-3}
_HALF_AGREEMENT = 0.1
#: Least compared share of the student's tokens, and least mean top-k coverage.
_COMPARED, _COVERAGE = 0.5, 0.9


async def check_agreement(case: Case) -> AsyncIterator[Finding]:
    """Yield a finding per teacher: a sequence eight times, in a batch, at each replica."""
    for name, teacher in case.teachers.items():
        examples = case.examples_of(name)
        if teacher.config.support == "full" or not examples:
            continue
        sequences = [_request(example) for example in examples]
        repeated = sequences[0]
        replicas = teacher.config.url if len(teacher.config.url) > 1 else ()
        configs = {url: teacher.config.model_copy(update={"url": (url,)}) for url in replicas}
        scores: list[NDArray[np.float32]] = []
        async with teacher_pool(configs) as pool:
            for client in map(pool.client, replicas) if replicas else [case.pool.client(name)]:
                scores += [
                    score.logprobs
                    for batch in (
                        *await asyncio.gather(
                            *[client.score([repeated], top_k=1) for _ in range(_REPEATS)]
                        ),
                        (await client.score(sequences, top_k=1))[:1],
                    )
                    for score in batch
                ]
        gap = float(max(np.abs(score - scores[0]).max() for score in scores))
        limit = _AGREEMENT.get(teacher.manifest.dtype, _HALF_AGREEMENT)
        text = (
            f"teacher {name!r}: {len(scores)} scores of one completion differ by at most "
            f"{gap:.2g} nats (limit {limit:g} in {teacher.manifest.dtype})."
        )
        fix = "Serve the teacher in float32, or one replica: differences hide the signal."
        yield Finding("agreement", "ok" if gap <= limit else "failed", text, fix, {"nats": gap})


def _request(example: TrainingExample) -> SequenceRequest:
    """Return the completion in the teacher's tokens, so that only the service is compared."""
    (score,) = example.scores
    return SequenceRequest(
        messages=score.teacher_input.request.messages,
        tools=list(example.rollout.prompt.tools),
        chat_template_kwargs=score.teacher_input.request.chat_template_kwargs,
        completion_token_ids=score.score.completion.token_ids.tolist(),
    )


def check_row_shift(case: Case) -> Iterator[Finding]:
    """Yield a finding per teacher: moving its rows by one must raise the loss clearly."""
    for name, loss in case.losses.items():
        examples = [e for e in case.examples_of(name) if len(e.scores[0].score.topk) > 2]
        if not examples or isinstance(examples[0].scores[0].score, HiddenScore):
            continue
        with torch.no_grad():
            actual, earlier, later = (
                loss_of(case.student, name, loss, moved, case.config)[1]
                for moved in ([_shifted(e, by) for e in examples] for by in (0, -1, 1))
            )
        text = (
            f"teacher {name!r}: loss {actual:.4f} nats per token; {earlier:.4f} and {later:.4f} "
            "with its rows moved by one."
        )
        status = "ok" if actual < 0.95 * min(earlier, later) else "warning"
        if actual > min(earlier, later):
            status = "failed"
        fix = "Its rows are shifted (update the service), or it does not fit these prompts."
        numbers = {"actual": actual, "earlier": earlier, "later": later}
        yield Finding("row shift", status, text, fix, numbers)


def _shifted(example: TrainingExample, by: int) -> TrainingExample:
    (aligned,) = example.scores
    topk = aligned.score.topk
    rows = TopKLogprobs(
        ids=np.roll(topk.ids, by, axis=0),
        logprobs=np.roll(topk.logprobs, by, axis=0),
        token_logprobs=np.roll(topk.token_logprobs, by),
        tail_logprobs=np.roll(topk.tail_logprobs, by),
    )
    return replace(example, scores=(replace(aligned, score=replace(aligned.score, topk=rows)),))


def check_coverage(case: Case) -> Iterator[Finding]:
    """Yield a finding per teacher: aligned bytes and top-k coverage of the completions."""
    for name in case.losses:
        examples = case.examples_of(name)
        scored = [example.scores[0] for example in examples]
        requested = sum(name in rollout.prompt.teachers for rollout in case.rollouts)
        size = sum(len(each.rollout.completion.text) for each in examples)
        aligned = sum(s.alignment.aligned_bytes(s.teacher_input.completion) for s in scored)
        tails = [np.exp(s.score.topk.tail_logprobs.astype(np.float64)) for s in scored]
        coverage = 1 - float(np.concatenate(tails).mean()) if tails else 0.0
        scored_share = len(examples) / requested if requested else 1.0
        share = scored_share * (aligned / size if size else 1.0)
        text = (
            f"teacher {name!r}: {share:.0%} of the bytes of {requested} completions are compared, "
            f"top-k coverage {coverage:.1%}."
        )
        status = "ok" if share >= _COMPARED and coverage >= _COVERAGE else "warning"
        if not examples:
            status = "failed"
        fix = "Raise teachers.<name>.top_k for a low coverage; see `mopd align` for the bytes."
        numbers = {"compared_share": share, "coverage": coverage}
        yield Finding("coverage", status, text, fix, numbers)
