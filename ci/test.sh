#!/usr/bin/env bash
# Installs, lints and runs the tests on the vLLM of ci/constraints.txt, and the end-to-end tests marked `every_version` on
# the other version below too. The kernels are compiled for a GPU with Triton 3.6 as well, which belongs to torch 2.11. Tests
# marked `slow` are left out, but with `--all`. `--vllm VERSION` runs all tests on that release of vLLM, slow ones too.
# Other arguments go to pytest. With paths among them, only those are run, slow ones too.
# Fuzz tests draw new examples in each run; SPECPLUS_FUZZ_SEED in the environment repeats those of an earlier one.
# SPECPLUS_TEST_MODEL_STEPS and SPECPLUS_TEST_MODEL_SEED in the environment train another tiny model for them (270 steps
# and seed 0 otherwise); the tests pass with any.
cd "$(dirname "$0")/.."
source ci/setup.sh
installed=0.32 other=0.33
version=$installed fast="not slow"
if [[ ${1:-} == --all ]]; then
  fast=
  shift
fi
if [[ ${1:-} == --vllm ]]; then
  version=${2:?--vllm needs a version, such as $installed or $other}
  fast=
  shift 2
  [[ $version =~ ^[0-9]+(\.[0-9]+){1,3}(\.post[0-9]+)?$ ]] || fail "--vllm $version is not allowed: a release, such as $other or $other.0"
  [[ $version != *.*.0 ]] || version=${version%.0}
  [[ $version == "$installed" ]] || other=$version
fi
# tests/compat reads the version from the folder's name.
export HF_HUB_OFFLINE=1 VLLM_CPU_CI_ENV=1 SPECPLUS_OTHER_VLLM="$PWD/.venv/vllm-$other"
export SPECPLUS_FUZZ_SEED=${SPECPLUS_FUZZ_SEED:-$RANDOM$RANDOM}
echo "ci/test.sh: fuzz tests draw the examples of SPECPLUS_FUZZ_SEED=$SPECPLUS_FUZZ_SEED"
release=$other
[[ $other == *.*.* ]] || release+=.0
step "puts vLLM $other over the CPU build of $installed" python ci/vllm_overlay.py "$release" "$SPECPLUS_OTHER_VLLM"

older_triton=3.6.0 older_triton_folder="$PWD/.venv/triton-3.6"
install_older_triton() {
  [[ -d $older_triton_folder/triton-$older_triton.dist-info ]] ||
    python -m pip install --no-deps --upgrade --target "$older_triton_folder" "triton==$older_triton" || return
  PYTHONPATH=$older_triton_folder python -c "import triton; assert triton.__version__ == '$older_triton', triton"
}

reports=$(mktemp -d)
trap 'rm -rf "$reports"' EXIT
code=0

# Runs pytest in a process of its own: run NAME KIND VLLM ARGUMENTS. KIND is what the tests need: v1 or v2, a model
# runner (V2's kernels run under Triton's interpreter with a stand-in backend); interpreter, that alone; triton, the other
# version of Triton, to compile with; none. Two kinds are scripts: lint, and fuzz, a minute of each kind of input but
# `verify`, which has its cases among the interpreter's tests.
# The interpreter has to be chosen before Triton is imported, and vLLM's CPU worker cannot start where numba has been.
run() {
  local name=$1 kind=$2 vllm=$3 path=() select=() result=0
  shift 3
  [[ $vllm == "$other" ]] && path+=("$SPECPLUS_OTHER_VLLM")
  case $kind in
    v1) export VLLM_USE_V2_MODEL_RUNNER=0 && select=(-m "$fast") ;;
    v2) export VLLM_USE_V2_MODEL_RUNNER=1 TRITON_INTERPRET=1 && path+=("$PWD/tests/triton_cpu") && select=(-m "$fast") ;;
    interpreter) export TRITON_INTERPRET=1 && select=(-m "interpreter${fast:+ and $fast}" --ignore tests/e2e) ;;
    triton)
      export TRITON_INTERPRET=1 && path+=("$older_triton_folder")
      select=(-m "interpreter${fast:+ and $fast}" -k "compile and for_a_gpu")
      ;;
    none) select=(-m "not interpreter${fast:+ and $fast}" --ignore tests/e2e) ;;
    lint)
      bash ci/lint.sh
      return
      ;;
    fuzz)
      local inputs=(sockets bodies messages config) input
      # atheris is built for x86 alone.
      [[ $(uname -m) != x86_64 ]] || inputs+=(json)
      for input in "${inputs[@]}"; do bash ci/fuzz.sh 1 "$input" || result=1; done
      return "$result"
      ;;
  esac
  PYTHONPATH=$(IFS=: && echo "${path[*]}") pytest --junitxml "$reports/$name.xml" "${select[@]}" "$@" || result=$?
  # 5: the arguments selected nothing, as `-k` may do to one of several runs. Without options that run must have tests.
  [[ $result == 0 ]] || [[ $result == 5 && ($kind != triton || ${#options[@]} != 0) ]]
}

# Two at a time, for a machine of two cores; each shows its output when it has ended.
start() {
  while (($(jobs -rp | wc -l) >= 2)); do wait -n || code=1; done
  echo "ci/test.sh: starts $1"
  (
    result=0
    run "$@" >"$reports/$1.log" 2>&1 || result=$?
    echo "===== $1"
    cat "$reports/$1.log"
    exit "$result"
  ) &
}

options=() v1=() v2=() others=()
for argument in "$@"; do
  case "$argument" in
    tests/e2e/v1*) v1+=("$argument") ;;
    tests/e2e/v2*) v2+=("$argument") ;;
    tests/e2e | tests/e2e/) v1+=(tests/e2e/v1) v2+=(tests/e2e/v2) ;;
    *) if [[ -e ${argument%%::*} ]]; then others+=("$argument"); else options+=("$argument"); fi ;;
  esac
done
if [[ $version == "$installed" ]] && ((${#v1[@]} + ${#v2[@]} + ${#others[@]} == 0)); then
  step "installs Triton $older_triton beside" install_older_triton
fi
start lint lint "$installed"
if ((${#v1[@]} + ${#v2[@]} + ${#others[@]} == 0)); then
  # The longest first.
  start v2 v2 "$version" tests/e2e/v2 "${options[@]}"
  start v1 v1 "$version" tests/e2e/v1 "${options[@]}"
  start interpreter interpreter "$version" tests "${options[@]}"
  start none none "$version" tests "${options[@]}"
  if [[ $version == "$installed" ]]; then
    start triton-3.6 triton "$installed" tests/kernels "${options[@]}"
    start "v1-on-$other" v1 "$other" tests/e2e/v1 -m every_version "${options[@]}"
    start "v2-on-$other" v2 "$other" tests/e2e/v2 -m every_version "${options[@]}"
    start fuzz fuzz "$installed"
  fi
else
  fast=
  ((${#v2[@]} == 0)) || start v2 v2 "$version" "${v2[@]}" "${options[@]}"
  ((${#v1[@]} == 0)) || start v1 v1 "$version" "${v1[@]}" "${options[@]}"
  if ((${#others[@]} > 0)); then
    start interpreter interpreter "$version" "${others[@]}" "${options[@]}"
    start none none "$version" "${others[@]}" "${options[@]}"
  fi
fi
while (($(jobs -p | wc -l) > 0)); do wait -n || code=1; done

((code == 0)) || echo "ci/test.sh: lint or tests failed, see above; the fuzz tests' seed was $SPECPLUS_FUZZ_SEED"
# All failures and all summaries in one place; a run without a single test has shown nothing.
python ci/summary.py "$reports" || code=1
exit "$code"
