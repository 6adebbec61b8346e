import subprocess
import sys

SCRIPT = """
import sys
import vllm_specplus
import vllm_specplus.proposers
import vllm_specplus.proposers.reference_text
heavy = {"numba", "torch", "vllm", "arctic_inference"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
vllm_specplus.proposers.NgramMatcher(1, 8, min_ngram_size=1, max_ngram_size=2)
assert "numba" in sys.modules
assert not {"torch", "vllm"} & set(sys.modules)
print("lazy")
"""


VERIFY = """
import sys
import torch
from vllm_specplus.verify import verify_draft_tokens
assert "numba" not in sys.modules
arguments = torch.zeros(1, 8), torch.arange(2), torch.zeros(1, dtype=torch.int64), torch.ones(1)
verify_draft_tokens(*arguments, backend="torch")
assert "numba" not in sys.modules
verify_draft_tokens(*arguments)
assert "numba" in sys.modules
print("lazy")
"""


def test_numba_is_imported_when_it_is_used_and_not_before():
    """numba imported before a vLLM CPU worker has started breaks that worker."""
    for script in (SCRIPT, VERIFY):
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
        assert done.stdout.strip() == "lazy", done.stderr
