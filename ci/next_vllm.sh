#!/usr/bin/env bash
# Tells what a release of vLLM changes for this plugin, on one page: bash ci/next_vllm.sh [--test] [VERSION]. Without
# VERSION it is the newest release of the package index. Only that release's Python files are read. With --test the suite
# runs on them after that: for a nightly schedule, such as cron's. The exit code is 1 if the plugin cannot run on it, or
# a test fails.
cd "$(dirname "$0")/.."
source ci/setup.sh

runs_tests= code=0
if [[ ${1:-} == --test ]]; then
  runs_tests=1
  shift
fi
version=${1:-}
if [[ -z $version ]]; then
  version=$(
    python -m pip --disable-pip-version-check index versions vllm 2>>"$log" | sed -n '1s/^vllm (\(.*\))$/\1/p' || true
  )
  [[ -n $version ]] || fail "the package index names no release of vLLM; pip's words are in $PWD/$log"
fi
python ci/next_vllm.py "$version" || code=1
[[ -z $runs_tests ]] || bash ci/test.sh --vllm "$version" || code=1
exit "$code"
