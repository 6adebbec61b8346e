"""Compares speculative configs on a user's prompts: the command ``vllm-specplus compare``."""
