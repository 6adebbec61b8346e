"""Drafting from token history: token ids in, drafts out. Imports neither vLLM nor torch.

| module | what it holds |
|---|---|
| `history` | `History`, `Match`, `Matcher`: the arguments, the results, and the protocol of matchers |
| `ngram` | `NgramMatcher`: the request's own text, through an incremental index |
| `suffix` | `SuffixMatcher`: the request's own text and past responses, through arctic-inference |
| `hybrid` | `HybridDrafter`: a draft model's tokens joined with a matcher's by a fixed rule |
| `arbiter` | `Arbiter`: chooses among all sources what earns most, and how many passes the draft model makes |
| `adaptive` | `AdaptiveDrafter`: asks the sources in each step, and the arbiter |
| `costs` | `CostMeter`, `Pace`: what slots and passes cost, in the tokens that their time would bring |
| `draft_widths` | how many slots a step gets where each slot is verified, filled or not |
| `reference_text` | `ReferenceText`: text that a request's output is expected to resemble |
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
