"""Everything that ``mopd`` and ``mopd-teacher`` import, for ``tests.processes`` to fork from."""

import os

# Read on import: a progress bar would be a line of a JSON log.
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import torch
import torch.utils.tensorboard
import transformers.models.gpt_neox.modeling_gpt_neox
import transformers.models.llama.modeling_llama
import transformers.models.qwen3.modeling_qwen3  # noqa: F401
import uvicorn  # noqa: F401

import mopd_trainer.loop  # noqa: F401

torch.set_num_threads(1)
