"""Checks what requests ask of the plugin where vLLM admits them, and turns reference text into tokens.

vLLM asks every logits processor of its config whether a request's parameters are valid, in the process that takes the
requests. `RequestCheck` answers that question and is no logits processor otherwise: the workers leave it out.
"""

import copyreg
from abc import ABCMeta
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

import numpy as np
from vllm.exceptions import VLLMValidationError
from vllm.tokenizers import get_tokenizer
from vllm.v1.sample.logits_processor import LogitsProcessor as V1LogitsProcessor
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as V2LogitsProcessor

from vllm_specplus.requests.options import (
    CARRIED,
    HANDED_OVER,
    CarriedOptions,
    RequestError,
    RequestOptions,
    handed_over,
    parse,
)


class _Tokenizer:
    """The model's tokenizer, for one thread at a time; loaded when it is first needed."""

    def __init__(self, model_config: Any):
        self._model_config = model_config
        self._lock = Lock()
        self._tokenizer: Any = None

    def __reduce__(self) -> Any:
        # A lock stays in its process.
        return _Tokenizer, (self._model_config,)

    def encode(self, text: str) -> np.ndarray:
        """[n] int32 tokens, no special ones added; of a text that is far longer than the model, the beginning only."""
        config = self._model_config
        with self._lock:
            if self._tokenizer is None:
                # Not the one that vLLM shares among its threads.
                self._tokenizer = get_tokenizer(
                    config.tokenizer,
                    runner_type=config.runner_type,
                    tokenizer_mode=config.tokenizer_mode,
                    revision=config.tokenizer_revision,
                    trust_remote_code=config.trust_remote_code,
                )
            # Any text of one character more has more tokens than the model can take.
            text = text[: (config.max_model_len + 1) * self._tokenizer.max_chars_per_token]
            return np.array(self._tokenizer.encode(text, add_special_tokens=False), np.int32)


class _Remade(ABCMeta):
    """Classes that are made for one engine; pickle makes them again (cloudpickle takes any class to pieces)."""

    made_from: tuple[Any, ...]


copyreg.pickle(_Remade, lambda cls: (_make, cls.made_from))


class RequestCheck:
    """Answers vLLM's question whether a request's parameters are valid, for one engine."""

    model_config: Any
    drafts: bool
    tokenizer: _Tokenizer

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Check what a request asks of the plugin, and put what it means for the workers into its ``extra_args``.

        Raises:
            VLLMValidationError: something in it is not allowed; the message and `parameter` name the field.
        """
        extra = sampling_params.extra_args or {}
        carried = handed_over.get(extra.get(HANDED_OVER))
        if carried is None:
            try:
                options = parse(extra)
                carried = None if options is None else cls.resolve(options)
            except RequestError as error:
                raise VLLMValidationError(str(error), parameter=error.field) from None
        if carried is not None or CARRIED in extra:
            rest = {name: value for name, value in extra.items() if name != CARRIED}
            sampling_params.extra_args = rest if carried is None else rest | {CARRIED: carried.encode()}

    @classmethod
    def resolve(cls, options: RequestOptions, key: str | None = None) -> CarriedOptions:
        """What a request's options mean for the workers of this engine.

        Turning text into tokens takes a while: about a second for a million characters. `key`: see `CarriedOptions`.

        Raises:
            RequestError: the engine cannot do it, or a token is not in the model's vocabulary.
        """
        field = options.field
        if not cls.drafts:
            raise RequestError(
                field,
                f"{field} is not allowed: the engine's speculative config has no method with which vllm-specplus "
                "drafts",
            )
        token_ids = options.token_ids
        if options.text is not None:
            if cls.model_config.skip_tokenizer_init:
                raise RequestError(
                    field, f"{field} is not allowed with skip_tokenizer_init: give sp_advice_prompt_token_ids"
                )
            token_ids = cls.tokenizer.encode(options.text)
        num_cut, limit, vocab_size = 0, cls.model_config.max_model_len, cls.model_config.get_vocab_size()
        if token_ids is not None:
            if (outside := np.flatnonzero(token_ids >= vocab_size)).size:
                raise RequestError(
                    field,
                    f"{field} is not allowed: its token {outside[0]} is {token_ids[outside[0]]}, and the model has "
                    f"tokens from 0 to {vocab_size - 1}",
                )
            num_cut = max(0, len(token_ids) - limit)
            token_ids = token_ids[:limit]
        return CarriedOptions(token_ids, options.edit, options.max_drafts, key, num_cut)


def _make(model_config: Any, drafts: bool) -> _Remade:
    attributes = {
        "model_config": model_config,
        "drafts": drafts,
        "tokenizer": _Tokenizer(model_config),
        "made_from": (model_config, drafts),
    }
    # Each model runner has its own kind of logits processor.
    return _Remade("EngineRequestCheck", (RequestCheck, V1LogitsProcessor, V2LogitsProcessor), attributes)


def install(model_config: Any, *, drafts: bool) -> None:
    """Have every request of an engine checked.

    Args:
        model_config: vLLM's, changed in place.
        drafts: whether the plugin drafts in this engine; if not, a request that asks for drafts is refused.
    """
    model_config.logits_processors = [*_others(model_config), _make(model_config, drafts)]


@contextmanager
def left_out(model_config: Any) -> Iterator[None]:
    """While the block builds a model runner, its config holds real logits processors only."""
    saved = model_config.logits_processors
    model_config.logits_processors = _others(model_config) or None
    try:
        yield
    finally:
        model_config.logits_processors = saved


def check_of(model_config: Any) -> type[RequestCheck] | None:
    """What checks the requests of an engine; None if nothing does."""
    return next(filter(_is_check, model_config.logits_processors or ()), None)


def _others(model_config: Any) -> list[Any]:
    return [processor for processor in model_config.logits_processors or () if not _is_check(processor)]


def _is_check(processor: Any) -> bool:
    return isinstance(processor, type) and issubclass(processor, RequestCheck)
