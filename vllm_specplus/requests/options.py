"""What a request may ask of the plugin: how it is written, checked, and carried to the workers.

A request brings it in ``SamplingParams.extra_args`` (``vllm_xargs`` over HTTP), in the keys of `KEYS`. They are checked
where the request is admitted, and what they mean goes to the workers in one more entry of ``extra_args``, `CARRIED`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vllm_specplus.config.errors import show

CARRIED = "specplus"
"""The entry of ``extra_args`` that the workers read; whatever a request has there is replaced."""
HANDED_OVER = "specplus_key"
"""The entry of ``extra_args`` that names what `PredictedOutputs` has taken out of an HTTP request."""


class RequestError(ValueError):
    """A request's field is not allowed; the message names it. `field` is the name alone."""

    def __init__(self, field: str, message: str):
        super().__init__(message)
        self.field = field


class _TextPart(BaseModel):
    type: Literal["text"]
    text: str


class _Prediction(BaseModel):
    type: Literal["content"]
    content: str | list[_TextPart]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class _Given(BaseModel):
    """The keys as they are written; each description says what is allowed."""

    model_config = ConfigDict(strict=True, extra="ignore", hide_input_in_errors=True)

    prediction: Annotated[
        _Prediction | None,
        Field(description='{"type": "content", "content": text, or a list of {"type": "text", "text": text}}'),
    ] = None
    sp_advice_prompt: Annotated[str | None, Field(description="text")] = None
    sp_advice_prompt_token_ids: Annotated[
        list[Annotated[int, Field(ge=0, lt=2**31)]] | None, Field(description="a list of token ids")
    ] = None
    sp_edit: Annotated[bool | Annotated[int, Field(ge=0, le=1)] | None, Field(description="0 or 1")] = None
    spec_tokens: Annotated[int | None, Field(description="an integer of 0 or more", ge=0, lt=2**31)] = None


KEYS = tuple(_Given.model_fields)
_REFERENCES = KEYS[:3]
# The values of the others may be text that is not to be repeated in a message, or long.
_SHOWN = ("sp_edit", "spec_tokens")


@dataclass(frozen=True)
class RequestOptions:
    """What a request asks.

    Attributes:
        field: the key that gives the reference, or else the first of the others.
        text: the reference, if it is given as text.
        token_ids: [n] int32, the reference, if it is given as token ids.
        edit: whether the reference is walked (sp_edit 1) or looked up (0).
        max_drafts: at most so many drafts in a step; None = as many as the engine makes.
    """

    field: str
    text: str | None = None
    token_ids: np.ndarray | None = None
    edit: bool = False
    max_drafts: int | None = None

    @property
    def has_reference(self) -> bool:
        """Whether there is a reference, perhaps an empty one."""
        return self.text is not None or self.token_ids is not None


def parse(given: Mapping[str, Any]) -> RequestOptions | None:
    """Read what a request asks from its ``extra_args``; None if none of `KEYS` is among them.

    Keys that are not of `KEYS` are left to others, and None counts as not given. A ``prediction`` is walked unless
    `sp_edit` says otherwise; the other forms are looked up, as RTP-LLM does.

    Raises:
        RequestError: a value of a wrong type or range, two references, or `sp_edit` 1 without a reference.
    """
    try:
        read = _Given.model_validate({key: given[key] for key in KEYS if key in given})
    except ValidationError as error:
        field = str(error.errors(include_url=False, include_input=False)[0]["loc"][0])
        value = f"={show(given[field])}" if field in _SHOWN else ""
        allowed = _Given.model_fields[field].description
        raise RequestError(field, f"{field}{value} is not allowed: it must be {allowed}") from None
    stated = [key for key in KEYS if getattr(read, key) is not None]
    if not stated:
        return None
    references = [key for key in _REFERENCES if key in stated]
    if len(references) > 1:
        raise RequestError(references[1], f"{' and '.join(references)} are both given: a request has one reference")
    if read.sp_edit and not references:
        raise RequestError("sp_edit", f"sp_edit=1 is not allowed: it needs one of {', '.join(_REFERENCES)}")
    text = read.prediction.text if read.prediction else read.sp_advice_prompt
    if text is not None and not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                references[0], f"{references[0]} is not allowed: character {error.start} is half of a surrogate pair"
            ) from None
    ids = read.sp_advice_prompt_token_ids
    return RequestOptions(
        field=(references or stated)[0],
        text=text,
        token_ids=None if ids is None else np.array(ids, np.int32),
        edit=bool(read.prediction if read.sp_edit is None else read.sp_edit),
        max_drafts=read.spec_tokens,
    )


class _Encoded(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    token_ids: bytes | None
    edit: bool
    max_drafts: Annotated[int, Field(ge=0, lt=2**31)] | None
    key: str | None
    num_cut: Annotated[int, Field(ge=0)]


@dataclass(frozen=True)
class CarriedOptions:
    """What the workers are told of a request.

    Attributes:
        token_ids: [n] int32, its reference; None = it has none.
        edit, max_drafts: as in `RequestOptions`.
        key: the name under which its counts are kept until somebody asks for them; None = nobody will.
        num_cut: how many tokens of the reference were left out because it was too long.
    """

    token_ids: np.ndarray | None = None
    edit: bool = False
    max_drafts: int | None = None
    key: str | None = None
    num_cut: int = 0

    def encode(self) -> dict[str, Any]:
        """As vLLM's messages between processes can hold it."""
        token_ids = None if self.token_ids is None else self.token_ids.tobytes()
        return vars(self) | {"token_ids": token_ids}

    @classmethod
    def decode(cls, encoded: Any) -> "CarriedOptions | None":
        """What was encoded; None if it is not that, but a client's word that nothing has checked."""
        try:
            read = _Encoded.model_validate(encoded)
        except ValidationError:
            return None
        if read.token_ids is None:
            return cls(**dict(read))
        if len(read.token_ids) % np.dtype(np.int32).itemsize:
            return None
        return cls(**dict(read) | {"token_ids": np.frombuffer(read.token_ids, np.int32)})


class _HandedOver:
    """What the HTTP middleware has taken out of requests that are under way, by key.

    A reference goes this way, within one process, because vLLM can be told to log the parameters of every request.
    """

    def __init__(self) -> None:
        self._options: dict[str, CarriedOptions] = {}

    def __len__(self) -> int:
        return len(self._options)

    def put(self, key: str, options: CarriedOptions) -> None:
        self._options[key] = options

    def get(self, key: Any) -> CarriedOptions | None:
        """None if there is nothing of that key."""
        return self._options.get(key) if isinstance(key, str) else None

    def drop(self, key: str) -> None:
        self._options.pop(key, None)


handed_over = _HandedOver()
