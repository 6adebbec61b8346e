"""Hybrids with quantised drafts on the V1 model runner."""

from pathlib import Path

import pytest

from tests.e2e.drafters import APPEND
from tests.e2e.engines import PROMPTS, engine
from tests.e2e.quantised import CASES, HALF, check, config_of, is_quantised, quantise
from tests.e2e.references import stats

MAX_TOKENS = 24


@pytest.fixture(scope="module")
def plain(tiny: Path) -> list[list[int]]:
    with engine(tiny, **HALF) as e:
        return e.tokens(PROMPTS[:4], max_tokens=MAX_TOKENS)


@pytest.mark.parametrize(("method", "drafter"), CASES)
def test_greedy_text(
    method: str, drafter: str, tiny: Path, draft: Path, plain: list[list[int]], tmp_path: Path
) -> None:
    check(tiny, config_of(method, drafter, draft, tmp_path / "quantised"), plain, MAX_TOKENS)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["auto_gptq", "gptq_marlin", "moe_wna16"])
def test_a_gptq_checkpoint_has_other_names(
    name: str, tiny: Path, draft: Path, plain: list[list[int]], tmp_path: Path
) -> None:
    check(tiny, config_of("gptq", "draft_model", draft, tmp_path / "quantised", name), plain, MAX_TOKENS)


def test_vllm_quantises_nothing_in_float32(tiny: Path, draft: Path, tmp_path: Path) -> None:
    config = config_of("fp8_per_channel", "draft_model", draft, tmp_path)
    words = r"torch\.float32 is not supported for quantization method fp8_per_channel"
    with pytest.raises(ValueError, match=words), engine(tiny, config):
        pass


@pytest.mark.parametrize("method", ["int8_per_channel_weight_only", "experts_int8", "nvfp4_per_token", "gpt_oss_mxfp4"])
def test_a_draft_without_experts_stays_as_it_is(method: str, tiny: Path, draft: Path, plain: list[list[int]]) -> None:
    config = APPEND | {"method": "draft_model", "model": str(draft), "quantization": method}
    with engine(tiny, config, **HALF) as e:
        assert not is_quantised(e)
        assert e.tokens(PROMPTS[:4], max_tokens=MAX_TOKENS) == plain
        assert sum(stats(e)["accepted"]["model"]) > 0


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("fp8", "static_scaled_fp8_quant"),
        ("fp8_per_tensor", "static_scaled_fp8_quant"),
        ("mxfp4", "Failed to find a kernel that can implement the MXFP4 linear layer"),
        ("mxfp8", "Failed to find a kernel that can implement the MXFP8 linear layer"),
        ("fbgemm_fp8", "is deprecated and will be removed"),
        ("fp_quant", "is deprecated and will be removed"),
    ],
)
def test_vllm_does_not_start_with_it(method: str, words: str, tiny: Path, draft: Path) -> None:
    config = APPEND | {"method": "draft_model", "model": str(draft), "quantization": method}
    with pytest.raises((RuntimeError, ValueError), match=words), engine(tiny, config, **HALF):
        pass


@pytest.mark.parametrize("method", ["auto_awq", "awq_marlin"])
def test_an_awq_checkpoint_has_no_other_name(method: str, tiny: Path, draft: Path, tmp_path: Path) -> None:
    model = quantise(draft, tmp_path / "quantised", "awq")
    config = APPEND | {"method": "draft_model", "model": str(model), "quantization": method}
    with pytest.raises(ValueError, match="does not match the quantization method"), engine(tiny, config, **HALF):
        pass


@pytest.mark.slow
@pytest.mark.parametrize(("of_target", "of_draft"), [("fp8_per_channel", None), (None, "fp8_per_channel")])
def test_an_mtp_head_is_quantised_as_its_target_is(of_target: str | None, of_draft: str | None, tiny: Path) -> None:
    config = APPEND | {"method": "mtp", "quantization": of_draft}
    with engine(tiny, config, quantization=of_target, **HALF) as e:
        assert is_quantised(e) == (of_target is not None)
