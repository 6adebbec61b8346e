"""Hybrid drafting without a server: one prompt, and how many tokens a verification gave.

    python examples/offline_hybrid.py MODEL

MODEL is any model with an MTP head; `python -m vllm_specplus.testing.tiny_model MODEL --kind trained` makes one.
"""

import argparse
import logging
import os
import warnings

# Before vLLM is imported: its messages and torch's warnings would surround the text.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
warnings.simplefilter("ignore")
logging.disable(logging.WARNING)

from vllm import LLM, SamplingParams  # noqa: E402

PROMPT = '''def area(width, height):
    """Return the area of a rectangle."""
    return width * height


def volume(width, height, depth):
    """Return the volume'''


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    model = parser.parse_args().model

    llm = LLM(
        model=model,
        max_model_len=1024,
        enforce_eager=True,
        kv_cache_memory_bytes=256 << 20,
        disable_log_stats=False,
        use_tqdm_on_load=False,
        speculative_config={
            "method": "mtp",
            "num_speculative_tokens": 5,
            "num_model_steps": 2,
            "mtp_strategy": "with_ngram",
        },
    )
    output = llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=200), use_tqdm=False)[0].outputs[0]
    print(PROMPT + output.text)

    counters = {m.name: m for m in llm.get_metrics()}
    drafts = counters["vllm:spec_decode_num_drafts"].value
    accepted = counters["vllm:spec_decode_num_accepted_tokens"].value
    print(f"\n{len(output.token_ids)} tokens, {1 + accepted / max(drafts, 1):.2f} per verification")


if __name__ == "__main__":
    main()
