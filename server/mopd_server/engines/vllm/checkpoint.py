"""Completeness of a checkpoint before vLLM loads it: vLLM serves random values in place of missing
tensors, the head included."""

import logging

from transformers import AutoConfig, AutoModelForCausalLM

from mopd_protocol.errors import WeightsError, first_line
from mopd_protocol.runtime.model_config import is_quantized
from mopd_protocol.runtime.model_weights import load_complete
from mopd_server.settings import TeacherSettings

logger = logging.getLogger(__name__)


def require_complete_checkpoint(settings: TeacherSettings) -> None:
    """Compare the checkpoint with the model class of transformers, which maps the files lazily.

    Quantized checkpoints, and architectures that transformers does not support, are not compared.

    Raises:
        WeightsError: if tensors are missing, unexpected or of another shape.
    """
    source = {"revision": settings.revision, "trust_remote_code": settings.trust_remote_code}
    subject = f"model {settings.model!r}"
    try:
        config = AutoConfig.from_pretrained(settings.model, **source)
        if is_quantized(config):
            logger.info("%s: quantized, so that only vLLM checks its tensors", subject)
            return
        # The stored precision: other ones would copy every tensor.
        load = AutoModelForCausalLM.from_pretrained
        load_complete(subject, load, settings.model, all_values=False, dtype="auto", **source)
    except WeightsError:
        raise
    except Exception as error:  # a failed validation derives from Exception only
        logger.warning(
            "%s: only vLLM checks its tensors, transformers cannot load the model: %s",
            subject,
            first_line(error),
        )
