"""Other engines' names for speculative options: one table of the keys they stand for.

`normalise` rewrites every name to one canonical key. It remembers the names that the user wrote, for error messages. It
refuses two names for one thing with different values. vLLM's ``prompt_lookup_max`` and ``prompt_lookup_min`` have
synonyms of the plugin's; their canonical names are ``max_ngram_size`` and ``min_ngram_size``.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from vllm_specplus.config.dialects import (
    DIALECT_KEY,
    DIALECTS,
    FASTDEPLOY,
    LOWERED_KEYS,
    PADDLENLP,
    RTP_LLM,
    dialect_of,
)
from vllm_specplus.config.errors import choices, nearest, not_allowed_error, setting, show
from vllm_specplus.config.quantizations import quantization_named, vllm_name


@dataclass(frozen=True)
class Alias:
    """One key of another engine.

    target: the canonical key that it stands for; None: it is ignored, for the reason `why`.
    values: the other engine's value -> the value here; other values are refused. None: values stay as they are.
    off_values: values that ask for no speculation; texts in small letters stand for any case.
    implies: keys that the other engine sets with this one, unless the user sets them.
    """

    system: str
    key: str
    target: str | None
    values: Mapping[str, str] | None = None
    off_values: tuple[Any, ...] = ()
    implies: tuple[tuple[str, Any], ...] = ()
    why: str = ""


_TOPP = (("verify_strategy", "topp"),)
ALIASES: Mapping[str, Alias] = MappingProxyType(
    {
        alias.key: alias
        for alias in (
            Alias(
                PADDLENLP,
                "speculate_method",
                "method",
                values={"inference_with_reference": "ngram", "mtp": "mtp", "eagle": "eagle"},
                off_values=(None, "none"),
            ),
            Alias(PADDLENLP, "speculate_max_draft_token_num", "num_speculative_tokens"),
            Alias(PADDLENLP, "speculate_max_ngram_size", "max_ngram_size"),
            Alias(PADDLENLP, "speculate_verify_window", "verify_window", implies=_TOPP),
            Alias(PADDLENLP, "speculate_max_candidate_len", "max_candidate_len", implies=_TOPP),
            Alias(PADDLENLP, "draft_model_name_or_path", "model"),
            Alias(PADDLENLP, "draft_model_quant_type", "quantization"),
            Alias(
                PADDLENLP,
                "return_full_hidden_states",
                None,
                why="vLLM hands the full hidden states to the draft model itself",
            ),
            Alias(
                RTP_LLM,
                "sp_type",
                "method",
                values={
                    "vanilla": "draft_model",
                    "deterministic": "naive",
                    "mtp": "mtp",
                    "eagle": "eagle",
                    "eagle3": "eagle3",
                    "dspark": "dspark",
                },
                off_values=(None, "", "none"),
            ),
            Alias(RTP_LLM, "gen_num_per_cycle", "num_speculative_tokens"),
            Alias(RTP_LLM, "sp_checkpoint_path", "model"),
            Alias(RTP_LLM, "sp_quantization", "quantization"),
            Alias(RTP_LLM, "sp_min_token_match", "min_ngram_size"),
            Alias(RTP_LLM, "sp_max_token_match", "max_ngram_size"),
            Alias(
                RTP_LLM,
                "sp_model_type",
                None,
                why="vLLM reads the model type from the draft checkpoint",
            ),
            Alias(RTP_LLM, "sp_act_type", None, why="vLLM reads the draft model's type from the target's dtype"),
            Alias(
                RTP_LLM,
                "tree_decode_config",
                None,
                why="vLLM verifies chains of drafts, no trees",
            ),
            Alias(
                RTP_LLM,
                "force_stream_sample",
                None,
                why="vLLM samples a batch at once, with each request's own parameters",
            ),
            Alias(
                RTP_LLM,
                "force_score_context_attention",
                None,
                why="vLLM chooses the attention kernel of the verification itself",
            ),
        )
    }
)
METHOD_ALIASES: Mapping[str, tuple[str, str]] = MappingProxyType({"ngram_match": (FASTDEPLOY, "ngram")})
SYNONYMS: Mapping[str, str] = MappingProxyType(
    {
        "draft_strategy": "mtp_strategy",
        "prompt_lookup_max": "max_ngram_size",
        "prompt_lookup_min": "min_ngram_size",
    }
)
OTHER_SPELLINGS: Mapping[str, str] = MappingProxyType(
    {
        "SPECULATE_METHOD": "speculate_method",
        "SPECULATE_MAX_DRAFT_TOKEN_NUM": "speculate_max_draft_token_num",
        "SPECULATE_MAX_NGRAM_SIZE": "speculate_max_ngram_size",
        "SPECULATE_MODEL_PATH": "draft_model_name_or_path",
        "SPECULATE_MODEL_QUANT_TYPE": "draft_model_quant_type",
        "SP_TYPE": "sp_type",
        "SP_CHECKPOINT_PATH": "sp_checkpoint_path",
        "SP_MODEL_TYPE": "sp_model_type",
        "SP_QUANTIZATION": "sp_quantization",
        "SP_ACT_TYPE": "sp_act_type",
        "SP_MIN_TOKEN_MATCH": "sp_min_token_match",
        "SP_MAX_TOKEN_MATCH": "sp_max_token_match",
        # RTP-LLM spells its variable in this way.
        "GEN_NUM_PER_CIRCLE": "gen_num_per_cycle",
        # An older document of RTP-LLM's has this name.
        "SP_WEIGHT_TYPE": "sp_quantization",
        "SPECULATE_VERIFY_USE_TOPK": 'verify_strategy="greedy"',
    }
)
"""Environment variables of the other systems, and what they stand for: a key, or a key with its value.

