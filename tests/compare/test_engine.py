"""How a run is timed."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jinja2
import pytest

from vllm_specplus.compare import engine
from vllm_specplus.compare.counts import Counts
from vllm_specplus.compare.engine import Session
from vllm_specplus.compare.processes import RefusedError
from vllm_specplus.compare.prompts import Prompt
from vllm_specplus.compare.runs import EngineOptions


class Places(Session):
    """Answers of these lengths, two tokens in each step behind the first."""

    def __init__(self, lengths: list[int]) -> None:
        self._prompts = [[length] for length in lengths]
        self._left: dict[str, int] = {}
        self._num_tokens: dict[str, int] = {}
        self.aborted: list[str] = []
        self.added: list[tuple[int, int, str]] = []
        self._engine: Any = SimpleNamespace(abort_request=self.aborted.extend, reset_prefix_cache=int)
        self._engine.collective_rpc = lambda method: None
        self._max_tokens = 9
        self.clock = 1.0

    def _add(self, token_ids: list[int], params: Any, salt: str = "") -> str:
        self.clock += 0.25
        name = str(len(self._left))
        self._left[name] = min(token_ids[0], params)
        self.added.append((token_ids[0], params, salt))
        return name

    def _params(self, number: int, temperature: float, max_tokens: int) -> Any:
        return max_tokens

    def _counts(self) -> Counts:
        return Counts()

    def _size(self, name: str) -> int:
        """Two tokens in each step behind the first."""
        size = self._num_tokens.get(name, 1)
        self._num_tokens[name] = 2
        return size

    def _step(self, timer: Any) -> list[Any]:
        self._left = {name: left - 1 for name, left in self._left.items()}
        self.clock += 1
        return [
            SimpleNamespace(
                request_id=name, outputs=[SimpleNamespace(token_ids=[7] * self._size(name))], finished=left == 0
            )
            for name, left in self._left.items()
            if left >= 0
        ]


@pytest.mark.parametrize(
    ("lengths", "concurrency", "seconds", "num_steps", "num_again"),
    [
        pytest.param([4, 1, 1], 2, 3.875, 3, 1, id="the places stay taken"),
        pytest.param([6, 6], 2, 6.625, 16, 1, id="the places are taken before"),
        pytest.param([2, 5], 1, 7.5, 5, 0, id="one place"),
        pytest.param([3, 5], 3, 4.625, 11, 1, id="more places than prompts"),
    ],
)
def test_places_are_taken_all_the_time_of_a_run(
    lengths: list[int],
    concurrency: int,
    seconds: float,
    num_steps: int,
    num_again: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A prompt that comes again, or before, counts only in the steps. To add a request takes time."""
    session = Places(lengths)
    monkeypatch.setattr(engine, "time", SimpleNamespace(perf_counter=lambda: session.clock))
    run = session.run(range(len(lengths)), concurrency, 0.0)
    assert (run.seconds, run.num_steps, run.num_step_tokens) == (seconds, num_steps, 2 * num_steps)
    assert [len(token_ids) for token_ids in run.token_ids] == [2 * length - 1 for length in lengths]
    assert len(session.aborted) == num_again


def test_answers_do_not_all_begin_at_once() -> None:
    """The last prompts begin before the first, and their answers end one after another."""
    session = Places([5, 6, 7, 8])
    session.run(range(4), 3, 0.0)
    assert session.added == [
        (8, 3, "before 1"),
        (7, 6, "before 2"),
        *[(length, 9, "") for length in (5, 6, 7, 8)],
        *[(length, 9, "copy 1") for length in (5, 6)],
    ]


class Templated(Session):
    """Its model's tokens are bytes."""

    def __init__(self, chat_template: str) -> None:
        self._tokenizer: Any = self
        self.chat_template = chat_template

    def apply_chat_template(self, messages: Any, **options: Any) -> str:
        def refuse(line: str) -> None:
            raise jinja2.TemplateError(line)

        return jinja2.Template(self.chat_template).render(messages=messages, raise_exception=refuse)

    def encode(self, text: str, **options: Any) -> list[int]:
        return list(text.encode())


def test_a_chat_that_the_template_refuses_is_named() -> None:
    session = Templated("{{ messages[0].content }}")
    assert session._encode(Prompt("1", messages=({"role": "user", "content": "a"},))) == [97]
    for text, said in (("only users,\nnot tools", "only users,"), ("", "TemplateError")):
        session.chat_template = f"{{{{ raise_exception({text!r}) }}}}"
        with pytest.raises(RefusedError, match=f"^prompt 2: the model's chat template refuses it: {said}$"):
            session._encode(Prompt("2", messages=({"role": "tool", "content": "a"},)))


@pytest.mark.parametrize(
    "words",
    [("--logprobs-mode", "raw_logprobs"), ("--model", "other"), ("--spec-method", "ngram"), ("--spec-tokens", "3")],
)
def test_what_the_command_sets_itself_is_no_engine_arg(words: tuple[str, str], tmp_path: Path) -> None:
    model = str(tmp_path)
    with pytest.raises(RefusedError, match=f"^--engine-args must not have {words[0]}: the command sets it$"):
        engine._parse(EngineOptions(model, None, words, 1))
    assert engine._parse(EngineOptions(model, None, ("--max-model-len", "9"), 1)).max_model_len == 9


@pytest.mark.parametrize(
    ("config", "device", "wrong"),
    [
        (SimpleNamespace(), "cpu", True),
        (SimpleNamespace(specplus="options"), "cpu", False),
        (SimpleNamespace(), "cuda", False),
        (None, "cpu", False),
    ],
)
def test_only_vllms_own_verification_on_a_cpu_samples_wrongly(config: Any, device: str, wrong: bool) -> None:
    session = Places([1])
    session._config = SimpleNamespace(speculative_config=config, device_config=SimpleNamespace(device_type=device))
    assert session.samples_wrongly() == wrong
