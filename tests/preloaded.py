"""Everything that ``mopd`` and ``mopd-teacher`` import, for ``tests.processes`` to fork from."""

import torch
import torch.utils.tensorboard
import transformers.models.gpt_neox.modeling_gpt_neox
import transformers.models.llama.modeling_llama
import transformers.models.qwen3.modeling_qwen3  # noqa: F401
import uvicorn  # noqa: F401

import mopd_trainer.loop  # noqa: F401

torch.set_num_threads(1)
