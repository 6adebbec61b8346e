"""What is checked where vLLM admits a request, and what it puts there for the workers."""

import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.v1.sample.logits_processor import LogitsProcessor as V1LogitsProcessor
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as V2LogitsProcessor

from vllm_specplus.requests import check as request_check
from vllm_specplus.requests.check import RequestCheck, install, left_out
from vllm_specplus.requests.options import (
    CARRIED,
    HANDED_OVER,
    CarriedOptions,
    RequestError,
    RequestOptions,
    handed_over,
)

SECRET = "def secret(): return 42"
VOCAB_SIZE = 1000
BEGIN_OF_TEXT = 1


@dataclass
class ModelConfig:
    """In the place of vLLM's; can be pickled."""

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
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, dict[str, Any]]]:
    """Of which arguments tokenizers were loaded."""
    calls: list[tuple[Any, dict[str, Any]]] = []

    def get_tokenizer(name: str, **options: Any) -> Tokenizer:
        calls.append((name, options))
        return Tokenizer()

    monkeypatch.setattr(request_check, "get_tokenizer", get_tokenizer)
    return calls


def installed(*, drafts: bool = True, **config: Any) -> type[RequestCheck]:
    """The check of a new engine."""
    model_config = ModelConfig(**config)
    install(model_config, drafts=drafts)
    assert model_config.logits_processors is not None
    return model_config.logits_processors[-1]


def admitted(check: type[RequestCheck], **extra: Any) -> SamplingParams:
    params = SamplingParams(extra_args=extra)
    check.validate_params(params)
    return params


def carried(params: SamplingParams) -> tuple[list[int] | None, bool, int | None, str | None]:
    """Token ids, mode, limit and key that the workers are told, after vLLM has sent them there."""
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams)
    assert sent.extra_args is not None
    options = CarriedOptions.decode(sent.extra_args[CARRIED])
    token_ids = None if options.token_ids is None else options.token_ids.tolist()
    return token_ids, options.edit, options.max_drafts, options.key


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
def handed() -> Any:
    """Hands options over, until the test's end."""
    keys = []

    def put(key: str, options: CarriedOptions) -> str:
        handed_over.put(key, options)
        keys.append(key)
        return key

    yield put
    for key in keys:
        handed_over.drop(key)


@pytest.mark.parametrize("base", [V1LogitsProcessor, V2LogitsProcessor])
def test_vllm_takes_it_for_a_logits_processor(base: type) -> None:
    check = installed()
    assert issubclass(check, base)
    assert issubclass(check, RequestCheck)
    assert carried(admitted(check, spec_tokens=2)) == (None, False, 2, None)


def test_installed_once_beside_the_users_own() -> None:
    class Own(V2LogitsProcessor):
        pass

    config = ModelConfig(logits_processors=["a.module:Name", Own])
    install(config, drafts=False)
    install(config, drafts=True)
    assert config.logits_processors is not None
    *others, check = config.logits_processors
    assert others == ["a.module:Name", Own]
    assert carried(admitted(check, spec_tokens=2))[2] == 2


def test_two_engines_have_checks_of_their_own() -> None:
    drafting, silent = installed(), installed(drafts=False)
    admitted(drafting, spec_tokens=2)
    refusal(silent, spec_tokens=2)


def test_what_is_asked_is_put_beside_what_was_there() -> None:
    params = admitted(installed(), my_key=[1], sp_advice_prompt_token_ids=[3, 4], sp_edit=1, spec_tokens=2)
    assert carried(params) == ([3, 4], True, 2, None)
    assert params.extra_args is not None
    del params.extra_args[CARRIED]
    assert params.extra_args == {
        "my_key": [1],
        "sp_advice_prompt_token_ids": [3, 4],
        "sp_edit": 1,
        "spec_tokens": 2,
    }


