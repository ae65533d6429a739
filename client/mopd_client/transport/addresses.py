"""``names_addresses``: every error of a client names its teacher and the teacher's addresses."""

from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, TypeVar, cast

from mopd_protocol.errors import MopdError

Method = TypeVar("Method", bound=Callable[..., Coroutine[Any, Any, Any]])


def names_addresses(method: Method) -> Method:
    """Decorate a method of a client: its errors without an address name those of all replicas."""

    @wraps(method)
    async def named(client: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return await method(client, *args, **kwargs)
        except MopdError as error:
            text, urls = str(error), client.addresses
            teacher = f"teacher {client.name!r}"
            known = [*urls, *(replica.url for replica in client.replicas), f"{teacher} at "]
            if not any(address in text for address in known):
                rest = text.removeprefix(teacher) if text.startswith(teacher) else f": {text}"
                error.args = (f"{teacher} at {', '.join(urls)}{rest}",)
            raise

    return cast("Method", named)
