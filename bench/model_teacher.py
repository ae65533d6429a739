"""A language model that generates texts, and scores them as a teacher."""

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.language_model.material import prompts
from bench.named_tokenizers import Side, side
from mopd_protocol import TeacherScore, TopKLogprobs

#: Completions that are generated at a time, and their most tokens.
_IN_A_BATCH, _MOST_TOKENS = 16, 256

#: Ids in the teacher's rows.
_K = 64


class ModelTeacher:
    """A causal language model in float32, on one thread.

    Args:
        folder: of a model with a chat template.
    """

    def __init__(self, folder: str) -> None:
        torch.set_num_threads(1)
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, padding_side="left")
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._side: Side = side(folder)
        self.seconds = 0.0
        """Processor time of all scores, without the selection of the likeliest tokens."""
        self.tokens = 0  # of all scores

    def texts(self, path: Path, count: int) -> list[tuple[str, str]]:
        """Return prompts and completions of temperature 1, generated unless the file exists."""
        if not path.exists():
            path.write_text(json.dumps([*self._generated(prompts(count))], indent=1))
        return [(prompt, text) for prompt, text in json.loads(path.read_text()) if text.strip()]

    @torch.inference_mode()
    def _generated(self, every: Sequence[str]) -> Iterator[tuple[str, str]]:
        torch.manual_seed(0)
        tokenizer = self._tokenizer
        for start in range(0, len(every), _IN_A_BATCH):
            some = every[start : start + _IN_A_BATCH]
            batch = tokenizer(
                [*map(self._rendered, some)],
                add_special_tokens=False,
                padding=True,
                return_tensors="pt",
            )
            ids = self._model.generate(
                **batch, max_new_tokens=_MOST_TOKENS, do_sample=True, top_k=0, top_p=1.0
            )
            completions = ids[:, batch["input_ids"].shape[1] :]
            texts = tokenizer.batch_decode(completions, skip_special_tokens=True)
            yield from zip(some, texts, strict=True)

    def _rendered(self, prompt: str) -> str:
        messages = [{"role": "user", "content": prompt}]
        return self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )

    @torch.inference_mode()
    def score(self, prompt: str, text: str) -> TeacherScore:
        """Score a completion as a service would."""
        before = self._tokenizer(self._rendered(prompt), add_special_tokens=False)["input_ids"]
        sequence = self._side.table.sequence(self._side.encoder.encode(text))
        ids = torch.from_numpy(sequence.token_ids.astype(np.int64))
        started = time.process_time()
        logits = self._model(
            input_ids=torch.cat([torch.tensor(before), ids])[None], logits_to_keep=len(ids) + 1
        ).logits[0, :-1]
        self.seconds += time.process_time() - started
        self.tokens += len(ids)
        logprobs = logits.log_softmax(dim=1)
        top = logprobs.topk(_K)
        rest = 1.0 - top.values.double().exp().sum(dim=1)
        return TeacherScore(
            "teacher",
            sequence,
            TopKLogprobs(
                top.indices.numpy().astype(np.int32),
                top.values.numpy(),
                logprobs.gather(1, ids[:, None])[:, 0].numpy(),
                rest.clamp_min(1e-9).log().numpy(),
            ),
        )
