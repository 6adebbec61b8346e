#!/usr/bin/env bash
# Tells what a release of vLLM changes for this plugin, on one page: bash ci/next_vllm.sh [VERSION]. Without VERSION it is
# the newest release of the package index. Only that release's Python files are read; nothing of it is installed or run.
# The exit code is 1 if the plugin cannot run on it. For a schedule, such as cron's.
cd "$(dirname "$0")/.."
source ci/setup.sh

version=${1:-}
if [[ -z $version ]]; then
  version=$(python -m pip --disable-pip-version-check index versions vllm 2>>"$log" | sed -n '1s/^vllm (\(.*\))$/\1/p')
  [[ -n $version ]] || fail "the package index names no release of vLLM; pip's words are in $PWD/$log"
fi
python ci/next_vllm.py "$version"
