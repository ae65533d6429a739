"""Changes of a response that keep its shapes and its text, but not its tokens.

As ``LIES``, for completions of words: tokens have several bytes, and one of them is a control token
inside the completion. Most need the teacher's tokenizer to be rejected.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from mopd_protocol.requests import ControlToken, SequenceRequest
from tests.client.lying_proxy import ROWS, Document, Lie, Sequence

WORDS = [
    SequenceRequest(prompt="the", completion="brown fox jumps over the lazy dog"),
    SequenceRequest(
        prompt="the",
        completion=["apple pear", ControlToken(control="<|user|>"), " fig reverse"],
        finished=True,
    ),
]


def _first(change: Callable[[Sequence], object]) -> Callable[[Document], object]:
    return lambda document: change(_arrays(document["sequences"][0]))


def _second(change: Callable[[Sequence], object]) -> Callable[[Document], object]:
    return lambda document: change(_arrays(document["sequences"][1]))


def _arrays(sequence: Sequence) -> Sequence:
    for name in ("token_ids", "byte_ends", "token_logprobs", *ROWS):
        sequence[name] = np.array(sequence[name])
    return sequence


def _edit_rows(sequence: Sequence, edit: Callable[[np.ndarray], np.ndarray]) -> None:
    for name in ("token_ids", "token_logprobs", *ROWS):
        sequence[name] = edit(sequence[name])


def _consistent(sequence: Sequence) -> None:
    """Give every completion token a log-probability that its row permits."""
    for row, token in enumerate(sequence["token_ids"]):
        entry = np.flatnonzero(sequence["topk_ids"][row] == token)
        values = sequence["topk_logprobs"][row]
        tail = sequence["tail_logprobs"][row]
        sequence["token_logprobs"][row] = (
            values[entry[0]] if len(entry) else min(values[-1], tail) - 1
        )


def _merged(sequence: Sequence) -> None:
    _edit_rows(sequence, lambda values: np.delete(values, 2, axis=0))
    sequence["byte_ends"] = np.delete(sequence["byte_ends"], 1)


def _split(sequence: Sequence) -> None:
    at = int(np.flatnonzero(np.diff(sequence["byte_ends"]) > 1)[0]) + 1
    _edit_rows(sequence, lambda values: np.insert(values, at, values[at], axis=0))
    sequence["byte_ends"] = np.insert(sequence["byte_ends"], at, sequence["byte_ends"][at] - 1)


def _with_empty_token(sequence: Sequence) -> None:
    _edit_rows(sequence, lambda values: np.insert(values, 2, values[2], axis=0))
    sequence["byte_ends"] = np.insert(sequence["byte_ends"], 2, sequence["byte_ends"][1])


def _with_end_of_turn(sequence: Sequence) -> None:
    _edit_rows(sequence, lambda values: np.concatenate([values, values[-1:]]))
    sequence["token_ids"][-1] = 0
    sequence["byte_ends"] = np.append(sequence["byte_ends"], sequence["byte_ends"][-1])
    sequence["marks"] = [[len(sequence["token_ids"]) - 1, "end_of_turn"]]
    _consistent(sequence)


def _other_end(sequence: Sequence) -> None:
    sequence["token_ids"][-1] = 1
    _consistent(sequence)


def _byte_moved(sequence: Sequence) -> None:
    long = np.flatnonzero(np.diff(sequence["byte_ends"]) > 1)[0]
    sequence["byte_ends"][long] += 1


def _spread(sequence: Sequence) -> None:
    count = len(sequence["byte_ends"])
    sequence["byte_ends"] = np.arange(1, count + 1) * len(sequence["text"]) // count


def _other_id(sequence: Sequence) -> None:
    sequence["token_ids"][1] = 6 if sequence["token_ids"][1] != 6 else 7
    _consistent(sequence)


def _spaces_as_metaspaces(sequence: Sequence) -> None:
    extra = 2 * sequence["text"].count(" ")
    sequence["text"] = sequence["text"].replace(" ", "\u2581")
    sequence["byte_ends"][-1] += extra


def _control(sequence: Sequence) -> int:
    return sequence["marks"][0][0]


def _control_moved(sequence: Sequence) -> None:
    position = _control(sequence)
    order = np.arange(len(sequence["token_ids"]))
    order[[position, position + 1]] = order[[position + 1, position]]
    _edit_rows(sequence, lambda values: values[order])
    sequence["byte_ends"][position] = sequence["byte_ends"][position + 1]
    sequence["marks"][0][0] += 1


def _other_control(sequence: Sequence) -> None:
    sequence["token_ids"][_control(sequence)] = 4
    sequence["marks"][0][1] = "<|assistant|>"
    _consistent(sequence)


def _control_renamed(sequence: Sequence) -> None:
    sequence["marks"][0][1] = "<|system|>"


def _control_dropped(sequence: Sequence) -> None:
    position = _control(sequence)
    _edit_rows(sequence, lambda values: np.delete(values, position, axis=0))
    sequence["byte_ends"] = np.delete(sequence["byte_ends"], position)
    sequence["marks"] = [[sequence["marks"][1][0] - 1, "end_of_turn"]]


#: Rejected without the teacher's tokenizer, too.
CONTROL_LIES: dict[str, Lie] = {
    "a token without bytes more": Lie(_first(_with_empty_token), "marks"),
    "an end of turn more": Lie(_first(_with_end_of_turn), "marks"),
    "another token under the mark of the end": Lie(_second(_other_end), "finished"),
    "control token moved": Lie(_second(_control_moved), "text"),
    "control token dropped": Lie(_second(_control_dropped), "marks"),
}
TOKEN_LIES: dict[str, Lie] = CONTROL_LIES | {
    "two tokens merged": Lie(_first(_merged), "byte_ends"),
    "a token split": Lie(_first(_split), "byte_ends"),
    "one end moved by a byte": Lie(_first(_byte_moved), "byte_ends"),
    "bytes spread evenly": Lie(_first(_spread), "byte_ends"),
    "another id": Lie(_first(_other_id), "byte_ends text"),
    "metaspaces for spaces": Lie(_first(_spaces_as_metaspaces), "byte_ends"),
    "another control token": Lie(_second(_other_control), "marks"),
    "control token renamed": Lie(_second(_control_renamed), "marks"),
}


def _sharpened(document: Document) -> None:
    """Multiply all but the tail, which keeps the sum at one: every tail becomes impossible."""
    for sequence in map(_arrays, document["sequences"]):
        for name in ("topk_logprobs", "token_logprobs"):
            sequence[name] = sequence[name] * 8
        mass = np.exp(sequence["topk_logprobs"].astype(np.float64)).sum(axis=1)
        sequence["tail_logprobs"] = np.log(np.maximum(1 - mass, 1e-6))
        _consistent(sequence)


def _mass_of_rounding(document: Document) -> None:
    """Lower the first entries by as much as float16 would round them at most."""
    for sequence in map(_arrays, document["sequences"]):
        other = sequence["topk_ids"] != sequence["token_ids"][:, None]
        shift = 5e-4 * other * (np.arange(other.shape[1]) < 4)
        sequence["topk_logprobs"] = -np.sort(-(sequence["topk_logprobs"] - shift), axis=1)


VALUE_LIES: dict[str, Lie] = {
    "sharpened": Lie(_sharpened, "tail_logprobs"),
    "entries lowered by 5e-4": Lie(_mass_of_rounding, "mass"),
}


def without_token(document: Document) -> Any:
    """Drop the entry of the completion token from rows of candidates."""
    sequence = _arrays(document["sequences"][0])
    for row, token in enumerate(sequence["token_ids"]):
        entry = int(np.flatnonzero(sequence["topk_ids"][row] == token)[0])
        tail = sequence["tail_logprobs"][row], sequence["topk_logprobs"][row, entry]
        sequence["tail_logprobs"][row] = np.logaddexp(*tail)
        for name, missing in (("topk_ids", -1), ("topk_logprobs", -np.inf)):
            values = np.delete(sequence[name][row], entry)
            sequence[name][row] = np.append(values, missing)
