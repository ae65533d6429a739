"""Who a teacher in this process is: its manifest and its tokenizer, told without its weights."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from mopd_client.tokenizers.pretrained import PretrainedTokenizer, load_tokenizer
from mopd_protocol.errors import ConfigError
from mopd_protocol.manifest import Features, Manifest
from mopd_protocol.runtime.model_revision import name_of, revision_of
from mopd_trainer.config.teacher import TeacherConfig


@dataclass(frozen=True, eq=False)
class LocalIdentity:
    """A model folder, as the service would introduce it: the same weights have one manifest id,
    wherever on this machine they are asked."""

    manifest: Manifest
    tokenizer: PretrainedTokenizer

    @classmethod
    def read(cls, name: str, config: TeacherConfig, device: str) -> "LocalIdentity":
        """Reads configuration and tokenizer, and samples of the weights' files for their hash.

        Args:
            device: the kind of device that it will be awake on.

        Raises:
            ConfigError: when there is no such model, or it cannot be a teacher.
            DataError: for a tokenizer whose tokens do not spell bytes by themselves.
        """
        assert config.model is not None  # its settings have been checked
        tokenizer = load_tokenizer(config.model, config.revision)
        settings = load(name, config, partial(AutoConfig.from_pretrained, config.model))
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(settings)
        width = int(model.get_output_embeddings().weight.shape[0])
        real = tokenizer.table.real_ids(width)
        longest = settings.get_text_config().to_dict().get("max_position_embeddings")
        if longest is None:
            raise ConfigError(
                f"teacher {name!r}: the configuration of {config.model!r} does not say how long "
                "its sequences may be (max_position_embeddings); add it"
            )
        manifest = Manifest(
            service=name,
            model=name_of(config.model),
            revision=revision_of(config.model, settings, asked=config.revision),
            engine="transformers",
            engine_version=f"{transformers.__version__} (torch {torch.__version__})",
            dtype=str(dtype_of(config, settings, device)).removeprefix("torch."),
            logit_width=width,
            tokenizer_fingerprint=tokenizer.table.fingerprint,
            tokenizer_size=tokenizer.table.size,
            roles=tokenizer.table.roles,
            chat_template_hash=tokenizer.chat_template_hash,
            max_model_len=longest,
            max_top_k=int(real.sum()),
            features=Features(
                candidate_ids=True, temperature=True, messages=tokenizer.has_chat_template
            ),
        )
        return cls(manifest, tokenizer)


def device_kind(device: str) -> str:
    """``cuda`` for ``cuda:1``; ``auto`` is the accelerator that is here, or the CPU."""
    if device != "auto":
        return device.partition(":")[0]
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return "cpu" if found is None else found.type


def dtype_of(config: TeacherConfig, settings: Any, device: str) -> torch.dtype:
    """The precision of its forward pass; ``auto`` as the service has it."""
    if config.dtype != "auto":
        return getattr(torch, config.dtype)
    return torch.float32 if device == "cpu" else settings.dtype or torch.float32


def load(name: str, config: TeacherConfig, read: Any) -> Any:
    """What ``read`` reads of the hub or the disk.

    Raises:
        ConfigError: in one sentence, when that cannot be.
    """
    try:
        return read(revision=config.revision)
    except (OSError, ValueError, RuntimeError) as error:
        reason = (str(error).strip().splitlines() or ["no reason given"])[0]
        raise ConfigError(
            f"teacher {name!r}: model {config.model!r} cannot be loaded: {reason}; expected a "
            "folder or hub id of a causal language model"
        ) from error