No config key is spelt so.
"""
OFF = "<off>"
"""The method of a config that asks for no speculation. No user can write it: no method of vLLM's has such a name."""
INPUT_LOOKUP_KEY = "sp_input_lookup"
"""Asks `sp_type` deterministic to search the request's own text too."""


def meant_key(name: str, known: Iterable[str]) -> str | None:
    """The key that an unknown name most likely stands for, with its value where the name tells it; or None."""
    return OTHER_SPELLINGS.get(name.upper()) or nearest(name.lower(), known)


@dataclass
class NormalisedConfig:
    """A config under canonical keys.

    values: canonical key -> value. spellings: canonical key -> the user's names for it, with the user's values; none
    for an implied value. notes: lines on keys that were rewritten or ignored. dialect: the value of that key.
    system: whose defaults hold.
    """

    values: dict[str, Any] = field(default_factory=dict)
    spellings: dict[str, list[tuple[str, Any]]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    dialect: str | None = None
    system: str | None = None

    @property
    def is_off(self) -> bool:
        """Whether the config asks for no speculation."""
        return bool(self.values.get("method") == OFF)

    def names(self, key: str) -> list[str]:
        """The names under which the user wrote the canonical `key`."""
        return [name for name, _ in self.spellings.get(key, ())]

    def setting(self, key: str) -> str:
        """``name=value`` as the user wrote it, for messages."""
        name, value = self.spellings.get(key, [(key, self.values.get(key))])[0]
        return setting(name, value)

    def add(self, key: str, value: Any, name: str, as_written: Any) -> None:
        """Set the canonical `key` to `value`, which the user wrote as `name=as_written`.

        A null is no value: it neither conflicts with one nor replaces it.

        Raises:
            SpecPlusConfigError: another name has set the key to a different value.
        """
        before = self.values.get(key)
        if before is not None and value is not None and not _same(before, value):
            raise not_allowed_error(
                f"{self.setting(key)} with {setting(name, as_written)}",
                f"both set {key}; set one of them, or both to the same value",
            )
        if before is None or key not in self.values:
            self.values[key] = value
            self.spellings.setdefault(key, []).insert(0, (name, as_written))
        else:
            self.spellings[key].append((name, as_written))


def _same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and bool(one == other))


