"""``/docs``: one page of HTML from the OpenAPI document, without scripts or other addresses.

FastAPI's own page loads its scripts from a public server, and is blank without internet.
"""

import json
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
h2 { margin-top: 2.5rem; border-top: 1px solid #8884; padding-top: 1rem }
code, pre { font: 14px/1.5 ui-monospace, monospace }
pre { background: #8881; padding: .7rem; overflow: auto }
table { border-collapse: collapse; width: 100% }
td, th { text-align: left; vertical-align: top; padding: .3rem .8rem .3rem 0;
         border-bottom: 1px solid #8884 }
:root { color-scheme: light dark }
"""


def documentation_page(document: Mapping[str, Any]) -> str:
    """Return the page of an OpenAPI document: its routes, then the fields of its schemas."""
    info = document["info"]
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        f"<title>{escape(info['title'])}</title><style>{_STYLE}</style>"
        f"<h1>{escape(info['title'])}</h1><p>{escape(info.get('summary', ''))} "
        f'As JSON: <a href="openapi.json">openapi.json</a>.</p>'
        f"{''.join(_routes(document))}{''.join(_schemas(document))}"
    )


def _routes(document: Mapping[str, Any]) -> Iterator[str]:
    for path, methods in document["paths"].items():
        for method, route in methods.items():
            yield f"<h2><code>{method.upper()} {escape(path)}</code></h2>"
            yield f"<p><b>{escape(route.get('summary', ''))}.</b> "
            yield f"{escape(route.get('description', ''))}</p>"
            for media, body in route.get("requestBody", {}).get("content", {}).items():
                yield f"<p>Body, <code>{escape(media)}</code>: {_type(body.get('schema', {}))}</p>"
            rows = [
                (status, escape(response.get("description", "")), _contents(response))
                for status, response in route.get("responses", {}).items()
            ]
            yield _table(("Status", "", "Body"), rows)


def _contents(response: Mapping[str, Any]) -> str:
    return "<br>".join(
        f"<code>{escape(media)}</code>: {_type(content.get('schema', {}))}"
        for media, content in response.get("content", {}).items()
    )


def _schemas(document: Mapping[str, Any]) -> Iterator[str]:
    for name, schema in document.get("components", {}).get("schemas", {}).items():
        yield f'<h2 id="{escape(name)}"><code>{escape(name)}</code></h2>'
        yield f"<p>{escape(schema.get('description', ''))}</p>"
        required = schema.get("required", ())
        rows = [
            (
                field + ("" if field in required else " (optional)"),
                _type(each) + _default(each),
                escape(each.get("description", "")),
            )
            for field, each in schema.get("properties", {}).items()
        ]
        yield _table(("Field", "Type", ""), rows)
        for example in schema.get("examples", ()):
            yield f"<p>Example:</p><pre>{escape(json.dumps(example, indent=2))}</pre>"


def _default(schema: Mapping[str, Any]) -> str:
    default = schema.get("default")
    return "" if default is None else f" = {escape(json.dumps(default))}"


def _type(schema: Mapping[str, Any]) -> str:
    """Return a schema's type, with links to the schemas that it names."""
    if reference := schema.get("$ref"):
        name = escape(reference.rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    if options := schema.get("anyOf"):
        return " or ".join(map(_type, options))
    if values := schema.get("enum"):
        return " or ".join(escape(json.dumps(value)) for value in values)
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    return escape(str(schema.get("type", "any")))


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Return a table; all but the first cell of a row are HTML."""
    cells = [
        f"<td><code>{escape(first)}</code></td>{''.join(f'<td>{cell}</td>' for cell in rest)}"
        for first, *rest in rows
    ]
    return (
        f"<table><tr>{''.join(f'<th>{name}</th>' for name in head)}</tr>"
        f"{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"
    )
