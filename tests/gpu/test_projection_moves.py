"""Projections are built on the CPU, copied to a device once, and freed with their cache."""

import gc
from dataclasses import fields

import pytest
import torch

from mopd_losses.build import build_loss
from mopd_losses.config import CtkdConfig, UldConfig
from mopd_losses.projection.cache import DeviceProjection, ProjectionCache
from mopd_losses.projection.matrix import ProjectionMatrix
from tests.losses.families import Family, family
from tests.trainer.scored_examples import teacher_tokenizer
from tests.trainer.students import CPU, student_of

pytestmark = pytest.mark.gpu


def matrix(cache: ProjectionCache, student: Family, teacher: Family) -> ProjectionMatrix:
    return cache.matrix(
        student.table, teacher.table, teacher.encoder, student_width=student.logit_width
    )


def tensors(projection: DeviceProjection) -> list[torch.Tensor]:
    return [getattr(projection, field.name) for field in fields(projection)]


def allocated(device: torch.device) -> int:
    gc.collect()
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def test_a_projection_moves_once_for_both_sides_and_every_name(device: torch.device) -> None:
    before = allocated(device)
    cache = ProjectionCache()
    sides = family("digit"), family("sentencepiece")
    moved: list[torch.Tensor] = []
    for student, teacher in (sides, sides[::-1]):
        built = matrix(cache, student, teacher)
        copy, on_cpu = cache.on(device, built), cache.on(CPU, built)
        for name in (device, str(device), device.type, torch.device(device.type, 0)):
            assert cache.on(name, matrix(cache, student, teacher)) is copy
        assert cache.on("cpu", built) is on_cpu
        for own, other in zip(tensors(copy), tensors(on_cpu), strict=True):
            assert own.device == device
            assert torch.equal(own.cpu(), other)
        moved += tensors(copy)
    if device.type == "cuda":
        rounded = sum(-(-max(tensor.nbytes, 1) // 512) * 512 for tensor in moved)
        assert allocated(device) - before <= rounded
    del cache, copy, on_cpu, moved, own, other
    assert allocated(device) == before


def test_losses_of_one_pair_share_the_copy(device: torch.device) -> None:
    cache, identity = ProjectionCache(), student_of("qwen").identity
    teacher = teacher_tokenizer("whole_number")
    configs = (CtkdConfig(span_rows="pooled"), UldConfig())
    sizes = [allocated(device)]
    for config in configs:
        for name in (device, device.type):
            build_loss(config, identity, teacher, name, cache=cache)
            sizes.append(allocated(device))
    assert sizes[1] > sizes[0] or device.type == "cpu"
    assert set(sizes[1:]) == {sizes[1]}
    (copy,) = cache._copies.values()
    assert {tensor.device for tensor in tensors(copy)} == {device}
