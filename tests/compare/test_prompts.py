"""Prompts from files and from the workloads, and the check of the model's name."""

import json
from pathlib import Path

import pytest

from vllm_specplus.compare.processes import RefusedError
from vllm_specplus.compare.prompts import Prompt, check_model, read_prompts
from vllm_specplus.compare.workloads import _EDITS, WORKLOADS, workload


def test_a_text_has_a_prompt_a_line(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_bytes("\ufeffGrüße\r\n\n{not JSON}\n".encode())
    assert read_prompts(tmp_path / "p.txt") == [Prompt("1", "Grüße"), Prompt("3", "{not JSON}")]


def test_a_jsonl_file_has_texts_chats_and_predictions(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "a\u2028b"}]
    rows = [{"prompt": "x", "prediction": "y"}, {"messages": chat}]
    (tmp_path / "p.jsonl").write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows))
    assert read_prompts(tmp_path / "p.jsonl") == [
        Prompt("1", "x", reference="y"),
        Prompt("2", messages=tuple(chat)),
    ]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b"\n \n", "is empty"),
        (b"ok\xff", "is not UTF-8 text: byte 2"),
        (b'{"prompt": "x"}\n{"prompt"}', "line 2 is not JSON: .* column 10"),
        (b"[" * 100_000, "line 1 is not (a prompt|JSON)"),
        (b'["x"]', "line 1 is not a JSON object"),
        (b"{}", "line 1 must have either prompt or messages"),
        (b'{"prompt": "x", "messages": []}', "line 1 must have either prompt or messages"),
        (b'{"prompt": 3}', "line 1: prompt must be a text"),
        (b'{"prompt": ""}', "line 1: prompt must be a text"),
        (b'{"messages": [{"role": "user"}]}', "line 1: messages must be a list"),
        (b'{"prompt": "x", "prediction": 1}', "line 1: prediction must be a text"),
        (b'{"promt": "x"}', "line 1 has an unknown key 'promt'"),
        (rb'{"prompt": "\ud800"}', "line 1 has half of a surrogate pair"),
        (rb'{"messages": [{"role": "user", "content": "\udc00"}]}', "line 1 has half of a surrogate pair"),
    ],
)
def test_wrong_files_are_refused_in_one_line(content: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_bytes(content)
    with pytest.raises(RefusedError, match=said) as refused:
        read_prompts(tmp_path / "p.jsonl")
    assert "\n" not in str(refused.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match=r"cannot read .*nothing\.txt: No such file"):
        read_prompts(tmp_path / "nothing.txt")


@pytest.mark.parametrize("name", ["p.json", "p.ndjson", "p"])
def test_a_file_that_is_neither_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text('{"prompt": "x"}')
    with pytest.raises(RefusedError, match=r"must end with \.jsonl or \.txt$"):
        read_prompts(tmp_path / name)


def test_a_suffix_may_be_in_capitals(tmp_path: Path) -> None:
    (tmp_path / "P.JSONL").write_text('{"prompt": "x"}')
    assert read_prompts(tmp_path / "P.JSONL") == [Prompt("1", "x")]


@pytest.mark.parametrize("name", WORKLOADS)
def test_workloads_have_prompts_with_names_of_their_own(name: str) -> None:
    prompts = workload(name)
    edits = {prompt.name for prompt in workload("edit")}
    assert len({prompt.name for prompt in prompts}) == len(prompts) >= 8
    for prompt in prompts:
        assert bool(prompt.text) != bool(prompt.messages)
        assert bool(prompt.reference) == (prompt.name in edits)


def test_edits_change_a_name_that_the_function_has() -> None:
    for prompt, (_, old, _) in zip(workload("edit"), _EDITS, strict=True):
        assert old in prompt.reference
        assert prompt.reference in prompt.messages[0]["content"]


def test_models_are_folders_with_a_config_or_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    with pytest.raises(RefusedError, match=r"does not exist: .*model has no config\.json"):
        check_model(str(tmp_path / "model"))
    (tmp_path / "model" / "config.json").write_text("{}")
    check_model(str(tmp_path / "model"))
    check_model(str(tmp_path / "model" / "config.json"))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert check_model("~/model") == str(tmp_path / "model")


@pytest.mark.parametrize("name", ["~nobody-has-this-name/model", "x" * 300])
def test_models_that_cannot_be_read_are_refused(name: str) -> None:
    with pytest.raises(RefusedError, match=f"^draft: cannot read the model {name}: ") as refused:
        check_model(name, "draft: ")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["nobody/has-this-model", "/nothing/is/here", "no such model", "../nothing"])
def test_models_that_do_not_exist_are_refused(name: str) -> None:
    with pytest.raises(RefusedError, match=f"^the model does not exist: {name} is no folder"):
        check_model(name)
