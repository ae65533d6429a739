"""The teacher that a request names in its field ``model`` or ``lora_path``."""

from http import HTTPStatus

from mopd_server.scoring.service import TeacherService
from mopd_server.service_error import ServiceError


def require_model(
    service: TeacherService, adapter: str | None, model: str | None, *, field: str = "model"
) -> str | None:
    """Return the name of the adapter to score with, None for the base model.

    A model has the name of ``GET /v1/models``, or its ``root``.

    Args:
        service: the teacher.
        adapter: of the path.
        model: value of the field.
        field: name of the field.

    Raises:
        ServiceError: 404 if the model is unknown, or not that of the path.
    """
    if model is None:
        return adapter
    known = service.manifests if adapter is None else {adapter: service.manifests[adapter]}
    for attribute in ("service", "model"):
        for name, manifest in known.items():
            if getattr(manifest, attribute) == model:
                return name
    names = ", ".join(manifest.service for manifest in known.values())
    raise ServiceError(
        HTTPStatus.NOT_FOUND,
        f"{field}: not found (found {model!r}, expected one of {names}). See /v1/models.",
        key=field,
    )
