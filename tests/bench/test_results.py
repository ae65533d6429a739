"""The benchmarks of claims and of language models, with a few steps of everything."""

import json
import math
from pathlib import Path

import pytest

from bench.language_model.__main__ import main as language_model
from bench.results import averages, controls, recovery, reinforcement, truncation
from bench.results.__main__ import CLAIMS
from bench.results.claim import Claim
from bench.results.page import BEGIN, END, write_page
from tests import tiny_models


@pytest.fixture
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, names in (
        (controls, {"_STEPS": 20, "_WARM_STEPS": 1}),
        (recovery, {"_STEPS": 40, "_LEARN_STEPS": 1, "_NEW_STEPS": 1}),
        (averages, {"_STEPS": 1, "_EVERY": 1, "TEACHERS": (2,)}),
        (reinforcement, {"_STEPS": 2, "_TEACHER_STEPS": 1, "LENGTHS": (1, 2, 4)}),
        (truncation, {"_STEPS": 2, "SIZES": (20, 1_000)}),
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


@pytest.mark.slow
def test_a_pruned_model_is_trained_and_measured(tmp_path: Path) -> None:
    tokenizer = tiny_models.digit_tokenizer()
    teacher = tiny_models.save(tiny_models.qwen(tokenizer), tokenizer, tmp_path / "published")
    options = "--removed-layers 1 --steps 1 --prompts 4 --prompts-per-step 2 --held-out 2"
    arguments = ["--teacher", str(teacher), "--folder", str(tmp_path / "run"), *options.split()]
    path = tmp_path / "result.json"
    language_model([*arguments, "--max-new-tokens", "4", "--top-k", "8", "--json", str(path)])
    figures = json.loads(path.read_text())
    assert figures["before"].keys() == figures["after"].keys() == figures["teacher"].keys()
    assert figures["teacher"]["top1_agreement"] == 1.0
    assert figures["before"] != figures["after"]
