"""The body of an HTTP request: the plugin's fields are taken out of it, the rest goes on to vLLM."""

import json
import re
from dataclasses import dataclass
from typing import Any

from vllm_specplus.requests.options import RequestError, RequestOptions, parse_options

# A body without any of these asks nothing and need not be decoded. A name may be written in escapes.
_FIELD_NAMES = re.compile(rb'"(?:aux_info|prediction|[sS][pP][^"]*)"\s*:|\\u00[2-7]')


@dataclass(frozen=True)
class RequestBody:
    """An HTTP request that asks something of the plugin.

    Attributes:
        vllm_body: the body without the plugin's fields; its ``vllm_xargs`` is a dict.
        options: None if it asks for `aux_info` alone.
        aux_info: whether the response is to have RTP-LLM's ``aux_info``.
    """

    vllm_body: dict[str, Any]
    options: RequestOptions | None
    aux_info: bool

    @property
    def has_reference(self) -> bool:
        """Whether the request brings a text that its output will resemble."""
        return self.options is not None and self.options.has_reference

    @property
    def needs_counts(self) -> bool:
        """Whether the response tells what became of the request's drafts."""
        return self.has_reference or self.aux_info

    def encode(self, entry: str, key: str) -> bytes:
        """The body for vLLM as JSON, with one more entry in its ``vllm_xargs``."""
        return json.dumps({**self.vllm_body, "vllm_xargs": {**self.vllm_body["vllm_xargs"], entry: key}}).encode()

    def add_usage(self) -> bool:
        """Have vLLM end a stream with a chunk for its usage; False if it does so already, or there is no stream."""
        options = self.vllm_body.get("stream_options") or {}
        if not self.vllm_body.get("stream") or not isinstance(options, dict) or options.get("include_usage"):
            return False
        # vLLM ignores `continuous_usage_stats` without `include_usage`, and the client must not get it now.
        options = {key: value for key, value in options.items() if key != "continuous_usage_stats"}
        self.vllm_body["stream_options"] = {**options, "include_usage": True}
        return True


def read_body(received: bytes) -> RequestBody | None:
    """Take the plugin's fields out of a body; None if there are none, or vLLM is going to refuse the body.

    Raises:
        RequestError: a field is not allowed.
    """
    body = decode_object(received) if _FIELD_NAMES.search(received) else None
    if body is None:
        return None
    xargs = body.pop("vllm_xargs", None)
    xargs = {} if xargs is None else xargs
    if not isinstance(xargs, dict):
        return None
    prediction, aux_info = body.pop("prediction", None), body.pop("aux_info", None)
    if not isinstance(aux_info, bool | None):
        raise RequestError("aux_info", "aux_info is not allowed: it must be true or false")
    options = parse_options(xargs if prediction is None else {**xargs, "prediction": prediction})
    if options is None and not aux_info:
        return None
    vllm_body = {
        **body,
        "vllm_xargs": {key: value for key, value in xargs.items() if key not in RequestOptions.model_fields},
    }
    return RequestBody(vllm_body, options, bool(aux_info))


def decode_object(encoded: bytes) -> dict[str, Any] | None:
    """A JSON object; None for anything else."""
    try:
        decoded = json.loads(encoded)
    except (ValueError, RecursionError):
        return None
    return decoded if isinstance(decoded, dict) else None