def normalise(items: Iterable[tuple[str, Any]]) -> NormalisedConfig:
    """Rewrite the (key, value) pairs of a config to canonical keys, with the defaults of the system that they name.

    A key may come more than once (``num-model-steps`` and ``num_model_steps``); equal values merge.

    Raises:
        SpecPlusConfigError: values conflict, or a value of another engine's has no counterpart here.
    """
    items = list(items)
    dialect = _dialect(items)
    looks_up_input = _looks_up_input(items)
    result = NormalisedConfig(dialect=dialect)
    # By system: each key that was set, and how.
    rewritten: dict[str, list[tuple[str, str]]] = {}
    implied: dict[str, Any] = {}
    for name, value in items:
        if name in (DIALECT_KEY, INPUT_LOOKUP_KEY):
            continue
        alias = ALIASES.get(name)
        if alias is None:
            key, (system, ours) = SYNONYMS.get(name, name), _our_value(name, value, dialect)
            if system is not None:
                rewritten.setdefault(system, []).append((key, f"{setting(name, value)} -> {show(ours)}"))
            result.add(key, ours, name, value)
        elif alias.target is None:
            result.notes.append(f"{alias.system}'s {setting(name, value)} is ignored: {alias.why}")
        else:
            ours = _translate(alias, value)
            if ours == OFF:
                result.notes.append(f"{alias.system}'s {setting(name, value)} asks for no speculation")
            elif name == "sp_type" and ours == "naive" and looks_up_input:
                ours = "ngram"
            result.add(alias.target, ours, name, value)
            if ours != OFF:
                what = alias.target, f"{setting(name, value)} -> {setting(alias.target, ours)}"
                rewritten.setdefault(alias.system, []).append(what)
            implied.update(alias.implies)
    if not result.is_off:
        _drop_idle_match_lengths(result)
        system = result.system = _system(items, dialect)
        defaults = _fill_in(result, implied, "which those options imply")
        defaults += _fill_in(result, _defaults(result, system, is_asked=dialect is not None), f"{system}'s defaults")
        result.notes[:0] = [*defaults, *_quantization_notes(result)]
    for system, settings in reversed(rewritten.items() if not result.is_off else ()):
        if lines := [line for key, line in settings if key in result.values]:
            result.notes.insert(0, f"{system} options mapped: {', '.join(lines)}")
    return result


def _dialect(items: list[tuple[str, Any]]) -> str | None:
    """The value of the key ``dialect``; None if it is not set."""
    value = dict(items).get(DIALECT_KEY)
    if value is None or (isinstance(value, str) and value in DIALECTS):
        return value
    meant = nearest(value, DIALECTS, cutoff=0.6)
    hint = f"; did you mean {show(meant)}?" if meant else ""
    raise not_allowed_error(setting(DIALECT_KEY, value), f"expected one of {choices(DIALECTS)}{hint}")


def _looks_up_input(items: list[tuple[str, Any]]) -> bool:
    values = dict(items)
    value = values.get(INPUT_LOOKUP_KEY)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise not_allowed_error(setting(INPUT_LOOKUP_KEY, value), "expected true or false")
    if str(values.get("sp_type")).lower() != "deterministic":
        raise not_allowed_error(setting(INPUT_LOOKUP_KEY, value), 'it acts only with sp_type="deterministic"')
    return value


def _system(items: list[tuple[str, Any]], dialect: str | None) -> str | None:
    """The one system whose defaults hold; None: none is named, or more than one.

    Raises:
        SpecPlusConfigError: `dialect` asks for one system, and a key is another's.
    """
    names: dict[str, str] = {}
    for name, value in items:
        if name in ALIASES:
            names.setdefault(ALIASES[name].system, setting(name, value))
        elif name == "method" and isinstance(value, str) and value.lower() in METHOD_ALIASES:
            names.setdefault(METHOD_ALIASES[value.lower()][0], setting(name, value))
    if dialect is None:
        return next(iter(names)) if len(names) == 1 else None
    for system, what in names.items():
        if system != DIALECTS[dialect].system:
            raise not_allowed_error(
                f"{setting(DIALECT_KEY, dialect)} with {what}", f"that name is {system}'s: {dialect_of(system)}"
            )
    return DIALECTS[dialect].system


