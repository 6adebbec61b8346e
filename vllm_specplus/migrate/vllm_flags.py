"""The flags of ``vllm serve``, read from the installed vLLM's source: importing vLLM takes many seconds."""

import ast
import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from vllm_specplus.config.stock_keys import parse_source, vllm_folder

_ARGUMENTS_FILE = Path("engine/arg_utils.py")
# vLLM has moved this file from folder to folder.
_SERVER_FILES = "entrypoints/**/cli_args.py"

# A type that holds several values, by itself or as one of several types.
_LIST = re.compile(r"(?:^|\| )(?:list|set|tuple)\[")
_CUSTOMIZED = re.compile(r"\w+\['(\w+)'\]\['(action|nargs)'\]")


@dataclass(frozen=True)
class VllmFlags:
    """The flags of one vLLM; all names are without dashes in front, with dashes inside.

    names: all of them. short: a short name -> the long one. switches: those that take no value.
    negatable: the switches that have a ``--no-`` form. lists: those that take several values.
    repeated: those of which each one adds a value.
    """

    names: frozenset[str]
    short: Mapping[str, str]
    switches: frozenset[str]
    negatable: frozenset[str]
    lists: frozenset[str]
    repeated: frozenset[str]


def vllm_flags() -> VllmFlags:
    """The flags of the vLLM that ``import vllm`` would load.

    Raises:
        SpecPlusConfigError: vLLM is not installed, or its source cannot be read.
    """
    return _read_flags(vllm_folder())


@functools.lru_cache(maxsize=2)
def _read_flags(package: Path) -> VllmFlags:
    names: set[str] = set()
    short: dict[str, str] = {}
    actions: dict[str, str] = {}
    lists: set[str] = set()
    for path in (package / _ARGUMENTS_FILE, *sorted(package.glob(_SERVER_FILES))):
        tree = parse_source(path)
        for name, annotation in _fields(tree):
            names.add(name)
            if annotation in ("bool", "bool | None"):
                actions.setdefault(name, "BooleanOptionalAction")
            if _LIST.search(annotation):
                lists.add(name)
        for spellings, keywords in _added_arguments(tree):
            long = [word[2:] for word in spellings if word.startswith("--")]
            names.update(long)
            short.update({word[1:]: long[0] for word in spellings if long and word[:2] != "--" and word[:1] == "-"})
            if "action" in keywords:
                actions.update(dict.fromkeys(long, keywords["action"].rpartition(".")[2].strip("'")))
            if "type" in keywords:
                lists.difference_update(long)
        for name, key, value in _customized(tree):
            if key == "action":
                actions[name] = value
            else:
                lists.discard(name)
    switches = {name for name, action in actions.items() if action in ("store_true", "BooleanOptionalAction")}
    return VllmFlags(
        frozenset(names),
        MappingProxyType(short),
        frozenset(switches),
        frozenset(name for name in switches if actions[name] == "BooleanOptionalAction"),
        frozenset(lists),
        frozenset(name for name, action in actions.items() if action == "append"),
    )


def _fields(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """The fields of the classes of arguments, with their types: vLLM makes a flag of each."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name.endswith("Args"):
            for field in node.body:
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    yield field.target.id.replace("_", "-"), ast.unparse(field.annotation)


def _added_arguments(tree: ast.Module) -> Iterator[tuple[list[str], dict[str, str]]]:
    """The spellings and the keywords of each call that adds a flag to a parser."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            words = [word.value for word in node.args if isinstance(word, ast.Constant) and isinstance(word.value, str)]
            yield words, {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords if keyword.arg}


def _customized(tree: ast.Module) -> Iterator[tuple[str, str, str]]:
    """What ``kwargs["name"]["action"] = value`` and ``del kwargs["name"]["nargs"]`` change: name, key and value."""
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign | ast.Delete) else []
        for target in targets:
            found = _CUSTOMIZED.fullmatch(ast.unparse(target))
            if found is not None:
                value = ast.unparse(node.value).strip("'") if isinstance(node, ast.Assign) else ""
                yield found[1].replace("_", "-"), found[2], value
