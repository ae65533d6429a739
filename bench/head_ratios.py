"""Time and memory of the block-wise head as ratios to cross entropy and to Liger-Kernel's losses.

    python -m bench.head_ratios                              a small size on a CPU
    python -m bench.head_ratios --device cuda --json OUT     16,384 rows, a vocabulary of 151,936

Every way gets the same hidden states, heads and labels in one process, and makes what a training
step makes of them: the value, and the gradients of hidden states and head. Rounds alternate between
the ways. Figures are medians, on an accelerator those of its events; memory is the peak of a step
above the tensors that exist before it.

The divergences are the Jensen-Shannon divergence of all ids, from the hidden states and the head of
a teacher, which mopd (``support: full``) and Liger-Kernel compute without the logits of all rows.
Liger-Kernel (``pip install liger-kernel``) is skipped, with the reason, where it does not run.
"""

import argparse
import importlib
import json
import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.functional import cross_entropy

from bench.losses import Problem, Size, leaves, make_problem, peak_bytes, resident_bytes, weights
from mopd_losses import (
    CtkdConfig,
    DenseRows,
    FullVocabularyLoss,
    Head,
    LossTerm,
    SftLoss,
    TopKDivergenceLoss,
    TopKKlConfig,
    blockwise_head,
    label_targets,
)
from mopd_losses.topk.full_vocabulary import HiddenTargets

CPU = Size(256, 8_192, 8_192, 128, 16, 64, "float32")
ACCELERATOR = Size(16_384, 151_936, 151_936, 1_536, 64, 1_024, "bfloat16")

#: What a way computes: ways of one kind have one value and one gradient.
Kind = Literal["cross entropy", "JSD of all ids", "CTKD of the top-k"]

BASELINE = "torch: cross entropy"
OWN, PEER = "mopd", "Liger"


@dataclass(frozen=True)
class Teacher:
    """A teacher of the student's vocabulary."""

    hidden: Tensor  # [rows, hidden size]
    weight: Tensor  # [vocabulary, hidden size]


#: Hidden states and head of the student -> the loss, a mean over rows.
Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Step:
    """The value and the gradients of one way."""

    loss: float
    hidden_gradient: Tensor
    weight_gradient: Tensor


def jsd_of_logits(student: Tensor, teacher: Tensor) -> Tensor:
    """[rows], nats, from the logits of all ids."""
    own, other = student.log_softmax(dim=1), teacher.log_softmax(dim=1)
    middle = torch.logaddexp(own, other) - math.log(2)
    return 0.5 * (own.exp() * (own - middle) + other.exp() * (other - middle)).sum(dim=1)


def ways_of(problem: Problem, teacher: Teacher) -> dict[str, tuple[Kind, Callable[[], Loss]]]:
    """Name -> kind, and a function that builds the loss; ImportError if its package is missing."""
    size, device = problem.size, problem.hidden.device
    real = problem.projection.real_ids
    positions = torch.arange(size.rows, device=device)

    def of_mopd(loss: Any, targets: Any) -> Loss:
        def run(hidden: Tensor, weight: Tensor) -> Tensor:
            terms = [LossTerm(loss, targets, weights(problem))]
            head = Head(weight, real)
            total, _ = blockwise_head(hidden, head, terms, rows_per_block=size.rows_per_block)
            return total

        return run

    def dense_jsd() -> Loss:
        def run(hidden: Tensor, weight: Tensor) -> Tensor:
            other = (teacher.hidden @ teacher.weight.t()).float()
            return jsd_of_logits((hidden @ weight.t()).float(), other).mean()

        return run

    def liger_cross_entropy() -> Loss:
        fused: Any = _liger("transformers", device).LigerFusedLinearCrossEntropyLoss()
        return lambda hidden, weight: fused(weight, hidden, problem.labels)

    def liger_jsd() -> Loss:
        fused: Any = _liger("transformers", device).LigerFusedLinearJSD()
        return lambda hidden, weight: fused(hidden, weight, teacher.hidden, teacher.weight, None)

    def liger_chunked_jsd() -> Loss:
        chunked: Any = _liger("chunked_loss", device).LigerFusedLinearJSDLoss(
            weight_hard_loss=0.0,
            weight_soft_loss=1.0,
            compiled=device.type == "cuda",
            chunk_size=size.rows_per_block,
        )
        return lambda hidden, weight: chunked(
            hidden, weight, teacher.hidden, teacher.weight, problem.labels
        )

    full = FullVocabularyLoss(
        Head(teacher.weight, torch.ones(size.teacher_vocabulary, dtype=torch.bool, device=device)),
        TopKKlConfig(divergence="jsd"),
    )
    ctkd = TopKDivergenceLoss(problem.projection, CtkdConfig())
    return {
        BASELINE: (
            "cross entropy",
            lambda: (
                lambda hidden, weight: cross_entropy((hidden @ weight.t()).float(), problem.labels)
            ),
        ),
        "mopd: cross entropy": (
            "cross entropy",
            lambda: of_mopd(SftLoss(), label_targets(problem.labels)),
        ),
        "Liger: fused cross entropy": ("cross entropy", liger_cross_entropy),
        "mopd: CTKD": ("CTKD of the top-k", lambda: of_mopd(ctkd, problem.targets)),
        "torch: JSD": ("JSD of all ids", dense_jsd),
        "mopd: JSD": (
            "JSD of all ids",
            lambda: of_mopd(full, HiddenTargets(positions, teacher.hidden)),
        ),
        "Liger: fused JSD": ("JSD of all ids", liger_jsd),
        "Liger: chunked JSD": ("JSD of all ids", liger_chunked_jsd),
    }


