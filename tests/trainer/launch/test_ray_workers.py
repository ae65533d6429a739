"""Rollout workers on Ray, which is started once for all tests: completions and crashes."""

import asyncio
import json
import os
import signal
from collections.abc import Iterator, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from rich.console import Console

from mopd_protocol.errors import MopdError
from mopd_trainer.config.resources import device_counts
from mopd_trainer.config.run import RunConfig
from mopd_trainer.loop import train
from tests.server.tiny_teachers import teacher_of
from tests.trainer.in_process import Recorded, serve_in_process
from tests.trainer.launch.test_torchrun import untimed
from tests.trainer.runs import prompt_lines, run_values, write_lines
from tests.trainer.students import model_of, tokenizer
from tests.trainer.whole_runs import assert_same_weights, journal, run_here

ray = pytest.importorskip("ray")

from mopd_trainer.launch.workers import RayWorkers, worker_actor  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]

STEPS = 3


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Cores by name only: at most three actors exist at once."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["OMP_NUM_THREADS"] = "1"
    ray.init(num_cpus=3, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture
def values(tmp_path: Path, models: dict[str, Path]) -> dict[str, Any]:
    """Return a run of four batches a step with a local teacher, so that no HTTP request is sent."""
    write_lines(tmp_path / "prompts.jsonl", prompt_lines(8, ["code"]))
    values = run_values(tmp_path, max_steps=STEPS, logging={"completions": 99})
    values["student"] |= {"model": str(models["student"]), "learning_rate": 1e-3}
    values["rollout"] |= {
        "prompts_per_step": 8,
        "generation_batch_size": 2,
        "scoring": "after_rollout",
    }
    values["teachers"] = {"code": {"placement": "local", "model": str(models["code"]), "top_k": 8}}
    # Weights would have the last bits of sampled log-probabilities, which differ between processes.
    values["importance_weights"] = {"least": 1}
    return values


def with_workers(values: dict[str, Any], workers: int, **policy: int) -> RunConfig:
    resources = {"device": "cpu", "rollout_workers": workers, **policy}
    return RunConfig.model_validate({**values, "resources": resources})


def actors_of(config: RunConfig) -> list[Any]:
    assert config.resources is not None
    return [worker_actor(config, {"num_cpus": 1}) for _ in range(config.resources.rollout_workers)]


class Crashing(RayWorkers):
    """The first worker is killed before the sixth batch."""

    requests = 0

    async def generate(self, prompts: Sequence[Sequence[int]], **options: Any) -> Any:
        self.requests += 1
        if self.requests == 6:
            os.kill(await self._actors[0].process_id.remote(), signal.SIGKILL)
        return await super().generate(prompts, **options)


def run_with(config: RunConfig, workers: RayWorkers, name: str) -> Path:
    """A run that workers write for; its folder."""
    folder = config.output_dir.with_name(name)
    config = config.model_copy(update={"output_dir": folder})
    asyncio.run(train(config, Console(file=StringIO()), workers=workers))
    return folder


def without_restarts(folder: Path) -> tuple[list[dict[str, Any]], list[float]]:
    lines = journal(folder)
    restarts = [line.pop("rollout/worker_restarts", 0.0) for line in lines]
    return [untimed(line) for line in lines], restarts


@pytest.fixture
def baseline(values: dict[str, Any]) -> Path:
    """Return the folder of the run without workers."""
    run_here(values)
    return Path(values["output_dir"])


def test_workers_write_what_the_student_would_have_written(
    cluster: None, values: dict[str, Any], baseline: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """To the last letter and the last bit: with one worker, with two, and with one that crashes."""
    expected = [untimed(line) for line in journal(baseline)]
    config = with_workers(values, 2)
    actors = actors_of(config)
    for kind, own in ((RayWorkers, actors[:1]), (RayWorkers, actors), (Crashing, actors)):
        folder = run_with(config, kind(own, config), f"{kind.__name__}-{len(own)}")
        actual, restarts = without_restarts(folder)
        for line, other in zip(actual, expected, strict=True):
            estimates = [key for key in line if "entropy" in key or "reverse_kl_estimate" in key]
            # Sampled log-probabilities differ in their last bits.
            for key in estimates:
                assert line.pop(key) == pytest.approx(other[key], rel=1e-6, nan_ok=True), key
            rest = {key: value for key, value in other.items() if key not in estimates}
            assert str(line) == str(rest)
        texts = (folder / "completions.jsonl").read_bytes()
        assert texts == (baseline / "completions.jsonl").read_bytes()
        assert_same_weights(folder / "final", baseline / "final")
        assert sum(restarts) == (kind is Crashing)
    for actor in actors:
        ray.kill(actor)
    messages = [record.getMessage() for record in caplog.records]
    crashes = [message for message in messages if "crashed" in message]
    assert len(crashes) == 1
    assert "rollout worker 1 of 2 crashed" in crashes[0]
    assert "with the same seeds" in crashes[0]


def test_workers_continue_corrected_completions_as_the_student_would(
    cluster: None, values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    teacher = teacher_of(model_of("qwen", seed=1, sharpness=8), tokenizer("digit"))
    serve_in_process(monkeypatch, {"code": Recorded(teacher.app)})
    values["teachers"] = {"code": {"url": "http://code", "top_k": 8}}
    values["rollout"] |= {"corrections": 2, "correction_ratio": 0.3, "scoring": "stream"}
    values["rollout"] |= {"correction_significance": 100}
    own, _ = run_here(values)
    config = with_workers(values, 2)
    actors = actors_of(config)
    folder = run_with(config, RayWorkers(actors, config), "corrected")
    texts = (folder / "completions.jsonl").read_text()
    assert texts == (own.parent / "completions.jsonl").read_text()
    assert any(json.loads(line)["corrected_tokens"] for line in texts.splitlines())
    assert_same_weights(folder / "final", own)
    for actor in actors:
        ray.kill(actor)


def test_a_run_ends_when_no_worker_is_left(cluster: None, values: dict[str, Any]) -> None:
    config = with_workers(values, 1, rollout_worker_restarts=0)
    actors = actors_of(config)
    with pytest.raises((BaseExceptionGroup, MopdError)) as ended:
        run_with(config, Crashing(actors, config), "dying")
    output = sentence(ended.value)
    assert "none is left: rollout worker 1 of 1 crashed more often" in output


def test_a_worker_that_fails_to_start_reports_the_reason(
    cluster: None, values: dict[str, Any]
) -> None:
    config = with_workers(values, 1)
    missing = config.student.model_copy(update={"model": "/nowhere/at/all"})
    (actor,) = actors_of(config.model_copy(update={"student": missing}))

    async def requests() -> None:
        workers = RayWorkers([actor], config)
        await workers.push_weights(0, {})
        await workers.generate([[5]], seed=0)

    with pytest.raises(MopdError, match=r"rollout worker failed: .*/nowhere"):
        asyncio.run(requests())
    ray.kill(actor)


def sentence(error: BaseException) -> str:
    if isinstance(error, BaseExceptionGroup):
        return sentence(error.exceptions[0])
    return str(error)


def test_workers_have_separate_devices(values: dict[str, Any]) -> None:
    resources = {"device": "cuda", "student": 2, "rollout_workers": 3}
    values["student"]["sharding"] = "ddp"
    config = RunConfig.model_validate({**values, "resources": resources})
    assert config.resources is not None
    assert device_counts(config.resources, config.teachers) == [1] * 5
    counts = device_counts(config.resources, config.teachers, worker_devices=4)
    assert counts == [1, 1, 4, 4, 4]


def test_workers_without_work_are_refused(values: dict[str, Any]) -> None:
    values |= {"resources": {"rollout_workers": 1}, "teachers": {}}
    values["data"]["source"] = "answers"
    values["student"]["distill_loss_weight"] = 0
    with pytest.raises(ValidationError, match=r"Value error, resources\.rollout_workers: "):
        RunConfig.model_validate(values)
