"""The stock openai client, through the middleware; vLLM's server and engine are stand-ins."""

import asyncio

import pytest
from openai import BadRequestError
from openai.types import Completion
from openai.types.chat import ChatCompletionChunk
from starlette.responses import JSONResponse

from tests.requests.stand_ins import DONE, SECRET, USAGE, USAGE_EVENT, Server, client_of, streams, text_event


def test_stock_client() -> None:
    async def run() -> None:
        client = client_of(Server())
        whole = await client.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": "hi"}],
            prediction={"type": "content", "content": SECRET},
            n=2,
            extra_body={"aux_info": True},
        )
        assert whole.usage.completion_tokens_details.accepted_prediction_tokens == 7
        assert whole.usage.completion_tokens_details.rejected_prediction_tokens == 2
        assert len(whole.choices) == 2
        assert whole.aux_info["iter_count"] == 4

    asyncio.run(run())


def test_stock_client_streams() -> None:
    async def run(include_usage: bool) -> list[ChatCompletionChunk]:
        client = client_of(Server(streams([text_event(0, "a"), text_event(1, "b"), USAGE_EVENT, DONE])))
        stream = await client.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": "hi"}],
            prediction={"type": "content", "content": SECRET},
            stream=True,
            stream_options={"include_usage": include_usage},
            extra_body={"aux_info": True},
        )
        return [chunk async for chunk in stream]

    *_, last = asyncio.run(run(True))
    assert last.usage.completion_tokens_details.accepted_prediction_tokens == 7
    assert last.aux_info["output_len"] == 10
    first, second, last = asyncio.run(run(False))
    assert [first.choices[0].delta.content, second.choices[0].delta.content] == ["a", "b"]
    assert last.usage is None
    assert last.aux_info["output_len"] == 10


def test_stock_client_completes_prompts() -> None:
    choices = [{"index": i, "text": "t", "finish_reason": "stop", "logprobs": None} for i in range(2)]
    whole = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "m", "choices": choices}

    async def run() -> Completion:
        client = client_of(Server(lambda: JSONResponse(whole | {"usage": USAGE})))
        return await client.completions.create(
            model="m", prompt=["a", "b"], extra_body={"vllm_xargs": {"sp_advice_prompt": SECRET}}
        )

    assert asyncio.run(run()).usage.completion_tokens_details.rejected_prediction_tokens == 2


def test_stock_client_is_refused() -> None:
    async def run() -> None:
        extra = {"vllm_xargs": {"spec_tokens": "many"}}
        await client_of(Server()).completions.create(model="m", prompt="a", extra_body=extra)

    with pytest.raises(BadRequestError, match="spec_tokens") as refused:
        asyncio.run(run())
    assert refused.value.param == "spec_tokens"
