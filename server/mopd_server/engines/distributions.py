"""Arithmetic of scoring: rows of logits -> truncated distributions."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mopd_protocol.topk_logprobs import ABSENT_ID, TopKLogprobs

#: Entries of the logits of one chunk of rows: 128 MiB in float32 on an accelerator. On a CPU,
#: buffers above 32 MiB are returned to the system after every use, which costs more than the head.
_CHUNK_ENTRIES, _CPU_CHUNK_ENTRIES = 2**25, 2**22
_MOST_CHUNK_ROWS = 256

#: Below this ratio of width and k, or this width, ``torch.topk`` is as fast on a CPU.
_MIN_WIDTH_PER_ENTRY, _MIN_WIDTH = 8, 256

#: Wider rows are divided into groups first.
_MAX_WIDTH = 8192
#: Groups whose maxima determine the threshold of a row, and most entries above it, per k: about
#: 1.15 k without ties.
_GROUPS_PER_ENTRY, _MOST_PER_ENTRY = 4, 4

_COLUMN_BITS = 32

_LOG2_E = math.log2(math.e)


@dataclass(frozen=True, eq=False)
class TruncatedRows:
    """Truncated distributions of rows of logits; on the device of the logits."""

    ids: Tensor  # [rows, k], most likely first, -1 where missing
    logprobs: Tensor  # [rows, k], nats, -inf where missing
    token_logprobs: Tensor  # [rows], nats
    tail_logprobs: Tensor  # [rows], nats
    token_ranks: Tensor | None = None  # [rows], 1 + number of likelier ids; None for candidates


def truncated_rows(
    head: Callable[[slice], Tensor | None],
    tokens: Tensor,
    width: int,
    *,
    top_k: int,
    candidates: Tensor | None = None,
    padding: Tensor | None = None,
    temperature: float = 1.0,
) -> list[TruncatedRows]:
    """Compute distributions in chunks of rows, so that few logits are in memory at once.

    Args:
        head: logits ``[rows of the slice, width]`` of a slice of the rows, which are overwritten;
            None on a process without the logits, for which nothing is returned.
        tokens: ``[rows]``, tokens to score.
        width: entries of a row of logits.
        top_k: number of most likely ids; ignored with ``candidates``.
        candidates: ``[rows, k]``, ids to score instead, -1 where missing.
        padding: ``[width]``, True for rows of the head without a token.
        temperature: softmax temperature.
    """
    entries = _CPU_CHUNK_ENTRIES if tokens.device.type == "cpu" else _CHUNK_ENTRIES
    size = min(max(entries // width, 1), _MOST_CHUNK_ROWS)
    chunks: list[TruncatedRows] = []
    for start in range(0, len(tokens), size):
        chunk = slice(start, start + size)
        logits = head(chunk)
        if logits is None:
            continue
        logits = scaled(logits, padding, temperature)
        if candidates is None:
            chunks.append(select_top_k(logits, tokens[chunk], top_k))
        else:
            chunks.append(select_candidates(logits, tokens[chunk], candidates[chunk]))
    return chunks


def scaled(logits: Tensor, padding: Tensor | None, temperature: float) -> Tensor:
    """Return ``logits / temperature`` in float32, ``-inf`` where ``padding``; may overwrite them.

    The padding is masked after the division, so that its logits (even NaN) have no effect.
    """
    logits = logits.float()
    if temperature != 1.0:
        logits = logits / temperature
    return logits if padding is None else logits.masked_fill_(padding, -torch.inf)


def select_top_k(logits: Tensor, tokens: Tensor, top_k: int) -> TruncatedRows:
    """Select the ``top_k`` most likely ids per row; overwrites ``logits`` ``[rows, width]``.

    The tail is summed over the other logits: one minus the sum of k float32 entries has no correct
    digit where a teacher is confident. All terms are relative to the largest logit, as in a
    log-softmax, whose passes over the row are not repeated for the tail.
    """
    token = logits.gather(1, tokens[:, None])
    top, ids = top_entries(logits, top_k)
    ranks = _token_ranks(logits, token, top)
    largest = top[:, :1]
    rest = logits.scatter_(1, ids, -torch.inf)
    # Finite, so that a row without a tail is not NaN.
    offset = rest.amax(dim=1, keepdim=True).clamp_(min=torch.finfo(rest.dtype).min)
    # On a CPU, exp takes 4 times as long as exp2, and even longer for -inf.
    terms = rest.sub_(offset).mul_(_LOG2_E).exp2_()
    tail = terms.sum(dim=1, keepdim=True).log_().add_(offset - largest)
    top = top - largest
    total = torch.logaddexp(top.logsumexp(dim=1, keepdim=True), tail)
    top = top.sub_(total)
    return TruncatedRows(
        _mask_impossible(ids, top),
        top,
        token.sub_(largest).sub_(total)[:, 0],
        tail.sub_(total)[:, 0],
        ranks,
    )


def _token_ranks(logits: Tensor, token: Tensor, top: Tensor) -> Tensor:
    """Return 1 + the number of logits above ``token`` ``[rows, 1]``.

    On a CPU, only the rows whose token is not among the largest are counted in full.
    """
    if logits.device.type != "cpu":
        return (logits > token).sum(dim=1) + 1
    ranks = (top > token).sum(dim=1) + 1
    outside = (token < top[:, -1:])[:, 0].nonzero()[:, 0]
    if len(outside):
        ranks[outside] = (logits[outside] > token[outside]).sum(dim=1) + 1
    return ranks


def select_candidates(logits: Tensor, tokens: Tensor, candidates: Tensor) -> TruncatedRows:
    """Select exactly the ``candidates`` ``[rows, k]`` (-1 where missing) per row, sorted."""
    logprobs = logits.log_softmax(dim=1)
    token_logprobs = logprobs.gather(1, tokens[:, None])[:, 0]
    missing = candidates < 0
    columns = candidates.clamp(min=0)
    selected = logprobs.gather(1, columns).masked_fill_(missing, -torch.inf)
    selected, order = selected.sort(dim=1, descending=True)
    # A missing entry points at id 0, which may also be a candidate: with amin, +inf keeps the
    # value of an id and -inf removes the id from the tail.
    removal = torch.full_like(selected, -torch.inf).masked_fill_(missing, torch.inf)
    tail = logprobs.scatter_reduce_(1, columns, removal, reduce="amin").logsumexp(dim=1)
    ids = _mask_impossible(candidates.gather(1, order), selected)
    return TruncatedRows(ids, selected, token_logprobs, tail)


def top_entries(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest entries of each row and their columns, as ``torch.topk``.

    On a CPU, columns are divided into groups first: the k largest entries are in the k groups with
    the largest maxima. Entries of narrow rows are compared with the k-th largest maximum, and the
    few that are not below are sorted by numpy. That is 3 times as fast at 2,048 columns and k 64.
    """
    rows, width = values.shape
    small = width < max(_MIN_WIDTH_PER_ENTRY * k, _MIN_WIDTH)
    if values.device.type != "cpu" or small or values.dtype != torch.float32:
        return values.topk(k, dim=1)
    if width <= _MAX_WIDTH:
        columns = _columns_above(values, k)
        return values.topk(k, dim=1) if columns is None else (values.gather(1, columns), columns)
    # k groups have as many entries as there are groups, halved: measured.
    members = max(int(math.sqrt(width / k) / 2), 2)
    groups = width // members
    grouped = values[:, : members * groups].view(rows, members, groups)
    _, best = top_entries(grouped.amax(dim=1), k)
    selected = grouped.gather(2, best[:, None].expand(-1, members, -1)).view(rows, -1)
    columns = (torch.arange(0, members * groups, groups)[:, None] + best[:, None]).view(rows, -1)
    if members * groups < width:
        rest = torch.arange(members * groups, width).expand(rows, -1)
        selected = torch.cat([selected, values[:, members * groups :]], dim=1)
        columns = torch.cat([columns, rest], dim=1)
    top, order = top_entries(selected, k)
    return top, columns.gather(1, order)


