#!/usr/bin/env bash
# Fuzzes with new random cases for MINUTES (default 60) each, two at a time: bash ci/fuzz.sh [MINUTES [NAME...]]
#   verify    verify_draft_tokens on both backends, with guards around every buffer
#   config    configs, by hypothesis
#   json      configs as JSON text, by coverage (atheris)
#   bodies    HTTP bodies, in one process with a server
#   messages  messages and questions to workers
#   sockets   HTTP requests, byte by byte, to a real server; SPECPLUS_FUZZ_SEED in the environment repeats them
# A finding ends its own run alone. Logs go to fuzz/NAME.log.
cd "$(dirname "$0")/.."
minutes=${1:-60}
all=(verify sockets bodies messages config json)
names=("${@:2}")
source ci/setup.sh
[[ $minutes =~ ^[1-9][0-9]*$ ]] || fail "MINUTES $minutes is not allowed: a whole number from 1 on"
for name in "${names[@]}"; do
  [[ " ${all[*]} " == *" $name "* ]] || fail "$name is not allowed: ${all[*]}"
done
((${#names[@]} > 0)) || names=("${all[@]}")
export HF_HUB_OFFLINE=1 VLLM_CPU_CI_ENV=1 OMP_NUM_THREADS=1
mkdir -p fuzz

# Runs tests again and again until the time is over, with other examples each time.
again() {
  unset SPECPLUS_FUZZ_SEED
  local end=$((SECONDS + 60 * minutes)) runs=0
  while ((SECONDS < end)); do
    pytest -q -o timeout=0 --hypothesis-profile random "$@" || return 1
    runs=$((runs + 1))
  done
  echo "$runs runs without a finding"
}

json() {
  step "installs atheris" pip_install --target .venv/atheris atheris
  PYTHONPATH=.venv/atheris python ci/fuzz_json.py -max_total_time=$((60 * minutes)) -max_len=400 -artifact_prefix=fuzz/
}

fuzz() {
  case $1 in
    verify) TRITON_INTERPRET=1 again tests/kernels/verify/test_verify.py::test_equals_reference \
      tests/verify/test_cpu_backends.py::test_equals_reference tests/verify/test_fuzz.py ;;
    config) again tests/config/test_properties.py ;;
    json) json ;;
    bodies) again tests/requests/test_fuzz.py::test_bodies ;;
    messages) again tests/requests/test_fuzz.py::test_worker_messages \
      tests/requests/test_fuzz.py::test_questions_to_workers ;;
    sockets)
      export SPECPLUS_FUZZ_SEED=${SPECPLUS_FUZZ_SEED:-$RANDOM$RANDOM} SPECPLUS_SOAK_SECONDS=$((60 * minutes))
      pytest -q -s tests/soak/test_soak.py::test_raw_requests
      ;;
  esac
}

code=0
for name in "${names[@]}"; do
  while (($(jobs -rp | wc -l) >= 2)); do wait -n || code=1; done
  (
    result=0
    fuzz "$name" >"fuzz/$name.log" 2>&1 || result=$?
    ((result == 0)) || tail -n 50 "fuzz/$name.log"
    echo "$name: $( ((result == 0)) && echo "no finding" || echo "A FINDING"), see fuzz/$name.log"
    exit "$result"
  ) &
done
while (($(jobs -p | wc -l) > 0)); do wait -n || code=1; done
exit "$code"
