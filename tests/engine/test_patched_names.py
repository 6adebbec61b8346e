"""Names of vLLM that are patched where plugin keys are used, and nowhere else (docs/design.md, Rules)."""

import json
import subprocess
import sys

import pytest

from vllm_specplus.testing.tiny_model import make_random

STOCK = {"method": "mtp", "num_speculative_tokens": 1}
HYBRID = STOCK | {"num_speculative_tokens": 4, "mtp_strategy": "with_ngram"}

# Prints, for no config and then for each one, which of the names are the plugin's.
CODE = """
import json, sys
import vllm_specplus
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine.output_processor import OutputProcessor

NAMES = {
    EngineArgs: ["create_speculative_config"],
    SamplingParams: ["__repr__"],
    SchedulerOutput: ["anon_repr"],
    ChatCompletionRequest: ["to_sampling_params"],
    CompletionRequest: ["to_sampling_params"],
    OutputProcessor: ["add_request", "process_outputs"],
}
vllm_specplus.register()
original = {(owner, name): getattr(owner, name, None) for owner, names in NAMES.items() for name in names}
assert hasattr(EngineArgs.create_speculative_config, "specplus_original")
# The name by which vLLM's command is known.
sys.argv[0] = "vllm"
patched = []
for config in (None, *json.loads(sys.argv[2])):
    EngineArgs(model=sys.argv[1], speculative_config=config, max_model_len=64).create_engine_config()
    now = [owner.__name__ for (owner, name), before in original.items() if getattr(owner, name, None) is not before]
    patched.append(now)
print("PATCHED", json.dumps(patched))
"""


def test_a_stock_config_leaves_them(tmp_path_factory: pytest.TempPathFactory) -> None:
    model = make_random(tmp_path_factory.mktemp("model"))
    command = [sys.executable, "-c", CODE, str(model), json.dumps([STOCK, HYBRID])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    no_config, stock, hybrid = json.loads(done.stdout.rpartition("PATCHED ")[2])
    assert no_config == stock == []
    assert hybrid == ["SamplingParams", "SchedulerOutput", "ChatCompletionRequest", "CompletionRequest"]
