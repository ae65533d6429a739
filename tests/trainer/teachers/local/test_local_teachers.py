"""Tests of local teachers: scores, loading and offloading, and whole runs."""

import asyncio
import json
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from rich.console import Console

from mopd_client.services.expectation import Expectation
from mopd_client.teacher_client import TeacherClient
from mopd_losses.topk.full_vocabulary import HiddenScore
from mopd_protocol.errors import ConfigError, TeacherError, TeacherMismatchError
from mopd_protocol.requests import SequenceRequest
from mopd_protocol.samples import Message
from mopd_trainer.config.run import RunConfig
from mopd_trainer.config.teacher import TeacherConfig
from mopd_trainer.distributed.process_group import Ranks
from mopd_trainer.launch.preflight import check_run
from mopd_trainer.teachers.local.client import LocalTeacher, TeacherLock
from mopd_trainer.teachers.local.model import LocalModel, LocalTask, ScoreOptions
from mopd_trainer.teachers.local.residency import LocalTeachers
from mopd_trainer.teachers.local.row_scores import row_scores
from tests import tiny_models
from tests.broker import Broker
from tests.trainer.ranked import on_ranks
from tests.trainer.runs import prompt_lines, run_values, write_lines
from tests.trainer.students import CPU, FAMILIES, model_of, table, tokenizer
from tests.trainer.whole_runs import journal, run_here, weights

TEXT = "12 + 30 = 42"


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory, models: dict[str, Path]) -> dict[str, Path]:
    """``same`` has the student's tokenizer, ``other`` another one."""
    same = tiny_models.save(
        model_of("qwen", 5, sharpness=4.0), tokenizer("digit"), tmp_path_factory.mktemp("same")
    )
    return {"same": same, "other": models["math"]}


@pytest.fixture
def services(broker: Broker, folders: dict[str, Path]) -> dict[str, str]:
    """The same models behind HTTP."""
    return broker.serve(folders)


def local(folder: Path, **settings: Any) -> dict[str, Any]:
    return {"placement": "local", "model": str(folder), "top_k": 8, **settings}


def loaded_teacher(settings: dict[str, Any], turn: TeacherLock | None = None) -> LocalTeacher:
    """Return one loaded local teacher."""
    config = TeacherConfig.model_validate(settings)
    turn = turn or TeacherLock()
    teacher = LocalTeacher("math", config, turn, device="cpu")
    tokens = asyncio.run(teacher.tokenizer())
    turn.models = LocalTeachers(
        {"math": config}, {"math": tokens.table}, device=CPU, tokens_per_batch=64, ranks=Ranks()
    )
    return teacher


def sequence(**settings: Any) -> SequenceRequest:
    messages = [Message(role="user", content="3 + 4 =")]
    return SequenceRequest(messages=messages, **{"completion": TEXT, **settings})


@pytest.mark.slow
def test_local_scores_equal_those_of_the_service(
    folders: dict[str, Path], services: dict[str, str]
) -> None:
    """The manifests are equal, too, so that a run may switch between them."""
    requests = [
        sequence(finished=True),
        sequence(completion="fox " * 30),
        sequence(completion=""),
        sequence(completion="", finished=True),
    ]

    async def over_http(name: str, requests: list[SequenceRequest], temperature: float) -> Any:
        async with TeacherClient(name, [services[name]]) as client:
            return await client.handshake(), await client.score(
                requests, top_k=5, temperature=temperature
            )

    for name, folder in folders.items():
        teacher = loaded_teacher(local(folder, revision="main"))  # a folder has no revisions
        for temperature in (1.0, 0.7):
            manifest, expected_scores = asyncio.run(over_http(name, requests, temperature))
            actual_scores = asyncio.run(teacher.score(requests, top_k=5, temperature=temperature))
            assert asyncio.run(teacher.handshake()).manifest_id == manifest.manifest_id
            for actual, other in zip(actual_scores, expected_scores, strict=True):
                assert_same_score(actual, other)
        rows = len(actual_scores[0].completion)
        candidates = [list(range(10 + row, 10 + row + row % 4)) for row in range(rows)]
        chosen = [sequence(finished=True, candidate_ids=candidates)]
        _, expected_scores = asyncio.run(over_http(name, chosen, 1.0))
        actual_scores = asyncio.run(teacher.score(chosen, top_k=5))
        assert_same_score(actual_scores[0], expected_scores[0])


