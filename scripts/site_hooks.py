"""MkDocs hooks: the site also shows README.md, CONTRIBUTING.md, and every file outside docs/ that a page links to.

README.md becomes the first page. Another file `PATH` becomes `repository/PATH`, a folder the list of its files. A link
to the code of the settings or of the commands leads to the page that reference.py writes from it. Links are rewritten
to these pages; a link to a file that does not exist is a warning, which `mkdocs build --strict` refuses.
"""

from __future__ import annotations

import logging
import os
import posixpath
import re
import sys
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:  # the links are also checked where MkDocs is not installed
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md")  # shown as text, not as source
FROM_CODE = {"seqrec/config/sections.py": "reference/settings.md", "seqrec/__main__.py": "reference/commands.md"}
FENCE = re.compile(r"(^ *(`{3,}|~{3,}).*?^ *\2 *$)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(!?\[(?:[^\[\]]|!?\[[^\]]*\]\([^)]*\))*\]\()([^)\s]+)(\))")
LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".json": "json", ".toml": "toml", ".sh": "bash"}
logger = logging.getLogger("mkdocs.plugins.site_hooks")  # of MkDocs, so that --strict counts its warnings


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replace the pages by their text with rewritten links, and add the files that they link to."""
    from mkdocs.structure.files import File

    waiting = [f"docs/{file.src_uri}" for file in files.documentation_pages()] + list(PAGES)
    done: set[str] = set()
    while waiting:
        path = waiting.pop()
        if path in done:
            continue
        done.add(path)
        text, linked = page(path)
        place = uri(path)
        if known := files.get_file_from_path(place):
            files.remove(known)
        files.append(File.generated(config, place, content=text))
        waiting += linked
    return files


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Load the script that search needs in a folder from the site itself, not from another host."""
    place = os.path.relpath("iframe-worker.js", posixpath.dirname(page.url) or ".")
    return output.replace("https://unpkg.com/iframe-worker/shim", place)


def on_post_template(output_content: str, template_name: str, config: MkDocsConfig) -> str:
    """The same for 404.html, which a server shows at any address."""
    place = urlsplit(config.site_url or "/").path + "iframe-worker.js"
    return output_content.replace("https://unpkg.com/iframe-worker/shim", place)


def page(path: str) -> tuple[str, list[str]]:
    """Return the Markdown of the page for `path`, relative to the repository, and the paths of the pages it needs."""
    file = ROOT / path
    if path in FROM_CODE:
        return from_code(path), []
    if file.is_dir():
        names = sorted(entry.name + "/" * entry.is_dir() for entry in file.iterdir() if entry.name[0] not in "._")
        text = f"# {path}\n\n" + "".join(f"- [{name}]({posixpath.basename(path)}/{name})\n" for name in names)
        return rewritten(text, str(PurePosixPath(path).parent / "listing"), uri(path))
    text = file.read_text(encoding="utf-8")
    if path in PAGES or path.startswith("docs/"):
        return rewritten(text, path, uri(path))
    return (
        f"---\nsearch: {{exclude: true}}\n---\n# {path}\n\n````{LANGUAGES.get(file.suffix, 'text')}\n{text}\n````\n",
        [],
    )


def from_code(path: str) -> str:
    """Return the Markdown that reference.py writes from the file at `path`."""
    sys.path.insert(0, str(ROOT))
    from scripts import reference

    return reference.settings() if path.endswith("sections.py") else reference.commands()


def uri(path: str) -> str:
    """Return where the site has the page for `path`."""
    if path in FROM_CODE:
        return FROM_CODE[path]
    if path == "README.md":
        return "index.md"
    if (ROOT / path).is_dir():
        return f"repository/{path}/index.md"
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"repository/{path}" if path.endswith(".md") else f"repository/{path}.md"


def rewritten(text: str, path: str, place: str) -> tuple[str, list[str]]:
    """Return `text` of the file `path` with its links as seen from the page `place`, and the paths they need."""
    linked: list[str] = []

    def replace(match: re.Match[str]) -> str:
        link, hash_, anchor = match[2].partition("#")
        if not link or re.match(r"[a-z]+:", link):
            return match[0]
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), unquote(link)))
        if target.startswith("..") or not (ROOT / target).exists():
            logger.warning("%s: the link to %s leads nowhere", path, match[2])
            return match[0]
        if (ROOT / target).is_dir() or not target.startswith("docs/"):
            linked.append(target)
        return match[1] + os.path.relpath(uri(target), posixpath.dirname(place) or ".") + hash_ + anchor + match[3]

    parts = FENCE.split(text)  # text, fence, its mark, text, ...
    kept = [LINK.sub(replace, part) if number % 3 == 0 else part for number, part in enumerate(parts) if number % 3 < 2]
    return "".join(kept), linked
