"""The body of an HTTP request: the plugin's fields are taken out of it, the rest goes on to vLLM."""

import json
import re
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

from vllm_specplus.config.errors import show
from vllm_specplus.requests.options import KEYS, RequestError, RequestOptions, check_unknown_keys, parse_options

# A body without any of these asks nothing and need not be decoded. A name may be written in escapes,
# or in UTF-16 or UTF-32, whose ASCII letters have zero bytes.
_FIELD_NAMES = re.compile(rb'"(?:aux_info|prediction|extra_configs?|force_[^"]*|[sS][pP][^"]*)"\s*:|\\u00[2-7]|\x00')
_CONFIG_NAMES = ("extra_config", "extra_configs")
"""RTP-LLM's objects of a request's options: its document names the first, its source the second."""
_USAGE_OPTIONS = ("include_usage", "continuous_usage_stats")
_FLAG = TypeAdapter(bool | None)
_COUNT = TypeAdapter(int | None)
"""Read a flag or a number of a body as vLLM does: ``"false"`` is one, and ``"2"``."""
# No field of OpenAI's or vLLM's begins like these.
_OWN_PREFIXES = ("sp_", "spec_", "force_sp", "force_disable_sp")


@dataclass(frozen=True)
class RequestBody:
    """An HTTP request that asks something of the plugin.

    Attributes:
        vllm_body: the body without the plugin's fields; its ``vllm_xargs`` is a dict.
        options: what it asks.
    """

    vllm_body: dict[str, Any]
    options: RequestOptions

    @property
    def aux_info(self) -> bool:
        """Whether the response is to have RTP-LLM's ``aux_info``."""
        return bool(self.options.aux_info)

    @property
    def has_reference(self) -> bool:
        """Whether the request brings a text that its output will resemble."""
        return self.options.has_reference

    @property
    def needs_counts(self) -> bool:
        """Whether the response tells what became of the request's drafts."""
        return self.has_reference or self.aux_info

    @property
    def num_answers(self) -> int:
        """How many answers vLLM makes; 1 where it is going to refuse their number."""
        # vLLM ignores the prompts of a chat.
        prompts = None if "messages" in self.vllm_body else self.vllm_body.get("prompt")
        # A list of numbers is one prompt.
        num_prompts = 1
        if isinstance(prompts, list) and prompts and not isinstance(prompts[0], int | float):
            num_prompts = len(prompts)
        try:
            n = _COUNT.validate_python(self.vllm_body.get("n"))
        except ValidationError:
            n = 1
        return num_prompts * max(n or 1, 1)

    def encode(self, entry: str, key: str) -> bytes:
        """The body for vLLM as JSON, with one more entry in its ``vllm_xargs``.

        Raises:
            RequestError: the body is nested too deeply, though it could just be read.
        """
        body = {**self.vllm_body, "vllm_xargs": {**self.vllm_body["vllm_xargs"], entry: key}}
        try:
            return json.dumps(body).encode()
        except RecursionError:
            raise RequestError("body", "the body is not allowed: it is nested too deeply") from None

    def add_usage(self) -> bool:
        """Have vLLM end a stream with a chunk for its usage; False if it does so already, or there is no stream."""
        options = self.vllm_body.get("stream_options")
        options = {} if options is None else options
        # vLLM refuses options that are no object, or whose values are no booleans.
        if not self.vllm_body.get("stream") or not isinstance(options, dict):
            return False
        try:
            shown = [_FLAG.validate_python(options.get(name, False)) for name in _USAGE_OPTIONS]
        except ValidationError:
            return False
        if shown[0]:
            return False
        # vLLM ignores `continuous_usage_stats` without `include_usage`, and the client must not get it now.
        options = {key: value for key, value in options.items() if key != "continuous_usage_stats"}
        self.vllm_body["stream_options"] = {**options, "include_usage": True}
        return True


