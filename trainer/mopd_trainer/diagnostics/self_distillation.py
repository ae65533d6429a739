"""The student as its own teacher: no loss and no gradient; and descent towards each teacher."""

import subprocess
import sys
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from mopd_losses.build import build_loss
from mopd_losses.config import described
from mopd_losses.projection.cache import ProjectionCache
from mopd_trainer.config.run import RunConfig
from mopd_trainer.config.teacher import TeacherConfig
from mopd_trainer.diagnostics.case import Case, loss_of
from mopd_trainer.diagnostics.finding import Finding
from mopd_trainer.teachers.connect import connect_teachers, teacher_pool
from mopd_trainer.teachers.scoring import RolloutScorer

#: Largest loss in nats per token of a student that is its own teacher.
_LIMIT = {"float32": 1e-4, "bfloat16": 2e-2}
#: Share of the loss that a step along the gradient would remove from a linear function.
_DESCENT = 0.05
_STOP_SECONDS = 20.0


@contextmanager
def student_service(config: RunConfig) -> Generator[str | None]:
    """Serve the student's model on a free port; yield its address, None without the service."""
    executable = Path(sys.executable).parent / "mopd-teacher"
    if not executable.exists():
        yield None
        return
    settings = config.student
    arguments = [executable, "serve", settings.model, "--name", "student", "--port", "0"]
    arguments += ["--dtype", settings.dtype, "--device", settings.device]
    with subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            assert process.stdout is not None
            lines = (line.split() for line in process.stdout)
            yield next((words[1] for words in lines if words and words[0] == "address"), None)
        finally:
            process.terminate()
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


async def self_distillation(case: Case, url: str) -> list[Finding]:
    """Return findings per loss: the student at ``url`` must give it neither loss nor gradient.

    Raises:
        MopdError: when the service cannot score.
    """
    configs: dict[str, TeacherConfig] = {}
    for each in case.config.scoring_teachers.values():
        settings = {
            "url": (url,),
            "top_k": each.top_k,
            "loss": each.loss,
            "support": each.support,
            "chat_template_kwargs": case.config.student.chat_template_kwargs,
        }
        if each.support != "full":
            configs.setdefault(described(each.loss), TeacherConfig.model_validate(settings))
    cache = ProjectionCache()
    async with teacher_pool(configs) as pool:
        teachers = await connect_teachers(
            pool,
            configs,
            case.student.identity,
            cache,
            {},
            wait_seconds=case.config.teacher_wait_seconds,
        )
        rollouts = [
            replace(rollout, prompt=replace(rollout.prompt, teachers=dict.fromkeys(configs, 1.0)))
            for rollout in case.rollouts
        ]
        examples = await RolloutScorer(pool, teachers, case.student.table).score(rollouts)
    losses = {
        name: build_loss(
            configs[name].loss,
            case.student.identity,
            teacher.tokenizer,
            case.student.device,
            cache=cache,
        )
        for name, teacher in teachers.items()
    }
    return list(_zero(replace(case, losses=losses, examples=examples)))


def _zero(case: Case) -> Iterator[Finding]:
    limit = _LIMIT[case.config.student.dtype]
    for name, loss in case.losses.items():
        examples = case.examples_of(name)
        total, size = loss_of(case.student, name, loss, examples, case.config)
        norm = _norm(_gradient(case, total))
        text = (
            f"{name}: the student as its own teacher has a loss of {size:.2g} nats per token "
            f"(limit {limit:g}) and a gradient of norm {norm:.2g} over {len(examples)} completions."
        )
        fix = "Templates, tokenizers or precisions of student and service differ."
        if case.config.student.dropout == "model" and case.student.identity.dropout:
            fix = "Set student.dropout to off: dropout makes it another model than its teacher."
        status = "ok" if size <= limit else "failed"
        yield Finding("self-distillation", status, text, fix, {"nats": size, "norm": norm})


def check_gradient(case: Case) -> Iterator[Finding]:
    """Yield a finding per teacher: a small step against the gradient lowers its loss.

    The weights are restored.
    """
    for name, loss in case.losses.items():
        examples = case.examples_of(name)
        if not examples:
            continue
        total, _ = loss_of(case.student, name, loss, examples, case.config)
        before = float(total.detach())
        gradient = _gradient(case, total)
        norm = _norm(gradient)
        after = before
        if norm > 0:
            rate = _DESCENT * abs(before) / norm**2
            after = _loss_after(case, name, gradient, rate)
        text = (
            f"teacher {name!r}: gradient of norm {norm:.3g}; a step along it changes the loss "
            f"from {before:.4f} to {after:.4f} nats per token."
        )
        status = "ok" if after < before or before == 0 else "failed"
        fix = "The gradient does not belong to this loss: check the model's precision and code."
        yield Finding("gradient", status, text, fix, {"before": before, "after": after})


@torch.no_grad()
def _loss_after(case: Case, name: str, gradient: Mapping[str, torch.Tensor], rate: float) -> float:
    parameters = case.student.trained()
    saved = {key: parameters[key].detach().clone() for key in gradient}
    for key, value in gradient.items():
        parameters[key].sub_(rate * value)
    loss = loss_of(case.student, name, case.losses[name], case.examples_of(name), case.config)[0]
    for key, value in saved.items():
        parameters[key].copy_(value)
    return float(loss)


def _gradient(case: Case, total: torch.Tensor) -> dict[str, torch.Tensor]:
    if not total.requires_grad:
        return {}
    case.student.model.zero_grad(set_to_none=True)
    total.backward()
    gradient = {
        name: parameter.grad.detach().clone()
        for name, parameter in case.student.trained().items()
        if parameter.grad is not None
    }
    case.student.model.zero_grad(set_to_none=True)
    return gradient


def _norm(gradient: Mapping[str, torch.Tensor]) -> float:
    squares = [float(value.double().square().sum()) for value in gradient.values()]
    return sum(squares) ** 0.5
