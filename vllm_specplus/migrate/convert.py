"""Converts the options of another system's server, one by one, into a ``vllm serve`` command."""

import json
import shlex
from dataclasses import dataclass, field
from typing import Any

from vllm_specplus.config import SpecPlusConfigError, parse_json, resolve
from vllm_specplus.config.aliases import ALIASES
from vllm_specplus.config.dialects import FASTDEPLOY, RTP_LLM, dialect_of
from vllm_specplus.config.errors import choices, config_error
from vllm_specplus.config.quantizations import quantization_named, vllm_name
from vllm_specplus.migrate.sources import VLLM_ASCEND, Start
from vllm_specplus.migrate.tables import FOREIGN_VARIABLES, OPTIONS, Option

_FALSE = ("0", "false", "no", "off", "none")
_DEFAULTS = {
    FASTDEPLOY: {
        "max_model_len": "2048",
        "max_num_seqs": "8",
        "block_size": "64",
        "enable_prefix_caching": "false",
        "enable_chunked_prefill": "false",
    },
    RTP_LLM: {"reuse_cache": "false"},
}
"""Defaults of the servers that differ from vLLM's, by system."""
SYSTEMS = (*dict.fromkeys(system for system, _ in OPTIONS), VLLM_ASCEND)


@dataclass
class Migration:
    """The result of a conversion.

    flags: of vLLM, with their values; None for a switch. speculative: the speculative config. model: what to serve.
    lines: what became of each option. missing: the lines of options that matter and have no counterpart.
    """

    system: str
    model: str | None = None
    flags: dict[str, str | None] = field(default_factory=dict)
    speculative: dict[str, Any] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    @property
    def command(self) -> str:
        """The command as the shell takes it."""
        words = ["VLLM_PLUGINS=specplus"] if self.speculative else []
        words += ["vllm", "serve", _quoted(self.model or "MODEL")]
        for flag, value in self.flags.items():
            words += [flag] if value is None else [flag, _quoted(value)]
        if self.speculative:
            words += ["--speculative-config", shlex.quote(json.dumps(self.speculative))]
        return " ".join(words)

    def note(self, line: str, *, is_missing: bool = False) -> None:
        """Add a line on what became of an option."""
        (self.missing if is_missing else self.lines).append(line)


def _quoted(value: str) -> str:
    """A word for the shell, which still puts in the values of variables."""
    return f'"{value}"' if "$" in value and not set('"`\\') & set(value) else shlex.quote(value)


def migrate(start: Start, system: str | None = None) -> Migration:
    """Convert a server's start.

    Args:
        start: what the user starts.
        system: whose server it is; None: the program or the options tell.

    Raises:
        SpecPlusConfigError: nothing tells the system.
    """
    found = system or start.system or _system_of_options(start)
    if found is None:
        raise config_error(f"nothing tells the system: add --from with one of {choices(SYSTEMS)}")
    result = Migration(found)
    if found == VLLM_ASCEND:
        _convert_ascend(result, start)
    else:
        for name, value in dict(start.options).items():
            _convert(result, name, value, is_inserted=name in start.inserted_variables)
        names = {name.replace("-", "_").lower() for name, _ in start.options}
        for name, default in _DEFAULTS.get(found, {}).items():
            if name not in names:
                result.note(f"{name}: left out; {found}'s default is {default}, vLLM has its own")
    if result.model is None:
        result.note("the model is not named: put it in the place of MODEL", is_missing=True)
    _check_speculation(result)
    return result


def _system_of_options(start: Start) -> str | None:
    """The system that knows the most of the options; a variable of RTP-LLM's has a flag's name in capitals."""
    known = {
        system: sum(_option(system, name) is not None for name, _ in start.options)
        for system in SYSTEMS
        if system != VLLM_ASCEND
    }
    best = max(known, key=lambda system: known[system])
    return best if known[best] else None


def _option(system: str, name: str) -> Option | None:
    spelling = name.replace("-", "_")
    return OPTIONS.get((system, spelling)) or OPTIONS.get((system, spelling.lower()))


