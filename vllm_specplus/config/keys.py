"""The keys of a speculative config with plugin keys: their types, bounds and defaults, and how they are parsed."""

from collections.abc import Container, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vllm_specplus.config.aliases import ALIASES, INPUT_LOOKUP_KEY, SYNONYMS, NormalisedConfig, meant_key
from vllm_specplus.config.dialects import DIALECT_KEY
from vllm_specplus.config.errors import (
    SpecPlusConfigError,
    choices,
    combined_error,
    config_error,
    keys_in_error,
    not_allowed_error,
    schema_error,
    setting,
    show,
)
from vllm_specplus.config.quantizations import quantization_named, vllm_name
from vllm_specplus.config.stock_keys import StockKeys
from vllm_specplus.strategies import AcceptPolicy, VerifyStrategy

# vLLM's V1 rejection sampler is compiled for at most this many drafts (MAX_SPEC_LEN).
MAX_DRAFT_TOKENS = 128

MtpStrategy = Literal["default", "with_ngram", "with_suffix"]
NgramMatchOrder = Literal["recent", "first"]
SuffixScope = Literal["shared", "salt", "request"]
AtLeastOne = Annotated[int, Field(ge=1)]
DraftTokens = Annotated[int, Field(ge=1, le=MAX_DRAFT_TOKENS)]
DEFAULT_NGRAM_SIZES = (5, 2)
"""The largest and the smallest n-gram size; `ngram_sizes` of the rules has the cases in which others hold."""
TOPP_DEFAULTS = {"max_candidate_len": 5, "verify_window": 2}
"""FastDeploy's and PaddleNLP's limits of ``topp``, which hold where the user leaves them out."""


class CommonKeys(BaseModel):
    """The keys that the plugin reads, with their defaults, in the order of the documentation's table.

    They are the fields of the user's keys and of the resolved options. `num_speculative_tokens` 0: not set.
    """

    method: str | None = None
    num_speculative_tokens: DraftTokens = 0
    num_model_steps: AtLeastOne | None = None
    mtp_strategy: MtpStrategy = "default"
    max_ngram_size: AtLeastOne | None = None
    min_ngram_size: AtLeastOne | None = None
    ngram_match_order: NgramMatchOrder = "recent"
    match_override_len: Annotated[int, Field(ge=0)] = 0
    adaptive: bool | None = None
    suffix_decoding_max_tree_depth: AtLeastOne = 24
    suffix_decoding_max_cached_requests: Annotated[int, Field(ge=-1)] = 10000
    suffix_decoding_max_spec_factor: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    suffix_decoding_min_token_prob: Annotated[float, Field(ge=0, le=1)] = 0.1
    suffix_decoding_max_cached_tokens: Annotated[int, Field(ge=-1)] | None = None
    suffix_decoding_scope: SuffixScope = "salt"
    verify_strategy: VerifyStrategy | None = None
    max_candidate_len: AtLeastOne | None = None
    verify_window: Annotated[int, Field(ge=0)] = 0
    accept_policy: AcceptPolicy = "normal"
    allow_force_accept: bool = False


HYBRID_METHODS = ("mtp", "eagle", "eagle3", "draft_model", "medusa")
NAIVE = "naive"
HISTORY_METHODS = ("ngram", "suffix", NAIVE)
"""Methods that draft from text alone: the request's own, that of other requests, or (naive) its reference."""
STOCK_NGRAM_KEYS = frozenset({"prompt_lookup_max", "prompt_lookup_min"})
NGRAM_KEYS = ("max_ngram_size", "min_ngram_size")
SUFFIX_KEYS = tuple(key for key in CommonKeys.model_fields if key.startswith("suffix_decoding_"))
OWN_SUFFIX_KEYS = ("suffix_decoding_max_cached_tokens", "suffix_decoding_scope")
_VLLM_KEYS = ("method", "num_speculative_tokens", *(key for key in SUFFIX_KEYS if key not in OWN_SUFFIX_KEYS))
OWN_KEYS = tuple(key for key in CommonKeys.model_fields if key not in _VLLM_KEYS)
PLUGIN_NAMES = (*OWN_KEYS, DIALECT_KEY, INPUT_LOOKUP_KEY, *(name for name in SYNONYMS if name not in STOCK_NGRAM_KEYS))


class UserKeys(CommonKeys):
    """The keys under canonical names, as the user wrote them. Strict: ``"3"``, ``3.0`` and ``true`` are no integers."""

    model_config = ConfigDict(strict=True, frozen=True, defer_build=True)

    model: str | None = None
    quantization: str | None = None


class NaiveKeys(UserKeys):
    """`UserKeys` for method ``naive``, which takes any number of tokens."""

    num_speculative_tokens: int = 0


