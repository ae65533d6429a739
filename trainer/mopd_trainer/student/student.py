"""``Student``: the model that learns, its tokenizer, and the two things done with them."""

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TopPLogitsWarper,
)

from mopd_losses.core.blockwise_head import Head, LossTerm, blockwise_head, dense_head
from mopd_losses.core.loss_output import LossOutput
from mopd_protocol.errors import ConfigError, DataError
from mopd_protocol.runtime.npu import import_backend
from mopd_protocol.samples import Message
from mopd_trainer.config.run import RolloutConfig, StudentConfig
from mopd_trainer.data.packing import MicroBatch
from mopd_trainer.distributed.full_copy import UnshardedCopy
from mopd_trainer.distributed.process_group import Ranks
from mopd_trainer.distributed.sharding import like_shards_of, shard, unsharded
from mopd_trainer.student.identity import StudentIdentity, explained, load_tokenizer, source
from mopd_trainer.student.lora import add_adapters, stored_weights, weights_dtype
from mopd_trainer.student.output_head import output_head
from mopd_trainer.student.weight_files import StoredWeights, WholeModel

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Generation:
    """One completion as it was sampled: ids up to and with the ending token, and their logprobs."""

    token_ids: list[int]
    logprobs: list[float]  # nats, under the distribution that was sampled from
    topk_ids: np.ndarray[Any, Any] | None = None  # int32 [tokens, k], before top-p; -1 where absent