def _convert(result: Migration, name: str, value: str, *, is_inserted: bool) -> None:
    option = _option(result.system, name)
    shown = f"{name}={value}" if value else name
    if option is None:
        if name.startswith(FOREIGN_VARIABLES):
            result.note(f"{shown}: stays in the environment")
        elif is_inserted:
            result.note(f"{shown}: is put in where the command names it")
        else:
            result.note(f"{shown}: is no known option of {result.system}'s", is_missing=True)
    elif option.name == "speculative_config":
        _add_config(result, value)
    elif value.lower() in {neutral.lower() for neutral in option.neutral}:
        result.note(f"{shown}: asks for nothing that vLLM does not do")
    elif option.kind == "none":
        target = f"{option.target} must be written by hand: " if option.target else "has no counterpart: "
        result.note(f"{shown}: {target}{option.why}", is_missing=option.matters)
    elif option.kind == "model":
        result.model = value
        result.note(f"{shown} -> vllm serve {value}")
    elif option.kind == "speculative":
        result.speculative[option.target] = _typed(value)
        result.note(f"{shown} -> {option.target} of --speculative-config")
    elif option.kind == "switch":
        if value.lower() in _FALSE:
            result.flags["--no-" + option.target.removeprefix("--")] = None
        else:
            result.flags[option.target] = None
        result.note(f"{shown} -> {list(result.flags)[-1]}")
    else:
        _set_flag(result, option, shown, value)


def _set_flag(result: Migration, option: Option, shown: str, value: str) -> None:
    if option.target == "--quantization":
        known = quantization_named(value)
        if known is not None and known.target is None:
            result.note(f"{shown}: {known.says}", is_missing=True)
            return
        value = vllm_name(value) or value
        shown = f"{shown} ({known.says})" if known is not None and known.says else shown
    result.flags[option.target] = value
    result.note(f"{shown} -> {option.target} {value}")


def _typed(value: str) -> Any:
    """A value of a speculative config, which is strict about types."""
    try:
        return json.loads(value)
    except ValueError:
        return {"true": True, "false": False}.get(value.lower(), value)


def _add_config(result: Migration, value: str) -> None:
    try:
        config = parse_json(value)
    except SpecPlusConfigError as problem:
        result.note(f"speculative_config: {problem}", is_missing=True)
        return
    result.speculative |= config
    result.note("speculative_config -> --speculative-config")


def _check_speculation(result: Migration) -> None:
    """Ask for the system's own defaults, and have the config checked."""
    config = result.speculative
    if not config:
        return
    if result.system != VLLM_ASCEND:
        foreign = {ALIASES[key].system for key in config if key in ALIASES} - {result.system}
        if not foreign:
            result.speculative = {"dialect": dialect_of(result.system), **config}
    try:
        resolved = resolve(result.speculative, strict=True)
    except SpecPlusConfigError as problem:
        result.note(str(problem), is_missing=True)
        return
    for line in (*resolved.notes, *resolved.warnings):
        result.note(line)
    if not resolved.vllm and resolved.options is None:
        result.speculative = {}


def _convert_ascend(result: Migration, start: Start) -> None:
    """vLLM Ascend's options are vLLM's, but for its own config."""
    models = [word for word in start.words if word not in ("vllm", "serve") and not word.startswith("-")]
    result.model = models[0] if models else None
    for name, value in dict(start.options).items():
        flag = "--" + name.replace("_", "-")
        if flag == "--speculative-config":
            _add_config(result, value)
        elif flag == "--additional-config":
            result.note(f"{name}={value}: has no counterpart: it is vLLM Ascend's alone, for NPUs", is_missing=False)
        elif flag == "--model":
            result.model = value
            result.note(f"{name}={value} -> vllm serve {value}")
        elif name.isupper():
            result.note(f"{name}={value}: stays in the environment")
        else:
            result.flags[flag] = value or None
            result.note(f"{name}: stays as it is")
    result.note("platform: vllm-specplus runs on CUDA and on a CPU; an NPU refuses its keys")
