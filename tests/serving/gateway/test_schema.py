"""The served schema holds: requests drawn from it, wrong ones among them, get only answers that it lists."""

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode
from schemathesis.schemas import BaseSchema
from schemathesis.specs.openapi import checks

from serving.modes import MODES
from tests.serving.gateway.conftest import Gateway

CHECKS = [
    checks.content_type_conformance,
    checks.negative_data_rejection,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
]
ALWAYS = {"200", "403", "408", "413", "500", "503"}
ROUTER_ERRORS = {"400", "401", "404", "415", "429", "502", "504"}
PLAIN = {"prompt": "It was", "messages": [{"role": "user", "content": "It was"}], "input": "It was", "stop": None}
SHORT = ("max_tokens", "max_completion_tokens", "max_output_tokens", "max_bytes")


@pytest.fixture(scope="module")
def schema(gateway: Gateway) -> BaseSchema:
    return schemathesis.openapi.from_url(f"{gateway.url}/openapi.json")


def understood(case: Case, mode: str) -> None:
    """Names that exist in place of drawn ones, with which nothing would be written."""
    if "model" in case.path_parameters:
        case.path_parameters["model"] = f"onesweep-{mode}"
    if isinstance(case.body, dict):
        own = {**PLAIN, "model": f"onesweep-{mode}", "entrants": [mode], "onesweep": {}, **dict.fromkeys(SHORT, 4)}
        case.body |= {name: own[name] for name in own.keys() & case.body.keys()}


def test_the_schema_lists_every_refusal(schema: BaseSchema) -> None:
    for path, operations in schema.raw_schema["paths"].items():
        expected = ALWAYS if path in ("/healthz", "/readyz") else ALWAYS | ROUTER_ERRORS
        for operation in operations.values():
            assert operation["responses"].keys() == {*expected, "default"}


def test_a_generated_request_gets_an_answer_in_the_schema(schema: BaseSchema) -> None:
    drawn = st.one_of([schema.as_strategy(mode) for mode in GenerationMode])

    @settings(max_examples=150, suppress_health_check=[*HealthCheck])
    @given(case=drawn, mode=st.none() | st.sampled_from(sorted(MODES)))
    def ask(case: Case, mode: str | None) -> None:
        if mode:
            case.headers.pop("authorization", None)
        if mode and case.meta and case.meta.generation.mode.is_positive:
            understood(case, mode)
        answer = case.call_and_validate(checks=CHECKS)
        # a drawn deadline may pass; nothing that is drawn may break what serves
        assert str(answer.status_code) in (ALWAYS | ROUTER_ERRORS) - {"500", "502", "503"}, answer.text

    ask()
