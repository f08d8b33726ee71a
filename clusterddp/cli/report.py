"""Commands about what runs came to: report writes a page, compare prints what differs and the results."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from clusterddp.cli.arguments import RunName, command, output_option, runs_option
from clusterddp.cli.login import ask_login, node_of_all, profile_option
from clusterddp.cli.terminal import Terminal, put, put_json, say, say_note, writing_stdout
from clusterddp.errors import ClusterddpError, UsageError
from clusterddp.places.ssh.host_run import is_on_hosts
from clusterddp.places.ssh.sync import Synchroniser
from clusterddp.places.state import read_state
from clusterddp.run.directory import RunDir
from clusterddp.run.find import find_run
from clusterddp.run.record import log_event
from clusterddp.run.seal import is_ours
from clusterddp.run.sweep import find_sweep
from clusterddp.system.files import write_text
from clusterddp.view.printable import printable

if TYPE_CHECKING:
    from clusterddp.view.report import RunReport

_STDOUT = "-"


@command("report")
@profile_option
@click.argument("names", metavar="[RUN]...", nargs=-1, type=RunName())
@click.option(
    "--out", metavar="FILE", type=click.Path(dir_okay=False, allow_dash=True),
    help="Where to write; - is standard output. Otherwise report.html: in the directory of your run, or here.",
)  # fmt: skip
@output_option
@runs_option
@click.pass_obj
def report(
    terminal: Terminal, *, profile: str | None, names: tuple[str, ...], out: str | None, output: str, runs_dir: Path
) -> None:
    """Write a page about runs: curves, what differs, code, packages, hosts, attempts, ranks, why it failed.

    Without RUN, the newest one; a sweep stands for its runs. The page is one HTML file that loads nothing.
    """
    if output == "json" and out == _STDOUT:
        raise UsageError("--out - writes the page to standard output, and so does -o json its answer")
    names = names or ("@last",)
    there = node_of_all(names, runs_dir, profile, terminal.environ)
    if there:
        node, names_there = there
        page = ask_login(node, ["report", "--out", _STDOUT, "--", *names_there])
        _write(page.decode("utf-8", errors="replace"), out or "report.html", list(names_there), output)
        return
    from clusterddp.cli.page.pages import draw_report

    runs = _find_runs(runs_dir, names)
    page_text = draw_report(_read(runs, terminal))
    out = out or (str(runs[0].report) if len(runs) == 1 and is_ours(runs[0]) else "report.html")
    _write(page_text, out, [run.name for run in runs], output)


@command("compare")
@profile_option
@click.argument("names", metavar="RUN...", nargs=-1, required=True, type=RunName())
@output_option
@runs_option
@click.pass_obj
def compare(terminal: Terminal, *, profile: str | None, names: tuple[str, ...], output: str, runs_dir: Path) -> None:
    """Show what differs between runs, and their results.

    A sweep stands for its runs. The code of each run is compared with that of the first, where the snapshots are here.
    """
    there = node_of_all(names, runs_dir, profile, terminal.environ)
    if there:
        node, names_there = there
        answer = ask_login(node, ["compare", "-o", output, "--", *names_there])
        with writing_stdout():
            sys.stdout.buffer.write(answer)
        return
    from clusterddp.cli.text.compare import compare_lines
    from clusterddp.view.report import compare as compare_runs

    runs = _find_runs(runs_dir, names)
    if len(runs) < 2:
        raise click.UsageError(f"compare needs two runs or more, or a sweep, and {names[0]} is one run")
    compared = compare_runs(_read(runs, terminal))
    if output == "json":
        put_json(compared.to_json())
    else:
        columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        put("\n".join(compare_lines(compared, columns=columns)))


def write_fetched_report(run: RunDir, environ: Mapping[str, str]) -> None:
    """Write the report of a run over SSH that has ended, once its files are here; a failure is an event of the run.

    The head writes it where the run's directory is; a host over SSH has no packages for it.
    """
    try:
        if not is_on_hosts(run) or not is_ours(run) or not read_state(run).finished:
            return
        from clusterddp.cli.page.pages import draw_report  # most runs have none to write
        from clusterddp.view.report import read_reports

        newest = run.newest_attempt()
        if not run.report.exists() or run.report.stat().st_mtime < newest.path.stat().st_mtime:
            write_text(run.report, draw_report(read_reports([run], environ)))
    except (ClusterddpError, OSError) as error:
        log_event(run, "report_failed", error=str(error)[:300])


COMMANDS = {"report": report, "compare": compare}


def _find_runs(runs_dir: Path, names: Sequence[str]) -> list[RunDir]:
    """Find the runs that are meant, each once; a sweep stands for its runs."""
    runs: list[RunDir] = []
    for name in names:
        sweep = find_sweep(runs_dir, name)
        runs += sweep.runs() if sweep else [find_run(runs_dir, name)]
    return list({run.path.resolve(): run for run in runs}.values())


def _read(runs: Sequence[RunDir], terminal: Terminal) -> list[RunReport]:
    """Read all that is known of runs, after their results are copied back."""
    from clusterddp.view.report import read_reports

    with Synchroniser(list(runs), terminal.environ, report=say_note) as sync:
        sync.update()
        if all(not is_on_hosts(run) or read_state(run).finished for run in runs):
            sync.download()
    return read_reports(runs, terminal.environ)


def _write(page: str, out: str, names: list[str], output: str) -> None:
    """Write the page about these runs, and print where it is."""
    if out == _STDOUT:
        put(page)
        return
    try:
        write_text(Path(out), page)
    except ClusterddpError as error:
        raise ClusterddpError(error.message, hint="--out FILE writes it elsewhere") from error
    num_bytes = len(page.encode())
    if output == "json":
        put_json({"runs": names, "path": str(Path(out).resolve()), "bytes": num_bytes})
    else:
        say(f"wrote {printable(out)}  ({num_bytes / 1000:.0f} kB)")
