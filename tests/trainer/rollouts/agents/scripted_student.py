"""A sampler whose completions are written beforehand, and the student of a family's template."""

from collections.abc import Sequence

from mopd_trainer.config.run import RolloutConfig
from mopd_trainer.student.generation import Generation
from mopd_trainer.student.identity import StudentIdentity


class ScriptedGenerator:
    """Return the completions of a script in order, in tokens of single bytes."""

    def __init__(self, student: StudentIdentity, completions: Sequence[str]) -> None:
        self._student = student
        self._completions = [*completions]
        self.prompts: list[list[int]] = []
        self.batches: list[int] = []
        self.version = 0

    async def generate(
        self, prompts: Sequence[Sequence[int]], settings: RolloutConfig, *, seed: int
    ) -> list[Generation]:
        self.prompts += [[*each] for each in prompts]
        self.batches.append(len(prompts))
        return [self._generation(self._completions.pop(0)) for _ in prompts]

    async def push_weights(self, version: int) -> None:
        self.version = version

    def _generation(self, text: str) -> Generation:
        ids = single_bytes(self._student, text)
        return Generation(ids, [-1.0] * len(ids))


def single_bytes(student: StudentIdentity, text: str) -> list[int]:
    """Return control tokens, and a token for each byte of other text: not what a tokenizer does."""
    ids: list[int] = []
    while text:
        control = next((name for name in student.table.controls if text.startswith(name)), None)
        if control is not None:
            ids.append(student.table.controls[control])
            text = text[len(control) :]
        else:
            ids += [student.table.all_bytes.index(bytes([byte])) for byte in text[0].encode()]
            text = text[1:]
    return ids
