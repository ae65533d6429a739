"""A model on several ranks: in shards (FSDP2), or whole on each; its weights and gradients whole.

Gradients are summed over ranks and never averaged: the loss is divided by the step's tokens on all
ranks before any gradient is made. Everything here but ``unsharded`` and ``shard`` must be called by
all ranks at once.
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

#: Elements of gradients that are summed over ranks in one go.
_BUCKET_ELEMENTS = 2**25


def shard(model: PreTrainedModel, device: torch.device, ranks: int) -> None:
    """Leaves each rank its part of every weight; a layer is whole only while it computes.

    The head is left out of what FSDP gathers: ``unsharded`` does that for the block-wise products,
    so that a head that is tied to the embedding is one parameter with one gradient.

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
            # An expert that saw no token here may have seen some elsewhere.
            unit.set_reduce_scatter_unused_params(True)
    if tied:
        head.weight = embedding.weight
    left = [name for name, p in model.named_parameters() if not isinstance(p, DTensor)]
    if left:
        raise ConfigError(
            f"student.sharding is 'fsdp', which has no place for {left[0]} of this model; set it "
            "to 'ddp'"
        )


def is_sharded(model: nn.Module) -> bool:
    """Whether ``shard`` was here."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


def unsharded(parameter: Tensor) -> Tensor:
    """The whole parameter; the gradient by it is summed over ranks on its way to the shards."""
    if isinstance(parameter, DTensor):
        return parameter.full_tensor(grad_placements=[Partial("sum")])
    return parameter


@torch.no_grad()
def whole(value: Any) -> Any:
    """A tensor without shards, detached; anything else as it is."""
    if not isinstance(value, DTensor):
        return value
    sharded: Any = value.detach()
    return sharded.full_tensor()


@torch.no_grad()
def like_shards_of(parameter: Tensor, value: Tensor | None) -> Tensor:
    """Rank 0's ``value``, sharded (or copied) as the parameter is; others give none."""
    sent = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
    if value is not None:
        sent.copy_(value)
    if isinstance(parameter, DTensor):
        return distribute_tensor(sent, parameter.device_mesh, parameter.placements)
    dist.broadcast(sent, 0)
    return sent


@torch.no_grad()
def sum_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Of a model that is whole on every rank; a rank where one was not used counts as zero."""
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
    """Scales all gradients together to a norm of at most ``largest``; the norm before, over all
    shards."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = whole(nn.utils.get_total_norm(gradients))
    nn.utils.clip_grads_with_norm_(parameters, largest, norm)
    return float(norm)


def _sum(gradients: Sequence[Tensor]) -> None:
    if not gradients:
        return
    joined = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(joined)
    parts = joined.split([gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))
