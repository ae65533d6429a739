"""Dependencies of routes: the teacher behind the application, and the addressed adapter."""

from http import HTTPStatus
from typing import Annotated

from fastapi import Depends, FastAPI, Request

from mopd_server.http.lifecycle import Lifecycle
from mopd_server.http.middleware.adapter_path import adapter_of
from mopd_server.scoring.service import TeacherService
from mopd_server.service_error import ServiceError


def lifecycle_of(app: FastAPI) -> Lifecycle:
    """Return the state of the teacher behind ``app``."""
    return app.state.lifecycle


# Coroutines: FastAPI calls other functions in a thread.


async def _lifecycle(request: Request) -> Lifecycle:
    return lifecycle_of(request.app)


async def _service(request: Request) -> TeacherService:
    return lifecycle_of(request.app).require_loaded()


async def _adapter(request: Request) -> str | None:
    service = lifecycle_of(request.app).require_loaded()
    name, known = adapter_of(request.scope), service.manifests
    if name not in known:
        names = ", ".join(str(each) for each in known if each) or "none"
        raise ServiceError(
            HTTPStatus.NOT_FOUND, f"adapter not found (found {name!r}, expected one of {names})"
        )
    return name


Service = Annotated[TeacherService, Depends(_service)]
Adapter = Annotated[str | None, Depends(_adapter)]
Life = Annotated[Lifecycle, Depends(_lifecycle)]
