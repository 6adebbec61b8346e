"""Requests with references, and checks that hold for any proposer on either model runner."""

from pathlib import Path
from typing import Any

from vllm import SamplingParams

from tests.e2e.engines import PROMPTS, PROPOSERS, Engine, engine, speculative
from vllm_specplus.config import SpecPlusOptions

# The proposers whose drafts are the plugin's.
DRAFTING = PROPOSERS.keys() - {"mtp"}


def config_of(proposer: str, draft: Path, **more: Any) -> dict[str, Any]:
    """The config of `speculative`; where only references draft, with slots for them."""
    slots = {"num_speculative_tokens": 12, "adaptive": False} if proposer == "naive" else {}
    return speculative(proposer, draft, **slots, **more)


def asking(base: list[list[int]]) -> list[dict[str, Any]]:
    """The ``extra_args`` of eight requests, the second four of which have the prompts of the first four.

    The references are the text as it will come, the text with a few tokens changed, another request's text, and none.

    Args:
        base: the texts that will come, of the four prompts.
    """
    edited = list(base[1])
    edited[4:6], edited[10:10] = [], list(b"xyz")
    text = bytes(token for token in base[2] if token < 128).decode()
    return [
        {"sp_advice_prompt_token_ids": base[0]},
        {"sp_advice_prompt_token_ids": edited, "sp_edit": 1},
        {"prediction": {"type": "content", "content": text}},
        {"spec_tokens": 0, "sp_advice_prompt_token_ids": base[3]},
        {"spec_tokens": 2, "sp_advice_prompt_token_ids": base[0]},
        {"sp_advice_prompt_token_ids": base[2], "sp_edit": 1},
        {"sp_advice_prompt_token_ids": []},
        {},
    ]


def ask(e: Engine, prompts: list[list[int]], extra: list[dict[str, Any]], **sampling: Any) -> list[list[int]]:
    """The token ids of each prompt's completion; all requests run at once."""
    params = [
        SamplingParams(**{"temperature": 0.0, "ignore_eos": True} | sampling, extra_args=more or None) for more in extra
    ]
    results = e.llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    return [list(r.outputs[0].token_ids) for r in results]


def stats(e: Engine) -> dict[str, Any]:
    """The counts of the only worker."""
    (counts,) = e.llm.collective_rpc("specplus_stats")
    return counts


def own_sources(options: SpecPlusOptions) -> list[str]:
    """The sources that draft by these options, whatever a request brings."""
    drafts = {"model": options.is_hybrid, "ngram": options.matches_ngrams, "suffix": options.matches_suffixes}
    return [source for source, is_own in drafts.items() if is_own]


def check_sums(e: Engine) -> dict[str, int]:
    """Check the counts by source against vLLM's own counters; return the accepted tokens of each source."""
    found, vllm = stats(e), e.counts()
    assert sum(map(sum, found["drafted"].values())) == vllm.drafted
    accepted = [sum(column) for column in zip(*found["accepted"].values(), strict=True)]
    assert accepted == vllm.by_position
    assert sum(accepted) == vllm.accepted
    assert not any(found["accepted"]["unfilled"])
    return {source: sum(row) for source, row in found["accepted"].items()}


def check_that_drafts_end_with_the_text(e: Engine, prompt: list[int], text: list[int]) -> None:
    """Nothing is drafted behind a token that ends the text, though the reference goes on.

    Args:
        e: a new engine that drafts from references alone.
        prompt: what is asked.
        text: what comes of it where nothing ends it.
    """
    size = 1 + max(text.index(token) for token in text)  # its last token is a new one
    reference = {"sp_advice_prompt_token_ids": text[:size] + text}
    (found,) = ask(e, [prompt], [reference], max_tokens=size + 40, stop_token_ids=[text[size - 1]])
    assert found == text[:size]
    counts = stats(e)
    assert sum(counts["drafted"]["reference"]) == sum(counts["accepted"]["reference"]) > 0


def check_padding(model: Path, draft: Path) -> None:
    """Check that padding counts as unfilled: vLLM pads the first step of a request with one token left to compute."""
    prompts = [*PROMPTS[:2], *([token] for token in PROMPTS[2][:3])]
    # The first request outlasts the others whatever the model: they take 16 steps at most, and it gets 6 tokens a step
    # at most. The second one keeps the short prompts out of the step that computes the long ones: none is padded there.
    params = [SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=limit) for limit in (110, 4, 4, 4, 4)]

    def texts(e: Engine) -> list[list[int]]:
        results = e.llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        return [list(r.outputs[0].token_ids) for r in results]

    with engine(model, max_num_seqs=2) as e:
        expected = texts(e)
    with engine(model, speculative("mtp_ngram", draft), max_num_seqs=2) as e:
        assert texts(e) == expected
        check_sums(e)
        unfilled = stats(e)["drafted"]["unfilled"]
    # Each of the three with a prompt of one token begins while the first request runs.
    assert unfilled == [3] * len(unfilled)
