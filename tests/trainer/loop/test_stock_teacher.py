"""A stock vLLM server is a teacher like any other: its tokenizer comes from files."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mopd_client.pool import TeacherPool
from mopd_client.services.vllm import VllmService
from mopd_client.teacher_client import TeacherClient
from mopd_client.tokenizers.pretrained import load_tokenizer
from mopd_losses.projection.cache import ProjectionCache
from mopd_protocol.errors import ConfigError
from mopd_trainer.teachers.connect import connect_teachers
from mopd_trainer.teachers.scoring import RolloutScorer
from tests import tiny_models
from tests.client.scripted_vllm import COMPLETIONS, GENERATE, ScriptedVllm
from tests.trainer.in_process import teacher_config
from tests.trainer.students import ids_of, rollout
from tests.trainer.teachers.test_scoring import IDENTITY

pytestmark = pytest.mark.anyio


def stock_teacher(folder: Path, **settings: Any) -> tuple[ScriptedVllm, Any, TeacherPool]:
    """A server with the tokenizer of ``folder``, the teacher's settings, and its client."""
    tokenizer = load_tokenizer(str(folder))
    server = ScriptedVllm(tokenizer.tokenizer, width=tokenizer.table.size, scale_out=True)
    config = teacher_config(kind="openai", tokenizer=str(folder), **settings)
    client = TeacherClient(
        "math",
        config.url,
        service=VllmService(str(folder)),
        transport=server.transport,
        verify=0,
    )
    return server, config, TeacherPool({"math": client})


async def test_a_stock_server_scores_the_students_ids(tmp_path: Path) -> None:
    tiny_models.digit_tokenizer().save_pretrained(tmp_path)
    settings = {"loss": {"type": "topk_kl", "divergence": "reverse_kl"}, "top_k": 3}
    server, config, clients = stock_teacher(tmp_path, support="student_topk", **settings)
    completion = ids_of("digit", "12 + 30 = 42", "<|end|>")
    likely = np.random.default_rng(0).permuted(
        np.tile(np.arange(5, 400, dtype=np.int32), (len(completion), 1)), axis=1
    )[:, :3]
    async with clients as pool:
        teachers = await connect_teachers(
            pool, {"math": config}, IDENTITY, ProjectionCache(), {}, wait_seconds=600.0
        )
        scorer = RolloutScorer(pool, teachers, IDENTITY.table)
        [example] = await scorer.score([rollout("digit", completion, topk_ids=likely)])

    [aligned_score] = example.scores
    _, request = server.requests_to(GENERATE)  # the first is the handshake's
    prompt = request["token_ids"][: -len(completion)]
    for row, chosen in enumerate(likely):
        expected = server.row([*prompt, *completion[:row]])[chosen]
        order = np.argsort(-expected)
        topk = aligned_score.score.topk
        assert topk.ids[row].tolist() == chosen[order].tolist()
        np.testing.assert_allclose(topk.logprobs[row], expected[order], rtol=1e-6)


async def test_a_stock_server_without_the_route_is_refused_for_the_students_ids(
    tmp_path: Path,
) -> None:
    tiny_models.digit_tokenizer().save_pretrained(tmp_path)
    settings = {"loss": {"type": "topk_kl"}, "support": "student_topk"}
    server, config, clients = stock_teacher(tmp_path, top_k=3, **settings)
    server.scale_out = False
    async with clients as pool:
        with pytest.raises(ConfigError) as caught:
            await connect_teachers(
                pool, {"math": config}, IDENTITY, ProjectionCache(), {}, wait_seconds=600.0
            )
    assert caught.value.key == "candidate_ids"


@pytest.mark.parametrize("loss", ["ctkd", "topk_kl"])
async def test_a_stock_server_scores_sampled_completions(tmp_path: Path, loss: str) -> None:
    same = loss == "topk_kl"
    own = tiny_models.digit_tokenizer() if same else tiny_models.whole_number_tokenizer()
    own.save_pretrained(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    server, config, clients = stock_teacher(tmp_path, loss={"type": loss})
    rollouts = [
        rollout("digit", ids_of("digit", "12 + 30 = 42", "<|end|>"), index=0),
        rollout("digit", ids_of("digit", "x9" * 200), index=1),
    ]
    async with clients as pool:
        teachers = await connect_teachers(
            pool, {"math": config}, IDENTITY, ProjectionCache(), {}, wait_seconds=600.0
        )
        scorer = RolloutScorer(pool, teachers, IDENTITY.table)
        [example] = await scorer.score(rollouts)

    assert teachers["math"].path == COMPLETIONS
    assert scorer.dropped == {"math/too_long": 1, "total": 1}
    [aligned_score] = example.scores
    expected = [*tokenizer.encoder.encode("12 + 30 = 42"), 0]
    assert aligned_score.score.completion.token_ids.tolist() == expected
    [requests] = [b["prompt"] for b in server.requests_to(COMPLETIONS) if len(b["prompt"]) != 4]
    prompt = requests[: -len(expected)]
    assert requests[len(prompt) :] == expected
    last = server.row(requests[:-1])
    np.testing.assert_allclose(
        aligned_score.score.topk.logprobs[-1], np.sort(last)[::-1][: config.top_k], rtol=1e-6
    )
    assert len(aligned_score.alignment)
