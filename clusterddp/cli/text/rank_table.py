"""Show the ranks of a run as a table: one a line, or by node."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from clusterddp.cli.terminal import duration, rank_span
from clusterddp.cli.text.columns import Column, lay_out
from clusterddp.cli.text.states import state_text
from clusterddp.look.printable import printable

if TYPE_CHECKING:
    from clusterddp.look.ranks import RankStatus


def rank_table(ranks: Sequence[RankStatus], columns: int | None) -> list[str]:
    """Lay out ranks, one a line."""

    def column(title: str, facts: Sequence[object], gives_way: int = 0) -> Column:
        return Column(title=title, cells=[_cell(fact) for fact in facts], gives_way=gives_way)

    owned = any(rank.owns for rank in ranks)
    nodes = column("NODE", [rank.node_rank for rank in ranks], 0 if owned else 4)
    places = [
        column("RANK", [rank.rank for rank in ranks]),
        nodes,
        column("LOCAL", [rank.local_rank for rank in ranks], 5),
    ]
    if owned:
        places = [nodes, column("ITS RANKS", [rank_span(rank.owns or (rank.rank,)) for rank in ranks])]
    return lay_out(
        [
            *places,
            column("HOST", [rank.host for rank in ranks], 2),
            column("PID", [rank.pid for rank in ranks], 6),
            Column(title="STATE", cells=[rank.state for rank in ranks], paint=state_text),
            column("EXIT", [rank.exit_code for rank in ranks], 1),
            *([column("OUTPUT", [_age(rank.last_output) for rank in ranks], 3)] if _any_output(ranks) else []),
            column("INTERFACE", [rank.interface for rank in ranks], 7),
            column("MASTER", [_master(rank) for rank in ranks], 8),
        ],
        room=columns,
        indent="  ",
    )


def node_table(ranks: Sequence[RankStatus], columns: int | None) -> list[str]:
    """Lay out nodes, one a line, with the states of their ranks."""
    rows = []
    for node_rank in sorted({rank.node_rank for rank in ranks}):
        of_node = [rank for rank in ranks if rank.node_rank == node_rank]
        states = Counter(rank.state for rank in of_node)
        rows.append(
            (
                str(node_rank),
                printable(of_node[0].host),
                rank_span([each for rank in of_node for each in rank.owns or (rank.rank,)]),
                ", ".join(f"{count} {state}" for state, count in states.most_common()),
            )
        )
    nodes, hosts, spans, states_of = zip(*rows, strict=True)
    return lay_out(
        [
            Column(title="NODE", cells=nodes),
            Column(title="HOST", cells=hosts, gives_way=1, least=8),
            Column(title="RANKS", cells=spans),
            Column(title="STATES", cells=states_of, least=12, paint=_painted_states),
        ],
        room=columns,
        indent="  ",
    )


def _painted_states(cell: str) -> str:
    return re.sub("[A-Z_]+", lambda match: state_text(match[0]), cell)


def _master(rank: RankStatus) -> str | None:
    return f"{rank.master_addr}:{rank.master_port}" if rank.master_addr and rank.master_port else None


def _any_output(ranks: Sequence[RankStatus]) -> bool:
    return any(rank.last_output is not None for rank in ranks)


def _age(last_output: float | None) -> str | None:
    return None if last_output is None else f"{duration(max(0.0, time.time() - last_output))} ago"


def _cell(fact: object) -> str:
    return "-" if fact is None else printable(str(fact))
