#!/usr/bin/env bash
# Installs, lints and runs every test. Arguments go to pytest; with paths among them, only those are run.
cd "$(dirname "$0")/.."
source ci/setup.sh
export HF_HUB_OFFLINE=1 VLLM_CPU_CI_ENV=1

reports=$(mktemp -d)
trap 'rm -rf "$reports"' EXIT
code=0

bash ci/lint.sh || code=1

run_tests() {
  local result=0
  pytest --junitxml "$reports/$1.xml" "${@:2}" || result=$?
  # 5: the arguments selected nothing, as `-k` may do to one of two runs.
  ((result == 0 || result == 5)) || code=1
}

# Three processes: vLLM's CPU worker cannot start in one where a test has imported numba, and the kernels run under
# Triton's interpreter, which has to be chosen before Triton is imported.
options=() kernels=() others=()
for argument in "$@"; do
  case "$argument" in
    tests/kernels*) kernels+=("$argument") ;;
    *) if [[ -e ${argument%%::*} ]]; then others+=("$argument"); else options+=("$argument"); fi ;;
  esac
done
if ((${#kernels[@]} + ${#others[@]} == 0)); then
  run_tests unit tests --ignore tests/e2e --ignore tests/kernels "${options[@]}"
  run_tests e2e tests/e2e "${options[@]}"
  kernels=(tests/kernels)
elif ((${#others[@]})); then
  run_tests chosen "${others[@]}" "${options[@]}"
fi
if ((${#kernels[@]})); then
  TRITON_INTERPRET=1 run_tests kernels "${kernels[@]}" "${options[@]}"
fi

((code == 0)) || echo "ci/test.sh: lint or tests failed, see above"
# Both summaries in one, as pytest writes it; a run without a single test has shown nothing.
python - "$reports" <<'END' || code=1
import sys
from pathlib import Path
from xml.etree import ElementTree

suites = [s for report in Path(sys.argv[1]).iterdir() for s in ElementTree.parse(report).iter("testsuite")]
count = {key: sum(int(suite.get(key)) for suite in suites) for key in ("tests", "failures", "errors", "skipped")}
passed = count.pop("tests") - sum(count.values())
seconds = sum(float(suite.get("time")) for suite in suites)
parts = [f"{passed} passed", f"{count['failures']} failed", f"{count['errors']} errors", f"{count['skipped']} skipped"]
print(f"===== {', '.join(parts)} in {seconds:.0f}s =====")
sys.exit(passed == 0)
END
exit "$code"