def _defaults(config: NormalisedConfig, system: str | None, *, is_asked: bool) -> dict[str, Any]:
    """The defaults that a system has for a config, for keys which that leaves out."""
    found: dict[str, Any] = {}
    for default in DIALECTS[dialect_of(system)].defaults if system else ():
        if (is_asked or default.by_name) and default.when(config.values):
            found[default.key] = default.value
    return found | _fitting_sizes(config.values, found)


def _fitting_sizes(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, int]:
    """The default of one n-gram size where the user has set the other so that it does not fit."""
    fitting = {}
    for key, other, bound in (("min_ngram_size", "max_ngram_size", min), ("max_ngram_size", "min_ngram_size", max)):
        size = values.get(other)
        if key in defaults and values.get(key) is None and isinstance(size, int) and not isinstance(size, bool):
            fitting[key] = max(1, bound(defaults[key], size))
    return fitting


def _fill_in(config: NormalisedConfig, values: Mapping[str, Any], says: str) -> list[str]:
    """Set keys that the user has left out; a note that names them, if there are any."""
    new = {key: value for key, value in values.items() if config.values.get(key) is None}
    for key, value in new.items():
        config.values[key] = value
        config.spellings.pop(key, None)
    return [f"{', '.join(setting(key, value) for key, value in new.items())}: {says}"] if new else []


def _drop_idle_match_lengths(config: NormalisedConfig) -> None:
    """Ignore RTP-LLM's match lengths beside a draft model, as RTP-LLM does."""
    types = [value for name, value in config.spellings.get("method", ()) if name == "sp_type"]
    if not types or config.values["method"] in ("naive", "ngram"):
        return
    for key in ("max_ngram_size", "min_ngram_size"):
        spellings = config.spellings.get(key, [])
        if spellings and all(name in ALIASES for name, _ in spellings):
            del config.values[key], config.spellings[key]
            what = f"{RTP_LLM}'s {setting(*spellings[0])} is ignored"
            config.notes.append(f'{what}: it acts only with sp_type="deterministic"')


def _quantization_notes(config: NormalisedConfig) -> list[str]:
    for name, value in config.spellings.get("quantization", ()):
        known = quantization_named(value)
        if known is not None and known.target is not None and known.says:
            return [f"{setting(name, value)}: {known.says}"]
    return []


def _our_value(name: str, value: Any, dialect: str | None) -> tuple[str | None, Any]:
    """A value of a key that is no alias, and the system that calls it otherwise; None: it stays as it is."""
    if not isinstance(value, str):
        return None, value
    system, ours = None, value
    if dialect is not None and name in LOWERED_KEYS and value != value.lower():
        system, ours = DIALECTS[dialect].system, value.lower()
    if name == "method" and ours in METHOD_ALIASES:
        return METHOD_ALIASES[ours]
    if name == "quantization" and (translation := vllm_name(value)) is not None:
        known = quantization_named(value)
        return (RTP_LLM if known is None else known.system), translation
    return system, ours


def _translate(alias: Alias, value: Any) -> Any:
    if (value is None or isinstance(value, str)) and (value.lower() if value else value) in alias.off_values:
        return OFF
    if alias.target == "quantization":
        return vllm_name(value) or value
    if alias.values is None:
        return value
    if isinstance(value, str) and value.lower() in alias.values:
        return alias.values[value.lower()]
    meant = nearest(value, alias.values)
    hint = f"; did you mean {show(meant)}?" if meant else ""
    raise not_allowed_error(setting(alias.key, value), f"expected one of {choices(alias.values)}{hint}")


def translation(name: str, value: Any, dialect: str | None = None) -> tuple[str, str, Any] | None:
    """The system, the key here and the value here of another engine's key or value; None if it is none, or ignored."""
    alias = ALIASES.get(name)
    if alias is not None:
        return None if alias.target is None else (alias.system, alias.target, _translate(alias, value))
    system, ours = _our_value(name, value, dialect)
    return None if system is None else (system, SYNONYMS.get(name, name), ours)


def is_foreign(name: str, value: Any) -> bool:
    """Whether this key, or this value of ``method`` or ``quantization``, is another engine's."""
    return name in ALIASES or _our_value(name, value, None)[0] is not None