@pytest.mark.parametrize("extra", [None, {}, {"my_key": 3}, {"my_key": 3, "spec_tokens": None}])
@pytest.mark.parametrize("drafts", [True, False])
def test_who_asks_nothing_is_left_alone(extra: dict[str, Any] | None, drafts: bool) -> None:
    params = SamplingParams(extra_args=extra)
    before = params.extra_args
    installed(drafts=drafts).validate_params(params)
    assert params.extra_args is before
    assert extra is None or CARRIED not in extra


def test_the_workers_entry_cannot_be_forged() -> None:
    forged = CarriedOptions(np.array([VOCAB_SIZE + 5], np.int32), key="another's").encode()
    assert admitted(installed(), **{CARRIED: forged, "my_key": 3}).extra_args == {"my_key": 3}
    params = admitted(installed(), **{CARRIED: forged, "spec_tokens": 3})
    assert carried(params) == (None, False, 3, None)


@pytest.mark.parametrize("extra", [{"prediction": {"type": "content", "content": SECRET}}, {"spec_tokens": 0}])
def test_checking_twice_changes_nothing(extra: dict[str, Any]) -> None:
    """vLLM does it where one request's parameters are used for several prompts; the caller's dict stays as it was."""
    check, given = installed(), dict(extra)
    params = SamplingParams(extra_args=given)
    check.validate_params(params)
    once = params.extra_args
    check.validate_params(params)
    assert params.extra_args == once
    assert given == extra


def test_text_becomes_tokens_and_no_special_ones() -> None:
    check = installed()
    assert carried(admitted(check, sp_advice_prompt=SECRET)) == (letters(SECRET), False, None, None)
    prediction = {"type": "content", "content": [{"type": "text", "text": "ab"}, {"type": "text", "text": "c"}]}
    assert carried(admitted(check, prediction=prediction)) == (letters("abc"), True, None, None)
    assert carried(admitted(check, sp_advice_prompt="")) == ([], False, None, None)


def test_the_tokenizer_is_loaded_once_and_when_it_is_needed(loaded: list[Any]) -> None:
    check = installed(trust_remote_code=True)
    admitted(check, sp_advice_prompt_token_ids=[3], spec_tokens=1)
    assert not loaded
    admitted(check, sp_advice_prompt="ab")
    admitted(check, sp_advice_prompt="cd")
    options = {"runner_type": "generate", "tokenizer_mode": "auto", "revision": "a-revision", "trust_remote_code": True}
    assert loaded == [("an/adapted-tokenizer", options)]


