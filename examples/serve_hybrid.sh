#!/usr/bin/env bash
# Serve a model that has an MTP head with hybrid drafting: bash examples/serve_hybrid.sh MODEL [vllm serve's options]
set -euo pipefail

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
