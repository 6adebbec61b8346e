"""An attack on what another client was told: a right guess takes fewer steps, if drafts come from that answer."""

from typing import Any

from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from tests.e2e.engines import Engine

CONFIG = {"method": "suffix", "num_speculative_tokens": 6, "suffix_decoding_max_cached_requests": -1}
# No byte comes twice, so that no text drafts for another.
_BEGINNING = "0123"
_FIRST = "MNOPQRSTUVWX"
GUESSES = ("abcdefghijkl", "mnopqrstuvwx", "ABCDEFGHIJKL")
SECRET = GUESSES[1]


def answer(e: Engine, text: str, salt: str | None) -> int:
    """Have the model answer `text` after a known beginning; return the steps that `aux_info` tells a client."""
    params = SamplingParams(
        temperature=0.0,
        max_tokens=40,
        structured_outputs=StructuredOutputsParams(choice=[_BEGINNING + text]),
        extra_args={"aux_info": True},
    )
    prompt: dict[str, Any] = {"prompt_token_ids": list(b"What is it?")} | ({"cache_salt": salt} if salt else {})
    (output,) = e.llm.generate([prompt], params, use_tqdm=False)
    assert output.outputs[0].text == _BEGINNING + text
    return output.aux_info["iter_count"]


def guess(e: Engine, victim: str | None, attacker: str | None) -> list[int]:
    """The steps of each of the attacker's `GUESSES`, after the victim has been told `SECRET`."""
    answer(e, SECRET, victim)
    # From now on the attacker's own answers draft the beginning.
    answer(e, _FIRST, attacker)
    return [answer(e, text, attacker) for text in GUESSES]
