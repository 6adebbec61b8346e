"""What the check refuses where vLLM admits a request, and what it writes there for the workers."""

import pickle
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import cloudpickle
import msgspec
import numpy as np
import pytest
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.v1.sample.logits_processor import LogitsProcessor as V1LogitsProcessor
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as V2LogitsProcessor

from vllm_specplus.requests import check as request_check
from vllm_specplus.requests.check import RequestCheck, handover, install, without_request_check
from vllm_specplus.requests.options import (
    HANDOVER_ENTRY,
    RESOLVED_ENTRY,
    RequestError,
    ResolvedOptions,
    parse_options,
)

SECRET = "def secret(): return 42"
VOCAB_SIZE = 1000
BEGIN_OF_TEXT = 1


@dataclass
class ModelConfig:
    """Stands in for vLLM's; can be pickled."""

    logits_processors: list[Any] | None = None
    skip_tokenizer_init: bool = False
    tokenizer: str = "an/adapted-tokenizer"
    runner_type: str = "generate"
    tokenizer_mode: str = "auto"
    tokenizer_revision: str | None = "a-revision"
    trust_remote_code: bool = False
    max_model_len: int = 50

    def get_vocab_size(self) -> int:
        return VOCAB_SIZE


class Tokenizer:
    max_chars_per_token = 2

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [BEGIN_OF_TEXT] * add_special_tokens + [ord(letter) for letter in text]


@pytest.fixture(autouse=True)
def tokenizer_loads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, dict[str, Any]]]:
    """The arguments of which tokenizers were loaded."""
    calls: list[tuple[Any, dict[str, Any]]] = []

    def get_tokenizer(name: str, **options: Any) -> Tokenizer:
        calls.append((name, options))
        return Tokenizer()

    monkeypatch.setattr(request_check, "get_tokenizer", get_tokenizer)
    return calls


def new_check(*, drafts: bool = True, **config: Any) -> type[RequestCheck]:
    """The check of a new engine."""
    model_config = ModelConfig(**config)
    install(model_config, drafts=drafts)
    assert model_config.logits_processors is not None
    return model_config.logits_processors[-1]


def admit(check: type[RequestCheck], **extra: Any) -> SamplingParams:
    params = SamplingParams(extra_args=extra)
    check.validate_params(params)
    return params


def options_of(params: SamplingParams) -> tuple[list[int] | None, bool, int | None, str | None]:
    """Token ids, mode, limit and key as the workers get them in vLLM's message."""
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams)
    assert sent.extra_args is not None
    options = ResolvedOptions.from_wire(sent.extra_args[RESOLVED_ENTRY])
    assert options is not None
    token_ids = None if options.token_ids is None else options.token_ids.tolist()
    return token_ids, options.edit, options.max_drafts, options.counts_key


def refusal(check: type[RequestCheck], **extra: Any) -> VLLMValidationError:
    params = SamplingParams(extra_args=dict(extra))
    with pytest.raises(VLLMValidationError, match="not allowed") as caught:
        check.validate_params(params)
    assert params.extra_args == extra
    assert "secret" not in str(caught.value)
    assert caught.value.parameter in str(caught.value).split("(parameter=")[0]
    return caught.value


def letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


@pytest.fixture
def hand_over() -> Any:
    """Puts options into the handover, until the test's end."""
    keys = []

    def put(key: str, options: ResolvedOptions) -> str:
        handover.put(key, options)
        keys.append(key)
        return key

    yield put
    for key in keys:
        handover.drop(key)


@pytest.mark.parametrize("base", [V1LogitsProcessor, V2LogitsProcessor])
def test_vllm_takes_it_for_a_logits_processor(base: type) -> None:
    check = new_check()
    assert issubclass(check, base)
    assert issubclass(check, RequestCheck)
    assert options_of(admit(check, spec_tokens=2)) == (None, False, 2, None)