@dataclass(frozen=True)
class ParsedConfig:
    """A config in which each value is right on its own, ready for the rules that join keys.

    config: the canonical keys, and the user's names for them. keys: those that the plugin reads.
    stock: what the installed vLLM knows. values: vLLM's other keys, as vLLM reads them.
    """

    config: NormalisedConfig
    keys: UserKeys
    stock: StockKeys
    values: Mapping[str, Any]

    @cached_property
    def method(self) -> str | None:
        """The method that runs: vLLM's deprecated names for MTP are ``mtp``."""
        return real_method(self.keys.method, self.stock)

    @property
    def is_hybrid(self) -> bool:
        """Whether history drafts beside the draft model."""
        return self.keys.mtp_strategy != "default"

    @property
    def num_model_steps(self) -> int | None:
        """Forward passes of the draft model in a hybrid; None elsewhere."""
        return (self.keys.num_model_steps or 1) if self.is_hybrid else None

    @property
    def names_ngram_sizes(self) -> bool:
        """Whether an n-gram size is set under a name other than vLLM's own."""
        return any(
            self.config.values.get(key) is not None and set(self.config.names(key)) - STOCK_NGRAM_KEYS
            for key in NGRAM_KEYS
        )

    def setting(self, key: str) -> str:
        """``key=value`` as the user wrote it, or the key's default."""
        if key in self.config.values:
            return self.config.setting(key)
        return setting(key, getattr(self.keys, key, None))


def real_method(method: str | None, stock: StockKeys) -> str | None:
    """`method` with vLLM's deprecated MTP names rewritten as vLLM rewrites them."""
    return "mtp" if method in stock.mtp_methods else method


def refuse_unknown_keys(config: NormalisedConfig, stock: StockKeys) -> None:
    """Raise SpecPlusConfigError if neither vLLM nor the plugin knows a key."""
    problems = [
        unknown_key_error(config.setting(key), meant_key(key, known_names(stock)))
        for key in config.values
        if key not in known_names(stock)
    ]
    if problems:
        raise combined_error(problems)


def known_names(stock: StockKeys) -> tuple[str, ...]:
    """Every key that may be written, the plugin's first."""
    return (*PLUGIN_NAMES, *ALIASES, *stock.keys)


def unknown_key_error(what: str, meant: str | None) -> SpecPlusConfigError:
    """The error for a key that neither knows; `meant`: the known key that it is close to."""
    hint = f"did you mean {meant}? " if meant else ""
    allowed = f"{', '.join(PLUGIN_NAMES)} and the fields of vLLM's SpeculativeConfig"
    return config_error(f"unknown key {what}; {hint}Allowed: {allowed}")


def parse(config: NormalisedConfig, stock: StockKeys) -> ParsedConfig:
    """Check every value on its own.

    Raises:
        SpecPlusConfigError: keys are unknown, or values are wrong; a line for each.
    """
    refuse_unknown_keys(config, stock)
    problems: list[SpecPlusConfigError] = []
    schema = NaiveKeys if config.values.get("method") == NAIVE else UserKeys
    defaults = {key: stock.keys[key].default for key in SUFFIX_KEYS if key in stock.keys}
    plugin_keys = {key: value for key, value in config.values.items() if key in schema.model_fields}
    keys = UserKeys()
    try:
        keys = schema.model_validate({key: value for key, value in defaults.items() if value is not None} | plugin_keys)
    except ValidationError as problem:
        properties, wrong = schema.model_json_schema()["properties"], keys_in_error(problem)
        problems += [
            schema_error(config.setting(key), value, properties[key])
            for key, value in config.values.items()
            if key in wrong
        ]
    values = parse_stock(config, stock, problems, skip=schema.model_fields)
    add_method_errors(config, stock, problems)
    add_quantization_errors(config, stock, problems)
    if problems:
        raise combined_error(problems)
    return ParsedConfig(config, keys, stock, values)


def parse_stock(
    config: NormalisedConfig,
    stock: StockKeys,
    problems: list[SpecPlusConfigError],
    skip: Container[str],
) -> dict[str, Any]:
    """The values of vLLM's keys as vLLM reads them, without those in `skip`; errors go to `problems`."""
    values: dict[str, Any] = {}
    for key, value in config.values.items():
        if key in skip or key not in stock.keys:
            continue
        try:
            values[key] = stock.keys[key].parse(config.setting(key), value)
        except SpecPlusConfigError as problem:
            problems.append(problem)
    return values


def add_method_errors(config: NormalisedConfig, stock: StockKeys, problems: list[SpecPlusConfigError]) -> None:
    """Add an error to `problems` if neither vLLM nor the plugin has the method."""
    method = config.values.get("method")
    if isinstance(method, str) and method not in (NAIVE, *stock.methods):
        schema = {"enum": [NAIVE, *stock.methods]}
        problems.append(schema_error(config.setting("method"), method, schema))


def add_quantization_errors(config: NormalisedConfig, stock: StockKeys, problems: list[SpecPlusConfigError]) -> None:
    """Add an error to `problems` for a quantization that vLLM lacks, or an unknown one in a migration key.

    Under vLLM's own key an unknown name passes: another plugin may register it with vLLM.
    """
    value = config.values.get("quantization")
    if not isinstance(value, str) or value in stock.quantizations:
        return
    what = config.setting("quantization")
    vllm_has = f"vLLM's quantization methods are {choices(stock.quantizations)}"
    known = quantization_named(value)
    written = [one for _, one in config.spellings.get("quantization", ())]
    if known is not None and known.target is None:
        problems.append(not_allowed_error(what, f"{value} is {known.system}'s. {known.says}; {vllm_has}"))
    elif any(vllm_name(one) == value for one in written):
        problems.append(not_allowed_error(what, f"it stands for {value}, which this vLLM lacks; {vllm_has}"))
    elif config.names("quantization") != ["quantization"]:
        problems.append(not_allowed_error(what, f"{vllm_has}; {show(value)} is none of them"))
