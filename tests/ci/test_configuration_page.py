"""docs/configuration.md is what the code says of each key, and names all of them."""

import sys
from pathlib import Path

from vllm_specplus.config.keys import PLUGIN_NAMES, CommonKeys

sys.path.append(str(Path(__file__).parents[2] / "ci"))
import configuration_page


def test_the_page_is_that_of_the_code() -> None:
    written = configuration_page.PAGE.read_text(encoding="utf-8").splitlines()
    assert written == list(configuration_page.lines()), "run: python ci/configuration_page.py"


def test_every_key_is_on_it() -> None:
    # draft_strategy is another name of mtp_strategy.
    assert set(configuration_page.SHOWN) == {*CommonKeys.model_fields, *PLUGIN_NAMES} - {"draft_strategy"}
