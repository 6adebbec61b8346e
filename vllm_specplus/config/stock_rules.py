"""vLLM's own checks of its keys, as far as the config alone decides them.

vLLM checks its keys when it builds its config, which needs the models. These rules foresee the result without them. So
`vllm-specplus check` and the engine agree. They mirror `SpeculativeConfig.__post_init__` and `_verify_args` of
vLLM 0.32. vLLM alone judges checkpoints, the platform and the engine.
"""

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from vllm_specplus.config.errors import SpecPlusConfigError, choices, combined_error, config_error, not_allowed_error
from vllm_specplus.config.stock_keys import StockKeys, stock_keys

# Methods for which vLLM loads no draft checkpoint.
_NO_CHECKPOINT = ("ngram", "ngram_gpu", "suffix", "custom_class", "extract_hidden_states")
# Methods that vLLM never changes for another one when it has read the draft checkpoint.
_FIXED = (*_NO_CHECKPOINT, "eagle", "eagle3", "dflash", "dspark")
# Methods whose model vLLM finds by itself; `custom_class` is the path of a class, which it cannot find.
_MODEL_FOUND = ("ngram", "ngram_gpu", "suffix", "extract_hidden_states", "mtp", "dspark")
# Methods that need the number of tokens to draft, whatever the checkpoint is like. A draft model's checkpoint has none.
# With an MTP head vLLM compares the missing number with 1, and fails.
_TOKENS_NOT_FOUND = (*_NO_CHECKPOINT, "mtp", "draft_model")
SYNTHETIC_KEYS = ("synthetic_acceptance_rates", "synthetic_acceptance_length")


@dataclass(frozen=True)
class StockConfig:
    """The keys that vLLM gets, as it reads them.

    method: the one that vLLM runs where no checkpoint says otherwise. values: its keys, without null ones.
    setting: ``key=value`` as the user wrote it. attention_backends: names that vLLM knows, empty if unknown.
    """

    method: str
    values: Mapping[str, Any]
    setting: Callable[[str], str]
    attention_backends: tuple[str, ...] = ()

    @property
    def is_fixed(self) -> bool:
        """Whether vLLM runs this method whatever the draft checkpoint is like."""
        return self.method in _FIXED or (self.method == "mtp" and "model" not in self.values)

    @property
    def tokens(self) -> int | None:
        """The number of tokens to draft, None where the checkpoint may state it."""
        return self.values.get("num_speculative_tokens")


def suffix_available() -> bool:
    """Whether arctic-inference is installed, which has the suffix trees."""
    try:
        return importlib.util.find_spec("arctic_inference") is not None
    except (ImportError, ValueError):
        return False


def missing_suffix_trees_error(setting: str) -> SpecPlusConfigError:
    """The error of a setting that needs arctic-inference, where that is not installed."""
    return config_error(
        f"{setting} needs the package arctic-inference, which is not installed: docs/index.md says how it is built"
    )


def check_stock(vllm: Mapping[str, Any], stock: StockKeys, setting: Callable[[str], str]) -> None:
    """Raise SpecPlusConfigError where vLLM would refuse the keys `vllm`; one line for each wrong value.

    Args:
        vllm: vLLM's keys and values, as written.
        stock: what the installed vLLM knows.
        setting: gives ``key=value`` as the user wrote it, by vLLM's name of the key.
    """
    values: dict[str, Any] = {}
    problems: list[SpecPlusConfigError] = []
    for key, value in vllm.items():
        if key not in stock.keys:
            continue
        try:
            parsed = stock.keys[key].parse(setting(key), value)
        except SpecPlusConfigError as problem:
            problems.append(problem)
        else:
            if parsed is not None:
                values[key] = parsed
    if problems:
        raise combined_error(problems)
    config = StockConfig(_method(values, stock), values, setting, stock.attention_backends)
    for find_error in _RULES:
        if error := find_error(config):
            raise error


