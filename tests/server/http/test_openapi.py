"""Responses conform to the OpenAPI document, for valid and invalid requests; its page."""

import re

import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from mopd_server.app import create_app
from mopd_server.http.lifecycle import Lifecycle
from tests.server.tiny_teachers import get, teacher_of_family

APP = create_app(Lifecycle(teacher_of_family("qwen").service))
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
]

schema = schemathesis.openapi.from_asgi("/openapi.json", APP)
schema.config.update(request_timeout=600.0)  # 10 s unless set; a busy machine needs longer


@schema.parametrize()
@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
def test_responses_conform_to_the_openapi_page(case: schemathesis.Case) -> None:
    case.call_and_validate(checks=CHECKS)


def test_documentation_page_is_complete_without_other_addresses() -> None:
    page, document = get(APP, "/docs").text, get(APP, "/openapi.json").json()
    for path in document["paths"]:
        assert f" {path}</code>" in page
    for name, schema in document["components"]["schemas"].items():
        assert f'id="{name}"' in page
        assert all(f"<code>{field}" in page for field in schema.get("properties", ()))
    assert set(re.findall(r'(?:href|src)="([^#"]*)', page)) == {"openapi.json", ""}
    assert "<script" not in page
