"""Python runs this at its start where this folder is on PYTHONPATH: vLLM's worker processes are patched too."""

import os

if os.environ.get("TRITON_INTERPRET") == "1":
    from interpreted_cpu import patches

    patches.apply()
