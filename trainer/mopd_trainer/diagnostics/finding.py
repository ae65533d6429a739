"""``Finding``, of a check of the doctor."""

from dataclasses import dataclass, field
from typing import Literal

Status = Literal["ok", "warning", "failed"]


@dataclass(frozen=True)
class Finding:
    """The result of a check, with its numbers."""

    check: str
    status: Status
    text: str
    fix: str = ""
    numbers: dict[str, float] = field(default_factory=dict[str, float])

    def line(self) -> str:
        """Return one line for the console."""
        fix = f" {self.fix}" if self.fix and self.status != "ok" else ""
        return f"{self.status:<7}  {self.check:<17}  {self.text}{fix}"
