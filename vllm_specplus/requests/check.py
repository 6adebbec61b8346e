"""Checks what requests ask of the plugin where vLLM admits them, and resolves it for the workers.

vLLM asks every logits processor of its config whether a request's parameters are valid. It does so in the process that
takes the requests. `RequestCheck` answers that question and processes no logits, so the workers leave it out.
"""

import copyreg
from abc import ABCMeta
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

import numpy as np
from vllm.logger import init_logger
from vllm.tokenizers import get_tokenizer
from vllm.v1.sample.logits_processor import LogitsProcessor as V1LogitsProcessor
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as V2LogitsProcessor

from vllm_specplus.requests.faults import request_faults
from vllm_specplus.requests.options import (
    HANDOVER_ENTRY,
    RESOLVED_ENTRY,
    RequestError,
    RequestOptions,
    ResolvedOptions,
    parse_options,
)
from vllm_specplus.requests.refusal import RefusedRequestError, shorten_stream_errors
from vllm_specplus.requests.shown_params import hide_references
from vllm_specplus.requests.steps import step_counter

logger = init_logger("vllm.specplus")

# Of a reference's text; an English token has four or five. Some vocabularies have tokens of 128.
_MOST_CHARS_PER_TOKEN = 16
_MOST_CHARS_ON_LOOP = 1 << 14


class Handover:
    """Options that the HTTP middleware has resolved, by key, while their requests run.

    A reference takes this way, within one process, because vLLM can be told to log every request's parameters.

    Attributes:
        max_bytes: what the references of all these requests may take, here or in the engine's queue.
        max_bytes_of_request: what one of them may take.
        num_bytes: what they take.
    """

    max_bytes = 1 << 30
    max_bytes_of_request = 1 << 26

    def __init__(self) -> None:
        self.num_bytes = 0
        # The options by key, with what their reference takes.
        self._entries: dict[str, tuple[ResolvedOptions, int]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, key: str, options: ResolvedOptions, num_bytes: int = 0) -> None:
        """Keep the options of a request that is on its way under a new key, without a reference that has no room.

        Args:
            key: of the request.
            options: what it asks.
            num_bytes: what its reference takes.
        """
        if self.num_bytes + num_bytes > self.max_bytes:
            logger.warning_once(
                "the references of the requests in flight take all memory that they may: others go without theirs",
                scope="process",
            )
            options, num_bytes = options.model_copy(update={"token_ids": None}), 0
        self._entries[key] = options, num_bytes
        self.num_bytes += num_bytes

    def get(self, key: Any) -> ResolvedOptions | None:
        """The options under a key; None for any other value, which a client may have written."""
        options, _ = self._entries.get(key, (None, 0)) if isinstance(key, str) else (None, 0)
        return options

    def drop(self, key: str) -> None:
        """Forget the options under a key, if there are any."""
        _, num_bytes = self._entries.pop(key, (None, 0))
        self.num_bytes -= num_bytes


handover = Handover()


class _Tokenizer:
    """The model's tokenizer, loaded on first use; one thread at a time has it."""

    def __init__(self, model_config: Any):
        self._model_config = model_config
        self._lock = Lock()
        self._tokenizer: Any = None

    def __reduce__(self) -> Any:
        # A lock cannot be pickled.
        return _Tokenizer, (self._model_config,)

    def encode(self, text: str) -> np.ndarray:
        """[n] int32 tokens without special ones. Of a text far longer than the model only the beginning is read.

        While it is read, other texts wait. So a text of few long tokens may be cut before the model's length.
        """
        config = self._model_config
        with self._lock:
            if self._tokenizer is None:
                # vLLM shares its own tokenizer among its threads, outside this lock.
                self._tokenizer = get_tokenizer(
                    config.tokenizer,
                    runner_type=config.runner_type,
                    tokenizer_mode=config.tokenizer_mode,
                    revision=config.tokenizer_revision,
                    trust_remote_code=config.trust_remote_code,
                )
            # A text that is one character longer has more tokens than the model can take.
            most = min(self._tokenizer.max_chars_per_token, _MOST_CHARS_PER_TOKEN)
            text = text[: (config.max_model_len + 1) * most]
            return np.array(self._tokenizer.encode(text, add_special_tokens=False), np.int32)


