"""Hooks of MkDocs (mkdocs.yml): they let the site be built from the repository's files as they are.

1. Pages from outside of docs/, README.md first, become pages of the site.
2. docs/adr becomes a section of its own, in the order of the numbers in the files' names.
3. Links are written for readers of the repository. Those to pages lead to the site's pages; those to other files lead
   to the repository if `repo_url` is set, and become plain text if not.
4. A code block with a title gets it as a line above, since Markdown's own blocks have none.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
BRANCH = "main"
# Pages from outside of docs/ → what they are called on the site.
ROOT_PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
}

_FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?P<image>!?)\[(?P<text>(?:[^\[\]]|\[[^\]]*\])*)\]\((?P<target>[^)\s]+)\)")
_TITLE = re.compile(r'^```(\w+) title="([^"]+)"$', re.MULTILINE)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the architecture decision records to the navigation."""
    folder = ROOT / "docs" / "adr"
    pages = [f"adr/{path.name}" for path in sorted(folder.glob("[0-9]*.md"))]
    if (folder / "README.md").exists():
        pages.insert(0, "adr/README.md")
    if pages and config.nav is not None:
        config.nav.insert(-1, {"Decisions": pages})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from outside of docs/."""
    for source, page in ROOT_PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite links and titles of code blocks."""
    address = page.file.src_uri
    sources = {to: source for source, to in ROOT_PAGES.items()}
    folder = posixpath.dirname(sources.get(address, f"docs/{address}"))

    def rewrite(link: re.Match[str]) -> str:
        target, hash_, anchor = link["target"].partition("#")
        if not target or re.match(r"\w+:", target):
            return link[0]
        path = posixpath.normpath(posixpath.join(folder, target))
        within = ROOT_PAGES.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else None)
        if within is not None and files.get_file_from_path(within) is not None:
            there = posixpath.relpath(within, posixpath.dirname(address) or ".")
            return f"{link['image']}[{link['text']}]({there}{hash_}{anchor})"
        if not (ROOT / path).exists():
            return link[0]  # MkDocs says that it leads nowhere
        if not config.repo_url:
            return str(link["text"])
        kind = "tree" if (ROOT / path).is_dir() else "blob"
        return f"[{link['text']}]({config.repo_url.rstrip('/')}/{kind}/{BRANCH}/{path}{hash_}{anchor})"

    parts, end = [], 0
    for block in _FENCED.finditer(markdown):
        parts += [_LINK.sub(rewrite, markdown[end : block.start()]), _TITLE.sub(r"**`\2`**\n\n```\1", block[0])]
        end = block.end()
    return "".join([*parts, _LINK.sub(rewrite, markdown[end:])])
