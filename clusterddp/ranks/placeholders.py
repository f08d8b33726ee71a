"""Placeholders in the arguments of an entry: `--rank {rank}` becomes each rank's own number."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from clusterddp.ranks.entry_environment import CODE_DIR, DATA_DIR, INIT_METHOD, OUTPUT_DIR, Counts

VARIABLES = {
    "init_method": (INIT_METHOD,),
    "rank": ("RANK",),
    "world_size": ("WORLD_SIZE",),
    "local_rank": ("LOCAL_RANK",),
    "local_world_size": ("LOCAL_WORLD_SIZE",),
    "procs_per_node": ("LOCAL_WORLD_SIZE",),
    "node_rank": ("NODE_RANK", "GROUP_RANK"),
    "num_nodes": ("GROUP_WORLD_SIZE",),
    "master_addr": ("MASTER_ADDR",),
    "master_port": ("MASTER_PORT",),
    "data_dir": (DATA_DIR,),
    "output_dir": (OUTPUT_DIR,),
    "code_dir": (CODE_DIR,),
    "run_dir": ("CLUSTERDDP_RUN_DIR",),
}
"""Name -> the variable that has the value; where there are two, the first that is set."""
_PATTERN = re.compile(r"\{\{([a-z][a-z0-9_]*)\}\}|\{([a-z][a-z0-9_]*)\}")
"""`{{name}}` stands for the text `{name}`; other text with braces (JSON, `{}`, `${HOME}`) is not changed."""


def find_placeholders(text: str) -> Iterator[str]:
    """Yield the names of the placeholders in `text`, known or not."""
    for match in _PATTERN.finditer(text):
        if match[2] is not None and text[match.start() - 1 : match.start()] != "$":
            yield match[2]


def fill_in(text: str, values: Mapping[str, str]) -> str:
    """Replace placeholders by their values; one without a value stays."""

    def value(match: re.Match[str]) -> str:
        if match[1] is not None:
            return "{" + match[1] + "}"
        if text[match.start() - 1 : match.start()] == "$":
            return match[0]
        return values.get(match[2], match[0])

    return _PATTERN.sub(value, text) if "{" in text else text


def placeholder_values(environ: Mapping[str, str], counts: Counts = "processes") -> dict[str, str]:
    """Return the value of every placeholder for the rank with this environment.

    `counts`: what {rank} and {world_size} count.
    """
    machines = {"rank": VARIABLES["node_rank"], "world_size": VARIABLES["num_nodes"]} if counts == "machines" else {}
    chosen = VARIABLES | machines
    return {name: next((environ[each] for each in names if each in environ), "") for name, names in chosen.items()}
