#!/usr/bin/env bash
# Installs, lints and runs every test. Arguments go to pytest.
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
export HF_HUB_OFFLINE=1 VLLM_CPU_CI_ENV=1

reports=$(mktemp -d)
trap 'rm -rf "$reports"' EXIT

lint=passed
bash ci/lint.sh || lint=failed

# Two processes: in one that has imported numba, which other tests do, vLLM's CPU worker cannot start.
failed=0
run_pytest() {
  local code=0
  pytest --junitxml "$reports/$1.xml" "${@:2}" || code=$?
  # 5: nothing was selected, as an argument like `-k` may have it in one of the two.
  ((code == 0 || code == 5)) || failed=1
}
run_pytest unit tests --ignore tests/e2e "$@"
run_pytest e2e tests/e2e "$@"
