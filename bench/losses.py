"""Time and memory of the losses on one head, against dense forms of the same mathematics.

    python bench/losses.py --json losses.json             CPU: 2,048 rows, vocabularies of 32,000
    python bench/losses.py --device cuda --json out.json  16,384 rows, vocabularies of 128k and 152k

Every variant gets the same hidden states, head, labels, teacher and projection, and does what a
training step does: value, gradient of the hidden states, gradient of the head. Each runs in a
separate process, so that its peak memory is measured separately; rounds alternate between variants,
so that a noisy minute affects them all. Figures are medians.

The peers are written here from their published formulas: X-Token's P-KL (arXiv 2605.21699: top
8,192 teacher ids over the batch, projected student, one-hot matrices to average rows of a chunk)
and TRL's GOLD (merged vectors, JSD on matched ids, sorted L1 on the others). Both need the
teacher's full logits; ours are given its top-k.
"""

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from mopd_losses import (
    CtkdConfig,
    DenseRows,
    DeviceProjection,
    Head,
    LossTerm,
    SftLoss,
    TopKDivergenceLoss,
    TopKTargets,
    blockwise_head,
    label_targets,
)

XTOKEN_SUPPORT = 8192


@dataclass(frozen=True)
class Size:
    """Sizes of the measured tensors."""

    rows: int
    student_vocabulary: int
    teacher_vocabulary: int
    hidden: int
    k: int
    rows_per_block: int
    dtype: str


CPU = Size(2_048, 32_000, 32_000, 512, 64, 256, "float32")
ACCELERATOR = Size(16_384, 128_256, 151_936, 2_048, 64, 1_024, "bfloat16")


@dataclass(frozen=True)
class Problem:
    """The same tensors for every variant, drawn from one seed."""

    size: Size
    hidden: Tensor
    weight: Tensor
    labels: Tensor
    teacher_of: Tensor  # [student vocabulary]: 85 % one-hot on the same number, else elsewhere
    targets: TopKTargets
    projection: DeviceProjection
    spans: Tensor  # [rows], the span of each row; one in eight spans has two rows


