#!/usr/bin/env bash
# Serve a model that has an MTP head with hybrid drafting: bash examples/serve_hybrid.sh MODEL [vllm serve's options]
# It shows warnings, and uvicorn's line when the server is up. VLLM_LOGGING_LEVEL=INFO shows vLLM's own messages too.
set -euo pipefail
export VLLM_LOGGING_LEVEL=${VLLM_LOGGING_LEVEL:-WARNING}

model=${1:?usage: serve_hybrid.sh MODEL [options of vllm serve]}
shift

# vLLM would tell it among a traceback.
port=$(printf '%s\n' "$@" | sed -n -e '/^--port$/{n;p;}' -e 's/^--port=//p' | tail -n 1)
port=${port:-8000}
if (: > "/dev/tcp/127.0.0.1/$port") 2> /dev/null; then
  echo "port $port is in use; choose another one with --port" >&2
  exit 2
fi

exec vllm serve "$model" \
  --served-model-name hybrid \
  --max-model-len 1024 \
  --enforce-eager \
  --no-use-tqdm-on-load \
  --kv-cache-memory-bytes $((256 << 20)) \
  --speculative-config '{
    "method": "mtp",
    "num_speculative_tokens": 5,
    "num_model_steps": 2,
    "mtp_strategy": "with_ngram",
    "verify_strategy": "target_match"
  }' "$@"
