"""Addresses of adapters: ``/adapters/NAME/PATH`` is ``PATH`` of another teacher."""

from starlette.types import ASGIApp, Receive, Scope, Send

_PREFIX = "/adapters/"
_KEY = "mopd_adapter"


class AdapterPathMiddleware:
    """ASGI middleware, the outermost: removes the prefix, so that all others see ``PATH``."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Store the name of the adapter in the scope."""
        if scope["type"] == "http" and scope["path"].startswith(_PREFIX):
            name, slash, path = scope["path"].removeprefix(_PREFIX).partition("/")
            path = f"{slash}{path}" or "/"
            scope = {**scope, "path": path, "raw_path": path.encode(), _KEY: name}
        await self._app(scope, receive, send)


def adapter_of(scope: Scope) -> str | None:
    """Return the name of the addressed adapter; None for the base model."""
    return scope.get(_KEY)
