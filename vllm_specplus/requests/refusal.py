"""The refusal of a request, and how vLLM's server logs it."""

import logging

from vllm.exceptions import VLLMValidationError


class RefusedRequestError(VLLMValidationError):
    """A request asks the plugin for something that is not allowed; vLLM answers it with HTTP 400."""


# vLLM checks a stream's parameters when the stream has begun. These loggers then log any error but a `GenerationError`
# with its traceback, and a `GenerationError` reaches the client as the server's fault. The Messages route logs one too.
_STREAM_LOGGERS = (
    "vllm.entrypoints.openai.chat_completion.serving",
    "vllm.entrypoints.openai.completion.serving",
    "vllm.entrypoints.anthropic.api_router",
    "vllm.entrypoints.scale_out.token_in_token_out.serving",
)


def _shorten(record: logging.LogRecord) -> bool:
    """Log a refusal in one line; every other record passes as it is."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, RefusedRequestError):
        message = record.getMessage()
        if str(error) not in message:
            message = f"{message.rstrip('.')}: {error}"
        record.msg, record.args, record.exc_info = message, (), None
    return True


def shorten_stream_errors() -> None:
    """Have vLLM's server log the refusal of a streamed request without a traceback; idempotent."""
    for name in _STREAM_LOGGERS:
        # `addFilter` adds a filter once.
        logging.getLogger(name).addFilter(_shorten)
