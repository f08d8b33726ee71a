"""The run's own copy of its code: hard links to the snapshot, and links to what a snapshot does not contain.

What a program writes beside itself lies in the copy, so it never reaches the store that runs share.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from clusterddp.run.code_files import SnapshotPlan
from clusterddp.run.directory import RunDir
from clusterddp.system.file_set import leads_out, list_files
from clusterddp.system.files import sync_directory

_MOST_LINKS, _MOST_COPIES = 50_000, 5_000
"""The most files in the copies of all runs of a sweep: a file that is copied takes as long as 10 hard links."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CodeCopy:
    """What the copy of a run contains."""

    stored: Path
    """The snapshot in the store."""
    links: Mapping[str, str]
    """Links by their names in the copy, with their absolute targets: to what git ignores, and those that lead out."""

    def write(self, target: Path) -> None:
        """Make the copy at `target`, which does not exist."""
        copy_function = link_or_copy if _may_link() else shutil.copy2
        shutil.copytree(self.stored, target, symlinks=True, copy_function=copy_function)
        for name, original in self.links.items():
            path = target / name
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
            path.symlink_to(original)


def plan_copy(stored: Path, snapshot: SnapshotPlan) -> CodeCopy:
    """Plan the copy of a snapshot for runs that see the file system of the original."""
    links = dict(_absolute_links(stored, snapshot.root))
    links |= {name: str(snapshot.root / name) for name in snapshot.ignored}
    return CodeCopy(stored=stored, links=links)


def replace_link(code: Path, snapshot: SnapshotPlan) -> None:
    """Rename the link `code` to a snapshot, and make a copy in its place; it survives a power loss."""
    copy = plan_copy(code.resolve(), snapshot)
    code.rename(RunDir(code.parent).snapshot)
    copy.write(code)
    for folder, _, _ in os.walk(code):
        sync_directory(Path(folder))


def is_too_much(num_files: int) -> bool:
    """Return whether the copies of a sweep have too many files, so its runs share one copy."""
    return num_files > (_MOST_LINKS if _may_link() else _MOST_COPIES)


def link_or_copy(source: str, target: str) -> None:
    """Make a hard link, or a copy where no link is possible."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EMLINK, errno.EPERM, errno.EOPNOTSUPP):
            raise
        shutil.copy2(source, target)


def _may_link() -> bool:
    """Return False for root, who may write to a read-only file: through a hard link that file is the store's."""
    return os.geteuid() != 0


def _absolute_links(stored: Path, root: Path) -> Iterator[tuple[str, str]]:
    """Find the relative links of a snapshot that lead out of it; yield them with their absolute targets."""
    for entry in list_files(stored).entries:
        if entry.kind == "link" and leads_out(entry) and not entry.link.startswith(b"/"):
            name = os.fsdecode(entry.name)
            yield name, os.path.normpath((root / name).parent / os.fsdecode(entry.link))
