"""What `vllm-specplus compare` does in an engine's process, and the command as a whole."""

import json
from pathlib import Path

import pytest

from tests.e2e.engines import ADAPTIVE, PROPOSERS, engine
from vllm_specplus.cli import main
from vllm_specplus.compare.engine import Session
from vllm_specplus.compare.processes import RefusedError
from vllm_specplus.compare.prompts import Prompt
from vllm_specplus.compare.runs import PARTS
from vllm_specplus.compare.workloads import workload

PROMPTS = workload("code")[:3]


def test_a_session_with_a_hybrid(trained: Path) -> None:
    reference = Prompt(
        "edit", messages=({"role": "user", "content": "def f(a): return"},), reference="def f(a): return a"
    )
    with engine(trained, ADAPTIVE, max_model_len=2048) as e:
        session = Session(e.llm.llm_engine, [*PROMPTS, reference], 24)
        session.warm_up(2)
        run = session.run([0, 1, 2, 3, 0], 2, 0.0)
        assert [len(tokens) for tokens in run.token_ids] == [24] * 5
        assert run.token_ids[0] == run.token_ids[4]
        # Every step of a request gives its accepted drafts and one more token; the end of an answer may cut its last.
        # A sixth one kept the second place taken before.
        assert 0 <= run.num_steps + run.counts.num_accepted - run.num_step_tokens <= 6 * 7
        assert run.counts.num_drafted >= run.counts.num_accepted > 0
        assert set(run.counts.drafted) == {"model", "ngram", "suffix", "reference"}

        profile = session.profile(0.0)
        for tokens, pieces in zip(run.token_ids, profile.texts, strict=False):
            assert "".join(piece for piece, _ in pieces) == session.text(tokens)
        sources = {source for pieces in profile.texts for _, source in pieces}
        assert "target" in sources
        assert sources & {"model", "ngram"}
        assert "unknown" not in sources
        assert list(profile.seconds) == list(PARTS)
        assert min(profile.seconds[part] for part in ("target", "matching", "verification", "rest")) > 0
        # The engine is as it was.
        assert session.run([0], 1, 0.0).token_ids == run.token_ids[:1]

        first, second = session.best_two(0, run.token_ids[0][:5])
        assert first.token_id == run.token_ids[0][5]
        assert first.logit >= second.logit


def test_a_session_with_vllms_own_drafts(trained: Path) -> None:
    with engine(trained, PROPOSERS["mtp"], max_model_len=2048) as e:
        session = Session(e.llm.llm_engine, PROMPTS, 24)
        run = session.run([0, 1, 2], 1, 0.0)
        counts = e.counts()
        assert run.counts.drafted == {"model": counts.drafted}
        assert run.counts.accepted == {"model": counts.by_position}
        seconds = session.profile(0.0).seconds
        assert seconds["draft model"] > 0
        with pytest.raises(RefusedError, match=r"prompt csv has .* tokens: with --max-tokens 2000 that"):
            Session(e.llm.llm_engine, PROMPTS, 2000)


def test_a_prompt_that_comes_again_finds_nothing_of_the_first(trained: Path) -> None:
    config = PROPOSERS["suffix"] | {"suffix_decoding_scope": "salt"}
    with engine(trained, config, max_model_len=2048, enable_prefix_caching=True) as e:
        session = Session(e.llm.llm_engine, PROMPTS[:1], 24)
        once, twice = (session.run([0] * times, 1, 0.0) for times in (1, 2))
        hits = [metric for metric in e.llm.get_metrics() if metric.name == "vllm:prefix_cache_hits"]
    assert twice.token_ids == once.token_ids * 2
    assert (twice.num_steps, twice.counts.num_accepted) == (2 * once.num_steps, 2 * once.counts.num_accepted)
    assert [metric.value for metric in hits] == [0]


@pytest.mark.slow
def test_the_command(trained: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = json.dumps(PROPOSERS["suffix"])
    options = ["--workload", "code", "--max-tokens", "16", "--repeat", "1", "--concurrency", "1,2", "--config", config]
    engine_args = "--dtype float32 --enforce-eager --max-model-len 2048 --kv-cache-memory-bytes 67108864"
    options += ["--engine-args", engine_args, "--model", str(trained), "--out", str(tmp_path / "out")]
    assert main(["compare", *options]) == 0
    data = json.loads((tmp_path / "out" / "results.json").read_text())
    assert data["recommendation"] in capfd.readouterr().out
    assert [row["repeats"] for row in data["measurements"]] == [1] * 4
    assert data["differences"] == []
    assert main(["compare", *options, "--engine-args", f"{engine_args} --nonsense"]) == 2
    assert capfd.readouterr().err.splitlines()[-1] == "--engine-args: unrecognized arguments: --nonsense"
