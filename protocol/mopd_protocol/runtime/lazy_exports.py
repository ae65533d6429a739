"""Lazy exports of a package (PEP 562): a name is imported from its module on first access."""

import ast
from collections.abc import Callable
from importlib import import_module
from inspect import getsource
from sys import modules as loaded_modules


def lazy_exports(package: str) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package.

    The exports are the imports in the ``if TYPE_CHECKING`` block of its ``__init__.py``, so that
    every name is listed once for type checkers and at run time.
    """
    body = ast.parse(getsource(loaded_modules[package])).body
    exports = {
        alias.asname or alias.name: (node.module, alias.name)
        for block in body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }

    def load_export(name: str) -> object:
        if name not in exports:
            raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name)
        module, attribute = exports[name]
        value = getattr(import_module(module), attribute)
        setattr(loaded_modules[package], name, value)
        return value

    return load_export, lambda: sorted(exports)
