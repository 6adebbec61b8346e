"""Prompts from a file, and the model's name checked."""

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_specplus.compare.processes import RefusedError

_CONFIG_FILES = "config.json", "params.json"  # the second is of Mistral's own format

Message = dict[str, str]


@dataclass(frozen=True)
class Prompt:
    """One prompt.

    name: short, for tables.
    text: to be continued as it is; None if there are messages.
    messages: a chat, put into the model's chat template; without a template their texts are continued.
    reference: a text that the answer will resemble; "" for none. Configurations for which the plugin drafts get it.
    """

    name: str
    text: str | None = None
    messages: tuple[Message, ...] = ()
    reference: str = ""


def read_prompts(path: Path) -> list[Prompt]:
    """Read a file of prompts: ``.jsonl`` has a JSON object a line, ``.txt`` a prompt a line.

    An object has ``prompt``, a text, or ``messages``, a chat; and perhaps ``prediction``, a text.

    Raises:
        RefusedError: the file has another suffix, cannot be read, is not UTF-8, has no prompt, or has a wrong line.
    """
    read = _READERS.get(path.suffix.lower())
    if read is None:
        raise RefusedError(f"{path} must end with {' or '.join(_READERS)}")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as problem:
        raise RefusedError(f"cannot read {path}: {problem.strerror or problem}") from None
    except UnicodeDecodeError as problem:
        raise RefusedError(f"{path} is not UTF-8 text: byte {problem.start} is wrong") from None
    # `splitlines` would part a JSON text at characters that may stand within it.
    lines = enumerate(text.split("\n"), 1)
    prompts = [read(f"{path} line {number}", line, str(number)) for number, line in lines if line.strip()]
    if not prompts:
        raise RefusedError(f"{path} is empty: it has no prompt")
    return prompts


def _of_text(place: str, line: str, name: str) -> Prompt:
    return Prompt(name, line.rstrip("\r"))


def _of_json(place: str, line: str, name: str) -> Prompt:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as problem:
        raise RefusedError(f"{place} is not JSON: {problem.msg} at column {problem.colno}") from None
    except (RecursionError, ValueError):
        raise RefusedError(f"{place} is not a prompt: it is nested too deep, or has too long a number") from None
    if not isinstance(value, dict):
        raise RefusedError(f"{place} is not a JSON object")
    if unknown := value.keys() - {"prompt", "messages", "prediction"}:
        allowed = "allowed are prompt, messages and prediction"
        raise RefusedError(f"{place} has an unknown key {sorted(unknown)[0]!r}: {allowed}")
    text, messages, reference = value.get("prompt"), value.get("messages"), value.get("prediction", "")
    if (text is None) == (messages is None):
        raise RefusedError(f"{place} must have either prompt or messages")
    if text is not None and not (isinstance(text, str) and text):
        raise RefusedError(f"{place}: prompt must be a text")
    if messages is not None and not (isinstance(messages, list) and messages and all(map(_is_message, messages))):
        raise RefusedError(f'{place}: messages must be a list of {{"role": text, "content": text}}')
    if not isinstance(reference, str):
        raise RefusedError(f"{place}: prediction must be a text")
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise RefusedError(f"{place} has half of a surrogate pair, which stands for no character") from None
    return Prompt(name, text, tuple(messages or ()), reference)


_READERS = {".jsonl": _of_json, ".txt": _of_text}


def _is_message(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == {"role", "content"}
        and all(isinstance(v, str) for v in value.values())
    )


def check_model(model: str, place: str = "") -> str:
    """Check that a model is a folder or file here, or a repository that the hub or its cache has.

    Args:
        place: where it is named; begins the message.

    Returns:
        The model, with the user's folder in the place of ``~``.

    Raises:
        RefusedError: it is not.
    """
    try:
        path = Path(model).expanduser()
        if path.is_dir():
            if not any((path / name).is_file() for name in _CONFIG_FILES):
                raise RefusedError(f"{place}the model does not exist: {model} has no config.json")
            return str(path)
        if path.is_file():
            return str(path)
    except (OSError, RuntimeError) as problem:
        said = problem.strerror if isinstance(problem, OSError) else problem
        raise RefusedError(f"{place}cannot read the model {model}: {said}") from None
    _check_repository(model, place)
    return model


def _check_repository(name: str, place: str) -> None:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    for file in _CONFIG_FILES:
        # Not cached and offline, no such repository, no such file in it, or not the name of one.
        with suppress(HFValidationError, FileNotFoundError, OSError, HfHubHTTPError):
            hf_hub_download(name, file)
            return
    raise RefusedError(f"{place}the model does not exist: {name} is no folder, and no repository that can be read")
