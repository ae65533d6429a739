"""Teachers in the trainer's own process: what they say, when they are awake, and what is learnt."""

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
from tests import tiny_models
from tests.broker import Broker
from tests.trainer.ranked import on_ranks
from tests.trainer.runs import questions, run_values, write_lines
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


def asked_of(settings: dict[str, Any], turn: TeacherLock | None = None) -> LocalTeacher:
    """A local teacher by itself, loaded."""
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
def test_a_teacher_says_here_what_it_says_over_http(
    folders: dict[str, Path], services: dict[str, str]
) -> None:
    """Also its manifest is the same, so that a run may move from one to the other."""
    asked = [
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
        here = asked_of(local(folder, revision="main"))  # which a folder does not have
        for temperature in (1.0, 0.7):
            manifest, theirs = asyncio.run(over_http(name, asked, temperature))
            ours = asyncio.run(here.score(asked, top_k=5, temperature=temperature))
            assert asyncio.run(here.handshake()).manifest_id == manifest.manifest_id
            for mine, other in zip(ours, theirs, strict=True):
                assert_same_score(mine, other)
        rows = len(ours[0].completion)
        candidates = [list(range(10 + row, 10 + row + row % 4)) for row in range(rows)]
        chosen = [sequence(finished=True, candidate_ids=candidates)]
        _, theirs = asyncio.run(over_http(name, chosen, 1.0))
        ours = asyncio.run(here.score(chosen, top_k=5))
        assert_same_score(ours[0], theirs[0])


def assert_same_score(ours: Any, theirs: Any) -> None:
    assert ours.manifest_id == theirs.manifest_id
    assert ours.completion.token_ids.tolist() == theirs.completion.token_ids.tolist()
    assert ours.completion.byte_ends.tolist() == theirs.completion.byte_ends.tolist()
    assert (ours.topk.ids == theirs.topk.ids).all()
    for name in ("logprobs", "token_logprobs", "tail_logprobs"):
        mine, other = getattr(ours.topk, name), getattr(theirs.topk, name)
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_those_of_the_model_on_the_bare_sequence(family: str) -> None:
    """Row by row from the whole model's own logits; company and padding change nothing."""
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
    found = teacher.score(tasks, ScoreOptions(6, hidden=True))
    assert teacher.head is not None
    for task, score in zip(tasks, found, strict=True):
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
            made = teacher.head.logits(score.hidden[row][None])[0].log_softmax(0)
            torch.testing.assert_close(made[real], expected[real].float(), atol=1e-5, rtol=1e-5)


def test_a_model_that_changes_its_logits_is_asked_for_them_whole(
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
    for ours, theirs in pairs:
        np.testing.assert_allclose(ours.topk.logprobs, theirs.topk.logprobs, atol=1e-6)


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
    """Remembers who was awake when somebody was asked, and for how many sequences."""

    def __init__(self, *arguments: Any, **known: Any) -> None:
        super().__init__(*arguments, **known)
        self.seen: list[tuple[list[str], int]] = []
        for name, model in self._models.items():
            model.score = self._watching(name, model.score)  # pyright: ignore[reportAttributeAccessIssue]

    def _watching(self, name: str, score: Any) -> Any:
        def watched(tasks: Any, question: Any) -> Any:
            assert self.loaded == [name]
            self.seen.append((self.loaded, len(tasks)))
            return score(tasks, question)

        return watched


def test_teachers_wake_in_turn_once_for_all_who_ask(folders: dict[str, Path]) -> None:
    """Eight questions at once to two teachers: two wakings. A refused one spoils no other."""
    configs = {
        name: TeacherConfig.model_validate(local(folder)) for name, folder in folders.items()
    }

    async def ask() -> tuple[Watched, list[Any], dict[str, LocalTeacher]]:
        turn = TeacherLock()
        teachers = {n: LocalTeacher(n, c, turn, device="cpu") for n, c in configs.items()}
        tables = {name: (await teacher.tokenizer()).table for name, teacher in teachers.items()}
        turn.models = models = Watched(
            configs, tables, device=CPU, tokens_per_batch=64, ranks=Ranks()
        )
        assert models.loaded == []
        refused = sequence(completion="fox " * 300)  # longer than the model's positions
        questions = [
            teacher.score([refused] if at == 2 else [sequence(), sequence()], top_k=3)
            for at in range(4)
            for teacher in teachers.values()
        ]
        return models, await asyncio.gather(*questions, return_exceptions=True), teachers

    models, answers, teachers = asyncio.run(ask())
    assert models.seen == [(["same"], 6), (["other"], 6)]
    assert models.loaded == []
    for at, answer in enumerate(answers):
        if at // 2 == 2:
            assert isinstance(answer, TeacherError)
            assert answer.status == 413
        else:
            assert len(answer) == 2
    for answer, teacher in zip(answers[:2], teachers.values(), strict=True):
        assert (teacher.counters.requests, teacher.counters.failures) == (4, 1)
        assert teacher.counters.tokens_scored == 6 * len(answer[0].completion)
        assert len(teacher.counters.seconds) == 3


def test_no_weights_are_loaded_without_a_task(folders: dict[str, Path]) -> None:
    teacher = asked_of(local(folders["same"]))
    models = teacher._lock.models
    assert models is not None
    models._models["math"].load_weights = lambda: pytest.fail("loaded")
    assert asyncio.run(teacher.score([], top_k=2)) == []
    with pytest.raises(TeacherError, match="expected at most 256") as refused:
        asyncio.run(teacher.score([sequence(completion="fox " * 300)], top_k=2))
    assert refused.value.status == 413


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"candidate_ids": [[5]]}, r"candidate_ids: .*\(found 1, expected"),
        ({"completion": None, "completion_token_ids": [10**6]}, "id 1000000"),
        ({"completion": None, "completion_token_ids": [5, 0], "finished": True}, "already ends"),
    ],
)
def test_what_a_service_refuses_is_refused_here(
    folders: dict[str, Path], asked: dict[str, Any], message: str
) -> None:
    with pytest.raises(TeacherError, match=message):
        asyncio.run(asked_of(local(folders["same"])).score([sequence(**asked)], top_k=2))


