"""The arbiter on the device: `proposers/arbiter.py` for drafts and texts that never leave it.

| function | kernel | a program | does |
|---|---|---|---|
| `judge_and_offer` | `_judge_kernel` | takes a request | judges its last offers by the tokens that came |
| | | | counts what became of its drafts |
| | | | writes the draft model's drafts |
| | | ends last | takes the new trials over, forgets old ones, sets the chances |
| `NgramChains.search` | `_search_kernel` | takes a chain, and a share of the text | finds the end of the same n-gram |
| `offer_chains` | `_offer_kernel` | takes a chain of a request | writes what others have found |
| `choose_and_settle` | `_choose_kernel` | takes a request | writes what followed at the ends that were found |
| | | | writes its drafts, and enters what the model's passes have earned |
| | | ends last | says how many passes pay, and reports to the host |

`proposers/_arbiter.py` is the specification. All numbers are integers, and none depends on the order of requests. So
the results are the same bit for bit. `NgramChains` is `NgramMatcher` behind each number of the model's drafts, with
one launch for all numbers. The host reads the report when it has come. Grids depend on shapes and on `longest`
alone. Prices are a tensor, because they change from step to step.
"""

from vllm_specplus.kernels.arbiter.choice import Chosen, choose_and_settle
from vllm_specplus.kernels.arbiter.judgement import judge_and_offer
from vllm_specplus.kernels.arbiter.offers import NgramChains, NgramMatches, offer_chains
from vllm_specplus.kernels.arbiter.state import NUM_TOTALS, State, check_lasting, make_state

__all__ = [
    "NUM_TOTALS",
    "Chosen",
    "NgramChains",
    "NgramMatches",
    "State",
    "check_lasting",
    "choose_and_settle",
    "judge_and_offer",
    "make_state",
    "offer_chains",
]
