"""The benchmarks of claims and of language models, with a few steps of everything."""

import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.language_model.__main__ import main as language_model
from bench.language_model.measurement import Change, Measure
from bench.results import averages, controls, recovery, reinforcement, truncation, uncertainty
from bench.results.__main__ import CLAIMS
from bench.results.claim import Claim
from bench.results.page import BEGIN, END, write_page
from mopd_trainer import Learner, Student, StudentConfig
from tests import tiny_models


@pytest.fixture
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, names in (
        (controls, {"_STEPS": 20, "_WARM_STEPS": 1}),
        (recovery, {"_STEPS": 40, "_LEARN_STEPS": 1, "_NEW_STEPS": 1}),
        (averages, {"_STEPS": 1, "_EVERY": 1, "TEACHERS": (2,)}),
        (reinforcement, {"_STEPS": 2, "_TEACHER_STEPS": 1, "LENGTHS": (1, 2, 4)}),
        (truncation, {"_STEPS": 2, "SIZES": (20, 1_000)}),
        (uncertainty, {"_STEPS": 2, "_WARM_STEPS": 2}),
    ):
        for name, value in names.items():
            monkeypatch.setattr(module, name, value)


@pytest.mark.slow
@pytest.mark.usefixtures("few_steps")
@pytest.mark.parametrize("name", CLAIMS)
def test_a_claim_has_a_number_per_seed_and_a_page(tmp_path: Path, name: str) -> None:
    claims = CLAIMS[name](1)
    for claim in claims:
        assert claim.name.startswith(name)
        for columns in claim.rows.values():
            assert len(columns) == len(claim.columns)
            assert all(len(column) == 1 and math.isfinite(column[0]) for column in columns)
    page = tmp_path / "results.md"
    page.write_text(f"before\n{BEGIN}\nreplaced text\n{END}\nafter\n")
    write_page(claims, page)
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "replaced text" not in text
    assert (tmp_path / f"claim-{name}.png").stat().st_size > 1_000
    loaded = [Claim(**json.loads(json.dumps(claim.json()))) for claim in claims]
    write_page(loaded, page)
    assert page.read_text() == text


def test_reverse_kl_without_a_tail_loses_mass_and_with_one_keeps_it() -> None:
    lost, kept = (
        truncation._fit(2.0, "reverse_kl", form, 20, 0) for form in ("plain", "tail_bucket")
    )
    assert lost[1] < 0.5
    assert lost[2] < 0
    assert kept[1] == pytest.approx(1, abs=0.02)


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    """Three steps with a teacher of single digits."""
    tokenizer = tiny_models.digit_tokenizer()
    teacher = tiny_models.save(tiny_models.qwen(tokenizer), tokenizer, tmp_path / "published")
    options = "--steps 3 --save-steps 1 --prompts 4 --prompts-per-step 2 --held-out 2 --top-k 8"
    options += " --learning-rate 0.01 --max-new-tokens 4"
    files = ["--teacher", str(teacher), "--folder", str(tmp_path / "run")]
    return [*files, *options.split(), "--json", str(tmp_path / "json")]


def figures(arguments: list[str]) -> Any:
    language_model(arguments)
    return json.loads(Path(arguments[-1]).read_text())


def losses(result: dict[str, Any]) -> list[float]:
    return [line["loss"] for line in result["journal"] if "loss" in line]


def test_a_measure_has_the_range_of_its_texts() -> None:
    same = Measure.of([2.0, 4.0, 6.0], [1.0, 2.0, 3.0])
    assert (same.mean, same.low, same.high) == (2.0, 2.0, 2.0)
    differing = Measure.of([0.0] * 50 + [2.0] * 50, [1.0] * 100)
    assert differing.mean == 1.0
    assert differing.low == pytest.approx(0.8, abs=0.03)
    assert differing.high == pytest.approx(1.2, abs=0.03)


def test_a_change_common_to_all_texts_has_a_narrow_range() -> None:
    texts = [float(index % 10) for index in range(100)]
    before, after, teacher = (
        Measure.of([value + shift for value in texts], [1.0] * 100) for shift in (4.0, 3.0, 2.0)
    )
    change = Change.of(before, after, teacher)
    assert change.difference == pytest.approx((-1.0, -1.0, -1.0))
    assert change.gap_closed == pytest.approx((0.5, 0.5, 0.5))
    assert before.low < after.high  # their own ranges overlap


def test_a_gap_that_may_be_none_has_no_share() -> None:
    before, teacher = (Measure.of([shift, -shift] * 20, [1.0] * 40) for shift in (1.0, 2.0))
    assert Change.of(before, teacher, teacher).gap_closed is None


@pytest.mark.slow
def test_a_pruned_model_stopped_by_a_signal_is_measured_and_trained_further(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Learner.update

    def update(self: Learner, *batches: Any, **output: Any) -> Any:
        if output["step"] == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, *batches, **output)

    pruned = [*arguments[:4], "--removed-layers", "1", *arguments[4:]]
    with monkeypatch.context() as patched:
        patched.setattr(Learner, "update", update)
        stopped = figures(pruned)
    assert len(losses(stopped)) == 2
    assert stopped["before"].keys() == stopped["after"].keys() == stopped["teacher"].keys()
    perfect = stopped["teacher"]["top1_agreement"]
    assert (perfect["mean"], perfect["low"], perfect["high"]) == (1.0, 1.0, 1.0)
    assert stopped["before"] != stopped["after"]
    nats = {side: stopped[side]["nats_per_token"]["mean"] for side in ("before", "after")}
    difference = stopped["change"]["nats_per_token"]["difference"]
    assert difference[0] == pytest.approx(nats["after"] - nats["before"])
    whole = figures(pruned)
    assert len(losses(whole)) == 3
    assert losses(whole)[:2] == losses(stopped)
    assert whole["before"] == stopped["before"]
    assert whole["after"] != stopped["after"]


@pytest.mark.slow
def test_a_model_with_another_tokenizer_has_mean_embeddings_and_is_trained(
    arguments: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "tokenizer.json"
    tiny_models.whole_number_tokenizer().backend_tokenizer.save(str(path))
    options = "--removed-layers", "0", "--student-tokenizer", str(path)
    trained = figures([*arguments[:4], *options, *arguments[4:]])
    assert not trained["before"].keys() & {"nats_per_token", "top1_agreement"}
    assert trained["before"]["samples_bits_per_byte"] != trained["after"]["samples_bits_per_byte"]
    assert trained["before"] != trained["after"]
    teacher, student = (
        Student.load(StudentConfig(model=str(tmp_path / "run" / name), device="cpu"))
        for name in ("teacher", "student-other-tokenizer")
    )
    rows = teacher.full_model().get_input_embeddings().weight
    for token in (student.identity.encoder.encode("417")[0], student.table.roles.ending[0]):
        ids = teacher.identity.encoder.encode(student.table.bytes_of(token).decode())
        mean = rows[ids or [teacher.table.roles.ending[0]]].mean(dim=0)
        own = student.full_model().get_input_embeddings().weight[token]
        torch.testing.assert_close(own, mean)
