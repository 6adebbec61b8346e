"""A server whose engine dies shows nothing of its clients' texts in its log: V1."""

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.e2e.dying_engine import check_a_dying_engine, forms_in

SECRET = b"def secret(kwjx): return 42"
IDS = list(SECRET)


def test_an_engine_that_dies(trained: Path, tmp_path: Path) -> None:
    check_a_dying_engine(trained, tmp_path)


@pytest.mark.parametrize("width", ["<i4", "<i8"])
@pytest.mark.parametrize(
    ("form", "shown"),
    [
        ("text", lambda width: SECRET.decode()),
        ("text", lambda width: repr(np.array(IDS, width).tobytes())),
        ("text", lambda width: json.dumps(np.array(IDS, width).tobytes().decode())),
        ("text", lambda width: np.array(IDS, width).tobytes().decode()),
        ("token ids", lambda width: str(IDS)),
        ("token ids", lambda width: json.dumps(IDS, separators=(",", ":"))),
        ("token ids", lambda width: repr(np.array(IDS, width))),
        ("hex", lambda width: np.array(IDS, width).tobytes().hex()),
        ("hex", lambda width: SECRET.hex(" ").upper()),
        ("base64", lambda width: base64.b64encode(np.array(IDS, width).tobytes()).decode()),
        ("base64", lambda width: base64.b64encode(b"x" + SECRET).decode()),
        ("base64", lambda width: base64.b64encode(b"xy" + SECRET).decode()),
    ],
)
def test_each_form_of_a_secret_would_be_found(form: str, shown: Any, width: str) -> None:
    """So the test above can fail."""
    assert forms_in(f"a line\n[1, 2] {shown(width)} 3 of a log\n", SECRET) == {form}
    assert not forms_in("a line\n[1, 2] 3 of a log\n", SECRET)