def assert_same_score(actual_scores: Any, expected_scores: Any) -> None:
    assert actual_scores.manifest_id == expected_scores.manifest_id
    assert (
        actual_scores.completion.token_ids.tolist() == expected_scores.completion.token_ids.tolist()
    )
    assert (
        actual_scores.completion.byte_ends.tolist() == expected_scores.completion.byte_ends.tolist()
    )
    assert (actual_scores.topk.ids == expected_scores.topk.ids).all()
    for name in ("logprobs", "token_logprobs", "tail_logprobs"):
        actual, other = getattr(actual_scores.topk, name), getattr(expected_scores.topk, name)
        np.testing.assert_allclose(actual, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_those_of_the_model_on_the_bare_sequence(family: str) -> None:
    """The expected rows are from full logits of one sequence; batch and padding change nothing."""
    model, known = model_of(family, 3, sharpness=3.0), table(FAMILIES[family][1])
    real = torch.from_numpy(known.real_ids(model.get_output_embeddings().weight.shape[0]))
    ids = np.flatnonzero(known.present).astype(np.int32)
    tasks = [
        LocalTask(ids[:3], ids[20:29]),
        LocalTask(ids[5:6], ids[40:41]),
        LocalTask(ids[5:9], ids[:0]),
        LocalTask(ids[7:20], ids[50:90]),
    ]
    teacher = LocalModel(model, known, CPU, tokens_per_batch=30)
    results = teacher.score(tasks, ScoreOptions(6, hidden=True))
    assert teacher.head is not None
    for task, score in zip(tasks, results, strict=True):
        assert len(score.topk) == len(task.completion_ids)
        read = torch.from_numpy(np.concatenate([task.prompt_ids, task.completion_ids])).long()
        logits = model(read[None]).logits[0].masked_fill(~real, -torch.inf)
        for row, token in enumerate(task.completion_ids):
            expected = logits[len(task.prompt_ids) - 1 + row].double().log_softmax(0)
            best = expected.topk(6)
            assert score.topk.ids[row].tolist() == best.indices.tolist()
            np.testing.assert_allclose(score.topk.logprobs[row], best.values.detach(), atol=1e-5)
            assert score.topk.token_logprobs[row] == pytest.approx(
                expected[int(token)].item(), abs=1e-5
            )
            rest = expected.clone()
            rest[best.indices] = -torch.inf
            tail = rest.logsumexp(0).item()
            assert score.topk.tail_logprobs[row] == pytest.approx(tail, abs=1e-4)
            assert score.hidden is not None
            row_logprobs = teacher.head.logits(score.hidden[row][None])[0].log_softmax(0)
            torch.testing.assert_close(
                row_logprobs[real], expected[real].float(), atol=1e-5, rtol=1e-5
            )


def test_row_scores_are_at_the_requested_temperature() -> None:
    """Entries, token and tail are of the softmax of logits / temperature."""
    logits = torch.randn(3, 11, generator=torch.Generator().manual_seed(1))
    scores = row_scores(logits, torch.tensor([4, 0, 10]), top_k=2, temperature=0.5)
    expected = (logits.double() / 0.5).log_softmax(dim=1)
    best = expected.topk(2, dim=1)
    assert torch.equal(scores.ids, best.indices)
    torch.testing.assert_close(scores.logprobs.double(), best.values, atol=1e-6, rtol=0)
    tokens = expected[torch.arange(3), torch.tensor([4, 0, 10])]
    torch.testing.assert_close(scores.token_logprobs.double(), tokens, atol=1e-6, rtol=0)
    tails = (1 - best.values.exp().sum(dim=1)).log()
    torch.testing.assert_close(scores.tail_logprobs.double(), tails, atol=1e-5, rtol=0)


def test_model_that_changes_its_logits_is_scored_by_full_logits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mopd_trainer.teachers.local.model.output_head", lambda *_: None)
    by_whole = LocalModel(model_of("llama", 3), table("sentencepiece"), CPU, 64)
    monkeypatch.undo()
    by_head = LocalModel(model_of("llama", 3), table("sentencepiece"), CPU, 64)
    assert by_whole.head is None
    ids = np.arange(270, 300, dtype=np.int32)
    tasks = [LocalTask(ids[:4], ids[4:10]), LocalTask(ids[:2], ids[10:30])]
    pairs = zip(
        by_whole.score(tasks, ScoreOptions(4)), by_head.score(tasks, ScoreOptions(4)), strict=True
    )
    for actual_scores, expected_scores in pairs:
        np.testing.assert_allclose(
            actual_scores.topk.logprobs, expected_scores.topk.logprobs, atol=1e-6
        )


def test_an_offloaded_teacher_does_not_score() -> None:
    teacher = LocalModel(model_of("qwen"), table("digit"), CPU, 64)
    task = LocalTask(np.array([5], dtype=np.int32), np.array([6], dtype=np.int32))
    before = teacher.score([task], ScoreOptions(2))[0].topk.logprobs
    teacher.offload()
    with pytest.raises(RuntimeError, match="offloaded"):
        teacher.score([task], ScoreOptions(2))
    teacher.load_weights()
    assert (teacher.score([task], ScoreOptions(2))[0].topk.logprobs == before).all()


class Watched(LocalTeachers):
    """Records which teachers were loaded at each call, and the number of sequences."""

    def __init__(self, *arguments: Any, **known: Any) -> None:
        super().__init__(*arguments, **known)
        self.seen: list[tuple[list[str], int]] = []
        for name, model in self._models.items():
            model.score = self._watching(name, model.score)  # pyright: ignore[reportAttributeAccessIssue]

    def _watching(self, name: str, score: Any) -> Any:
        def watched(tasks: Any, options: Any) -> Any:
            assert self.loaded == [name]
            self.seen.append((self.loaded, len(tasks)))
            return score(tasks, options)

        return watched


def test_concurrent_calls_load_each_teacher_once(folders: dict[str, Path]) -> None:
    """Eight concurrent calls to two teachers load each once; a rejected call affects no other."""
    configs = {
        name: TeacherConfig.model_validate(local(folder)) for name, folder in folders.items()
    }

    async def score_all() -> tuple[Watched, list[Any], dict[str, LocalTeacher]]:
        turn = TeacherLock()
        teachers = {n: LocalTeacher(n, c, turn, device="cpu") for n, c in configs.items()}
        tables = {name: (await teacher.tokenizer()).table for name, teacher in teachers.items()}
        turn.models = models = Watched(
            configs, tables, device=CPU, tokens_per_batch=64, ranks=Ranks()
        )
        assert models.loaded == []
        refused = sequence(completion="fox " * 300)  # longer than the model's positions
        calls = [
            teacher.score([refused] if at == 2 else [sequence(), sequence()], top_k=3)
            for at in range(4)
            for teacher in teachers.values()
        ]
        return models, await asyncio.gather(*calls, return_exceptions=True), teachers

    models, outcomes, teachers = asyncio.run(score_all())
    assert models.seen == [(["same"], 6), (["other"], 6)]
    assert models.loaded == []
    for at, outcome in enumerate(outcomes):
        if at // 2 == 2:
            assert isinstance(outcome, TeacherError)
            assert outcome.status == 413
        else:
            assert len(outcome) == 2
    for outcome, teacher in zip(outcomes[:2], teachers.values(), strict=True):
        assert (teacher.counters.requests, teacher.counters.failures) == (4, 1)
        assert teacher.counters.tokens_scored == 6 * len(outcome[0].completion)
        assert len(teacher.counters.seconds) == 3


def test_no_weights_are_loaded_without_a_task(folders: dict[str, Path]) -> None:
    teacher = loaded_teacher(local(folders["same"]))
    models = teacher._lock.models
    assert models is not None
    models._models["math"].load_weights = lambda: pytest.fail("loaded")
    assert asyncio.run(teacher.score([], top_k=2)) == []
    with pytest.raises(TeacherError, match="expected at most 256") as refused:
        asyncio.run(teacher.score([sequence(completion="fox " * 300)], top_k=2))
    assert refused.value.status == 413


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"candidate_ids": [[5]]}, r"candidate_ids: .*\(found 1, expected"),
        ({"completion": None, "completion_token_ids": [10**6]}, "found 1000000"),
        ({"completion": None, "completion_token_ids": [5, 0], "finished": True}, "already ends"),
    ],
)
def test_local_teacher_rejects_what_a_service_rejects(
    folders: dict[str, Path], fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(TeacherError, match=message):
        asyncio.run(loaded_teacher(local(folders["same"])).score([sequence(**fields)], top_k=2))


def test_another_model_is_another_teacher(folders: dict[str, Path]) -> None:
    teacher = loaded_teacher(local(folders["same"]))
    manifest = asyncio.run(teacher.handshake(Expectation(top_k=8, messages=True)))
    assert manifest.model == folders["same"].name
    with pytest.raises(TeacherMismatchError):
        asyncio.run(teacher.handshake(Expectation(manifest_id="0" * 32)))
    with pytest.raises(ConfigError, match="top_k exceeds"):
        asyncio.run(teacher.handshake(Expectation(top_k=10_000)))


def test_full_support_keeps_hidden_states(folders: dict[str, Path]) -> None:
    teacher = loaded_teacher(local(folders["same"], support="full", loss={"type": "topk_kl"}))
    (score,) = asyncio.run(teacher.score([sequence()], top_k=2))
    assert isinstance(score, HiddenScore)
    assert score.hidden.shape == (len(score.completion), 32)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"model": None}, "model"),
        ({"url": "http://a"}, "url"),
        ({"kind": "openai", "tokenizer": "t"}, "tokenizer"),
        ({"api_key_env": "KEY"}, "api_key_env"),
        ({"support": "full"}, "support"),
    ],
)
def test_invalid_settings_of_a_local_teacher_are_rejected(
    settings: dict[str, Any], key: str
) -> None:
    values = {k: v for k, v in {**local(Path("m")), **settings}.items() if v is not None}
    with pytest.raises(ValidationError, match=f"Value error, {key}: "):
        TeacherConfig.model_validate(values)


