"""``python -m vllm_specplus`` is the command ``vllm-specplus``."""

from vllm_specplus.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
