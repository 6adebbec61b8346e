"""The engine of one configuration, in a process of its own; the only module of this folder that imports vLLM."""

import time
from argparse import ArgumentError, Namespace
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from jinja2 import TemplateError
from vllm import EngineArgs, SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.llm_engine import LLMEngine

from vllm_specplus.compare.counts import Counts, of_plugin
from vllm_specplus.compare.engine_times import SplitTimer
from vllm_specplus.compare.past_answers import forget_past_answers
from vllm_specplus.compare.processes import RefusedError, first_line
from vllm_specplus.compare.prompts import Prompt
from vllm_specplus.compare.runs import Best, EngineOptions, Profile, Run, sources_of_tokens
from vllm_specplus.requests.engine_client import has_drafter

_MEMORY_OF_ALL = 0.9
_WARM_UP_TOKENS = 32
_SPECULATIVE = "speculative_config", "spec_method", "spec_model", "spec_tokens"
_LOGPROBS_MODE = "raw_logits"  # only `Session.best_two` asks for logprobs
_MATCHERS = {"ngram": "ngram", "ngram_gpu": "ngram", "suffix": "suffix"}


def serve(pipe: Connection, options: EngineOptions, prompts: list[Prompt], max_tokens: int) -> None:
    """Start an engine, say "ready", and answer calls of `Session`'s methods until the pipe is closed."""
    session = Session(LLMEngine.from_engine_args(_parse(options)), prompts, max_tokens)
    pipe.send("ready")
    while True:
        try:
            method, *args = pipe.recv()
        except EOFError:
            return
        pipe.send(getattr(session, method)(*args))


