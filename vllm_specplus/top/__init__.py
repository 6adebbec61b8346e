"""The command ``vllm-specplus top``: what a running server drafts, as a page in the terminal."""
