"""Memory, throughput and remaining time of a run."""

import resource
import sys

import torch

from mopd_trainer.metrics.step_metrics import Metrics, ratio


def memory_metrics() -> Metrics:
    """Return the peak of the resident memory of this process, and of the accelerator's memory."""
    unit = 1 if sys.platform == "darwin" else 1024
    peak = {"memory/peak_bytes": float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)}
    if torch.accelerator.is_available():
        peak["memory/peak_device_bytes"] = float(torch.accelerator.max_memory_allocated())
    return peak


def throughput_metrics(metrics: Metrics) -> Metrics:
    """Return tokens per second of each phase; NaN for a phase that took no time."""
    scored = sum(value for key, value in metrics.items() if key.endswith("/scored_tokens"))
    tokens = {
        "sample": metrics["rollout/tokens"],
        "score": scored,
        "train": metrics["tokens/trained"],
    }
    return {
        f"throughput/{phase}": ratio(count, metrics[f"time/{phase}"])
        for phase, count in tokens.items()
    }
