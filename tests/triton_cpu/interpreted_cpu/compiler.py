"""The half of a backend that compiles. Triton insists on it; the interpreter never calls it."""

from types import ModuleType
from typing import Any, NoReturn

from triton.backends.compiler import BaseBackend, GPUTarget

_REFUSAL = "this backend compiles nothing: set TRITON_INTERPRET=1"


class InterpretedBackend(BaseBackend):
    @staticmethod
    def supports_target(target: GPUTarget) -> bool:
        return target.backend == "cpu"

    def hash(self) -> str:
        return "interpreted"

    def parse_options(self, options: dict[str, Any]) -> NoReturn:
        raise RuntimeError(_REFUSAL)

    def add_stages(self, stages: dict[str, Any], options: object, language: object) -> NoReturn:
        raise RuntimeError(_REFUSAL)

    def load_dialects(self, context: object) -> None:
        pass

    def get_module_map(self) -> dict[str, ModuleType]:
        return {}
