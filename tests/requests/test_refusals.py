"""`PredictedOutputs` refuses bad fields before vLLM sees them; vLLM's server logs a later refusal in one line."""

import logging
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError

from tests.requests.stand_ins import PREDICTION, SECRET, Check, Server


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"vllm_xargs": {"sp_advice_prompt_token_ids": [1, 1000]}}, "sp_advice_prompt_token_ids"),
        ({"prediction": {"type": "content", "content": "a\u4f60"}}, "prediction"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_tokens_that_the_model_has_not(fields: dict[str, Any], field: str, stream: bool) -> None:
    server = Server()
    got = server.post({**fields, "stream": stream})
    assert got.status == 400
    assert got.json["error"]["param"] == field
    assert not server.bodies
    assert not server.engine.calls


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"aux_info": 2}, "aux_info"),
        ({"extra_config": SECRET}, "extra_config"),
        ({"extra_config": {"sp_edit": 2}}, "sp_edit"),
        ({"extra_config": {"sp_advice_prompt": [SECRET]}}, "sp_advice_prompt"),
        ({"extra_config": {"sp_advise_prompt": SECRET}}, "sp_advise_prompt"),
        ({"extra_config": {"top_k": 3}}, "extra_config.top_k"),
        ({"extra_configs": {"max_new_tokens": 3}}, "extra_configs.max_new_tokens"),
        ({"sp_edit": 1}, "sp_edit"),
        ({"sp_edit": "yes"}, "sp_edit"),
        ({"sp_advise_prompt": SECRET}, "sp_advise_prompt"),
        ({"spec_token": 0}, "spec_token"),
        ({"sp_advice_prompt_token_ids": ["x"]}, "sp_advice_prompt_token_ids"),
        ({"force_disable_sp_run": 2}, "force_disable_sp_run"),
        ({"force_sp_accepts": True}, "force_sp_accepts"),
        ({"force_sp_accept": True}, "force_sp_accept"),
        ({"extra_config": {"force_sp_accept": 1}}, "force_sp_accept"),
        ({"sp_advice_prompt": SECRET, "extra_config": {"sp_advice_prompt": "other"}}, "sp_advice_prompt"),
        ({"aux_info": SECRET}, "aux_info"),
        ({"prediction": SECRET}, "prediction"),
        ({"prediction": {"type": "content", "content": [SECRET]}}, "prediction"),
        ({"vllm_xargs": {"sp_advice_prompt": [SECRET]}}, "sp_advice_prompt"),
        ({"vllm_xargs": {"sp_edit": 2}}, "sp_edit"),
        ({"vllm_xargs": {"sp_edit": 1}}, "sp_edit"),
        ({"vllm_xargs": {"spec_tokens": -1}}, "spec_tokens"),
        ({"prediction": PREDICTION, "vllm_xargs": {"sp_advice_prompt": SECRET}}, "sp_advice_prompt"),
        ({"prediction": PREDICTION, "aux_info": "yes"}, "aux_info"),
        ({"vllm_xargs": {"sp_advise_prompt": SECRET}}, "sp_advise_prompt"),
        ({"vllm_xargs": {"spec_token": 3}}, "spec_token"),
        ({"prediction": PREDICTION, "vllm_xargs": {"sp_edits": None}}, "sp_edits"),
    ],
)
def test_refusals(fields: dict[str, Any], field: str, log: pytest.LogCaptureFixture) -> None:
    """They have vLLM's form, name the field, and do not repeat what may be the user's text."""
    server = Server()
    got = server.post({"model": "m", **fields})
    assert got.status == 400
    error = got.json["error"]
    assert {**error, "message": ""} == {"message": "", "type": "BadRequestError", "param": field, "code": 400}
    assert field in error["message"]
    assert SECRET not in error["message"]
    assert not log.records
    assert not server.bodies
    assert not server.engine.calls


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("openai.chat_completion.serving", "Error in stream generator."),
        ("openai.completion.serving", "Error in stream generator."),
        ("scale_out.token_in_token_out.serving", "Error in token generation stream."),
        ("anthropic.api_router", "Error in create_messages: {error}"),
    ],
)
def test_vllm_logs_a_refusal_in_one_line(
    module: str, message: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the plugin's own refusals lose their traceback."""
    logger = logging.getLogger(f"vllm.entrypoints.{module}")
    monkeypatch.setattr(logger, "propagate", False)
    logger.addHandler(caplog.handler)
    try:
        for extra in ({"spec_tokens": -1}, {"spec_tokens": -1}, None):
            try:
                if extra is None:
                    raise VLLMValidationError("another's refusal")
                Check.validate_params(SamplingParams(extra_args=extra))
            except VLLMValidationError as error:
                logger.exception(message.format(error=error))
    finally:
        logger.removeHandler(caplog.handler)
    *own, other = caplog.records
    assert len(own) == 2
    assert other.exc_info is not None
    assert other.getMessage() == message.format(error="another's refusal")
    words = "spec_tokens=-1 is not allowed: it must be an integer of 0 or more (parameter=spec_tokens)"
    for record in own:
        assert record.exc_info is None
        assert record.getMessage() in (message.format(error=words), f"{message.rstrip('.')}: {words}")
