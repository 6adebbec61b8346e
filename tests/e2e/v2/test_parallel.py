"""Tensor and pipeline parallelism on Model Runner V2: two workers, each in a process of its own."""

import asyncio
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.e2e.engines import Engine, engine, speculative, target
from tests.e2e.parallel import (
    COMMON_PLACES,
    PROMPTS_OF_FAULTS,
    SAMPLED,
    TWO,
    bind_a_core_each,
    check_faults_of_all_workers,
    check_own_drafts,
    discarded_drafts,
    measure_otherwise,
    of_workers,
    record_choices,
    record_drafts,
    record_inputs,
)
from tests.e2e.parallel_servers import check_two_workers, plain_texts
from tests.e2e.references import ask, asking, check_sums, config_of
from tests.e2e.v2.engines import FEW, MAX_TOKENS, async_engine, tokens
from vllm_specplus.proposers.costs import StepTimes
from vllm_specplus.requests.check import handover
from vllm_specplus.requests.options import HANDOVER_ENTRY, ResolvedOptions
from vllm_specplus.requests.response import Report

pytestmark = pytest.mark.interpreter


@pytest.fixture(autouse=True)
def a_core_each(monkeypatch: pytest.MonkeyPatch) -> None:
    bind_a_core_each(monkeypatch)


TENSOR, PIPELINE = "tensor_parallel_size", "pipeline_parallel_size"