def test_installed_once_beside_the_users_own() -> None:
    class Own(V2LogitsProcessor):
        pass

    config = ModelConfig(logits_processors=["a.module:Name", Own])
    install(config, drafts=False)
    install(config, drafts=True)
    assert config.logits_processors is not None
    *others, check = config.logits_processors
    assert others == ["a.module:Name", Own]
    assert options_of(admit(check, spec_tokens=2))[2] == 2


def test_two_engines_have_checks_of_their_own() -> None:
    drafting, silent = new_check(), new_check(drafts=False)
    admit(drafting, spec_tokens=2)
    refusal(silent, spec_tokens=2)


def test_the_resolved_entry_stands_beside_other_keys() -> None:
    params = admit(new_check(), my_key=[1], sp_advice_prompt_token_ids=[3, 4], sp_edit=1, spec_tokens=2)
    assert options_of(params) == ([3, 4], True, 2, None)
    assert params.extra_args is not None
    del params.extra_args[RESOLVED_ENTRY]
    assert params.extra_args == {
        "my_key": [1],
        "sp_advice_prompt_token_ids": [3, 4],
        "sp_edit": 1,
        "spec_tokens": 2,
    }


@pytest.mark.parametrize("extra", [None, {}, {"my_key": 3}, {"my_key": 3, "spec_tokens": None}])
@pytest.mark.parametrize("drafts", [True, False])
def test_a_request_that_asks_nothing_is_left_alone(extra: dict[str, Any] | None, drafts: bool) -> None:
    params = SamplingParams(extra_args=extra)
    before = params.extra_args
    new_check(drafts=drafts).validate_params(params)
    assert params.extra_args is before
    assert extra is None or RESOLVED_ENTRY not in extra


def test_the_workers_entry_cannot_be_forged() -> None:
    forged = ResolvedOptions(token_ids=np.array([VOCAB_SIZE + 5], np.int32), counts_key="another's").to_wire()
    assert admit(new_check(), **{RESOLVED_ENTRY: forged, "my_key": 3}).extra_args == {"my_key": 3}
    params = admit(new_check(), **{RESOLVED_ENTRY: forged, "spec_tokens": 3})
    assert options_of(params) == (None, False, 3, None)


@pytest.mark.parametrize("extra", [{"prediction": {"type": "content", "content": SECRET}}, {"spec_tokens": 0}])
def test_checking_twice_changes_nothing(extra: dict[str, Any]) -> None:
    """vLLM checks the same parameters for each of a request's prompts; the caller's dict stays as it was."""
    check, extra_args = new_check(), dict(extra)
    params = SamplingParams(extra_args=extra_args)
    check.validate_params(params)
    once = params.extra_args
    check.validate_params(params)
    assert params.extra_args == once
    assert extra_args == extra


def test_text_becomes_tokens_and_no_special_ones() -> None:
    check = new_check()
    assert options_of(admit(check, sp_advice_prompt=SECRET)) == (letters(SECRET), False, None, None)
    prediction = {"type": "content", "content": [{"type": "text", "text": "ab"}, {"type": "text", "text": "c"}]}
    assert options_of(admit(check, prediction=prediction)) == (letters("abc"), True, None, None)
    assert options_of(admit(check, prediction={"type": "content", "content": ""})) == ([], True, None, None)


def test_the_tokenizer_is_loaded_once_and_when_it_is_needed(tokenizer_loads: list[Any]) -> None:
    check = new_check(trust_remote_code=True)
    admit(check, sp_advice_prompt_token_ids=[3], spec_tokens=1)
    assert not tokenizer_loads
    admit(check, sp_advice_prompt="ab")
    admit(check, sp_advice_prompt="cd")
    options = {"runner_type": "generate", "tokenizer_mode": "auto", "revision": "a-revision", "trust_remote_code": True}
    assert tokenizer_loads == [("an/adapted-tokenizer", options)]


