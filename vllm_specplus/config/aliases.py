"""Other engines' names for speculative options: one table of the keys they stand for.

`normalise` rewrites every name to one canonical key. It remembers the names that the user wrote, for error messages. It
refuses two names for one thing with different values. vLLM's ``prompt_lookup_max`` and ``prompt_lookup_min`` have
synonyms of the plugin's; their canonical names are ``max_ngram_size`` and ``min_ngram_size``.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from vllm_specplus.config.errors import choices, nearest, not_allowed_error, setting, show

FASTDEPLOY, PADDLENLP, RTP_LLM = "FastDeploy", "PaddleNLP", "RTP-LLM"


@dataclass(frozen=True)
class Alias:
    """One key of another engine.

    target: the canonical key that it stands for; None: it is ignored, for the reason `why`.
    values: the other engine's value -> the value here; other values are refused. None: values stay as they are.
    open_values: values that are not in `values` stay as they are, and are checked under the target key.
    implies: keys that the other engine sets with this one, unless the user sets them.
    """

    system: str
    key: str
    target: str | None
    values: Mapping[str, str] | None = None
    open_values: bool = False
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
            ),
            Alias(PADDLENLP, "speculate_max_draft_token_num", "num_speculative_tokens"),
            # PaddleNLP tries every n-gram size from this one down to one token.
            Alias(
                PADDLENLP,
                "speculate_max_ngram_size",
                "max_ngram_size",
                implies=(("min_ngram_size", 1),),
            ),
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
                    "deterministic": "ngram",
                    "mtp": "mtp",
                    "eagle3": "eagle3",
                },
            ),
            Alias(RTP_LLM, "gen_num_per_cycle", "num_speculative_tokens"),
            Alias(RTP_LLM, "sp_checkpoint_path", "model"),
            Alias(
                RTP_LLM,
                "sp_quantization",
                "quantization",
                values={"FP8": "fp8", "FP8_PER_BLOCK": "fp8_per_block"},
                open_values=True,
            ),
            Alias(RTP_LLM, "sp_min_token_match", "min_ngram_size"),
            Alias(RTP_LLM, "sp_max_token_match", "max_ngram_size"),
            Alias(
                RTP_LLM,
                "sp_model_type",
                None,
                why="vLLM reads the model type from the draft checkpoint",
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
# Names that Paddle's engines give their own weight formats; no vLLM kernel reads those.
PADDLE_QUANTIZATIONS = frozenset(
    {
        "a8w8",
        "a8w8_fp8",
        "a8w8c8",
        "block_wise_fp8",
        "mix_quant",
        "tensor_wise_fp8",
        "w4a8",
        "w4afp8",
        "weight_only_int4",
        "weight_only_int8",
        "wfp8afp8",
        "wint2",
        "wint4",
        "wint8",
    }
)


@dataclass
class NormalisedConfig:
    """A config under canonical keys.

    values: canonical key -> value. spellings: canonical key -> the user's names for it, with the user's values; none
    for an implied value. notes: lines on keys that were rewritten or ignored.
    """

    values: dict[str, Any] = field(default_factory=dict)
    spellings: dict[str, list[tuple[str, Any]]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

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
    """Rewrite the (key, value) pairs of a config to canonical keys.

    A key may come more than once (``num-model-steps`` and ``num_model_steps``); equal values merge.

    Raises:
        SpecPlusConfigError: values conflict, or a value of another engine's has no counterpart here.
    """
    result = NormalisedConfig()
    rewritten: dict[str, list[str]] = {}
    implied: dict[str, Any] = {}
    for name, value in items:
        alias = ALIASES.get(name)
        if alias is None:
            key, ours = SYNONYMS.get(name, name), value
            if name == "method" and isinstance(value, str) and value in METHOD_ALIASES:
                system, ours = METHOD_ALIASES[value]
                rewritten.setdefault(system, []).append(f"{setting(name, value)} -> {show(ours)}")
            result.add(key, ours, name, value)
        elif alias.target is None:
            result.notes.append(f"{alias.system}'s {setting(name, value)} is ignored: {alias.why}")
        else:
            ours = _translate(alias, value)
            result.add(alias.target, ours, name, value)
            implied.update(alias.implies)
            rewritten.setdefault(alias.system, []).append(f"{setting(name, value)} -> {setting(alias.target, ours)}")
    for key, value in implied.items():
        if result.values.get(key) is None:
            result.values[key] = value
            result.spellings.pop(key, None)
            result.notes.insert(0, f"{setting(key, value)}, which those options imply")
    result.notes[:0] = [f"{system} options mapped: {', '.join(lines)}" for system, lines in rewritten.items()]
    return result


def _translate(alias: Alias, value: Any) -> Any:
    if alias.values is None:
        return value
    if isinstance(value, str) and value in alias.values:
        return alias.values[value]
    if alias.open_values:
        return value
    meant = nearest(value, alias.values)
    hint = f"; did you mean {show(meant)}?" if meant else ""
    raise not_allowed_error(setting(alias.key, value), f"expected one of {choices(alias.values)}{hint}")


def is_foreign(name: str, value: Any) -> bool:
    """Whether this key, or this value of ``method``, is another engine's."""
    return name in ALIASES or (name == "method" and isinstance(value, str) and value in METHOD_ALIASES)
