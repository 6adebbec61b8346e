"""The documentation's site: every page is reached, no link is broken, and a browser loads nothing from elsewhere."""

import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LOADS = {"script": "src", "img": "src", "iframe": "src", "link": "href"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built site; a broken link and a page outside the navigation fail the build."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


class Loads(HTMLParser):
    """Collects what a browser loads with a page."""

    def __init__(self) -> None:
        super().__init__()
        self.urls: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        url = dict(attrs).get(LOADS.get(tag, ""))
        if url:
            self.urls.append(url)


def test_every_document_is_a_page(site: Path) -> None:
    documents = {path.stem for path in (ROOT / "docs").glob("*.md")} | {"SECURITY", "CHANGELOG"}
    assert documents <= {path.stem for path in site.glob("*.html")}
    assert (site / "examples" / "grafana" / "specplus.json").exists()


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    for page in site.glob("*.html"):
        loads = Loads()
        loads.feed(page.read_text())
        assert any(url.endswith(".css") for url in loads.urls)
        assert [url for url in loads.urls if "//" in url] == []
        # Material has a diagram drawer, which it loads from elsewhere for a page that needs one.
        assert 'class="mermaid"' not in page.read_text()
    for style in site.rglob("*.css"):
        assert "url(//" not in style.read_text()
        assert "url(http" not in style.read_text()
