"""The keys of a speculative config that has plugin keys in it: their types, bounds, and parsing."""

from collections.abc import Container, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vllm_specplus.config.aliases import ALIASES, PADDLE_QUANTIZATIONS, SYNONYMS, Normalised
from vllm_specplus.config.errors import (
    SpecPlusConfigError,
    choices,
    combine,
    error,
    failed_keys,
    nearest,
    refusal,
    schema_refusal,
    show,
    stated,
)
from vllm_specplus.config.stock_keys import StockKeys

# vLLM's V1 rejection sampler is compiled for at most this many drafts (MAX_SPEC_LEN).
MAX_DRAFT_TOKENS = 128

MtpStrategy = Literal["default", "with_ngram", "with_suffix"]
VerifyStrategy = Literal["topp", "greedy", "target_match", "rejection"]
AcceptPolicy = Literal["normal", "accept_all", "reject_all"]
AtLeastOne = Annotated[int, Field(ge=1)]
AtLeastZero = Annotated[int, Field(ge=0)]
CachedRequests = Annotated[int, Field(ge=-1)]
Factor = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Probability = Annotated[float, Field(ge=0, le=1)]
DraftTokens = Annotated[int, Field(ge=1, le=MAX_DRAFT_TOKENS)]

HYBRID_METHODS = ("mtp", "eagle", "eagle3", "draft_model")
NAIVE = "naive"
STOCK_WINDOW = frozenset({"prompt_lookup_max", "prompt_lookup_min"})
WINDOW_KEYS = ("max_ngram_size", "min_ngram_size")
SUFFIX_KEYS = (
    "suffix_decoding_max_tree_depth",
    "suffix_decoding_max_cached_requests",
    "suffix_decoding_max_spec_factor",
    "suffix_decoding_min_token_prob",
)
OWN_KEYS = (
    "num_model_steps",
    "mtp_strategy",
    *WINDOW_KEYS,
    "match_override_len",
    "verify_strategy",
    "max_candidate_len",
    "verify_window",
    "accept_policy",
)
PLUGIN_NAMES = (*OWN_KEYS, *(name for name in SYNONYMS if name not in STOCK_WINDOW))


class GivenKeys(BaseModel):
    """The keys that the plugin reads, as written (canonical names), before they are resolved.

    Strict: ``"3"``, ``3.0`` and ``true`` are no integers. `num_speculative_tokens` 0: not given.
    """

    model_config = ConfigDict(strict=True, frozen=True, defer_build=True)

    method: str | None = None
    model: str | None = None
    quantization: str | None = None
    num_speculative_tokens: DraftTokens = 0
    num_model_steps: AtLeastOne | None = None
    mtp_strategy: MtpStrategy = "default"
    max_ngram_size: AtLeastOne | None = None
    min_ngram_size: AtLeastOne | None = None
    match_override_len: AtLeastZero = 0
    suffix_decoding_max_tree_depth: AtLeastOne = 24
    suffix_decoding_max_cached_requests: CachedRequests = 10000
    suffix_decoding_max_spec_factor: Factor = 1.0
    suffix_decoding_min_token_prob: Probability = 0.1
    verify_strategy: VerifyStrategy | None = None
    max_candidate_len: AtLeastOne | None = None
    verify_window: AtLeastZero = 0
    accept_policy: AcceptPolicy = "normal"


class NaiveKeys(GivenKeys):
    """`GivenKeys` for method ``naive``, which takes any number of tokens."""

    num_speculative_tokens: int = 0


@dataclass(frozen=True)
class Parsed:
    """A config with each value checked on its own, ready for the rules that join keys.

    given: the canonical keys and the names they came under. keys: what the plugin reads.
    stock: what the installed vLLM knows. values: its other keys, as vLLM will read them.
    """

    given: Normalised
    keys: GivenKeys
    stock: StockKeys
    values: Mapping[str, Any]

    @cached_property
    def method(self) -> str | None:
        """The method that runs: vLLM's deprecated names for MTP are ``mtp``."""
        return real_method(self.keys.method, self.stock)

    @property
    def is_hybrid(self) -> bool:
        return self.keys.mtp_strategy != "default"

    @property
    def names_window(self) -> bool:
        """Whether the n-gram window is set under a name other than vLLM's own."""
        return any(
            self.given.values.get(key) is not None and set(self.given.names(key)) - STOCK_WINDOW for key in WINDOW_KEYS
        )

    def stated(self, key: str) -> str:
        """``key=value`` as written, or the key's default."""
        if key in self.given.values:
            return self.given.stated(key)
        return stated(key, getattr(self.keys, key, None))


