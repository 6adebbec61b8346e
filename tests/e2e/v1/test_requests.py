"""References and limits that requests bring, on the V1 model runner."""

from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.logging_utils import dump_input

from tests.e2e.engines import PROMPTS, Engine, engine, marked, speculative, target
from tests.e2e.references import DRAFTING, ask, asking, check_sums, config_of, stats

TOKENS = 60


@pytest.fixture(scope="module")
def base(tiny: Path, trained: Path) -> dict[Path, list[list[int]]]:
    """The texts without speculation, by model."""
    texts = {}
    for model in (tiny, trained):
        with engine(model) as e:
            texts[model] = e.tokens(PROMPTS[:4], max_tokens=TOKENS)
    return texts


@pytest.mark.parametrize(
    "proposer", marked(sorted(DRAFTING), {"mtp_ngram", "naive"}, slow={"mtp_suffix", "draft_model_ngram"})
)
def test_greedy_text_is_the_text_without_speculation(
    proposer: str, tiny: Path, trained: Path, draft: Path, base: dict[Path, list[list[int]]]
) -> None:
    model = target(proposer, tiny, trained)
    texts = base[model]
    with engine(model, config_of(proposer, draft)) as e:
        assert ask(e, PROMPTS[:4] * 2, asking(texts), max_tokens=TOKENS) == texts * 2
        accepted = check_sums(e)
    # Four of the eight references are the text itself, and one nearly is.
    assert accepted["reference"] > TOKENS
    assert accepted["unfilled"] == 0


@pytest.mark.parametrize("proposer", ["ngram", "suffix"])
def test_a_prompt_of_embeddings_has_no_drafts(proposer: str, trained: Path, draft: Path) -> None:
    """It has no token ids to match; the request beside it keeps its drafts."""

    def texts(e: Engine, *prompts: dict[str, Any]) -> list[list[int]]:
        params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
        return [list(r.outputs[0].token_ids) for r in e.llm.generate(list(prompts), params, use_tqdm=False)]

    with engine(trained, enable_prompt_embeds=True) as e:
        size = e.llm.model_config.get_hidden_size()
        embeddings = {"prompt_embeds": torch.randn(12, size, generator=torch.Generator().manual_seed(1))}
        tokens = {"prompt_token_ids": PROMPTS[0]}
        expected = texts(e, embeddings, tokens)
    with engine(trained, speculative(proposer, draft), enable_prompt_embeds=True) as e:
        assert texts(e, embeddings) == expected[:1]
        assert e.counts().drafted == 0
        assert texts(e, embeddings, tokens) == expected
        assert e.counts().accepted > 0


