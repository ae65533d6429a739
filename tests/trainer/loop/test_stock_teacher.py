"""A stock vLLM server is a teacher like any other: its tokenizer comes from files."""

from pathlib import Path

import numpy as np
import pytest

from mopd_client.pool import TeacherPool
from mopd_client.services.vllm import VllmService
from mopd_client.teacher_client import TeacherClient
from mopd_client.tokenizers.pretrained import load_tokenizer
from mopd_losses.projection.cache import ProjectionCache
from mopd_trainer.teachers.connect import connect_teachers
from mopd_trainer.teachers.scoring import RolloutScorer
from tests import tiny_models
from tests.client.scripted_vllm import COMPLETIONS, ScriptedVllm
from tests.trainer.in_process import teacher_config
from tests.trainer.students import ids_of, rollout
from tests.trainer.teachers.test_scoring import IDENTITY

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("loss", ["ctkd", "topk_kl"])
async def test_a_stock_server_scores_sampled_completions(tmp_path: Path, loss: str) -> None:
    same = loss == "topk_kl"
    own = tiny_models.digit_tokenizer() if same else tiny_models.whole_number_tokenizer()
    own.save_pretrained(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    server = ScriptedVllm(tokenizer.tokenizer, width=tokenizer.table.size)
    config = teacher_config(kind="openai", tokenizer=str(tmp_path), loss={"type": loss})
    service = VllmService(str(tmp_path))
    client = TeacherClient(
        "math", config.url, service=service, transport=server.transport, verify=0
    )
    rollouts = [
        rollout("digit", ids_of("digit", "12 + 30 = 42", "<|end|>"), index=0),
        rollout("digit", ids_of("digit", "x9" * 200), index=1),
    ]
    async with TeacherPool({"math": client}) as pool:
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
