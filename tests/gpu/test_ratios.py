"""The head, cross entropy and Liger-Kernel: equal gradients, and the memory of a few blocks."""

import math

import pytest
import torch
from rich.console import Console

from bench.head_ratios import ACCELERATOR, CPU, OWN, measure, table_of

pytestmark = pytest.mark.gpu

#: Share of a gradient's norm: in half precision the dense forms round their logits, too.
ERROR = {"float32": 1e-4, "bfloat16": 0.05}


def test_gradients_are_equal_and_memory_is_that_of_blocks(
    device: torch.device, capsys: pytest.CaptureFixture[str]
) -> None:
    size = ACCELERATOR if device.type == "cuda" else CPU
    results = measure(size, device, rounds=5 if device.type == "cuda" else 1)
    with capsys.disabled():
        Console(width=100).print("\n", table_of(size, results))
    losses: dict[str, list[float]] = {}
    for name, result in results.items():
        if "reason" in result:
            assert not name.startswith(OWN), result
            continue
        assert result["finite"], name
        assert result["error"] <= ERROR[size.dtype], name
        assert len(result["seconds"]) == (5 if device.type == "cuda" else 1)
        losses.setdefault(result["kind"], []).append(result["loss"])
    for values in losses.values():
        assert values == pytest.approx([values[0]] * len(values), rel=1e-2)
    if device.type != "cuda":
        assert math.isnan(results["mopd: JSD"]["peak_bytes"])
        return
    block = 4 * size.rows_per_block * size.student_vocabulary
    head = 4 * size.student_vocabulary * size.hidden
    for name, blocks in {"mopd: cross entropy": 5, "mopd: CTKD": 5, "mopd: JSD": 22}.items():
        assert results[name]["peak_bytes"] <= blocks * block + 3 * head, name
    logits = 4 * size.rows * size.student_vocabulary
    assert results["mopd: CTKD"]["peak_bytes"] < logits
