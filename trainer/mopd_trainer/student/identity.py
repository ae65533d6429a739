"""``StudentIdentity``: tokenizer, vocabulary and size of a student, without its weights."""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.utils.hub import cached_file

from mopd_protocol.errors import ConfigError, DataError
from mopd_protocol.messages import Message, Tool, template_messages, template_tools
from mopd_protocol.runtime.model_config import (
    dropout_values,
    explaining_config,
    max_positions,
    stored_dtype,
)
from mopd_protocol.runtime.model_revision import is_missing_folder
from mopd_protocol.tokenizers.pretrained import load_exact
from mopd_protocol.tokenizers.published_ends import end_ids, published_ends
from mopd_protocol.tokenizers.token_table import TextEncoder, TokenTable, control_tokens
from mopd_protocol.tokenizers.tokenizer_file import naming_tokenizer, tokenizer_json
from mopd_protocol.tokenizers.tokenizer_roles import roles_of
from mopd_trainer.config.run import StudentConfig
from mopd_trainer.student.lora import ADAPTER_CONFIG, add_adapters
from mopd_trainer.student.tokenizer_files import TokenizerFiles


@dataclass(frozen=True, eq=False)
class StudentIdentity:
    """The student's side of projections, and its chat template.

    Raises:
        ConfigError: when the tokenizer has no ending token.
    """

    tokenizer: PreTrainedTokenizerBase
    table: TokenTable
    logit_width: int  # rows of the head, padding included
    parameters: int
    trained: int  # number of trained parameters
    max_length: int | None = None
    """Longest prompt plus completion in tokens; None without a limit."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    model_config: PretrainedConfig = field(default_factory=PretrainedConfig)

    def __post_init__(self) -> None:
        if not self.table.roles.ending:
            raise ConfigError(
                "student.model: the tokenizer has no ending token. Set its eos_token.",
                key="student.model",
            )
        self.table.real_ids(self.logit_width)  # rejects the tokenizer of a larger model

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        chat_template_kwargs: Mapping[str, Any] = MappingProxyType({}),
        *,
        ends: Sequence[int] | None = None,
    ) -> "StudentIdentity":
        """Return the identity of a model, which may be on the meta device.

        Args:
            ends: ids that end a completion besides the tokenizer's; default: those of the model's
                generation settings.

        Raises:
            ConfigError: when the chat template does not support user and assistant.
            TokenizerError: when the tokens' bytes cannot be derived from the tokenizer.
        """
        backend: Any = tokenizer
        description = tokenizer_json(backend.backend_tokenizer)
        try:
            settings: Any = model.generation_config
            ends = end_ids(settings and settings.eos_token_id) if ends is None else ends
            roles = roles_of(backend, control_tokens(description), ends)
        except Exception as error:  # a template may raise any
            raise ConfigError(
                "student.model: the chat template cannot render messages of the roles user and "
                f"assistant: {error}",
                key="student.model",
            ) from error
        with naming_tokenizer("student.model"):
            table = TokenTable.from_json(description, roles)
        head: Any = model.get_output_embeddings()
        return cls(
            tokenizer=tokenizer,
            table=table,
            logit_width=int(head.weight.shape[0]),
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            trained=sum(p.numel() for p in model.parameters() if p.requires_grad),
            max_length=max_positions(model.config),
            chat_template_kwargs=dict(chat_template_kwargs),
            model_config=model.config,
        )

    @property
    def dropout(self) -> dict[str, float]:
        """Name -> value of the dropout probabilities in the model's configuration, above 0."""
        return dropout_values(self.model_config)

    @property
    def encoder(self) -> TextEncoder:
        """Encoder of completions; built on first use, seconds for a large vocabulary."""
        return self._encoder

    @cached_property
    def _encoder(self) -> TextEncoder:
        backend: Any = self.tokenizer
        return TextEncoder(backend.backend_tokenizer, self.table)

    @cached_property
    def tokenizer_files(self) -> TokenizerFiles:
        """Files of the tokenizer in a folder of the model; saved and reloaded on first use."""
        return TokenizerFiles.of(self.tokenizer, self.model_config)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """Return a conversation in the student's chat template.

        Raises:
            DataError: when the template cannot render these messages and tools.
        """
        tokenizer: Any = self.tokenizer
        template = tokenizer.chat_template
        try:
            return tokenizer.apply_chat_template(
                template_messages(messages, template),
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **{**template_tools(tools, template), **self.chat_template_kwargs},
            )
        except Exception as error:  # a template may raise any
            roles = ", ".join(message.role for message in messages)
            variables = ", ".join([*(["tools"] if tools else []), *self.chat_template_kwargs])
            with_variables = f" with {variables}" if variables else ""
            raise DataError(
                f"student.model: the chat template rejects messages of roles {roles}"
                f"{with_variables}: {error}",
                key="student.model",
            ) from error

    def prompt_token_ids(
        self, messages: Sequence[Message], tools: Sequence[Tool] = ()
    ) -> list[int]:
        """Return the prompt in the student's chat template, with the generation prompt.

        Raises:
            DataError: when the template cannot render these messages and tools.
        """
        token_ids = self.token_ids(self.render(messages, tools))
        if not token_ids:
            raise DataError("student.model: the chat template renders an empty prompt")
        return token_ids

    def token_ids(self, rendered: str) -> list[int]:
        """Return the ids of rendered text, in which control tokens are spelled literally."""
        tokenizer: Any = self.tokenizer
        return tokenizer(rendered, add_special_tokens=False)["input_ids"]

    @classmethod
    def read(cls, config: StudentConfig) -> "StudentIdentity":
        """Return the identity of a model on disk or hub; loads its config, not its weights.

        Raises:
            ConfigError: as ``load_tokenizer`` and ``add_adapters``.
        """
        tokenizer = load_tokenizer(config)
        with explained(config):
            settings = AutoConfig.from_pretrained(config.model, **source(config))
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(
                    settings, trust_remote_code=config.trust_remote_code
                )
        with torch.device("meta"):
            add_adapters(model, config)
        ends = published_ends(cached_file, config.model, config.revision)
        return cls.of(model, tokenizer, config.chat_template_kwargs, ends=ends)


