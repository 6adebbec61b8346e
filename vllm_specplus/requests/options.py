"""A request's options in two forms: as the request asks for them, and as resolved for the workers.

A request writes the keys of `KEYS` into ``SamplingParams.extra_args`` (``vllm_xargs`` over HTTP). They are checked and
resolved where vLLM admits the request. The result travels to the workers in the `RESOLVED_ENTRY` of ``extra_args``.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, PlainSerializer, PlainValidator, ValidationError

from vllm_specplus.config.errors import nearest, show

RESOLVED_ENTRY = "specplus"
"""The entry of ``extra_args`` that the workers read; whatever a client writes there is replaced."""
SCOPE_ENTRY = "specplus_scope"
"""The entry of ``extra_args`` in which the scheduler tells the workers whose answers a request may draft from."""
HANDOVER_ENTRY = "specplus_key"
"""The entry of ``extra_args`` that names what `PredictedOutputs` has taken out of an HTTP request."""

_INT32_END = 2**31
MAX_REFERENCE_FACTOR = 8
"""A list of more tokens than this many times the model's length is refused, before its elements are looked at."""
_MAX_NAME_LENGTH = 80
_MAX_VALUE_LENGTH = 20


class RequestError(ValueError):
    """A request's field is not allowed; the message names it.

    Attributes:
        field: the name alone.
    """

    def __init__(self, field: str, message: str):
        super().__init__(message)
        self.field = field


# vLLM's ``vllm_xargs`` has no truth values, so 0 and 1 stand for them.
_Flag = bool | Annotated[int, Field(ge=0, le=1)]


class _TextPart(BaseModel):
    type: Literal["text"]
    text: str


class _Prediction(BaseModel):
    type: Literal["content"]
    # Of a list of wrong elements only the first gets an error: all of them would take seconds.
    content: str | Annotated[list[_TextPart], Field(fail_fast=True)]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class RequestOptions(BaseModel):
    """The plugin's keys as a request writes them; None counts as not given. `parse_options` makes it.

    Each field's description tells the client which values are allowed.
    """

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, hide_input_in_errors=True)

    prediction: Annotated[
        _Prediction | None,
        Field(description='{"type": "content", "content": text, or a list of {"type": "text", "text": text}}'),
    ] = None
    sp_advice_prompt: Annotated[str | None, Field(description="text")] = None
    sp_advice_prompt_token_ids: Annotated[
        Annotated[list[Annotated[int, Field(ge=0, lt=_INT32_END)]], Field(fail_fast=True)] | None,
        Field(description="a list of token ids"),
    ] = None
    sp_edit: Annotated[bool | Annotated[int, Field(ge=0, le=1)] | None, Field(description="0 or 1")] = None
    spec_tokens: Annotated[int | None, Field(description="an integer of 0 or more", ge=0, lt=_INT32_END)] = None
    force_disable_sp_run: Annotated[_Flag | None, Field(description="true or false")] = None
    force_sp_accept: Annotated[_Flag | None, Field(description="true or false")] = None
    aux_info: Annotated[_Flag | None, Field(description="true or false")] = None

    @property
    def stated_keys(self) -> list[str]:
        """The keys by which the request asks for something, in the order of `KEYS`.

        RTP-LLM's clients may send its defaults along, which ask for nothing: false, and an empty advice.
        """
        return [key for key in KEYS if not self._is_neutral(key)]

    def _is_neutral(self, key: str) -> bool:
        value = getattr(self, key)
        if key in _ADVICE_KEYS:
            return not value
        return value is None or (key in _FLAGS and not value)

    @property
    def field(self) -> str:
        """The key that an error names: the reference's, or else the first one."""
        return next(iter(self.stated_keys), KEYS[0])

    @property
    def text(self) -> str | None:
        """The reference, if it is given as text."""
        return (self.sp_advice_prompt or None) if self.prediction is None else self.prediction.text

    @property
    def has_reference(self) -> bool:
        """Whether there is a reference, perhaps an empty one."""
        return any(key in REFERENCE_KEYS for key in self.stated_keys)

    @property
    def edit(self) -> bool:
        """Whether the reference is walked along (`sp_edit` 1) or looked up (0).

        A ``prediction`` is walked along by default. The other forms are looked up, as in RTP-LLM.
        """
        return bool(self.prediction if self.sp_edit is None else self.sp_edit)

    @property
    def max_drafts(self) -> int | None:
        """The most drafts in a step; None = no limit."""
        return 0 if self.force_disable_sp_run else self.spec_tokens

    @property
    def drafting_keys(self) -> list[str]:
        """The keys that ask something of the drafter, without those that a server may ignore."""
        return [key for key in self.stated_keys if key not in ("prediction", "aux_info", "force_sp_accept")]


KEYS = tuple(RequestOptions.model_fields)
REFERENCE_KEYS = KEYS[:3]
_ADVICE_KEYS = ("sp_advice_prompt", "sp_advice_prompt_token_ids")
_FLAGS = ("sp_edit", "force_disable_sp_run", "force_sp_accept", "aux_info")
# Other values may be long, or text that a message must not repeat.
_KEYS_SHOWN_WITH_VALUE = ("sp_edit", "spec_tokens", "force_disable_sp_run", "force_sp_accept")


