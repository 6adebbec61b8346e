"""Hooks of MkDocs (mkdocs.yml): files that lie outside docs/ are on the site too, and links reach them there.

A page links to them as the repository has them, `../SECURITY.md`. On the site they lie beside the page.
"""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

FILES = ("CHANGELOG.md", "SECURITY.md", "examples/grafana/specplus.json")


def on_files(files: Files, config: MkDocsConfig) -> None:
    root = Path(config.config_file_path).parent
    for name in FILES:
        files.append(File.generated(config, name, abs_src_path=str(root / name)))


def on_page_markdown(markdown: str, **_: object) -> str:
    return re.sub(r"\]\((?:\.\./|docs/)", "](", markdown)
