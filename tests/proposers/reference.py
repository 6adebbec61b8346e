"""The n-gram lookup as its definition reads, and helpers to call matchers from lists."""

from collections.abc import Sequence

import numpy as np

from vllm_specplus.proposers import History


def slow_match(
    tokens: Sequence[int], min_size: int, max_size: int, match_len_cap: int, max_drafts: int, order: str = "recent"
) -> tuple[list[int], int]:
    """Drafts and match length for one sequence (history and model drafts); ([], 0) = no match."""
    tokens, end = list(tokens), len(tokens)
    if max_drafts == 0:
        return [], 0
    for size in range(min(max_size, end), min_size - 1, -1):
        places = range(size, end)
        for earlier in places if order == "first" else reversed(places):
            if tokens[earlier - size : earlier] == tokens[end - size :]:
                text = list(tokens)
                for k in range(max_drafts):
                    text.append(text[earlier + k])
                length = size
                while length < min(match_len_cap, earlier) and (
                    tokens[earlier - 1 - length] == tokens[end - 1 - length]
                ):
                    length += 1
                return text[end:], length
    return [], 0


def make_history(
    requests: dict[str, Sequence[int]], max_model_len: int, num_prompt_tokens: int | None = None
) -> History:
    """A batch of the requests in the order of the dict; unused cells hold a token of no request."""
    token_ids = np.full((len(requests) + 1, max_model_len), -7, np.int32)
    num_tokens = np.array([len(tokens) for tokens in requests.values()], np.int32)
    for row, tokens in zip(token_ids, requests.values(), strict=False):
        row[: len(tokens)] = tokens
    prompts = num_tokens if num_prompt_tokens is None else np.full_like(num_tokens, num_prompt_tokens)
    return History(list(requests), token_ids, num_tokens, np.minimum(prompts, num_tokens))
