"""All of the plugin's kernels are compiled before a server takes requests."""

from pathlib import Path
from typing import Any

import pytest
import torch
import triton.language as tl
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.worker.gpu.spec_decode import rejection_sampler

from tests.e2e.engines import Engine, engine
from tests.e2e.quantised import HALF
from tests.e2e.references import ask, asking, config_of
from tests.e2e.v1.test_sampling import STRUCTURED
from tests.e2e.v2.engines import FEW, async_engine, tokens
from tests.e2e.v2.warm_up import warmed_up
from vllm_specplus.kernels import counts, drafts, inputs, ngram
from vllm_specplus.kernels.arbiter import choice, judgement, offers
from vllm_specplus.kernels.verify import launch as verify
from vllm_specplus.runners.v2 import install

pytestmark = pytest.mark.interpreter

KERNELS = {
    counts: ["_count_kernel", "_steps_kernel", "_padding_kernel"],
    drafts: ["_report_kernel", "_place_kernel", "_prefer_kernel", "_continue_kernel", "_one_hot_kernel"],
    inputs: ["_gather_kernel"],
    ngram: ["_search_kernel", "_fill_kernel"],
    verify: ["row_stats_kernel", "judge_kernel", "race_kernel", "emit_kernel", "accept_greedy_kernel"],
    judgement: ["_judge_kernel"],
    offers: ["_search_kernel", "_offer_kernel"],
    choice: ["_choose_kernel"],
}
SAMPLED = {"temperature": 0.9, "seed": 3}


class NotingKernel:
    """Notes which variants of a kernel Triton would compile, by the arguments of its launches."""

    def __init__(self, kernel: Any, variants: set[Any]) -> None:
        self._kernel = kernel
        self._variants = variants

    def __getitem__(self, grid: Any) -> Any:
        kernel = self._kernel

        def launch(*args: Any, **constants: Any) -> Any:
            unspecialized, anywhere = (
                kernel.kwargs.get(f"do_not_specialize{of}") or () for of in ("", "_on_alignment")
            )
            values = zip(kernel.arg_names, args, strict=False)
            variant = [self._variant(value, name not in unspecialized, name not in anywhere) for name, value in values]
            self._variants.add((kernel.__name__, *variant, *sorted(constants.items())))
            return kernel[grid](*args, **constants)

        return launch

    @classmethod
    def _variant(cls, value: Any, is_specialized: bool, has_alignment: bool = True) -> Any:
        """The key of Triton's cache for an argument."""
        if isinstance(value, tuple):
            return tuple(cls._variant(field, True) for field in value)
        if isinstance(value, tl.constexpr):
            return value.value
        if isinstance(value, torch.Tensor):
            return value.dtype, has_alignment and value.data_ptr() % 16 == 0
        return value if value is None else is_specialized and (value == 1, value % 16 == 0)


def use(e: Engine, texts: list[list[int]], may_force: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run requests that need every kernel, in each way that a batch may come to it."""
    schema = StructuredOutputsParams(json={"enum": ["ab", "abcd"]})
    for sampling in ({}, SAMPLED, SAMPLED | {"top_p": 0.9}):
        tokens(e, FEW[:3], max_tokens=4, **sampling)
        # vLLM makes float32 of the logits.
        tokens(e, FEW[:2], max_tokens=4, repetition_penalty=1.3, **sampling)
        if may_force:
            ask(e, FEW[:2], [{"force_sp_accept": True}, {}], max_tokens=4, **sampling)
        with monkeypatch.context() as patch:
            # A request or two in each part, so that most begin at an odd place.
            patch.setattr(rejection_sampler, "get_max_chunk_logits", lambda vocab_size: 7)
            tokens(e, FEW[:3], max_tokens=4, **sampling)
        tokens(e, FEW[:1], max_tokens=8, structured_outputs=schema, ignore_eos=False, **sampling)
        ask(e, FEW[:2], asking(texts)[:2], max_tokens=6, **sampling)


@pytest.mark.parametrize(
    ("proposer", "start", "options"),
    [
        pytest.param(
            "mtp_ngram",
            engine,
            {"verify_strategy": "rejection", "draft_sample_method": "probabilistic"},
            marks=pytest.mark.slow,
        ),
        ("mtp_suffix", async_engine, {"draft_sample_method": "probabilistic"}),
        pytest.param(
            "mtp_ngram", async_engine, {"adaptive": True, "verify_strategy": "target_match"}, marks=pytest.mark.slow
        ),
        pytest.param("mtp_suffix", engine, {"adaptive": True}, marks=pytest.mark.slow),
        pytest.param(
            "ngram",
            engine,
            {"verify_strategy": "topp", "num_speculative_tokens_per_batch_size": [[1, 1, 4], [2, 3, 2], [4, 64, 0]]},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_no_request_waits_for_a_compiler(
    proposer: str, start: Any, options: dict[str, Any], trained: Path, draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine(trained) as e:
        texts = tokens(e)
    variants: set[Any] = set()
    for module, names in KERNELS.items():
        for name in names:
            monkeypatch.setattr(module, name, NotingKernel(getattr(module, name), variants))
    may_force = "verify_strategy" in options
    config = config_of(proposer, draft, allow_force_accept=may_force, **options)
    with warmed_up(), start(trained, config, **STRUCTURED | HALF) as e:
        compiled = set(variants)
        use(e, texts, may_force, monkeypatch)
    assert {name for name, *_ in variants} == {name for name, *_ in compiled}
    late = sorted(map(str, variants - compiled))
    assert not late, "\n".join(late)


def test_warm_up_leaves_nothing(trained: Path, draft: Path) -> None:
    config = config_of("mtp_ngram", draft, verify_strategy="rejection", draft_sample_method="probabilistic")
    with engine(trained, config) as e:
        drafting, states = e.runner.speculator.drafting, e.runner.sampler.sampling_states
        drafting.draft_tokens.fill_(7)
        before = states.top_p.np.copy()
        install.warm_up(e.runner)
        assert (states.top_p.np == before).all()
        assert drafting.draft_tokens[0].tolist() == [0] * drafting.width
        assert not any(map(any, drafting.requests.stats()["drafted"].values()))
        assert not drafting.requests.request_counts.any()
