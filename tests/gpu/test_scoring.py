"""Teachers on the device, in process and as a service: scores are the CPU's, and weights move."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mopd_protocol.topk_logprobs import TopKLogprobs
from mopd_server.app import create_app
from mopd_server.scoring.service import TeacherService
from mopd_server.settings import TeacherSettings
from mopd_trainer.teachers.local.model import LocalModel, LocalTask, ScoreOptions, head_on
from tests import tiny_models
from tests.server.tiny_teachers import scores_of
from tests.trainer.students import CPU, FAMILIES, model_of, table, tokenizer

pytestmark = pytest.mark.gpu

TOP_K = 7
LENGTHS = ((3, 20), (1, 1), (40, 2), (40, 9), (5, 5), (90, 40))
#: Nats by which float32 differs between devices, and bfloat16, whose logits have 8 bits.
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.05}


def tasks(*, with_candidates: bool) -> list[LocalTask]:
    """Return sequences of many lengths, two of them with one prompt."""
    generator = np.random.default_rng(1)
    drawn: list[LocalTask] = []
    for prompt, completion in LENGTHS:
        ids = generator.integers(6, 400, prompt + completion).astype(np.int32)
        if drawn and prompt == len(drawn[-1].prompt_ids):
            ids[:prompt] = drawn[-1].prompt_ids
        rows = tuple(
            generator.choice(400, size, replace=False).astype(np.int32)
            for size in generator.integers(1, TOP_K, completion)
        )
        drawn.append(LocalTask(ids[:prompt], ids[prompt:], rows if with_candidates else None))
    return drawn


def require_close(actual: TopKLogprobs, expected: TopKLogprobs, atol: float = 1e-4) -> None:
    """Compare values; ids may be exchanged where their values are equal."""
    for name in ("logprobs", "token_logprobs", "tail_logprobs"):
        np.testing.assert_allclose(getattr(actual, name), getattr(expected, name), atol=atol)
    finite = np.maximum(expected.logprobs, -1e9)
    clear = np.abs(np.diff(finite, axis=1, append=-1e9)) > 2 * atol
    clear[:, 1:] &= clear[:, :-1]
    clear[:, -1] = False  # the next one is not known
    assert (actual.ids[clear] == expected.ids[clear]).all()


def local(family: str, where: torch.device) -> LocalModel:
    model = model_of(family, sharpness=12.0)
    return LocalModel(copy.deepcopy(model), table(FAMILIES[family][1]), where, 64)


@pytest.mark.parametrize("with_candidates", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_teacher_in_process_scores_as_on_the_cpu(
    family: str, with_candidates: bool, device: torch.device
) -> None:
    chosen, options = tasks(with_candidates=with_candidates), ScoreOptions(TOP_K, 0.7, hidden=True)
    own, others = (local(family, each).score(chosen, options) for each in (device, CPU))
    for score, other in zip(own, others, strict=True):
        require_close(score.topk, other.topk)
        assert score.hidden is not None
        assert other.hidden is not None
        torch.testing.assert_close(score.hidden, other.hidden, rtol=1e-4, atol=1e-4)


def test_weights_of_a_teacher_in_process_move(device: torch.device, full_size: bool) -> None:
    chosen, options = tasks(with_candidates=False), ScoreOptions(TOP_K)
    teacher = local("qwen", device)
    weights = sum(tensor.nbytes for tensor, _ in teacher._cpu_tensors)
    first = teacher.score(chosen, options)  # products keep a workspace on the device
    teacher.offload()
    offloaded = torch.cuda.memory_allocated() if full_size else 0
    for _ in range(2):
        teacher.load_weights()
        assert {tensor.device for tensor, _ in teacher._cpu_tensors} == {device}
        if full_size:
            assert torch.cuda.memory_allocated() - offloaded >= weights
        for score, other in zip(teacher.score(chosen, options), first, strict=True):
            require_close(score.topk, other.topk, atol=1e-6)
        teacher.offload()
        assert {tensor.device for tensor, _ in teacher._cpu_tensors} == {CPU}
        if full_size:
            assert torch.cuda.memory_allocated() == offloaded
    with pytest.raises(RuntimeError):
        teacher.score(chosen, options)


def test_a_teacher_s_head_stays_on_the_device(device: torch.device) -> None:
    teacher = local("qwen", device)
    assert teacher.head is not None
    kept = head_on(teacher.head, device)
    expected = kept.weight.cpu()
    teacher.offload()
    assert (kept.weight.device, kept.real_ids.device) == (device, device)
    assert torch.equal(kept.weight.cpu(), expected)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_service_scores_as_on_the_cpu(
    family: str, dtype: Any, tmp_path: Path, device: torch.device
) -> None:
    name = FAMILIES[family][1]
    tiny_models.save(model_of(family, sharpness=3.0), tokenizer(name), tmp_path)
    bodies = [
        {
            "prompt_token_ids": task.prompt_ids.tolist(),
            "completion_token_ids": task.completion_ids.tolist(),
        }
        | (
            {}
            if task.candidate_ids is None
            else {"candidate_ids": [row.tolist() for row in task.candidate_ids]}
        )
        for with_candidates in (False, True)
        for task in tasks(with_candidates=with_candidates)
    ]
    scored: list[list[dict[str, Any]]] = []
    for where in (device, CPU):
        settings = TeacherSettings(
            model=str(tmp_path), device=str(where), dtype=dtype, max_batch_tokens=64
        )
        service = TeacherService.load(settings)
        service.warm_up()
        assert service.ready
        engine: Any = service._engine
        assert engine._model.device == where
        scored.append(scores_of(create_app(service), *bodies, top_k=TOP_K))
        service.close()
    for own, other in zip(*scored, strict=True):
        assert own.keys() == other.keys()
        for field in ("token_logprobs", "tail_logprobs"):
            np.testing.assert_allclose(own[field], other[field], atol=TOLERANCE[dtype])
        kept, expected = (
            np.concatenate(each["topk_logprobs"]).astype(np.float64) for each in (own, other)
        )  # NaN where an entry is missing
        np.testing.assert_allclose(kept, expected, atol=TOLERANCE[dtype])
