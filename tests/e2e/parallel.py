"""What each worker of an engine drafts, chooses and runs, on which all of them have to agree."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from vllm import SamplingParams
from vllm.distributed.parallel_state import get_tp_group

from tests.e2e.drafters import ADAPTIVE, APPEND, MTP
from tests.e2e.engines import PROMPTS, Engine
from tests.e2e.faults import (
    FAULTY,
    OTHERS,
    fail_in_first_worker,
    fail_in_worker,
    fault,
    let_drafts_pay_in_worker,
    recover_in_worker,
)
from tests.e2e.references import ask, asking, own_sources
from vllm_specplus.engine.salts import SaltingMixin
from vllm_specplus.proposers.costs import Costs, Pace

TWO = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
# Requests that are sampled: by noise of their own, and by the engine's.
SAMPLED: list[dict[str, Any]] = [{"temperature": 0.9, "top_p": 0.95, "seed": 11}, {"temperature": 0.9}]
# Of a mixture of experts.
MIXTURE_CONFIGS: dict[str, dict[str, Any]] = {
    "adaptive": MTP | ADAPTIVE,
    "append": MTP | APPEND | {"verify_strategy": "topp"},
    "append, rejection": MTP | APPEND | {"verify_strategy": "rejection"},
    "suffix": {
        "method": "suffix",
        "num_speculative_tokens": 6,
        "suffix_decoding_max_cached_requests": -1,
        "verify_strategy": "greedy",
    },
}


def bind_a_core_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each of two workers a core of its own."""
    cores = sorted(os.sched_getaffinity(0))
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", f"{cores[0]}|{cores[-1]}")


def record_drafts(worker: Any) -> None:
    """Run in a worker that drafts: keep the drafts of each step from now on."""
    runner = worker.model_runner
    drafter = getattr(runner, "speculator", None) or runner.drafter
    propose, worker.drafts = drafter.propose, []

    def propose_and_record(*args: Any, **kwargs: Any) -> Any:
        drafts = propose(*args, **kwargs)
        worker.drafts.append(drafts if isinstance(drafts, list) else drafts.tolist())
        return drafts

    drafter.propose = propose_and_record


def measure_otherwise(worker: Any, shares_prices: bool) -> None:
    """Run in a worker of an adaptive engine: to the last one of a group drafts cost far more than they bring.

    Args:
        worker: vLLM's.
        shares_prices: whether all use the first worker's prices, as they should; otherwise each uses its own.
    """
    prices = worker._tracker.prices
    if get_tp_group().is_last_rank:
        prices._meter.costs = lambda num_reqs: Costs(1.0, 1.0, 8.0, 8.0)
    if not shares_prices:
        prices._group = SimpleNamespace(world_size=1)


def record_choices(worker: Any) -> None:
    """Run in a worker that samples: keep the tokens that it chooses in each step from now on."""
    runner, worker.choices = worker.model_runner, []
    on_v2 = worker.use_v2_model_runner
    name = "sample" if on_v2 else "_sample"
    sample = getattr(runner, name)

    def sample_and_record(*args: Any) -> Any:
        found = sample(*args)
        rows = (found[0] if on_v2 else found).sampled_token_ids.tolist()
        # V1 ends each row with -1.
        lengths = found[1].tolist() if on_v2 else [len(row) - row.count(-1) for row in rows]
        worker.choices.append([row[:length] for row, length in zip(rows, lengths, strict=True)])
        return found

    setattr(runner, name, sample_and_record)


def record_inputs(worker: Any) -> None:
    """Run in a worker of Model Runner V2: keep the tokens that each step runs from now on, drafts among them."""
    runner, worker.inputs = worker.model_runner, []
    execute = runner.execute_model

    def execute_and_record(*args: Any, **kwargs: Any) -> Any:
        output = execute(*args, **kwargs)
        state = runner.execute_model_state
        if state is not None:
            worker.inputs.append(state.input_batch.input_ids[: state.input_batch.num_tokens].tolist())
        return output

    runner.execute_model = execute_and_record


def recorded(worker: Any, what: str) -> Any:
    """Run in a worker: what it has recorded."""
    return getattr(worker, what)


def of_workers(e: Engine, what: str) -> list[Any]:
    """What each worker has recorded: "drafts", "choices" or "inputs"."""
    return e.llm.collective_rpc(recorded, args=(what,))


@contextmanager
def discarded_drafts(e: Engine) -> Iterator[list[tuple[int, int]]]:
    """Drafted and accepted tokens of each result that vLLM discards, since its request had ended before the step.

    At the end vLLM has taken all results.
    """
    core = e.llm.llm_engine.engine_core.engine_core
    scheduler, found = core.scheduler, []
    update = scheduler.update_from_output

    def note_and_update(step: Any, output: Any) -> Any:
        for req_id in step.num_scheduled_tokens.keys() - scheduler.requests.keys():
            tokens = output.sampled_token_ids[output.req_id_to_index[req_id]]
            found.append((len(step.scheduled_spec_decode_tokens.get(req_id, ())), len(tokens) - 1))
        return update(step, output)

    with patch.object(scheduler, "update_from_output", note_and_update):
        yield found
        while core.batch_queue:
            core.step_fn()


def check_own_drafts(e: Engine, prompts: list[list[int]] = PROMPTS[:4], max_tokens: int = 24) -> None:
    """Each source of the config has drafted in all workers that draft, and none of them had a fault.

    An adaptive config may have drafted nothing so far, so it is asked once more while drafts are cheap.
    """
    options = e.llm.llm_engine.vllm_config.speculative_config.specplus
    if options.adaptive:
        e.llm.collective_rpc(let_drafts_pay_in_worker)
        e.tokens(prompts, max_tokens=max_tokens)
    found = [counts for counts in e.llm.collective_rpc("specplus_stats") if counts is not None]
    assert found
    for counts in found:
        assert not counts["faults"]
        for source in own_sources(options):
            assert sum(counts["drafted"][source]) > 0, source