def real_method(method: str | None, stock: StockKeys) -> str | None:
    """`method` with vLLM's deprecated MTP names rewritten as vLLM rewrites them."""
    return "mtp" if method in stock.mtp_methods else method


def refuse_unknown(given: Normalised, stock: StockKeys) -> None:
    """Raise SpecPlusConfigError for the keys that neither vLLM nor the plugin knows."""
    problems = [
        unknown_key(given.stated(key), nearest(key, known_names(stock)))
        for key in given.values
        if key not in known_names(stock)
    ]
    if problems:
        raise combine(problems)


def known_names(stock: StockKeys) -> tuple[str, ...]:
    """Every key that may be written, the plugin's first."""
    return (*PLUGIN_NAMES, *ALIASES, *stock.keys)


def unknown_key(what: str, meant: str | None) -> SpecPlusConfigError:
    """The error for a key that nobody knows; `meant`: the known key that it is close to."""
    hint = f"did you mean {meant}? " if meant else ""
    allowed = f"{', '.join(PLUGIN_NAMES)} and the fields of vLLM's SpeculativeConfig"
    return error(f"unknown key {what}; {hint}Allowed: {allowed}")


def parse(given: Normalised, stock: StockKeys) -> Parsed:
    """Check every value on its own.

    Raises SpecPlusConfigError for unknown keys, wrong types, values out of bounds, an unknown
    method, a quantization that is not vLLM's; one line for each wrong value.
    """
    refuse_unknown(given, stock)
    problems: list[SpecPlusConfigError] = []
    schema = NaiveKeys if given.values.get("method") == NAIVE else GivenKeys
    defaults = {key: stock.keys[key].default for key in SUFFIX_KEYS if key in stock.keys}
    mine = {key: value for key, value in given.values.items() if key in schema.model_fields}
    keys = GivenKeys()
    try:
        keys = schema.model_validate({key: value for key, value in defaults.items() if value is not None} | mine)
    except ValidationError as problem:
        properties = schema.model_json_schema()["properties"]
        problems += [
            schema_refusal(given.stated(key), given.values.get(key), properties[key]) for key in failed_keys(problem)
        ]
    values = parse_stock(given, stock, problems, skip=schema.model_fields)
    check_method(given, stock, problems)
    check_quantization(given, stock, problems)
    if problems:
        raise combine(problems)
    return Parsed(given, keys, stock, values)


def parse_stock(
    given: Normalised,
    stock: StockKeys,
    problems: list[SpecPlusConfigError],
    skip: Container[str],
) -> dict[str, Any]:
    """vLLM's keys in `given`, but those in `skip`, as vLLM will read them; refusals go to
    `problems`."""
    values: dict[str, Any] = {}
    for key, value in given.values.items():
        if key in skip or key not in stock.keys:
            continue
        try:
            values[key] = stock.keys[key].parse(given.stated(key), value)
        except SpecPlusConfigError as problem:
            problems.append(problem)
    return values


def check_method(given: Normalised, stock: StockKeys, problems: list[SpecPlusConfigError]) -> None:
    """Add a refusal for a method that neither vLLM nor the plugin has."""
    method = given.values.get("method")
    if isinstance(method, str) and method not in (NAIVE, *stock.methods):
        schema = {"enum": [NAIVE, *stock.methods]}
        problems.append(schema_refusal(given.stated("method"), method, schema))


def check_quantization(given: Normalised, stock: StockKeys, problems: list[SpecPlusConfigError]) -> None:
    """Add a refusal for Paddle's quantization names, and for any unknown name in a migration key.

    Under vLLM's own key an unknown name may be one that another plugin registers with vLLM.
    """
    value = given.values.get("quantization")
    if not isinstance(value, str) or value in stock.quantizations:
        return
    vllm_has = f"vLLM's quantization methods are {choices(stock.quantizations)}"
    if value.lower() in PADDLE_QUANTIZATIONS:
        what = given.stated("quantization")
        problems.append(refusal(what, f"{value} is Paddle's; {vllm_has}"))
    elif given.names("quantization") != ["quantization"]:
        name = given.names("quantization")[0]
        translated = tuple((ALIASES[name].values or {}) if name in ALIASES else ())
        also = f"{choices(translated)}, or a name of vLLM's; " if translated else ""
        problems.append(refusal(given.stated("quantization"), f"{also}{vllm_has}; {show(value)} is none of them"))