def test_a_service_has_no_device_and_no_whole_rows() -> None:
    with pytest.raises(ValidationError, match="Value error, device: "):
        TeacherConfig.model_validate({"url": "http://a", "device": "cuda"})
    with pytest.raises(ValidationError, match="Value error, support: "):
        TeacherConfig.model_validate(
            {"url": "http://a", "support": "full", "loss": {"type": "topk_kl"}}
        )


@pytest.mark.parametrize(
    "rollout",
    [{"scoring": "stream"}, {"scoring": "after_rollout", "max_staleness": 1}],
)
def test_a_local_teacher_must_be_able_to_sleep(tmp_path: Path, rollout: dict[str, Any]) -> None:
    values = run_values(tmp_path, teachers={"math": local(tmp_path)})
    values["rollout"] |= rollout
    with pytest.raises(ValidationError, match=r"Value error, teachers\.math\.placement: "):
        RunConfig.model_validate(values)


def test_whole_rows_are_not_recorded(tmp_path: Path) -> None:
    teacher = local(tmp_path, support="full", loss={"type": "topk_kl"})
    values = run_values(tmp_path, teachers={"math": teacher}, logging={"record": True})
    values["rollout"]["scoring"] = "after_rollout"
    with pytest.raises(ValidationError, match=r"Value error, teachers\.math\.support: "):
        RunConfig.model_validate(values)


