"""The API does what its OpenAPI document says, whatever is sent: schemathesis over real HTTP, seeded.

Its checks: no 5xx, only documented statuses, content types, bodies and headers, wrong requests refused, 401
without a token, 405 for another method. Requests that the document allows may still be refused: no schema
knows which files there are, or what the engine takes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from tests.unit.extractor.conftest import TOKEN, Service

from taphouse_extractor.api.door import RULES

Serve = Callable[..., Service]
APART = {"/docs", "/", "/dashboard/{file}", "/v1/events"}
"""Pages, which are in no document, and a stream without an end: test_watching.py has them."""
CASES = [
    (method, path, mode)
    for (method, path), rule in RULES.items()
    for mode in GenerationMode
    if path not in APART and (rule.role is not None or mode is GenerationMode.POSITIVE)
]
"""Open routes take nothing, so nothing that is sent to them is wrong."""
REFUSED = ["400", "401", "404", "405", "408", "409", "413", "415", "422"]
CONFIG = {
    "seed": 1,
    "auth": {"openapi": {"token": {"bearer": TOKEN}}},
    "checks": {
        "positive_data_acceptance": {"enabled": False},
        "negative_data_rejection": {"expected-statuses": REFUSED},
    },
}


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    """The document, once a service has told it: it is the same for all."""
    return {}


@pytest.mark.parametrize(("method", "path", "mode"), CASES)
def test_an_operation_keeps_its_word(
    serve: Serve, document: dict[str, Any], method: str, path: str, mode: GenerationMode
) -> None:
    service = serve(open_metrics=False)
    document |= document or httpx.get(service.url + "/openapi.json").json()
    job = service.bench.job([{"prompt": "good"}, {"prompt": "REFUSE"}])
    service.bench.run_all(job)
    config = schemathesis.Config.from_dict({**CONFIG, "base-url": service.url})
    operation = schemathesis.openapi.from_dict(document, config=config)[path][method]

    @given(operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=10,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def keeps(case: Any) -> None:
        case.call_and_validate()

    keeps()
