"""vLLM's features that all can be asked of one engine, in this process."""

import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from vllm import SamplingParams
from vllm.logprobs import Logprob
from vllm.sampling_params import StructuredOutputsParams

from tests.e2e.engines import PROMPTS, Engine
from tests.e2e.features.outcomes import Lack, Near, Refusal, Start, drafted, outcome, registered
from tests.e2e.references import ask as ask_with

ENGINE: dict[str, Any] = {
    "enable_prefix_caching": True,
    "max_num_batched_tokens": 64,
    "scheduling_policy": "priority",
    "num_gpu_blocks_override": 8,
    "enable_prompt_embeds": True,
    "reasoning_config": {"reasoning_start_str": "e", "reasoning_end_str": "\n"},
    "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
}
FEW = PROMPTS[:3]
LONG = (PROMPTS[0] * 8)[:300]
BUDGET = 3

Feature = Callable[[Engine], Any]
FEATURES: dict[str, Feature] = {}


feature = partial(registered, FEATURES)


def sampling(name: str, **params: Any) -> None:
    """Register a feature that sampling parameters ask for, where one token can be drawn."""
    FEATURES[name] = lambda e: e.tokens(FEW, max_tokens=16, **params)


def structured(name: str, **asked: Any) -> None:
    """Register a form of structured output."""
    FEATURES[name] = partial(_constrained, **asked)


def _constrained(e: Engine, **asked: Any) -> list[list[int]]:
    params = {"max_tokens": 40, "ignore_eos": False, "structured_outputs": StructuredOutputsParams(**asked)}
    texts = e.tokens(FEW[:2], **params)
    # With its own text as reference each has drafts that the grammar allows.
    again = ask_with(e, FEW[:2], [{"sp_advice_prompt_token_ids": text} for text in texts], **params)
    assert again == texts
    return texts


