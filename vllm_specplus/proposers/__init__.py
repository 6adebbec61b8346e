"""Drafting from token history: token ids in, drafts out. Imports neither vLLM nor torch.

| module | what it holds |
|---|---|
| `history` | `History`, `Match`, `Matcher`: what goes in, what comes out, and the protocol between |
| `ngram` | `NgramMatcher`: the request's own text, through an incremental index |
| `suffix` | `SuffixMatcher`: the request's own text and past responses, through arctic-inference |
| `hybrid` | `HybridDrafter`: a draft model's tokens joined with a matcher's |
"""

from vllm_specplus.proposers.history import History, Match, Matcher
from vllm_specplus.proposers.hybrid import Drafts, HybridDrafter
from vllm_specplus.proposers.ngram import NgramMatcher
from vllm_specplus.proposers.suffix import SuffixMatcher

__all__ = [
    "Drafts",
    "History",
    "HybridDrafter",
    "Match",
    "Matcher",
    "NgramMatcher",
    "SuffixMatcher",
]
