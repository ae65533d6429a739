"""From a loss's settings to the loss."""

import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from mopd_losses.alignment.byte_alignment import align
from mopd_losses.build import build_loss
from mopd_losses.config import (
    AlmConfig,
    AutoConfig,
    CtkdConfig,
    GoldConfig,
    K2Config,
    K3Config,
    LossConfig,
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
from mopd_losses.projection.sides import find_projection, resolve_loss
from mopd_losses.sampled.policy_gradient import PolicyGradientLoss
from mopd_losses.topk.ctkd import CtkdLoss
from mopd_losses.topk.topk_divergence import TopKDivergenceLoss
from mopd_losses.topk.topk_targets import TopKTargets
from mopd_protocol.errors import ConfigError
from mopd_protocol.samples import TeacherScore
from mopd_protocol.tokenizers.token_table import TextEncoder, TokenTable
from mopd_protocol.topk_logprobs import TopKLogprobs
from tests.losses.families import Family, family

CPU = torch.device("cpu")


def some_targets() -> TopKTargets:
    return TopKTargets(
        torch.tensor([0, 2]),
        torch.tensor([[7, 9], [300, 12]]),
        torch.tensor([[0.5, 0.3], [0.7, 0.2]]).log(),
        torch.tensor([0.2, 0.1]).log(),
    )


def test_topk_kl_rejects_two_tokenizers_and_suggests_another_loss() -> None:
    student, teacher = family("digit"), family("whole_number")
    with pytest.raises(ConfigError) as refused:
        build_loss(TopKKlConfig(), student, teacher)
    assert refused.value.key == "loss.type"
    assert student.table.fingerprint[:12] in str(refused.value)
    assert teacher.table.fingerprint[:12] in str(refused.value)


def test_topk_kl_compares_through_the_identity() -> None:
    side = family("digit")
    projection = find_projection(TopKKlConfig(), side, side, ProjectionCache())
    assert projection.key == identity_projection(side.table, logit_width=side.logit_width).key


@pytest.mark.parametrize("name", ["digit", "whole_number", "sentencepiece"])
def test_ctkd_of_one_tokenizer_compares_through_the_identity_too(name: str) -> None:
    side = family(name)
    projection = find_projection(CtkdConfig(), side, side, ProjectionCache())
    assert projection.key == identity_projection(side.table, logit_width=side.logit_width).key


@pytest.mark.parametrize(
    ("name", "kind"), [("digit", TopKKlConfig), ("sentencepiece", PrefixKlConfig)]
)
def test_auto_is_the_loss_of_the_two_tokenizers(
    name: str, kind: type[TopKKlConfig] | type[PrefixKlConfig]
) -> None:
    student, teacher = family("digit"), family(name)
    auto, expected = (
        AutoConfig(divergence="jsd", teacher_weight=0.3),
        kind(divergence="jsd", teacher_weight=0.3),
    )
    assert resolve_loss(auto, student, teacher) == expected
    assert resolve_loss(AlmConfig(), student, teacher) == AlmConfig()
    comparison = comparison_of(student, teacher, "12 + 30 = 42")
    logits = torch.randn(len(comparison.student), student.logit_width)
    rows = DenseRows(logits, torch.tensor(student.table.real_ids(student.logit_width)))
    losses = [build_loss(config, student, teacher) for config in (auto, expected)]
    values = [loss(rows, loss.targets([comparison], [0])).per_token for loss in losses]
    assert torch.equal(*values)


def test_ctkd_uses_its_own_projection_settings_and_the_students_width() -> None:
    student, teacher = family("digit"), family("sentencepiece")
    config = CtkdConfig(projection=ProjectionSettings(weights="decay"))
    built = find_projection(config, student, teacher, ProjectionCache())
    expected = build_projection(
        student.table,
        teacher.table,
        teacher.encoder,
        student_width=student.logit_width,
        settings=config.projection,
    )
    assert built.key == expected.key
    assert built.student_width == student.logit_width


@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl"])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("kind", [CtkdConfig, TopKKlConfig])
def test_a_built_loss_has_the_configured_divergence_and_temperature(
    kind: type[CtkdConfig] | type[TopKKlConfig], divergence: str, temperature: float
) -> None:
    side = family("digit")
    cache = ProjectionCache()
    config = kind(divergence=divergence)
    projection = find_projection(config, side, side, cache)
    loss = build_loss(config, side, side, CPU, cache=cache, temperature=temperature)
    logits = torch.randn(4, side.logit_width, generator=torch.Generator().manual_seed(0))
    on_device = cache.on(CPU, projection)
    expected = TopKDivergenceLoss(on_device, config, temperature)
    rows = DenseRows(logits, on_device.real_ids)
    topk = loss.topk if isinstance(loss, CtkdLoss) else loss
    assert torch.equal(
        topk(rows, some_targets()).per_token, expected(rows, some_targets()).per_token
    )


def test_settings_are_distinguished_by_their_type() -> None:
    adapter: TypeAdapter[LossConfig] = TypeAdapter(LossConfig)
    assert adapter.validate_python({"type": "topk_kl"}) == TopKKlConfig()
    assert adapter.validate_python({"type": "ctkd"}) == CtkdConfig()
    for wrong in ({"type": "mse"}, {"type": "topk_kl", "projection": {}}, {"divergence": "x"}):
        with pytest.raises(ValidationError):
            adapter.validate_python(wrong)


@pytest.mark.smoke
@pytest.mark.parametrize("module", ["mopd_losses.build", "mopd_losses.config"])
def test_losses_load_neither_transport_nor_models(module: str) -> None:
    heavy = ["httpx", "ray", "vllm", "transformers", "fastapi"]
    if module == "mopd_losses.config":
        heavy.append("torch")
    code = f"import sys, {module}; print([name for name in {heavy} if name in sys.modules])"
    completed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert completed.stdout.strip() == "[]"


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
        PolicyGradientConfig(),
        K2Config(),
        K3Config(),
    ],
    ids=lambda config: config.type,
)
def test_every_loss_of_the_table_compares_two_tokenizers(config: LossConfig) -> None:
    student, teacher = family("digit"), family("sentencepiece")
    text = "12 + 30 = 42, the quick brown fox"
    comparison = comparison_of(student, teacher, text)
    loss = build_loss(config, student, teacher)
    positions = len(comparison.student)
    logits = torch.randn(
        positions,
        student.logit_width,
        generator=torch.Generator().manual_seed(1),
        requires_grad=True,
    )
    rows = DenseRows(logits, torch.tensor(student.table.real_ids(student.logit_width)))
    output = loss(rows, loss.targets([comparison], [0]))
    assert output.per_token.shape == (positions,)
    assert output.per_token.isfinite().all()
    output.per_token.sum().backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    assert (logits.grad != 0).any()


