"""vLLM's front process and workers: the one patch, the config that travels, the worker classes."""
