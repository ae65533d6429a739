"""LoRA students: adapters in the linear layers of a model with frozen weights.

The adapters are modules of the model, so that sampling, sharding, checkpoints and training are the
same as for any model: the trained parameters are those with gradients. Embedding and head are never
adapted, because the block-wise head uses the head's matrix without adapters.

The only module that imports peft.
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

#: Files of an adapter folder, as peft and vLLM name them.
ADAPTER_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
#: Prefix of parameter names in peft's files, and the adapter name that these files omit.
_PREFIX, _ADAPTER = "base_model.model.", "default"
#: Metadata key of the base model's fingerprint.
_BASE = "base_model_fingerprint"
#: Values of each weight in a fingerprint.
_SAMPLED = 64


def weights_dtype(config: StudentConfig) -> torch.dtype:
    """Return the dtype of the model's weights: float32 if trained, because small steps would
    round to zero in half precision."""
    return torch.float32 if config.lora is None else getattr(torch, config.dtype)


def add_adapters(model: PreTrainedModel, config: StudentConfig) -> None:
    """Add the adapters of ``student.lora`` and freeze the other weights; no-op if not set.

    Equal settings give equal initial values, on every rank. Adapters are float32.

    Raises:
        ConfigError: when peft is not installed, or a layer to adapt is not found.
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
    """Return the format of the student's weights on disk; the model must not be sharded yet."""
    return FullModelFiles() if config.lora is None else Adapters(model)


class Adapters:
    """Only the adapters, in a folder that peft, transformers and vLLM load: ``WeightFiles``.

    The file contains the fingerprint of the base model.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._base = base_fingerprint(model)

    def write(self, model: PreTrainedModel, folder: Path, dtype: torch.dtype | None = None) -> None:
        """See ``WeightFiles``; adapters keep their precision."""
        del dtype
        settings: Any = model.peft_config[_ADAPTER]
        adapter_config = settings.to_dict() | {
            "inference_mode": True,
            "target_modules": sorted(settings.target_modules),
        }
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ADAPTER_CONFIG).write_text(json.dumps(adapter_config, indent=2, sort_keys=True))
        tensors = {
            stored: parameter.detach().contiguous()
            for name, parameter in model.named_parameters()
            if (stored := _stored_name(name)) is not None
        }
        save_file(tensors, folder / _WEIGHTS, metadata={"format": "pt", _BASE: self._base})

    def read(self, model: PreTrainedModel, folder: Path) -> dict[str, Tensor]:
        """See ``WeightFiles``."""
        if not (folder / _WEIGHTS).is_file():
            raise ValueError(f"{folder} contains no adapters")
        names = {_stored_name(name): name for name, _ in model.named_parameters()}
        with safe_open(folder / _WEIGHTS, "pt") as file:
            metadata: dict[str, str] = file.metadata() or {}
        if metadata.get(_BASE, self._base) != self._base:
            raise ValueError(f"{folder} contains adapters of another base model")
        tensors: dict[str, Tensor] = load_file(folder / _WEIGHTS)
        return {names.get(stored, stored): value for stored, value in tensors.items()}


def merge_adapters(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """Merge the adapters of a folder into the model's weights, in their precision.

    Raises:
        ValueError: when the folder contains no adapters, or adapters of another base model.
    """
    import peft

    Adapters(model).read(model, folder)  # checks the base model
    adapted: Any = peft.PeftModel.from_pretrained(model, str(folder))
    return adapted.merge_and_unload()


@torch.no_grad()
def base_fingerprint(model: PreTrainedModel) -> str:
    """Hash names, shapes and some values of the model's own weights.

    Values are rounded to bfloat16, so that the fingerprint does not depend on the dtype.
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
    """Raise ConfigError unless all target modules are linear layers other than the head."""
    targets = _targets(lora)
    if isinstance(targets, str):
        return
    head: Any = model.get_output_embeddings()
    linear: set[str] = set()
    for name, module in model.named_modules():
        if module is head and _is_named(name, targets):
            raise ConfigError(
                f"student.lora.target_modules: the head {name!r} cannot be adapted. Remove it.",
                key="student.lora.target_modules",
            )
        if isinstance(module, nn.Linear | Conv1D) and module is not head:
            linear.add(name)
    for target in targets:
        if not any(_is_named(name, [target]) for name in linear):
            names = sorted({name.rpartition(".")[2] for name in linear})
            raise ConfigError(
                f"student.lora.target_modules: no linear layer of this model is named {target!r} "
                f"(expected some of {', '.join(names)})",
                key="student.lora.target_modules",
            )


def _targets(lora: LoraConfig) -> str | list[str]:
    return "all-linear" if lora.target_modules == "all-linear" else list(lora.target_modules)


def _is_named(name: str, targets: list[str]) -> bool:
    return any(name == target or name.endswith(f".{target}") for target in targets)


def _stored_name(name: str) -> str | None:
    """Return the name of an adapter's weight in a file; None for the model's own weights."""
    for side in ("lora_A", "lora_B"):
        infix = f".{side}.{_ADAPTER}."
        if infix in name:
            return _PREFIX + name.replace(infix, f".{side}.")
    return None


def _findable(model: str) -> str:
    """Return an absolute path for a model folder, a hub name unchanged."""
    folder = Path(model)
    return str(folder.resolve()) if folder.is_dir() else model
