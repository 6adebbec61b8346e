"""The benchmark of edited files, tiny; what its pairs are, and what it calls wrong."""

import difflib
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))
import edits as benchmark  # noqa: E402


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """Report of a quick run, and what it printed."""
    path = tmp_path_factory.mktemp("edits") / "new folder" / "report.json"
    command = [sys.executable, str(BENCHMARKS / "edits.py"), "--quick", "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(path.read_text()), done.stdout


def test_every_setting_is_measured(quick):
    report, printed = quick
    rows = {(r["tokens"], r["drafts"], r["kind"], r["mode"]): r for r in report["results"]}
    assert len(rows) == len(report["results"]) == 2 * 2 * 6 * 4
    for (tokens, drafts, kind, mode), row in rows.items():
        assert f"{row['steps_per_token']:.4f}" in printed
        assert 1 / (drafts + 1) <= row["steps_per_token"] <= 1
        assert (row["steps_per_token"] == 1) == (mode == "none")
        assert row["steps_per_token"] == row["steps"] / row["output_tokens"]
        if kind != "all":
            assert row["pairs"] == 2
        elif mode == "sp_edit 1":
            assert row["steps"] < rows[tokens, drafts, kind, "sp_edit 0"]["steps"] < row["output_tokens"]
            parts = [rows[tokens, drafts, part, mode] for part in benchmark.KINDS]
            for field in ("pairs", "output_tokens", "edits", "new_tokens", "steps"):
                assert row[field] == sum(part[field] for part in parts)
    for goal in report["goals"]:
        assert goal["met"] == (goal["value"] <= goal["limit"] == 1.0)
        assert f"{goal['name']}: {goal['value']:.2f} (goal 1.0): {'' if goal['met'] else 'not '}met" in printed
    assert len(report["goals"]) == 2 * 2 * 3


def test_pairs_are_what_they_are_called():
    edits = benchmark.make_all_edits(4)
    assert edits == benchmark.make_all_edits(4)
    assert [edit.kind for edit in edits] == 4 * list(benchmark.KINDS)
    assert len({edit.file for edit in edits}) == 4
    for edit in edits:
        before, after = edit.before.splitlines(), edit.after.splitlines()
        changes = [
            code for code in difflib.SequenceMatcher(None, before, after, False).get_opcodes() if code[0] != "equal"
        ]
        new = edit.after[edit.new[0] : edit.new[1]]
        common = edit.after[: edit.new[0]] + edit.after[edit.new[1] :]
        assert edit.before != edit.after
        if edit.kind == "rename":
            # Lines with several of them, and neighbouring lines, are one change.
            assert 0 < len(changes) <= edit.num_edits == edit.after.count(new) - edit.before.count(new)
        elif edit.kind == "move":
            assert edit.num_edits == len(changes) == 2
            assert not new
            assert [line for line in sorted(before) if line] == [line for line in sorted(after) if line]
        elif edit.kind == "insert":
            assert common == edit.before
            assert new.lstrip().startswith(("def ", "async def ", "@"))
        elif edit.kind == "delete":
            assert {code[0] for code in changes} == {"delete"}
            assert not new
        else:
            assert new.startswith('"""')
            assert new.endswith('"""')
            assert edit.before.startswith(edit.after[: edit.new[0]])
            assert edit.before.endswith(edit.after[edit.new[1] :])


@pytest.mark.parametrize("tokenize", [benchmark.Bytes(), benchmark.Words()], ids=["bytes", "words"])
def test_tokens_are_the_text(tokenize):
    text = "def f(a_1, b):\n    return a_1  # é\n".replace("é", "e")
    token_ids, starts = tokenize(text)
    pieces = [text[start:end] for start, end in zip(starts, [*starts[1:], None], strict=True)]
    assert "".join(pieces) == text
    assert len(set(pieces)) == len(set(token_ids)) == len(set(zip(pieces, token_ids, strict=True)))


def make_pair(before, after, new=(0, 0)):
    return benchmark.make_pair(benchmark.Edit("insert", "file", before, after, 1, new), benchmark.Bytes())


def test_steps_are_counted_by_what_is_accepted():
    text = "".join(map(chr, range(32, 127)))
    pair = make_pair(text, text[:10] + "\n\t\r" + text[10:], (10, 13))
    row = benchmark.replay(pair, "sp_edit 1", 4, (3, 16))
    # Ten tokens in two steps, a step for each new one, the rest.
    assert (row.num_steps, row.num_new_steps) == (2 + 3 + math.ceil(85 / 5), 3)
    result = benchmark.summary("bytes", 4, "sp_edit 1", "insert", [row])
    assert result.excess == 22 - math.ceil(98 / 5) - 1
    assert result.excess_known == 19 - 19 - 1
    assert benchmark.replay(pair, "none", 4, (3, 16)).num_steps == 98


class Accepted:
    """Equals each token that it is compared with once, and none after that."""

    def __init__(self):
        self.compared = 0

    def __eq__(self, other):
        self.compared += 1
        return self.compared == 1

    def __hash__(self):
        return 0

    def __int__(self):
        return 7


@pytest.mark.parametrize(
    ("drafts", "message"),
    [
        (lambda limit: [0] * (limit + 1), "none: 5 drafts, allowed are 4"),
        (lambda limit: [Accepted()], "none: the replay of rename in"),
    ],
)
def test_a_wrong_replay_gets_no_number(monkeypatch, capsys, drafts, message):
    monkeypatch.setattr(benchmark, "make_drafter", lambda *args: lambda tokens, num_output, limit: drafts(limit))
    assert benchmark.main(["--quick", "--drafts", "4"]) == 1
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.out == ""


def test_no_drafter_sees_what_is_yet_to_come(monkeypatch):
    calls = []

    def look(tokens, num_output, limit):
        calls.append(tokens[num_output + 5 :].tolist())
        return []

    monkeypatch.setattr(benchmark, "make_drafter", lambda *args: look)
    benchmark.replay(make_pair("abcde", "abc"), "sp_edit 1", 4, (3, 16))
    assert calls == [[-1] * 3, [-1] * 2, [-1]]
    assert np.all(make_pair("abcde", "abc").is_new == [False] * 3)
