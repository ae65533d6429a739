"""Lazy exports of a package (PEP 562): a name is imported from its module on first access."""

from collections.abc import Callable, Mapping
from importlib import import_module
from sys import modules as loaded_modules


def lazy_exports(
    package: str, modules: Mapping[str, str]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package.

    Args:
        package: name of the package.
        modules: exported name -> module that defines the name, relative to the package.
    """

    def load_export(name: str) -> object:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name)
        value = getattr(import_module(f"{package}.{modules[name]}"), name)
        setattr(loaded_modules[package], name, value)
        return value

    return load_export, lambda: sorted(modules)