def _method(values: Mapping[str, Any], stock: StockKeys) -> str:
    """The method that vLLM goes on with before it reads a checkpoint."""
    method, model = values.get("method"), values.get("model")
    if method in stock.mtp_methods:
        return "mtp"
    if method is not None:
        return method
    if model in ("ngram", "[ngram]"):
        return "ngram"
    return "custom_class" if _is_class_path(model) else "draft_model"


def draft_checkpoint(values: Mapping[str, Any]) -> str:
    """The folder or repository of the draft model that vLLM loads; "" where it loads none, or finds it by itself."""
    model = values.get("model")
    return model if isinstance(model, str) and _method(values, stock_keys()) not in _NO_CHECKPOINT else ""


def _is_class_path(model: str | None) -> bool:
    if model is None or "/" in model:
        return False
    parts = model.split(".")
    return len(parts) > 1 and all(part.isidentifier() for part in parts)


def _tensor_parallel_size_error(config: StockConfig) -> SpecPlusConfigError | None:
    if "tensor_parallel_size" not in config.values:
        return None
    return not_allowed_error(config.setting("tensor_parallel_size"), "use draft_tensor_parallel_size")


def _model_error(config: StockConfig) -> SpecPlusConfigError | None:
    if "model" in config.values or config.method in _MODEL_FOUND:
        return None
    if "method" not in config.values:
        return config_error("method or model is required: vLLM finds out the one from the other")
    what = "the path of the class" if config.method == "custom_class" else "the draft model's name or path"
    return config_error(f"model is required with {config.setting('method')}: {what}")


def _tokens_error(config: StockConfig) -> SpecPlusConfigError | None:
    if config.tokens is not None or config.method == "suffix":
        return None
    # Without a method, vLLM goes by the checkpoint.
    is_open = "method" not in config.values and config.method == "draft_model"
    if "model" in config.values and (is_open or config.method not in _TOKENS_NOT_FOUND):
        return None
    shown = config.setting("method" if "method" in config.values else "model")
    return config_error(f"num_speculative_tokens is required with {shown}: an integer of 1 or more")


def _ngram_error(config: StockConfig) -> SpecPlusConfigError | None:
    low, high = config.values.get("prompt_lookup_min"), config.values.get("prompt_lookup_max")
    if config.method not in ("ngram", "ngram_gpu") or low is None or high is None or low <= high:
        return None
    return not_allowed_error(
        f"{config.setting('prompt_lookup_min')} with {config.setting('prompt_lookup_max')}",
        "the smallest size must not be larger than the largest",
    )


def _suffix_error(config: StockConfig) -> SpecPlusConfigError | None:
    if config.method != "suffix":
        return None
    if not suffix_available():
        return missing_suffix_trees_error(config.setting("method"))
    bounds: tuple[tuple[str, float, float], ...] = (
        ("suffix_decoding_max_tree_depth", 1, float("inf")),
        ("suffix_decoding_max_cached_requests", 0, float("inf")),
        ("suffix_decoding_max_spec_factor", 0, float("inf")),
        ("suffix_decoding_min_token_prob", 0, 1),
    )
    for key, low, high in bounds:
        value = config.values.get(key)
        if value is not None and not low <= value <= high:
            allowed = f"expected at least {low:g}" + (f" and at most {high:g}" if high == 1 else "")
            if key == "suffix_decoding_max_cached_requests":
                allowed += ", or -1 for no limit"
            return not_allowed_error(config.setting(key), allowed)
    return None


