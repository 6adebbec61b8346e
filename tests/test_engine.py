"""The one patch: what installing it costs, and what goes through it."""

import subprocess
import sys
from pathlib import Path

import pytest
from vllm.config.speculative import SpeculativeConfig
from vllm.engine.arg_utils import EngineArgs

import vllm_specplus
from vllm_specplus import compat, engine
from vllm_specplus.testing.tiny_model import make_random

HYBRID = {"method": "mtp", "num_speculative_tokens": 3, "mtp_strategy": "with_ngram"}
STOCK = {"method": "mtp", "num_speculative_tokens": 3}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random(tmp_path_factory.mktemp("tiny"))


def create(model: Path, config: dict[str, object]) -> object:
    args = EngineArgs(model=str(model), speculative_config=config, max_model_len=256, enforce_eager=True)
    return args.create_engine_config().speculative_config


def test_register_twice_patches_once() -> None:
    vllm_specplus.register()
    patched = EngineArgs.create_speculative_config
    vllm_specplus.register()
    assert EngineArgs.create_speculative_config is patched


def test_vllm_finds_the_plugin() -> None:
    """In a fresh process vLLM's own plugin loading installs the patch."""
    code = (
        "from vllm.engine.arg_utils import EngineArgs\n"
        "from vllm.plugins import load_general_plugins\n"
        "load_general_plugins()\n"
        "assert hasattr(EngineArgs.create_speculative_config, 'specplus_original')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_register_loads_next_to_nothing() -> None:
    """On top of vLLM's own import: our few modules, and nothing of torch, vLLM or a matcher."""
    code = (
        "import sys, vllm.engine.arg_utils\n"
        "before = set(sys.modules)\n"
        "import vllm_specplus; vllm_specplus.register()\n"
        "print(*sorted(set(sys.modules) - before))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, timeout=120, stdout=subprocess.PIPE)
    loaded = done.stdout.decode().split()
    ours = {name for name in loaded if name.startswith("vllm_specplus")}
    assert ours
    assert not any(name.split(".")[1] in ("proposers", "verify", "runners") for name in ours if "." in name)
    assert {name.partition(".")[0] for name in set(loaded) - ours} <= set(sys.stdlib_module_names)


def test_register_never_raises(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> None:
        raise AttributeError("EngineArgs has no create_speculative_config")

    monkeypatch.setattr(engine, "install", broken)
    vllm_specplus.register()
    assert "cannot attach" in caplog.text


def test_a_lost_seam_stops_plugin_configs_only(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = compat.Seam("vllm.v1.worker.gpu_model_runner", "NoSuchProposer", "replaced")
    monkeypatch.setattr(compat, "LEDGER", (*compat.LEDGER, gone))
    monkeypatch.setattr(engine, "check_vllm", compat.check_vllm.__wrapped__)
    with pytest.raises(compat.SpecPlusCompatError, match="NoSuchProposer is gone"):
        create(tiny, dict(HYBRID))
    assert type(create(tiny, dict(STOCK))) is SpeculativeConfig


def test_model_runner_v2_is_refused_before_it_starts(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    with pytest.raises(compat.SpecPlusCompatError, match="set VLLM_USE_V2_MODEL_RUNNER=0"):
        create(tiny, dict(HYBRID))
    # Where Triton runs, vLLM chooses it by itself, except for what V2 lacks.
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER")
    monkeypatch.setattr("vllm.triton_utils.HAS_TRITON", True)
    with pytest.raises(compat.SpecPlusCompatError, match="set VLLM_USE_V2_MODEL_RUNNER=0"):
        create(tiny, dict(HYBRID))
    assert create(tiny, {"method": "naive"}).method == "custom_class"


def test_a_stock_config_reaches_vllm_untouched(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = dict(STOCK)
    seen = []

    def spy(self: EngineArgs, model_config: object, parallel_config: object) -> None:
        assert self.speculative_config is given
        seen.append(dict(given))

    monkeypatch.setattr(EngineArgs, "create_speculative_config", spy)
    engine.install()
    args = EngineArgs(model=str(tiny), speculative_config=given)
    args.create_speculative_config(target_model_config=None, target_parallel_config=None)
    assert seen == [STOCK]


def test_engine_args_used_again_are_as_before(tiny: Path) -> None:
    args = EngineArgs(model=str(tiny), speculative_config=dict(HYBRID), max_model_len=256, enforce_eager=True)
    args.create_engine_config()
    args.speculative_config = None
    args.create_engine_config()
    assert args.async_scheduling is None


def test_another_systems_keys_and_a_flag(tiny: Path) -> None:
    """What is left for vLLM is passed on once, as its own keys."""
    args = EngineArgs(
        model=str(tiny),
        speculative_config={"speculate_method": "mtp"},
        spec_tokens=2,
        max_model_len=256,
        enforce_eager=True,
    )
    made = args.create_engine_config().speculative_config
    assert type(made) is SpeculativeConfig
    assert (made.method, made.num_speculative_tokens) == ("mtp", 2)
