import subprocess
import sys

SCRIPT = """
import sys
import vllm_specplus
import vllm_specplus.proposers
heavy = {"numba", "torch", "vllm", "arctic_inference"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
vllm_specplus.proposers.NgramMatcher(1, 8, min_ngram_size=1, max_ngram_size=2)
assert "numba" in sys.modules
assert not {"torch", "vllm"} & set(sys.modules)
print("lazy")
"""


def test_numba_is_imported_when_a_matcher_is_made_and_not_before():
    """numba imported before a vLLM CPU worker has started breaks that worker."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert done.stdout.strip() == "lazy", done.stderr