def _synthetic_error(config: StockConfig) -> SpecPlusConfigError | None:
    found = [key for key in SYNTHETIC_KEYS if key in config.values]
    if config.values.get("rejection_sample_method") != "synthetic":
        if not found:
            return None
        return not_allowed_error(config.setting(found[0]), 'it acts only with rejection_sample_method="synthetic"')
    if len(found) != 1:
        return config_error(f'rejection_sample_method="synthetic" needs exactly one of {", ".join(SYNTHETIC_KEYS)}')
    value, tokens = config.values[found[0]], config.tokens
    if found[0] == "synthetic_acceptance_rates":
        is_falling = all(later <= earlier for earlier, later in pairwise(value))
        fits = tokens is None or len(value) == tokens
        allowed = "expected num_speculative_tokens rates from 0 to 1, none of them larger than the one before it"
        is_wrong = not fits or not is_falling or not all(0 <= rate <= 1 for rate in value)
    else:
        allowed = "expected a number from 1 to num_speculative_tokens + 1"
        is_wrong = not value >= 1 or (tokens is not None and value > tokens + 1)
    return not_allowed_error(config.setting(found[0]), allowed) if is_wrong else None


def _heterogeneous_vocab_error(config: StockConfig) -> SpecPlusConfigError | None:
    if not config.values.get("use_heterogeneous_vocab"):
        return None
    what = config.setting("use_heterogeneous_vocab")
    if config.method != "draft_model":
        return not_allowed_error(f"{what} with {config.setting('method')}", 'it needs method="draft_model"')
    if config.values.get("draft_sample_method", "greedy") != "greedy":
        return not_allowed_error(f"{what} with {config.setting('draft_sample_method')}", "its drafts are not sampled")
    return None


def _mtp_indices_error(config: StockConfig) -> SpecPlusConfigError | None:
    if "index_share_for_mtp_iteration" not in config.values or not config.is_fixed or config.method == "mtp":
        return None
    what = f"{config.setting('index_share_for_mtp_iteration')} with {config.setting('method')}"
    return not_allowed_error(what, 'it needs method="mtp"')


def _adaptive_verification_error(config: StockConfig) -> SpecPlusConfigError | None:
    adaptive, argmax = "enable_adaptive_verification", "use_local_argmax_reduction"
    if not config.is_fixed or config.method == "dspark":
        return None
    if not config.values.get(adaptive) or not config.values.get(argmax):
        return None
    return not_allowed_error(
        f"{config.setting(adaptive)} with {config.setting(argmax)}", "adaptive verification needs the draft's logits"
    )


def _draft_topk_error(config: StockConfig) -> SpecPlusConfigError | None:
    if "dspark_draft_topk" not in config.values or config.method not in ("eagle", "eagle3", "dflash", "mtp"):
        return None
    if not config.is_fixed:
        return None
    what = f"{config.setting('dspark_draft_topk')} with {config.setting('method')}"
    return not_allowed_error(what, 'it needs method="dspark"')


def _attention_backend_error(config: StockConfig) -> SpecPlusConfigError | None:
    value, known = config.values.get("attention_backend"), config.attention_backends
    if not known or not isinstance(value, str) or value.upper() in ("AUTO", *known):
        return None
    return not_allowed_error(config.setting("attention_backend"), f"expected one of {choices(('auto', *known))}")


def _schedule_error(config: StockConfig) -> SpecPlusConfigError | None:
    """vLLM's scheduler checks the widths by batch size when an engine starts."""
    key = "num_speculative_tokens_per_batch_size"
    if key not in config.values:
        return None
    ranges = sorted(config.values[key], key=lambda entry: entry[0])
    is_wrong = not ranges or ranges[0][0] != 1
    is_wrong |= any(start > end or tokens < 0 for start, end, tokens in ranges)
    is_wrong |= any(later[0] <= earlier[1] for earlier, later in pairwise(ranges))
    allowed = "expected [first batch size, last batch size, tokens] entries that begin at 1 and do not overlap"
    return not_allowed_error(config.setting(key), allowed) if is_wrong else None


_RULES: tuple[Callable[[StockConfig], SpecPlusConfigError | None], ...] = (
    _tensor_parallel_size_error,
    _model_error,
    _tokens_error,
    _ngram_error,
    _suffix_error,
    _synthetic_error,
    _heterogeneous_vocab_error,
    _mtp_indices_error,
    _adaptive_verification_error,
    _draft_topk_error,
    _attention_backend_error,
    _schedule_error,
)
