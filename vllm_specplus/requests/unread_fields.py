"""Refuses the plugin's fields at the top level of an HTTP request that no middleware has read.

vLLM keeps the unknown fields of a body and reads none of them. `PredictedOutputs` takes the plugin's out before vLLM
sees the body. Without it they would be ignored, and the client would not know.
"""

import functools
from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest

from vllm_specplus.requests.body import take_options
from vllm_specplus.requests.options import RequestError
from vllm_specplus.requests.refusal import RefusedRequestError

_ORIGINAL = "specplus_original"


def check_unread_fields(fields: dict[str, Any], xargs: dict[str, Any], max_model_len: int) -> None:
    """Check the fields of a body that vLLM does not know, and of its ``vllm_xargs`` those that nothing reads.

    `max_model_len`: see `parse_options`.

    OpenAI's ``prediction`` is a hint that a server may ignore, so it passes. So do values that ask for nothing.

    Raises:
        RefusedRequestError: one of them is the plugin's.
    """
    fields = {name: value for name, value in fields.items() if name != "prediction"}
    try:
        options = take_options(fields, xargs, max_model_len)
    except RequestError as error:
        raise RefusedRequestError(str(error), parameter=error.field) from None
    if options is not None:
        field = options.stated_keys[0]
        raise RefusedRequestError(
            f"{field} is not allowed: no middleware has read it. vllm_specplus.requests.PredictedOutputs does so for "
            "chat completions and completions: start the server with VLLM_PLUGINS=specplus",
            parameter=field,
        )


def refuse_unread_fields(max_model_len: int, *, reads_xargs: bool = True) -> None:
    """Have vLLM's server check each request's unknown fields; a second call changes nothing.

    Args:
        max_model_len: see `parse_options`.
        reads_xargs: whether a check of requests reads ``vllm_xargs``.
    """
    for request_class in (ChatCompletionRequest, CompletionRequest):
        original = request_class.to_sampling_params
        if not hasattr(original, _ORIGINAL):
            request_class.to_sampling_params = _checking(original, max_model_len, reads_xargs)


def _checking(original: Any, max_model_len: int, reads_xargs: bool) -> Any:
    @functools.wraps(original)
    def to_sampling_params(request: Any, *args: Any, **kwargs: Any) -> Any:
        xargs = {} if reads_xargs else dict(request.vllm_xargs or {})
        check_unread_fields(request.model_extra or {}, xargs, max_model_len)
        return original(request, *args, **kwargs)

    setattr(to_sampling_params, _ORIGINAL, original)
    return to_sampling_params
