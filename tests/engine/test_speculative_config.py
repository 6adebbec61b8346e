"""The errors of the config that vLLM runs with, where `vllm-specplus check` cannot foresee a refusal."""

from dataclasses import replace
from typing import Any

import pytest

from vllm_specplus.config import SpecPlusConfigError, resolve
from vllm_specplus.engine.speculative_config import SpecPlusSpeculativeConfig


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"draft_load_config": {"nope": 1}}, "nope=1 in draft_load_config is not allowed: Unexpected keyword argument"),
        ({"num_speculative_tokens": -4}, "num_speculative_tokens=-4 is not allowed: Input should be greater than 0"),
        # vLLM itself names these.
        ({"prompt_lookup_min": 5, "prompt_lookup_max": 3}, "prompt_lookup_min=5 must be <= prompt_lookup_max=3"),
    ],
)
def test_a_refusal_of_vllm_names_key_and_value(keys: dict[str, Any], said: str) -> None:
    resolved = resolve({"method": "mtp", "num_speculative_tokens": 4, "verify_strategy": "greedy"})
    resolved = replace(resolved, vllm={"method": "ngram", "num_speculative_tokens": 4} | keys)
    with pytest.raises(SpecPlusConfigError) as caught:
        SpecPlusSpeculativeConfig.create(resolved, None, None, on_v2=False)
    assert str(caught.value).startswith("speculative_config: ")
    assert said in str(caught.value)
