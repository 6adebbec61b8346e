"""Converts the options of another system's server, one by one, into a ``vllm serve`` command."""

import json
import shlex
from dataclasses import dataclass, field
from typing import Any

from vllm_specplus.config import SpecPlusConfigError, parse_json, resolve
from vllm_specplus.config.aliases import ALIASES
from vllm_specplus.config.dialects import dialect_of
from vllm_specplus.config.errors import choices, config_error
from vllm_specplus.config.quantizations import quantization_named, vllm_name
from vllm_specplus.config.stock_keys import stock_keys
from vllm_specplus.migrate.sources import VLLM_ASCEND, Start
from vllm_specplus.migrate.tables import DEFAULTS, FOREIGN_VARIABLES, OPTIONS, Option
from vllm_specplus.migrate.vllm_flags import vllm_flags

_FALSE = ("0", "false", "no", "off", "none")
# Parts of the names of vLLM Ascend's own options that change what is drafted or accepted.
_DRAFTING_WORDS = ("draft", "spec", "verif", "entropy", "reject")
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
            _convert(result, name, value, start)
        _note_defaults(result, start)
    for line in start.unread:
        result.note(line, is_missing=True)
    if result.model is None:
        result.note("the model is not named: put it in the place of MODEL", is_missing=True)
    _check_speculation(result)
    return result


def _note_defaults(result: Migration, start: Start) -> None:
    """Name the defaults of the system's that differ from vLLM's, where nothing sets them."""
    program = start.words[start.program] if start.program >= 0 else ""
    for default in DEFAULTS.get(result.system, ()):
        flags = {default.flag, "--no-" + default.flag.removeprefix("--"), default.flag.replace("--no-", "--")}
        if default.program in program and not flags & result.flags.keys():
            value = f" {default.value}" if default.value else ""
            result.note(
                f"{default.name}: left out; {result.system}'s default is {default.says}, vLLM has its own. For the "
                f"same add {default.flag}{value}"
            )


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


def _convert(result: Migration, name: str, value: str, start: Start) -> None:
    option = _option(result.system, name)
    shown = f"{name}={value}" if value else name
    if option is None:
        if name.startswith(FOREIGN_VARIABLES):
            result.note(f"{shown}: stays in the environment")
        elif name in start.inserted_variables:
            result.note(f"{shown}: is put in where the command names it")
        else:
            result.note(f"{shown}: is no known option of {result.system}'s", is_missing=True)
    elif option.name == "speculative_config":
        _add_config(result, value)
    elif value.lower() in {neutral.lower() for neutral in option.neutral}:
        result.note(f"{shown}: asks for nothing that vLLM does not do")
    elif option.name == "config" and start.has_file:
        result.note(f"{shown}: its options were read with --yaml")
    elif option.kind == "none":
        target = f"{option.target} must be written by hand: " if option.target else "has no counterpart: "
        result.note(f"{shown}: {target}{option.why}", is_missing=option.matters)
    elif not value and option.kind in ("value", "model"):
        result.note(f"{shown}: has no value", is_missing=True)
    elif option.kind == "model":
        result.model = value
        result.note(f"{shown} -> vllm serve {value}")
    elif option.kind == "speculative":
        result.speculative[option.target] = _typed(option.value or value)
        result.note(f"{shown} -> {option.target} of --speculative-config")
    elif option.kind == "switch":
        if value.lower() in _FALSE:
            result.flags["--no-" + option.target.removeprefix("--")] = None
        else:
            result.flags[option.target] = None
        result.note(f"{shown} -> {list(result.flags)[-1]}")
    else:
        _set_flag(result, option.target, shown, option.value or value)


def _set_flag(result: Migration, flag: str, shown: str, value: str) -> None:
    """Add a flag with its value, which is translated if it names a quantization."""
    if flag == "--quantization":
        known = quantization_named(value)
        if known is not None and known.target is None:
            result.note(f"{shown}: {known.says}", is_missing=True)
            return
        value = vllm_name(value) or value
        if value not in (methods := stock_keys().quantizations):
            result.note(f"{shown}: vLLM has no such quantization; its methods are {choices(methods)}", is_missing=True)
            return
        shown = f"{shown} ({known.says})" if known is not None and known.says else shown
    result.flags[flag] = value
    result.note(f"{shown} -> {flag} {value}")


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
        result.note(str(problem), is_missing=True)
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
    known = vllm_flags()
    words = [word for word in start.arguments if word not in ("vllm", "serve")]
    for name, value in dict(start.options).items():
        long = known.short.get(name.removeprefix("-")) if name.startswith("-") else name.replace("_", "-")
        if long in known.switches and value and value.lower() not in ("true", *_FALSE):
            # A switch takes no value: the word after it stands for itself.
            words.append(value)
            value = ""
        _convert_flag(result, name, long, value)
    if words and result.model is None:
        result.model = words.pop(0)
    for word in words:
        result.note(f"{word}: is no option, so it was not read", is_missing=True)
    result.note("platform: vllm-specplus runs on CUDA and on a CPU; an NPU refuses its keys")


def _convert_flag(result: Migration, name: str, long: str | None, value: str) -> None:
    """Hand on one flag of vLLM's; `long`: its long name without dashes, None for an unknown short one."""
    known = vllm_flags()
    shown = f"{name}={value}" if value else name
    base, key = (long or name).partition(".")[0], name.partition(".")[2].replace("-", "_")
    is_level = name.startswith("-O")
    if name.isupper() and not is_level:
        result.note(f"{shown}: stays in the environment")
    elif long == "speculative-config":
        _add_config(result, value)
    elif base == "speculative-config":
        result.speculative[key] = _typed(value)
        result.note(f"{shown} -> {key} of --speculative-config")
    elif base == "additional-config":
        changes_drafts = any(word in f"{key}{value}".lower() for word in _DRAFTING_WORDS)
        what = "; it changes what is drafted or accepted there" if changes_drafts else ""
        result.note(
            f"{shown}: has no counterpart: it is vLLM Ascend's alone, for NPUs{what}", is_missing=changes_drafts
        )
    elif long == "model":
        result.model = value
        result.note(f"{shown} -> vllm serve {value}")
    elif base not in known.names and not is_level and base.removeprefix("no-") not in known.negatable:
        result.note(f"{shown}: vLLM has no such flag", is_missing=True)
    elif long == "quantization":
        _set_flag(result, "--quantization", shown, value)
    elif long in known.switches and value.lower() in _FALSE:
        if long in known.negatable:
            result.flags[f"--no-{long}"] = None
        result.note(f"{shown} -> {f'--no-{long}' if long in known.negatable else 'left out'}")
    else:
        flag = name if is_level else f"--{long}"
        result.flags[flag] = None if long in known.switches else value or None
        result.note(f"{name}: stays as it is" if flag == f"--{name}" else f"{shown} -> {flag}")