@pytest.mark.parametrize("proposer", ["naive", "mtp_ngram", "suffix"])
def test_steps_are_saved(proposer: str, trained: Path, draft: Path, base: dict[Path, list[list[int]]]) -> None:
    """A text that is all in the reference takes one step for each full width and one for the first token."""
    config = config_of(proposer, draft)
    width = config["num_speculative_tokens"]
    with engine(trained, config) as e:
        for extra in ({"sp_edit": 0}, {"sp_edit": 1}):
            before = e.counts().drafts
            extra["sp_advice_prompt_token_ids"] = base[trained][0]
            ask(e, PROMPTS[:1], [extra], max_tokens=TOKENS)
            assert e.counts().drafts - before == -(-(TOKENS - 1) // (width + 1))


@pytest.mark.parametrize("proposer", ["naive", "mtp_ngram", "suffix"])
def test_an_adaptive_engine_saves_these_steps_too(
    proposer: str, trained: Path, draft: Path, base: dict[Path, list[list[int]]]
) -> None:
    """But for a few in which it chooses fewer drafts, at its start perhaps."""
    config = config_of(proposer, draft) | {"adaptive": True}
    needed = 1 + -(-(TOKENS - 1) // (config["num_speculative_tokens"] + 1))
    with engine(trained, config) as e:
        steps, execute = [], e.runner.execute_model

        def execute_and_count(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            steps.append(scheduler_output.total_num_scheduled_tokens)
            return execute(scheduler_output, *args, **kwargs)

        e.runner.execute_model = execute_and_count
        for edit in (0, 1):
            steps.clear()
            extra = {"sp_edit": edit, "sp_advice_prompt_token_ids": base[trained][0]}
            assert ask(e, PROMPTS[:1], [extra], max_tokens=TOKENS) == base[trained][:1]
            assert needed <= sum(map(bool, steps)) <= needed + 2


def test_width_of_128(trained: Path, base: dict[Path, list[list[int]]]) -> None:
    with engine(
        trained, {"method": "naive", "num_speculative_tokens": 128, "adaptive": False}, max_model_len=1024
    ) as e:
        (text,) = ask(e, PROMPTS[:1], [{}], max_tokens=300)
        assert e.counts().drafts == 0
        assert ask(e, PROMPTS[:1], [{"sp_advice_prompt_token_ids": text}], max_tokens=300) == [text]
        # 1 + 129 + 129 + 41 tokens: no more is drafted than can come out.
        assert (e.counts().drafts, e.counts().drafted, e.counts().accepted) == (3, 128 + 128 + 40, 128 + 128 + 40)


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_spec_tokens(limit: int, trained: Path, draft: Path, base: dict[Path, list[list[int]]]) -> None:
    with engine(trained, config_of("mtp_ngram", draft)) as e:
        assert ask(e, PROMPTS[:4], [{"spec_tokens": limit}] * 4, max_tokens=TOKENS) == base[trained]
        assert e.counts().drafted <= limit * e.counts().drafts
        assert (e.counts().drafted > 0) == (limit > 0)
        positions = [n for n, count in enumerate(stats(e)["drafted"]["model"]) if count]
        assert positions == list(range(min(limit, 2)))


def test_a_reference_drafts_for_its_own_request_alone(trained: Path, base: dict[Path, list[list[int]]]) -> None:
    """Another request for the same text, beside it or after it, gets no drafts."""
    reference = {"sp_advice_prompt_token_ids": base[trained][0]}
    with engine(trained, {"method": "naive", "num_speculative_tokens": 4, "adaptive": False}) as e:
        ask(e, PROMPTS[:1], [reference], max_tokens=TOKENS)
        alone = e.counts().drafted
        ask(e, [PROMPTS[0]] * 3, [{}, reference, {}], max_tokens=TOKENS)
        assert e.counts().drafted == 2 * alone
        ask(e, PROMPTS[:1], [{}], max_tokens=TOKENS)
        assert e.counts().drafted == 2 * alone
        assert stats(e)["entries"] == {"requests": 0, "references": 0, "request_counts": 0}


@pytest.mark.parametrize("proposer", [pytest.param("naive", marks=pytest.mark.slow), "mtp_ngram"])
def test_preempted_requests_go_on_with_their_reference(
    proposer: str, trained: Path, draft: Path, base: dict[Path, list[list[int]]]
) -> None:
    texts = base[trained]
    config = config_of(proposer, draft)
    # Eight requests of five blocks each have room for three at a time.
    with engine(trained, config, num_gpu_blocks_override=16, block_size=32, max_model_len=256) as e:
        assert ask(e, PROMPTS[:4] * 2, asking(texts), max_tokens=TOKENS) == texts * 2
        preempted = next(m for m in e.llm.get_metrics() if m.name == "vllm:num_preemptions")
        assert preempted.value > 0
        assert check_sums(e)["reference"] > TOKENS


@pytest.mark.parametrize("proposer", ["naive", "mtp_ngram"])
def test_seeded_text_is_the_text_without_speculation(proposer: str, trained: Path, draft: Path) -> None:
    sampled = {"temperature": 0.8, "seed": 7, "max_tokens": TOKENS}
    target_match = {"verify_strategy": "target_match"}
    with engine(trained, {"method": "naive", **target_match}) as e:
        texts = ask(e, PROMPTS[:4], [{}] * 4, **sampled)
    with engine(trained, config_of(proposer, draft, **target_match)) as e:
        assert ask(e, PROMPTS[:4] * 2, asking(texts), **sampled) == texts * 2
        assert check_sums(e)["reference"] > TOKENS


def test_a_reference_longer_than_the_model(trained: Path, caplog: pytest.LogCaptureFixture) -> None:
    with engine(trained, {"method": "naive", "num_speculative_tokens": 8, "adaptive": False}, max_model_len=128) as e:
        (text,) = ask(e, PROMPTS[:1], [{}], max_tokens=20)
        reference = (text * 20)[:300]
        assert ask(e, PROMPTS[:1], [{"sp_advice_prompt_token_ids": reference}], max_tokens=20) == [text]
    assert "its reference is longer than the model length: 172 tokens or more are cut off" in caplog.text


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"sp_edit": 2}, "sp_edit=2 is not allowed: it must be 0 or 1"),
        ({"spec_tokens": -1}, "spec_tokens=-1 is not allowed: it must be an integer of 0 or more"),
        ({"sp_advice_prompt": 5}, "sp_advice_prompt is not allowed: it must be text"),
        (
            {"sp_advice_prompt_token_ids": [5, 320]},
            "sp_advice_prompt_token_ids is not allowed: its token 1 is too large.* to 319",
        ),
        ({"prediction": "text"}, "prediction is not allowed: it must be"),
        ({"sp_advice_prompt": "a", "sp_advice_prompt_token_ids": [1]}, "a request has one reference"),
    ],
)
def test_only_bad_input_is_refused(
    extra: dict[str, Any], words: str, naive: Any, base: dict[Path, list[list[int]]], trained: Path
) -> None:
    with pytest.raises(VLLMValidationError, match=words):
        ask(naive, PROMPTS[:1], [extra], max_tokens=4)
    assert ask(naive, PROMPTS[:1], [{}], max_tokens=4) == [base[trained][0][:4]]


