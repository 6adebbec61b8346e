"""Hybrids with quantised drafts on the V1 model runner."""

from pathlib import Path

import pytest

from tests.e2e.drafters import APPEND
from tests.e2e.engines import PROMPTS, engine
from tests.e2e.quantised import CASES, HALF, check, config_of, is_quantised

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


def test_vllm_quantises_nothing_in_float32(tiny: Path, draft: Path, tmp_path: Path) -> None:
    config = config_of("fp8_per_channel", "draft_model", draft, tmp_path)
    words = r"torch\.float32 is not supported for quantization method fp8_per_channel"
    with pytest.raises(ValueError, match=words), engine(tiny, config):
        pass


@pytest.mark.slow
@pytest.mark.parametrize(("of_target", "of_draft"), [("fp8_per_channel", None), (None, "fp8_per_channel")])
def test_an_mtp_head_is_quantised_as_its_target_is(of_target: str | None, of_draft: str | None, tiny: Path) -> None:
    config = APPEND | {"method": "mtp", "quantization": of_draft}
    with engine(tiny, config, quantization=of_target, **HALF) as e:
        assert is_quantised(e) == (of_target is not None)