class CountingCache(ProjectionCache):
    """Counts the projections and the device copies that a loss reads."""

    matrices = copies = 0

    def matrix(self, *arguments: Any, **settings: Any) -> ProjectionMatrix:
        """See ``ProjectionCache``."""
        self.matrices += 1
        return super().matrix(*arguments, **settings)

    def on(self, device: torch.device | str, matrix: ProjectionMatrix) -> DeviceProjection:
        """See ``ProjectionCache``."""
        self.copies += 1
        return super().on(device, matrix)


@dataclass(frozen=True, eq=False)
class CountingStudent:
    """A student's tokenizer that counts how often its encoder is read."""

    family: Family
    encoders: list[TextEncoder] = field(default_factory=list[TextEncoder])

    @property
    def table(self) -> TokenTable:
        """The table of the family."""
        return self.family.table

    @property
    def logit_width(self) -> int:
        """The logit width of the family."""
        return self.family.logit_width

    @property
    def encoder(self) -> TextEncoder:
        """The encoder of the family, counted."""
        self.encoders.append(self.family.encoder)
        return self.family.encoder


@pytest.mark.parametrize(
    ("config", "matrices", "copies", "encoders"),
    [
        (CtkdConfig(), 1, 1, 1),
        (CtkdConfig(span_rows="pooled"), 1, 1, 0),
        (UldConfig(), 1, 1, 0),
        (GoldConfig(), 1, 0, 0),
        (SimctConfig(), 1, 0, 0),
        (PrefixKlConfig(), 0, 0, 1),
        (AlmConfig(), 0, 0, 0),
        (PolicyGradientConfig(), 0, 0, 0),
        (K2Config(), 0, 0, 0),
        (K3Config(), 0, 0, 0),
    ],
    ids=lambda value: value if isinstance(value, int) else value.type,
)
def test_only_what_a_loss_reads_is_built(
    config: LossConfig, matrices: int, copies: int, encoders: int
) -> None:
    student, cache = CountingStudent(family("digit")), CountingCache()
    build_loss(config, student, family("sentencepiece"), cache=cache)
    assert (cache.matrices, cache.copies, len(student.encoders)) == (matrices, copies, encoders)


@pytest.mark.parametrize(
    "config", [AlmConfig(), GoldConfig(), SimctConfig(), UldConfig(), K2Config()]
)
def test_losses_on_likelihoods_refuse_a_warmed_teacher(config: LossConfig) -> None:
    with pytest.raises(ConfigError) as caught:
        build_loss(config, family("digit"), family("digit"), temperature=2.0)
    assert caught.value.key == "temperature"


def test_a_baseline_needs_the_students_tokenizer() -> None:
    config = PolicyGradientConfig(baseline="top_k")
    student = family("digit")
    loss = build_loss(config, student, student)
    assert isinstance(loss, PolicyGradientLoss)
    assert loss.has_baseline
    with pytest.raises(ConfigError) as caught:
        build_loss(config, student, family("sentencepiece"))
    assert caught.value.key == "loss.baseline"


def comparison_of(student: Family, teacher: Family, text: str) -> AlignedPair:
    """One text in both tokenizations, with a made-up but proper top-k of the teacher."""
    student_tokens = student.table.sequence(
        [*student.encoder.encode(text), student.table.roles.ending[0]]
    )
    teacher_tokens = teacher.table.sequence(
        [*teacher.encoder.encode(text), teacher.table.roles.ending[0]]
    )
    generator = np.random.default_rng(0)
    others = generator.permutation(np.flatnonzero(teacher.table.present))
    ids = np.stack([[own, *others[others != own][:3]] for own in teacher_tokens.token_ids.tolist()])
    logprobs = np.log(np.tile([0.5, 0.2, 0.1, 0.05], (len(teacher_tokens), 1)))
    score = TeacherScore(
        "m" * 32,
        teacher_tokens,
        TopKLogprobs(ids, logprobs, logprobs[:, 0], np.full(len(teacher_tokens), np.log(0.15))),
    )
    sampled = np.full(len(student_tokens), -1.0, dtype=np.float32)
    return AlignedPair(student_tokens, sampled, score, align(student_tokens, teacher_tokens))
