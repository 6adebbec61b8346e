"""Who started this process."""

import sys
from pathlib import Path


def is_vllm_command() -> bool:
    """Whether this process is ``vllm ...`` or ``python -m vllm...``, not a user's own program."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return Path((sys.argv or [""])[0]).name == "vllm" or (spec is not None and spec.name.partition(".")[0] == "vllm")
