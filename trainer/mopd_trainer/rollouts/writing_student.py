"""``WritingStudent``: the student that writes, which is the one that is trained or a copy of it."""

import torch

from mopd_trainer.student.student import Student


class WritingStudent:
    """Who writes. Apart, it is a copy that keeps its weights while the original is trained.

    A copy costs the memory of what is trained once more: 4 bytes a parameter, on the same device,
    and no gradients or moments.
    """

    def __init__(self, trained: Student, *, apart: bool) -> None:
        self._trained = trained
        self.student = trained.copy() if apart else trained
        if apart:
            self.student.model.requires_grad_(False)

    @torch.no_grad()
    def load_weights(self) -> None:
        """Writes like the trained student of now; nobody else may read or change either."""
        if self.student is self._trained:
            return
        theirs = self._trained.whole_model().state_dict()
        for name, mine in self.student.model.state_dict().items():
            if mine.data_ptr() != theirs[name].data_ptr():  # what is not trained is shared
                mine.copy_(theirs[name])
