"""Shard a model over ranks (FSDP2), and gather its weights and sum its gradients.

Gradients are summed over ranks, never averaged: the loss is divided by the token count of the
step on all ranks. All ranks must call the functions of this module together.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Partial, distribute_tensor
from transformers import PreTrainedModel

from mopd_protocol.errors import ConfigError

#: Gradient elements of one all-reduce.
_BUCKET_ELEMENTS = 2**25


def shard(model: PreTrainedModel, device: torch.device, ranks: int) -> None:
    """Shard every weight; FSDP gathers a layer only while it computes.

    FSDP does not gather the head: ``unsharded`` does so for the block-wise products, which keeps a
    head tied to the embedding one parameter with one gradient.

    Raises:
        ConfigError: when some weights are in no layer that can be sharded.
    """
    mesh = init_device_mesh(device.type, (ranks,))
    decoder: Any = model.base_model
    head: Any = model.get_output_embeddings()
    layers: set[str] = set(getattr(model, "_no_split_modules", None) or ())
    units = [module for module in decoder.modules() if type(module).__name__ in layers]
    embedding: Any = model.get_input_embeddings()
    tied = head.weight is embedding.weight
    units += [decoder] if tied else [decoder, head]
    for unit in units:
        unit = fully_shard(unit, mesh=mesh, reshard_after_forward=True)
        unit.set_gradient_divide_factor(1.0)  # a sum
        unit.set_force_sum_reduction_for_comms(True)  # which every backend has
        if hasattr(unit, "set_reduce_scatter_unused_params"):
            # An expert without tokens on this rank may have some on another.
            unit.set_reduce_scatter_unused_params(True)
    if tied:
        head.weight = embedding.weight
    unsupported = [name for name, p in model.named_parameters() if not isinstance(p, DTensor)]
    if unsupported:
        raise ConfigError(
            f"student.sharding: 'fsdp' does not support {unsupported[0]} of this model. Set it to "
            "'ddp'.",
            key="student.sharding",
        )


def is_sharded(model: nn.Module) -> bool:
    """Return True if ``shard`` was applied to the model."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


def unsharded(parameter: Tensor) -> Tensor:
    """Gather a parameter; its gradient is summed over ranks on the way back to the shards."""
    if isinstance(parameter, DTensor):
        return parameter.full_tensor(grad_placements=[Partial("sum")])
    return parameter


@torch.no_grad()
def full_tensor(value: Any) -> Any:
    """Gather a sharded tensor, detached; return any other value unchanged."""
    if not isinstance(value, DTensor):
        return value
    sharded: Any = value.detach()
    return sharded.full_tensor()


@torch.no_grad()
def shard_like(parameter: Tensor, value: Tensor | None) -> Tensor:
    """Shard (or copy) rank 0's ``value`` as the parameter; non-zero ranks pass None."""
    sent = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
    if value is not None:
        sent.copy_(value)
    if isinstance(parameter, DTensor):
        return distribute_tensor(sent, parameter.device_mesh, parameter.placements)
    dist.broadcast(sent, 0)
    return sent


@torch.no_grad()
def sum_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Sum the gradients of a replicated model over ranks; a missing gradient counts as zero."""
    bucket: list[Tensor] = []
    for parameter in parameters:
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        bucket.append(parameter.grad)
        if sum(gradient.numel() for gradient in bucket) >= _BUCKET_ELEMENTS:
            _sum(bucket)
            bucket = []
    _sum(bucket)


def clip_gradients(parameters: Sequence[nn.Parameter], largest: float) -> float:
    """Scale all gradients to a joint norm of at most ``largest``; return the norm before."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = full_tensor(nn.utils.get_total_norm(gradients))
    nn.utils.clip_grads_with_norm_(parameters, largest, norm)
    return float(norm)


def _sum(gradients: Sequence[Tensor]) -> None:
    if not gradients:
        return
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    parts = flat.split([gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))
