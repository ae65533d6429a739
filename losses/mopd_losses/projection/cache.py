"""Projections live on the CPU, once; each device gets its own copy, moved once.

Nothing that a device computes with is shared with the cache or with another device, so a tensor
can never be bound to the device that happened to request it first.
"""

import hashlib
import json
import logging
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from mopd_losses.projection.control_tokens import ControlTokens
from mopd_losses.projection.matrix import (
    BUILDER_VERSION,
    ProjectionMatrix,
    ProjectionSettings,
    build_projection,
)
from mopd_protocol.errors import DataError
from mopd_protocol.tokenizers.token_table import TextEncoder, TokenTable

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class DeviceProjection:
    """A projection's tensors on one device, in the form that losses gather from."""

    column_starts: Int64[Tensor, "columns_and_end"]
    student_ids: Int64[Tensor, "entries"]
    log_weights: Float[Tensor, "entries"]  # nats
    real_ids: Bool[Tensor, "student_width"]
    unprojected_ids: Int64[Tensor, "few"]  # student ids that reach no teacher id

    @classmethod
    def copy_of(cls, matrix: ProjectionMatrix, device: torch.device) -> "DeviceProjection":
        """Fresh tensors on ``device``; the matrix's own arrays are copied, also on the CPU."""

        def on_device(array: np.typing.NDArray[np.generic], dtype: torch.dtype) -> Tensor:
            return torch.tensor(array, dtype=dtype).to(device)

        return cls(
            column_starts=on_device(matrix.column_starts, torch.int64),
            student_ids=on_device(matrix.student_ids, torch.int64),
            log_weights=on_device(np.log(matrix.weights), torch.float32),
            real_ids=on_device(matrix.real_ids, torch.bool),
            unprojected_ids=on_device(matrix.unprojected_ids, torch.int64),
        )


class ProjectionCache:
    """Builds each projection once, saves it if a folder is set, and moves it once per device."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self._matrices: dict[str, ProjectionMatrix] = {}
        self._copies: dict[tuple[str, torch.device], DeviceProjection] = {}

    def matrix(
        self,
        student: TokenTable,
        teacher: TokenTable,
        teacher_encoder: TextEncoder,
        *,
        student_width: int,
        settings: ProjectionSettings | None = None,
    ) -> ProjectionMatrix:
        """The projection of this pair, from memory, from disk, or built now."""
        settings = settings or ProjectionSettings()
        key = cache_key(student, teacher, student_width=student_width, settings=settings)
        if key not in self._matrices:
            path = self.folder / f"projection-{key}.safetensors" if self.folder else None
            matrix = _on_disk(path) if path is not None else None
            if matrix is None:
                matrix = build_projection(
                    student,
                    teacher,
                    teacher_encoder,
                    student_width=student_width,
                    settings=settings,
                )
                if path is not None:
                    matrix.save(path)
                    logger.info("projection written to %s", path)
            matrix.require(student.fingerprint, teacher.fingerprint)
            self._matrices[key] = matrix
        return self._matrices[key]

    def on(self, device: torch.device | str, matrix: ProjectionMatrix) -> DeviceProjection:
        """The device's own copy of the matrix."""
        where = torch.empty(0, device=device).device  # "cuda" has the number of the current device
        copy_key = (matrix.key, where)
        if copy_key not in self._copies:
            self._copies[copy_key] = DeviceProjection.copy_of(matrix, where)
        return self._copies[copy_key]


def _on_disk(path: Path) -> ProjectionMatrix | None:
    """None where there is no file, or one that cannot be read and is to be built anew."""
    if not path.exists():
        return None
    try:
        return ProjectionMatrix.load(path)
    except DataError as error:
        logger.warning("%s; building it anew", error)
        return None


def cache_key(
    student: TokenTable, teacher: TokenTable, *, student_width: int, settings: ProjectionSettings
) -> str:
    """32 hex digits over everything that decides a projection."""
    decisive = {
        "builder_version": BUILDER_VERSION,
        "student": [student.fingerprint, student.roles.model_dump(), student_width],
        "teacher": [teacher.fingerprint, teacher.roles.model_dump()],
        "controls": sorted(ControlTokens.of(student, teacher).ordinary.items()),
        "settings": settings.model_dump(),
    }
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:32]