def test_one_thread_at_a_time_has_the_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of Hugging Face cannot be used by two at once."""
    inside, most = 0, 0

    def encode(self: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        time.sleep(0.01)
        inside -= 1
        return [1]

    monkeypatch.setattr(Tokenizer, "encode", encode)
    check = installed()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: admitted(check, sp_advice_prompt="a"), range(8)))
    assert most == 1


def test_an_engine_without_a_tokenizer_takes_token_ids(loaded: list[Any]) -> None:
    check = installed(skip_tokenizer_init=True)
    assert carried(admitted(check, sp_advice_prompt_token_ids=[3]))[0] == [3]
    error = refusal(check, sp_advice_prompt=SECRET)
    assert "skip_tokenizer_init" in str(error)
    assert "sp_advice_prompt_token_ids" in str(error)
    assert not loaded


def test_token_ids_are_of_the_vocabulary() -> None:
    check = installed()
    assert carried(admitted(check, sp_advice_prompt_token_ids=[0, VOCAB_SIZE - 1]))[0] == [0, VOCAB_SIZE - 1]
    error = refusal(check, sp_advice_prompt_token_ids=[0, 5, VOCAB_SIZE, VOCAB_SIZE + 1])
    assert error.parameter == "sp_advice_prompt_token_ids"
    assert f"its token 2 is {VOCAB_SIZE}, and the model has tokens from 0 to {VOCAB_SIZE - 1}" in str(error)


def test_tokens_of_text_are_of_the_vocabulary() -> None:
    """A tokenizer may have tokens that the model has not."""
    error = refusal(installed(), sp_advice_prompt="ab" + chr(VOCAB_SIZE))
    assert error.parameter == "sp_advice_prompt"
    assert f"its token 2 is {VOCAB_SIZE}" in str(error)


def test_a_reference_is_cut_to_the_model_length() -> None:
    check = installed()
    for extra in ({"sp_advice_prompt_token_ids": [3] * 53}, {"sp_advice_prompt": "x" * 53}):
        params = admitted(check, **extra)
        token_ids, *_ = carried(params)
        assert token_ids is not None
        assert len(token_ids) == 50
        assert params.extra_args is not None
        assert params.extra_args[CARRIED]["num_cut"] == 3
    # Of a text that is longer by far, no more is looked at than is needed to see that.
    assert admitted(check, sp_advice_prompt="x" * 5000).extra_args[CARRIED]["num_cut"] == 2 * 51 - 50
    assert admitted(check, sp_advice_prompt="x" * 50).extra_args[CARRIED]["num_cut"] == 0


@pytest.mark.parametrize(
    ("name", "value"), [("sp_edit", 2), ("spec_tokens", -1), ("prediction", SECRET), ("sp_advice_prompt", [SECRET])]
)
def test_an_error_names_its_field(name: str, value: Any) -> None:
    assert refusal(installed(), **{name: value}).parameter == name


@pytest.mark.parametrize("name", ["sp_advice_prompt", "sp_edit", "spec_tokens"])
def test_an_engine_that_does_not_draft_refuses(name: str) -> None:
    value = SECRET if name == "sp_advice_prompt" else 0
    error = refusal(installed(drafts=False), **{name: value})
    assert error.parameter == name
    assert "speculative config" in str(error)


def test_what_http_has_taken_out_is_used_under_its_key(handed: Any) -> None:
    key = handed("a-key", CarriedOptions(np.array([5, 6], np.int32), edit=True, max_drafts=4, key="a-key"))
    assert carried(admitted(installed(), **{HANDED_OVER: key})) == ([5, 6], True, 4, "a-key")


def test_what_options_mean_is_said_with_the_key() -> None:
    resolved = installed().resolve(RequestOptions("prediction", text="ab", edit=True), "a-key")
    assert (resolved.key, resolved.edit) == ("a-key", True)
    with pytest.raises(RequestError, match="prediction is not allowed"):
        installed(drafts=False).resolve(RequestOptions("prediction", text="ab"))


@pytest.mark.parametrize("key", ["unknown", 3, ["a-key"]])
def test_a_key_that_nothing_is_under_is_no_key(key: Any, handed: Any) -> None:
    handed("a-key", CarriedOptions(max_drafts=9))
    assert admitted(installed(), **{HANDED_OVER: key}).extra_args == {HANDED_OVER: key}
    assert carried(admitted(installed(), **{HANDED_OVER: key, "spec_tokens": 2})) == (None, False, 2, None)


def test_the_workers_leave_it_out() -> None:
    config = ModelConfig(logits_processors=["a.module:Name"])
    install(config, drafts=True)
    full = list(config.logits_processors or ())
    with left_out(config):
        assert config.logits_processors == ["a.module:Name"]
    assert config.logits_processors == full
    with pytest.raises(KeyError), left_out(config):
        raise KeyError
    assert config.logits_processors == full


def test_nothing_is_left_where_nothing_else_was() -> None:
    config = ModelConfig()
    with left_out(config):
        assert config.logits_processors is None
    install(config, drafts=True)
    with left_out(config):
        assert config.logits_processors is None
    assert len(config.logits_processors or ()) == 1


@pytest.mark.parametrize("first", ["config", "check"])
@pytest.mark.parametrize("pickler", ["pickle", "cloudpickle"])
def test_it_goes_to_other_processes_in_its_config(first: str, pickler: str) -> None:
    dumps = pytest.importorskip(pickler).dumps
    config = ModelConfig()
    install(config, drafts=True)
    assert config.logits_processors is not None
    admitted(config.logits_processors[0], sp_advice_prompt="a")
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
    assert carried(admitted(check, sp_advice_prompt="ab", spec_tokens=2)) == (letters("ab"), False, 2, None)
    with left_out(there):
        assert there.logits_processors is None