sampling("greedy text")
sampling("penalties", repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.4)
sampling("`min_tokens`", min_tokens=8, ignore_eos=False, stop_token_ids=list(range(100)))
sampling("stop strings", stop=["e", "  "], ignore_eos=False)
sampling("`bad_words`", bad_words=["a", "re"])
sampling("`allowed_token_ids`", allowed_token_ids=[65, 66, 70, 71])
sampling("`min_p`", min_p=0.1, temperature=1.0, top_k=1)
sampling("`logit_bias`", logit_bias={65: 5.0})
sampling("`n` above 1", n=3, temperature=1.0, top_k=1)
structured("JSON schema", json={"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]})


@feature("regular expression")
def repetition(e: Engine) -> Any:
    """Its grammar allows drafts that repeat the text."""
    regex = "[a-c]{3}-(ab){16}"
    texts = [bytes(token for token in text if token < 256) for text in _constrained(e, regex=regex)]
    assert all(re.fullmatch(regex.encode(), text) for text in texts)
    return texts


structured("grammar", grammar='root ::= "a" root "b" | "cc"')
structured("choice", choice=["positive", "negative"])


@feature("thinking budget")
def thinking_budget(e: Engine) -> Any:
    """The texts, and the most tokens between the markers of `ENGINE`.

    With speculation those are at most the budget and the drafts of a step.
    """
    texts = e.tokens(FEW, max_tokens=32, thinking_token_budget=BUDGET)
    letters = b"|".join(bytes(token for token in text if token < 256) for text in texts)
    longest = max(map(len, re.findall(rb"e([^e\n|]*)\n", letters)), default=0)
    speculative_config = e.llm.llm_engine.vllm_config.speculative_config
    num_slots = 0 if speculative_config is None else speculative_config.num_speculative_tokens
    assert BUDGET <= longest <= BUDGET + num_slots
    # Of these prompts the second does not think. Until its answer does, the budget changes nothing.
    (free,) = e.tokens(FEW[1:2], max_tokens=32)
    begin = (*free, ord("e")).index(ord("e")) + 1
    assert texts[1][:begin] == free[:begin]
    return longest, texts


@feature("stop strings over several steps")
def long_stop_string(e: Engine) -> Any:
    """A stop string of 16 characters, more than three steps bring: it is a part of the text without it."""
    (whole,) = e.generate(FEW[:1], max_tokens=48)
    results = e.generate(FEW, max_tokens=48, stop=[whole.outputs[0].text[12:28]])
    return [(c.text, list(c.token_ids), c.finish_reason, c.stop_reason) for r in results for c in r.outputs]


@feature("logprobs")
def logprobs(e: Engine) -> Any:
    results = e.generate(FEW, max_tokens=12, logprobs=2)
    return [_rows(r.outputs[0].logprobs) for r in results]


@feature("prompt logprobs")
def prompt_logprobs(e: Engine) -> Any:
    results = e.generate(FEW, max_tokens=4, prompt_logprobs=1)
    return [_rows(r.prompt_logprobs[1:]) for r in results]


def _rows(logprobs: Iterable[dict[int, Logprob]]) -> list[dict[int, Near]]:
    return [{token: Near(each.logprob) for token, each in row.items()} for row in logprobs]


@feature("prefix caching")
def prefix_caching(e: Engine) -> Any:
    """The second request finds the first one's prompt."""
    e.tokens([LONG], max_tokens=2)
    (result,) = e.generate([[*LONG, 65, 66]], max_tokens=16)
    assert result.num_cached_tokens > 0
    return list(result.outputs[0].token_ids)


@feature("chunked prefill")
def chunked_prefill(e: Engine) -> Any:
    """A prompt of 300 tokens in steps of 64, while others decode."""
    return e.tokens([*FEW, [66, *LONG]], max_tokens=16)


@feature("preemption")
def preemption(e: Engine) -> Any:
    """More text than the cache has room for."""
    before = preemptions(e)
    texts = e.tokens([[i, *LONG[:200]] for i in range(65, 70)], max_tokens=80)
    assert preemptions(e) > before
    return texts


def preemptions(e: Engine) -> int:
    return next(int(m.value) for m in e.llm.get_metrics() if m.name == "vllm:num_preemptions")


@feature("priority scheduling")
def priority(e: Engine) -> Any:
    """Requests of which the cache holds two at a time: the most urgent one ends first, though it came last."""
    core = e.llm.llm_engine
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    for importance, name in ((2, "last"), (1, "second"), (0, "first")):
        core.add_request(name, {"prompt_token_ids": [65 + importance, *LONG]}, params, priority=importance)
    ended: dict[str, list[int]] = {}
    while core.has_unfinished_requests():
        ended |= {output.request_id: list(output.outputs[0].token_ids) for output in core.step() if output.finished}
    assert next(iter(ended)) == "first"
    return ended


@feature("`max_model_len` reached")
def max_model_len(e: Engine) -> Any:
    (result,) = e.generate([(PROMPTS[0] * 8)[:490]], max_tokens=100)
    return result.outputs[0].finish_reason, list(result.outputs[0].token_ids)


@feature("abort")
def abort(e: Engine) -> Any:
    """One of two requests is aborted in the middle; the other's text is as it was."""
    core = e.llm.llm_engine
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    for name, prompt in zip(("kept", "aborted"), FEW, strict=False):
        core.add_request(name, {"prompt_token_ids": prompt}, params)
    found: dict[str, list[int]] = {}
    while core.has_unfinished_requests():
        for output in core.step():
            found[output.request_id] = list(output.outputs[0].token_ids)
        if len(found.get("aborted", ())) >= 3:
            core.abort_request(["aborted"])
            del found["aborted"]
    return found["kept"]


# The last one, since engines may end at it.
@feature("embeddings as prompt")
def prompt_embeds(e: Engine) -> Any:
    rows = torch.randn(12, e.llm.model_config.get_hidden_size(), generator=torch.Generator().manual_seed(1))
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    return [list(r.outputs[0].token_ids) for r in e.llm.generate([{"prompt_embeds": rows}], params, use_tqdm=False)]


def ask(model: Path, start: Start, config: dict[str, Any] | None, names: Iterable[str]) -> dict[str, Any]:
    """The outcome of features on one engine; each that brings tokens has accepted drafts."""
    with start(model, config, **ENGINE) as e:
        found: dict[str, Any] = {}
        counts = (0, 0)
        for name in names:
            found[name] = outcome(partial(FEATURES[name], e))
            if config is not None:
                before, counts = counts, (drafted(e, config), e.counts().accepted)
                has_none = isinstance(found[name], Refusal | Lack)
                assert has_none or all(now > then for now, then in zip(counts, before, strict=True)), name
        return found
