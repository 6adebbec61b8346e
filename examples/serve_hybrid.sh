#!/usr/bin/env bash
# Serve a model that has an MTP head with hybrid drafting: bash examples/serve_hybrid.sh MODEL [vllm serve's options]
# Only warnings, and the line that says that the server is up; VLLM_LOGGING_LEVEL=INFO shows vLLM's own messages.
set -euo pipefail
export VLLM_LOGGING_LEVEL=${VLLM_LOGGING_LEVEL:-WARNING} TQDM_DISABLE=${TQDM_DISABLE:-1}

model=${1:?usage: serve_hybrid.sh MODEL [options of vllm serve]}
shift

exec vllm serve "$model" \
  --served-model-name hybrid \
  --max-model-len 1024 \
  --enforce-eager \
  --kv-cache-memory-bytes $((256 << 20)) \
  --speculative-config '{
    "method": "mtp",
    "num_speculative_tokens": 5,
    "num_model_steps": 2,
    "mtp_strategy": "with_ngram",
    "verify_strategy": "target_match"
  }' "$@"
