#!/usr/bin/env bash
# Installs, trains the tiny model (once) and shows what each way of drafting does to it. Arguments go to examples/demo.py.
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
export HF_HUB_OFFLINE=1 VLLM_CPU_CI_ENV=1

model=${XDG_CACHE_HOME:-$HOME/.cache}/vllm-specplus/demo-model
python -m vllm_specplus.testing.tiny_model "$model" --kind trained
python examples/demo.py "$model" "$@"