def make_problem(size: Size, device: torch.device) -> Problem:
    """Tensors on ``device``."""
    torch.manual_seed(0)
    dtype = getattr(torch, size.dtype)
    shared = min(size.student_vocabulary, size.teacher_vocabulary)
    teacher_of = torch.arange(size.student_vocabulary) % shared
    strangers = torch.randperm(size.student_vocabulary)[: size.student_vocabulary * 15 // 100]
    teacher_of[strangers] = torch.randint(0, shared // 4, (len(strangers),))
    order = teacher_of.argsort(stable=True)
    starts = torch.zeros(size.teacher_vocabulary + 1, dtype=torch.int64)
    starts[1:] = torch.bincount(teacher_of, minlength=size.teacher_vocabulary).cumsum(0)
    projection = DeviceProjection(
        column_starts=starts.to(device),
        student_ids=order.to(device),
        log_weights=torch.zeros(size.student_vocabulary, device=device),
        real_ids=torch.ones(size.student_vocabulary, dtype=torch.bool, device=device),
        unprojected_ids=torch.zeros(0, dtype=torch.int64, device=device),
    )
    spans = (torch.arange(size.rows) * 8) // 9
    first = torch.cat([torch.ones(1, dtype=torch.bool), spans[1:] != spans[:-1]])
    positions = torch.nonzero(first).flatten()
    logits = torch.randn(len(positions), size.k).sort(dim=1, descending=True).values * 2
    logprobs = logits.log_softmax(dim=1) + torch.tensor(0.95).log()
    ids = torch.randint(0, size.teacher_vocabulary // size.k, (len(positions), size.k))
    ids = ids + torch.arange(size.k) * (size.teacher_vocabulary // size.k)
    tails = torch.full((len(positions),), 0.05).log()
    return Problem(
        size,
        torch.randn(size.rows, size.hidden, device=device).to(dtype),
        (torch.randn(size.student_vocabulary, size.hidden, device=device) * 0.05).to(dtype),
        torch.randint(0, size.student_vocabulary, (size.rows,)).to(device),
        teacher_of.to(device),
        TopKTargets(positions, ids, logprobs, tails).to(device),
        projection,
        spans.to(device),
    )


def teacher_logits(problem: Problem) -> Tensor:
    """[rows, teacher vocabulary], what the dense peers are sent, in the model's precision."""
    torch.manual_seed(1)
    shape = (problem.size.rows, problem.size.teacher_vocabulary)
    return torch.randn(shape, device=problem.hidden.device, dtype=problem.hidden.dtype)


def leaves(problem: Problem) -> tuple[Tensor, Tensor]:
    return problem.hidden.detach().requires_grad_(), problem.weight.detach().requires_grad_()


def weights(problem: Problem) -> Tensor:
    return torch.full((problem.size.rows,), 1 / problem.size.rows, device=problem.hidden.device)


def distillation(problem: Problem) -> TopKDivergenceLoss:
    return TopKDivergenceLoss(problem.projection, CtkdConfig())


def ours(problem: Problem) -> Callable[[], Tensor]:
    """Block-wise head with CTKD and cross entropy."""

    def step() -> Tensor:
        hidden, weight = leaves(problem)
        head = Head(weight, problem.projection.real_ids)
        terms = [
            LossTerm(
                TopKDivergenceLoss(problem.projection, CtkdConfig()),
                problem.targets,
                weights(problem),
            ),
            LossTerm(SftLoss(), label_targets(problem.labels), weights(problem)),
        ]
        total, _ = blockwise_head(hidden, head, terms, rows_per_block=problem.size.rows_per_block)
        total.backward()
        return total

    return step


def cross_entropy_floor(problem: Problem) -> Callable[[], Tensor]:
    """Plain cross entropy in the same blocks, with torch's own kernel: what cannot be saved."""

    def step() -> Tensor:
        hidden, weight = problem.hidden, problem.weight
        hidden_gradient = torch.zeros_like(hidden, dtype=torch.float32)
        weight_gradient = torch.zeros_like(weight, dtype=torch.float32)
        total = torch.zeros((), device=hidden.device)
        for start in range(0, len(hidden), problem.size.rows_per_block):
            rows = slice(start, start + problem.size.rows_per_block)
            logits = (hidden[rows] @ weight.t()).float().requires_grad_()
            loss = torch.nn.functional.cross_entropy(logits, problem.labels[rows], reduction="sum")
            (gradient,) = torch.autograd.grad(loss / len(hidden), logits)
            gradient = gradient.to(weight.dtype)
            hidden_gradient[rows] = gradient @ weight
            if weight.dtype == torch.float32:
                weight_gradient.addmm_(gradient.t(), hidden[rows])
            else:
                weight_gradient += gradient.t() @ hidden[rows]
            total += loss.detach() / len(hidden)
        return total

    return step


def dense_autograd(problem: Problem) -> Callable[[], Tensor]:
    """All logits at once: the same CTKD and cross entropy under autograd."""

    def step() -> Tensor:
        hidden, weight = leaves(problem)
        student = DenseRows(hidden @ weight.t(), problem.projection.real_ids)
        distilled = TopKDivergenceLoss(problem.projection, CtkdConfig())(
            student, problem.targets
        ).per_token
        supervised = SftLoss()(student, label_targets(problem.labels)).per_token
        total = ((distilled + supervised) * weights(problem)).sum()
        total.backward()
        return total

    return step


def xtoken(problem: Problem) -> Callable[[], Tensor]:
    """X-Token's P-KL as published: full teacher logits, a support of 8,192 ids, dense chunks."""
    size, device = problem.size, problem.hidden.device
    teacher = teacher_logits(problem)
    count = int(problem.spans[-1]) + 1
    one_hot = torch.nn.functional.one_hot(problem.spans, count).float().t()  # [spans, rows]
    averages = one_hot / one_hot.sum(dim=1, keepdim=True)
    support_size = min(XTOKEN_SUPPORT, size.teacher_vocabulary)

    def step() -> Tensor:
        hidden, weight = leaves(problem)
        logits = (hidden @ weight.t()).float()
        probabilities = logits.softmax(dim=1)
        full = teacher.float()
        support = full.amax(dim=0).topk(support_size).indices.sort().values
        place = torch.full((size.teacher_vocabulary,), -1, dtype=torch.int64, device=device)
        place[support] = torch.arange(support_size, device=device)
        kept = torch.nonzero(place[problem.teacher_of] >= 0).flatten()
        columns = place[problem.teacher_of[kept]]
        projected = torch.zeros(size.rows, support_size, device=device)
        projected = projected.index_add(1, columns, probabilities[:, kept])
        teacher_log = full[:, support].log_softmax(dim=1)
        student_chunks = averages @ projected
        teacher_chunks = averages @ teacher_log
        student_log = (student_chunks / (student_chunks.sum(1, keepdim=True) + 1e-10) + 1e-10).log()
        divergence = (teacher_chunks.exp() * (teacher_chunks - student_log)).sum() / count
        supervised = torch.nn.functional.cross_entropy(logits, problem.labels)
        total = divergence + supervised
        total.backward()
        return total

    return step


def gold(problem: Problem) -> Callable[[], Tensor]:
    """TRL's GOLD as published: merged full vectors, JSD on matched ids, sorted L1 on the rest."""
    size = problem.size
    teacher = teacher_logits(problem)
    first = torch.cat([torch.ones_like(problem.spans[:1]), problem.spans[1:] - problem.spans[:-1]])
    starts = torch.nonzero(first).flatten()
    ends = torch.cat([starts[1:], starts.new_tensor([size.rows])])
    shared = min(size.student_vocabulary, size.teacher_vocabulary)
    matched = torch.arange(shared * 85 // 100, device=problem.hidden.device)
    ids = problem.labels.clamp_max(shared - 1)

    def merged(probabilities: Tensor) -> Tensor:
        # One gather in place of the row-by-row fill, which copies the matrix once a row.
        realised = probabilities.gather(1, ids[:, None])[:, 0].clamp_min(1e-8)
        factor = torch.where(ends - starts > 1, realised[starts], torch.ones_like(realised[starts]))
        return probabilities[ends - 1] * factor[:, None]

    def step() -> Tensor:
        hidden, weight = leaves(problem)
        logits = (hidden @ weight.t()).float()
        student = merged(logits.softmax(dim=1))
        target = merged(teacher.float().softmax(dim=1))
        p, t = student[:, matched].clamp_min(1e-8), target[:, matched].clamp_min(1e-8)
        m = (p + t) / 2
        jsd = 0.5 * (t * (t / m).log() + p * (p / m).log()).sum()
        rest_p = student[:, len(matched) :].sort(dim=1, descending=True).values
        rest_t = target[:, len(matched) :].sort(dim=1, descending=True).values
        width = max(rest_p.shape[1], rest_t.shape[1])
        pad = torch.nn.functional.pad
        l1 = (
            pad(rest_p, (0, width - rest_p.shape[1])) - pad(rest_t, (0, width - rest_t.shape[1]))
        ).abs()
        share = len(matched) / size.teacher_vocabulary
        divergence = (share * jsd + (1 - share) * l1.sum()) / len(starts)
        total = divergence + torch.nn.functional.cross_entropy(logits, problem.labels)
        total.backward()
        return total

    return step


VARIANTS: dict[str, Callable[[Problem], Callable[[], Tensor]]] = {
    "cross entropy, block-wise (floor)": cross_entropy_floor,
    "ours: CTKD + cross entropy, block-wise": ours,
    "CTKD + cross entropy, dense autograd": dense_autograd,
    "X-Token P-KL + cross entropy, dense": xtoken,
    "GOLD merged vectors + cross entropy, dense": gold,
}


def measure(name: str, size: Size, device_name: str, threads: int, pipe: Connection) -> None:
    """Run one step per message in a separate process; return seconds and peak bytes."""
    torch.set_num_threads(threads)
    device = torch.device(device_name)
    step = VARIANTS[name](make_problem(size, device))
    while pipe.recv():
        before = resident_bytes(device)
        started = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        pipe.send((time.perf_counter() - started, peak_bytes(device) - before))


def resident_bytes(device: torch.device) -> int:
    """Bytes in use now; the high-water mark begins anew."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")
    return _status_bytes("VmRSS")


def peak_bytes(device: torch.device) -> int:
    """Peak bytes of the process since ``resident_bytes``; of the accelerator's memory if used."""
    return torch.cuda.max_memory_allocated() if device.type == "cuda" else _status_bytes("VmHWM")


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(dict(line.split(":", 1) for line in lines)[name].split()[0]) * 1024


def run(size: Size, device: str, rounds: int, threads: int, console: Console) -> dict[str, Any]:
    """Variant -> median seconds and peak bytes. On an accelerator variants run one by one."""
    seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
    peaks: dict[str, int] = {}
    together = [list(VARIANTS)] if device == "cpu" else [[name] for name in VARIANTS]
    spawn = multiprocessing.get_context("spawn")
    for names in together:
        pipes: dict[str, Connection] = {}
        for name in names:
            near, far = spawn.Pipe()
            arguments = (name, size, device, threads, far)
            spawn.Process(target=measure, args=arguments, daemon=True).start()
            far.close()
            pipes[name] = near
        for number in range(rounds + 1):
            for name, pipe in pipes.items():
                pipe.send(True)
                try:
                    elapsed, peak = pipe.recv()
                except EOFError:
                    console.print(f"{name} did not finish; out of memory?")
                    sys.exit(1)
                if number == 0:
                    peaks[name] = peak  # the first round warms up: later ones reuse its memory
                else:
                    seconds[name].append(elapsed)
        for pipe in pipes.values():
            pipe.send(False)
    return {
        name: {
            "seconds_median": statistics.median(seconds[name]),
            "seconds": seconds[name],
            "peak_bytes": peaks[name],
        }
        for name in VARIANTS
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds (default: 5)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: 2)")
    options = parser.parse_args()
    console = Console()
    size = CPU if options.device == "cpu" else ACCELERATOR
    results = run(size, options.device, options.rounds, options.threads, console)
    floor, own = (results[name] for name in list(VARIANTS)[:2])
    table = Table(
        title=f"{size.rows:,} rows, vocabularies of {size.student_vocabulary:,} and "
        f"{size.teacher_vocabulary:,}, hidden size {size.hidden:,}, k {size.k}"
    )
    for heading in ("", "ms", "× floor", "× ours", "peak MB", "peak × ours"):
        table.add_column(heading, justify="left" if not heading else "right")
    for name, result in results.items():
        table.add_row(
            name,
            f"{result['seconds_median'] * 1e3:,.0f}",
            f"{result['seconds_median'] / floor['seconds_median']:.2f}",
            f"{result['seconds_median'] / own['seconds_median']:.2f}",
            f"{result['peak_bytes'] / 1e6:,.0f}",
            f"{result['peak_bytes'] / own['peak_bytes']:.1f}",
        )
    console.print(table)
    if options.json:
        report = {"size": asdict(size), "device": options.device, "results": results}
        report["torch"] = torch.__version__
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
