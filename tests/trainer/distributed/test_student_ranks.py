"""One student on two ranks: the step of a single rank, whatever is sharded and however packed."""

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
from mopd_trainer.data.packing import pack
from mopd_trainer.distributed.process_group import Ranks
from mopd_trainer.run_folder.checkpoint import Checkpoint, save_checkpoint
from mopd_trainer.student.student import Student
from mopd_trainer.training.learner import Learner
from tests import tiny_models
from tests.trainer.judged import losses_for
from tests.trainer.lora_students import LORA
from tests.trainer.ranked import led, on_ranks
from tests.trainer.runs import run_values
from tests.trainer.students import model_of, tokenizer
from tests.trainer.training.test_learner import TEACHER_WEIGHTS, examples

pytestmark = pytest.mark.slow

PROMPTS = [[5, 6, 7], [8, 9]]
WRITTEN = RolloutConfig(max_new_tokens=6)


@dataclass(frozen=True)
class Case:
    """A model, what becomes of it, and what it is trained on."""

    model: str
    sharding: str
    budget: int = 45
    examples: int = 4  # of those there are, the first
    steps: int = 2
    resume: str | None = None  # the name of the case whose checkpoint is gone on from
    lora: bool = False

    @property
    def name(self) -> str:
        kind = "lora-" if self.lora else ""
        return f"{kind}{self.model}-{self.sharding}-{self.budget}-{self.examples}-{self.steps}"


#: A head of its own and one that is the embedding (of an odd number of rows); micro-batches that
#: two ranks can share evenly and not; a step with one example, of which one rank has nothing.
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


def step_of(config: RunConfig, learner: Learner, ranks: int, case: Case, step: int) -> Any:
    """Told by the step: metrics, each teacher's nats, and those of some completions' tokens."""
    chosen = examples()[: case.examples]
    budget = config.student.tokens_per_micro_batch
    batches = pack(chosen, tokens_per_micro_batch=budget, ranks=ranks, shown=chosen[-3:])
    tokens = sum(len(example.rollout.completion) for example in chosen)
    metrics, losses = learner.update(batches, tokens=tokens, step=step)
    of_tokens = {
        f"{name}/shown/{number}/{at}": nats if math.isfinite(nats) else -1.0
        for name, loss in losses.items()
        for number, values in loss.shown.items()
        for at, nats in enumerate(values.tolist())
    }
    assert ranks > 1 or of_tokens
    return metrics | of_tokens | {name: loss.nats for name, loss in losses.items()}


def trained(folder: Path, case: Case, ranks: Ranks | None = None) -> dict[str, Any]:
    """The case's steps, completions before and after, and a checkpoint."""
    config = config_of(folder, case)
    student = Student.load(config.student, ranks)
    learner = learner_of(config, student)
    done = 0
    if case.resume is not None:
        checkpoint = Checkpoint.open(folder / case.resume / "checkpoints" / "step-00000002")
        checkpoint.restore(student, learner.optimizer)
        done = checkpoint.step
    told: list[Any] = []
    written = [[w.token_ids for w in student.generate(PROMPTS, WRITTEN, seed=3)]]
    for step in range(done, case.steps):
        told.append(step_of(config, learner, student.ranks.size, case, step))
        written.append([w.token_ids for w in student.generate(PROMPTS, WRITTEN, seed=3)])
    save_checkpoint(
        config,
        step=case.steps,
        student=student,
        optimizer=learner.optimizer,
        manifests={},
        identity=RunIdentity.of(config, []),
    )
    return {
        "told": told,
        "written": written,
        "moments": learner.optimizer.state_dict()["state"],
        "weights": {k: v.clone() for k, v in student.whole_model().state_dict().items()},
    }


def train_on_ranks(ranks: Ranks, folder: Path, cases: list[Case]) -> None:
    for case in cases:

        def work(case: Case = case) -> None:
            found = trained(folder, case, ranks)
            torch.save(found, folder / f"{case.name}.pt")

        led(ranks, config_of(folder, case).student, work)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the students are, and a checkpoint that one rank made."""
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
def found(folder: Path) -> dict[Case, dict[str, Any]]:
    """What two ranks made of every case."""
    cases = [*CASES, *[case for case in RESUMED if case.sharding != "none"]]
    assert on_ranks(2, train_on_ranks, folder, cases) == ([0, 0], [])
    return {case: torch.load(folder / f"{case.name}.pt", weights_only=False) for case in cases}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_two_ranks_make_the_steps_of_one(
    folder: Path, found: dict[Case, dict[str, Any]], case: Case
) -> None:
    alone = Case(case.model, "none", budget=10_000, examples=case.examples, lora=case.lora)
    assert_same(found[case], trained(folder, alone))


@pytest.mark.parametrize("case", RESUMED, ids=lambda case: f"{case.resume} on {case.sharding}")
def test_a_checkpoint_does_not_know_how_many_ranks_made_it(
    folder: Path, found: dict[Case, dict[str, Any]], case: Case
) -> None:
    resumed = found[case] if case in found else trained(folder, case)
    straight = trained(folder, Case("tied", "none", steps=3, budget=10_000, lora=case.lora))
    for name in ("told", "written"):
        straight[name] = straight[name][2:]
    assert_same(resumed, straight)


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """To 1e-5, and the same completions."""
    for ours, theirs in zip(found["told"], expected["told"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    assert found["written"] == expected["written"]
    assert_close(found["weights"], expected["weights"])
    assert found["moments"].keys() == expected["moments"].keys()
    for number, moments in expected["moments"].items():
        assert_close(found["moments"][number], moments)


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5, msg=name)


def lose_a_rank(ranks: Ranks, folder: Path, how: str) -> None:
    """Rank 1 fails in the middle of the second step."""
    case = Case("untied", "fsdp")
    config = config_of(folder, case)
    if ranks.rank:
        honest, calls = Student.losses, [0]

        def failing(self: Student, *arguments: Any, **settings: Any) -> Any:
            calls[0] += 1
            if calls[0] == 2:
                if how == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise RuntimeError("no memory left\nand more")
            return honest(self, *arguments, **settings)

        Student.losses = failing

    def work() -> None:
        student = Student.load(config.student, ranks)
        learner = learner_of(config, student)
        step_of(config, learner, 2, case, 0)
        step_of(config, learner, 2, case, 1)

    led(ranks, config.student, work)


@pytest.mark.parametrize(
    ("how", "codes", "sentence"),
    [
        ("raised", [1, 2], r"student rank 1 of 2 failed: RuntimeError\('no memory left.*"),
        (
            "killed",
            [2, -signal.SIGKILL],
            r"a student rank is gone \(.*last checkpoint is whole",
        ),
    ],
)
def test_a_rank_that_fails_ends_all_with_one_sentence(
    folder: Path, how: str, codes: list[int], sentence: str
) -> None:
    ended, told = on_ranks(2, lose_a_rank, folder, how)
    assert ended == codes
    assert len(told) == 1
    assert re.fullmatch(sentence, told[0])
