"""The flags of ``vllm serve``, read from the installed vLLM's source: importing vLLM takes many seconds."""

import ast
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from vllm_specplus.config.stock_keys import vllm_folder

_ARGUMENTS_FILE = Path("engine/arg_utils.py")
# vLLM has moved this file from folder to folder.
_SERVER_FILES = "entrypoints/**/cli_args.py"


@dataclass(frozen=True)
class VllmFlags:
    """The flags of one vLLM; all names are without dashes in front, with dashes inside.

    names: all of them. short: a short name -> the long one. switches: those that take no value.
    negatable: the switches that have a ``--no-`` form.
    """

    names: frozenset[str]
    short: Mapping[str, str]
    switches: frozenset[str]
    negatable: frozenset[str]


def vllm_flags() -> VllmFlags:
    """The flags of the vLLM that ``import vllm`` would load.

    Raises:
        SpecPlusConfigError: vLLM is not installed.
        OSError: its source cannot be read.
    """
    return _read_flags(vllm_folder())


@functools.lru_cache(maxsize=2)
def _read_flags(package: Path) -> VllmFlags:
    names: set[str] = set()
    short: dict[str, str] = {}
    actions: dict[str, str] = {}
    for path in (package / _ARGUMENTS_FILE, *sorted(package.glob(_SERVER_FILES))):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for name, is_switch in _fields(tree):
            names.add(name)
            if is_switch:
                actions.setdefault(name, "BooleanOptionalAction")
        for spellings, action in _added_arguments(tree):
            long = [word[2:] for word in spellings if word.startswith("--")]
            names.update(long)
            short.update({word[1:]: long[0] for word in spellings if long and word[:2] != "--" and word[:1] == "-"})
            actions.update({name: action for name in long if action})
    switches = {name for name, action in actions.items() if action in ("store_true", "BooleanOptionalAction")}
    return VllmFlags(
        frozenset(names),
        MappingProxyType(short),
        frozenset(switches),
        frozenset(name for name in switches if actions[name] == "BooleanOptionalAction"),
    )


def _fields(tree: ast.Module) -> Iterator[tuple[str, bool]]:
    """The fields of the classes of arguments: vLLM makes a flag of each. Whether it is a switch."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name.endswith("Args"):
            for field in node.body:
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    is_switch = ast.unparse(field.annotation) in ("bool", "bool | None")
                    yield field.target.id.replace("_", "-"), is_switch


def _added_arguments(tree: ast.Module) -> Iterator[tuple[list[str], str]]:
    """The spellings and the action, or "", of each call that adds a flag to a parser."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            words = [word.value for word in node.args if isinstance(word, ast.Constant) and isinstance(word.value, str)]
            actions = [ast.unparse(keyword.value) for keyword in node.keywords if keyword.arg == "action"]
            yield words, actions[0].rpartition(".")[2].strip("'") if actions else ""
