"""docs/hidden-states.md names the fields that the endpoint takes and their defaults; its code runs."""

import json
import re
from pathlib import Path

import numpy as np
from tests.unit.tap.endpoint_fakes import make_model

from taphouse import slices
from taphouse_tap.api.latency import METRICS, LatencyByClass
from taphouse_tap.api.latency_reports import LatencyReports
from taphouse_tap.api.metrics import LatencyMetrics
from taphouse_tap.api.requests import CaptureRequest

PAGE = (Path(__file__).parents[3] / "docs" / "hidden-states.md").read_text()


def test_every_field_is_named_and_no_other() -> None:
    table = PAGE[PAGE.index("| field |") : PAGE.index("## Answer")]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    named = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    assert named == set(CaptureRequest.model_fields)


def test_defaults_are_the_endpoints() -> None:
    for name in ("max_tokens", "temperature", "priority", "delivery"):
        default = CaptureRequest.model_fields[name].default
        shown = re.search(rf"^\| `{name}` \| `?(\w+)`? \|", PAGE, re.MULTILINE)
        assert shown is not None
        assert shown[1] == (f"{default:g}" if isinstance(default, float) else str(default))


def test_the_answer_shown_is_one_to_the_request_shown() -> None:
    (sent,) = re.findall(r"-d '(\{.*?\})'$", PAGE, re.MULTILINE)
    request = CaptureRequest.model_validate_json(sent)
    (shown,) = re.findall(r'^(\{"object": "hidden_states".*?)^```', PAGE, re.MULTILINE | re.DOTALL)
    answer = json.loads(re.sub(r"\{…\}", "{}", shown).replace("[…]", "[]"))
    [item] = answer["data"]
    assert answer["layers"] == request.layers and item["finish_reason"] == "length" and request.ignore_eos
    assert item["rows"] == item["prompt_len"] + request.max_tokens - 1
    rows, layers, hidden = item["shape"]
    assert (rows, layers) == (item["rows"], len(answer["layers"]))
    [piece] = item["slices"]
    tapped = 4  # of the smoke profile: 2, 15, 27 and 30
    assert (piece["rows"], piece["bytes"]) == (rows, rows * tapped * hidden * 2)


def test_the_python_runs(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    model, tag = make_model(tp_size=1), slices.new_tag()
    start = slices.open_start(tmp_path / "slices", "1")
    start.reserve(slices.Claim(tag, 1 << 20, 0.0, 3, 3), 1 << 30)
    trailer = slices.Trailer(
        tag=tag, start_id="1", tap_version="0", tp_rank=0, tp_size=1, dp_rank=0, layers=model.layers,
        dtype="float32", hidden_size=8, column_offset=0, width=8, rows=0, prompt_len=3,
        weights_epoch=0, crc32=0, token_crc32=0,
    )  # fmt: skip
    writer = slices.SliceWriter(start.directory, trailer, 3)
    written = np.arange(3 * len(model.layers) * 8, dtype=np.float32).reshape(3, len(model.layers), 8)
    writer.write(0, written)
    writer.seal(np.array([4, 5, 6]))
    pieces = [{"path": str(path)} for path in start.slice_paths(tag)]
    asked = list(reversed(model.layers))
    names = {
        "answer": {
            "layers": asked,
            "data": [{"tag": tag, "token_ids": [4, 5, 6, 7], "rows": 3, "slices": pieces}],
        }
    }
    exec(code, names)
    np.testing.assert_array_equal(names["states"], written[:, ::-1])
    assert start.slice_paths(tag) == []


def test_the_latency_shown_is_the_statuss() -> None:
    section = LatencyReports(LatencyByClass(), LatencyMetrics(publish=False)).section()
    (shown,) = re.findall(r'^"latency": (\{.*?\}\})$', PAGE, re.MULTILINE | re.DOTALL)
    body = json.loads(shown.replace("{…}", "{}"))
    assert set(body) == set(section) and set(body["production"]) == set(section["production"])
    assert body["first_bound_s"] == section["first_bound_s"]
    assert body["bucket_ratio"] == round(section["bucket_ratio"], 4)
    table = PAGE[PAGE.index("| metric |") :]
    assert tuple(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == METRICS
