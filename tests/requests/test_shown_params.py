"""What a log shows of a request's parameters and of a step."""

import pickle
from typing import Any

import msgspec
import numpy as np
import pytest
from vllm import SamplingParams
from vllm.logging_utils.dump_input import prepare_object_to_dump
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

from tests.requests.stand_ins import SECRET
from vllm_specplus.requests import check as request_check
from vllm_specplus.requests import shown_params
from vllm_specplus.requests.options import RESOLVED_ENTRY, ResolvedOptions
from vllm_specplus.requests.shown_params import hide_references

IDS = list(SECRET.encode())
RESOLVED = ResolvedOptions(token_ids=np.array(IDS, np.int32), max_drafts=3).to_wire()


@pytest.fixture(autouse=True)
def _restore(monkeypatch: pytest.MonkeyPatch) -> None:
    original = getattr(SamplingParams.__repr__, shown_params._ORIGINAL, SamplingParams.__repr__)
    monkeypatch.setattr(SamplingParams, "__repr__", original)
    if hasattr(SchedulerOutput, "anon_repr"):
        monkeypatch.delattr(SchedulerOutput, "anon_repr")


def sent(params: SamplingParams) -> SamplingParams:
    """As vLLM sends them from its server to its engine, and from there to its workers."""
    arrived = msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams)
    return pickle.loads(pickle.dumps(arrived))


@pytest.mark.parametrize(
    ("extra", "shown"),
    [
        ({"sp_advice_prompt": SECRET}, f"'sp_advice_prompt': {len(SECRET)} characters"),
        ({"sp_advice_prompt_token_ids": IDS}, f"'sp_advice_prompt_token_ids': {len(IDS)} tokens"),
        ({"prediction": {"type": "content", "content": SECRET}}, "'prediction': 'dict'"),
        ({"sp_advice_prompt": None, "other": 1}, "'sp_advice_prompt': None, 'other': 1"),
        ({RESOLVED_ENTRY: RESOLVED}, f"'token_ids': {len(IDS)} tokens, 'edit': False, 'max_drafts': 3"),
        ({RESOLVED_ENTRY: SECRET}, f"{len(SECRET)} characters"),
        ({"spec_tokens": 3}, "{'spec_tokens': 3}"),
        # vLLM logs a request before it is refused for its name.
        ({"sp_advice_promt": SECRET}, f"'sp_advice_promt': {len(SECRET)} characters"),
        ({"Prediction": {"content": SECRET}, "forced": IDS}, f"'Prediction': 'dict', 'forced': {len(IDS)} tokens"),
        ({"kv_transfer_params": {"a": [1]}, "other": "text"}, "{'kv_transfer_params': {'a': [1]}, 'other': 'text'}"),
    ],
)
def test_references_are_shown_by_length(extra: dict[str, Any], shown: str) -> None:
    hide_references()
    hide_references()
    params = SamplingParams(seed=7, extra_args=extra)
    for each in (params, sent(params)):
        text = repr(each)
        assert shown in text
        assert "seed=7" in text
        assert "secret" not in text
        assert str(IDS[:5])[1:-1] not in text
    assert params.extra_args == extra


def test_without_it_they_are_shown_whole() -> None:
    """So the tests above can fail."""
    assert "secret" in repr(SamplingParams(extra_args={"sp_advice_prompt": SECRET}))
    assert "e\\x00\\x00\\x00" in repr(SamplingParams(extra_args={RESOLVED_ENTRY: RESOLVED}))


def test_each_process_that_gets_the_check_hides_them() -> None:
    request_check._make_check(None, True, False, False)
    assert hasattr(SamplingParams.__repr__, shown_params._ORIGINAL)


def dump_of_a_step() -> str:
    """What vLLM prints of a step when its engine dies."""
    new = NewRequestData("a", IDS, [], SamplingParams(extra_args={RESOLVED_ENTRY: RESOLVED}), None, ([],), 0, None)
    return prepare_object_to_dump(
        SchedulerOutput(
            scheduled_new_reqs=[new],
            scheduled_cached_reqs=CachedRequestData.make_empty(),
            num_scheduled_tokens={"b": 1 + len(IDS)},
            total_num_scheduled_tokens=1 + len(IDS),
            scheduled_spec_decode_tokens={"b": IDS},
            scheduled_encoder_inputs={},
            finished_req_ids={"c"},
            free_encoder_mm_hashes=[],
        )
    )


def test_a_dying_engine_shows_how_many_drafts_a_step_has() -> None:
    tokens = str(IDS)[1:-1]
    assert tokens in dump_of_a_step()
    hide_references()
    shown = dump_of_a_step()
    assert f"scheduled_spec_decode_tokens={{b: '{len(IDS)} drafts'}}" in shown
    assert f"'token_ids': {len(IDS)} tokens" in shown
    assert f"total_num_scheduled_tokens={1 + len(IDS)}" in shown
    assert tokens not in shown
