"""Environment of every test: no network, vLLM's engine in this process."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_CPU_CI_ENV", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
# The models are tiny: a second thread costs more than it brings, and far more on a busy machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")
