"""A student on two ranks makes the steps of a single rank, for any sharding and packing."""

import math
import os
import re
import signal
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mopd_trainer.config.fingerprint import RunIdentity
from mopd_trainer.config.run import RolloutConfig, RunConfig
from mopd_trainer.data.packing import pack, split
from mopd_trainer.distributed.process_group import Ranks
from mopd_trainer.run_folder.checkpoint import Checkpoint, save_checkpoint
from mopd_trainer.student.student import Student
from mopd_trainer.training.learner import Learner
from tests import tiny_models
from tests.trainer.lora_students import LORA
from tests.trainer.ranked import on_ranks
from tests.trainer.runs import run_values
from tests.trainer.scored_examples import losses_for
from tests.trainer.students import model_of, tokenizer
from tests.trainer.training.test_learner import TEACHER_WEIGHTS, examples

pytestmark = pytest.mark.slow

PROMPTS = [[5, 6, 7], [8, 9]]
SAMPLING = RolloutConfig(max_new_tokens=6)


@dataclass(frozen=True)
class Case:
    """A model, its sharding, and its training data."""

    model: str
    sharding: str
    budget: int = 45
    examples: int = 4  # number of training examples
    steps: int = 2
    resume: str | None = None  # name of the case whose checkpoint is resumed
    lora: bool = False
    packing: str = "packed"

    @property
    def name(self) -> str:
        kind = ("lora-" if self.lora else "") + ("padded-" if self.packing == "padded" else "")
        return f"{kind}{self.model}-{self.sharding}-{self.budget}-{self.examples}-{self.steps}"


#: Tied and untied heads (of an odd number of rows); even and uneven numbers of micro-batches per
#: rank; a step with one example, which leaves a rank without one.
CASES = [
    Case("untied", "ddp"),
    Case("untied", "fsdp", budget=30),
    Case("tied", "fsdp"),
    Case("tied", "fsdp", budget=10_000),
    Case("tied", "ddp", examples=1),
    Case("tied", "fsdp", examples=1),
    Case("untied", "ddp", lora=True),
    Case("untied", "fsdp", budget=30, lora=True),
    Case("tied", "fsdp", lora=True),
    Case("tied", "fsdp", examples=1, lora=True),
    Case("untied", "fsdp", budget=30, packing="padded"),
    Case("tied", "ddp", packing="padded"),
]
#: The third step, after the checkpoint of the first two.
RESUMED = [
    Case("tied", sharding, steps=3, resume=resume)
    for sharding, resume in (
        ("fsdp", Case("tied", "none").name),
        ("ddp", Case("tied", "fsdp").name),
        ("none", Case("tied", "fsdp").name),
    )
]
RESUMED += [replace(case, lora=True, resume=f"lora-{case.resume}") for case in RESUMED]


def config_of(folder: Path, case: Case) -> RunConfig:
    values = run_values(folder, output_dir=str(folder / case.name))
    values["student"] |= {
        "model": str(folder / case.model),
        "sharding": case.sharding,
        "tokens_per_micro_batch": case.budget,
        "lora": LORA if case.lora else None,
        "packing": case.packing,
    }
    return RunConfig.model_validate(values)


def learner_of(config: RunConfig, student: Student) -> Learner:
    return Learner(
        student,
        config.student,
        losses=losses_for(student, {"code": "reverse_kl"}),
        teacher_weights=TEACHER_WEIGHTS,
        max_steps=10,
        seed=0,
    )


def step_of(config: RunConfig, learner: Learner, ranks: Ranks, case: Case, step: int) -> Any:
    """Make a step; return metrics, each teacher's nats, and the losses of the tokens."""
    chosen = examples()[: case.examples]
    budget = config.student.tokens_per_micro_batch
    packed = config.student.packing == "packed"
    batches = list(pack(chosen, tokens_per_micro_batch=budget, ranks=ranks.size, packed=packed))
    tokens = sum(len(example.rollout.completion) for example in chosen)
    own = ranks.scatter(split(batches, ranks.size))
    metrics, losses = learner.update(own, tokens=tokens, step=step)
    token_losses = {
        f"{name}/tokens/{example}/{token}": nats if math.isfinite(nats) else -1.0
        for name, loss in losses.items()
        for example, values in loss.per_example.items()
        for token, nats in enumerate(values.tolist())
    }
    assert ranks.rank or token_losses
    return metrics | token_losses | {name: loss.nats for name, loss in losses.items()}