def _liger(module: str, device: torch.device) -> Any:
    """Import a part of Liger-Kernel.

    Raises:
        ImportError: with the reason, where it does not run.
    """
    if module == "transformers" and device.type != "cuda":
        raise ImportError(f"its kernels do not run on {device.type}")
    return importlib.import_module(f"liger_kernel.{module}")


def make_teacher(size: Size, device: torch.device) -> Teacher:
    """Draw a teacher; its hidden states are those of no student."""
    torch.manual_seed(1)
    dtype = getattr(torch, size.dtype)
    return Teacher(
        torch.randn(size.rows, size.hidden, device=device).to(dtype),
        (torch.randn(size.teacher_vocabulary, size.hidden, device=device) * 0.05).to(dtype),
    )


def step(problem: Problem, loss: Loss) -> Step:
    """Compute value and gradients."""
    hidden, weight = leaves(problem)
    total = loss(hidden, weight)
    total.backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return Step(float(total.detach()), hidden.grad, weight.grad)


def exact(problem: Problem, teacher: Teacher, kind: Kind, rows: int) -> Tensor:
    """Return the gradient of the first hidden states, [rows, hidden size], in float64."""
    hidden = problem.hidden[:rows].double().requires_grad_()
    logits = hidden @ problem.weight.double().t()
    if kind == "cross entropy":
        total = cross_entropy(logits, problem.labels[:rows], reduction="sum")
    elif kind == "CTKD of the top-k":
        student = DenseRows(logits, problem.projection.real_ids)
        loss = TopKDivergenceLoss(problem.projection, CtkdConfig())
        total = loss(student, problem.targets.between(0, rows)).per_token.sum()
    else:
        other = teacher.hidden[:rows].double() @ teacher.weight.double().t()
        total = jsd_of_logits(logits, other).sum()
    (gradient,) = torch.autograd.grad(total / problem.size.rows, hidden)
    return gradient


def seconds_of(device: torch.device, run: Callable[[], object]) -> float:
    """Return the time of a call; on an accelerator that between two of its events."""
    if device.type != "cuda":
        started = time.perf_counter()
        run()
        return time.perf_counter() - started
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3


def measure(size: Size, device: torch.device, rounds: int, rows: int = 64) -> dict[str, Any]:
    """Return what each way measured, or why it did not run, by its name.

    Args:
        rows: whose gradients are compared with those in float64.
    """
    problem, teacher = make_problem(size, device), make_teacher(size, device)
    results: dict[str, Any] = {}
    running: dict[str, Loss] = {}
    for name, (kind, make) in ways_of(problem, teacher).items():
        try:
            loss = running[name] = make()
            step(problem, loss)  # compiles, and loads libraries
            before = resident_bytes(device)
            computed = step(problem, loss)
            # On a CPU, memory that the first step has freed counts as the process's.
            peak = peak_bytes(device) - before if device.type == "cuda" else math.nan
            results[name] = {"kind": kind, "peak_bytes": peak}
        except Exception as error:  # a peer that does not run is a result
            if not name.startswith(PEER) and not isinstance(error, torch.OutOfMemoryError):
                raise
            running.pop(name, None)
            results[name] = {
                "kind": kind,
                "reason": (str(error) or type(error).__name__).partition("\n")[0],
            }
            continue
        results[name] |= _checked(computed, problem, teacher, kind, rows)
        del computed
    seconds: dict[str, list[float]] = {name: [] for name in running}
    for _ in range(rounds):
        for name, loss in running.items():
            seconds[name].append(seconds_of(device, lambda loss=loss: step(problem, loss)))
    for name, measured in seconds.items():
        results[name] |= {"seconds": measured, "seconds_median": statistics.median(measured)}
    return results


def _checked(
    computed: Step, problem: Problem, teacher: Teacher, kind: Kind, rows: int
) -> dict[str, Any]:
    """Return the loss, and the relative error of the gradients of the first rows."""
    gradients = (computed.hidden_gradient, computed.weight_gradient)
    expected = exact(problem, teacher, kind, rows)
    difference = computed.hidden_gradient[:rows].double() - expected
    return {
        "loss": computed.loss,
        "finite": all(bool(gradient.isfinite().all()) for gradient in gradients),
        "error": float(difference.norm() / expected.norm()),
    }


def table_of(size: Size, results: Mapping[str, Any]) -> Table:
    """Return one row a way; ratios are to cross entropy with torch, ``-`` is not measured."""
    reasons = [f"{name}: {each['reason']}" for name, each in results.items() if "reason" in each]
    table = Table(
        title=f"{size.rows:,} rows, {size.student_vocabulary:,} ids, hidden size {size.hidden:,}, "
        f"{size.dtype}",
        caption="\n".join(reasons),
    )
    for heading in ("way", "ms", "x", "peak MB", "x", "error"):
        table.add_column(heading, justify="left" if heading == "way" else "right")
    base = results[BASELINE]
    for name, result in results.items():
        cells: list[str] = []
        for key, unit, digits in (("seconds_median", 1e3, 1), ("peak_bytes", 1e-6, 0)):
            value, floor = result.get(key, math.nan), base.get(key, math.nan)
            cells += [_number(value * unit, digits), _number(value / floor, 2)]
        table.add_row(name, *cells, f"{result.get('error', math.nan):.1e}")
    return table


def _number(value: float, digits: int) -> str:
    return "-" if math.isnan(value) else f"{value:,.{digits}f}"


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds (default: 5)")
    options = parser.parse_args()
    device = torch.empty(0, device=options.device).device
    size = ACCELERATOR if device.type == "cuda" else CPU
    results = measure(size, device, options.rounds)
    Console().print(table_of(size, results))
    if options.json:
        report = {"size": asdict(size), "device": str(device), "results": results}
        report["torch"] = torch.__version__
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
