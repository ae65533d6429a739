"""LoRA students: adapters beside the linear layers of a model whose own weights stay.

The layers are put into the model itself, so that it is written with, sharded, checkpointed and
trained as any other: what is trained is what wants gradients. The embedding and the head are never
adapted, because the block-wise head reads the head's matrix and would not see an adapter beside it.

The only file that imports peft.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from mopd_protocol.errors import ConfigError
from mopd_trainer.config.extras import PEFT, require_package
from mopd_trainer.config.run import LoraConfig, StudentConfig
from mopd_trainer.student.weight_files import FullModelFiles, WeightFiles

#: Files of an adapter's folder, as peft and vLLM look for them.
ADAPTER_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
#: What peft puts before a name in a file, and the part that it leaves out of it.
_PREFIX, _ADAPTER = "base_model.model.", "default"
#: In the file's metadata: what the adapters were trained beside.
_BASE = "base_model_fingerprint"
#: Values of each weight that a fingerprint is of.
_SAMPLED = 64


def weights_dtype(config: StudentConfig) -> torch.dtype:
    """What a model's own weights are kept in: where they are trained, small steps on anything less
    than float32 would round to nothing."""
    return torch.float32 if config.lora is None else getattr(torch, config.dtype)


def add_adapters(model: PreTrainedModel, config: StudentConfig) -> None:
    """Adds what ``student.lora`` asks for, and freezes the rest; does nothing where it is not set.

    The same settings add the same values, on every rank. Adapters are float32 beside any weights.

    Raises:
        ConfigError: when peft is not installed, or the layers to adapt are not to be had.
    """
    lora = config.lora
    if lora is None:
        return
    require_package(PEFT)
    import peft

    _require_linear_layers(model, lora)
    settings = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=_targets(lora),
        base_model_name_or_path=_findable(config.model),
        revision=config.revision,
        task_type=peft.TaskType.CAUSAL_LM,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(lora.seed)
        peft.inject_adapter_in_model(settings, model, _ADAPTER)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def stored_weights(model: PreTrainedModel, config: StudentConfig) -> WeightFiles:
    """How the weights of such a student lie on disk. The model must not be in shards yet."""
    return FullModelFiles() if config.lora is None else Adapters(model)


class Adapters:
    """The adapters alone, in a folder that peft, transformers and vLLM load: ``WeightFiles``.

    They are worth nothing beside another model, so that the file tells which one it was.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._base = base_fingerprint(model)

    def write(self, model: PreTrainedModel, folder: Path) -> None:
        """See ``WeightFiles``."""
        settings: Any = model.peft_config[_ADAPTER]
        told = settings.to_dict() | {
            "inference_mode": True,
            "target_modules": sorted(settings.target_modules),
        }
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ADAPTER_CONFIG).write_text(json.dumps(told, indent=2, sort_keys=True))
        tensors = {
            stored: parameter.detach().contiguous()
            for name, parameter in model.named_parameters()
            if (stored := _stored_name(name)) is not None
        }
        save_file(tensors, folder / _WEIGHTS, metadata={"format": "pt", _BASE: self._base})

    def read(self, model: PreTrainedModel, folder: Path) -> dict[str, Tensor]:
        """See ``WeightFiles``."""
        if not (folder / _WEIGHTS).is_file():
            raise ValueError(f"{folder} holds no adapters")
        names = {_stored_name(name): name for name, _ in model.named_parameters()}
        with safe_open(folder / _WEIGHTS, "pt") as file:
            told: dict[str, str] = file.metadata() or {}
        if told.get(_BASE, self._base) != self._base:
            raise ValueError(f"{folder} holds adapters that were trained beside other weights")
        found: dict[str, Tensor] = load_file(folder / _WEIGHTS)
        return {names.get(stored, stored): value for stored, value in found.items()}


def merge_adapters(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """The model with the adapters of a folder added to its own weights, in their precision.

    Raises:
        ValueError: when the folder holds none, or they were trained beside other weights.
    """
    import peft

    Adapters(model).read(model, folder)  # tells whose they are
    adapted: Any = peft.PeftModel.from_pretrained(model, str(folder))
    return adapted.merge_and_unload()


@torch.no_grad()
def base_fingerprint(model: PreTrainedModel) -> str:
    """Of a model's own weights: names, shapes and some values of each.

    Values are rounded to bfloat16, so that the precision they are kept in makes no difference.
    """
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        if _stored_name(name) is not None:
            continue
        values = parameter.flatten()
        sampled = values[:: max(1, len(values) // _SAMPLED)].to(torch.bfloat16).float()
        digest.update(f"{name.replace('.base_layer.', '.')} {list(parameter.shape)}".encode())
        digest.update(sampled.cpu().numpy().tobytes())
    return digest.hexdigest()[:32]


def _require_linear_layers(model: PreTrainedModel, lora: LoraConfig) -> None:
    """All of the names are of linear layers, and none is the head's."""
    targets = _targets(lora)
    if isinstance(targets, str):
        return
    head: Any = model.get_output_embeddings()
    linear: set[str] = set()
    for name, module in model.named_modules():
        if module is head and _is_named(name, targets):
            raise ConfigError(
                f"student.lora.target_modules names the head, {name!r}, whose matrix is read "
                "without what an adapter would add; leave it out"
            )
        if isinstance(module, nn.Linear | Conv1D) and module is not head:
            linear.add(name)
    for target in targets:
        if not any(_is_named(name, [target]) for name in linear):
            known = sorted({name.rpartition(".")[2] for name in linear})
            raise ConfigError(
                f"student.lora.target_modules names {target!r}, but no linear layer of this model "
                f"is called that; it has {', '.join(known)}"
            )


def _targets(lora: LoraConfig) -> str | list[str]:
    return "all-linear" if lora.target_modules == "all-linear" else list(lora.target_modules)


def _is_named(name: str, targets: list[str]) -> bool:
    return any(name == target or name.endswith(f".{target}") for target in targets)


def _stored_name(name: str) -> str | None:
    """Under which a file has an adapter's weight; None for the model's own weights."""
    for side in ("lora_A", "lora_B"):
        own = f".{side}.{_ADAPTER}."
        if own in name:
            return _PREFIX + name.replace(own, f".{side}.")
    return None


def _findable(model: str) -> str:
    """A model folder from anywhere; a hub name as it is."""
    folder = Path(model)
    return str(folder.resolve()) if folder.is_dir() else model