def read_body(received: bytes, max_model_len: int) -> RequestBody | None:
    """Take the plugin's fields out of a body; None if there are none, or vLLM is going to refuse the body.

    `max_model_len`: see `parse_options`.

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
    options = take_options(body, xargs, max_model_len)
    if options is None:
        return None
    vllm_body = {**body, "vllm_xargs": {key: value for key, value in xargs.items() if key not in KEYS}}
    return RequestBody(vllm_body, options)


def without_fields(received: bytes) -> bytes:
    """The body of a request that goes on without the plugin's fields, whatever they hold."""
    body = decode_object(received)
    if body is None:
        return received
    rest = {name: value for name, value in body.items() if name not in (*KEYS, *_CONFIG_NAMES)}
    if isinstance(xargs := body.get("vllm_xargs"), dict):
        rest["vllm_xargs"] = {name: value for name, value in xargs.items() if name not in KEYS}
    return json.dumps(rest).encode()


def check_other_route(received: bytes, max_model_len: int, drafts: bool, reads_xargs: bool) -> None:
    """Check the body of a route whose requests and answers have other forms, which the plugin's fields do not fit.

    Args:
        received: the body.
        max_model_len: see `parse_options`.
        drafts: whether the plugin drafts in the engine. If not, OpenAI's ``prediction`` passes.
        reads_xargs: whether the fields in ``vllm_xargs`` are read where vLLM admits the request. If so, they pass.

    Raises:
        RequestError: a field is wrong, or stands where vLLM would ignore it.
    """
    body = decode_object(received) if _FIELD_NAMES.search(received) else None
    if body is None:
        return
    if not drafts:
        body.pop("prediction", None)
    xargs = body.get("vllm_xargs")
    unread = {key: xargs[key] for key in KEYS if key in xargs} if isinstance(xargs, dict) and not reads_xargs else {}
    options = take_options(body, unread, max_model_len)
    if options is not None:
        field = options.stated_keys[0]
        raise RequestError(
            field,
            f"{field} is not allowed here: this route would ignore it. Chat completions and completions take it",
        )


def take_options(body: dict[str, Any], xargs: dict[str, Any], max_model_len: int) -> RequestOptions | None:
    """Take the plugin's fields out of a body; None if they ask for nothing.

    Args:
        body: the fields at the top level, changed in place.
        xargs: those in ``vllm_xargs``.
        max_model_len: see `parse_options`.

    Raises:
        RequestError: a field is not allowed.
    """
    fields = dict(xargs)
    for name in _CONFIG_NAMES:
        _add_fields(fields, _extra_config(name, body.pop(name, None)))
    check_unknown_keys(body, _OWN_PREFIXES)
    _add_fields(fields, {key: body.pop(key) for key in KEYS if key in body})
    return parse_options(fields, max_model_len)


def _extra_config(name: str, config: Any) -> dict[str, Any]:
    """The plugin's fields of an ``extra_config``.

    Raises:
        RequestError: it is no object, or holds another field, which vLLM would ignore.
    """
    if config is None:
        return {}
    if not isinstance(config, dict):
        raise RequestError(name, f"{name} is not allowed: it must be an object")
    check_unknown_keys(config)
    for key in config:
        if key not in KEYS:
            shown = f"{name}.{key}" if key.isidentifier() else f"{name}[{show(key)}]"
            raise RequestError(
                shown,
                f"{shown} is not allowed: vLLM has its own fields, at the request's top level. Allowed: "
                f"{', '.join(KEYS)}",
            )
    return config


def _add_fields(fields: dict[str, Any], more: dict[str, Any]) -> None:
    """Join the fields of several places; a null is no value.

    Raises:
        RequestError: two places give one field different values.
    """
    for key, value in more.items():
        if value is None:
            continue
        if fields.get(key) is not None and fields[key] != value:
            raise RequestError(key, f"{key} is given twice, with different values")
        fields[key] = value


def decode_object(encoded: bytes) -> dict[str, Any] | None:
    """A JSON object; None for anything else."""
    try:
        decoded = json.loads(encoded)
    except (ValueError, RecursionError):
        return None
    return decoded if isinstance(decoded, dict) else None
