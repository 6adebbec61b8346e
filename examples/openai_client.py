"""Ask the server of examples/serve_hybrid.sh with the stock openai client.

    python examples/openai_client.py [BASE_URL]

Nothing in a request changes with hybrid drafting; with `target_match` the seed alone fixes the text.
"""

import sys

from openai import OpenAI

PROMPT = "class Point:\n    def __init__(self, x, y):\n        self.x = x\n        self."


def main() -> None:
    base_url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
    client = OpenAI(base_url=base_url, api_key="none")
    request = {"model": "hybrid", "prompt": PROMPT, "max_tokens": 80, "temperature": 0.7, "seed": 1}

    whole = client.completions.create(**request).choices[0].text
    print(PROMPT + whole)

    chunks = client.completions.create(**request, stream=True)
    streamed = "".join(chunk.choices[0].text for chunk in chunks)
    print("\nthe same text when streamed:", streamed == whole)


if __name__ == "__main__":
    main()
