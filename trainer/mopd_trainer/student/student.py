"""``Student``: the model that is trained, its tokenizer, generation and losses."""

import logging
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from inspect import signature
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from mopd_losses.core.blockwise_head import Head, LossTerm, blockwise_head, dense_head
from mopd_losses.core.loss import LossOutput
from mopd_protocol.errors import ConfigError
from mopd_protocol.messages import Message, Tool
from mopd_protocol.runtime.model_weights import load_complete
from mopd_trainer.config.run import RolloutConfig, StudentConfig
from mopd_trainer.data.packing import MicroBatch
from mopd_trainer.distributed.full_copy import UnshardedCopy
from mopd_trainer.distributed.process_group import Ranks
from mopd_trainer.distributed.sharding import shard, shard_like, unsharded
from mopd_trainer.student.attention import Packing, packs, set_attention
from mopd_trainer.student.devices import device_of
from mopd_trainer.student.generation import (
    BehaviourPolicy,
    Generation,
    left_padded,
    with_ends,
)
from mopd_trainer.student.identity import (
    StudentIdentity,
    explained,
    final_dtype,
    load_tokenizer,
    source,
)
from mopd_trainer.student.lora import add_adapters, stored_weights, weights_dtype
from mopd_trainer.student.output_head import output_head
from mopd_trainer.student.packed_attention import packed_rows
from mopd_trainer.student.training_mode import enable_gradient_checkpointing, remove_dropout
from mopd_trainer.student.weight_files import FullModelFiles, WeightFiles

logger = logging.getLogger(__name__)


