"""ci/release.sh runs each command of README.md, and the pages name the wheel that it builds."""

import re
from pathlib import Path

import pytest

from vllm_specplus import __version__

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
SCRIPT = (ROOT / "ci" / "release.sh").read_text()
# These make the environment, for which the script has one of its own, or run in one of their own.
LEFT_OUT = ("pip install ", "source ", "bash ci/")


def commands() -> list[str]:
    """README's commands as the script has them: from a folder elsewhere, with a model that lies elsewhere."""
    blocks = re.findall(r"^```bash\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    lines = [line.partition(" #")[0].rstrip(" &") for block in blocks for line in block.splitlines()]
    kept = [line.replace("/tmp/tiny", '"$work/tiny"') for line in lines if not line.startswith(LEFT_OUT)]
    return [re.sub(r"examples/\S+", r'"$root/\g<0>"', line) for line in kept]


def test_the_readmes_commands_are_run() -> None:
    assert len(commands()) >= 5
    assert [command for command in commands() if command not in SCRIPT] == []


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_wheel_has_this_version(page: str) -> None:
    named = re.findall(r"vllm_specplus-\S+\.whl", (ROOT / page).read_text())
    assert set(named) == {f"vllm_specplus-{__version__}-py3-none-any.whl"}
