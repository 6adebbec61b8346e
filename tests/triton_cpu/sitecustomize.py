"""Python runs this at its start where this folder is on PYTHONPATH: vLLM's own processes are patched too."""

import os

if os.environ.get("TRITON_INTERPRET") == "1":
    from interpreted_cpu import patches, scheduling

    patches.apply()
    if scheduling.VARIABLE in os.environ:
        scheduling.apply()