def test_one_thread_at_a_time_has_the_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokenizers of Hugging Face cannot be used by two threads at once."""
    inside, most = 0, 0

    def encode(self: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        time.sleep(0.01)
        inside -= 1
        return [1]

    monkeypatch.setattr(Tokenizer, "encode", encode)
    check = new_check()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: admit(check, sp_advice_prompt="a"), range(8)))
    assert most == 1


def test_an_engine_without_a_tokenizer_takes_token_ids(tokenizer_loads: list[Any]) -> None:
    check = new_check(skip_tokenizer_init=True)
    assert options_of(admit(check, sp_advice_prompt_token_ids=[3]))[0] == [3]
    error = refusal(check, sp_advice_prompt=SECRET)
    assert "skip_tokenizer_init" in str(error)
    assert "sp_advice_prompt_token_ids" in str(error)
    assert not tokenizer_loads


def test_token_ids_are_of_the_vocabulary() -> None:
    check = new_check()
    assert options_of(admit(check, sp_advice_prompt_token_ids=[0, VOCAB_SIZE - 1]))[0] == [0, VOCAB_SIZE - 1]
    error = refusal(check, sp_advice_prompt_token_ids=[0, 5, VOCAB_SIZE, VOCAB_SIZE + 1])
    assert error.parameter == "sp_advice_prompt_token_ids"
    # The log shows the message, and no token.
    assert f"its token 2 is too large, as the model has tokens from 0 to {VOCAB_SIZE - 1}" in str(error)
    assert str(VOCAB_SIZE) not in str(error)


def test_tokens_of_text_are_of_the_vocabulary() -> None:
    """A tokenizer may have more tokens than the model."""
    error = refusal(new_check(), sp_advice_prompt="ab" + chr(VOCAB_SIZE))
    assert error.parameter == "sp_advice_prompt"
    assert "its token 2 is too large" in str(error)


def test_a_long_text_is_read_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the longest token of the vocabulary: others wait while a text is read."""
    lengths: list[int] = []
    encode = Tokenizer.encode
    monkeypatch.setattr(Tokenizer, "encode", lambda self, text, **more: lengths.append(len(text)) or encode(self, text))
    for longest, expected in ((2, 2), (16, 16), (128, 16)):
        monkeypatch.setattr(Tokenizer, "max_chars_per_token", longest)
        admit(new_check(), sp_advice_prompt="x" * 100_000)
        assert lengths.pop() == 51 * expected


