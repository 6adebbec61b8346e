"""Stand-ins for the parts of vLLM that `runners.v2.suffix` reads, on the CPU."""

from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import torch

from vllm_specplus.config import SpecPlusOptions
from vllm_specplus.kernels.drafts import DraftCounts, Limits
from vllm_specplus.proposers import SuffixMatcher
from vllm_specplus.requests.options import SCOPE_ENTRY
from vllm_specplus.runners.faults import Faults
from vllm_specplus.runners.suffix_scopes import SuffixScopes
from vllm_specplus.runners.v2.host_tokens import TokenCopier
from vllm_specplus.runners.v2.suffix import SuffixFiller

MAX_LEN = 96
SENTINEL = -99


class Event:
    """Stands in for `torch.cuda.Event`; lists in `waited` when, as a number, the events waited for were recorded.

    `blocking` says of each of these numbers whether the event sleeps. One that nothing has recorded must not be waited
    for: that would end at once.
    """

    waited: ClassVar[list[int]] = []
    blocking: ClassVar[list[bool]] = []

    def __init__(self, blocking: bool) -> None:
        self._blocking = blocking
        self.number: int | None = None

    def record(self) -> None:
        self.number = len(Event.blocking)
        Event.blocking.append(self._blocking)

    def synchronize(self) -> None:
        assert self.number is not None
        Event.waited.append(self.number)

    @classmethod
    def install(cls, monkeypatch) -> None:
        monkeypatch.setattr(torch.cuda, "Event", cls)
        monkeypatch.setattr(cls, "waited", [])
        monkeypatch.setattr(cls, "blocking", [])


class Engine:
    """Requests in the places of a Model Runner V2 of `max_num_reqs`, and the slot filler that drafts for them.

    Memory that belongs to no request holds tokens that would match.
    """

    def __init__(self, *, width: int = 4, is_async: bool = False, max_num_reqs: int = 4, **options):
        self.options = SpecPlusOptions(method="suffix", num_speculative_tokens=width, **options)
        self.width = width
        config = SimpleNamespace(
            speculative_config=SimpleNamespace(specplus=self.options, num_speculative_tokens=width),
            scheduler_config=SimpleNamespace(max_num_seqs=max_num_reqs),
            model_config=SimpleNamespace(max_model_len=MAX_LEN),
        )
        self.token_ids = torch.ones(max_num_reqs, MAX_LEN, dtype=torch.int32)
        self.total_len = torch.full((max_num_reqs,), MAX_LEN, dtype=torch.int32)
        self.states = SimpleNamespace(
            all_token_ids=SimpleNamespace(gpu=self.token_ids),
            total_len=SimpleNamespace(gpu=self.total_len),
            req_id_to_index={},
        )
        self.copier = TokenCopier(config, torch.device("cpu"), self.states, is_async=is_async, keeps_last=is_async)
        self.scopes = SuffixScopes(self.options)
        self.by_state = DraftCounts(*torch.full((2, max_num_reqs), SENTINEL, dtype=torch.int32))
        self.slot_filler = SuffixFiller(
            self.options, self.states, self.copier, self.scopes, Faults(logs=False), self.by_state
        )
        self.prompt_len: dict[str, int] = {}
        self._ended: set[str] = set()

    @property
    def mirror(self):
        return self.copier.mirror

    @property
    def matched_requests(self) -> set[str]:
        """Requests that have a tree of their own."""
        return set(self.slot_filler._matcher._matcher.active_requests)

    def matcher(self) -> SuffixMatcher:
        """A new matcher with the slot filler's options."""
        options = self.options
        return SuffixMatcher(
            max_tree_depth=options.suffix_decoding_max_tree_depth,
            max_cached_requests=options.suffix_decoding_max_cached_requests,
            max_spec_factor=options.suffix_decoding_max_spec_factor,
            min_token_prob=options.suffix_decoding_min_token_prob,
        )

    def add(self, req_id: str, index: int, prompt: list[int], output: list[int] | None = None, scope: str = "") -> None:
        """Begin a request in place `index`, or continue it there with its output."""
        self._ended.discard(req_id)
        sampling = SimpleNamespace(extra_args={SCOPE_ENTRY: scope})
        self.scopes.begin([SimpleNamespace(req_id=req_id, sampling_params=sampling)])
        known = [*prompt, *(output or [])]
        assert index not in self.states.req_id_to_index.values()
        self.states.req_id_to_index[req_id] = index
        self.prompt_len[req_id] = len(prompt)
        self.token_ids[index, : len(known)] = torch.tensor(known, dtype=torch.int32)
        self.total_len[index] = len(known)
        self.mirror.add(index, len(prompt), known)

    def remove(self, req_id: str) -> None:
        self._ended.add(req_id)
        del self.states.req_id_to_index[req_id]

    def text(self, req_id: str) -> list[int]:
        """The tokens of a request on the device."""
        index = self.states.req_id_to_index[req_id]
        return self.token_ids[index, : self.total_len[index]].tolist()

    def mirrored(self, req_id: str) -> list[int]:
        """The tokens of a request on the host."""
        index = self.states.req_id_to_index[req_id]
        return self.mirror.token_ids[index, : self.mirror.num_tokens[index]].tolist()

    def step(
        self, sampled: dict[str, list[int]], model: list[list[int]] | None = None, width: int | None = None
    ) -> tuple[list[list[int]], list[int]]:
        """Run a step.

        Args:
            sampled: the tokens that each request gets; none during its prefill.
            model: the model's drafts.
            width: slots of a request.

        Returns:
            The drafts of each request, and how many are the model's.
        """
        self.scopes.end(self._ended)
        self._ended.clear()
        width = self.width if width is None else width
        indices = [self.states.req_id_to_index[req_id] for req_id in sampled]
        for index, new in zip(indices, sampled.values(), strict=True):
            end = int(self.total_len[index])
            self.token_ids[index, end : end + len(new)] = torch.tensor(new, dtype=torch.int32)
            self.total_len[index] = end + len(new)
        batch = SimpleNamespace(
            req_ids=list(sampled),
            idx_mapping=torch.tensor(indices, dtype=torch.int32),
            idx_mapping_np=np.array(indices, np.intp),
        )
        model_drafts = torch.zeros(len(sampled), 0, dtype=torch.int64) if model is None else torch.tensor(model)
        slots = torch.full((len(sampled), self.width + 1), SENTINEL)
        num_sampled = torch.tensor([len(new) for new in sampled.values()], dtype=torch.int32)
        limits = Limits(torch.full_like(num_sampled, width), num_sampled)
        drafts = slots[:, :width]
        arrival = self.copier.advance(batch, model_drafts, limits)
        if width == 0:
            self.slot_filler.skip(batch, drafts, model_drafts, limits, arrival)
            return [[] for _ in sampled], [0] * len(sampled)
        num_drafts, num_model = self.slot_filler.fill(batch, drafts, model_drafts, limits, arrival)
        assert torch.all(slots[:, width:] == SENTINEL)
        assert num_drafts.dtype == num_model.dtype == torch.int32
        for noted, counts in zip(self.by_state, (num_drafts, num_model), strict=True):
            assert torch.equal(noted[indices], counts)
        lists = []
        for row, count in zip(slots[:, :width].tolist(), num_drafts.tolist(), strict=True):
            assert count <= width
            assert row[count:] == [0] * (width - count)
            lists.append(row[:count])
        return lists, num_model.tolist()
