"""Teacher services for verl's on-policy distillation, and losses that count the tail.

Every process of verl imports this module with ``VERL_USE_EXTERNAL_MODULES=mopd.integrations.verl``.
A teacher whose ``model_path`` is an address is then a service, and ``loss_mode`` can be one of
``TAIL_LOSSES``.
"""

from collections.abc import Sequence
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np
from torch import Tensor

from mopd.integrations.service_scorer import ServiceScorer, sampled_logprobs
from mopd.integrations.tail_loss import tail_divergence
from mopd_client.transport.replica import ADDRESS_PREFIXES
from mopd_protocol.errors import ConfigError

#: ``loss_mode`` -> ``beta`` of ``tail_divergence``.
TAIL_LOSSES = {"forward_kl_tail": 0.0, "reverse_kl_tail": 1.0}

_losses: Any = import_module("verl.trainer.distillation.losses")
_of_logits: Any = import_module("verl.trainer.distillation.fsdp.losses")
_teacher_loop: Any = import_module("verl.experimental.teacher_loop")
_ulysses: Any = import_module("verl.utils.ulysses")
_config: Any = import_module("verl.utils.config")
_replica: Any = import_module("verl.workers.rollout.replica")
_own_manager: Any = _teacher_loop.MultiTeacherModelManager
_own_topk_loss: Any = _of_logits.compute_forward_kl_topk


class TeacherClient:
    """A teacher at an address, with the method of verl's ``LLMServerClient`` that scores.

    Can be pickled before its first request.

    Args:
        loss: see ``ServiceScorer``.
    """

    def __init__(self, url: str, loss: str) -> None:
        self._url = url
        self._loss = loss
        self._scorer: ServiceScorer | None = None

    async def generate(
        self,
        request_id: str,
        *,
        prompt_ids: Sequence[int],
        sampling_params: dict[str, Any],
        **inputs: Any,
    ) -> Any:
        """Score a sequence; the rows are in ``extra_fields`` of the returned ``TokenOutput``.

        Row ``r`` predicts token ``r + 1``, as in responses of verl's own servers, and the last row
        is not used. A missing entry is id 0 with ``-inf``, which ``TAIL_LOSSES`` ignore.

        Raises:
            ConfigError: for images, video or audio; and if the teacher names fewer than ``topk``
                tokens and the loss has no tail.
            TeacherError: see ``ServiceScorer.score``.
        """
        media = [key for key in ("image_data", "video_data", "audio_data") if inputs.get(key)]
        if media:
            raise ConfigError(f"teacher service: {media[0]} is unsupported", key=media[0])
        self._scorer = self._scorer or ServiceScorer(self._url, loss=self._loss)
        top_k, ids = int(sampling_params["prompt_logprobs"]), list(prompt_ids)
        temperature = float(sampling_params["temperature"])
        [topk] = await self._scorer.score([ids], [1], top_k=top_k or 1, temperature=temperature)
        rows, logprobs = topk.ids.tolist(), topk.logprobs.tolist()
        if top_k == 0:
            rows, logprobs = [[token] for token in ids[1:]], sampled_logprobs(topk)
        elif self._loss != "tail" and (topk.ids < 0).any():
            raise ConfigError(
                f"loss_mode {self._loss!r}: needs {top_k} entries in every row, and this teacher "
                f"names fewer. Use {' or '.join(TAIL_LOSSES)}.",
                key="distillation_loss.loss_mode",
            )
        unused = [[0] * (top_k or 1)]
        fields = {
            "prompt_ids": np.maximum(rows, 0).tolist() + unused,
            "prompt_logprobs": logprobs + unused,
        }
        return _replica.TokenOutput(token_ids=[], extra_fields=fields)


def _manager(config: Any, resource_pool: Any) -> Any:
    """Create verl's manager of teachers, or one of clients if the teachers have addresses."""
    settings = _config.omega_conf_to_dataclass(config.distillation)
    models = {key: teacher.model_path for key, teacher in settings.teacher_models.items()}
    addresses = [model.startswith(ADDRESS_PREFIXES) for model in models.values()]
    if not any(addresses):
        return _own_manager(config=config, resource_pool=resource_pool)
    if not all(addresses):
        raise ConfigError(
            f"teacher_models: found {', '.join(models.values())}, expected addresses only, or none",
            key="distillation.teacher_models",
        )
    mode = settings.distillation_loss.loss_mode
    samples = _losses.get_distillation_loss_settings(mode).use_estimator
    loss = "tail" if mode in TAIL_LOSSES else "token" if samples else mode
    clients = {key: TeacherClient(url, loss) for key, url in models.items()}
    return SimpleNamespace(get_client=lambda: clients)


def _topk_loss(
    student_logits: Tensor,
    teacher_topk_log_probs: Tensor,
    teacher_topk_ids: Tensor,
    config: Any,
    data_format: str,
) -> dict[str, Tensor]:
    """Compute every top-k loss of logits: verl calls one function for all."""
    mode = config.distillation_loss.loss_mode
    teacher = (teacher_topk_log_probs, teacher_topk_ids)
    if mode not in TAIL_LOSSES:
        return _own_topk_loss(student_logits, *teacher, config, data_format)
    logprobs, ids = (rows.values().unsqueeze(0) for rows in teacher)
    if _ulysses.get_ulysses_sequence_parallel_world_size() > 1:
        logprobs, ids = (_ulysses.slice_input_tensor(rows, dim=1) for rows in (logprobs, ids))
    rows = (part.flatten(0, 1) for part in (student_logits, ids, logprobs))
    names = ("distillation_losses", "student_mass", "teacher_mass")
    values = zip(names, tail_divergence(*rows, beta=TAIL_LOSSES[mode]), strict=True)
    outputs = {name: value.view(student_logits.shape[:2]) for name, value in values}
    return outputs | {"teacher_tail": 1 - outputs["teacher_mass"]}


def _tail_loss(
    config: Any, distillation_config: Any, model_output: dict[str, Any], data: Any
) -> tuple[Tensor, dict[str, Any]]:
    """Return the values that ``_topk_loss`` has computed, with verl's metrics of a top-k.

    Raises:
        ConfigError: if a top-k loss without a tail was computed instead.
    """
    if "teacher_tail" not in model_output:
        raise ConfigError(
            f"strategy {config.strategy!r}: {distillation_config.distillation_loss.loss_mode!r} is "
            "unsupported. Use fsdp or fsdp2, without fused kernels.",
            key="strategy",
        )
    return _losses.compute_forward_kl_topk(config, distillation_config, model_output, data)


_settings: Any = _losses.DistillationLossSettings(names=[*TAIL_LOSSES], use_topk=True)
_losses.register_distillation_loss(_settings)(_tail_loss)
_of_logits.compute_forward_kl_topk = _topk_loss
_teacher_loop.MultiTeacherModelManager = _manager
