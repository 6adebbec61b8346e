"""Drafting and verification on vLLM's Model Runner V2."""
