"""Predict an output, as for the edit of a known text; then print how many steps it took and who drafted what.

    VLLM_PLUGINS=specplus bash examples/serve_hybrid.sh MODEL &
    python examples/predicted_output.py [BASE_URL]

The request is OpenAI's own. `aux_info` in `extra_body` also asks for the number of engine steps.
"""

import json
import sys
import urllib.request

from openai import OpenAI

PROMPT = "class Point:\n    def __init__(self, x, y):\n        self.x = x\n        self."


def main() -> None:
    base_url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
    client = OpenAI(base_url=base_url, api_key="none")
    request = {"model": "hybrid", "prompt": PROMPT, "max_tokens": 80, "temperature": 0}

    expected = client.completions.create(**request).choices[0].text
    for prediction in (None, {"type": "content", "content": expected}):
        answer = client.completions.create(**request, extra_body={"prediction": prediction, "aux_info": True})
        details = answer.usage.completion_tokens_details
        print("prediction" if prediction else "none", "->", answer.aux_info["iter_count"], "steps", details or "")
        print("  the same text:", answer.choices[0].text == expected)

    with urllib.request.urlopen(base_url.removesuffix("/v1") + "/specplus/stats") as stats:
        print(json.dumps(json.load(stats)["totals"], indent=2))


if __name__ == "__main__":
    main()
