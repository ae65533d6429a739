"""On-policy descent of a tabular student, with expectations over all of its completions.

The teacher is a byte model whose mass is almost only on a language of two texts; the student's
completions are all token sequences of up to three letters, also non-canonical ones.
"""

from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from mopd_losses.core.loss import AlignedPair
from mopd_losses.core.student_rows import DenseRows
from mopd_losses.core.valid_text import ValidTextTargets
from tests.losses.beliefs import scored
from tests.losses.contract import Row
from tests.losses.prefix_pairs import END, Pair, Tongue, model_rows
from tests.reference.text_model import TokenModel, markov_texts

LANGUAGE = {"ab": 0.6, "ba": 0.4}
LONGEST = 3
#: Logit of tokens that would make a completion too long, and of all other ids.
LOWEST = -25.0
STEPS, LEARNING_RATE = 25, 0.2


def texts(share: float) -> dict[str, float]:
    """Return a byte model with this share of its mass on the language, the rest on all texts."""
    every = markov_texts("ab", LONGEST, seed=0)
    return {
        text: (1 - share) * mass + share * LANGUAGE.get(text, 0.0) for text, mass in every.items()
    }


class Student:
    """Logits by token prefix, and all completions with the prefixes of their positions."""

    def __init__(self, tongue: Tongue, share: float) -> None:
        self.tongue = tongue
        tokens = [t for t in ("a", "b", "ab") if t.encode() in tongue.table.all_bytes]
        self.columns = torch.tensor(tongue.ids([*tokens, END]))
        self.completions: list[tuple[str, ...]] = []
        prefixes: list[tuple[str, ...]] = [()]
        for prefix in prefixes:
            room = LONGEST - len("".join(prefix))
            prefixes += [(*prefix, token) for token in tokens if len(token) <= room]
            self.completions.append((*prefix, END))
        numbers = {prefix: number for number, prefix in enumerate(prefixes)}
        model = TokenModel(texts(share), tongue.tokenize)
        self.logits = torch.zeros(len(prefixes), len(self.columns), dtype=torch.float64)
        for prefix, number in numbers.items():
            room = LONGEST - len("".join(prefix))
            following = _row(model, prefix)
            for column, token in enumerate([*tokens, END]):
                fits = len(token) <= room
                likely = torch.tensor(following.get(token, 1e-3)).log() if following else 0.0
                self.logits[number, column] = likely if fits else LOWEST
        self.states = torch.tensor(
            [numbers[c[:at]] for c in self.completions for at in range(len(c))]
        )
        self.labels = torch.tensor([i for c in self.completions for i in tongue.ids(c)])
        self.owners = torch.repeat_interleave(torch.tensor([len(c) for c in self.completions]))
        self.trainable = self.logits > LOWEST

    def rows(self, logits: Tensor) -> DenseRows:
        """Return the rows of all completions."""
        width = self.tongue.logit_width
        wide = torch.full((len(logits), width), LOWEST, dtype=torch.float64)
        wide = wide.index_copy(1, self.columns, logits)
        real = torch.tensor(self.tongue.table.real_ids(width))
        return DenseRows(wide[self.states], real)

    def log_probabilities(self, rows: DenseRows) -> Tensor:
        """[positions], of each completion's tokens."""
        return rows.logprobs(torch.arange(len(self.labels)), self.labels)

    def probabilities(self, rows: DenseRows) -> Tensor:
        """[completions], their probability."""
        zeros = torch.zeros(len(self.completions), dtype=torch.float64)
        return zeros.index_add(0, self.owners, self.log_probabilities(rows).detach()).exp()


def _row(model: TokenModel, prefix: tuple[str, ...]) -> dict[str, float]:
    try:
        return model.row(prefix)
    except KeyError:  # no text is tokenized with this prefix
        return {}


@cache
def _student(name: str) -> Student:
    return Student(Tongue.of("ab") if name == "long tokens" else Tongue.of(), share=0.7)


def _sampled_by(logprobs: Tensor, targets: Any) -> Any:
    """Return targets of completions that were sampled with these log-probabilities."""
    if isinstance(targets, ValidTextTargets):
        return replace(targets, inner=_sampled_by(logprobs, targets.inner))
    has_samples = hasattr(targets, "sampled_logprobs")
    return replace(targets, sampled_logprobs=logprobs) if has_samples else targets


def language_mass(row: Row) -> tuple[float, float]:
    """Return the student's mass on the language before and after descent."""
    student = _student("letters" if row.one_tokenizer else "long tokens")
    teacher = student.tongue if row.one_tokenizer else Tongue.of("ba", end="<stop>")
    pair = Pair(student.tongue, teacher)
    model = TokenModel(texts(0.98), teacher.tokenize)
    comparisons: list[AlignedPair] = []
    for completion in student.completions:
        text = "".join(completion[:-1])
        teacher_ids = teacher.ids(model.written[text])
        rows = model_rows(teacher, model, text)
        comparisons.append(scored(row, pair, pair.student.ids(completion), teacher_ids, rows))
    lengths = [len(completion) for completion in student.completions]
    offsets = [sum(lengths[:at]) for at in range(len(lengths))]
    loss = row.between(pair.student, teacher)
    targets: Any = loss.targets(comparisons, offsets)
    logits = student.logits.clone().requires_grad_()
    valid = torch.tensor(["".join(c[:-1]) in LANGUAGE for c in student.completions])
    optimizer = torch.optim.Adam([logits], lr=LEARNING_RATE)
    masses: list[float] = []
    for _ in range(STEPS):
        rows = student.rows(logits)
        probabilities = student.probabilities(rows)
        masses.append(probabilities[valid].sum().item())
        targets = _sampled_by(student.log_probabilities(rows).detach(), targets)
        value = (loss(rows, targets).per_token * probabilities[student.owners]).sum()
        (gradient,) = torch.autograd.grad(value, logits)
        logits.grad = gradient.masked_fill(~student.trainable, 0.0)
        optimizer.step()
    masses.append(student.probabilities(student.rows(logits))[valid].sum().item())
    return masses[0], masses[-1]
