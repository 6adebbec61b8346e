#!/usr/bin/env bash
# All that a GPU has to tell, in one command of under nine minutes. The machine with the GPU needs Python 3.12, torch,
# Triton, transformers, pytest, hypothesis, rich and matplotlib, but neither vLLM nor a network. Suffix trees are built
# there, for which it needs nanobind, CMake, ninja and a C++ compiler. Without them what drafts by trees fails.
#
#   bash ci/gpu.sh --pack DIR       where there is a network: gathers in DIR what the other machine lacks, at most 60 MiB
#   bash ci/gpu.sh OUT --with DIR   on the other machine: runs all stages, and writes their results to OUT
#   bash ci/gpu.sh OUT --dry        without a GPU: runs the stages through, tiny and under Triton's interpreter
#
# `--stages A,B` picks some of: kernels, drafting, verify, step, engine. `--static FILE` beside `--pack` takes along what
# benchmarks/static_cost.py --json has written, to stand beside the measured times.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
[[ -x $root/.venv/bin/python ]] && export PATH="$root/.venv/bin:$PATH"
PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" exec python3 "$root/ci/gpu" "$@"