def slow(*case: Any) -> Any:
    return pytest.param(*case, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("proposer", "more", "start", "parallel"),
    [
        slow("mtp_suffix", {"verify_strategy": "greedy"}, engine, TENSOR),
        slow("mtp_suffix", {"adaptive": True, "verify_strategy": "topp"}, engine, TENSOR),
        slow("mtp_ngram", {"adaptive": True}, async_engine, TENSOR),
        (
            "mtp_ngram",
            {"adaptive": True, "verify_strategy": "rejection"},
            partial(async_engine, chooses_widths=True),
            TENSOR,
        ),
        slow(
            "mtp_ngram",
            {"adaptive": True, "verify_strategy": "rejection", "draft_sample_method": "probabilistic"},
            async_engine,
            TENSOR,
        ),
        slow("suffix", {"verify_strategy": "target_match"}, engine, TENSOR),
        slow("suffix", {"adaptive": True}, async_engine, TENSOR),
        slow("eagle_ngram", {"verify_strategy": "greedy"}, engine, TENSOR),
        slow("draft_model_ngram", {"adaptive": True}, async_engine, TENSOR),
        # With synchronous scheduling vLLM cannot draft in a pipeline.
        ("mtp_ngram", {"verify_strategy": "target_match"}, async_engine, PIPELINE),
        slow("mtp_ngram", {"adaptive": True, "verify_strategy": "topp"}, async_engine, PIPELINE),
        slow("mtp_suffix", {"verify_strategy": "greedy"}, async_engine, PIPELINE),
        slow("suffix", {"verify_strategy": "rejection"}, async_engine, PIPELINE),
        slow("mtp_ngram", {}, async_engine, PIPELINE),
    ],
)
def test_two_workers(
    proposer: str,
    more: dict[str, Any],
    start: Any,
    parallel: str,
    tiny: Path,
    trained: Path,
    draft: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both run the same drafts and choose the same tokens: greedy with references and without, and sampled."""
    # Under the interpreter a slot takes as long as a step.
    add = StepTimes.add
    monkeypatch.setattr(StepTimes, "add", lambda self, tokens, reqs, time: add(self, tokens, reqs, 1 + 0.02 * tokens))
    model = target(proposer, tiny, trained)
    with engine(model) as e:
        texts = tokens(e)
    two = {parallel: 2, "distributed_executor_backend": "mp"}
    with start(model, config_of(proposer, draft, **more), **two) as e:
        e.llm.collective_rpc(record_inputs)
        if parallel == TENSOR:
            e.llm.collective_rpc(record_drafts)
            e.llm.collective_rpc(record_choices)
            if more.get("adaptive"):
                e.llm.collective_rpc(measure_otherwise, args=(True,))
        assert ask(e, FEW * 2, asking(texts), max_tokens=20) == texts * 2
        for sampling in SAMPLED:
            if "verify_strategy" not in more:
                # vLLM's own kernel of top-p does not run under the interpreter.
                sampling = sampling | {"top_p": 1.0}
            ask(e, FEW[:2], asking(texts)[:2], max_tokens=8, **sampling)
        check_own_drafts(e, FEW[:2], max_tokens=8)
        first, last = e.llm.collective_rpc("specplus_stats")
        assert sum(last["accepted"]["reference"]) > 0
        inputs, inputs_of_last = of_workers(e, "inputs")
        assert len(inputs) > 10
        assert inputs == inputs_of_last
        if parallel == TENSOR:
            # Each worker drafts and verifies for itself, and all must do the same.
            assert first == last
            for what in ("drafts", "choices"):
                of_first, of_last = of_workers(e, what)
                assert len(of_first) > 10
                assert of_first == of_last
            # With asynchronous scheduling vLLM leaves out the steps that it throws away.
            if start is engine:
                assert sum(map(sum, first["accepted"].values())) == e.counts().accepted
        else:
            # The last stage drafts.
            assert first is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "words", "cause"),
    [
        # The head's layer takes the name of one of the target's.
        ("eagle", "WorkerProc initialization failed", "Duplicate layer name"),
        # The last stage runs the draft model's last layers alone.
        ("draft_model", "Worker failed", "AssertionError"),
    ],
)
def test_vllm_itself_cannot_draft_so_in_two_stages(
    method: str, words: str, cause: str, tiny: Path, draft: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = draft if method == "draft_model" else draft / method
    config = {"method": method, "model": str(model), "num_speculative_tokens": 2}
    two = {PIPELINE: 2, "distributed_executor_backend": "mp"}
    with pytest.raises(Exception, match=words), async_engine(tiny, config, **two) as e:
        tokens(e)
    assert cause in "".join(capfd.readouterr())


@pytest.mark.slow
def test_a_pipeline_counts_what_one_process_counts(trained: Path, draft: Path) -> None:
    """The last stage counts what vLLM counts and the drafts of results that vLLM discards; else as one process does."""
    config = config_of("mtp_ngram", draft, verify_strategy="target_match")
    two = {PIPELINE: 2, "distributed_executor_backend": "mp"}
    with engine(trained, config) as e:
        texts = [tokens(e), tokens(e, temperature=0.8, seed=7)]
        check_sums(e)
        expected = e.counts()
    with async_engine(trained, config, **two) as e:
        with discarded_drafts(e) as discarded:
            assert [tokens(e), tokens(e, temperature=0.8, seed=7)] == texts
        vllm = e.counts()
        _, last = e.llm.collective_rpc("specplus_stats")
    # vLLM counts the padding of each step too.
    assert vllm == replace(expected, drafted=expected.drafts * len(expected.by_position))
    assert vllm.accepted > 0
    assert sum(map(sum, last["drafted"].values())) == vllm.drafted + sum(drafted for drafted, _ in discarded)
    assert sum(map(sum, last["accepted"].values())) == vllm.accepted + sum(accepted for _, accepted in discarded)


def reported(e: Engine, key: str, num_tokens: int) -> tuple[dict[str, int], dict[str, Any]]:
    """The counts of a prediction, and `aux_info`, as a server's middleware adds them to a response."""

    async def ask_all(_: str, *question: Any) -> list[Any]:
        return [e.llm.collective_rpc(*question)]

    client = SimpleNamespace(engine_core=SimpleNamespace(call_utility_all_async=ask_all))
    payload: dict[str, Any] = {"usage": {"completion_tokens": num_tokens}}
    asyncio.run(Report(client, key, True, True, time.perf_counter()).add_to(payload))
    return payload["usage"]["completion_tokens_details"], payload["aux_info"]


@pytest.mark.slow
def test_responses_of_a_pipeline_have_their_counts(trained: Path, draft: Path) -> None:
    """Those of the workers, of which the last stage alone counts, and those of vLLM's outputs."""
    with engine(trained) as e:
        texts = tokens(e)
    two = {PIPELINE: 2, "distributed_executor_backend": "mp"}
    with async_engine(trained, config_of("mtp_ngram", draft, verify_strategy="target_match"), **two) as e:
        results = e.generate(FEW, max_tokens=MAX_TOKENS, extra_args={"aux_info": True})
        for text, result in zip(texts, results, strict=True):
            assert list(result.outputs[0].token_ids) == text
            assert 0 < result.aux_info["iter_count"] < MAX_TOKENS
        keys = [str(i) for i in range(len(texts))]
        for key, text in zip(keys, texts, strict=True):
            handover.put(key, ResolvedOptions(token_ids=np.array(text, np.int32), counts_key=key))
        assert ask(e, FEW, [{HANDOVER_ENTRY: key} for key in keys], max_tokens=MAX_TOKENS) == texts
        for key in keys:
            handover.drop(key)
            details, aux_info = reported(e, key, MAX_TOKENS)
            assert MAX_TOKENS / 2 < details["accepted_prediction_tokens"] < MAX_TOKENS
            assert aux_info["iter_count"] < MAX_TOKENS / 2
        # The workers learn in the next step that a request has ended.
        tokens(e, FEW[:1], max_tokens=2)
        _, last = e.llm.collective_rpc("specplus_stats")
        assert last["entries"]["request_counts"] == 0


@pytest.mark.slow
def test_workers_that_do_not_agree_on_prices_draft_otherwise(trained: Path) -> None:
    """So `test_two_workers` would notice. A draft model's workers would wait for each other's passes for ever."""
    config = {"method": "ngram", "num_speculative_tokens": 4, "min_ngram_size": 1, "adaptive": True}
    with engine(trained, config, **TWO) as e:
        e.llm.collective_rpc(record_drafts)
        e.llm.collective_rpc(measure_otherwise, args=(False,))
        tokens(e, FEW[:1], max_tokens=4)
        drafts, drafts_of_last = of_workers(e, "drafts")
    assert drafts != drafts_of_last


@pytest.mark.slow
@pytest.mark.parametrize("start", [engine, async_engine])
def test_faults_of_all_workers_cost_no_text(start: Any, trained: Path, draft: Path) -> None:
    runner, prices = "vllm_specplus.runners.v2", "vllm_specplus.runners.step_prices.StepPrices"
    places = [
        *COMMON_PLACES,
        *(("drafting", f"{runner}.adaptive.AdaptiveFiller.{name}") for name in ("_plan_passes", "_judge", "_choose")),
        ("drafting", f"{runner}.host_tokens.TokenCopier.advance"),
        *(("counting", f"{prices}.{name}") for name in ("expect_passes", "add_past_passes")),
        ("counting", f"{runner}.requests.RequestTracker._counted"),
    ]
    with engine(trained) as e:
        texts = tokens(e, PROMPTS_OF_FAULTS)
    with start(trained, config_of("mtp_suffix", draft, adaptive=True), **TWO) as e:
        check_faults_of_all_workers(e, places, texts, max_tokens=MAX_TOKENS)


@pytest.mark.slow
def test_a_server(trained: Path, draft: Path, tmp_path: Path) -> None:
    config = speculative("mtp_ngram", draft, num_speculative_tokens=8, verify_strategy="target_match")
    check_two_workers(trained, config, plain_texts(trained), tmp_path)