class _Parser(FlexibleArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise RefusedError(f"--engine-args: {message}")


def _parse(options: EngineOptions) -> EngineArgs:
    parser = EngineArgs.add_cli_args(_Parser(prog="--engine-args", exit_on_error=False, add_help=False))
    parser.set_defaults(gpu_memory_utilization=_MEMORY_OF_ALL / options.num_engines, logprobs_mode=_LOGPROBS_MODE)
    try:
        given: Namespace = parser.parse_args(["--model", options.model, *options.words])
        own = {"model": options.model, "logprobs_mode": _LOGPROBS_MODE} | dict.fromkeys(_SPECULATIVE)
        for name, expected in own.items():
            if getattr(given, name, None) != expected:
                raise RefusedError(f"--engine-args must not have --{name.replace('_', '-')}: the command sets it")
        args = EngineArgs.from_cli_args(given)
    except (ArgumentError, ValueError) as problem:
        raise RefusedError(f"--engine-args: {first_line(problem)}") from None
    args.speculative_config = options.config
    return args


@dataclass
class _Request:
    """A request: its tokens, how many came in each step, and when it took its place and left it."""

    began: float
    ended: float = 0.0
    token_ids: list[int] = field(default_factory=list)
    step_sizes: list[int] = field(default_factory=list)


class Session:
    """An engine and the prompts that it is asked.

    Args:
        engine: it counts its statistics, and runs in this process.
        prompts: become tokens once, by the model's own tokenizer and chat template.
        max_tokens: most tokens of an answer.

    Raises:
        RefusedError: a prompt is too long, has no token, or is refused by the model's chat template.
    """

    def __init__(self, engine: LLMEngine, prompts: list[Prompt], max_tokens: int):
        self._engine = engine
        self._config = engine.vllm_config
        self._tokenizer: Any = engine.get_tokenizer()
        self._max_tokens = max_tokens
        self._drafts_by_plugin = has_drafter(self._engine)
        self._prompts = [self._encode(prompt) for prompt in prompts]
        self._references = [prompt.reference for prompt in prompts]
        self._num_requests = 0
        longest = max(range(len(prompts)), key=lambda i: len(self._prompts[i]))
        room = self._config.model_config.max_model_len - len(self._prompts[longest])
        if room < max_tokens:
            raise RefusedError(
                f"prompt {prompts[longest].name} has {len(self._prompts[longest])} tokens: with --max-tokens "
                f"{max_tokens} that is more than the model's length, {self._config.model_config.max_model_len}"
            )
        if not all(self._prompts):
            raise RefusedError("a prompt has no token")

    def dtype(self) -> str:
        """The type that the model computes in, such as ``bfloat16``."""
        return str(self._config.model_config.dtype).removeprefix("torch.")

    def samples_wrongly(self) -> bool:
        """Whether vLLM's own verification of sampled requests runs on a CPU: it reads memory that nothing wrote."""
        speculative = self._config.speculative_config
        is_vllms_own = speculative is not None and getattr(speculative, "specplus", None) is None
        return is_vllms_own and self._config.device_config.device_type == "cpu"

    def warm_up(self, concurrency: int) -> None:
        """Run the prompts for a short while, so that nothing is compiled in a measured run."""
        self._drain(range(len(self._prompts)), concurrency, 0.0, min(_WARM_UP_TOKENS, self._max_tokens))

    def run(self, order: Sequence[int], concurrency: int, temperature: float, before: Sequence[int] = ()) -> Run:
        """Answer prompts, of which at most `concurrency` are in the engine at once.

        No answer of an earlier run is left in suffix trees, and no prompt in the prefix cache. A prompt that comes
        more than once has a ``cache_salt`` of its own, so that it finds neither.

        Args:
            order: numbers of prompts.
            concurrency: most requests at once.
            temperature: of the sampling.
            before: numbers of those that fill places before the first; by default the last ones of `order`.
        """
        self._forget_past_runs()
        counts = self._counts()
        every = self._drain(order, concurrency, temperature, self._max_tokens, before=before)
        requests = every[: len(order)]
        seconds = sum(request.ended - request.began for request in requests) / min(concurrency, len(order))
        steps = [size for request in every for size in request.step_sizes[1:]]
        token_ids = [request.token_ids for request in requests]
        return Run(seconds, token_ids, len(steps), sum(steps), self._counts() - counts)

    def profile(self, temperature: float) -> Profile:
        """Answer the prompts one at a time; find out where the time goes, and who drafted each token."""
        self._forget_past_runs()
        timer = SplitTimer()
        texts = []
        with timer.timers_installed(self._engine):
            for number in range(len(self._prompts)):
                by_step: list[dict[str, int]] = []
                (request,) = self._drain([number], 1, temperature, self._max_tokens, by_step, timer)
                sources = sources_of_tokens(request.step_sizes, by_step)
                texts.append(list(zip(self._pieces(request.token_ids), sources, strict=True)))
        return Profile(texts, timer.seconds())

    def best_two(self, number: int, token_ids: list[int]) -> list[Best]:
        """The two best tokens behind a prompt and some tokens of its answer, with their logits; best first."""
        params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=2)
        self._add(self._prompts[number] + token_ids, params)
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                if output.finished:
                    found = output.outputs[0].logprobs[0]
                    rows = [Best(token, self.text([token]), row.logprob) for token, row in found.items()]
                    return sorted(rows, key=lambda row: -row.logit)[:2]
        raise RuntimeError("the request ended without an answer")

    def text(self, token_ids: list[int]) -> str:
        """The text of some tokens."""
        return str(self._tokenizer.decode(token_ids))

    def _encode(self, prompt: Prompt) -> list[int]:
        try:
            return self._token_ids(prompt)
        except TemplateError as problem:
            said = f"prompt {prompt.name}: the model's chat template refuses it: {first_line(problem)}"
            raise RefusedError(said) from None

    def _token_ids(self, prompt: Prompt) -> list[int]:
        text = prompt.text
        if text is None and getattr(self._tokenizer, "chat_template", None):
            messages = [dict(message) for message in prompt.messages]
            text = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            return list(self._tokenizer.encode(text, add_special_tokens=False))
        if text is None:
            text = "\n\n".join(message["content"] for message in prompt.messages) + "\n\n"
        return list(self._tokenizer.encode(text))

    def _pieces(self, token_ids: list[int]) -> list[str]:
        """The text that each token adds."""
        pieces, before = [], ""
        for end in range(1, len(token_ids) + 1):
            # A character whose last byte is still to come is shown with the token that completes it.
            text = self.text(token_ids[:end])
            if end < len(token_ids):
                text = text.rstrip("\ufffd")
            pieces.append(text[len(before) :])
            before = text if len(text) > len(before) else before
        return pieces

    def _add(self, token_ids: list[int], params: SamplingParams, salt: str = "") -> str:
        self._num_requests += 1
        name = f"compare-{self._num_requests}"
        salted = {"cache_salt": salt} if salt else {}
        (prompt,) = self._engine.renderer.render_cmpl([{"prompt_token_ids": token_ids} | salted])
        self._engine.add_request(name, prompt, params)
        return name

    def _drain(
        self,
        order: Sequence[int],
        concurrency: int,
        temperature: float,
        max_tokens: int,
        by_step: list[dict[str, int]] | None = None,
        timer: SplitTimer | None = None,
        before: Sequence[int] = (),
    ) -> list[_Request]:
        """Answer prompts; add the accepted drafts by source of each step to `by_step`, if one of them has any.

        Before the first ones others begin, see `run`, that fill all places but one. Each may have more tokens than the
        last. Otherwise all answers would begin at once, and go on side by side. Behind the last one prompts come again
        until all answers are complete, so that the places are always taken. What came again is aborted then.

        Returns:
            The requests of `order`, and behind them those that came again or before.
        """
        places, numbers, num_open = min(concurrency, len(order)), cycle(order), len(order)
        copies: Counter[int] = Counter()
        running: dict[str, _Request] = {}
        counts = self._counts() if by_step is not None else Counts()
        now = time.perf_counter()

        def begin(number: int, max_tokens: int, salt: str) -> _Request:
            request, params = _Request(now), self._params(number, temperature, max_tokens)
            running[self._add(self._prompts[number], params, salt)] = request
            return request

        requests = list[_Request]()
        before_first = [
            begin((before or order)[-place], max(max_tokens * place // places, 1), f"before {place}")
            for place in range(1, places)
        ]
        while num_open:
            while len(running) < places:
                number = next(numbers)
                requests.append(begin(number, max_tokens, f"copy {copies[number]}" if copies[number] else ""))
                copies[number] += 1
            outputs, now = self._step(timer), time.perf_counter()
            for output in outputs:
                request, new = running[output.request_id], output.outputs[0].token_ids
                if new:
                    request.token_ids += new
                    request.step_sizes.append(len(new))
                if output.finished:
                    request.ended = now
                    del running[output.request_id]
            num_open = len(order) - sum(request.ended > 0.0 for request in requests[: len(order)])
            if by_step is not None:
                after = self._counts()
                if (after - counts).num_accepted:
                    by_step.append({source: sum(row) for source, row in (after - counts).accepted.items()})
                counts = after
        self._engine.abort_request([*running])
        return requests + before_first

    def _step(self, timer: SplitTimer | None) -> list[Any]:
        if timer is None:
            return self._engine.step()
        with timer.timed("step"):
            return self._engine.step()

    def _params(self, number: int, temperature: float, max_tokens: int) -> SamplingParams:
        # Without a seed: on a CPU vLLM ends at a seeded request whose prompt comes in parts.
        extra = None
        if self._drafts_by_plugin and self._references[number]:
            extra = {"prediction": {"type": "content", "content": self._references[number]}}
        return SamplingParams(
            temperature=temperature, max_tokens=max_tokens, output_kind=RequestOutputKind.DELTA, extra_args=extra
        )

    def _counts(self) -> Counts:
        found = {metric.name.removeprefix("vllm:spec_decode_num_"): metric for metric in self._engine.get_metrics()}
        num_drafts = getattr(found.get("drafts"), "value", 0)
        if self._drafts_by_plugin:
            stats = next(s for s in self._engine.collective_rpc("specplus_stats") if s is not None)
            return of_plugin(num_drafts, stats)
        if self._config.speculative_config is None or "drafts" not in found:
            return Counts()
        source = _MATCHERS.get(self._config.speculative_config.method, "model")
        accepted: Any = found["accepted_tokens_per_pos"]
        drafted: Any = found["draft_tokens"]
        return Counts(num_drafts, {source: drafted.value}, {source: list(accepted.values)})

    def _forget_past_runs(self) -> None:
        self._engine.reset_prefix_cache()
        self._engine.collective_rpc(forget_past_answers)