def test_another_model_is_another_teacher(folders: dict[str, Path]) -> None:
    teacher = asked_of(local(folders["same"]))
    manifest = asyncio.run(teacher.handshake(Expectation(top_k=8, messages=True)))
    assert manifest.model == folders["same"].name
    with pytest.raises(TeacherMismatchError):
        asyncio.run(teacher.handshake(Expectation(manifest_id="0" * 32)))
    with pytest.raises(ConfigError, match="top_k exceeds"):
        asyncio.run(teacher.handshake(Expectation(top_k=10_000)))


def test_full_support_keeps_hidden_states(folders: dict[str, Path]) -> None:
    teacher = asked_of(local(folders["same"], support="full", loss={"type": "topk_kl"}))
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
    lines: list[object] = [*questions(5, ["same", "other"])]
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
    theirs, _ = run_here(
        values, teachers=with_losses(remote, losses), output_dir=str(tmp_path / "remote")
    )
    ours, _ = run_here(
        values, teachers=with_losses(own, losses), output_dir=str(tmp_path / "local")
    )
    assert_same_run(tmp_path / "local", tmp_path / "remote")
    assert_close_weights(ours, theirs)


def assert_same_run(ours: Path, theirs: Path) -> None:
    """The numbers of every step, but for times and what only a wire has."""
    left_out = ("time/", "seconds", "received_bytes", "requests")
    for mine, other in zip(journal(ours), journal(theirs), strict=True):
        assert mine.keys() == other.keys()
        for key, value in other.items():
            if not any(word in key for word in left_out):
                near = value if value is None else pytest.approx(value, rel=1e-5, abs=1e-6)
                assert mine[key] == near, key


def assert_close_weights(ours: Path, theirs: Path) -> None:
    finished = weights(ours)
    for name, weight in weights(theirs).items():
        torch.testing.assert_close(finished[name], weight, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_whole_rows_teach_what_a_complete_top_k_teaches(
    tmp_path: Path, values: dict[str, Any], folders: dict[str, Path]
) -> None:
    """A top-k of every id has no tail either."""
    size = int(table("digit").present.sum())
    lines = [{"prompt": f"{number} + 4 =", "teacher": "same"} for number in range(5)]
    write_lines(tmp_path / "prompts.jsonl", lines)
    for name, settings in {"full": {"support": "full"}, "top": {"top_k": size}}.items():
        teacher = local(folders["same"], loss={"type": "topk_kl"}, **settings) | settings
        run_here(values, teachers={"same": teacher}, output_dir=str(tmp_path / name))
    for ours, theirs in zip(journal(tmp_path / "full"), journal(tmp_path / "top"), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
    assert_close_weights(tmp_path / "full" / "final", tmp_path / "top" / "final")


@pytest.mark.slow
def test_a_resumed_run_knows_its_local_teacher(
    tmp_path: Path, values: dict[str, Any], folders: dict[str, Path], models: dict[str, Path]
) -> None:
    write_lines(tmp_path / "prompts.jsonl", questions(5, ["same"]))
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


def test_a_check_says_who_sleeps(
    tmp_path: Path, values: dict[str, Any], folders: dict[str, Path]
) -> None:
    own = {name: local(folder) for name, folder in folders.items()}
    own["same"] |= {"support": "full", "loss": {"type": "topk_kl"}}
    config = RunConfig.model_validate({**values, "teachers": own})
    told = StringIO()
    asyncio.run(check_run(config, Console(file=told, width=300)))
    assert f"{folders['same']} in this process, asleep" in told.getvalue()
    assert "topk_kl forward_kl on all ids" in told.getvalue()
    assert "about 0.0 MB" in told.getvalue()


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
    codes, told = on_ranks(2, shared_scores, folders["same"], tmp_path / "scores.pt")
    assert codes == [0, 0], told
    found = torch.load(tmp_path / "scores.pt", weights_only=False)
    assert [len(scores) for scores in found] == [3, 1, 0]
    teacher = asked_of(local(folders["same"], support="full", loss={"type": "topk_kl"}))
    models = teacher._lock.models
    assert models is not None
    for (logprobs, hidden), alone in zip(
        found[0], models.score("math", tasks(3), ScoreOptions(3, hidden=True)), strict=True
    ):
        np.testing.assert_allclose(logprobs, alone.topk.logprobs, atol=1e-5)
        torch.testing.assert_close(hidden, alone.hidden, atol=1e-5, rtol=1e-5)
