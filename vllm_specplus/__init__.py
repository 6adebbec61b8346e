"""vllm-specplus: further speculative decoding for vLLM, as a plugin.

Nothing here imports vLLM or torch: vLLM loads this module in every one of its processes.
"""

import logging

from vllm_specplus.version import __version__

__all__ = ["__version__", "register"]


def register() -> None:
    """Install the plugin's one permanent patch; vLLM calls this in each of its processes.

    Idempotent and light. Never raises: where vLLM cannot be patched, the reason is logged and vLLM goes
    on as if the plugin were not installed.
    """
    try:
        from vllm_specplus.engine.patch import install

        install()
    except Exception:
        # Another plugin's user must not lose their engine to this one.
        logging.getLogger("vllm.specplus").exception("vllm-specplus is off: it cannot attach to vLLM")
