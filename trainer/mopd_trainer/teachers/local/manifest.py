"""Manifest and tokenizer of an in-process teacher, without loading its weights."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from mopd_client.tokenizers.pretrained import load_tokenizer
from mopd_protocol.errors import ConfigError
from mopd_protocol.manifest import Features, Manifest
from mopd_protocol.request_tokenizer import RequestTokenizer
from mopd_protocol.runtime.model_config import explaining_config, max_positions, stored_dtype
from mopd_protocol.runtime.model_revision import name_of, revision_of
from mopd_trainer.config.teacher import TeacherConfig


@dataclass(frozen=True, eq=False)
class LocalIdentity:
    """Manifest and tokenizer of a model folder; the manifest id equals that of a service."""

    manifest: Manifest
    tokenizer: RequestTokenizer

    @classmethod
    def read(cls, name: str, config: TeacherConfig, device: str) -> "LocalIdentity":
        """Load config and tokenizer, and hash samples of the weight files.

        Args:
            device: device type for scoring.

        Raises:
            ConfigError: when the model does not exist, or is unsupported as a teacher.
            DataError: when tokens of the tokenizer have no bytes.
        """
        assert config.model is not None  # checked with the settings
        tokenizer = load_tokenizer(config.model, config.revision)
        settings = load(name, config, partial(AutoConfig.from_pretrained, config.model))
        with torch.device("meta"), _explained(name, config):
            model: Any = AutoModelForCausalLM.from_config(settings)
        width = int(model.get_output_embeddings().weight.shape[0])
        real = tokenizer.table.real_ids(width)
        longest = max_positions(settings)
        if longest is None:
            raise ConfigError(
                f"teacher {name!r}: max_position_embeddings not found in the config of "
                f"{config.model!r}. Add it.",
                key=f"teachers.{name}.model",
            )
        manifest = Manifest(
            service=name,
            model=name_of(config.model),
            revision=revision_of(config.model, settings, requested=config.revision)
            + self_weights(config),
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
                candidate_ids=True,
                temperature=True,
                messages=tokenizer.has_chat_template,
                exact_tails=True,
                exact_text=tokenizer.table.exact_text,
            ),
        )
        return cls(manifest, tokenizer)


def self_weights(config: TeacherConfig) -> str:
    """Return which weights of the student a self-teacher has, for its revision; else nothing."""
    if config.kind != "self":
        return ""
    numbers = "".join(f" {each:g}" for each in (config.rate, config.every) if each is not None)
    return f"+{config.weights}{numbers}"


def device_kind(device: str) -> str:
    """Return ``cuda`` for ``cuda:1``; for ``auto`` the available accelerator, or the CPU."""
    if device != "auto":
        return device.partition(":")[0]
    available = torch.accelerator.is_available()
    accelerator = torch.accelerator.current_accelerator() if available else None
    return "cpu" if accelerator is None else accelerator.type


def dtype_of(config: TeacherConfig, settings: Any, device: str) -> torch.dtype:
    """Return the precision of the forward pass; ``auto`` as in the service."""
    if config.dtype != "auto":
        return getattr(torch, config.dtype)
    stored = torch.float32 if device == "cpu" else stored_dtype(settings) or torch.float32
    return getattr(torch, stored) if isinstance(stored, str) else stored


def load(name: str, config: TeacherConfig, from_pretrained: Any) -> Any:
    """Call ``from_pretrained`` with the teacher's revision.

    Raises:
        ConfigError: when the model cannot be loaded.
    """
    with _explained(name, config):
        return from_pretrained(revision=config.revision)


def _explained(name: str, config: TeacherConfig) -> AbstractContextManager[None]:
    subject = f"teacher {name!r}: model {config.model!r} cannot be loaded"
    return explaining_config(subject, f"teachers.{name}.model")
