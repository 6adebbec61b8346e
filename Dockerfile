# vLLM's server with this plugin in it:
#   docker build --tag vllm-specplus .
#   docker run --gpus all --publish 8000:8000 vllm-specplus MODEL --speculative-config '{...}'
# `bash ci/release.sh` runs the steps below without Docker, but for apt-get.
ARG VLLM_VERSION=0.32.0
FROM vllm/vllm-openai:v${VLLM_VERSION}

WORKDIR /opt/vllm-specplus
COPY pyproject.toml README.md LICENSE CHANGELOG.md SECURITY.md ./
COPY vllm_specplus ./vllm_specplus

RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
# arctic-inference is built on the torch that is there; isolated, its build would fetch another one.
RUN python3 -m pip install --no-cache-dir hatchling editables cmake nanobind ninja
RUN CMAKE_PREFIX_PATH="$(python3 -m nanobind --cmake_dir)" python3 -m pip install --no-cache-dir --no-build-isolation arctic-inference
RUN python3 -m pip install --no-cache-dir --no-build-isolation '.[suffix]'
RUN vllm-specplus check '{"method": "suffix", "num_speculative_tokens": 8, "suffix_decoding_max_cached_requests": -1}'

# For `prediction` and /specplus/* over HTTP.
ENV VLLM_PLUGINS=specplus
WORKDIR /
