"""Engines on Model Runner V2, whose kernels run under Triton's interpreter on a machine with no GPU."""

import os

import pytest
from vllm.v1.sample.ops import topk_topp_sampler

if os.environ.get("TRITON_INTERPRET") != "1" or os.environ.get("VLLM_USE_V2_MODEL_RUNNER") != "1":
    raise pytest.UsageError(
        "tests/e2e/v2 needs TRITON_INTERPRET=1, VLLM_USE_V2_MODEL_RUNNER=1 and tests/triton_cpu on PYTHONPATH, "
        "in a pytest process of its own: bash ci/test.sh tests/e2e/v2"
    )

# The interpreter cannot run vLLM's kernel of top-k and top-p; vLLM has the same in torch.
topk_topp_sampler.HAS_TRITON = False
