#!/usr/bin/env bash
# Installs, trains the tiny model (the first time) and compares the ways of drafting on it. Arguments go to
# examples/demo.py.
cd "$(dirname "$0")/.."
source ci/setup.sh
export HF_HUB_OFFLINE=1 VLLM_CPU_CI_ENV=1
# The model is tiny: a second thread brings it nothing, and waiting for one on a busy machine takes ten times as long.
export OMP_NUM_THREADS=1

model=${XDG_CACHE_HOME:-$HOME/.cache}/vllm-specplus/demo-model
python -m vllm_specplus.testing.tiny_model "$model" --kind trained
python examples/demo.py "$model" "$@"