def parse_options(extra_args: Mapping[str, Any], max_model_len: int | None = None) -> RequestOptions | None:
    """Read a request's ``extra_args``; None if none of `KEYS` is among them.

    A key that begins with ``sp`` or ``force_`` must be one of `KEYS`; other keys are left to other plugins.

    Args:
        extra_args: what the request writes.
        max_model_len: bounds the lists in it, see `MAX_REFERENCE_FACTOR`; None = no bound.

    Raises:
        RequestError: an unknown key, a value of a wrong type, range or length, two references, or `sp_edit` 1 without
            a reference.
    """
    check_unknown_keys(extra_args)
    if max_model_len is not None:
        _check_lengths(extra_args, MAX_REFERENCE_FACTOR * max_model_len)
    try:
        options = RequestOptions.model_validate({key: extra_args[key] for key in KEYS if key in extra_args})
    except ValidationError as error:
        field = str(error.errors(include_url=False, include_input=False)[0]["loc"][0])
        shown = f"={_shown_value(extra_args[field])}" if field in _KEYS_SHOWN_WITH_VALUE else ""
        allowed = RequestOptions.model_fields[field].description
        raise RequestError(field, f"{field}{shown} is not allowed: it must be {allowed}") from None
    if not options.stated_keys:
        return None
    _check_reference(options)
    return options


def _shown_value(value: Any) -> str:
    """A value as JSON, but for what may be a text in the wrong field: vLLM logs some refusals."""
    is_short = isinstance(value, int | float | None) or (isinstance(value, str) and len(value) <= _MAX_VALUE_LENGTH)
    return show(value) if is_short else f"<{type(value).__name__}>"


def check_unknown_keys(extra_args: Mapping[str, Any], prefixes: tuple[str, ...] = ("sp", "force_")) -> None:
    """Raise RequestError for a key that begins like the plugin's and is none of them."""
    for name in extra_args:
        if not isinstance(name, str) or name in (*KEYS, RESOLVED_ENTRY, HANDOVER_ENTRY):
            continue
        spelling = name.lower().replace("-", "_")
        if spelling.startswith(prefixes):
            shown = name if name.isidentifier() and len(name) <= _MAX_NAME_LENGTH else show(name)
            # The search takes a second for two million letters.
            meant = nearest(spelling, KEYS, cutoff=0.6) if len(spelling) <= _MAX_NAME_LENGTH else None
            hint = f"did you mean {meant}? " if meant else ""
            raise RequestError(shown, f"{shown} is not allowed: unknown key; {hint}Allowed: {', '.join(KEYS)}")


def _check_lengths(extra_args: Mapping[str, Any], limit: int) -> None:
    """Check how long the lists of a reference are."""
    prediction = extra_args.get("prediction")
    lists = {
        "sp_advice_prompt_token_ids": extra_args.get("sp_advice_prompt_token_ids"),
        "prediction": prediction.get("content") if isinstance(prediction, dict) else None,
    }
    for field, value in lists.items():
        if isinstance(value, list) and len(value) > limit:
            raise RequestError(
                field,
                f"{field} is not allowed: its list has {len(value)} elements, and at most {limit} are allowed, "
                f"{MAX_REFERENCE_FACTOR} times the model's length",
            )


def _check_reference(options: RequestOptions) -> None:
    """Check that there is one reference at most, that `sp_edit` has one, and that a tokenizer can take its text."""
    keys = [key for key in options.stated_keys if key in REFERENCE_KEYS]
    if len(keys) > 1:
        raise RequestError(keys[1], f"{' and '.join(keys)} are both given: a request has one reference")
    if options.sp_edit and not keys:
        raise RequestError("sp_edit", f"sp_edit=1 is not allowed: it needs one of {', '.join(REFERENCE_KEYS)}")
    text = options.text
    if text is None or text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            keys[0], f"{keys[0]} is not allowed: character {error.start} is half of a surrogate pair"
        ) from None


def _read_token_ids(value: Any) -> np.ndarray:
    if isinstance(value, bytes) and len(value) % np.dtype(np.int32).itemsize == 0:
        return np.frombuffer(value, np.int32)
    if isinstance(value, np.ndarray) and value.dtype == np.int32 and value.ndim == 1:
        return value
    raise ValueError("token ids must be a one-dimensional int32 array or its bytes")


_TokenIds = Annotated[np.ndarray, PlainValidator(_read_token_ids), PlainSerializer(np.ndarray.tobytes)]


class ResolvedOptions(BaseModel):
    """A request's options as the workers get them.

    Attributes:
        token_ids: [n] int32, the reference; None = there is none.
        edit: whether the reference is walked along (`sp_edit` 1) or looked up (0).
        max_drafts: the most drafts in a step; None = as many as the engine makes.
        accepts_all: whether each of its drafts is accepted.
        counts_key: the name under which the request's counts are kept until they are collected; None = nobody collects
            them.
        num_cut: how many tokens of the reference were left out because it was too long.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    # A reference must not get into a log.
    token_ids: Annotated[_TokenIds | None, Field(repr=False)] = None
    edit: bool = False
    max_drafts: Annotated[int, Field(ge=0, lt=_INT32_END)] | None = None
    accepts_all: bool = False
    counts_key: str | None = None
    num_cut: Annotated[int, Field(ge=0)] = 0

    def to_wire(self) -> dict[str, Any]:
        """Plain values, which vLLM's messages between processes can hold; the token ids are bytes."""
        return self.model_dump()

    @classmethod
    def from_wire(cls, wire: Any) -> "ResolvedOptions | None":
        """Read what `to_wire` wrote; None for anything else, which a client has written and nothing has checked."""
        # Two messages are compared, which arrays cannot be.
        if not isinstance(wire, dict) or isinstance(wire.get("token_ids"), np.ndarray):
            return None
        try:
            resolved = cls.model_validate(wire)
        except ValidationError:
            return None
        # Each field has a default, but `to_wire` writes all of them.
        return resolved if resolved.model_fields_set == cls.model_fields.keys() else None
