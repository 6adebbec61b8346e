"""Reading vLLM's own keys from its source."""

import dataclasses
import importlib.util
from pathlib import Path
from typing import Any, Literal, get_args

import pytest

from vllm_specplus.config import SpecPlusConfigError
from vllm_specplus.config.stock_keys import CONFIG_FILE, QUANTIZATION_FILE, read_stock_keys, stock_keys

CONFIG = '''
from vllm.config import LoadConfig

MTPModelTypes = Literal["a_mtp", "mtp"]
SpeculativeMethod = Literal["ngram", MTPModelTypes, Literal["suffix"]]

@config
class SpeculativeConfig:
    count: int = Field(default=None, gt=0, le=9)
    """Documentation."""
    limit: Optional[int] = Field(default=-1, ge=-1)
    method: SpeculativeMethod | None = None
    schedule: list[tuple[int, int]] | None = None
    mixed: Union[int, str] = 3
    backend: Backend | None = None
    load: LoadConfig | None = None
    rewritten: int = 1
    shared: ClassVar[int] = 1
    _hidden: int = 1

    @field_validator("rewritten", mode="before")
    @classmethod
    def _read(cls, value): ...
'''
QUANTIZATION = 'QuantizationMethods = Literal["fp8"]\n'
LOAD_OBJECT = object()
CONFIG_PACKAGE = "from vllm.config.load import LoadConfig"
LOAD = """
Strategy: TypeAlias = Literal["lazy", "eager"]
if TYPE_CHECKING:
    from elsewhere import Formats
else:
    Formats = str

@config
class LoadConfig:
    format: str | Formats = "auto"
    strategy: Strategy | None = None
    threads: int = Field(default=8, ge=1)

    @field_validator("format", mode="after")
    def _lower(cls, value): ...
"""


def package(folder: Path, config: str = CONFIG, quantization: str = QUANTIZATION) -> Path:
    files = {CONFIG_FILE: config, "config/__init__.py": CONFIG_PACKAGE, "config/load.py": LOAD}
    for name, text in (files | {QUANTIZATION_FILE: quantization}).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_reads_a_package(tmp_path: Path) -> None:
    found = read_stock_keys(package(tmp_path))
    assert {name: key.type for name, key in found.keys.items()} == {
        "count": int,
        "limit": int | None,
        "method": Literal["ngram", "a_mtp", "mtp", "suffix"] | None,
        "schedule": list[tuple[int, int]] | None,
        "mixed": int | str,
        "backend": Any,
        "load": Any,
        "rewritten": Any,
    }
    assert {name: key.type for name, key in found.keys["load"].fields.items()} == {
        "format": str,
        "strategy": Literal["lazy", "eager"] | None,
        "threads": int,
    }
    assert dict(found.keys["count"].bounds) == {"gt": 0, "le": 9}
    assert found.keys["limit"].default == -1
    assert found.keys["mixed"].default == 3
    assert found.methods == ("ngram", "a_mtp", "mtp", "suffix")
    assert found.mtp_methods == ("a_mtp", "mtp")
    assert found.quantizations == ("fp8",)


@pytest.mark.parametrize(
    ("key", "value", "read"),
    [("count", "3", 3), ("limit", None, None), ("schedule", [[1, 2]], [(1, 2)]), ("backend", 3, 3)]
    + [("load", value, value) for value in (None, {"threads": "3"}, LOAD_OBJECT)],
)
def test_values_are_read_as_vllm_reads_them(tmp_path: Path, key: str, value: Any, read: Any) -> None:
    assert read_stock_keys(package(tmp_path)).keys[key].parse(f"{key}=?", value) == read


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("count", 0, "an integer > 0 and <= 9"),
        ("limit", -2, "an integer >= -1 or null"),
        ("method", "ngrm", 'did you mean "ngram"?'),
        ("schedule", [[1]], "a list or null"),
        ("load", 3, "an object or null"),
    ],
)
def test_values_out_of_bounds(tmp_path: Path, key: str, value: Any, said: str) -> None:
    with pytest.raises(SpecPlusConfigError) as caught:
        read_stock_keys(package(tmp_path)).keys[key].parse(f"{key}=?", value)
    assert said in str(caught.value)
    assert f"{key}=? is not allowed" in str(caught.value)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"nope": 1}, ["nope=1 in load=? is not allowed: expected one of format, strategy, threads"]),
        ({"thread": 1}, ["did you mean threads?"]),
        ({"format": 1}, ["format=1 in load=? is not allowed: expected a string"]),
        ({"strategy": "lzy", "threads": 0}, ['did you mean "lazy"?', "threads=0 in load=? is not allowed"]),
    ],
)
def test_fields_of_a_config_inside(tmp_path: Path, value: Any, said: list[str]) -> None:
    with pytest.raises(SpecPlusConfigError) as caught:
        read_stock_keys(package(tmp_path)).keys["load"].parse("load=?", value)
    assert len(str(caught.value).splitlines()) == len(said)
    assert all(words in str(caught.value) for words in said)


def test_the_fields_of_the_installed_vllm_agree() -> None:
    from vllm.config.load import LoadConfig

    found = stock_keys().keys["draft_load_config"].fields
    assert set(found) == {one.name for one in dataclasses.fields(LoadConfig)}


@pytest.mark.parametrize(
    ("config", "quantization", "said"),
    [
        ("class SpeculativeConfig: (", QUANTIZATION, CONFIG_FILE),
        (CONFIG.replace("class SpeculativeConfig", "class Other"), QUANTIZATION, "class Spec"),
        (CONFIG.replace("SpeculativeMethod =", "Methods ="), QUANTIZATION, "SpeculativeMethod"),
        (CONFIG.replace("MTPModelTypes", "Mtp"), QUANTIZATION, "MTPModelTypes"),
        (CONFIG, "METHODS = []", "QuantizationMethods"),
    ],
)
def test_source_that_cannot_be_read_is_named(tmp_path: Path, config: str, quantization: str, said: str) -> None:
    with pytest.raises(SpecPlusConfigError) as caught:
        read_stock_keys(package(tmp_path, config, quantization))
    assert said in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_vllm_without_a_spec(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_spec(name: str) -> None:
        raise ValueError("vllm.__spec__ is None")

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    with pytest.raises(SpecPlusConfigError, match="no installed vLLM"):
        stock_keys()


def test_the_installed_vllm_agrees() -> None:
    from vllm.config.speculative import (
        MTPModelTypes,
        SpeculativeConfig,
        SpeculativeMethod,
    )
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS

    found = stock_keys()
    fields = {one.name: one for one in dataclasses.fields(SpeculativeConfig)}
    assert set(found.keys) == set(fields)
    assert set(found.methods) == set(get_args(SpeculativeMethod))
    assert set(found.mtp_methods) == set(get_args(MTPModelTypes))
    # A platform plugin may have added to the list by now; none may be missing from it.
    assert set(found.quantizations) <= set(QUANTIZATION_METHODS)
    for name, key in found.keys.items():
        if key.default is not None:
            # vLLM 0.33 gives some fields pydantic's `Field`, which has the default.
            default = fields[name].default
            assert key.default == getattr(default, "default", default)