def _columns_above(values: Tensor, k: int) -> Tensor | None:
    """Return the columns of the k largest entries of each row of float32, in order.

    None if a row contains NaN, or many entries equal to the k-th.
    """
    rows, width = values.shape
    groups = _GROUPS_PER_ENTRY * k
    grouped = values[:, : width // groups * groups].view(rows, -1, groups)
    maxima = grouped.amax(dim=1).numpy()
    thresholds = np.partition(maxima, groups - k, axis=1)[:, groups - k, None]
    positions = np.flatnonzero(values.numpy() >= thresholds)
    row = positions // width
    counts = np.bincount(row, minlength=rows)
    if counts.min() < k or counts.max() > _MOST_PER_ENTRY * k:
        return None
    bits = values.numpy().reshape(-1)[positions].view(np.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # negative numbers: larger bits are smaller
    keys = np.full((rows, int(counts.max())), np.iinfo(np.int64).min)
    index = np.arange(len(positions)) - (counts.cumsum() - counts)[row]
    keys[row, index] = (ordered.astype(np.int64) << _COLUMN_BITS) | (positions - row * width)
    keys.sort(axis=1)
    return torch.from_numpy(keys[:, : -k - 1 : -1] & (2**_COLUMN_BITS - 1))


def concatenate(chunks: list[TruncatedRows]) -> TopKLogprobs:
    """Concatenate at least one chunk of rows into one validated value on the CPU."""

    def column(name: str) -> Tensor:
        return torch.cat([getattr(chunk, name) for chunk in chunks]).cpu()

    ranked = all(chunk.token_ranks is not None for chunk in chunks)
    return TopKLogprobs(
        ids=column("ids").numpy(),
        logprobs=column("logprobs").numpy(),
        token_logprobs=column("token_logprobs").numpy(),
        tail_logprobs=column("tail_logprobs").numpy(),
        token_ranks=column("token_ranks").int().numpy() if ranked else None,
    )


def _mask_impossible(ids: Tensor, logprobs: Tensor) -> Tensor:
    """Mark ids without any probability (masked by the model) as missing."""
    return ids.masked_fill(logprobs.isneginf(), ABSENT_ID)
