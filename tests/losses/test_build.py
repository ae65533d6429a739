"""From a loss's settings to the loss."""

import subprocess
import sys

import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from mopd_losses.build import build_loss, projection_for
from mopd_losses.config import CtkdConfig, LossConfig, TopKKlConfig
from mopd_losses.projection import ProjectionSettings, build_projection, identity_projection
from mopd_losses.projection_cache import ProjectionCache
from mopd_losses.student_rows import DenseRows
from mopd_losses.topk_targets import TopKTargets
from mopd_protocol.errors import ConfigError
from tests.losses.dense import ctkd
from tests.losses.families import family, vocabularies

CPU = torch.device("cpu")


def some_targets() -> TopKTargets:
    return TopKTargets(
        torch.tensor([0, 2]),
        torch.tensor([[7, 9], [300, 12]]),
        torch.tensor([[0.5, 0.3], [0.7, 0.2]]).log(),
        torch.tensor([0.2, 0.1]).log(),
    )


def test_topk_kl_refuses_two_tokenizers_and_says_what_to_use() -> None:
    student, teacher = family("digit"), family("whole_number")
    with pytest.raises(ConfigError) as refused:
        projection_for(TopKKlConfig(), vocabularies(student, teacher), ProjectionCache())
    assert str(refused.value) == (
        "loss 'topk_kl' needs one tokenizer on both sides, but the student has "
        f"{student.table.fingerprint[:12]} and the teacher {teacher.table.fingerprint[:12]}; "
        "use 'ctkd'"
    )


def test_topk_kl_compares_through_the_identity() -> None:
    side = family("digit")
    found = projection_for(TopKKlConfig(), vocabularies(side, side), ProjectionCache())
    assert found.key == identity_projection(side.table, logit_width=side.width).key


@pytest.mark.parametrize("name", ["digit", "whole_number", "sentencepiece"])
def test_ctkd_of_one_tokenizer_compares_through_the_identity_too(name: str) -> None:
    side = family(name)
    found = projection_for(CtkdConfig(), vocabularies(side, side), ProjectionCache())
    assert found.key == identity_projection(side.table, logit_width=side.width).key


def test_ctkd_uses_its_own_projection_settings_and_the_students_width() -> None:
    student, teacher = family("digit"), family("sentencepiece")
    config = CtkdConfig(projection=ProjectionSettings(weights="decay"))
    found = projection_for(config, vocabularies(student, teacher), ProjectionCache())
    expected = build_projection(
        student.table,
        teacher.table,
        teacher.encoder,
        student_width=student.width,
        settings=config.projection,
    )
    assert found.key == expected.key
    assert found.student_width == student.width


@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl"])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("kind", [CtkdConfig, TopKKlConfig])
def test_a_built_loss_has_the_divergence_and_the_temperature_that_were_asked_for(
    kind: type[CtkdConfig] | type[TopKKlConfig], divergence: str, temperature: float
) -> None:
    side = family("digit")
    cache = ProjectionCache()
    config = kind(divergence=divergence)
    projection = projection_for(config, vocabularies(side, side), cache)
    sides = vocabularies(side, side)
    loss = build_loss(config, projection, sides, cache=cache, device=CPU, temperature=temperature)
    logits = torch.randn(4, side.width, generator=torch.Generator().manual_seed(0))
    expected = ctkd(
        logits,
        some_targets(),
        cache.on(CPU, projection),
        divergence=config.divergence,
        temperature=temperature,
    )
    rows = DenseRows(logits, cache.on(CPU, projection).real_ids)
    assert torch.equal(loss(rows, some_targets()).per_token, expected.per_token)


def test_the_temperature_is_one_unless_said_otherwise() -> None:
    side = family("digit")
    cache = ProjectionCache()
    projection = projection_for(CtkdConfig(), vocabularies(side, side), cache)
    logits = torch.randn(4, side.width, generator=torch.Generator().manual_seed(0))
    rows = DenseRows(logits, cache.on(CPU, projection).real_ids)
    plain, one, two = (
        build_loss(
            CtkdConfig(), projection, vocabularies(side, side), cache=cache, device=CPU, **named
        )(rows, some_targets())
        for named in ({}, {"temperature": 1.0}, {"temperature": 2.0})
    )
    assert torch.equal(plain.per_token, one.per_token)
    assert not torch.allclose(plain.per_token, two.per_token)


def test_settings_are_told_apart_by_their_type() -> None:
    adapter: TypeAdapter[LossConfig] = TypeAdapter(LossConfig)
    assert adapter.validate_python({"type": "topk_kl"}) == TopKKlConfig()
    assert adapter.validate_python({"type": "ctkd"}) == CtkdConfig()
    for wrong in ({"type": "mse"}, {"type": "topk_kl", "projection": {}}, {"divergence": "x"}):
        with pytest.raises(ValidationError):
            adapter.validate_python(wrong)


@pytest.mark.parametrize("module", ["mopd_losses.build", "mopd_losses.config"])
def test_losses_load_neither_transport_nor_models(module: str) -> None:
    heavy = ["httpx", "ray", "vllm", "transformers", "fastapi"]
    if module == "mopd_losses.config":
        heavy.append("torch")
    code = f"import sys, {module}; print([name for name in {heavy} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
