"""The templates that are installed with clusterddp: in the wheel, or beside the package in a checkout."""

from __future__ import annotations

from pathlib import Path

import clusterddp
from clusterddp.errors import ClusterddpError


def read_template(name: str) -> str:
    """Return the text of `templates/NAME`."""
    for folder in _folders():
        path = folder / name
        if path.is_file():
            return path.read_text(encoding="utf-8")
    raise ClusterddpError(f"templates/{name}: not in this installation of clusterddp", hint="install it again")


def list_templates() -> list[Path]:
    """List the files of all templates, sorted."""
    return sorted(path for folder in _folders() for path in folder.glob("*.*") if path.is_file())


def _folders() -> list[Path]:
    package = Path(clusterddp.__file__).parent
    return [folder for folder in (package / "templates", package.parent / "templates") if folder.is_dir()][:1]