class Student:
    """A causal language model: ``generate`` samples, ``losses`` is trained on.

    Rows of the head without a token are never sampled and never trained. On several ranks each
    rank has a shard (``sharded``) or a replica of the weights; rank 0 generates, all ranks train.
    ``packs`` is True if a row of a micro-batch may contain several examples.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        device: torch.device,
        *,
        compute_dtype: torch.dtype = torch.float32,
        ranks: Ranks | None = None,
        sharded: bool = False,
        files: WeightFiles | None = None,
        chat_template_kwargs: Mapping[str, Any] = MappingProxyType({}),
        final_dtype: torch.dtype | None = None,
        dropout: bool = False,
        attention: str = "auto",
        packing: Packing = "padded",
    ) -> None:
        self._dropout = dropout
        # A model that will be sharded is moved to the device in shards.
        self.model = model if sharded else model.to(device)  # pyright: ignore[reportArgumentType]
        self.tokenizer: Any = tokenizer
        self.device = device
        self.ranks = ranks or Ranks()
        self._files = files or FullModelFiles()
        self._compute_dtype = compute_dtype
        self.final_dtype = final_dtype
        self.identity = StudentIdentity.of(model, tokenizer, chat_template_kwargs)
        self.table = self.identity.table
        real_ids = torch.tensor(self.table.real_ids(self.identity.logit_width))
        # A published top-k or repetition penalty would silently change the sampled distribution.
        self._published_generation = with_ends(model.generation_config, self.table.roles.ending)
        model.generation_config = GenerationConfig()
        self._real_ids = real_ids.to(self.model.device)
        self._head = output_head(self.model, self.table, self._real_ids)
        if self._head is None:
            logger.info("student: the model changes logits after the head; using full logits")
        self._real_ids = real_ids.to(device)
        # The copy may be used on the CPU, so it has the attention that the model was loaded with.
        self._unsharded = UnshardedCopy(self.model, self.ranks) if sharded else None
        set_attention(self.model, attention)
        if not dropout:
            remove_dropout(self.model)
        if sharded:
            self._shard()
        present = torch.from_numpy(np.flatnonzero(self.table.present)[:16]).to(device)
        self.packs = packs(self._decoder(), self.model, present, packing)

    @classmethod
    def load(cls, config: StudentConfig, ranks: Ranks | None = None) -> "Student":
        """Load model and tokenizer, on every rank.

        Raises:
            ConfigError: when the model or device does not exist, the tokenizer is not a fast one
                with a chat template, or the model does not support gradient checkpointing,
                sharding or the configured adapters.
            WeightsError: when weights are missing, unexpected or of another shape.
        """
        ranks = ranks or Ranks()
        if ranks.size > 1 and config.sharding == "none":
            raise ConfigError(
                f"student.sharding: several ranks need a strategy (found 'none' and {ranks.size} "
                "ranks). Set it to 'fsdp' (weights in shards) or 'ddp' (replicas), or start one "
                "rank.",
                key="student.sharding",
            )
        device = ranks.device or device_of(config.device)
        tokenizer = load_tokenizer(config)
        with explained(config):
            model = load_complete(
                f"student.model: {config.model!r}",
                AutoModelForCausalLM.from_pretrained,
                config.model,
                dtype=weights_dtype(config),
                **source(config),
            )
        add_adapters(model, config)
        if config.gradient_checkpointing:
            enable_gradient_checkpointing(model)
        return cls(
            model,
            tokenizer,
            device,
            compute_dtype=getattr(torch, config.dtype),
            ranks=ranks,
            sharded=ranks.size > 1 and config.sharding == "fsdp",
            files=stored_weights(model, config),
            chat_template_kwargs=config.chat_template_kwargs,
            final_dtype=final_dtype(config),
            dropout=config.dropout == "model",
            attention=config.attn_implementation,
            packing=config.packing,
        )

    @property
    def max_length(self) -> int | None:
        """See ``StudentIdentity``."""
        return self.identity.max_length

    def trained(self) -> dict[str, nn.Parameter]:
        """Return the trained parameters by name: all weights, or those of adapters."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def prompt_token_ids(
        self, messages: Sequence[Message], tools: Sequence[Tool] = ()
    ) -> list[int]:
        """See ``StudentIdentity``."""
        return self.identity.prompt_token_ids(messages, tools)

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        settings: RolloutConfig,
        *,
        seed: int,
        keep_topk: int = 0,
        keep_entropies: bool = False,
    ) -> list[Generation]:
        """Sample one completion per prompt, on rank 0; a function of seed and weights.

        Args:
            keep_topk: most likely ids to keep at each step with the drawn one.
            keep_entropies: keep the entropies of the distributions that are sampled from.

        Raises:
            TrainingError: when the logits are not finite.
        """
        roles = self.table.roles
        padding = roles.ending[0] if roles.pad is None else roles.pad
        input_ids, attention_mask = left_padded(prompts, padding)
        # Not the global generator: another thread may be training, which seeds it for dropout.
        draws = torch.Generator(self.device).manual_seed(seed)
        policy = BehaviourPolicy(
            self._real_ids, settings, draws, keep_topk=keep_topk, keep_entropies=keep_entropies
        )
        model: Any = self.full_model()
        model.to(self.device).eval()  # an unsharded copy starts in CPU memory
        with self._precision():
            generated: Any = model.generate(
                input_ids=input_ids.to(self.device),
                attention_mask=attention_mask.to(self.device),
                generation_config=GenerationConfig(
                    do_sample=False,  # the behaviour policy samples and leaves one finite id
                    max_new_tokens=settings.max_new_tokens,
                    eos_token_id=list(roles.ending),
                    pad_token_id=padding,
                ),
                logits_processor=LogitsProcessorList([policy]),
            )
        policy.require_finite()
        return policy.generations(generated[:, input_ids.shape[1] :].cpu(), roles.ending)

    @torch.no_grad()
    def distributions(self, prompt: Sequence[int], completion: Sequence[int]) -> Tensor:
        """Return float32 [completion tokens, width], nats, at temperature 1, on rank 0."""
        model: Any = self.full_model().eval()
        ids = torch.tensor([[*prompt, *completion]], device=model.device)
        with self._precision(model.device):
            # The rows of a long prompt could be larger than the weights.
            kept = {"logits_to_keep": len(completion) + 1}
            options = kept if "logits_to_keep" in signature(model.forward).parameters else {}
            output: Any = model(input_ids=ids, use_cache=False, **options)
        logits: Tensor = output.logits[0, -len(completion) - 1 : -1]
        real_ids = self._real_ids.to(model.device)
        return logits.float().masked_fill(~real_ids, -torch.inf).log_softmax(dim=-1)

    def logprobs(self, prompt: Sequence[int], completion: Sequence[int]) -> np.ndarray[Any, Any]:
        """Return float32 [completion tokens], nats, at temperature 1, on rank 0."""
        rows = self.distributions(prompt, completion)
        ids = torch.tensor(completion, device=rows.device, dtype=torch.int64)
        return rows.gather(1, ids[:, None])[:, 0].cpu().numpy()

    def losses(
        self, batch: MicroBatch, terms: Sequence[LossTerm], *, rows_per_block: int
    ) -> tuple[Tensor, list[LossOutput]]:
        """Return the weighted sum of all terms over the completion tokens, and each term's output.

        The head is applied only to rows that predict completion tokens, and at most
        ``rows_per_block`` rows of logits exist at once.
        """
        if self._head is None:
            return dense_head(self.completion_logits(batch), self._real_ids, terms)
        rows = self.completion_rows(batch)
        return blockwise_head(rows, self._unsharded_head(), terms, rows_per_block=rows_per_block)

    def completion_logits(self, batch: MicroBatch) -> Tensor:
        """Return the model's logits [slots, logit width]: row s predicts completion token s."""
        rows, columns = batch.slot_rows.to(self.device), batch.slot_columns.to(self.device)
        with self._precision(), packed_rows():
            output = self.model(**batch.inputs(self.device), use_cache=False)
        return output.logits[rows, columns]

    @property
    def head(self) -> Head | None:
        """The head's current matrix; None if the model changes logits in another way."""
        return None if self._head is None else self._unsharded_head()

    def completion_rows(self, batch: MicroBatch) -> Tensor:
        """Return [slots, hidden size]: the head's inputs for ``completion_logits``."""
        rows, columns = batch.slot_rows.to(self.device), batch.slot_columns.to(self.device)
        with self._precision(), packed_rows():
            output = self._decoder()(**batch.inputs(self.device), use_cache=False)
        hidden: Tensor = output.last_hidden_state[rows, columns]
        # Some decoders end in a norm that returns float32; the head is applied in half precision.
        return hidden if self._compute_dtype == torch.float32 else hidden.to(self._compute_dtype)

    def _precision(self, device: torch.device | None = None) -> torch.autocast:
        """Use half precision for matrix products if configured; weights stay in float32, because
        small steps would round to zero."""
        half = self._compute_dtype != torch.float32
        device_type = (device or self.device).type
        return torch.autocast(device_type, self._compute_dtype if half else None, half)

    def copy(self) -> "Student":
        """Return an unsharded copy on the same device, for sampling while this one is trained.

        Trained weights are copied; frozen ones never change and are shared.
        """
        model = self.full_model()
        frozen: dict[int, Any] = {id(p): p for p in model.parameters() if not p.requires_grad}
        copied: Any = deepcopy(model, frozen)
        copied.generation_config = self._published_generation
        return Student(
            copied,
            self.tokenizer,
            self.device,
            compute_dtype=self._compute_dtype,
            files=self._files,
            chat_template_kwargs=self.identity.chat_template_kwargs,
            dropout=self._dropout,
        )

    def gather(self) -> None:
        """Update the unsharded model on rank 0 (no-op if current); all ranks must call it.

        Raises:
            RankError: when another rank is lost.
        """
        if self._unsharded is not None:
            self._unsharded.gather(self.model)

    def full_model(self) -> PreTrainedModel:
        """Return the unsharded model with the weights of the last ``gather``, on rank 0."""
        return self.model if self._unsharded is None else self._unsharded.model

    def weights_changed(self) -> None:
        """Mark unsharded weights as outdated; call it after every optimizer step."""
        if self._unsharded is not None:
            self._unsharded.invalidate()

    def save(self, folder: Path, dtype: torch.dtype | None = None) -> None:
        """Save a Hugging Face folder (weights, config, tokenizer), or a folder of adapters.

        Args:
            dtype: precision of the files; default: that of the weights. Adapters keep theirs.
        """
        self._files.write(self.full_model(), folder, dtype)
        # As published: transformers loads some settings that it does not save.
        self._published_generation.to_json_file(folder / "generation_config.json")
        self.identity.tokenizer_files.write(folder)

    def save_weights(self, folder: Path) -> None:
        """Save the trained weights and their config, in the precision of the weights."""
        self._files.write(self.full_model(), folder)

    def load_weights(self, folder: Path | None) -> None:
        """Load the weights that ``save`` wrote, on all ranks.

        On a single rank two copies never exist at once.

        Args:
            folder: on rank 0; non-zero ranks pass None.

        Raises:
            ValueError: when the weights are of another model; the student is then unusable.
            RankError: when another rank is lost.
        """
        if self.ranks.size > 1:
            weights = None if folder is None else self._read(folder, self._shapes())
            with self.ranks.collective(), torch.no_grad():
                for name, parameter in self.trained().items():
                    value = None if weights is None else weights[name]
                    parameter.copy_(shard_like(parameter, value))
            self.weights_changed()
            return
        assert folder is not None
        shapes = self._shapes()
        trained = self.trained()
        for parameter in trained.values():  # the optimizer and the head refer to these objects
            parameter.data = torch.empty(0, dtype=parameter.dtype, device=self.device)
        weights = self._read(folder, shapes)
        for name, parameter in trained.items():
            # Copied: memory mapped from a file may be aligned and rounded differently.
            parameter.data = weights.pop(name).to(self.device, copy=True)
        for name, buffer in self.model.named_buffers():
            if name in weights:
                buffer.copy_(weights[name])

    def _read(self, folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
        """Load a folder's weights and check their shapes."""
        weights = self._files.read(self.model, folder)
        buffers = {name for name, _ in self.model.named_buffers()}
        saved = {name: tuple(value.shape) for name, value in weights.items() if name not in buffers}
        if saved != shapes:
            raise ValueError(f"{folder} contains weights of other shapes")
        return weights

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(parameter.shape) for name, parameter in self.trained().items()}

    def _shard(self) -> None:
        if self._head is None:
            raise ConfigError(
                "student.sharding: 'fsdp' does not support a model that changes its logits after "
                "the head. Set it to 'ddp'.",
                key="student.sharding",
            )
        shard(self.model, self.device, self.ranks.size)

    def _unsharded_head(self) -> Head:
        """Gather the current head for its products."""
        assert self._head is not None
        module: Any = self.model.get_output_embeddings()
        bias = None if module.bias is None else unsharded(module.bias)
        return replace(
            self._head, weight=unsharded(module.weight), real_ids=self._real_ids, bias=bias
        )

    def _decoder(self) -> Any:
        return self.model.base_model
