"""docs/migration.md names every key, flag and variable that the code understands, and no other."""

import itertools
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vllm_specplus.cli import main
from vllm_specplus.config.aliases import ALIASES, INPUT_LOOKUP_KEY, METHOD_ALIASES
from vllm_specplus.config.dialects import DIALECTS, FASTDEPLOY, PADDLENLP, RTP_LLM
from vllm_specplus.config.keys import TOPP_DEFAULTS, CommonKeys, known_names
from vllm_specplus.config.quantizations import QUANTIZATIONS
from vllm_specplus.config.stock_keys import stock_keys
from vllm_specplus.migrate import SYSTEMS
from vllm_specplus.migrate.tables import DEFAULTS, OPTIONS
from vllm_specplus.migrate.vllm_flags import vllm_flags
from vllm_specplus.requests.options import KEYS

DOCUMENT = (Path(__file__).parents[2] / "docs" / "migration.md").read_text()
SECTIONS = {part.partition("\n")[0]: part for part in re.split(r"^## ", DOCUMENT, flags=re.M)[1:]}
_OWN_KEYS = {"adaptive", "allow_force_accept", "match_override_len", "ngram_match_order"}
_OWN_KEYS |= {"suffix_decoding_scope", "suffix_decoding_max_cached_tokens"}
# FastDeploy's keys are this plugin's and vLLM's.
FASTDEPLOY_KEYS = CommonKeys.model_fields.keys() - _OWN_KEYS | {"model", "draft_strategy"}


def names(section: str) -> set[str]:
    """The names in the first column of a section's tables."""
    rows = [line.split("|")[1] for line in SECTIONS[section].splitlines() if line.startswith("| `")]
    return {name.partition(":")[0] for row in rows for name in re.findall(r"`([^`]+)`", row)}


def options_of(system: str) -> set[str]:
    return {name for of, name in OPTIONS if of == system}


def aliases_of(system: str) -> set[str]:
    return {key for key, alias in ALIASES.items() if alias.system == system}


def test_every_system_has_its_section() -> None:
    assert set(SYSTEMS) <= set(SECTIONS)
    assert {dialect.system for dialect in DIALECTS.values()} <= set(SYSTEMS)
    for section in SYSTEMS:
        assert "```console\n$ vllm-specplus migrate" in SECTIONS[section]


def test_fastdeploy() -> None:
    values = {"ngram", "suffix", "naive"}
    assert names(FASTDEPLOY) - values == FASTDEPLOY_KEYS | options_of(FASTDEPLOY)
    for value in METHOD_ALIASES:
        assert f"`method: {value}`" in SECTIONS[FASTDEPLOY]


def test_paddlenlp() -> None:
    assert names(PADDLENLP) == aliases_of(PADDLENLP) | options_of(PADDLENLP)


def test_rtp_llm() -> None:
    requests = set(KEYS) - {"prediction", "spec_tokens"}
    assert names(RTP_LLM) == aliases_of(RTP_LLM) | options_of(RTP_LLM) | requests | {INPUT_LOOKUP_KEY}


# The keys of its guide on speculative decoding, and the flag that it documents beside them.
ASCEND_KEYS = {"method", "num_speculative_tokens", "model", "draft_tensor_parallel_size", "prompt_lookup_max"}
ASCEND_KEYS |= {"prompt_lookup_min", "disable_padded_drafter_batch", "enforce_eager", "draft_model_config"}
ASCEND_KEYS |= {"num_speculative_tokens_per_batch_size"}


def test_vllm_ascend() -> None:
    assert names("vLLM Ascend") == ASCEND_KEYS | {"additional_config"}
    assert set(known_names(stock_keys())) >= ASCEND_KEYS


@pytest.mark.parametrize("system", DEFAULTS)
def test_the_servers_defaults(system: str) -> None:
    rows = SECTIONS[system].partition("| left out | there |")[2].partition("\n\n")[0].splitlines()[2:]
    said = [tuple(cell.strip(" `") for cell in row.strip("|").split("|")) for row in rows]
    assert said == [(one.name, one.says, f"{one.flag} {one.value}".strip()) for one in DEFAULTS[system]]
    assert all((system, one.name) in OPTIONS for one in DEFAULTS[system])


def test_quantizations() -> None:
    assert {name.lower() for name in names("What differs everywhere")} == {*QUANTIZATIONS, "fp8"}


# The columns of the table of defaults: a dialect, and whether its names alone ask for it.
COLUMNS = [("paddlenlp", True), ("rtp_llm", True), ("fastdeploy", False), ("paddlenlp", False)]
_NO_DEFAULT = ("lossless", "vLLM's", "as here")


def defaults_said() -> Iterator[dict[str, Any]]:
    """The defaults in each column of the table."""
    rows = [
        line.strip("|").split("|") for line in SECTIONS["What a config leaves out"].splitlines() if line[:3] == "| `"
    ]
    for column in range(1, len(COLUMNS) + 1):
        said: dict[str, Any] = {}
        for row in rows:
            keys = re.findall("`([^`]+)`", row[0].partition(" with ")[0])
            keys = ["suffix_decoding" + key if key.startswith("_") else key for key in keys]
            cell = row[column].strip()
            if cell not in _NO_DEFAULT:
                values = [re.match("`?([^` ]+)", part.strip()) for part in cell.split(",")]
                said |= dict(zip(keys, [found[1] for found in values if found], strict=True))
        yield said


def test_what_is_left_out() -> None:
    """Each default of the table is the code's."""
    for (name, by_name), said in zip(COLUMNS, defaults_said(), strict=True):
        defaults = [default for default in DIALECTS[name].defaults if default.by_name or not by_name]
        expected = {default.key: default.value for default in defaults} | TOPP_DEFAULTS
        assert said == {key: str(value).lower() for key, value in expected.items()}
    # The other column of RTP-LLM would say the same.
    assert all(default.by_name for default in DIALECTS["rtp_llm"].defaults)


def test_the_flags_are_vllms() -> None:
    flags = vllm_flags()
    targets = {option.target for option in OPTIONS.values() if option.target.startswith("--")}
    assert {target.removeprefix("--") for target in targets} <= flags.names
    for one in itertools.chain(*DEFAULTS.values()):
        name = one.flag.removeprefix("--")
        assert name in flags.names or name.removeprefix("no-") in flags.negatable


@pytest.mark.parametrize("section", [FASTDEPLOY, PADDLENLP, RTP_LLM, "vLLM Ascend"])
def test_the_output_is_what_was_seen(section: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = SECTIONS[section].partition("```console\n$ vllm-specplus migrate ")[2].partition("```")[0]
    lines = shown.splitlines()
    # The output begins with the command for vLLM.
    first = next(i for i, line in enumerate(lines) if line.startswith(("VLLM_PLUGINS", "vllm serve")) and i > 0)
    command = "\n".join(lines[:first])
    words = subprocess.check_output(["bash", "-c", f"printf '%s\\0' {command}"], text=True).split("\0")[:-1]
    main(["migrate", *(words if len(words) == 1 else ["--", *words])])
    out, err = capsys.readouterr()
    assert (out + err).splitlines() == lines[first:]
