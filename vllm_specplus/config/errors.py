"""The errors of a refused speculative config: one class, one form of words."""

import difflib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError

_MAX_SHOWN = 80
_JSON_TYPES = {
    "integer": "an integer",
    "number": "a number",
    "string": "a string",
    "boolean": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}
_BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}


class SpecPlusConfigError(ValueError):
    """A speculative config is refused; the text names the key, its value, and the allowed values."""


def show(value: Any) -> str:
    """A config value as JSON, cut to a readable length."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        text = f"<{type(value).__name__}>"
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."


def setting(key: str, value: Any) -> str:
    """``key=value`` on one line, whatever characters the key holds."""
    return f"{key if key.isidentifier() else show(key)}={show(value)}"


def config_error(text: str) -> SpecPlusConfigError:
    """An error whose text begins with the name of the engine's option."""
    return SpecPlusConfigError(f"speculative_config: {text}")


def not_allowed_error(what: str, allowed: str) -> SpecPlusConfigError:
    """The error for a known key: `what` is `setting(...)`, `allowed` the rule that it breaks."""
    return config_error(f"{what} is not allowed: {allowed}")


def choices(names: Iterable[Any]) -> str:
    """The allowed values as a list in words, in their order."""
    return ", ".join(show(name) for name in names)


def nearest(name: Any, known: Iterable[str], cutoff: float = 0.75) -> str | None:
    """The known name that `name` most likely stands for, in any case; or None."""
    if not isinstance(name, str):
        return None
    names = list(known)
    for spelling in (name, name.lower()):
        if found := difflib.get_close_matches(spelling, names, n=1, cutoff=cutoff):
            return found[0]
    return None


def describe(schema: Mapping[str, Any]) -> str:
    """The values that a JSON schema allows, in words, with the schema's own bounds."""
    branches = schema.get("anyOf")
    if branches:
        return " or ".join(describe(branch) for branch in branches)
    if "enum" in schema:
        return f"one of {choices(schema['enum'])}"
    if "const" in schema:
        return show(schema["const"])
    kind = _JSON_TYPES.get(schema.get("type", ""), "another value")
    bounds = [f"{sign} {schema[name]}" for name, sign in _BOUNDS.items() if name in schema]
    return " ".join([kind, " and ".join(bounds)]) if bounds else kind


def schema_error(what: str, value: Any, schema: Mapping[str, Any]) -> SpecPlusConfigError:
    """The error for a value that its field's JSON schema does not allow."""
    names = [
        name
        for branch in (schema, *schema.get("anyOf", ()))
        for name in branch.get("enum", ())
        if isinstance(name, str)
    ]
    meant = nearest(value, names, cutoff=0.6)
    hint = f"; did you mean {show(meant)}?" if meant else ""
    return not_allowed_error(what, f"expected {describe(schema)}{hint}")


def combined_error(errors: list[SpecPlusConfigError]) -> SpecPlusConfigError:
    """Several errors as one, a line for each."""
    return SpecPlusConfigError("\n".join(str(one) for one in errors))


def keys_in_error(problem: ValidationError) -> list[str]:
    """The top-level keys that pydantic refused, each once, in pydantic's order."""
    return list(dict.fromkeys(str(item["loc"][0]) for item in problem.errors() if item["loc"]))
