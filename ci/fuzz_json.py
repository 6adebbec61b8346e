"""Fuzzes the parser of configs by coverage, from the README's configs on: python ci/fuzz_json.py [libFuzzer's options]

Every text is refused with `SpecPlusConfigError`, or gives a config that can be written as JSON. Needs atheris.
"""

import re
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["vllm_specplus.config"]):
    from vllm_specplus.config import SpecPlusConfigError, parse_json, resolve
    from vllm_specplus.config.aliases import ALIASES
    from vllm_specplus.config.keys import PLUGIN_NAMES
    from vllm_specplus.config.stock_keys import stock_keys

WORDS = "mtp", "eagle3", "ngram", "suffix", "naive", "with_ngram", "topp", "fastdeploy", "paddlenlp", "rtp_llm"


def parse(data: bytes) -> None:
    """Parse and resolve a text; any other exception than a refusal is a finding."""
    try:
        resolved = resolve(parse_json(data.decode("utf-8", "replace")))
    except SpecPlusConfigError:
        return
    resolved.as_json()


def main() -> None:
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    with tempfile.TemporaryDirectory() as folder:
        corpus, words = Path(folder, "corpus"), Path(folder, "words")
        corpus.mkdir()
        for number, config in enumerate(re.findall(r"^\{.*\}$", readme, re.MULTILINE)):
            (corpus / str(number)).write_text(config)
        keys = {*PLUGIN_NAMES, *ALIASES, *stock_keys().keys, *WORDS}
        words.write_text("".join(f'"\\"{word}\\""\n' for word in sorted(keys)))
        atheris.Setup([*sys.argv, f"-dict={words}", str(corpus)], parse)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
