"""A teacher that is the student has nothing to teach."""

from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from mopd_losses.build import build_loss
from mopd_losses.config import CtkdConfig, TopKKlConfig
from mopd_protocol.samples import Prompt
from mopd_trainer.collection import collect
from mopd_trainer.config.loading import parse_run
from mopd_trainer.config.run import RolloutConfig, StudentConfig
from mopd_trainer.data.packing import pack
from mopd_trainer.reporting.plan import describe_plan
from mopd_trainer.rollouts.transformers_sampler import Sampler
from mopd_trainer.student.student import Student
from mopd_trainer.training.learner import Learner
from tests import tiny_models
from tests.server.tiny_teachers import teacher_of
from tests.trainer.in_process import Recorded, scorer_of, teacher_config
from tests.trainer.runs import run_values
from tests.trainer.students import CPU, MESSAGES, model_of, student_of, tokenizer

pytestmark = pytest.mark.anyio

PROMPTS = [Prompt(index=index, messages=MESSAGES, teachers={"math": 1.0}) for index in range(8)]


async def first_step(
    loss: TopKKlConfig | CtkdConfig,
    *,
    teacher_seed: int = 0,
    models: tuple[Student, PreTrainedModel] | None = None,
) -> dict[str, float]:
    """Return the metrics of one step on sampled completions, with a teacher of the same family."""
    if models is None:
        models = student_of(sharpness=8), model_of("qwen", teacher_seed, sharpness=8)
    student, teacher = models[0], teacher_of(models[1], tokenizer("digit"))
    config = teacher_config(top_k=32, loss=loss.model_dump())
    async with scorer_of(student.identity, {"math": (Recorded(teacher.app), config)}) as scorer:
        rollout = RolloutConfig(max_new_tokens=16, generation_batch_size=4)
        examples, _ = await collect(PROMPTS, Sampler(student, rollout, seed=0), scorer, 0)
    learner = Learner(
        student,
        StudentConfig(model="tiny"),
        losses={"math": build_loss(loss, student.identity, student.identity, CPU)},
        teacher_weights={"math": 1.0},
        max_steps=1,
        seed=0,
    )
    tokens = sum(len(example.rollout.completion) for example in examples)
    metrics, _ = learner.update(pack(examples, tokens_per_micro_batch=100), tokens=tokens, step=0)
    return metrics


@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl"])
async def test_a_student_has_nothing_to_learn_from_itself(divergence: str) -> None:
    loss = TopKKlConfig.model_validate({"divergence": divergence})
    same = await first_step(loss, teacher_seed=0)
    assert abs(same["loss"]) < 1e-5
    assert same["grad_norm"] < 1e-4
    other = await first_step(loss, teacher_seed=1)
    assert other["loss"] > 0.1
    assert other["grad_norm"] > 0.1


GPT = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 256, "rotary_dim": 8}
#: Family -> its sizes, and its dropout probabilities.
DROPOUTS: dict[str, tuple[dict[str, Any], dict[str, float]]] = {
    "qwen3": ({"head_dim": 16}, {"attention_dropout": 0.5}),
    "gpt2": (GPT, {"resid_pdrop": 0.5, "embd_pdrop": 0.2, "attn_pdrop": 0.3}),
    "gptj": (GPT, {"resid_pdrop": 0.1, "attn_pdrop": 0.9}),  # read from the configuration
    "falcon": ({}, {"hidden_dropout": 0.5, "attention_dropout": 0.1}),  # likewise
    "gpt_neox": ({}, {"hidden_dropout": 0.5, "attention_dropout": 0.5}),
    "opt": ({"ffn_dim": 64, "word_embed_proj_dim": 32}, {"dropout": 0.5, "layerdrop": 0.9}),
    "mixtral": ({"num_local_experts": 2}, {"router_jitter_noise": 0.5}),
}


def folder_with_dropout(family: str, folder: Path) -> Path:
    """Save a model whose configuration has dropout."""
    sizes, dropout = DROPOUTS[family]
    torch.manual_seed(0)
    small = {
        "vocab_size": 448,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
    }
    config = AutoConfig.for_model(family, **small | sizes | dropout)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)
    return tiny_models.save(model, tokenizer("digit"), folder)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", DROPOUTS)
async def test_dropout_is_off_in_training(family: str, tmp_path: Path, checkpointing: bool) -> None:
    folder = folder_with_dropout(family, tmp_path)
    config = StudentConfig(model=str(folder), device="cpu", gradient_checkpointing=checkpointing)
    student = Student.load(config)
    teacher = AutoModelForCausalLM.from_pretrained(folder).eval()
    metrics = await first_step(TopKKlConfig(), models=(student, teacher))
    assert abs(metrics["loss"]) < 1e-5
    assert student.model.training
    # The trained model has the published configuration.
    student.save(tmp_path / "final")
    saved = AutoConfig.from_pretrained(tmp_path / "final")
    assert DROPOUTS[family][1] == {name: getattr(saved, name) for name in DROPOUTS[family][1]}


@pytest.mark.parametrize("family", DROPOUTS)
async def test_dropout_of_the_model_can_be_kept(family: str, tmp_path: Path) -> None:
    folder = folder_with_dropout(family, tmp_path)
    student = Student.load(StudentConfig(model=str(folder), device="cpu", dropout="model"))
    assert student.identity.dropout == DROPOUTS[family][1]
    for setting in ("off", "model"):
        values = run_values(tmp_path, student={"model": str(folder), "dropout": setting})
        run = parse_run(values, source="run")
        plan = StringIO()
        Console(file=plan, width=999).print(describe_plan(run, PROMPTS, student.identity, {}))
        assert f"student.dropout={setting}" in plan.getvalue()
        assert all(name in plan.getvalue() for name in DROPOUTS[family][1])
    teacher = AutoModelForCausalLM.from_pretrained(folder).eval()
    metrics = await first_step(TopKKlConfig(), models=(student, teacher))
    assert metrics["loss"] > 1e-3