# ------------------------------------------------------------------------------ whole runs


@pytest.fixture
def values(tmp_path: Path, models: dict[str, Path]) -> dict[str, Any]:
    """A step has prompts of either teacher, of both, and one step none of ``other``."""
    lines: list[object] = [*prompt_lines(5, ["same", "other"])]
    lines += [{"prompt": "?", "teacher": {"same": 1, "other": 3}}]
    write_lines(tmp_path / "prompts.jsonl", lines)
    values = run_values(tmp_path, max_steps=3)
    values["student"] |= {"model": str(models["student"]), "learning_rate": 1e-4}
    values["rollout"] |= {"scoring": "after_rollout", "generation_batch_size": 2}
    return values


def with_losses(
    teachers: dict[str, dict[str, Any]], losses: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    return {name: {**teacher, "loss": losses[name]} for name, teacher in teachers.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "losses",
    [
        {"same": {"type": "topk_kl"}, "other": {"type": "ctkd", "divergence": "reverse_kl"}},
        {"same": {"type": "topk_kl", "divergence": "jsd"}, "other": {"type": "prefix_kl"}},
    ],
    ids=["ctkd", "prefix_kl"],
)
def test_a_run_with_local_teachers_is_the_run_with_services(
    tmp_path: Path,
    values: dict[str, Any],
    folders: dict[str, Path],
    services: dict[str, str],
    losses: dict[str, dict[str, Any]],
) -> None:
    remote = {name: {"url": url, "top_k": 8} for name, url in services.items()}
    own = {name: local(folder) for name, folder in folders.items()}
    expected_run, _ = run_here(
        values, teachers=with_losses(remote, losses), output_dir=str(tmp_path / "remote")
    )
    local_run, _ = run_here(
        values, teachers=with_losses(own, losses), output_dir=str(tmp_path / "local")
    )
    assert_same_run(tmp_path / "local", tmp_path / "remote")
    assert_close_weights(local_run, expected_run)


def assert_same_run(local_run: Path, expected_run: Path) -> None:
    """Compare the metrics of every step, except for times and network traffic."""
    ignored = ("time/", "throughput/", "memory/", "seconds", "received_bytes", "requests")
    for actual, other in zip(journal(local_run), journal(expected_run), strict=True):
        assert actual.keys() == other.keys()
        for key, value in other.items():
            if not any(word in key for word in ignored):
                near = value if value is None else pytest.approx(value, rel=1e-5, abs=1e-6)
                assert actual[key] == near, key


def assert_close_weights(local_run: Path, expected_run: Path) -> None:
    finished = weights(local_run)
    for name, weight in weights(expected_run).items():
        torch.testing.assert_close(finished[name], weight, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_whole_rows_teach_what_a_complete_top_k_teaches(
    tmp_path: Path, values: dict[str, Any], folders: dict[str, Path]
) -> None:
    """A top-k of every id has no tail either."""
    size = int(table("digit").present.sum())
    lines = [{"prompt": f"{number} + 4 =", "teacher": "same"} for number in range(5)]
    write_lines(tmp_path / "prompts.jsonl", lines)
    values["importance_weights"] = {"least": 1}  # they depend on the ids in the top-k
    for name, settings in {"full": {"support": "full"}, "top": {"top_k": size}}.items():
        teacher = local(folders["same"], loss={"type": "topk_kl"}, **settings) | settings
        run_here(values, teachers={"same": teacher}, output_dir=str(tmp_path / name))
    for local_run, expected_run in zip(
        journal(tmp_path / "full"), journal(tmp_path / "top"), strict=True
    ):
        assert local_run["loss"] == pytest.approx(expected_run["loss"], rel=1e-5)
    assert_close_weights(tmp_path / "full" / "final", tmp_path / "top" / "final")


@pytest.mark.slow
def test_resumed_run_verifies_its_local_teacher(
    tmp_path: Path, values: dict[str, Any], folders: dict[str, Path], models: dict[str, Path]
) -> None:
    write_lines(tmp_path / "prompts.jsonl", prompt_lines(5, ["same"]))
    teacher = local(folders["same"], loss={"type": "topk_kl"})
    values |= {"teachers": {"same": teacher}, "save_steps": 1}
    values["student"]["min_learning_rate_ratio"] = 1
    run_here(values, max_steps=1)
    manifests = tmp_path / "run" / "checkpoints" / "step-00000001" / "manifests.json"
    assert json.loads(manifests.read_text())["same"]["engine"] == "transformers"
    again = {"resume_from_checkpoint": True, "max_steps": 2}
    swapped = {**teacher, "model": str(models["student"])}
    with pytest.raises(TeacherMismatchError, match="'same'"):
        run_here(values, teachers={"same": swapped}, **again)
    run_here(values, **again)
    assert [line["step"] for line in journal(tmp_path / "run")] == [1, 2]


def test_check_reports_local_teachers(
    tmp_path: Path, values: dict[str, Any], folders: dict[str, Path]
) -> None:
    own = {name: local(folder) for name, folder in folders.items()}
    own["same"] |= {"support": "full", "loss": {"type": "topk_kl"}}
    config = RunConfig.model_validate({**values, "teachers": own})
    output = StringIO()
    asyncio.run(check_run(config, Console(file=output, width=300)))
    assert f"{folders['same']} in this process, offloaded" in output.getvalue()
    assert "topk_kl forward_kl on all ids" in output.getvalue()
    assert "about 0.0 MB" in output.getvalue()


def shared_scores(ranks: Ranks, folder: Path, output: Path) -> None:
    """Score three, one, and no sequence on all ranks."""
    config = TeacherConfig.model_validate(local(folder, support="full", loss={"type": "topk_kl"}))
    tables = {"math": table("digit")}
    models = LocalTeachers({"math": config}, tables, device=CPU, tokens_per_batch=64, ranks=ranks)
    if not ranks.is_rank_zero:
        models.serve()
        return
    options = ScoreOptions(3, hidden=True)
    calls = [models.score("math", tasks(count), options) for count in (3, 1, 0)]
    torch.save([[(s.topk.logprobs, s.hidden) for s in scores] for scores in calls], output)
    models.release()


def tasks(count: int) -> list[LocalTask]:
    ids = np.arange(270, 300, dtype=np.int32)
    return [LocalTask(ids[:2], ids[3 : 6 + at]) for at in range(count)]


@pytest.mark.slow
def test_ranks_score_a_share_each(tmp_path: Path, folders: dict[str, Path]) -> None:
    codes, output = on_ranks(2, shared_scores, folders["same"], tmp_path / "scores.pt")
    assert codes == [0, 0], output
    results = torch.load(tmp_path / "scores.pt", weights_only=False)
    assert [len(scores) for scores in results] == [3, 1, 0]
    teacher = loaded_teacher(local(folders["same"], support="full", loss={"type": "topk_kl"}))
    models = teacher._lock.models
    assert models is not None
    for (logprobs, hidden), expected in zip(
        results[0], models.score("math", tasks(3), ScoreOptions(3, hidden=True)), strict=True
    ):
        np.testing.assert_allclose(logprobs, expected.topk.logprobs, atol=1e-5)
        torch.testing.assert_close(hidden, expected.hidden, atol=1e-5, rtol=1e-5)
