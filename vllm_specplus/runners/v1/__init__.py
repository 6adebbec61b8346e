"""Drafting and verification on vLLM's V1 model runner."""
