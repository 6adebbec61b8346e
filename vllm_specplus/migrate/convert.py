"""Converts the options of another system's server, one by one, into a ``vllm serve`` command."""

import json
import re
import shlex
from dataclasses import dataclass, field
from typing import Any

from vllm_specplus.config import SpecPlusConfigError, parse_json, resolve
from vllm_specplus.config.aliases import ALIASES
from vllm_specplus.config.dialects import FASTDEPLOY, PADDLENLP, RTP_LLM, dialect_of
from vllm_specplus.config.errors import choices
from vllm_specplus.config.quantizations import quantization_named, vllm_name
from vllm_specplus.config.stock_keys import stock_keys
from vllm_specplus.migrate.shell import is_worked_out, plain, quoted, variables_in
from vllm_specplus.migrate.sources import STARTER, VLLM_ASCEND, Start
from vllm_specplus.migrate.tables import DEFAULTS, DTYPES, FALSE, FOREIGN_VARIABLES, OPTIONS, Option
from vllm_specplus.migrate.vllm_flags import VllmFlags, vllm_flags

_BOOLEANS = ("1", "true", "yes", "on", *FALSE)
# Parts of the names of vLLM Ascend's own options that change what is drafted or accepted.
_DRAFTING_WORDS = ("draft", "spec", "verif", "entropy", "reject")
SYSTEMS = (*dict.fromkeys(system for system, _ in OPTIONS), VLLM_ASCEND)
# PaddleNLP's image has one variable in small letters.
_VARIABLE = re.compile("[A-Z][A-Z0-9_]*|model_name")
# How the names of a system's own variables begin. FastDeploy's server reads few others.
_OWN_VARIABLES = {FASTDEPLOY: "FD_", PADDLENLP: "", RTP_LLM: ""}


@dataclass
class Migration:
    """The result of a conversion.

    flags: of vLLM, with their values; a switch has none. speculative: the speculative config. model: what to serve.
    lines: what became of each option. missing: the lines of options that matter and have no counterpart.
    """

    system: str
    model: str | None = None
    flags: dict[str, list[str]] = field(default_factory=dict)
    speculative: dict[str, Any] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    @property
    def command(self) -> str:
        """The command as the shell takes it."""
        words = ["VLLM_PLUGINS=specplus"] if self.speculative else []
        words += ["vllm", "serve", quoted(self.model or "MODEL")]
        for flag, values in self.flags.items():
            if flag.removeprefix("--") in vllm_flags().repeated:
                words += [word for value in values for word in (flag, quoted(value))]
            else:
                words += [flag, *map(quoted, values)]
        if self.speculative:
            words += ["--speculative-config", shlex.quote(json.dumps(self.speculative))]
        return " ".join(words)

    def note(self, line: str, *, is_missing: bool = False) -> None:
        """Add a line on what became of an option."""
        (self.missing if is_missing else self.lines).append(plain(line))

    def add_flag(self, flag: str, *values: str) -> None:
        """Add a flag of vLLM's; the last one of a name counts, unless each adds a value."""
        name = flag.removeprefix("--")
        self.flags.pop(f"--no-{name}", None)
        self.flags.pop(f"--{name.removeprefix('no-')}" if name.startswith("no-") else "", None)
        before = self.flags.get(flag, []) if name in vllm_flags().repeated else []
        self.flags[flag] = [*before, *values]


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
        raise SpecPlusConfigError(f"nothing tells the system: add --from with one of {choices(SYSTEMS)}")
    result = Migration(found)
    for line in start.notes:
        result.note(line)
    for name in start.variable_files:
        what = "its variables were read with --env" if start.has_variable_file else f"read it with --env {name}"
        result.note(f"--env-file {name}: {what}", is_missing=not start.has_variable_file)
    for name, value in start.variables.items():
        _convert_variable(result, name, value, start)
    words = list(start.words)
    for name, values in start.options:
        words += (_convert_vllm_flag if found == VLLM_ASCEND else _convert_flag)(result, name, values, start)
    _convert_words(result, words, start)
    if found == VLLM_ASCEND:
        result.note("platform: vllm-specplus runs on CUDA and on a CPU; an NPU refuses its keys")
    else:
        _note_defaults(result, start)
    for line in start.unread:
        result.note(line, is_missing=True)
    if result.model is None:
        result.note("the model is not named: put it in the place of MODEL", is_missing=True)
    _check_speculation(result)
    return result


def _note_defaults(result: Migration, start: Start) -> None:
    """Name the defaults of the system's that differ from vLLM's, where nothing sets them."""
    for default in DEFAULTS.get(result.system, ()):
        flags = {default.flag, "--no-" + default.flag.removeprefix("--"), default.flag.replace("--no-", "--")}
        if default.program in start.program and not flags & result.flags.keys():
            value = f" {default.value}" if default.value else ""
            result.note(
                f"{default.name}: left out; {result.system}'s default is {default.says}, vLLM has its own. For the "
                f"same add {default.flag}{value}"
            )


