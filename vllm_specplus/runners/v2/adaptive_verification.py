"""Whether vLLM can trim a step's drafts on the device, once its model is loaded."""

from typing import Any

from vllm.config import get_layers_from_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionCGSupport

logger = init_logger("vllm.specplus")


def turn_off_where_impossible(runner: Any) -> None:
    """Have every step verify all slots where an attention backend of the target cannot run trimmed batches.

    vLLM would end the engine there.

    Args:
        runner: vLLM's Model Runner V2, whose model is loaded.
    """
    if not getattr(runner.speculator, "enable_adaptive_verification", False):
        return
    backend = _unsupported_backend(runner)
    if backend is None:
        return
    logger.warning_once(
        "enable_adaptive_verification=true is not in force, since attention backend %s cannot run it: every step "
        "verifies all slots",
        backend,
        scope="global",
    )
    runner.speculator.enable_adaptive_verification = False
    if runner.rejection_sampler is not None:
        runner.rejection_sampler.enable_adaptive_verification = False


def _unsupported_backend(runner: Any) -> str | None:
    """The first attention backend of the target that cannot run a batch which is trimmed on the device."""
    config = runner.vllm_config
    layers: dict[str, Any] = get_layers_from_vllm_config(config, AttentionLayerBase)
    for name, layer in layers.items():
        spec = layer.get_kv_cache_spec(config)
        if name in runner.speculator.draft_attn_layer_names or spec is None:
            continue
        backend = layer.get_attn_backend()
        builder = backend.get_builder_cls()
        if not backend.supports_device_cpu_query_lens_mismatch():
            return backend.get_name()
        support = builder.get_cudagraph_support(config, spec)
        if support == AttentionCGSupport.ALWAYS:
            continue
        most = builder.get_varlen_cudagraph_max_query_len(config, spec)
        if support == AttentionCGSupport.NEVER or most is None or most < runner.decode_query_len:
            return backend.get_name()
    return None
