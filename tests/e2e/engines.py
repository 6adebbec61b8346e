"""Engines in this process, with prompts and speculative configs for them."""

import gc
import sys
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import DEFAULT, patch

import pytest
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.platforms.cpu import CpuPlatform

# Each start on V1 replaces the same kernels in all loaded modules, which takes a second. A process needs it once.
CpuPlatform.register_triton_kernel_overrides = staticmethod(cache(CpuPlatform.register_triton_kernel_overrides))

# vLLM's start looks into every loaded module. An attribute of this one answers to every name, "__dict__" too, which
# ends that start; an earlier engine may have loaded it with numba.
_HIDDEN = "llvmlite.binding.ffi"

_TEXTS = (
    "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n\n\ndef mul(a, b):\n    return",
    "import os\nimport sys\n\nclass Error(Exception):\n    pass\n\nclass OtherError(Exception):\n    ",
    '[{"id": 1, "ok": true}, {"id": 2, "ok": true}, {"id": 3, "ok": true}, {"id": 4, "ok"',
    "    def test_one(self):\n        self.assertEqual(1, 1)\n\n    def test_two(self):\n        self.assert",
    "aaaa",
    "x",
)
# The tiny models' tokens are bytes.
PROMPTS = [list(text.encode()) for text in _TEXTS]

# Every fixed way of drafting, by the name of its test; test_adaptive.py has those that choose.
# `draft` in a model's path stands for the folder of the draft model.
PROPOSERS: dict[str, dict[str, Any]] = {
    "mtp": {"method": "mtp", "num_speculative_tokens": 2},
    "mtp_ngram": {
        "method": "mtp",
        "num_speculative_tokens": 5,
        "num_model_steps": 2,
        "mtp_strategy": "with_ngram",
        "adaptive": False,
    },
    "mtp_ngram_override": {
        "method": "mtp",
        "num_speculative_tokens": 5,
        "mtp_strategy": "with_ngram",
        "match_override_len": 4,
    },
    "mtp_suffix": {"method": "mtp", "num_speculative_tokens": 6, "mtp_strategy": "with_suffix", "adaptive": False},
    "draft_model_ngram": {
        "method": "draft_model",
        "model": "draft",
        "num_speculative_tokens": 4,
        "num_model_steps": 2,
        "mtp_strategy": "with_ngram",
        "adaptive": False,
    },
    "eagle_ngram": {
        "method": "eagle",
        "model": "draft/eagle",
        "num_speculative_tokens": 4,
        "num_model_steps": 2,
        "mtp_strategy": "with_ngram",
        "adaptive": False,
    },
    "ngram": {
        "method": "ngram",
        "num_speculative_tokens": 4,
        "max_ngram_size": 4,
        "min_ngram_size": 1,
    },
    "suffix": {
        "method": "suffix",
        "num_speculative_tokens": 6,
        "suffix_decoding_max_cached_requests": -1,
    },
    "naive": {"method": "naive"},
}


def marked(names: Iterable[str], chosen: Collection[str], slow: Collection[str] = ()) -> list[Any]:
    """Return names to parametrize a test by: those in `chosen` run on every supported vLLM, those in `slow` seldom."""
    marks = dict.fromkeys(chosen, pytest.mark.every_version) | dict.fromkeys(slow, pytest.mark.slow)
    return [pytest.param(name, marks=marks.get(name, ())) for name in names]


# A hybrid that chooses its drafts, where tests of fixed ways run it too. Who drafts depends on times.
ADAPTIVE = {"method": "mtp", "num_speculative_tokens": 5, "num_model_steps": 2, "mtp_strategy": "with_ngram"}

# EAGLE 3 reads outputs of the target's layers, which vLLM's MiMo does not offer. So its target is the draft model.
EAGLE3 = {
    "method": "eagle3",
    "model": "draft/eagle3",
    "num_speculative_tokens": 4,
    "num_model_steps": 2,
    "mtp_strategy": "with_ngram",
    "min_ngram_size": 1,
    # A match of one byte replaces the head's drafts, so the target accepts some of either.
    "match_override_len": 1,
}


@dataclass(frozen=True)
class Counts:
    """vLLM's own counters of one engine."""

    drafts: int
    drafted: int
    accepted: int
    by_position: list[int]


class Engine:
    """One running engine."""

    def __init__(self, llm: LLM):
        self.llm = llm

    @property
    def runner(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner

    def generate(self, prompts: list[list[int]], **sampling: Any) -> list[Any]:
        params = SamplingParams(**{"temperature": 0.0, "max_tokens": 48, "ignore_eos": True} | sampling)
        return self.llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)

    def tokens(self, prompts: list[list[int]] = PROMPTS, **sampling: Any) -> list[list[int]]:
        """Return the token ids of each completion of each prompt, in order."""
        results = self.generate(prompts, **sampling)
        return [list(c.token_ids) for r in results for c in r.outputs]

    def counts(self) -> Counts:
        found = {m.name: m for m in self.llm.get_metrics()}

        def value(name: str) -> int:
            return int(found[f"vllm:spec_decode_num_{name}"].value)

        per_pos = found["vllm:spec_decode_num_accepted_tokens_per_pos"].values
        return Counts(value("drafts"), value("draft_tokens"), value("accepted_tokens"), per_pos)


def speculative(name: str, draft: Path, **more: Any) -> dict[str, Any]:
    """Return the config of that name in `PROPOSERS`, or `EAGLE3` or `ADAPTIVE`, with more keys."""
    config = (PROPOSERS | {"eagle3_ngram": EAGLE3, "adaptive": ADAPTIVE})[name] | more
    if "model" in config:
        config["model"] = config["model"].replace("draft", str(draft), 1)
    return config


def target(proposer: str, tiny: Path, trained: Path) -> Path:
    """Return the model to draft for: the trained one, or `tiny` for a random draft model or head of its shape."""
    return tiny if "model" in PROPOSERS.get(proposer, {}) else trained


@contextmanager
def engine(model: Path, speculative_config: dict[str, Any] | None = None, **args: Any) -> Iterator[Engine]:
    """Start an engine on `model`, and take it down again whatever happens."""
    defaults = {
        "dtype": "float32",
        "enforce_eager": True,
        "kv_cache_memory_bytes": 64 << 20,
        "max_model_len": 512,
        "disable_log_stats": False,
        "enable_prefix_caching": False,
    }
    with _imports_frozen():
        hidden = sys.modules.pop(_HIDDEN, None)
        try:
            llm = LLM(model=str(model), speculative_config=speculative_config, **defaults | args)
        except BaseException:
            # Otherwise the next engine finds the process groups of this one.
            cleanup_dist_env_and_memory()
            raise
        finally:
            if hidden is not None:
                sys.modules[_HIDDEN] = hidden
        try:
            yield Engine(llm)
        finally:
            llm.llm_engine.engine_core.shutdown()
            cleanup_dist_env_and_memory()


@contextmanager
def _imports_frozen() -> Iterator[None]:
    """Keep what has been imported out of the ten garbage collections of an engine's life, each of 0.2 s otherwise.

    vLLM would freeze the engine too, and thaw all of it before the last of them.
    """
    gc.collect()  # what is left of the engine before
    gc.freeze()
    with patch.multiple(gc, freeze=DEFAULT, unfreeze=DEFAULT):
        yield
