"""The history of a batch on vLLM's V1 model runner, which has the requests' tokens on the host."""

from collections.abc import Collection
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

    def requests_with_state(self) -> Collection[str]:
        """The ids of the requests whose state the matcher keeps; those of this batch are always among them."""
        unfinished = self._runner.requests
        return unfinished if len(unfinished) <= self._max_num_states else self._runner.input_batch.req_ids

    def read(self, sampled: list[list[int]], width: int, *, on_host: bool = True) -> tuple[History, np.ndarray]:
        """Read the history of the batch, this step's tokens included.

        Args:
            sampled: [B] the tokens that each request got in this step; none for a partial prefill.
            width: the most drafts that a request may have.
            on_host: whether vLLM has written the tokens of this step into the host's sequences already. If not, they
                are written here, to the places where vLLM's bookkeeping is about to write the same tokens.

        Returns:
            The history, and [B] int64 drafts that each request may have. A request has none during its prefill and
            where the model length leaves no room, and never more than it allows.
        """
        batch = self._runner.input_batch
        num_reqs = len(sampled)
        num_tokens = batch.num_tokens_no_spec[:num_reqs].astype(np.int64)
        if not on_host:
            for i, tokens in enumerate(sampled):
                batch.token_ids_cpu[i, num_tokens[i] : num_tokens[i] + len(tokens)] = tokens
            num_tokens += [len(tokens) for tokens in sampled]
        # A prompt of embeddings has no tokens; its row still holds the tokens of an earlier request.
        num_prompt_tokens = batch.num_prompt_tokens[:num_reqs].copy()
        for i in batch.req_prompt_embeds:
            num_tokens[i] = num_prompt_tokens[i] = 0
        drafts_nothing = np.array([not tokens for tokens in sampled]) | (num_tokens == 0)
        room = self._runner.max_model_len - num_tokens - 1
        history = History(
            req_ids=batch.req_ids[:num_reqs],
            token_ids=batch.token_ids_cpu,
            num_tokens=num_tokens,
            num_prompt_tokens=num_prompt_tokens,
        )
        allowed = self._tracker.limits(history.req_ids, width)
        return history, np.where(drafts_nothing, 0, np.clip(room, 0, allowed))
