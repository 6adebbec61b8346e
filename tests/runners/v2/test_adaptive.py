"""The arbiter's accounts on Model Runner V2; the tests play its steps, and the kernels choose."""

from collections.abc import Iterable
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.runners.test_live_requests import model_config
from tests.runners.test_step_prices import Group
from tests.runners.v2.suffix_engine import Event
from vllm_specplus.config import SpecPlusOptions
from vllm_specplus.proposers.arbiter import Prices
from vllm_specplus.runners import step_prices
from vllm_specplus.runners.v2 import drafting as v2_drafting
from vllm_specplus.runners.v2 import requests as v2_requests
from vllm_specplus.runners.v2.drafting import Drafting

pytestmark = pytest.mark.interpreter

MAX_LEN = 96
WIDTH, NUM_STEPS = 4, 2


@pytest.fixture(autouse=True)
def events(monkeypatch):
    Event.install(monkeypatch)
    group = SimpleNamespace(rank_in_group=0)
    monkeypatch.setattr(v2_requests, "get_tp_group", lambda: group)
    monkeypatch.setattr(step_prices, "get_tp_group", Group)


class Engine:
    """Requests in the places of a Model Runner V2, and a hybrid's drafting; the model is never right.

    Args:
        price: of a pass, in tokens.
    """

    def __init__(
        self, *, is_async: bool = True, price: float = 0.5, vocab_size: int = 100, is_multimodal: bool = False
    ):
        options = SpecPlusOptions(
            method="mtp",
            mtp_strategy="with_ngram",
            num_speculative_tokens=WIDTH,
            num_model_steps=NUM_STEPS,
            adaptive=True,
        )
        config = SimpleNamespace(
            speculative_config=SimpleNamespace(
                specplus=options,
                num_speculative_tokens=WIDTH,
                draft_sample_method="greedy",
                enable_adaptive_verification=False,
            ),
            scheduler_config=SimpleNamespace(max_num_seqs=4, async_scheduling=is_async),
            parallel_config=SimpleNamespace(data_parallel_size=1),
            model_config=model_config(MAX_LEN, vocab_size, is_multimodal),
        )
        self.token_ids = torch.ones(4, MAX_LEN, dtype=torch.int32)
        self.total_len = torch.full((4,), MAX_LEN, dtype=torch.int32)
        self.places: dict[str, int] = {}
        states = SimpleNamespace(
            all_token_ids=SimpleNamespace(gpu=self.token_ids),
            total_len=SimpleNamespace(gpu=self.total_len),
            req_id_to_index=self.places,
        )
        self.drafting = Drafting(config, torch.device("cpu"), states)
        prices = Prices(0.02, 1.0, price, price)
        self.emitted: list[int] = []
        self.drafting.requests.prices.agree = lambda num_reqs: prices
        self.drafting.requests.prices.add_tokens = self.emitted.append

    def schedule(self, ended: Iterable[str] = ()) -> None:
        """Begin a step; requests take and leave their places later."""
        output = SimpleNamespace(
            scheduled_new_reqs=[],
            scheduled_cached_reqs=SimpleNamespace(num_reqs=1),
            scheduled_spec_decode_tokens={},
            num_scheduled_tokens={},
            total_num_scheduled_tokens=0,
            finished_req_ids=set(ended),
        )
        self.drafting.requests.before_step(output)

    def add(self, req_id: str, index: int) -> None:
        self.places[req_id], self.total_len[index] = index, 1
        self.drafting.begin(req_id, index, 1, [1])

    def remove(self, req_id: str) -> None:
        """Take a request's place: it has ended, is preempted, or is about to be added again."""
        self.drafting.end(req_id, self.places.pop(req_id))

    def credits(self, index: int) -> int:
        return int(self.drafting._slot_filler._state.credits[index])

    def step(
        self,
        *req_ids: str,
        width: int = WIDTH,
        prefills: Iterable[str] = (),
        draft_logits: torch.Tensor | None = None,
    ) -> int:
        """Run a step that brings each of these requests a token; returns the passes of the draft model."""
        self.schedule()
        indices = [self.places[req_id] for req_id in (*req_ids, *prefills)]
        num_sampled = torch.tensor([1] * len(req_ids) + [0] * len(list(prefills)), dtype=torch.int32)
        self.total_len[indices] += num_sampled
        batch = SimpleNamespace(
            req_ids=[*req_ids, *prefills],
            num_reqs=len(indices),
            idx_mapping=torch.tensor(indices),
            idx_mapping_np=np.array(indices, np.intp),
            seq_lens_cpu_upper_bound=self.total_len[indices],
        )
        self.drafting.begin_step(batch)
        num_passes = self.drafting.begin_passes(batch, min(NUM_STEPS, width))
        drafts = None if num_passes is None else torch.full((len(indices), num_passes), 7)
        self.drafting.end_passes(batch, num_passes)
        self.drafting.fill(batch, drafts, num_sampled, width, draft_logits)
        return num_passes or 0

    def passes(self, num_steps: int, *req_ids: str, **step: int) -> list[int]:
        return [self.step(*req_ids, **step) for _ in range(num_steps)]


@pytest.mark.parametrize("is_async", [True, False])
def test_a_model_that_brings_nothing_in_steps_without_slots_sleeps(is_async):
    """The first pass is made all the same, while a request is awake: the draft model has to keep up with the text."""
    engine = Engine(is_async=is_async)
    engine.add("a", 0)
    passes = engine.passes(16, "a", width=0)
    assert passes[:3] == [1, 1, 1]
    assert passes[10:] == [0] * 6
    # So it stays where there are slots again.
    assert engine.step("a") == 0


