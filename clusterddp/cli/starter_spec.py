"""The spec that `init` writes for a cluster: the template with the cluster's own values in its lines."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from clusterddp.errors import SlurmError

if TYPE_CHECKING:
    from clusterddp.slurm.starter import Filled

_COMMENT_COLUMN = 30
_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_NO_TEXT = {"true", "false", "yes", "no", "on", "off", "null", "y", "n", "auto"}


def slurm_spec(template: str, environ: Mapping[str, str], partition_name: str | None) -> tuple[str, list[str]]:
    """Fill the template with the cluster's facts; return it with what people should know about it.

    Where Slurm cannot be asked, the template stays as it is, and why is among the notes.
    Raises: UsageError: the cluster has no partition of that name.
    """
    from clusterddp.slurm.cluster import read_cluster
    from clusterddp.slurm.starter import Filled, choose_partition, consequences, fill_in

    named = [Filled(key="partition", value=partition_name, why="as you named it")] if partition_name else []
    try:
        cluster = read_cluster(environ)
    except SlurmError as error:
        return fill_template(template, named), [f"{error.message}: the values in it are examples, check each of them"]
    partition = choose_partition(cluster, partition_name)
    restarts = Filled(key="restarts", value="1", why="after a failure, preemption or the time limit")
    notes = [f"from cluster {cluster.name or 'without a name'}, Slurm {cluster.version or 'of an unknown version'}"]
    if partition is None:
        notes.append("no partition of it takes jobs of yours now: the values in it are examples, check each of them")
    filled = [*(fill_in(cluster, partition) if partition else named), restarts]
    return fill_template(template, filled), [*notes, *consequences(cluster, partition)]


def fill_template(template: str, values: Sequence[Filled]) -> str:
    """Put each value into the line of its key, which may have been a comment before."""
    for value in values:
        line = re.compile(rf"^( *)(?:# )?{re.escape(value.instead_of or value.key)}:.*$", re.MULTILINE)
        assert line.search(template), value.key
        mark = "# " if value.is_suggestion else ""
        text = f"{mark}{value.key}: {_scalar(value.value)}"

        def written(match: re.Match[str], text: str = text, why: str = value.why) -> str:
            return f"{match[1] + text:<{_COMMENT_COLUMN}}# {why}" if why else match[1] + text

        template = line.sub(written, template, count=1)
    return template


def _scalar(text: str) -> str:
    """Write a value so that YAML reads it as the same text."""
    if text.isdecimal() or (_PLAIN.fullmatch(text) and text.lower() not in _NO_TEXT):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
