"""The site: what mkdocs needs beside mkdocs.yml, and docs/llms.txt, the list of pages for programs that read docs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
_OUTSIDE = re.compile(r"\[([^\]]*)\]\((?:\.\./)+([^)]*)\)")
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_BOOSTS = {"architecture.md": 0.1, "benchmarks.md": 0.1, "status.md": 0.1, "decisions/": 0.1, "reference/": 0.3}
"""How much less a match counts on pages for people who change the code, and on reference pages."""


def pages() -> list[tuple[str, str]]:
    """Return (title of the part, file) of each page, in the order of the navigation."""
    navigation = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    return [(part, file) for item in navigation for part, file in _leaves(item, "")]


def make_llms_txt(made: Mapping[Path, str]) -> dict[Path, str]:
    """Return docs/llms.txt by its path; `made`: pages whose text is newer than the file."""
    lines = ["# clusterddp", "", "> One YAML file runs a PyTorch DDP job on one machine, over SSH or on Slurm.", ""]
    before = None
    for part, file in pages():
        if part != before:
            lines += [*([""] if before is not None else []), f"## {part}", ""]
            before = part
        text = made.get(DOCS / file) or (DOCS / file).read_text()
        title, first = _title_and_first_sentence(text)
        lines.append(f"- [{title}]({file}): {first}")
    return {DOCS / "llms.txt": "\n".join(lines) + "\n"}


def on_config(config: Any, **_: Any) -> Any:
    """Link to the repository once mkdocs.yml has its address. mkdocs calls this."""
    if config.extra["repository"]:
        config.repo_url, config.repo_name = config.extra["repository"], "Repository"
    return config


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Name a file outside of docs/ by its path in the repository: the site does not have it. mkdocs calls this."""
    depth = page.file.src_uri.count("/")
    for start, boost in _BOOSTS.items():
        if page.file.src_uri.startswith(start):
            page.meta["search"] = {"boost": boost}
    if config.repo_url:
        markdown = markdown.replace("$REPOSITORY", config.repo_url)

    def named(match: re.Match[str]) -> str:
        leaves = match[0].count("../") > depth
        return f"{match[1]} (`{match[2].partition('#')[0]}` in the repository)" if leaves else match[0]

    return _OUTSIDE.sub(named, markdown)


def _leaves(item: Any, part: str) -> Iterator[tuple[str, str]]:
    if isinstance(item, str):
        yield part, item
        return
    for name, inner in item.items():
        if isinstance(inner, str):
            yield part or name, inner
        else:
            for below in inner:
                yield from _leaves(below, name)


def _title_and_first_sentence(text: str) -> tuple[str, str]:
    title, _, rest = _COMMENT.sub("", text).lstrip().partition("\n")
    paragraph = " ".join(rest.strip().split("\n\n")[0].split())
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", paragraph)
    return title.lstrip("# "), re.split(r"(?<=\.)\s(?=[A-Z`])", plain)[0].rstrip(":")