def trained(folder: Path, case: Case, ranks: Ranks | None = None) -> dict[str, Any]:
    """Train a case and save a checkpoint; return metrics, completions and state (on rank 0)."""
    config = config_of(folder, case)
    ranks = ranks or Ranks()
    student = Student.load(config.student, ranks)
    learner = learner_of(config, student)
    done = 0
    if case.resume is not None:
        checkpoint = Checkpoint.open(folder / case.resume / "checkpoints" / "step-00000002")
        if ranks.is_rank_zero:
            checkpoint.restore(student, learner.optimizer)
        else:
            student.load_weights(None)
            learner.optimizer.load_state_dict({})
        done = checkpoint.step
    metrics: list[Any] = []
    completions: list[list[list[int]]] = []

    def sample() -> None:
        student.gather()
        if ranks.is_rank_zero:
            generated = student.generate(PROMPTS, SAMPLING, seed=3)
            completions.append([generation.token_ids for generation in generated])

    sample()
    for step in range(done, case.steps):
        metrics.append(step_of(config, learner, ranks, case, step))
        sample()
    moments = learner.optimizer.state_dict()["state"]
    if not ranks.is_rank_zero:
        learner.optimizer.state_dict()  # takes part in saving
        return {}
    save_checkpoint(
        config,
        step=case.steps,
        student=student,
        optimizer=learner.optimizer,
        manifests={},
        identity=RunIdentity.of(config, []),
    )
    return {
        "metrics": metrics,
        "completions": completions,
        "moments": moments,
        "weights": {k: v.clone() for k, v in student.full_model().state_dict().items()},
    }


def train_on_ranks(ranks: Ranks, folder: Path, cases: list[Case]) -> None:
    for case in cases:
        state = trained(folder, case, ranks)
        if ranks.is_rank_zero:
            torch.save(state, folder / f"{case.name}.pt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Students, and checkpoints of a single rank."""
    folder = tmp_path_factory.mktemp("ranks")
    tiny_models.save(model_of("qwen"), tokenizer("digit"), folder / "untied")
    tied = model_of("qwen", 1)
    tied.resize_token_embeddings(int(tied.config.vocab_size) + 1)
    tied.config.tie_word_embeddings = True
    tied.tie_weights()
    tiny_models.save(tied, tokenizer("digit"), folder / "tied")
    trained(folder, Case("tied", "none"))
    trained(folder, Case("tied", "none", lora=True))
    return folder


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[Case, dict[str, Any]]:
    """Every case on two ranks."""
    cases = [*CASES, *[case for case in RESUMED if case.sharding != "none"]]
    assert on_ranks(2, train_on_ranks, folder, cases) == ([0, 0], [])
    return {case: torch.load(folder / f"{case.name}.pt", weights_only=False) for case in cases}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_two_ranks_make_the_steps_of_one(
    folder: Path, results: dict[Case, dict[str, Any]], case: Case
) -> None:
    single = Case(
        case.model,
        "none",
        budget=10_000,
        examples=case.examples,
        lora=case.lora,
        packing="padded",
    )
    assert_same(results[case], trained(folder, single))


@pytest.mark.parametrize("case", RESUMED, ids=lambda case: f"{case.resume} on {case.sharding}")
def test_a_checkpoint_fits_any_number_of_ranks(
    folder: Path, results: dict[Case, dict[str, Any]], case: Case
) -> None:
    resumed = results[case] if case in results else trained(folder, case)
    straight = trained(folder, Case("tied", "none", steps=3, budget=10_000, lora=case.lora))
    for name in ("metrics", "completions"):
        straight[name] = straight[name][2:]
    assert_same(resumed, straight)


def assert_same(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compare numbers to 1e-5, and completions exactly."""
    for metrics, other in zip(actual["metrics"], expected["metrics"], strict=True):
        assert metrics == pytest.approx(other, rel=1e-5)
    assert actual["completions"] == expected["completions"]
    assert_close(actual["weights"], expected["weights"])
    assert actual["moments"].keys() == expected["moments"].keys()
    for number, moments in expected["moments"].items():
        assert_close(actual["moments"][number], moments)


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=1e-5, atol=1e-5, msg=name)


def lose_a_rank(ranks: Ranks, folder: Path, how: str) -> None:
    """Rank 1 fails during the second micro-batch."""
    case = Case("untied", "fsdp")
    config = config_of(folder, case)
    if ranks.rank:
        losses, calls = Student.losses, [0]

        def failing(self: Student, *arguments: Any, **settings: Any) -> Any:
            calls[0] += 1
            if calls[0] == 2:
                if how == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise RuntimeError("no memory left\nand more")
            return losses(self, *arguments, **settings)

        Student.losses = failing

    student = Student.load(config.student, ranks)
    learner = learner_of(config, student)
    for step in range(2):
        step_of(config, learner, ranks, case, step)


@pytest.mark.parametrize(
    ("how", "codes", "sentence"),
    [
        ("raised", [1, 2], r"student rank 1 of 2 failed: RuntimeError\('no memory left.*"),
        (
            "killed",
            [2, -signal.SIGKILL],
            r"a student rank was lost \(.*last checkpoint, which is complete",
        ),
    ],
)
def test_a_failing_rank_ends_all_with_one_message(
    folder: Path, how: str, codes: list[int], sentence: str
) -> None:
    exit_codes, messages = on_ranks(2, lose_a_rank, folder, how)
    assert exit_codes == codes
    assert len(messages) == 1
    assert re.fullmatch(sentence, messages[0])
