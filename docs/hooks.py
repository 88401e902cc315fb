# SPDX-License-Identifier: Apache-2.0
"""For mkdocs: files that pages link to outside of docs/ become files of the site.

The pages are written for both readers: on GitHub docs/index.md links to ../examples/01_drop_in.py;
the site has no folder above its own, so the same file is put at examples/01_drop_in.py and the link
is made to fit. Source files become pages that show them.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
_LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)\s#]+)(?=[)#])")
_SHOWN = {".py": "python", ".sh": "sh", ".yml": "yaml", ".toml": "toml"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what pages link to, and what that links to."""
    waiting = ["benchmarks/README.md", "examples/README.md", "CONTRIBUTING.md", "CHANGELOG.md"]
    for file in files.documentation_pages():
        waiting += _outside(f"docs/{file.src_uri}", file.content_string)
    done: set[str] = set()
    while waiting:
        path = waiting.pop()
        if path in done or not (ROOT / path).is_file():
            continue
        done.add(path)
        if path.endswith(".md"):
            text = (ROOT / path).read_text()
            waiting += _outside(path, text)
            files.append(File.generated(config, _place(path), content=text))
        elif language := _SHOWN.get(Path(path).suffix):
            text = f"# {path}\n\n````{language}\n{(ROOT / path).read_text()}````\n"
            files.append(File.generated(config, _place(path), content=text))
        else:
            files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, *, page: Page, **_: Any) -> str:
    """Links as the site needs them."""
    source = _source(page.file.src_uri)
    if not source.endswith(".md"):
        return markdown

    def fitted(match: re.Match[str]) -> str:
        target = _place(_target(source, match.group(1)))
        return posixpath.relpath(target, posixpath.dirname(page.file.src_uri) or ".")

    return _LINK.sub(fitted, markdown)


def _outside(source: str, text: str) -> list[str]:
    targets = [_target(source, link) for link in _LINK.findall(text)]
    return [target for target in targets if not target.startswith("docs/")]


def _target(source: str, link: str) -> str:
    """The path that a link means, from the root of the repository."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), link))


def _place(path: str) -> str:
    """Where the site has a file of the repository."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"{path}.md" if Path(path).suffix in _SHOWN else path


def _source(place: str) -> str:
    """The file of the repository that is at a place of the site."""
    if (ROOT / "docs" / place).is_file():
        return f"docs/{place}"
    bare = place.removesuffix(".md")
    return bare if Path(bare).suffix in _SHOWN else place
