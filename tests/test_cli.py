"""The command ``vllm-specplus check``: output, exit status, and what it does not load."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_specplus import __version__
from vllm_specplus.cli import main
from vllm_specplus.config import SpecPlusConfigError, resolve

GOOD = {"method": "mtp", "num_speculative_tokens": 3, "mtp_strategy": "with_ngram"}
BAD = {**GOOD, "num_model_steps": 4}


def test_good_config(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", json.dumps(GOOD)]) == 0
    out, err = capsys.readouterr()
    assert out == resolve(GOOD).as_json(indent=2) + "\n"
    printed = json.loads(out)
    assert list(printed) == ["options", "vllm"]
    assert printed["options"]["num_model_steps"] == 1
    assert printed["vllm"] == {"method": "mtp", "num_speculative_tokens": 3}
    assert err == ""


def test_stock_config(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", '{"num_speculative_tokens": 3, "method": "mtp"}']) == 0
    assert json.loads(capsys.readouterr().out) == {
        "options": None,
        "vllm": {"method": "mtp", "num_speculative_tokens": 3},
    }


def test_notes_and_warnings_go_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    config = {"speculate_method": "mtp", "num_speculative_tokens": 3, "verify_strategy": "topp"}
    assert main(["check", json.dumps(config)]) == 0
    out, err = capsys.readouterr()
    json.loads(out)
    note, default, warning = err.splitlines()
    assert note.startswith("note: speculative_config: PaddleNLP options mapped")
    assert default == "note: speculative_config: max_candidate_len=5, verify_window=2: PaddleNLP's defaults of topp"
    assert warning.startswith("warning: speculative_config: ")


def test_bad_config_gives_the_engines_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SpecPlusConfigError) as engine:
        resolve(BAD)
    assert main(["check", json.dumps(BAD)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"{engine.value}\n"


def test_explain(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--explain", json.dumps(GOOD)]) == 0
    out, err = capsys.readouterr()
    *lines, last = out.splitlines()
    assert [line.split("=")[0] for line in lines] == list(GOOD)
    assert last.startswith("Not checked: ")
    assert err == ""
    assert main(["check", "--explain", json.dumps(BAD)]) == 2
    assert capsys.readouterr().out == ""


def test_what_is_printed_is_what_something_reads(capsys: pytest.CaptureFixture[str]) -> None:
    """An n-gram hybrid has no use for suffix options, nor a model that vLLM runs alone for n-gram sizes."""
    assert main(["check", json.dumps(GOOD)]) == 0
    assert list(json.loads(capsys.readouterr().out)["options"]) == [
        "method",
        "num_speculative_tokens",
        "num_model_steps",
        "mtp_strategy",
        "max_ngram_size",
        "min_ngram_size",
        "ngram_match_order",
        "match_override_len",
        "adaptive",
        "verify_strategy",
    ]
    assert main(["check", '{"method": "mtp", "num_speculative_tokens": 3, "verify_strategy": "topp"}']) == 0
    assert list(json.loads(capsys.readouterr().out)["options"]) == [
        "method",
        "num_speculative_tokens",
        "verify_strategy",
        "max_candidate_len",
        "verify_window",
        "accept_policy",
        "allow_force_accept",
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "malformed JSON at line 1 column 2"),
        ("[]", "expected a JSON object, got []"),
        ('{"method": "mtp", "nonsense": 1}', "unknown key nonsense=1"),
        ('{"method": "mtp", "num_speculative_tokens": 0}', "num_speculative_tokens=0"),
    ],
)
def test_bad_text(text: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", text]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert err.count("\n") == 1


def test_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(GOOD), encoding="utf-8-sig")
    assert main(["check", "--file", str(file)]) == 0
    assert json.loads(capsys.readouterr().out)["options"]["method"] == "mtp"


def test_files_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for file, why in (("missing", "No such file"), ("binary", "not UTF-8"), (".", "directory")):
        assert main(["check", "--file", str(tmp_path / file)]) == 2
        err = capsys.readouterr().err
        assert why in err
        assert err.count("\n") == 1


@pytest.mark.parametrize("arguments", [[], ["check"], ["check", "{}", "--file", "x"], ["other"]])
def test_wrong_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(r"vllm-specplus( check)?: error: ", line)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--version"])
    assert left.value.code == 0
    assert capsys.readouterr().out == f"vllm-specplus {__version__}\n"


def test_the_package_can_be_run() -> None:
    done = subprocess.run([sys.executable, "-m", "vllm_specplus", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"vllm-specplus {__version__}\n")


def test_check_loads_neither_vllm_nor_torch() -> None:
    script = (
        "import sys; from vllm_specplus.cli import main; status = main(sys.argv[1:]); "
        "heavy = {'vllm', 'torch', 'numpy', 'transformers', 'arctic_inference'}; "
        "assert not heavy & set(sys.modules), heavy & set(sys.modules); sys.exit(status)"
    )
    for config, status in (
        (GOOD, 0),
        ({**GOOD, "sp_quantization": "FP8"}, 0),
        (BAD, 2),
        ({"method": "mtp", "num_speculative_tokens": 1, "quantization": "wint4"}, 2),
    ):
        done = subprocess.run(
            [sys.executable, "-c", script, "check", json.dumps(config)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == status, done.stderr
        assert "Traceback" not in done.stderr
