"""Verification on vLLM's Model Runner V2: vLLM's samplers, with another way of choosing tokens.

Penalties, bias, bad words, grammars, chunking and logprobs stay vLLM's. Only the step from logits to tokens is
replaced; its kernels also apply temperature, top-k, top-p and min-p.
"""

from dataclasses import replace
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
from vllm_specplus.kernels.inputs import Batch, Parameters, SampledDrafts, gather_inputs
from vllm_specplus.kernels.sizes import next_power_of_2
from vllm_specplus.kernels.verify import Workspace, verify
from vllm_specplus.runners.live_requests import LiveRequests
from vllm_specplus.runners.v2.drafting import Drafting
from vllm_specplus.runners.v2.host_tokens import copy_to_device
from vllm_specplus.strategies import uses_draft_distribution
from vllm_specplus.verify.types import VerifyInputs


class _UnappliedStates(SamplingStates):
    """Keeps vLLM's sampling parameters, but leaves it to the plugin's kernels to apply them to the logits."""

    def __init__(self, max_num_reqs: int, vocab_size: int) -> None:
        super().__init__(max_num_reqs, vocab_size)
        # [max_num_reqs], on the host.
        self.is_filtered = np.zeros(max_num_reqs, bool)

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        """Note a request's parameters; False tells vLLM that the logits need no processing for them."""
        super().add_request(req_idx, sampling_params)
        filters = ((self.top_p, 1.0), (self.top_k, self.vocab_size), (self.min_p, 0.0))
        self.is_filtered[req_idx] = any(values.np[req_idx] != off for values, off in filters)
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
        self._scratch: Workspace | None = None

    def verify(
        self,
        logits: torch.Tensor,
        batch: Batch,
        positions: torch.Tensor,
        idx_mapping_np: np.ndarray,
        max_rows: int,
        draft_logits: torch.Tensor | None = None,
        sampled_drafts: SampledDrafts | None = None,
        accepts_all: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Verify one batch.

        Args:
            logits: [num_rows, vocab] float, processed except for temperature, top-k, top-p and min-p.
            batch: the requests, on the device.
            positions: [num_rows] int64, of the token that was fed in to get each row.
            idx_mapping_np: [num_reqs] request states, on the host.
            max_rows: rows of the longest request that may come.
            draft_logits: [max_num_reqs * slots, vocab] float, which the drafts were sampled from; None: from none.
            sampled_drafts: which drafts were; with `draft_logits` alone.
            accepts_all: [max_num_reqs] bool, the request states whose drafts are all accepted; None: there is none.

        Returns:
            [num_reqs, max_rows] int64 tokens, -1 after each request's last, and [num_reqs] int32 how many.
        """
        states, options = self.sampling_states, self._options
        assert options.verify_strategy is not None

        # All filters or none, so that the kernels are compiled twice and not for every combination.
        filtered = states.is_filtered[idx_mapping_np].any()
        strategy, window, max_candidates = options.verify_strategy, options.verify_window, options.max_candidate_len
        if not states.temperature.np[idx_mapping_np].any():
            # All strategies are one, and this one takes two kernels. It has no use for filters and probabilities.
            strategy, window, max_candidates = "greedy", 0, None
            filtered, draft_logits, sampled_drafts = False, None, None
        parameters = Parameters(states.temperature.gpu, states.seeds.gpu)
        if filtered:
            parameters = parameters._replace(top_p=states.top_p.gpu, top_k=states.top_k.gpu, min_p=states.min_p.gpu)
        num_rows = logits.shape[0]
        gathered = gather_inputs(parameters, batch, num_rows, sampled_drafts)
        # As `verify_draft_tokens` makes them of arguments that it has to check.
        inputs = VerifyInputs(
            logits=logits,
            cu_num_rows=gathered.cu_num_rows,
            draft_token_ids=gathered.draft_token_ids,
            **gathered.parameters._asdict(),
            positions=positions,
            strategy=strategy,
            policy=options.accept_policy,
            verify_window=min(window, max_rows),
            max_candidate_len=None if max_candidates is None else min(max_candidates, states.vocab_size),
            max_rows=max_rows,
            draft_logits=draft_logits,
            draft_rows=gathered.draft_rows,
        )
        workspace = self._workspace(inputs)
        sampled = verify(inputs, workspace)
        if accepts_all is None:
            return sampled.token_ids, sampled.num_tokens
        forced = verify(replace(inputs, policy="accept_all"), workspace.with_outputs(inputs.num_reqs, max_rows))
        is_forced = accepts_all[batch.idx_mapping]
        token_ids = torch.where(is_forced[:, None], forced.token_ids, sampled.token_ids)
        return token_ids, torch.where(is_forced, forced.num_tokens, sampled.num_tokens)

    def _workspace(self, inputs: VerifyInputs) -> Workspace:
        """Return scratch that is kept from step to step, with new outputs: vLLM still copies those of the last step."""
        if self._scratch is None or len(self._scratch.stats) < inputs.num_rows:
            most = next_power_of_2(inputs.num_rows)
            self._scratch = Workspace.allocate(most, most, inputs.vocab_size, 1, inputs.logits.device)
        return self._scratch.with_outputs(inputs.num_reqs, inputs.max_rows)

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
        tokens, _ = self.verify(processed, Batch(expanded_idx_mapping), pos, idx_mapping_np, 1)
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
                if chosen is not None:
                    by_state = np.zeros_like(self.sampler.sampling_states.temperature.np, dtype=bool)
                    by_state[input_batch.idx_mapping_np] = chosen
                    self._accepts_all = copy_to_device(by_state, logits.device)
        return super().__call__(logits, input_batch, draft_logits, invalid_drafts)

    def warm_up(self, dtype: torch.dtype, device: torch.device, draft_logits: torch.Tensor | None) -> None:
        """Compile the kernels: at temperature 0 and above, with filters and without, with drafts and without.

        Args:
            dtype: of the model's logits. vLLM makes float32 of them where a request has penalties, a bias or bad words.
            device: of the runner.
            draft_logits: [max_num_reqs, K, vocab], from which this engine's drafts are sampled, or None.
        """
        states = self.sampler.sampling_states
        # Of vLLM's types.
        at, numbers = (torch.zeros(2, dtype=dtype_of, device=device) for dtype_of in (torch.int64, torch.int32))
        # The kernels are compiled for the distance between rows. vLLM pads the model's logits and cuts them to size;
        # those that it makes of them have no padding.
        padded = pad_vocab_size(states.vocab_size)
        drafts: dict[str, Any] = {"max_rows": self.num_speculative_steps + 1}
        if draft_logits is not None and uses_draft_distribution(self.sampler._options.verify_strategy):
            drafts |= self._sampled_from(draft_logits, at, numbers)
        if self.sampler._options.allow_force_accept:
            drafts["accepts_all"] = torch.zeros(len(states.temperature.np), dtype=torch.bool, device=device)
        saved = states.temperature.np[0], states.is_filtered[0]
        for logits_dtype, stride in {(dtype, padded), (torch.float32, states.vocab_size)}:
            logits = torch.zeros(2, stride, dtype=logits_dtype, device=device)[:, : states.vocab_size]
            for temperature, is_filtered in ((0.0, False), (1.0, False), (1.0, True)):
                states.temperature.np[0], states.is_filtered[0] = temperature, is_filtered
                for num_rows, batch, options in (
                    (1, Batch(at[:1]), {"max_rows": 1}),
                    (2, Batch(at[:1], torch.tensor([0, 2], dtype=torch.int32, device=device), numbers), drafts),
                ):
                    self.sampler.verify(logits[:num_rows], batch, at[:num_rows], np.zeros(1, np.int64), **options)
        states.temperature.np[0], states.is_filtered[0] = saved

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
        sampled_from: dict[str, Any] = {}
        if draft_logits is not None and uses_draft_distribution(self.sampler._options.verify_strategy):
            sampled_from = self._sampled_from(draft_logits, expanded_idx_mapping, expanded_local_pos)
        tokens, num_tokens = self.sampler.verify(
            processed,
            Batch(idx_mapping, cu_num_logits, verify_draft_sampled),
            pos,
            idx_mapping_np,
            self.num_speculative_steps + 1,
            accepts_all=self._accepts_all,
            **sampled_from,
        )
        return self.sampler.logits_to_report(processed, expanded_idx_mapping, idx_mapping_np), tokens, num_tokens

    def _sampled_from(self, draft_logits: torch.Tensor, states: torch.Tensor, slots: torch.Tensor) -> dict[str, Any]:
        """What drafts were sampled from, as arguments of `StrategySampler.verify`."""
        num_model = None if self._drafting is None else self._drafting.num_model
        sampled_drafts = SampledDrafts(states, slots, num_model, draft_logits.shape[1])
        return {"draft_logits": draft_logits.flatten(0, 1), "sampled_drafts": sampled_drafts}
