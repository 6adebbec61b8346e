"""Verification on vLLM's V1 model runner: vLLM's samplers, with another way of choosing tokens.

Penalties, bad words, masks and logprobs stay vLLM's. Only the step from processed logits to tokens is replaced.
"""

import functools
from dataclasses import replace
from typing import Any

import torch
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.logits_processor import LogitBiasLogitsProcessor, LogitsProcessors, MinTokensLogitsProcessor
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.sample.sampler import Sampler

from vllm_specplus.config import SpecPlusOptions
from vllm_specplus.runners.live_requests import LiveRequests
from vllm_specplus.strategies import uses_draft_distribution
from vllm_specplus.verify import numba_backend, verify_draft_tokens

# On a CPU vLLM's sampler takes longer with as many logits, but not with fewer: 375 µs and 122 with one row of 49,152.
_MANY_LOGITS = 1 << 14


class _SeedHolder(torch.Generator):
    """A CPU generator that holds a request's seed and never draws.

    vLLM takes a step of every generator back whose request is still in its prompt, and a CPU generator cannot do that.
    """

    def get_offset(self) -> int:
        """0: nothing is drawn."""
        return 0

    def set_offset(self, offset: int) -> None:
        """Do nothing."""


class _Rewind:
    """Takes a CPU generator back to where it stands now; vLLM does so as with `_SeedHolder`."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator
        self._state = generator.get_state()

    def get_offset(self) -> int:
        """0: a CPU generator has none."""
        return 0

    def set_offset(self, offset: int) -> None:
        """Go back."""
        self.generator.set_state(self._state)


class RewindingSampler(Sampler):
    """vLLM's own sampler, which also takes seeded requests whose prompts come in chunks on a CPU."""

    def sample(
        self, logits: torch.Tensor, sampling_metadata: Any, logprobs_mode_override: Any = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Sample as vLLM does; arguments and result are those of vLLM's method."""
        if logits.device.type == "cpu" and sampling_metadata.generators:
            # By request; vLLM keeps the requests' own generators elsewhere too.
            kept = sampling_metadata.generators
            own = {i: g.generator if isinstance(g, _Rewind) else g for i, g in kept.items()}
            kept.update({i: _Rewind(generator) for i, generator in own.items()})
            sampling_metadata = replace(sampling_metadata, generators=own)
        return super().sample(logits, sampling_metadata, logprobs_mode_override)


class _Verifier:
    """Calls ``verify_draft_tokens`` with the arguments that vLLM's V1 runner has for the batch."""

    def __init__(self, runner: Any):
        options: SpecPlusOptions = runner.speculative_config.specplus
        assert options.verify_strategy is not None
        self._runner = runner
        self._strategy = options.verify_strategy
        self._policy = options.accept_policy
        self._verify_window = options.verify_window
        self._max_candidate_len = options.max_candidate_len
        self.live_requests: LiveRequests | None = None
        if runner.device.type == "cpu":
            numba_backend.prepare()

    @property
    def never_samples(self) -> bool:
        """Whether the strategy takes the likeliest token at any temperature."""
        return self._strategy == "greedy"

    def __call__(
        self,
        logits: torch.Tensor,
        cu_num_rows: torch.Tensor,
        drafts: torch.Tensor,
        logits_indices: torch.Tensor,
        max_rows: int,
        metadata: Any,
        draft_probs: torch.Tensor | None = None,
        *,
        is_plain: bool = False,
    ) -> torch.Tensor:
        """Verify one batch.

        Args:
            logits: [num_rows, vocab] float32, processed, before temperature.
            cu_num_rows: [num_reqs + 1] int32.
            drafts: [num_rows] int64, -1 on bonus rows.
            logits_indices: [num_rows] int, the place of each row's token in the batch of this step.
            max_rows: rows of the longest request.
            metadata: vLLM's sampling metadata.
            draft_probs: [num_rows, vocab] float32, the distributions that the drafts were sampled from; None if they
                were not sampled.
            is_plain: sample from the target's nucleus, whatever the strategy and the policy; no row has a draft.

        Returns:
            [num_reqs, max_rows] int64 tokens, -1 after each request's last.
        """
        num_reqs = cu_num_rows.shape[0] - 1
        temperature = metadata.temperature
        seeds = positions = draft_logits = None
        if metadata.all_greedy or temperature is None:
            temperature = torch.zeros(num_reqs, device=logits.device)
        else:
            seeds = self._seeds(metadata.generators, num_reqs, logits.device)
            positions = self._runner._get_positions(logits_indices)
            # M-RoPE has three positions a token; the first is the one in time.
            positions = (positions[0] if positions.dim() == 2 else positions).long()
        if draft_probs is not None and uses_draft_distribution(self._strategy):
            # Logits that give these probabilities once they are divided by the temperature.
            requests = torch.arange(num_reqs, device=logits.device)
            requests = requests.repeat_interleave(cu_num_rows.diff(), output_size=logits.shape[0])
            draft_logits = draft_probs.log() * temperature[requests, None]
        verify = functools.partial(
            verify_draft_tokens,
            logits,
            cu_num_rows,
            drafts,
            temperature,
            top_p=metadata.top_p,
            top_k=metadata.top_k,
            seeds=seeds,
            positions=positions,
            max_rows=max_rows,
        )
        if is_plain:
            return verify(strategy="target_match").token_ids
        verify = functools.partial(
            verify,
            strategy=self._strategy,
            verify_window=self._verify_window,
            max_candidate_len=self._max_candidate_len,
            draft_logits=draft_logits,
        )
        tokens = verify(policy=self._policy).token_ids
        if self.live_requests is None:
            return tokens
        accepts_all = None
        with self.live_requests.faults.caught("requests"):
            accepts_all = self.live_requests.accept_all_mask(self._runner.input_batch.req_ids[:num_reqs])
        if accepts_all is None:
            return tokens
        chosen = torch.from_numpy(accepts_all).to(tokens.device)
        return torch.where(chosen[:, None], verify(policy="accept_all").token_ids, tokens)

    @staticmethod
    def _seeds(generators: dict[int, torch.Generator], num_reqs: int, device: torch.device) -> torch.Tensor:
        """[num_reqs] int64: a request's own seed if it has one, else a new one in each step.

        `generators` are vLLM's, by request; on a CPU they are replaced.
        """
        seeds = torch.randint(2**62, (num_reqs,), device=device)
        for i, generator in generators.items():
            if device.type == "cpu" and not isinstance(generator, _SeedHolder):
                generators[i] = _SeedHolder().manual_seed(generator.initial_seed())
        own_seeds = {i: g.initial_seed() for i, g in generators.items() if i < num_reqs}
        if own_seeds:
            index = torch.tensor(list(own_seeds), device=device)
            # torch's seeds are unsigned 64-bit numbers; the tensor's are signed.
            values = [s - (s >> 63 << 64) for s in own_seeds.values()]
            seeds[index] = torch.tensor(values, device=device)
        return seeds


class StrategySampler(Sampler):
    """Samples rows that have no draft: a request with a seed by the strategy's noise, as where it has drafts."""

    def set_runner(self, runner: Any) -> None:
        """Set the runner whose batches are sampled."""
        self._runner = runner
        self._verifier = _Verifier(runner)

    def sample(
        self, logits: torch.Tensor, sampling_metadata: Any, logprobs_mode_override: Any = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Sample by the plugin's strategy; arguments are those of vLLM's method.

        Returns:
            [num_reqs] int64 tokens, and processed logprobs where the engine's mode asks for them.
        """
        wants_logprobs = sampling_metadata.max_num_logprobs is not None or bool(sampling_metadata.logprob_token_ids)
        has_strategy = self._verifier.never_samples or bool(sampling_metadata.generators)
        # Rows without a draft and a seed are samples of the target's nucleus, which the plugin may find faster.
        is_faster = logits.device.type == "cpu" and logits.numel() >= _MANY_LOGITS and not wants_logprobs
        is_faster &= not getattr(self, "use_fp64_gumbel", False)
        if sampling_metadata.all_greedy or not (has_strategy or is_faster):
            return super().sample(logits, sampling_metadata, logprobs_mode_override)
        num_reqs = logits.shape[0]
        rows = torch.arange(num_reqs + 1, dtype=torch.int32, device=logits.device)
        starts = self._runner.query_start_loc.gpu[: num_reqs + 1]
        tokens = self._verifier(
            logits,
            rows,
            torch.full((num_reqs,), -1, dtype=torch.int64, device=logits.device),
            starts[1:].long() - 1,
            1,
            sampling_metadata,
            is_plain=not has_strategy,
        )
        processed = None
        if wants_logprobs:
            _, processed = super().sample(logits, sampling_metadata, logprobs_mode_override)
        return tokens[:, 0], processed


class StrategyRejectionSampler(RejectionSampler):
    """Verifies drafts by the plugin's strategy and policy."""

    def set_live_requests(self, live_requests: LiveRequests) -> None:
        """Set what knows the requests whose drafts are all accepted."""
        self._verifier.live_requests = live_requests

    def set_runner(self, runner: Any) -> None:
        """Set the runner whose batches are sampled."""
        self._runner = runner
        self._verifier = _Verifier(runner)

    def forward(
        self,
        metadata: Any,
        draft_probs: torch.Tensor | None,
        logits: torch.Tensor,
        sampling_metadata: Any,
    ) -> SamplerOutput:
        """Verify by the plugin's strategy; arguments and result are those of vLLM's method.

        Only strategy `rejection` uses ``draft_probs``; the others take drafts as one-hot.
        """
        if not any(metadata.num_draft_tokens):
            # All rows are bonus rows; where a step has drafts, vLLM has the sampler process such rows too.
            return self.sampler(logits, sampling_metadata, predict_bonus_token=True)
        draft_rows, bonus_rows = metadata.target_logits_indices, metadata.bonus_logits_indices
        wants_logprobs = sampling_metadata.max_num_logprobs is not None
        num_rows = [count + 1 for count in metadata.num_draft_tokens]
        if _are_processors_idle(sampling_metadata):
            # vLLM scales its argument where it gives processed logprobs.
            processed = logits if sampling_metadata.all_greedy else logits.to(torch.float32, copy=wants_logprobs)
        else:
            processed = self._processed(logits, metadata, sampling_metadata, num_rows)
        drafts = torch.full((logits.shape[0],), -1, dtype=torch.int64, device=logits.device)
        if not self._runner.specplus_is_padding:
            drafts[draft_rows] = metadata.draft_token_ids.long()
        cu_num_rows = torch.nn.functional.pad(metadata.cu_num_sampled_tokens, (1, 0))
        row_probs = None
        if draft_probs is not None:
            row_probs = torch.ones_like(processed)
            row_probs[draft_rows] = draft_probs
        tokens = self._verifier(
            processed,
            cu_num_rows,
            drafts,
            metadata.logits_indices,
            metadata.max_spec_len + 1,
            sampling_metadata,
            row_probs,
        ).to(torch.int32)

        if not wants_logprobs:
            return SamplerOutput(sampled_token_ids=tokens, logprobs_tensors=None)
        if self.is_processed_logprobs_mode:
            processed = self._constrained(processed, num_rows, sampling_metadata)
        raw = processed if self.is_processed_logprobs_mode else logits
        raw_target, raw_bonus = (raw[rows].to(torch.float32) for rows in (draft_rows, bonus_rows))
        logprobs = self._get_logprobs_tensors(
            sampling_metadata.max_num_logprobs, metadata, logits, raw_target, raw_bonus, tokens
        )
        return SamplerOutput(sampled_token_ids=tokens, logprobs_tensors=logprobs)

    def _processed(
        self, logits: torch.Tensor, metadata: Any, sampling_metadata: Any, num_rows: list[int]
    ) -> torch.Tensor:
        """[num_rows, vocab] float32: all rows as vLLM's processors leave them, which change their argument."""
        draft_rows, bonus_rows = metadata.target_logits_indices, metadata.bonus_logits_indices
        is_single = len(num_rows) == 1
        if is_single:
            # Logprobs may be of the raw logits.
            processed = logits.to(torch.float32, copy=sampling_metadata.max_num_logprobs is not None)
            target, bonus = processed[:-1], processed[-1:]
        else:
            target = logits.index_select(0, draft_rows).to(torch.float32)
            bonus = logits.index_select(0, bonus_rows).to(torch.float32)
        without_min_tokens, min_tokens = _part_min_tokens(sampling_metadata)
        bonus = self.sampler.apply_logits_processors(bonus, without_min_tokens, predict_bonus_token=True)
        target = self.apply_logits_processors(target, sampling_metadata, metadata)
        if not is_single:
            processed = torch.empty_like(logits, dtype=torch.float32)
            processed.index_copy_(0, draft_rows.long(), target)
            processed.index_copy_(0, bonus_rows.long(), bonus)
        elif target.data_ptr() != processed.data_ptr() or bonus.data_ptr() != processed[-1:].data_ptr():
            processed = torch.cat((target, bonus))
        for processor in min_tokens:
            processed = processor.apply_with_spec_decode(processed, num_rows)
        return processed

    def _constrained(self, logits: torch.Tensor, num_rows: list[int], sampling_metadata: Any) -> torch.Tensor:
        """[num_rows, vocab] float32: all rows as vLLM's own sampler would have sampled from them.

        vLLM's ``apply_sampling_constraints`` is avoided: on a CPU it reads parameters that nothing wrote.
        """
        if sampling_metadata.all_greedy:
            return logits
        requests = torch.arange(len(num_rows)).repeat_interleave(torch.tensor(num_rows)).to(logits.device)
        temperature, top_k, top_p = (
            None if value is None else value[requests]
            for value in (sampling_metadata.temperature, sampling_metadata.top_k, sampling_metadata.top_p)
        )
        scaled = self.sampler.apply_temperature(logits, temperature, sampling_metadata.all_random)
        return apply_top_k_top_p(scaled, top_k, top_p)


def _are_processors_idle(sampling_metadata: Any) -> bool:
    """Whether all of vLLM's processors would leave the batch's logits as they are."""
    holder = sampling_metadata.thinking_budget_state_holder
    return (
        sampling_metadata.no_penalties
        and sampling_metadata.allowed_token_ids_mask is None
        and not sampling_metadata.bad_words_token_ids
        and all(_is_idle(processor) for processor in sampling_metadata.logitsprocs.non_argmax_invariant)
        and (holder is None or not holder.has_tracked_requests())
    )


def _is_idle(processor: Any) -> bool:
    """Whether a processor has nothing to do; one of another kind than vLLM's own counts as busy."""
    if isinstance(processor, MinTokensLogitsProcessor):
        return not processor.min_toks
    return isinstance(processor, LogitBiasLogitsProcessor) and not processor.biases


def _part_min_tokens(sampling_metadata: Any) -> tuple[Any, list[MinTokensLogitsProcessor]]:
    """Part the processors that act for `min_tokens` from the sampling metadata.

    vLLM lets them judge a bonus row by the length at which the step began. The drafts before it count too.
    """
    processors = list(sampling_metadata.logitsprocs.all)
    min_tokens = [p for p in processors if isinstance(p, MinTokensLogitsProcessor) and p.min_toks]
    if not min_tokens:
        return sampling_metadata, []
    others = [p for p in processors if p not in min_tokens]
    return replace(sampling_metadata, logitsprocs=LogitsProcessors(others)), min_tokens
