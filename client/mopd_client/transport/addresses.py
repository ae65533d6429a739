"""``names_addresses``: every error of a client names its teacher and the teacher's addresses."""

from collections.abc import Callable, Coroutine, Sequence
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from mopd_client.transport.replica import Replica
from mopd_protocol.errors import MopdError

P = ParamSpec("P")
T = TypeVar("T")


class _Client(Protocol):
    name: str

    @property
    def replicas(self) -> Sequence[Replica]: ...


C = TypeVar("C", bound=_Client)


def names_addresses(
    method: Callable[Concatenate[C, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[C, P], Coroutine[Any, Any, T]]:
    """Decorate a method of a client: its errors without an address name those of all replicas."""

    @wraps(method)
    async def named(client: C, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return await method(client, *args, **kwargs)
        except MopdError as error:
            text, urls = str(error), [replica.url for replica in client.replicas]
            if not any(url in text for url in urls):
                teacher = f"teacher {client.name!r}"
                rest = text.removeprefix(teacher) if text.startswith(teacher) else f": {text}"
                error.args = (f"{teacher} at {', '.join(urls)}{rest}",)
            raise

    return named