def check_all_workers_alike(
    e: Engine, texts: list[list[int]], max_tokens: int, sampled: Iterable[dict[str, Any]] = SAMPLED
) -> None:
    """Check that workers draft, choose and count alike, and as vLLM counts: with references or not, greedy and sampled.

    Args:
        e: an engine whose workers all draft and verify.
        texts: of the first four prompts, greedy, of `max_tokens` each.
        max_tokens: the length of each text.
        sampled: the sampling parameters of further rounds of the same requests.
    """
    e.llm.collective_rpc(record_drafts)
    e.llm.collective_rpc(record_choices)
    assert ask(e, PROMPTS[:4] * 2, asking(texts), max_tokens=max_tokens) == texts * 2
    for sampling in sampled:
        ask(e, PROMPTS[:4] * 2, asking(texts), **{"max_tokens": max_tokens} | sampling)
    check_own_drafts(e, max_tokens=max_tokens)
    counts, counts_of_last = e.llm.collective_rpc("specplus_stats")
    assert counts == counts_of_last
    assert sum(counts["accepted"]["reference"]) > 0
    vllm = e.counts()
    assert sum(map(sum, counts["drafted"].values())) == vllm.drafted
    assert [sum(column) for column in zip(*counts["accepted"].values(), strict=True)] == vllm.by_position
    for what in ("drafts", "choices"):
        of_first, of_last = of_workers(e, what)
        assert len(of_first) > 20
        assert of_first == of_last


# What fails in a worker, whichever runner it has, by the part in which that is counted.
COMMON_PLACES = [
    ("drafting", "vllm_specplus.proposers.suffix.SuffixMatcher.match"),
    ("drafting", "vllm_specplus.proposers.reference_text.ReferenceText.draft"),
    ("drafting", "vllm_specplus.runners.step_prices.StepPrices.agree"),
    ("requests", "vllm_specplus.runners.step_prices.StepPrices.begin_step"),
    ("requests", "vllm_specplus.runners.live_requests.LiveRequest.__init__"),
    ("counting", "vllm_specplus.runners.step_prices.StepPrices.add_tokens"),
]
# The last prompt is the one whose matching fails.
PROMPTS_OF_FAULTS = [*OTHERS, FAULTY]


def check_faults_of_all_workers(
    e: Engine, places: Iterable[tuple[str, str]], texts: list[list[int]], max_tokens: int
) -> None:
    """Let both workers of an engine fail at one place after another: no text changes, and both do the same.

    Args:
        e: an engine that drafts from suffix trees, adaptively; its scheduler is in this process.
        places: the part of each fault, and the place, of `fail_in_worker`.
        texts: of `PROMPTS_OF_FAULTS`, without a fault.
        max_tokens: the length of each text.
    """
    references = [{"sp_advice_prompt_token_ids": text} for text in texts[:2]] + [{}] * (len(texts) - 2)

    def run(num_tokens: int = max_tokens) -> list[dict[str, Any]]:
        expected = [text[:num_tokens] for text in texts]
        assert ask(e, PROMPTS_OF_FAULTS, references, max_tokens=num_tokens) == expected
        for what in ("drafts", "choices"):
            of_first, of_last = of_workers(e, what)
            assert of_first == of_last
            assert len(of_first) > 10
        return e.llm.collective_rpc("specplus_stats")

    def run_alike(num_tokens: int = max_tokens) -> dict[str, Any]:
        first, last = run(num_tokens)
        assert first == last
        return first

    e.llm.collective_rpc(let_drafts_pay_in_worker)
    e.llm.collective_rpc(record_drafts)
    e.llm.collective_rpc(record_choices)
    found = run_alike()
    assert not found["faults"]
    for part, place in places:
        before = found["faults"]
        e.llm.collective_rpc(fail_in_worker, args=(place,))
        # Half of the texts has enough steps.
        found = run_alike(max_tokens // 2)
        hits, hits_of_last = e.llm.collective_rpc(recover_in_worker)
        assert hits == hits_of_last > 0, place
        assert found["faults"] == before | {part: found["faults"].get(part, 0)}, place
        assert found["faults"][part] > before.get(part, 0), place
    # Both of them learn of the scheduler's fault.
    with fault(SaltingMixin, "_digest", lambda *args: True) as salts:
        salted: Any = {"prompt_token_ids": FAULTY, "cache_salt": "a"}
        e.llm.generate([salted], SamplingParams(max_tokens=2), use_tqdm=False)
    assert salts == [0]
    faults = found["faults"] | {"requests": found["faults"]["requests"] + 1}
    assert [each["faults"] for each in e.llm.collective_rpc("specplus_stats")] == [faults] * 2
    # Afterwards all of them draft again.
    after = run_alike()
    assert after["faults"] == faults
    assert after["entries"]["requests"] == 0
    for source in ("model", "suffix", "reference"):
        assert sum(after["drafted"][source]) > sum(found["drafted"][source]), source
    # All of them wait for the first one's prices.
    e.llm.collective_rpc(fail_in_first_worker, args=(f"{Pace.__module__}.Pace.prices",))
    for _ in range(2):
        first, last = run()
    hits, hits_of_last = e.llm.collective_rpc(recover_in_worker)
    assert hits > 0 == hits_of_last
    assert last == after | {name: last[name] for name in ("drafted", "accepted")}
    counting = after["faults"].get("counting", 0) + hits
    assert first == last | {"faults": after["faults"] | {"counting": counting}}