class _EngineClass(ABCMeta):
    """The type of classes that are made for one engine.

    Pickle makes such a class again from its arguments. Without this, cloudpickle would copy the class piece by piece.
    """

    arguments: tuple[Any, ...]


copyreg.pickle(_EngineClass, lambda cls: (_make_check, cls.arguments))


class RequestCheck:
    """Answers vLLM's question whether a request's parameters are valid, for one engine.

    Attributes:
        model_config: vLLM's.
        drafts: whether the plugin drafts in this engine.
        allows_force_accept: whether a request may have all of its drafts accepted.
        is_server: whether requests come over HTTP.
        tokenizer: makes tokens of reference text.
    """

    model_config: Any
    drafts: bool
    allows_force_accept: bool
    is_server: bool
    tokenizer: _Tokenizer

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Check what a request asks of the plugin, and put it into ``extra_args`` as resolved for the workers.

        Raises:
            RefusedRequestError: a field is not allowed; the message and `parameter` name the field.
        """
        extra = sampling_params.extra_args or {}
        resolved = handover.get(extra.get(HANDOVER_ENTRY))
        if resolved is None:
            try:
                with request_faults.caught("checking a request", "it goes on without its options"):
                    options = parse_options(extra, cls.model_config.max_model_len)
                    resolved = None if options is None else cls._resolve_alone(options)
            except RequestError as error:
                shorten_stream_errors()
                raise RefusedRequestError(str(error), parameter=error.field) from None
        if resolved is not None or RESOLVED_ENTRY in extra:
            others = {name: value for name, value in extra.items() if name != RESOLVED_ENTRY}
            own = {} if resolved is None else {RESOLVED_ENTRY: resolved.to_wire()}
            sampling_params.extra_args = others | own

    @classmethod
    def _resolve_alone(cls, options: RequestOptions) -> ResolvedOptions:
        """Resolve options that no middleware has taken out of a request.

        Raises:
            RequestError: as `resolve`. Over HTTP also for `aux_info`, which only the middleware can answer, and for a
                long text: the server does nothing else while it is read.
        """
        if cls.is_server and len(options.text or "") > _MOST_CHARS_ON_LOOP:
            raise RequestError(
                options.field,
                f"{options.field} is not allowed here with over {_MOST_CHARS_ON_LOOP} characters: send it to chat "
                "completions or completions of a server that was started with VLLM_PLUGINS=specplus, or its token ids",
            )
        if options.aux_info:
            if cls.is_server:
                raise RequestError(
                    "aux_info",
                    "aux_info is not allowed: the server runs without the middleware "
                    "vllm_specplus.requests.PredictedOutputs, so start it with VLLM_PLUGINS=specplus",
                )
            step_counter.install()
        return cls.resolve(options)

    @classmethod
    def resolve(cls, options: RequestOptions, counts_key: str | None = None) -> ResolvedOptions:
        """Resolve a request's options for the workers of this engine.

        Turning text into tokens takes about a second for a million characters. `counts_key`: see `ResolvedOptions`.

        Raises:
            RequestError: the engine cannot do it, or a token is not in the model's vocabulary.
        """
        others = [key for key in options.stated_keys if key not in ("aux_info", "force_sp_accept")]
        if others and not cls.drafts:
            raise no_drafter_error(others[0])
        if options.force_sp_accept and not cls.allows_force_accept:
            raise RequestError(
                "force_sp_accept",
                "force_sp_accept=true is not allowed: the speculative config of the server lacks "
                "allow_force_accept=true",
            )
        token_ids = cls._reference(options)
        limit = cls.model_config.max_model_len
        return ResolvedOptions(
            # A copy: what is cut off must not be kept with the rest.
            token_ids=None if token_ids is None else token_ids[:limit].copy(),
            edit=options.edit,
            max_drafts=options.max_drafts,
            accepts_all=bool(options.force_sp_accept),
            counts_key=counts_key,
            num_cut=0 if token_ids is None else max(0, len(token_ids) - limit),
        )

    @classmethod
    def _reference(cls, options: RequestOptions) -> np.ndarray | None:
        """[n] int32 tokens of the reference, which may be longer than the model; None = there is none."""
        field = options.field
        if options.text is not None:
            if cls.model_config.skip_tokenizer_init:
                raise RequestError(
                    field, f"{field} is not allowed with skip_tokenizer_init: give sp_advice_prompt_token_ids"
                )
            token_ids = None
            with request_faults.caught("reading a reference", "its request goes on without it"):
                token_ids = cls.tokenizer.encode(options.text)
            if token_ids is None:
                return None
        elif options.sp_advice_prompt_token_ids is not None:
            token_ids = np.array(options.sp_advice_prompt_token_ids, np.int32)
        else:
            return None
        vocab_size = cls.model_config.get_vocab_size()
        if (outside := np.flatnonzero(token_ids >= vocab_size)).size:
            raise RequestError(
                field,
                f"{field} is not allowed: its token {outside[0]} is too large, as the model has tokens from 0 to "
                f"{vocab_size - 1}",
            )
        return token_ids


def no_drafter_error(field: str) -> RequestError:
    """The error of a field that needs the plugin's drafter, in an engine without one."""
    return RequestError(
        field,
        f"{field} is not allowed: the engine's speculative config has no method with which vllm-specplus drafts",
    )


