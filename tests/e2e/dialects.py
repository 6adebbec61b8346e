"""What each system's rule drafts, worked out without the plugin's code."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm import SamplingParams

from tests.e2e.engines import PROMPTS, Counts, Engine, engine

LONG = 40
# (config, largest and smallest n-gram size, slots, whether the earliest occurrence wins)
NGRAM_RULES: list[tuple[dict[str, Any], int, int, int, bool]] = [
    (
        {"speculate_method": "inference_with_reference", "speculate_max_draft_token_num": 5}
        | {"speculate_max_ngram_size": 2},
        *(2, 1, 5, True),
    ),
    ({"speculate_method": "inference_with_reference"}, 1, 1, 1, True),
    (
        {"dialect": "fastdeploy", "method": "NGRAM", "num_speculative_tokens": 3, "verify_strategy": "GREEDY"},
        *(5, 2, 3, True),
    ),
    ({"method": "ngram_match", "num_speculative_tokens": 3, "max_ngram_size": 3, "min_ngram_size": 1}, 3, 1, 3, True),
    ({"sp_type": "deterministic", "sp_input_lookup": True, "gen_num_per_cycle": 8}, 2, 2, 8, True),
    ({"method": "ngram", "num_speculative_tokens": 4, "max_ngram_size": 3, "min_ngram_size": 1}, 3, 1, 4, False),
    ({"method": "ngram", "num_speculative_tokens": 4, "verify_strategy": "target_match"}, 5, 5, 4, False),
]


def ngram_drafts(text: Sequence[int], largest: int, smallest: int, slots: int, takes_first: bool) -> list[int]:
    """What followed the longest tail of the text that occurs earlier; past the end the copy goes on."""
    for size in range(largest, smallest - 1, -1):
        tail = list(text[len(text) - size :])
        places = [at for at in range(len(text) - size) if list(text[at : at + size]) == tail]
        if size <= len(text) and places:
            at = (places[0] if takes_first else places[-1]) + size
            grown = list(text)
            for k in range(slots):
                grown.append(grown[at + k])
            return grown[len(text) :]
    return []


def expected_counts(
    prompts: list[list[int]], answers: list[list[int]], rule: tuple[int, int, int, bool], *, to_the_end: bool
) -> list[int]:
    """[steps that verified drafts, drafts, accepted drafts] of answers of `LONG` tokens, by an n-gram rule.

    Args:
        prompts: the prompts.
        answers: their greedy answers, longer than `LONG` by more than the slots.
        rule: the arguments of `ngram_drafts` after the text.
        to_the_end: whether drafts end before an answer's last token, as on V1; V2 fills all slots.
    """
    totals = [0, 0, 0]
    for prompt, answer in zip(prompts, answers, strict=True):
        # The prompt's own step gives one token.
        done = 1
        while done < LONG:
            drafts = ngram_drafts([*prompt, *answer[:done]], *rule)
            if to_the_end:
                drafts = drafts[: LONG - done - 1]
            accepted = 0
            while accepted < len(drafts) and drafts[accepted] == answer[done + accepted]:
                accepted += 1
            totals = [totals[0] + bool(drafts), totals[1] + len(drafts), totals[2] + accepted]
            done += accepted + 1
    return totals


def check_ngram_rule(
    e: Engine, answers: list[list[int]], rule: tuple[int, int, int, bool], *, to_the_end: bool
) -> None:
    """Assert that an engine drafts by a rule, see `expected_counts`, and that its text is the greedy one."""
    assert e.tokens(PROMPTS, max_tokens=LONG) == [answer[:LONG] for answer in answers]
    counts: Counts = e.counts()
    expected = expected_counts(PROMPTS, answers, rule, to_the_end=to_the_end)
    assert [counts.drafts, counts.drafted, counts.accepted] == expected


def check_forced_acceptance(model: Path, config: dict[str, Any], **args: Any) -> None:
    """Assert that all drafts of one request are accepted, and the other requests of the batch keep their text."""
    with engine(model, config | {"accept_policy": "accept_all"}, **args) as e:
        (forced,) = e.tokens(PROMPTS[1:2])
    with engine(model, config | {"allow_force_accept": True}, **args) as e:
        plain = e.tokens(PROMPTS[:2])
        assert forced != plain[1]
        before = e.counts()
        (result,) = e.generate(PROMPTS[1:2], extra_args={"force_sp_accept": True, "aux_info": True})
        after = e.counts()
        assert list(result.outputs[0].token_ids) == forced
        assert after.accepted - before.accepted == after.drafted - before.drafted > 0
        assert result.aux_info["iter_count"] < result.aux_info["output_len"] == 48
        params = [
            SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True, extra_args=extra)
            for extra in (None, {"force_sp_accept": True})
        ]
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS[:2]]
        both = [list(r.outputs[0].token_ids) for r in e.llm.generate(prompts, params, use_tqdm=False)]
        assert both == [plain[0], forced]
