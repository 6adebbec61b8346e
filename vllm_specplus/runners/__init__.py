"""One adapter per vLLM model runner: vLLM's structures to the core's arguments and back."""