def _system_of_options(start: Start) -> str | None:
    """The system that knows the most of the options and variables."""
    known = {
        system: sum(_option(system, name)[0] is not None for name, _ in start.options)
        + sum(_option_of_variable(system, name) is not None for name in start.variables)
        for system in SYSTEMS
        if system != VLLM_ASCEND
    }
    best = max(known, key=lambda system: known[system])
    return best if known[best] else None


def _option(system: str, name: str) -> tuple[Option | None, bool]:
    """The option that a flag is, and whether the flag turns it off."""
    spelling = name.replace("-", "_")
    positive = OPTIONS.get((system, spelling.removeprefix("no_")))
    is_off = spelling.startswith("no_") and positive is not None and positive.kind == "switch"
    return (positive if is_off else OPTIONS.get((system, spelling))), is_off


def _option_of_variable(system: str, name: str) -> Option | None:
    """The option that a variable is; one of RTP-LLM's has a flag's name in capitals."""
    if not _VARIABLE.fullmatch(name):
        return None
    return OPTIONS.get((system, name)) or (OPTIONS.get((system, name.lower())) if system == RTP_LLM else None)


def _may_be_own(system: str, name: str) -> bool:
    """Whether a system's server may read a variable of this name."""
    beginning = _OWN_VARIABLES.get(system)
    return beginning is not None and name.startswith(beginning) and _VARIABLE.fullmatch(name) is not None


def _shown(name: str, values: list[str]) -> str:
    return f"{name}={' '.join(values)}" if any(values) else name


def _convert_variable(result: Migration, name: str, value: str, start: Start) -> None:
    shown = _shown(name, [value])
    option = _option_of_variable(result.system, name)
    if option is not None:
        if is_worked_out(value):
            result.note(f"{shown}: the shell works it out, so put in by hand what it gives", is_missing=True)
        _convert(result, shown, option, [value], start)
    elif name in start.inserted_variables:
        result.note(f"{shown}: is put in where the command names it")
    elif _may_be_own(result.system, name) and not name.startswith(FOREIGN_VARIABLES):
        result.note(f"{shown}: is no known option of {result.system}'s", is_missing=True)
    else:
        result.note(f"{shown}: stays in the environment")


def _convert_flag(result: Migration, name: str, values: list[str], start: Start) -> list[str]:
    """Convert a flag of another system's; return the words after it that are not its own."""
    option, is_off = _option(result.system, name)
    if option is None:
        result.note(f"{_shown(name, values)}: is no known option of {result.system}'s", is_missing=True)
        return []
    if option.kind == "none":
        count = len(values)
    else:
        count = _count(values, is_switch=option.kind == "switch", is_list=option.target[2:] in vllm_flags().lists)
    own = ["false"] if is_off else values[:count]
    _convert(result, _shown(name, values[:count]), option, own, start)
    return values[count:]


def _count(values: list[str], *, is_switch: bool, is_list: bool) -> int:
    """How many of the words after a flag are its own; a switch has none but for a true or a false one."""
    if is_list:
        return len(values)
    return int(bool(values) and (not is_switch or values[0].lower() in _BOOLEANS))


def _convert(result: Migration, shown: str, option: Option, values: list[str], start: Start) -> None:
    value = " ".join(values)
    if values and value.lower() in {neutral.lower() for neutral in option.neutral}:
        result.note(f"{shown}: asks for nothing that vLLM does not do")
    elif option.name == "speculative_config":
        _add_config(result, value)
    elif option.name == "config" and start.has_file:
        result.note(f"{shown}: its options were read with --yaml")
    elif option.kind == "none":
        target = f"{option.target} must be written by hand: " if option.target else "has no counterpart: "
        result.note(f"{shown}: {target}{option.why}", is_missing=option.matters)
    elif not value and not option.value and option.kind in ("value", "model"):
        result.note(f"{shown}: has no value", is_missing=True)
    elif option.kind == "model":
        result.model = value
        result.note(f"{shown} -> vllm serve {value}")
    elif option.kind == "speculative":
        result.speculative[option.target] = _typed(option.value or _config_text(result, value))
        result.note(f"{shown} -> {option.target} of --speculative-config")
    elif option.kind == "switch":
        name = option.target.removeprefix("--")
        result.add_flag(f"--no-{name}" if values and value.lower() in FALSE else f"--{name}")
        result.note(f"{shown} -> {list(result.flags)[-1]}")
    else:
        _set_flag(result, option.target, shown, [option.value] if option.value else values)


def _convert_words(result: Migration, words: list[str], start: Start) -> None:
    """What stands beside the options: the model, for a server that takes it so."""
    takes_model = result.system in (VLLM_ASCEND, FASTDEPLOY) and result.model is None
    if words and (takes_model or (result.system == PADDLENLP and start.program.endswith(STARTER))):
        result.model = words.pop(0)
        if result.system != VLLM_ASCEND:
            result.note(f"{result.model} -> vllm serve {result.model}")
    for word in words:
        result.note(f"{word}: is no option, so it was not read", is_missing=bool(start.program))


