"""From a loss's settings to the loss."""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from mopd_losses.alignment.byte_alignment import align
from mopd_losses.build import build_loss, projection_for
from mopd_losses.config import (
    AlmConfig,
    CtkdConfig,
    GoldConfig,
    HklConfig,
    K2Config,
    K3Config,
    LossConfig,
    PklParityConfig,
    PolicyGradientConfig,
    PrefixKlConfig,
    SimctConfig,
    TopKKlConfig,
    UldConfig,
)
from mopd_losses.core.loss import AlignedPair
from mopd_losses.core.student_rows import DenseRows
from mopd_losses.projection.cache import DeviceProjection, ProjectionCache
from mopd_losses.projection.matrix import (
    ProjectionMatrix,
    ProjectionSettings,
    build_projection,
    identity_projection,
)
from mopd_losses.topk.topk_targets import TopKTargets
from mopd_protocol.errors import ConfigError
from mopd_protocol.samples import TeacherScore
from mopd_protocol.tokenizers.token_table import TextEncoder
from mopd_protocol.topk_logprobs import TopKLogprobs
from tests.losses.dense import ctkd
from tests.losses.families import Family, family, vocabularies

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


@pytest.mark.parametrize(
    "config",
    [
        CtkdConfig(divergence="jsd"),
        CtkdConfig(form="renormalised", kd_temperature=2.0),
        PrefixKlConfig(),
        CtkdConfig(span_rows="pooled"),
        GoldConfig(),
        UldConfig(),
        AlmConfig(),
        SimctConfig(),
        PklParityConfig(),
        HklConfig(),
        PolicyGradientConfig(),
        K2Config(),
        K3Config(),
    ],
    ids=lambda config: config.type,
)
def test_every_loss_of_the_table_compares_two_tokenizers(config: LossConfig) -> None:
    student, teacher = family("digit"), family("sentencepiece")
    sides, cache = vocabularies(student, teacher), ProjectionCache()
    text = "12 + 30 = 42, the quick brown fox"
    comparison = comparison_of(student, teacher, text)
    loss = build_loss(config, projection_for(config, sides, cache), sides, cache=cache, device=CPU)
    slots = len(comparison.student)
    logits = torch.randn(
        slots, student.width, generator=torch.Generator().manual_seed(1), requires_grad=True
    )
    rows = DenseRows(logits, torch.tensor(student.table.real_ids(student.width)))
    found = loss(rows, loss.targets([comparison], [0]))
    assert found.per_token.shape == (slots,)
    assert found.per_token.isfinite().all()
    found.per_token.sum().backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    assert (logits.grad != 0).any()


class CountsCopies(ProjectionCache):
    """Remembers how many copies for a device it was asked for."""

    copies = 0

    def on(self, device: torch.device | str, matrix: ProjectionMatrix) -> DeviceProjection:
        """As ``ProjectionCache``."""
        self.copies += 1
        return super().on(device, matrix)


@pytest.mark.parametrize(
    ("config", "copies", "encoders"),
    [
        (CtkdConfig(), 1, 0),
        (CtkdConfig(span_rows="pooled"), 1, 0),
        (UldConfig(), 1, 0),
        (PklParityConfig(), 1, 0),
        (PrefixKlConfig(), 0, 1),
        (GoldConfig(), 0, 0),
        (SimctConfig(), 0, 0),
        (AlmConfig(), 0, 0),
        (HklConfig(), 0, 0),
        (PolicyGradientConfig(), 0, 0),
        (K2Config(), 0, 0),
        (K3Config(), 0, 0),
    ],
    ids=lambda value: value if isinstance(value, int) else value.type,
)
def test_what_a_loss_does_not_read_is_not_made(
    config: LossConfig, copies: int, encoders: int
) -> None:
    student, cache = family("digit"), CountsCopies()
    made: list[TextEncoder] = []

    def encoder() -> TextEncoder:
        made.append(student.encoder)
        return student.encoder

    sides = replace(vocabularies(student, family("sentencepiece")), student_encoder=encoder)
    build_loss(config, projection_for(config, sides, cache), sides, cache=cache, device=CPU)
    assert (cache.copies, len(made)) == (copies, encoders)


@pytest.mark.parametrize(
    "config", [AlmConfig(), GoldConfig(), SimctConfig(), UldConfig(), K2Config()]
)
def test_losses_on_likelihoods_refuse_a_warmed_teacher(config: LossConfig) -> None:
    sides, cache = vocabularies(family("digit"), family("digit")), ProjectionCache()
    projection = projection_for(config, sides, cache)
    with pytest.raises(ConfigError, match="its teacher must score at temperature 1, not 2"):
        build_loss(config, projection, sides, cache=cache, device=CPU, temperature=2.0)


def comparison_of(student: Family, teacher: Family, text: str) -> AlignedPair:
    """One text in both tokenizations, with a made-up but proper top-k of the teacher."""
    ours = student.table.sequence([*student.encoder.encode(text), student.table.roles.ending[0]])
    theirs = teacher.table.sequence([*teacher.encoder.encode(text), teacher.table.roles.ending[0]])
    generator = np.random.default_rng(0)
    others = generator.permutation(np.flatnonzero(teacher.table.present))
    ids = np.stack([[own, *others[others != own][:3]] for own in theirs.token_ids.tolist()])
    logprobs = np.log(np.tile([0.5, 0.2, 0.1, 0.05], (len(theirs), 1)))
    score = TeacherScore(
        "m" * 32,
        theirs,
        TopKLogprobs(ids, logprobs, logprobs[:, 0], np.full(len(theirs), np.log(0.15))),
    )
    sampled = np.full(len(ours), -1.0, dtype=np.float32)
    return AlignedPair(ours, sampled, score, align(ours, theirs))
