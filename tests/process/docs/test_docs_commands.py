"""The blocks of README and docs: commands are run, or marked with what they need and parsed; YAML is read as a spec."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import pytest
import yaml

import clusterddp
from clusterddp.cli.main import cli

ROOT = Path(__file__).resolve().parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LANGUAGES = {"sh", "yaml", "python", "text"}
_NEEDS = re.compile(r"<!-- needs: (.+) -->")
_FILE = re.compile(r"# (\S+\.yaml)$")
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"`((?:[^`\n]|\n(?!\n))+)`")


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """A fenced block of a page; `needs`: what the suite does not have, in words; None: the block is run."""

    page: Path
    line: int
    language: str
    needs: str | None
    text: str

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(page: Path) -> Iterator[Block]:
    needs: str | None = None
    start, language, lines = 0, "", list[str]()
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if not line.startswith("```"):
            lines.append(line)
            marked = _NEEDS.fullmatch(line)
            needs = marked[1] if marked else needs if start else None
        elif start:
            yield Block(page=page, line=start, language=language, needs=needs, text="\n".join(lines) + "\n")
            start, needs = 0, None
        else:
            start, language, lines = number, line.removeprefix("```"), []


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
TO_RUN = sorted({block.page for block in BLOCKS if block.language == "sh" and block.needs is None})


def commands_of(text: str) -> Iterator[list[str]]:
    """Yield the words of each command in a block, comments left out."""
    for line in text.splitlines():
        words = shlex.split(re.sub(r"\$\(.*?\)", "1", line), comments=True)
        while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
            words = words[1:]
        if words:
            yield words


def test_every_block_names_its_language() -> None:
    assert [block.where for block in BLOCKS if block.language not in LANGUAGES] == []


def test_every_command_exists_with_its_options() -> None:
    blocks = [block for block in BLOCKS if block.language == "sh"]
    assert [f"{block.where}: {words}" for block in blocks for words in commands_of(block.text) if unknown(words)] == []


def test_every_command_in_a_sentence_or_a_table_exists_with_its_options() -> None:
    wrong = []
    for page in [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", ROOT / "jobs" / "README.md"]:
        for span in _SPAN.findall(_FENCE.sub("", page.read_text())):
            if re.search(r"(?<!that )clusterddp (?!COMMAND)", span):  # "a command that clusterddp knows"
                for part in re.split(r"&&|\|", re.sub(r"[\[\]()]|\.\.\.", " ", " ".join(span.split()))):
                    wrong += [f"{page.relative_to(ROOT)}: {span}" for words in commands_of(part) if unknown(words)]
    assert wrong == []


def unknown(words: list[str]) -> bool:
    """Return whether the words call clusterddp with a command or an option that it does not have."""
    if "clusterddp" not in words[:-1]:
        return False
    context = click.Context(cli, info_name="clusterddp")
    command: click.Command | None = cli
    arguments = words[words.index("clusterddp") + 1 :]
    while isinstance(command, click.Group) and arguments and not arguments[0].startswith("-"):
        command = command.get_command(context, arguments.pop(0))
    if command is None:
        return True
    try:
        command.make_parser(click.Context(command)).parse_args(arguments)
    except click.UsageError:
        return True
    return False


def test_every_make_target_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {
        words[1]
        for block in BLOCKS
        if block.language == "sh"
        for words in commands_of(block.text)
        if words[0] == "make"
    }
    assert named <= targets


@pytest.mark.parametrize(
    "block", [block for block in BLOCKS if block.language == "yaml"], ids=lambda block: block.where
)
def test_yaml_reads_as_a_spec(block: Block, tmp_path: Path) -> None:
    for document in block.text.split("---\n"):
        keys = set(yaml.safe_load(document))
        if keys == {"profiles"}:
            continue
        if "runs_dir" in keys:
            project = tmp_path / "clusterddp.yaml"
            project.write_text(document)
            project.chmod(0o600)
            clusterddp.load_spec("name: piece\n", environ={"CLUSTERDDP_PROJECT": str(project)})
            continue
        more = ("" if "name" in keys else "name: piece\n") + ("launcher: slurm\n" if "container" in keys else "")
        clusterddp.load_spec(more + document, environ={})


@pytest.mark.parametrize(
    "block", [block for block in BLOCKS if block.language == "python"], ids=lambda block: block.where
)
def test_python_compiles(block: Block) -> None:
    compile(textwrap.dedent(block.text), block.where, "exec")


@pytest.mark.slow
@pytest.mark.parametrize("page", TO_RUN, ids=lambda page: page.name)
def test_the_commands_of_a_page_work_in_their_order(page: Path, tmp_path: Path) -> None:
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    for block in blocks_of(page):
        named = _FILE.match(block.text.splitlines()[0]) if block.language == "yaml" and block.text.strip() else None
        if named:
            (tmp_path / named[1]).write_text(block.text)
        if block.language != "sh" or block.needs is not None:
            continue
        done = subprocess.run(
            ["bash", "-e", "-c", block.text],
            cwd=tmp_path,
            env=os.environ | {"PATH": path},
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
        assert done.returncode == 0, f"{block.where}\n{done.stdout}\n{done.stderr}"
