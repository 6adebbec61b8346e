"""A running server, asked over HTTP."""

import http.client
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from urllib.parse import urlsplit

from vllm_specplus.top.sample import Sample, read_sample

_TIMEOUT = 10.0  # seconds
_LONGEST_ANSWER = 1 << 24  # bytes


class NoSampleError(Exception):
    """A server gives no counts; one line says why."""


@dataclass(frozen=True)
class Server:
    """A server's address, and its API key; "" if it has none.

    Raises:
        NoSampleError: the address is no URL, or the key cannot stand in a header.
    """

    url: str
    api_key: str

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            is_url = False
        if not is_url or not (self.url.isascii() and self.url.isprintable()) or " " in self.url:
            raise NoSampleError(f"{self.url!r} is no URL such as http://localhost:8000")
        if not (self.api_key.isascii() and self.api_key.isprintable()):
            raise NoSampleError("the API key has characters that no HTTP header may have")

    def sample(self) -> Sample:
        """Ask for its counts.

        Raises:
            NoSampleError: it does not answer, or not with counts of the plugin.
        """
        stats = self._get("/specplus/stats")
        now = time.monotonic()
        try:
            metrics = self._get("/metrics").decode(errors="replace")
        except NoSampleError:
            metrics = ""
        try:
            return read_sample(stats, metrics, now)
        except ValueError:
            raise NoSampleError(f"{self.url}/specplus/stats answers with something else than the counts") from None

    def _get(self, path: str) -> bytes:
        request = urllib.request.Request(self.url.rstrip("/") + path)
        if self.api_key:
            # Another server, to which this one may redirect, does not get it.
            request.add_unredirected_header("Authorization", f"Bearer {self.api_key}")
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT) as answer:
                return answer.read(_LONGEST_ANSWER)
        except urllib.error.HTTPError as problem:
            raise NoSampleError(self._reason(problem.code)) from None
        except urllib.error.URLError as problem:
            why = getattr(problem.reason, "strerror", None) or problem.reason
        except OSError as problem:
            why = problem.strerror or problem
        except (http.client.HTTPException, ValueError) as problem:
            why = type(problem).__name__
        raise NoSampleError(f"no answer from {self.url}: {why}") from None

    def _reason(self, status: int) -> str:
        if status == 401:
            return f"{self.url} asks for its API key: set --api-key or OPENAI_API_KEY"
        if status == 404:
            return (
                f"{self.url} has no /specplus/stats: it runs without VLLM_PLUGINS=specplus, or with a config for which "
                "the plugin does not draft"
            )
        return f"{self.url}/specplus/stats answers with HTTP status {status}"
