"""Verification on vLLM's Model Runner V2: vLLM's samplers, with another way of choosing tokens.

Penalties, bias, bad words, grammars, chunking and logprobs stay vLLM's. Only the step from logits to tokens is
replaced; its kernels also apply temperature, top-k, top-p and min-p.
"""

import functools
from typing import Any

import numpy as np
import torch
from vllm.config.model import PROCESSED_LOGPROBS_MODES
from vllm.model_executor.layers.vocab_parallel_embedding import pad_vocab_size
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.sample.states import SamplingStates
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

from vllm_specplus.config import SpecPlusOptions
from vllm_specplus.kernels.counts import mark_padding
from vllm_specplus.kernels.parameters import Parameters, gather_parameters
from vllm_specplus.runners.live_requests import LiveRequests
from vllm_specplus.runners.v2.drafting import Drafting
from vllm_specplus.strategies import uses_draft_distribution
from vllm_specplus.verify import verify_draft_tokens


class _UnappliedStates(SamplingStates):
    """Keeps vLLM's sampling parameters, but leaves it to the plugin's kernels to apply them to the logits."""

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        """Note a request's parameters; False tells vLLM that the logits need no processing for them."""
        super().add_request(req_idx, sampling_params)
        return False

    def apply_temperature(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the kernels do."""

    def apply_min_p(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the kernels do."""

    def apply_top_k_top_p(self, logits: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the logits as they are: the kernels apply these."""
        return logits

    def apply_all(
        self, logits: torch.Tensor, expanded_idx_mapping: torch.Tensor, idx_mapping_np: np.ndarray
    ) -> torch.Tensor:
        """Copy the logits ([num_rows, vocab] float32) and apply all parameters to the copy, as vLLM's sampler does."""
        logits = torch.empty_like(logits, dtype=torch.float32).copy_(logits)
        super().apply_temperature(logits, expanded_idx_mapping, idx_mapping_np)
        super().apply_min_p(logits, expanded_idx_mapping, idx_mapping_np)
        return super().apply_top_k_top_p(logits, expanded_idx_mapping, idx_mapping_np)


class StrategySampler(Sampler):
    """Samples rows that have no draft by the strategy's own rule and noise."""

    def __init__(self, vllm_config: Any, max_num_reqs: int, vocab_size: int, *args: Any, **kwargs: Any):
        super().__init__(vllm_config, max_num_reqs, vocab_size, *args, **kwargs)
        self.sampling_states = _UnappliedStates(max_num_reqs, vocab_size)
        self._options: SpecPlusOptions = vllm_config.speculative_config.specplus

    def verify(
        self,
        logits: torch.Tensor,
        cu_num_rows: torch.Tensor,
        drafts: torch.Tensor,
        positions: torch.Tensor,
        idx_mapping: torch.Tensor,
        idx_mapping_np: np.ndarray,
        max_rows: int,
        draft_logits: torch.Tensor | None = None,
        draft_rows: torch.Tensor | None = None,
        accepts_all: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Verify one batch.

        Args:
            logits: [num_rows, vocab] float, processed except for temperature, top-k, top-p and min-p.
            cu_num_rows: [num_reqs + 1] int32.
            drafts: [num_rows] int, -1 where there is no draft.
            positions: [num_rows] int64, of the token that was fed in to get each row.
            idx_mapping, idx_mapping_np: [num_reqs] request states, on the device and on the host.
            max_rows: rows of the longest request that may come.
            draft_logits, draft_rows: see ``verify_draft_tokens``.
            accepts_all: [num_reqs] bool, the requests whose drafts are all accepted; None: there is none.

        Returns:
            [num_reqs, max_rows] int64 tokens, -1 after each request's last, and [num_reqs] int32 how many.
        """
        states, options = self.sampling_states, self._options
        assert options.verify_strategy is not None

        filters = ((states.top_p, 1.0), (states.top_k, states.vocab_size), (states.min_p, 0.0))
        # All filters or none, so that the kernels are compiled twice and not for every combination.
        filtered = any(np.any(values.np[idx_mapping_np] != off) for values, off in filters)
        if not np.any(states.temperature.np[idx_mapping_np]):
            # All strategies are one, and this one takes two kernels. It has no use for filters and probabilities.
            filtered, draft_logits, draft_rows = False, None, None
            rule: dict[str, Any] = {"strategy": "greedy"}
        else:
            rule = {
                "strategy": options.verify_strategy,
                "verify_window": options.verify_window,
                "max_candidate_len": options.max_candidate_len,
            }
        parameters = Parameters(states.temperature.gpu, states.seeds.gpu)
        if filtered:
            parameters = parameters._replace(top_p=states.top_p.gpu, top_k=states.top_k.gpu, min_p=states.min_p.gpu)
        parameters = gather_parameters(parameters, idx_mapping)
        verify = functools.partial(
            verify_draft_tokens,
            logits,
            cu_num_rows,
            drafts,
            parameters.temperature,
            top_p=parameters.top_p,
            top_k=parameters.top_k,
            min_p=parameters.min_p,
            seeds=parameters.seeds,
            positions=positions,
            **rule,
            # The torch backend waits for the device.
            backend="triton",
            max_rows=max_rows,
            draft_logits=draft_logits,
            draft_rows=draft_rows,
        )
        sampled = verify(policy=options.accept_policy)
        if accepts_all is None:
            return sampled.token_ids, sampled.num_tokens
        forced = verify(policy="accept_all")
        token_ids = torch.where(accepts_all[:, None], forced.token_ids, sampled.token_ids)
        return token_ids, torch.where(accepts_all, forced.num_tokens, sampled.num_tokens)

    def logits_to_report(
        self, logits: torch.Tensor, expanded_idx_mapping: torch.Tensor, idx_mapping_np: np.ndarray
    ) -> torch.Tensor:
        """[num_rows, vocab] the processed logits for vLLM; all parameters are applied if a request may read them."""
        if self.logprobs_mode in PROCESSED_LOGPROBS_MODES or self.return_sampling_mask:
            return self.sampling_states.apply_all(logits, expanded_idx_mapping, idx_mapping_np)
        return logits

    def sample(
        self,
        logits: torch.Tensor,
        expanded_idx_mapping: torch.Tensor,
        idx_mapping: torch.Tensor,
        idx_mapping_np: np.ndarray,
        pos: torch.Tensor,
        input_ids: torch.Tensor,
        expanded_local_pos: torch.Tensor,
        seq_lens_upper_bound_np: np.ndarray,
        return_logprobs: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sample by the plugin's strategy; arguments are those of vLLM's method.

        Returns:
            [num_rows] int64 tokens, one row for each request, and the processed logits.
        """
        processed = self.apply_sampling_params(
            logits,
            expanded_idx_mapping,
            idx_mapping,
            idx_mapping_np,
            pos,
            input_ids,
            expanded_local_pos,
            seq_lens_upper_bound_np,
        )
        num_rows = processed.shape[0]
        tokens, _ = self.verify(
            processed,
            torch.arange(num_rows + 1, dtype=torch.int32, device=processed.device),
            torch.full((num_rows,), -1, dtype=torch.int32, device=processed.device),
            pos,
            expanded_idx_mapping,
            idx_mapping_np,
            1,
        )
        return tokens[:, 0], self.logits_to_report(processed, expanded_idx_mapping, idx_mapping_np)


class CountingRejectionSampler(RejectionSampler):
    """Marks slots beyond a request's drafts as padding, and counts what becomes of its drafts."""

    def set_drafting(self, drafting: Drafting | None) -> None:
        """Set what knows how many drafts each request has; None where vLLM's own drafter runs."""
        self._drafting = drafting

    def __call__(
        self,
        logits: torch.Tensor,
        input_batch: Any,
        draft_logits: torch.Tensor | None = None,
        invalid_drafts: torch.Tensor | None = None,
    ) -> Any:
        """Verify as vLLM does, padding taken for no drafts, and count; arguments and result are those of vLLM."""
        drafting = self._drafting
        if drafting is None:
            return super().__call__(logits, input_batch, draft_logits, invalid_drafts)
        no_drafts = mark_padding(
            input_batch.expanded_local_pos, input_batch.expanded_idx_mapping, drafting.num_drafts, invalid_drafts
        )
        output = super().__call__(logits, input_batch, draft_logits, no_drafts)
        drafting.requests.count_drafts(input_batch, output.num_sampled, invalid_drafts)
        return output


class StrategyRejectionSampler(CountingRejectionSampler):
    """Verifies drafts by the plugin's strategy and policy."""

    sampler: StrategySampler
    _live_requests: LiveRequests | None = None
    _accepts_all: torch.Tensor | None = None

    def set_live_requests(self, live_requests: LiveRequests) -> None:
        """Set what knows the requests whose drafts are all accepted."""
        self._live_requests = live_requests

    def __call__(
        self,
        logits: torch.Tensor,
        input_batch: Any,
        draft_logits: torch.Tensor | None = None,
        invalid_drafts: torch.Tensor | None = None,
    ) -> Any:
        """Verify a batch, some of whose requests may have all of their drafts accepted."""
        if self._live_requests is not None:
            self._accepts_all = None
            with self._live_requests.faults.caught("requests"):
                chosen = self._live_requests.accept_all_mask(input_batch.req_ids)
                self._accepts_all = None if chosen is None else torch.from_numpy(chosen).to(logits.device)
        return super().__call__(logits, input_batch, draft_logits, invalid_drafts)

    def warm_up(self, dtype: torch.dtype, device: torch.device, draft_logits: torch.Tensor | None) -> None:
        """Compile the kernels, at temperature 0 and above, with filters and without, with drafts and without.

        Args:
            dtype: of the logits.
            device: of the runner.
            draft_logits: [max_num_reqs, K, vocab], from which this engine's drafts are sampled, or None.
        """
        states = self.sampler.sampling_states
        # vLLM pads the vocabulary and cuts the logits to size; the kernels are compiled for the distance between rows.
        padded = pad_vocab_size(states.vocab_size)
        logits = torch.zeros(2, padded, dtype=dtype, device=device)[:, : states.vocab_size]
        at = torch.zeros(2, dtype=torch.int64, device=device)
        sampled_from = {}
        if draft_logits is not None and uses_draft_distribution(self.sampler._options.verify_strategy):
            sampled_from = {"draft_logits": draft_logits.flatten(0, 1), "draft_rows": at}
        saved = states.temperature.np[0], states.top_p.np[0]
        for temperature, top_p in ((0.0, 1.0), (1.0, 1.0), (1.0, 0.5)):
            states.temperature.np[0], states.top_p.np[0] = temperature, top_p
            for num_rows, max_rows, options in ((1, 1, {}), (2, self.num_speculative_steps + 1, sampled_from)):
                self.sampler.verify(
                    logits[:num_rows],
                    torch.tensor([0, num_rows], dtype=torch.int32, device=device),
                    torch.zeros(num_rows, dtype=torch.int32, device=device),
                    at[:num_rows],
                    at[:1],
                    np.zeros(1, np.int64),
                    max_rows,
                    **options,
                )
        states.temperature.np[0], states.top_p.np[0] = saved

    def _verify(
        self,
        logits: torch.Tensor,
        draft_logits: torch.Tensor | None,
        draft_sampled: torch.Tensor,
        pos: torch.Tensor,
        cu_num_logits: torch.Tensor,
        idx_mapping: torch.Tensor,
        idx_mapping_np: np.ndarray,
        expanded_idx_mapping: torch.Tensor,
        expanded_local_pos: torch.Tensor,
        seq_lens_upper_bound_np: np.ndarray,
        verify_draft_sampled: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Verify by the plugin's strategy; arguments are those of vLLM's method.

        Returns:
            The processed logits, [num_reqs, K + 1] int64 tokens, and [num_reqs] int32 how many.
        """
        processed = self.sampler.apply_sampling_params(
            logits,
            expanded_idx_mapping,
            idx_mapping,
            idx_mapping_np,
            pos,
            draft_sampled,
            expanded_local_pos,
            seq_lens_upper_bound_np,
        )
        draft_rows = None
        if not uses_draft_distribution(self.sampler._options.verify_strategy):
            draft_logits = None
        elif draft_logits is not None:
            draft_logits, draft_rows = self._draft_rows(draft_logits, expanded_idx_mapping, expanded_local_pos)
        tokens, num_tokens = self.sampler.verify(
            processed,
            cu_num_logits,
            # A draft stands in the row after the one whose logits judge it. The roll puts the next request's token
            # on a bonus row, which has no draft: the kernels ignore it.
            verify_draft_sampled.roll(-1),
            pos,
            idx_mapping,
            idx_mapping_np,
            self.num_speculative_steps + 1,
            draft_logits,
            draft_rows,
            self._accepts_all,
        )
        return self.sampler.logits_to_report(processed, expanded_idx_mapping, idx_mapping_np), tokens, num_tokens

    def _draft_rows(
        self, draft_logits: torch.Tensor, expanded_idx_mapping: torch.Tensor, expanded_local_pos: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[any, vocab] draft logits, and [num_rows] int64 the row of them that each draft was sampled from, or -1."""
        num_slots = draft_logits.shape[1]
        rows = expanded_idx_mapping.long() * num_slots + expanded_local_pos
        num_model: torch.Tensor | int = num_slots
        if self._drafting is not None:
            num_model = self._drafting.num_model[expanded_idx_mapping]
        return draft_logits.flatten(0, 1), torch.where(expanded_local_pos < num_model, rows, -1)
