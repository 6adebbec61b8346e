"""The queries of the Grafana dashboard and of docs/metrics.md, asked of a real Prometheus that reads a real server."""

import json
import math
import re
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.processes import wait_for
from tests.e2e.serving import Server, free_port, serve
from tests.examples.test_grafana import QUERIES, ROOT, VARIABLES

CONFIG = {"method": "mtp", "num_speculative_tokens": 5, "num_model_steps": 2, "mtp_strategy": "with_ngram"}
_SAMPLES = 6  # at least two are needed for a rate, and not all of them fall into its range
_SECONDS = 120.0

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs the command prometheus (Debian: prometheus)"),
]


class Prometheus:
    """A running Prometheus."""

    def __init__(self, address: str) -> None:
        self._address = address

    def ask(self, path: str, **parameters: str) -> Any:
        with urllib.request.urlopen(f"{self._address}{path}?{urllib.parse.urlencode(parameters)}", timeout=30) as reply:
            return json.load(reply)["data"]

    def query(self, text: str) -> list[dict[str, Any]]:
        """Evaluate a query now. Raises HTTPError where it is no PromQL."""
        return self.ask("/api/v1/query", query=text)["result"]

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self._address}/-/ready", timeout=5):
                return True
        except OSError:
            return False


@contextmanager
def prometheus(server: Server, folder: Path) -> Iterator[Prometheus]:
    """Start one by the configuration in docs/metrics.md, with a reading a second."""
    page = (ROOT / "docs" / "metrics.md").read_text()
    config = re.search(r"```yaml\n(.*?)```", page, re.DOTALL).group(1)
    assert config.count("localhost:8000") == 2
    config = config.replace("localhost:8000", server.address.removeprefix("http://"))
    (folder / "prometheus.yml").write_text(f"global: {{scrape_interval: 1s}}\n{config}")
    address = f"127.0.0.1:{free_port()}"
    options = ["--config.file", "prometheus.yml", "--storage.tsdb.path", "data", "--web.listen-address", address]
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen(["prometheus", *options], cwd=folder, stdout=log, stderr=subprocess.STDOUT)
    try:
        running = Prometheus(f"http://{address}")
        wait_for(running.is_ready, _SECONDS, "Prometheus")
        yield running
    except BaseException:
        print((folder / "prometheus.log").read_text()[-4000:])
        raise
    finally:
        process.terminate()
        process.wait(60)


def ask_for_answers(server: Server) -> None:
    prompt = "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a"
    server.client().completions.create(model="tiny", prompt=prompt, max_tokens=100, temperature=0.0)


def test_queries(trained: Path, tmp_path: Path) -> None:
    """Each has a value, and the counts are the server's own."""
    options = ["--speculative-config", json.dumps(CONFIG)]
    with serve(trained, tmp_path, *options, VLLM_PLUGINS="specplus") as server, prometheus(server, tmp_path) as asked:

        def has_samples() -> bool:
            ask_for_answers(server)
            rows = asked.query("min (count_over_time(up[5m]))")
            return bool(rows) and float(rows[0]["value"][1]) >= _SAMPLES

        wait_for(has_samples, _SECONDS, "samples")
        assert {row["metric"]["job"]: row["value"][1] for row in asked.query("up")} == {"vllm": "1", "specplus": "1"}
        values = asked.ask("/api/v1/label/instance/values", **{"match[]": "vllm:generation_tokens_total"})
        assert values == [server.address.removeprefix("http://")]
        assert VARIABLES[1]["query"]["query"] == "label_values(vllm:generation_tokens_total, instance)"
        for query in [*QUERIES, *documented()]:
            rows = asked.query(query.replace("$instance", ".*").replace("$__rate_interval", "2m"))
            numbers = [float(row["value"][1]) for row in rows]
            # No fault has been counted, so Prometheus knows no series of them.
            assert any(math.isfinite(number) for number in numbers) or "faults" in query, (query, rows)
        drafted = json.loads(server.get("/specplus/stats"))["totals"]

        def agrees() -> bool:
            rows = asked.query("sum by (source) (specplus:draft_tokens_total)")
            found = {row["metric"]["source"]: int(row["value"][1]) for row in rows}
            return found == {source: counts["drafted"] for source, counts in drafted.items()}

        wait_for(agrees, _SECONDS, "the server's counts")


def documented() -> list[str]:
    """The queries of docs/metrics.md."""
    page = (ROOT / "docs" / "metrics.md").read_text()
    block = re.search(r"```text\n(.*?)```", page, re.DOTALL).group(1)
    found = [" ".join(part.split("\n")[1:]).strip() for part in re.split(r"(?m)^(?=#)", block) if part]
    assert len(found) == 3
    return found