@pytest.fixture(scope="module")
def naive(trained: Path) -> Any:
    with engine(trained, {"method": "naive", "num_speculative_tokens": 4, "adaptive": False}) as e:
        yield e


def test_an_engine_that_does_not_draft_from_text(tiny: Path) -> None:
    config = {"method": "mtp", "num_speculative_tokens": 2, "verify_strategy": "topp"}
    with engine(tiny, config) as e:
        with pytest.raises(
            VLLMValidationError, match="spec_tokens is not allowed: the engine's speculative config has no method"
        ):
            e.llm.generate("x", SamplingParams(extra_args={"spec_tokens": 2}), use_tqdm=False)
        # RTP-LLM's clients send its defaults along, and these ask for nothing.
        for extra_args in (None, {"sp_edit": 0, "spec_tokens": None}):
            sampling = SamplingParams(max_tokens=4, extra_args=extra_args)
            (output,) = e.llm.generate("x", sampling, use_tqdm=False)
            assert len(output.outputs[0].token_ids) == 4
        assert e.llm.collective_rpc("specplus_stats") == [None]


def test_an_engine_that_dies_logs_no_reference(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM then prints the parameters of every request of the step."""
    secret = b"def a_secret_of_a_client(): return 42"
    references = [{"sp_advice_prompt": secret.decode()}, {"sp_advice_prompt_token_ids": list(secret)}]
    lines: list[str] = []
    monkeypatch.setattr(dump_input.logger, "error", lambda line, *args: lines.append(line % args))
    with engine(trained, config_of("naive", trained)) as e:

        def fail(*args: Any, **kwargs: Any) -> None:
            raise RuntimeError("out of memory")

        e.runner.sample_tokens = fail
        with pytest.raises(RuntimeError, match="out of memory"):
            ask(e, PROMPTS[:2], references, max_tokens=4)
    log = "\n".join(lines)
    # Each reference is there twice: as the client gave it, and as the workers get it.
    assert log.count(f"{len(secret)} tokens") == 3
    assert log.count(f"{len(secret)} characters") == 1
    assert "secret" not in log
    assert str(list(secret[:6]))[1:-1] not in log
    assert "s\\x00\\x00\\x00e\\x00" not in log