def load_tokenizer(config: StudentConfig) -> PreTrainedTokenizerBase:
    """Load the student's tokenizer.

    Raises:
        ConfigError: when the model does not exist or is only an adapter, or its tokenizer is not a
            fast one with a chat template.
    """
    if (Path(config.model) / ADAPTER_CONFIG).is_file():
        raise ConfigError(
            f"student.model: {config.model!r} contains adapters but no model. Merge the adapters "
            "of a run with `mopd merge`.",
            key="student.model",
        )
    if is_missing_folder(config.model):
        raise ConfigError(
            f"student.model: folder {config.model!r} not found. Correct the path.",
            key="student.model",
        )
    with explained(config):
        tokenizer: Any = load_exact(
            AutoTokenizer.from_pretrained,
            PreTrainedTokenizerFast.from_pretrained,
            config.model,
            **source(config),
        )
    if not tokenizer.is_fast:
        raise ConfigError(
            f"student.model: {config.model!r} has a slow tokenizer (expected a tokenizer.json)",
            key="student.model",
        )
    if not tokenizer.chat_template:
        raise ConfigError(
            f"student.model: {config.model!r} has no chat template, which prompts need. Add a "
            "chat_template.jinja to the model's folder.",
            key="student.model",
        )
    return tokenizer


def source(config: StudentConfig) -> dict[str, Any]:
    """Return the arguments of ``from_pretrained``."""
    return {"revision": config.revision, "trust_remote_code": config.trust_remote_code}


def final_dtype(config: StudentConfig) -> torch.dtype | None:
    """Return the precision of the trained model's files; None if its config names none."""
    if config.final_dtype != "auto":
        return getattr(torch, config.final_dtype)
    with explained(config):
        published = stored_dtype(AutoConfig.from_pretrained(config.model, **source(config)))
    return getattr(torch, published) if isinstance(published, str) else published


@contextmanager
def explained(config: StudentConfig) -> Generator[None]:
    """Raise ConfigError in place of the errors of transformers for a model that cannot be loaded.

    Raises:
        ConfigError: in place of all errors but those of mopd.
    """
    subject = f"student.model: {config.model!r} cannot be loaded"
    with explaining_config(subject, "student.model"):
        yield
