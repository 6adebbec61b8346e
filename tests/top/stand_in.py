"""A server that answers as it is told, and counts that a server may have."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

# Of four engine steps with two requests each, on a server with two engines: half of the drafts are accepted.
STATS: dict[str, Any] = {
    "drafted": {"model": [8, 8, 0], "ngram": [0, 0, 6], "reference": [0, 0, 0], "unfilled": [0, 0, 2]},
    "accepted": {"model": [6, 4, 0], "ngram": [0, 0, 1], "reference": [0, 0, 0], "unfilled": [0, 0, 0]},
    "entries": {"requests": 0},
    "faults": {},
    "totals": {},
}
METRICS = """# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0"} 2.0
vllm:num_requests_running{engine="1"} 1.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0"} 0.0
vllm:num_requests_waiting{engine="1"} 4.0
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0"} 12.0
vllm:generation_tokens_total{engine="1"} 9.0
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0"} 8.0
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total{engine="0"} 11.0
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf"} 2.0
vllm:time_to_first_token_seconds_count{engine="0"} 2.0
vllm:time_to_first_token_seconds_sum{engine="0"} 0.5
# TYPE vllm:inter_token_latency_seconds histogram
vllm:inter_token_latency_seconds_bucket{engine="0",le="+Inf"} 8.0
vllm:inter_token_latency_seconds_count{engine="0"} 8.0
vllm:inter_token_latency_seconds_sum{engine="0"} 0.5
"""


def scaled(times: int, stats: dict[str, Any] = STATS) -> dict[str, Any]:
    """The counts of a server that has done the same `times` times."""
    rows = {
        what: {source: [times * count for count in counts] for source, counts in stats[what].items()}
        for what in ("drafted", "accepted")
    }
    return stats | rows


@dataclass
class StandIn:
    """A server's answers by path, each a status and a body; other paths get 404. `headers` are those of requests."""

    answers: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    headers: list[tuple[str, str | None]] = field(default_factory=list)
    url: str = ""

    def show(self, stats: dict[str, Any], metrics: str = METRICS) -> None:
        """Answer with these counts from now on."""
        self.answers = {"/specplus/stats": (200, json.dumps(stats).encode()), "/metrics": (200, metrics.encode())}


@contextmanager
def serving(stand_in: StandIn, port: int = 0) -> Iterator[StandIn]:
    """Serve on 127.0.0.1, on any port by default."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            stand_in.headers.append((self.path, self.headers["Authorization"]))
            status, body = stand_in.answers.get(self.path, (404, b'{"detail":"Not Found"}'))
            self.send_response(status)
            if status in (301, 302):
                self.send_header("Location", body.decode())
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    stand_in.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield stand_in
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