def _set_flag(result: Migration, flag: str, shown: str, values: list[str]) -> None:
    """Add a flag with its values; the names of quantizations and types are translated."""
    if variables_in(values[0]):
        # The shell puts the name in later.
        pass
    elif flag == "--quantization":
        known = quantization_named(values[0])
        if values[0].lower() in ("none", ""):
            result.note(f"{shown}: asks for nothing that vLLM does not do")
            return
        if known is not None and known.target is None:
            result.note(f"{shown}: {known.says}", is_missing=True)
            return
        values = [vllm_name(values[0]) or values[0]]
        if not _is_known(result, shown, values[0], "quantization; its methods", stock_keys().quantizations):
            return
        shown = f"{shown} ({known.says})" if known is not None and known.says else shown
    elif flag == "--dtype":
        values = [DTYPES.get(values[0].lower(), values[0].lower())]
        if not _is_known(result, shown, values[0], "type; its types", DTYPES.values()):
            return
    result.add_flag(flag, *values)
    result.note(f"{shown} -> {flag} {' '.join(values)}")


def _is_known(result: Migration, shown: str, value: str, what: str, known: Any) -> bool:
    """Whether vLLM knows a name; a line says so if not."""
    if value in known:
        return True
    result.note(f"{shown}: vLLM has no such {what} are {choices(dict.fromkeys(known))}", is_missing=True)
    return False


def _typed(value: str) -> Any:
    """A value of a speculative config, which is strict about types."""
    try:
        return json.loads(value)
    except ValueError:
        return {"true": True, "false": False}.get(value.lower(), value)


def _config_text(result: Migration, value: str) -> str:
    """A text for the config, which is printed in single quotes, so that the shell puts in nothing."""
    for name in dict.fromkeys(variables_in(value)):
        result.note(f"speculative_config: {name} is a variable that the command does not set", is_missing=True)
    return plain(value)


def _add_config(result: Migration, value: str) -> None:
    try:
        result.speculative = parse_json(_config_text(result, value))
    except SpecPlusConfigError as problem:
        result.note(str(problem), is_missing=True)
        return
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


def _long_name(known: VllmFlags, name: str, values: list[str]) -> tuple[str, list[str]]:
    """A flag's long name with dashes, with the keys after it, and its values; a short flag may hold its value."""
    base, dot, keys = name.partition(".")
    short = base.removeprefix("-")
    if short == base:
        return base.replace("_", "-") + dot + keys, values
    if short in known.short:
        return known.short[short] + dot + keys, values
    if short[0] == "O":
        return "optimization-level", [short[1:], *values] if short[1:] else values
    if short[0] in known.short:
        return known.short[short[0]], [name[2:], *values]
    return name, values


def _convert_vllm_flag(result: Migration, name: str, values: list[str], start: Start) -> list[str]:
    """Hand on one flag of vLLM's; return the words after it that are not its own."""
    known = vllm_flags()
    long, values = _long_name(known, name, values)
    base, _, key = long.partition(".")
    is_switch = base.removeprefix("no-") in known.negatable or base in known.switches
    count = _count(values, is_switch=is_switch, is_list=base in known.lists)
    own, rest = values[:count], values[count:]
    value = " ".join(own)
    shown = _shown(name, own)
    if base not in known.names and base.removeprefix("no-") not in known.negatable:
        result.note(f"{shown}: vLLM has no such flag", is_missing=True)
    elif not own and not is_switch:
        result.note(f"{shown}: has no value", is_missing=True)
    elif long == "speculative-config":
        _add_config(result, value)
    elif base == "speculative-config":
        _add_key(result, shown, key.replace("-", "_"), value, start)
    elif base == "additional-config":
        changes_drafts = any(word in f"{key}{value}".lower() for word in _DRAFTING_WORDS)
        what = "; it changes what is drafted or accepted there" if changes_drafts else ""
        result.note(
            f"{shown}: has no counterpart: it is vLLM Ascend's alone, for NPUs{what}", is_missing=changes_drafts
        )
    elif long == "config" and start.has_file:
        result.note(f"{shown}: its options were read with --yaml")
    elif long == "model":
        result.model = value
        result.note(f"{shown} -> vllm serve {value}")
    elif long in ("quantization", "dtype"):
        _set_flag(result, f"--{long}", shown, own)
    elif is_switch and own and value.lower() in FALSE:
        if long in known.negatable:
            result.add_flag(f"--no-{long}")
        result.note(f"{shown} -> {f'--no-{long}' if long in known.negatable else 'left out'}")
    else:
        result.add_flag(f"--{long}", *([] if is_switch else own))
        result.note(f"{name}: stays as it is" if long == name else f"{shown} -> --{long}")
    return rest


def _add_key(result: Migration, shown: str, key: str, value: str, start: Start) -> None:
    """Add one key of the speculative config; vLLM heeds no JSON beside keys."""
    is_json_too = any(_long_name(vllm_flags(), name, [])[0] == "speculative-config" for name, _ in start.options)
    if "." in key or is_json_too:
        result.note(f"{shown}: write the whole config as one JSON text", is_missing=True)
        return
    result.speculative[key] = _typed(_config_text(result, value))
    result.note(f"{shown} -> {key} of --speculative-config")