class Student:
    """A causal language model that writes (``generate``) and is trained (``completion_logits``).

    Rows of the head that belong to no token are never sampled and never trained. On several ranks
    each has its own part (``sharded``) or all of the weights; rank 0 writes, all train.
    """

    TAKE_WEIGHTS = "student.take_weights"

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        device: torch.device,
        *,
        compute_dtype: torch.dtype = torch.float32,
        ranks: Ranks | None = None,
        sharded: bool = False,
        stored: StoredWeights | None = None,
    ) -> None:
        # Where it is to be sharded, it comes to the device in shards.
        self.model = model if sharded else model.to(device)  # pyright: ignore[reportArgumentType]
        self.tokenizer: Any = tokenizer
        self.device = device
        self.ranks = ranks or Ranks()
        self._stored = stored or WholeModel()
        self._compute_dtype = compute_dtype
        self.identity = StudentIdentity.of(model, tokenizer)
        self.table = self.identity.table
        real_ids = torch.tensor(self.table.real_ids(self.identity.logit_width))
        # What a model's publisher likes to generate with (top-k, repetition penalty) would change
        # what is sampled without a word; it is written again when the model is saved.
        self._published_generation: Any = model.generation_config
        model.generation_config = GenerationConfig()
        self._real_ids = real_ids.to(self.model.device)
        self._head = output_head(self.model, self.table, self._real_ids)
        if self._head is None:
            logger.info("the student changes its logits after the head; using full logits")
        self._real_ids = real_ids.to(device)
        self._whole = UnshardedCopy(self.model, self.ranks) if sharded else None
        if sharded:
            self._shard()

    @classmethod
    def load(cls, config: StudentConfig, ranks: Ranks | None = None) -> "Student":
        """Reads model and tokenizer; on several ranks every rank does.

        Raises:
            ConfigError: when there is no such model or device, the tokenizer is not a fast one
                with a chat template, or the model cannot do gradient checkpointing, be sharded, or
                have adapters, and should.
        """
        ranks = ranks or Ranks()
        if ranks.size > 1 and config.sharding == "none":
            raise ConfigError(
                f"student.sharding is 'none', but {ranks.size} ranks were started; set it to "
                "'fsdp' (each has its part of the weights) or 'ddp' (each has all), or start one"
            )
        device = ranks.device or _device(config.device)
        tokenizer = load_tokenizer(config)
        with explained(config):
            model = AutoModelForCausalLM.from_pretrained(
                config.model, dtype=weights_dtype(config), **source(config)
            )
        add_adapters(model, config)
        if config.gradient_checkpointing:
            _checkpoint_layers(model)
        return cls(
            model,
            tokenizer,
            device,
            compute_dtype=getattr(torch, config.dtype),
            ranks=ranks,
            sharded=ranks.size > 1 and config.sharding == "fsdp",
            stored=stored_weights(model, config),
        )

    @property
    def max_length(self) -> int | None:
        """See ``StudentIdentity``."""
        return self.identity.max_length

    def trained(self) -> dict[str, nn.Parameter]:
        """What training changes, by name: all weights, or those of adapters."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def prompt_token_ids(self, messages: Sequence[Message]) -> list[int]:
        """See ``StudentIdentity``."""
        return self.identity.prompt_token_ids(messages)

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        settings: RolloutConfig,
        *,
        seed: int,
        keep_topk: int = 0,
    ) -> list[Generation]:
        """One completion for each prompt; the same seed and weights write the same.

        Args:
            keep_topk: how many of the most likely ids of each step to keep beside the drawn one.

        Raises:
            DataError: when the weights make logits of which nothing can be drawn.
        """
        longest = max(len(prompt) for prompt in prompts)
        roles = self.table.roles
        padding = roles.ending[0] if roles.pad is None else roles.pad
        input_ids = torch.full((len(prompts), longest), padding)
        attention_mask = torch.zeros_like(input_ids)
        for row, prompt in enumerate(prompts):  # padded on the left: answers begin in one column
            input_ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            attention_mask[row, longest - len(prompt) :] = 1
        # Not the process's generator: another thread may train, and seeds that for its dropout.
        draws = torch.Generator(self.device).manual_seed(seed)
        policy = _BehaviourPolicy(self._real_ids, settings, draws, keep_topk)
        model: Any = self.whole_model()
        model.to(self.device).eval()  # which a whole copy is on once it has written
        with self._precision():
            generated: Any = model.generate(
                input_ids=input_ids.to(self.device),
                attention_mask=attention_mask.to(self.device),
                generation_config=GenerationConfig(
                    do_sample=False,  # the behaviour policy draws, and leaves but one id
                    max_new_tokens=settings.max_new_tokens,
                    eos_token_id=list(roles.ending),
                    pad_token_id=padding,
                ),
                logits_processor=LogitsProcessorList([policy]),
            )
        policy.require_drawn()
        completions = generated[:, longest:].cpu()
        logprobs = policy.logprobs().numpy()
        topk_ids = policy.topk_ids()
        return [
            self._sampled(ids, row, None if topk_ids is None else topk_ids[at])
            for at, (ids, row) in enumerate(zip(completions.numpy(), logprobs, strict=True))
        ]

    @torch.no_grad()
    def logprobs(self, prompt: Sequence[int], completion: Sequence[int]) -> np.ndarray[Any, Any]:
        """float32 [completion tokens], nats, at temperature 1, with the weights of now. Rank 0
        alone asks."""
        model: Any = self.whole_model().eval()
        ids = torch.tensor([[*prompt, *completion]], device=model.device)
        with self._precision(model.device):
            logits: Tensor = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        real_ids = self._real_ids.to(model.device)
        logprobs = logits.float().masked_fill(~real_ids, -torch.inf).log_softmax(dim=-1)
        return logprobs.gather(1, ids[0, len(prompt) :, None])[:, 0].cpu().numpy()

    def losses(
        self, batch: MicroBatch, terms: Sequence[LossTerm], *, rows_per_block: int
    ) -> tuple[Tensor, list[LossOutput]]:
        """The weighted sum of all terms over the micro-batch's slots, and each term's output.

        The head is applied to the rows that predict completion tokens and to no other, and logits
        of at most ``rows_per_block`` of them exist at once.
        """
        if self._head is None:
            return dense_head(self.completion_logits(batch), self._real_ids, terms)
        rows = self._completion_rows(batch)
        return blockwise_head(rows, self._whole_head(), terms, rows_per_block=rows_per_block)

    def completion_logits(self, batch: MicroBatch) -> Tensor:
        """[slots, logit width]: row s predicts completion token s; all at once, as the model
        makes them."""
        rows, columns = batch.slot_rows.to(self.device), batch.slot_columns.to(self.device)
        with self._precision():
            return self.model(**self._inputs(batch), use_cache=False).logits[rows, columns]

    def _completion_rows(self, batch: MicroBatch) -> Tensor:
        """[slots, hidden size]: what the head makes the rows of ``completion_logits`` of."""
        rows, columns = batch.slot_rows.to(self.device), batch.slot_columns.to(self.device)
        with self._precision():
            output = self._decoder()(**self._inputs(batch), use_cache=False)
        hidden: Tensor = output.last_hidden_state[rows, columns]
        # Some decoders end in a norm that leaves half precision; the head is applied in it.
        return hidden if self._compute_dtype == torch.float32 else hidden.to(self._compute_dtype)

    def _precision(self, device: torch.device | None = None) -> torch.autocast:
        """Half precision for matrix products, where asked; the weights stay in float32, or small
        steps would round to nothing."""
        half = self._compute_dtype != torch.float32
        kind = (device or self.device).type
        return torch.autocast(kind, self._compute_dtype if half else None, half)

    def _inputs(self, batch: MicroBatch) -> dict[str, Tensor]:
        return {
            "input_ids": batch.input_ids.to(self.device),
            "attention_mask": batch.attention_mask.to(self.device),
        }

    def copy(self) -> "Student":
        """A student that writes the same, whole, on the same device.

        It has trained weights of its own; those that are not trained never change, and are shared.
        """
        own = self.whole_model()
        shared: dict[int, Any] = {id(p): p for p in own.parameters() if not p.requires_grad}
        model: Any = deepcopy(own, shared)
        return Student(
            model,
            self.tokenizer,
            self.device,
            compute_dtype=self._compute_dtype,
            stored=self._stored,
        )

    def whole_model(self) -> PreTrainedModel:
        """The model with all its weights in this process, as they are now. Rank 0 alone asks."""
        return self.model if self._whole is None else self._whole.of(self.model)

    def weights_changed(self) -> None:
        """Must be called after every step of the optimizer."""
        if self._whole is not None:
            self._whole.outdate()

    def save(self, folder: Path) -> None:
        """Writes an ordinary Hugging Face folder (weights, configuration, tokenizer), or one of
        adapters."""
        self.save_weights(folder)
        # As it was published: transformers reads some settings that it would refuse to save.
        self._published_generation.to_json_file(folder / "generation_config.json")
        self.tokenizer.save_pretrained(folder)

    def save_weights(self, folder: Path) -> None:
        """Writes what is trained and what is needed to read it, in the precision it is kept in."""
        self._stored.write(self.whole_model(), folder)

    def load_weights(self, folder: Path) -> None:
        """Takes over the weights that ``save`` wrote, on all ranks; where there is one, never are
        there two copies of them.

        Raises:
            ValueError: when they are not this student's. It has no weights then.
        """
        if self.ranks.size > 1:
            saved = self._read(folder)
            self.ranks.lead(self.TAKE_WEIGHTS)
            self.scatter_weights(saved)
            return
        shapes = self._shapes()
        trained = self.trained()
        for parameter in trained.values():  # the optimizer and the head know these objects
            parameter.data = torch.empty(0, dtype=parameter.dtype, device=self.device)
        saved = self._read(folder, shapes)
        for name, parameter in trained.items():
            # Copied, as memory that a file was mapped to may be aligned otherwise and round so.
            parameter.data = saved.pop(name).to(self.device, copy=True)
        for name, buffer in self.model.named_buffers():
            if name in saved:
                buffer.copy_(saved[name])

    def _read(
        self, folder: Path, shapes: Mapping[str, tuple[int, ...]] | None = None
    ) -> dict[str, Tensor]:
        """What is stored in the folder, where it has these shapes, or those of now."""
        saved = self._stored.read(self.model, folder)
        buffers = {name for name, _ in self.model.named_buffers()}
        found = {name: tuple(value.shape) for name, value in saved.items() if name not in buffers}
        if found != (self._shapes() if shapes is None else shapes):
            raise ValueError(f"{folder} holds weights of other shapes")
        return saved

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(parameter.shape) for name, parameter in self.trained().items()}

    @torch.no_grad()
    def scatter_weights(self, given: Mapping[str, Tensor] | None = None) -> None:
        """Rank 0's whole weights, to every rank's own part. All ranks at once."""
        with self.ranks.together():
            for name, parameter in self.trained().items():
                parameter.copy_(like_shards_of(parameter, None if given is None else given[name]))
        self.weights_changed()

    def led(self) -> dict[str, Callable[..., None]]:
        """What a rank that follows does with its student when it is told to."""
        handlers: dict[str, Callable[..., None]] = {self.TAKE_WEIGHTS: self.scatter_weights}
        if self._whole is not None:
            handlers[UnshardedCopy.GATHER] = partial(self._whole.gather, self.model)
        return handlers

    def _shard(self) -> None:
        if self._head is None:
            raise ConfigError(
                "student.sharding is 'fsdp', but this model changes its logits after the head, "
                "which must be whole for that; set it to 'ddp'"
            )
        shard(self.model, self.device, self.ranks.size)

    def _whole_head(self) -> Head:
        """The head as it is now, unsharded for its products."""
        assert self._head is not None
        module: Any = self.model.get_output_embeddings()
        bias = None if module.bias is None else unsharded(module.bias)
        return replace(
            self._head, weight=unsharded(module.weight), real_ids=self._real_ids, bias=bias
        )

    def _sampled(
        self,
        ids: np.ndarray[Any, Any],
        logprobs: np.ndarray[Any, Any],
        topk_ids: np.ndarray[Any, Any] | None,
    ) -> Generation:
        endings = np.flatnonzero(np.isin(ids, self.table.roles.ending))
        length = int(endings[0]) + 1 if len(endings) else len(ids)
        kept = None if topk_ids is None else topk_ids[:length]
        return Generation(ids[:length].tolist(), logprobs[:length].tolist(), kept)

    def _decoder(self) -> Any:
        return self.model.base_model


class _BehaviourPolicy(LogitsProcessor):
    """Draws from the distribution that the settings make of the logits, and remembers what of it
    is asked for later: no ``[steps, batch, vocabulary]`` ever stands."""

    def __init__(
        self, real_ids: Tensor, settings: RolloutConfig, draws: torch.Generator, keep_topk: int
    ) -> None:
        self._real_ids = real_ids
        self._temperature = settings.temperature
        self._nucleus = TopPLogitsWarper(settings.top_p) if settings.top_p < 1 else None
        self._draws = draws
        self._keep_topk = min(keep_topk, int(real_ids.sum()))
        self._topk_ids: list[Tensor] = []
        self._logprobs: list[Tensor] = []
        self._undrawable = torch.zeros((), dtype=torch.bool, device=real_ids.device)

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """Scores of which the drawn id alone is finite."""
        scores = scores.float().masked_fill(~self._real_ids, -torch.inf)
        if self._keep_topk:  # a few ids a step, of the student itself and not of the nucleus
            self._topk_ids.append(scores.topk(self._keep_topk, dim=-1).indices.int().cpu())
        if self._temperature > 0:
            scores = scores / self._temperature
        if self._nucleus is not None:
            scores = self._nucleus(input_ids, scores)
        logprobs = scores.log_softmax(dim=-1)
        # One NaN or infinity makes NaN of the whole row. It is told at the end: to ask at every
        # token would wait for the device, and to draw from such a row may end it.
        undrawable = logprobs[:, :1].isnan()
        self._undrawable |= undrawable.any()
        drawn = self._draw(scores.masked_fill(undrawable, 0.0))
        self._logprobs.append(logprobs.gather(1, drawn)[:, 0])
        return torch.full_like(scores, -torch.inf).scatter(1, drawn, 0.0)

    def _draw(self, scores: Tensor) -> Tensor:
        """int64 [batch, 1]."""
        if self._temperature == 0:
            return scores.argmax(dim=-1, keepdim=True)
        return torch.multinomial(scores.softmax(dim=-1), 1, generator=self._draws)

    def require_drawn(self) -> None:
        """Raises DataError where a token came from what is no distribution."""
        if self._undrawable:
            raise DataError(
                "the student's logits are not finite, so nothing can be drawn from them: its "
                "weights have diverged; lower student.learning_rate, and go on from an earlier "
                "checkpoint by resume_from_checkpoint"
            )

    def logprobs(self) -> Tensor:
        """[batch, steps], nats, of the tokens that were drawn, also after an ending one."""
        return torch.stack(self._logprobs, dim=1).cpu()

    def topk_ids(self) -> np.ndarray[Any, Any] | None:
        """int32 [batch, steps, k], most likely first; None where none were kept."""
        return torch.stack(self._topk_ids, dim=1).numpy() if self._topk_ids else None


def _checkpoint_layers(model: PreTrainedModel) -> None:
    try:
        with warnings.catch_warnings():
            # Later releases of transformers 5 deprecate the one name that all of them have.
            warnings.simplefilter("ignore", FutureWarning)
            model.gradient_checkpointing_enable({"use_reentrant": False})
    except ValueError as error:
        raise ConfigError(
            f"student.gradient_checkpointing is on, but this model cannot: {error}"
        ) from error


def _device(name: str) -> torch.device:
    if name != "auto":
        import_backend(name, asked_by=f"student.device is {name!r}, which")
        try:
            return torch.empty(0, device=name).device
        except (RuntimeError, AssertionError) as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(
                f"student.device is {name!r}, which is not to be had: {reason}"
            ) from error
    accelerator = (
        torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    )
    return accelerator or torch.device("cpu")
