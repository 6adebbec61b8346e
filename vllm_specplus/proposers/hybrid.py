"""Joins a draft model's tokens with tokens copied from history."""

from dataclasses import dataclass

import numpy as np

from vllm_specplus.proposers.history import History, Matcher


@dataclass(frozen=True)
class Drafts:
    """The drafts of one step.

    Attributes:
        token_ids: [B] lists of token ids, of different lengths.
        num_model: [B] int, how many leading drafts of each request are the draft model's; the others are the
            matcher's.
    """

    token_ids: list[list[int]]
    num_model: np.ndarray


class HybridDrafter:
    """Fills a request's slots from a draft model and a matcher.

    Append (FastDeploy's `with_ngram`): the model's drafts come first. The slots after them get the tokens that followed
    the tail of (prompt + output + model drafts) earlier. The tail ends with the model's drafts, so the match continues
    them and does not start again.
    Override (TensorRT-LLM's `sa_config` threshold): if the history alone matches at least `match_override_len` tokens,
    the model's drafts are dropped. The tokens that followed there fill all slots.
    Nothing matches: a request has only the model's drafts, so the lists vary in length.

    Args:
        matcher: the source of the history's drafts.
        num_model_steps: S, drafts that the model makes for each request, >= 1.
        num_speculative_tokens: K, the slots of a request, >= num_model_steps.
        match_override_len: the shortest match that overrides, in tokens; 0 = never.

    Raises:
        ValueError: a size out of range, or a threshold that the matcher can never report.
    """

    def __init__(
        self,
        matcher: Matcher,
        *,
        num_model_steps: int,
        num_speculative_tokens: int,
        match_override_len: int = 0,
    ) -> None:
        if not 1 <= num_model_steps <= num_speculative_tokens:
            raise ValueError(
                f"num_model_steps={num_model_steps} must lie between 1 and "
                f"num_speculative_tokens={num_speculative_tokens}"
            )
        if match_override_len < 0:
            raise ValueError(f"match_override_len={match_override_len} must be 0 (off) or more")
        if match_override_len > matcher.match_len_cap:
            raise ValueError(
                f"match_override_len={match_override_len} is never reached: {type(matcher).__name__} reports matches "
                f"of at most {matcher.match_len_cap} tokens"
            )
        self.matcher = matcher
        self.num_model_steps = num_model_steps
        self.num_speculative_tokens = num_speculative_tokens
        self.match_override_len = match_override_len

    def draft(self, history: History, model_drafts: np.ndarray, max_drafts: np.ndarray) -> Drafts:
        """Fill the slots of each request.

        Args:
            history: the batch of B requests.
            model_drafts: [B, S] int, the draft model's tokens.
            max_drafts: [B] int >= 0, the most drafts of each request.

        Raises:
            ValueError: `model_drafts` has another shape.
        """
        num_steps = self.num_model_steps
        if model_drafts.shape != (len(history.req_ids), num_steps):
            raise ValueError(
                f"model_drafts has shape {model_drafts.shape}, expected ({len(history.req_ids)}, {num_steps})"
            )
        limits = np.minimum(max_drafts, self.num_speculative_tokens)
        num_model = np.minimum(limits, num_steps).astype(np.int32)
        free_slots = np.maximum(limits - num_steps, 0)

        if self.match_override_len:
            alone = self.matcher.match(history, None, limits)
            overridden = (alone.num_tokens > 0) & (alone.match_len >= self.match_override_len)
            num_model[overridden] = 0
            free_slots[overridden] = 0

        appended = self.matcher.match(history, model_drafts, free_slots)
        token_ids = [
            drafts[:count] + more
            for drafts, count, more in zip(model_drafts.tolist(), num_model.tolist(), appended.to_lists(), strict=True)
        ]
        if self.match_override_len:
            copied = alone.to_lists()
            for i in np.flatnonzero(overridden).tolist():
                token_ids[i] = copied[i]
        return Drafts(token_ids, num_model)