def _make_check(model_config: Any, drafts: bool, allows_force_accept: bool, is_server: bool) -> _EngineClass:
    # Each process that has an engine's requests makes this class, most of them from the config that they are sent.
    hide_references()
    attributes = {
        "model_config": model_config,
        "drafts": drafts,
        "allows_force_accept": allows_force_accept,
        "is_server": is_server,
        "tokenizer": _Tokenizer(model_config),
        "arguments": (model_config, drafts, allows_force_accept, is_server),
    }
    # Each model runner has its own kind of logits processor.
    return _EngineClass("EngineRequestCheck", (RequestCheck, V1LogitsProcessor, V2LogitsProcessor), attributes)


def install(model_config: Any, *, drafts: bool, allows_force_accept: bool = False, is_server: bool = False) -> None:
    """Have every request of an engine checked.

    Args:
        model_config: vLLM's, changed in place.
        drafts: whether the plugin drafts in this engine; if not, a request that asks for drafts is refused.
        allows_force_accept: whether a request may have all of its drafts accepted.
        is_server: whether requests come over HTTP.
    """
    if is_server:
        # Workers import this module, and need no web server.
        from vllm_specplus.requests.unread_fields import refuse_unread_fields

        refuse_unread_fields(model_config.max_model_len)
    check = _make_check(model_config, drafts, allows_force_accept, is_server)
    model_config.logits_processors = [*_logits_processors(model_config), check]


@contextmanager
def without_request_check(model_config: Any) -> Iterator[None]:
    """Leave the check out of the config while the block builds a model runner: vLLM refuses it beside speculation."""
    saved = model_config.logits_processors
    model_config.logits_processors = _logits_processors(model_config) or None
    try:
        yield
    finally:
        model_config.logits_processors = saved


def check_of(model_config: Any) -> type[RequestCheck] | None:
    """The check of an engine's requests; None if nothing checks them."""
    return next(filter(_is_check, model_config.logits_processors or ()), None)


def _logits_processors(model_config: Any) -> list[Any]:
    """The logits processors that the user has set."""
    return [processor for processor in model_config.logits_processors or () if not _is_check(processor)]


def _is_check(processor: Any) -> bool:
    return isinstance(processor, type) and issubclass(processor, RequestCheck)
