"""Show the ranks of a run as a table: one a line, or by node."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import click

from clusterddp.cli.terminal import duration, rank_span
from clusterddp.cli.text.columns import Column, lay_out
from clusterddp.cli.text.states import state_text
from clusterddp.look.printable import printable
from clusterddp.system.units import format_bytes

if TYPE_CHECKING:
    from clusterddp.look.ranks import RankStatus
    from clusterddp.run.rank_usage import RankUsage


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
            *_usage_columns(ranks),
            *([column("OUTPUT", [_age(rank.last_output) for rank in ranks], 3)] if _any_output(ranks) else []),
            column("INTERFACE", [rank.interface for rank in ranks], 7),
            column("MASTER", [_master(rank) for rank in ranks], 8),
        ],
        room=columns,
        indent="  ",
    )


def _usage_columns(ranks: Sequence[RankStatus]) -> list[Column]:
    """Lay out what ranks use, and how fast they are, as far as it is known of any of them."""

    def column(title: str, what: Callable[[RankUsage], str | None], gives_way: int) -> Column:
        cells = [(what(rank.usage) if rank.usage else None) or "-" for rank in ranks]
        return Column(title=title, cells=cells, gives_way=gives_way)

    steps = [_step_ms(rank.usage) if rank.usage else None for rank in ranks]
    slow = [f"{each or '-'}{' slow' if rank.straggler else ''}" for rank, each in zip(ranks, steps, strict=True)]
    columns = [
        column("STEP", lambda usage: None if usage.step is None else str(usage.step), 3),
        Column(title="MS/STEP", cells=slow, gives_way=1, paint=_paint_slow),
        column("CPU", lambda usage: None if usage.cpu is None else f"{usage.cpu:.1f}", 4),
        column("MEMORY", lambda usage: format_bytes(usage.memory) if usage.memory else None, 4),
        column("GPU", lambda usage: None if usage.gpu is None else f"{usage.gpu:.0%}", 2),
        column("GPU MEMORY", lambda usage: format_bytes(usage.gpu_memory) if usage.gpu_memory else None, 3),
    ]
    return [each for each in columns if set(each.cells) != {"-"}]


def _step_ms(usage: RankUsage) -> str | None:
    return None if usage.step_s is None else f"{usage.step_s * 1e3:.3g}"


def _paint_slow(cell: str) -> str:
    return click.style(cell, fg="yellow", bold=True) if cell.endswith("slow") else cell


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
                *usage_texts(of_node),
            )
        )
    nodes, hosts, spans, states_of, steps, cores, memory, gpus = zip(*rows, strict=True)
    shown = [
        Column(title="NODE", cells=nodes),
        Column(title="HOST", cells=hosts, gives_way=1, least=8),
        Column(title="RANKS", cells=spans),
        Column(title="STATES", cells=states_of, least=12, paint=_painted_states),
        Column(title="MS/STEP", cells=steps, gives_way=2),
        Column(title="CPU", cells=cores, gives_way=5),
        Column(title="MEMORY", cells=memory, gives_way=4),
        Column(title="GPU", cells=gpus, gives_way=3),
    ]
    return lay_out([each for each in shown if set(each.cells) != {"-"}], room=columns, indent="  ")


def _painted_states(cell: str) -> str:
    return re.sub("[A-Z_]+", lambda match: state_text(match[0]), cell)


def usage_texts(ranks: Sequence[RankStatus]) -> list[str]:
    """Sum up what ranks use: ms of their steps, cores, memory, and how busy their GPUs are."""
    known = [rank.usage for rank in ranks if rank.usage]
    steps = sorted(rank.step_s * 1e3 for rank in known if rank.step_s is not None)
    cores = [rank.cpu for rank in known if rank.cpu is not None]
    memory = [rank.memory for rank in known if rank.memory]
    gpus = [rank.gpu for rank in known if rank.gpu is not None]
    low, high = (f"{steps[place]:.3g}" for place in (0, -1)) if steps else ("-", "-")
    return [
        low if low == high else f"{low}-{high}",
        f"{sum(cores):.1f}" if cores else "-",
        format_bytes(sum(memory)) if memory else "-",
        f"{sum(gpus) / len(gpus):.0%}" if gpus else "-",
    ]


def _master(rank: RankStatus) -> str | None:
    return f"{rank.master_addr}:{rank.master_port}" if rank.master_addr and rank.master_port else None


def _any_output(ranks: Sequence[RankStatus]) -> bool:
    return any(rank.last_output is not None for rank in ranks)


def _age(last_output: float | None) -> str | None:
    return None if last_output is None else f"{duration(max(0.0, time.time() - last_output))} ago"


def _cell(fact: object) -> str:
    return "-" if fact is None else printable(str(fact))
