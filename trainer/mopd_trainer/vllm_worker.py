"""What the trainer adds to the worker processes of a vLLM that writes for it.

vLLM samples from every row of the head, also those that a model has only to make its width a round
number. Completions are of ids that have a token, so those logits become ``-inf`` before anything
is normalized or drawn.
"""

import os
import select
import signal
import threading
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor


class WorkerExtension:
    """Mixed into vLLM's worker class by name (``worker_extension_cls``), called through its RPC."""

    model_runner: Any  # vLLM's, on any platform
    device: torch.device | None

    def mask_head(self, padding: list[int]) -> None:
        """Masks these rows in all logits from now on, whatever weights are pushed."""
        model = self.model_runner.model
        compute_logits = model.compute_logits
        rows = torch.tensor(padding, dtype=torch.int64, device=self.device)

        def masked(*inputs: Any, **options: Any) -> Tensor | None:
            logits: Tensor | None = compute_logits(*inputs, **options)
            # Of several workers that share a head, only one gets its logits.
            return None if logits is None else logits.index_fill_(-1, rows, -torch.inf)

        model.compute_logits = masked

    def end_with(self, trainer: int) -> bool:
        """Ends vLLM's engine when the process ``trainer`` has ended; it would keep its memory.

        Ctrl-C reaches every process and must not end a worker: the trainer ends vLLM itself.
        Returns False where ``trainer`` cannot be watched.
        """
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        here, parent = os.getpid(), os.getppid()
        # A lone worker lives in the engine's process; several have processes of their own below it.
        engine = here if parent == trainer else parent
        try:
            watched = os.pidfd_open(trainer)
        except (AttributeError, OSError):  # not on Linux, or on another machine
            return False

        def wait() -> None:
            select.select([watched], [], [])
            with suppress(ProcessLookupError):
                os.kill(engine, signal.SIGKILL)

        threading.Thread(target=wait, name="end-with-trainer", daemon=True).start()
        return True
