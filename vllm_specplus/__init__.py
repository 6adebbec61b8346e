"""vllm-specplus: further speculative decoding for vLLM, as a plugin.

vLLM loads this module in each of its processes, so nothing here imports vLLM or torch.
"""

import logging

from vllm_specplus.version import __version__

__all__ = ["__version__", "register"]


def register() -> None:
    """Install the one patch that is always there; vLLM calls this in each of its processes.

    A second call changes nothing. It never raises: where vLLM cannot be patched, the reason is logged, and vLLM goes on
    without the plugin.
    """
    try:
        from vllm_specplus.engine.patch import install

        install()
    except Exception:
        # The user may want another plugin, and must not lose their engine to this one.
        logging.getLogger("vllm.specplus").exception("vllm-specplus is off: it cannot attach to vLLM")
