"""Suffix trees forget past answers between runs."""

from arctic_inference.suffix_decoding import SuffixDecodingCache

from vllm_specplus.compare.past_answers import forget_past_answers


def test_past_answers_are_forgotten() -> None:
    cache = SuffixDecodingCache(max_tree_depth=8, max_cached_requests=4)
    for name in ("ended", "last"):  # the last request of a run stays active until the next one begins
        cache.start_request(name, [1, 2])
        cache.add_active_response(name, [3, 4, 5, 6])
    cache.stop_request("ended")
    cache.start_request("new", [3, 4])
    assert cache.speculate("new", [3, 4], max_spec_tokens=1).token_ids == [5]
    forget_past_answers(None)
    assert cache.speculate("new", [3, 4], max_spec_tokens=1).token_ids == []
    cache.stop_request("last")
    assert not [*cache.cached_requests]