@pytest.mark.parametrize("is_multimodal", [True, False])
def test_no_placeholder_of_a_prompt_is_drafted(is_multimodal):
    """A draft is read as text, and the embedding has no row for it."""
    engine = Engine(price=0.01, vocab_size=8, is_multimodal=is_multimodal)
    engine.add("a", 0)
    text = torch.tensor([1, 2, 3, 8, 4, 9, 5] * 8, dtype=torch.int32)[:MAX_LEN]
    engine.token_ids[0, : len(text)] = text
    seen = set()
    for length in range(22, 28):
        engine.total_len[0] = length - 1
        engine.step("a")
        seen |= set(engine.drafting.draft_tokens[0].tolist())
    assert (max(seen) == 7) == is_multimodal


def test_a_pass_over_a_prompt_is_not_paid_for_by_its_request():
    engine = Engine()
    engine.add("a", 0)
    assert [engine.step(width=0, prefills=["a"]) for _ in range(12)] == [1] * 12


def test_tokens_count_in_the_step_that_brings_them():
    """Steps without slots lie between steps with slots."""
    engine = Engine(is_async=False)
    engine.add("a", 0)
    for width in (WIDTH, 0, 0, 0, WIDTH, WIDTH):
        engine.step("a", width=width)
    assert engine.emitted == [0, 1, 1, 1, 1]


def test_passes_after_a_fault_have_no_time(monkeypatch):
    engine = Engine()
    engine.add("a", 0)
    engine.step("a")
    filler = engine.drafting._slot_filler
    before = filler._passes_began, filler._passes
    assert before == (None, None)
    monkeypatch.setattr(filler, "_plan_passes", None)
    batch = SimpleNamespace(req_ids=["b"], num_reqs=1)
    assert engine.drafting.begin_passes(batch, NUM_STEPS) == NUM_STEPS
    engine.drafting.end_passes(batch, NUM_STEPS)
    assert filler._passes is None


def asleep(engine: Engine, *req_ids: str) -> None:
    """Let the requests spend what they have."""
    engine.passes(8, *req_ids, width=0)
    assert engine.step(*req_ids, width=0) == 0


def test_a_request_that_sleeps_does_so_in_its_next_place_too():
    """It comes back after a preemption, or with the next prompt of its session; its draft cache has gaps by then."""
    engine = Engine()
    engine.add("a", 0)
    asleep(engine, "a")
    engine.schedule()
    engine.remove("a")
    engine.drafting._slot_filler._account.add(4 << 16)
    engine.add("b", 0)
    assert all(engine.passes(3, "b"))
    engine.add("a", 3)
    assert engine.passes(3, "a") == [0, 0, 0]
    assert engine.step("a", "b") > 0


def test_a_request_that_is_awake_keeps_its_credit():
    engine = Engine()
    engine.add("a", 0)
    assert engine.passes(2, "a", width=0) == [1, 1]
    credits = engine.credits(0)
    engine.schedule()
    engine.remove("a")
    assert engine.credits(0) == credits
    engine.add("a", 1)
    assert engine.credits(1) == credits
    asleep(engine, "a")


@pytest.mark.parametrize("ends", ["in its place", "while it waits", "before it is added again"])
def test_a_request_that_has_ended_leaves_nothing_to_the_next_of_its_name(ends):
    engine = Engine()
    engine.add("a", 0)
    asleep(engine, "a")
    if ends == "while it waits":
        engine.schedule()
        engine.remove("a")
        engine.schedule(ended=["a"])
        engine.schedule()
    else:
        engine.schedule(ended=["a"])
        engine.remove("a")
        if ends == "in its place":
            engine.schedule()
    engine.drafting._slot_filler._account.add(4 << 16)
    engine.add("a", 1)
    assert engine.step("a", width=0) == 1
    assert not engine.drafting.requests._saved_by_request


def fail(*args, **kwargs):
    raise RuntimeError


def test_a_fault_in_rows_of_probabilities_costs_the_drafts(monkeypatch):
    """The verifier would take the drafts for sampled ones."""
    engine = Engine()
    monkeypatch.setattr(v2_drafting, "write_one_hot_rows", fail)
    engine.add("a", 0)
    engine.drafting.draft_tokens.fill_(5)
    engine.step("a", draft_logits=torch.zeros(4, WIDTH, 9))
    faults = engine.drafting.requests.live_requests.faults
    assert faults.counts == {"drafting": 1}
    assert faults.without_drafts == {"a"}
    assert not engine.drafting.draft_tokens[:1].any()
    assert not engine.drafting.num_drafts.any()
    assert not engine.drafting.latest.any()


def test_a_request_whose_begin_fails_is_not_taken_for_the_one_before_it(monkeypatch):
    """Its tokens would come behind the other's, and into a shared tree."""
    engine = Engine()
    engine.drafting._slot_filler.needs_every_step = True
    mirror = engine.drafting._copier.mirror
    engine.add("a", 0)
    assert mirror.is_followed[0]
    generation = int(mirror.generation[0])
    engine.remove("a")
    monkeypatch.setattr(engine.drafting.requests, "begin", fail)
    engine.add("b", 0)
    assert engine.drafting.requests.live_requests.faults.without_drafts == {"b"}
    assert not mirror.is_followed[0]
    assert mirror.generation[0] == generation + 1
