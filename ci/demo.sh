#!/usr/bin/env bash
# Installs, trains the tiny model (the first time) and compares the ways of drafting on it. Arguments go to
# examples/demo.py.
cd "$(dirname "$0")/.."
source ci/setup.sh
export HF_HUB_OFFLINE=1 VLLM_CPU_CI_ENV=1
# The model is too tiny to gain from a second thread, and on a busy machine waiting for one takes ten times as long.
export OMP_NUM_THREADS=1

model=${XDG_CACHE_HOME:-$HOME/.cache}/vllm-specplus/demo-model
python -m vllm_specplus.testing.tiny_model "$model" --kind trained --quiet
python examples/demo.py "$model" --logs .venv/demo-logs "$@"
