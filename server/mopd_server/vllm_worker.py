"""What the teacher adds to vLLM's worker processes.

vLLM normalizes over every row of the head, also those that a model has only to make its width a
round number. The teacher's distributions are over ids that have a token, so those logits become
``-inf`` before anything is normalized, which is exact.
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

    def mask_head(self, padding: list[int]) -> int:
        """Masks these rows in all logits that the worker's model computes from now on.

        Returns how many they are.
        """
        model = self.model_runner.model
        compute_logits = model.compute_logits
        rows = torch.tensor(padding, dtype=torch.int64, device=self.device)

        def masked(*inputs: Any, **options: Any) -> Tensor | None:
            logits: Tensor | None = compute_logits(*inputs, **options)
            # Of several workers that share a head, only one gets its logits.
            return None if logits is None else logits.index_fill_(-1, rows, -torch.inf)

        model.compute_logits = masked
        return len(padding)

    def end_with(self, server: int) -> bool:
        """Ends vLLM's engine when the process ``server`` that started it has ended, and not before.

        vLLM's engine process would go on for ever, and keep its memory, when a server is killed.
        Its workers end with it. Ctrl-C reaches every process, and must not end a worker: the server
        answers what is under way, then ends vLLM. Returns False where ``server`` cannot be watched.
        """
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        here, parent = os.getpid(), os.getppid()
        # A lone worker lives in the engine's process; several have processes of their own below it.
        engine = here if parent == server else parent
        try:
            watched = os.pidfd_open(server)
        except (AttributeError, OSError):  # not on Linux, or on another machine
            return False

        def wait() -> None:
            select.select([watched], [], [])
            with suppress(ProcessLookupError):
                os.kill(engine, signal.SIGKILL)

        threading.Thread(target=wait, name="end-with-server", daemon=True).start()
        return True