@pytest.mark.parametrize("is_server", [False, True])
def test_a_server_reads_no_long_text_while_its_clients_wait(is_server: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that the middleware takes are read in a thread."""
    check, most = new_check(), 1 << 14
    monkeypatch.setattr(check, "is_server", is_server)
    admit(check, sp_advice_prompt="x" * most)
    admit(check, sp_advice_prompt_token_ids=[3] * 200)
    if is_server:
        error = refusal(check, sp_advice_prompt="x" * (most + 1))
        assert f"not allowed here with over {most} characters" in str(error)
    else:
        admit(check, sp_advice_prompt="x" * (most + 1))


def test_a_reference_is_cut_to_the_model_length() -> None:
    check = new_check()
    for extra in ({"sp_advice_prompt_token_ids": [3] * 53}, {"sp_advice_prompt": "x" * 53}):
        params = admit(check, **extra)
        token_ids, *_ = options_of(params)
        assert token_ids is not None
        assert len(token_ids) == 50
        assert params.extra_args is not None
        assert params.extra_args[RESOLVED_ENTRY]["num_cut"] == 3
    # Of a far longer text only the beginning becomes tokens.
    assert admit(check, sp_advice_prompt="x" * 5000).extra_args[RESOLVED_ENTRY]["num_cut"] == 2 * 51 - 50
    assert admit(check, sp_advice_prompt="x" * 50).extra_args[RESOLVED_ENTRY]["num_cut"] == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sp_edit", 2),
        ("spec_tokens", -1),
        ("prediction", SECRET),
        ("sp_advice_prompt", [SECRET]),
        ("sp_advise_prompt", SECRET),
        ("spec_token", 3),
    ],
)
def test_an_error_names_its_field(name: str, value: Any) -> None:
    assert refusal(new_check(), **{name: value}).parameter == name


@pytest.mark.parametrize("name", ["sp_advice_prompt", "force_disable_sp_run", "spec_tokens"])
def test_an_engine_that_does_not_draft_refuses(name: str) -> None:
    value = SECRET if name == "sp_advice_prompt" else 1
    error = refusal(new_check(drafts=False), **{name: value})
    assert error.parameter == name
    assert "speculative config" in str(error)


def test_options_from_the_handover_are_used(hand_over: Any) -> None:
    reference = np.array([5, 6], np.int32)
    key = hand_over("a-key", ResolvedOptions(token_ids=reference, edit=True, max_drafts=4, counts_key="a-key"))
    assert options_of(admit(new_check(), **{HANDOVER_ENTRY: key})) == ([5, 6], True, 4, "a-key")


def test_options_are_resolved_with_a_key() -> None:
    options = parse_options({"prediction": {"type": "content", "content": "ab"}})
    assert options is not None
    answer = new_check().resolve(options, "a-key")
    assert (answer.counts_key, answer.edit) == ("a-key", True)
    with pytest.raises(RequestError, match="prediction is not allowed"):
        new_check(drafts=False).resolve(options)


@pytest.mark.parametrize("key", ["unknown", 3, ["a-key"]])
def test_an_unknown_handover_key_is_ignored(key: Any, hand_over: Any) -> None:
    hand_over("a-key", ResolvedOptions(max_drafts=9))
    assert admit(new_check(), **{HANDOVER_ENTRY: key}).extra_args == {HANDOVER_ENTRY: key}
    assert options_of(admit(new_check(), **{HANDOVER_ENTRY: key, "spec_tokens": 2})) == (None, False, 2, None)


def test_the_workers_leave_it_out() -> None:
    config = ModelConfig(logits_processors=["a.module:Name"])
    install(config, drafts=True)
    full = list(config.logits_processors or ())
    with without_request_check(config):
        assert config.logits_processors == ["a.module:Name"]
    assert config.logits_processors == full
    with pytest.raises(KeyError), without_request_check(config):
        raise KeyError
    assert config.logits_processors == full


def test_nothing_is_left_where_nothing_else_was() -> None:
    config = ModelConfig()
    with without_request_check(config):
        assert config.logits_processors is None
    install(config, drafts=True)
    with without_request_check(config):
        assert config.logits_processors is None
    assert len(config.logits_processors or ()) == 1


@pytest.mark.parametrize("first", ["config", "check"])
@pytest.mark.parametrize("dumps", [pickle.dumps, cloudpickle.dumps], ids=["pickle", "cloudpickle"])
def test_it_goes_to_other_processes_in_its_config(first: str, dumps: Callable[[object], bytes]) -> None:
    config = ModelConfig()
    install(config, drafts=True)
    assert config.logits_processors is not None
    admit(config.logits_processors[0], sp_advice_prompt="a")
    if first == "config":
        there = pickle.loads(dumps(config))
        (check,) = there.logits_processors
    else:
        check = pickle.loads(dumps(config.logits_processors[0]))
        there = check.model_config
    assert isinstance(there, ModelConfig)
    assert check.model_config is there
    assert issubclass(check, V1LogitsProcessor)
    assert issubclass(check, V2LogitsProcessor)
    assert options_of(admit(check, sp_advice_prompt="ab", spec_tokens=2)) == (letters("ab"), False, 2, None)
    with without_request_check(there):
        assert there.logits_processors is None


def test_the_handover_has_options_until_they_are_dropped() -> None:
    before, options = len(handover), ResolvedOptions(max_drafts=1)
    handover.put("one", options)
    try:
        assert len(handover) == before + 1
        assert handover.get("one") is options
    finally:
        handover.drop("one")
    handover.drop("one")
    assert len(handover) == before
    assert handover.get("one") is None


@pytest.mark.parametrize("key", ["unknown", None, 3, ["one"], {}])
def test_the_handover_has_nothing_under_other_keys(key: Any) -> None:
    assert handover.get(key) is None
