"""Predicted outputs and counts over HTTP on Model Runner V2."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.serving import Server, serve
from tests.e2e.v1.test_predicted_outputs import CONFIG, GREEDY, PROMPT, check_under_load

pytestmark = pytest.mark.interpreter


@pytest.fixture(scope="module")
def server(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = ["--speculative-config", json.dumps(CONFIG), "--max-num-seqs", "4"]
    with serve(trained, tmp_path_factory.mktemp("serve"), *options, VLLM_PLUGINS="specplus") as running:
        yield running


def test_predicted_outputs_and_counts(server: Server) -> None:
    client = server.client()
    request = GREEDY | {"prompt": PROMPT, "max_tokens": 30}
    plain = client.completions.create(**request, extra_body={"ignore_eos": True, "aux_info": True})
    text = plain.choices[0].text
    predicted = client.completions.create(
        **request,
        extra_body={"ignore_eos": True, "aux_info": True, "prediction": {"type": "content", "content": text}},
    )
    assert predicted.choices[0].text == text
    assert predicted.usage.completion_tokens_details.accepted_prediction_tokens >= 30 * 8 // 9 - 1
    assert predicted.aux_info["output_len"] == plain.aux_info["output_len"] == 30
    assert predicted.aux_info["iter_count"] <= 5 < plain.aux_info["iter_count"]

    stats = json.loads(server.get("/specplus/stats"))
    assert stats["totals"]["reference"]["accepted"] > 0 < stats["totals"]["model"]["accepted"]
    for what, name in (("drafted", "draft"), ("accepted", "accepted")):
        counted = sum(row[what] for row in stats["totals"].values())
        assert counted == server.metric(f"vllm:spec_decode_num_{name}_tokens_total")


def test_under_load(server: Server) -> None:
    check_under_load(server, max_tokens=12)
