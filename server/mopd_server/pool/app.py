"""``PoolApp``: the applications of a pool's teachers, each below ``/teachers/NAME``."""

from collections.abc import Callable, Mapping

from fastapi import FastAPI, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.types import ASGIApp, Receive, Scope, Send

from mopd_server.http.lifecycle import Lifecycle
from mopd_server.http.problems import install_problem_handlers

PREFIX = "/teachers/"


class LifecycleGroup:
    """The lifecycles of a pool as one."""

    def __init__(self, lifecycles: Mapping[str, Lifecycle]) -> None:
        self._lifecycles = list(lifecycles.values())

    @property
    def in_flight(self) -> int:
        """Accepted requests without a complete response."""
        return sum(each.in_flight for each in self._lifecycles)

    def drain(self, on_idle: Callable[[], None]) -> None:
        """Accept no more requests; call ``on_idle`` after the last response of all."""
        busy = set(self._lifecycles)

        def idle(lifecycle: Lifecycle) -> None:
            if lifecycle in busy:
                busy.remove(lifecycle)
                if not busy:
                    on_idle()

        for each in self._lifecycles:
            each.drain(lambda each=each: idle(each))

    def abort(self, code: str) -> None:
        """Respond with 503 to all requests, current and future."""
        for each in self._lifecycles:
            each.abort(code)

    def require_alive(self) -> None:
        """Raise ServiceError 503 if any teacher needs a restart."""
        for each in self._lifecycles:
            each.require_alive()

    def require_ready(self) -> None:
        """Raise ServiceError 503 unless all teachers are ready."""
        for each in self._lifecycles:
            each.require_ready()


class PoolApp:
    """ASGI application: ``/teachers/NAME/v1/logprobs`` and all other routes of each teacher.

    ``/healthz``, ``/readyz`` and ``/metrics`` without a name are those of the pool.
    """

    def __init__(
        self, apps: Mapping[str, FastAPI], group: LifecycleGroup, metrics: Callable[[], bytes]
    ) -> None:
        self._apps = apps
        self._own = _own_app(group, metrics)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the application of the teacher in the path."""
        app: ASGIApp = self._own
        if scope["type"] == "http" and scope["path"].startswith(PREFIX):
            name, _, rest = scope["path"].removeprefix(PREFIX).partition("/")
            if name in self._apps:
                path = f"/{rest}"
                app, scope = self._apps[name], {**scope, "path": path, "raw_path": path.encode()}
        await app(scope, receive, send)


def _own_app(group: LifecycleGroup, metrics: Callable[[], bytes]) -> FastAPI:
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    install_problem_handlers(app)

    async def health() -> dict[str, str]:
        group.require_alive()
        return {"status": "alive"}

    async def readiness() -> dict[str, str]:
        group.require_ready()
        return {"status": "ready"}

    async def pool_metrics() -> Response:
        return Response(metrics(), media_type=CONTENT_TYPE_LATEST)

    for path, route in (("/health", health), ("/healthz", health), ("/readyz", readiness)):
        app.add_api_route(path, route, methods=["GET", "HEAD"])
    app.add_api_route("/metrics", pool_metrics)
    return app
