"""The history of a batch on vLLM's V1 model runner, which has the requests' tokens on the host."""

from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from vllm_specplus.proposers.history import History
from vllm_specplus.runners.v1.requests import RequestTracker

MAX_BATCHES_WITH_STATE = 2
"""Matchers keep the state of this many full batches, for requests that wait their turn or were preempted."""


class HostHistory:
    """The tokens of the runner's batch, and how many drafts each request may have."""

    def __init__(self, runner: Any, tracker: RequestTracker):
        self._runner = runner
        self._tracker = tracker
        self._max_num_states = MAX_BATCHES_WITH_STATE * runner.scheduler_config.max_num_seqs

    def req_ids(self, num_reqs: int | None = None) -> list[str]:
        """The ids of the first requests of the batch, or of all."""
        return self._runner.input_batch.req_ids[:num_reqs]

    def discards(self, num_reqs: int) -> list[bool]:
        """Of each of the first requests of the batch, whether its tokens of this step do not count."""
        return self._runner.discard_request_mask.np[:num_reqs].tolist()

    def newest_tokens(self) -> list[list[int]]:
        """[B] lists of the newest token that vLLM has written of each request; none for a partial prefill."""
        batch, ends = self._runner.input_batch, self._runner.input_batch.num_tokens_no_spec
        discards = self.discards(batch.num_reqs)
        return [[] if discards[i] else [int(batch.token_ids_cpu[i, ends[i] - 1])] for i in range(batch.num_reqs)]

    def drop_idle_state(self, retain: Callable[[Collection[str]], Any]) -> None:
        """Drop the state of requests that have ended, and of those outside this batch where there are too many.

        Args:
            retain: drops the state of every request that is not named; called only if there may be one.
        """
        unfinished = self._runner.requests
        if len(unfinished) > self._max_num_states:
            retain(self._runner.input_batch.req_ids)
        elif self._tracker.has_ended:
            retain(unfinished)
            self._tracker.has_ended = False

    def read(self, sampled: list[list[int]], width: int) -> tuple[History, np.ndarray]:
        """Read the history of the batch, into which vLLM has written this step's tokens.

        Args:
            sampled: [B] the tokens that each request got in this step; none for a partial prefill.
            width: the most drafts that a request may have.

        Returns:
            The history, and [B] int64 drafts that each request may have. A request has none during its prefill, and
            never more than it allows, and than can come out: the model's length and `max_tokens` end its text.
        """
        return self._read(sampled, self._num_tokens(sampled), width)

    def write_and_read(self, sampled: list[list[int]], width: int) -> tuple[History, np.ndarray]:
        """Write this step's tokens into the host's sequences, and read the history; see `read`.

        The places are those where vLLM's bookkeeping is about to write the same tokens.
        """
        num_tokens = self._num_tokens(sampled)
        token_ids = self._runner.input_batch.token_ids_cpu
        for i, tokens in enumerate(sampled):
            end = num_tokens[i] + len(tokens)
            token_ids[i, num_tokens[i] : end] = tokens
            num_tokens[i] = end
        return self._read(sampled, num_tokens, width)

    def _end(self, req_id: str, num_prompt_tokens: int) -> int:
        """The most tokens of a request's text, its prompt among them."""
        longest = self._runner.max_model_len
        params = self._runner.requests[req_id].sampling_params
        if params is None or params.max_tokens is None:
            return longest
        return min(longest, num_prompt_tokens + params.max_tokens)

    def _num_tokens(self, sampled: list[list[int]]) -> list[int]:
        """[B] the tokens that vLLM has written of each request."""
        return self._runner.input_batch.num_tokens_no_spec[: len(sampled)].tolist()

    def _read(self, sampled: list[list[int]], num_tokens: list[int], width: int) -> tuple[History, np.ndarray]:
        # In lists: in each step numpy's functions would be called with cold caches, which takes far longer.
        batch, requests = self._runner.input_batch, self._tracker.live_requests
        req_ids = batch.req_ids[: len(sampled)]
        num_prompt_tokens = batch.num_prompt_tokens[: len(sampled)].tolist()
        ends = [self._end(req_id, prompt) for req_id, prompt in zip(req_ids, num_prompt_tokens, strict=True)]
        allowed = requests.max_drafts(req_ids, width)
        # Behind the last draft comes one token more.
        limits = [
            max(min(most, end - length - 1), 0) if tokens else 0
            for tokens, length, most, end in zip(sampled, num_tokens, allowed, ends, strict=True)
        ]
        # A prompt of embeddings has no tokens; its row still holds the tokens of an earlier request.
        # The text of a request whose drafting had a fault is not looked at again.
        for i in (*batch.req_prompt_embeds, *requests.faults.rows_without_drafts(req_ids)):
            num_tokens[i] = num_prompt_tokens[i] = limits[i] = 0
        lengths, prompt_lengths, most = np.array((num_tokens, num_prompt_tokens, limits), np.int64)
        history = History(
            req_ids=req_ids,
            token_ids=batch.token_ids_cpu,
            num_tokens=lengths,
            num_prompt_tokens=prompt_lengths,
            scopes=self._tracker.scopes.of(req_ids),
        )
        return history, most
