"""The command as such: what it loads, how it fails, what it exits with."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest

from clusterddp import __version__
from clusterddp.cli import main as main_module
from clusterddp.cli.main import cli, main
from clusterddp.cli.terminal import Terminal, cut, table, width_of
from clusterddp.errors import Problem, SpecError
from tests.support.handmade_runs import fail, make_run, start_attempt

HEAVY = ["torch", "torchvision", "numpy", "submitit", "paramiko", "pydantic", "rich", "yaml", "psutil", "jinja2"]
COMMAND = [sys.executable, "-m", "clusterddp"]


def run_command(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=240, check=False, **options)


def completing(words: str) -> dict[str, str]:
    """Return what bash sets when TAB is pressed after `words`."""
    number = str(len(words.split(" ")) - 1)
    return {"_CLUSTERDDP_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": number}


def loaded_by(code: str, **environ: str) -> set[str]:
    """Run Python code in a fresh interpreter; return which heavy modules it has loaded."""
    code += f"\nimport sys; print('LOADED', *[name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True, env=os.environ | environ
    )
    return set(done.stdout.rpartition("LOADED")[2].split())


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["submit", "-h"], ["status", "-h"], ["demo", "-h"], ["doctor", "-h"]]
)
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    assert loaded_by(f"from clusterddp.cli.main import main; main({arguments!r})") == set()


@pytest.mark.parametrize("arguments", [["list"], ["status"], ["logs"], ["report", "--out", "-"]])
def test_to_look_at_a_run_that_has_ended_loads_nothing_heavy(tmp_path: Path, arguments: list[str]) -> None:
    run = make_run(tmp_path)
    fail(start_attempt(run))
    code = f"from clusterddp.cli.main import main; main({[*arguments, '--runs', str(tmp_path)]!r})"
    assert loaded_by(code) == set()


@pytest.mark.parametrize("words", ["clusterddp ", "clusterddp status br", "clusterddp submit --lau"])
def test_tab_loads_nothing_heavy(words: str) -> None:
    assert loaded_by("from clusterddp.cli.main import main; main([])", **completing(words)) == set()


def test_tab_completes_commands_runs_and_options(tmp_path: Path) -> None:
    make_run(tmp_path / "runs")

    def complete(words: str) -> str:
        return run_command(env=os.environ | completing(words), cwd=tmp_path).stdout

    assert complete("clusterddp stat") == "plain,status\n"
    assert complete("clusterddp status br") == "plain,brisk-otter-3\n"
    assert complete("clusterddp submit --launcher sl") == "plain,slurm\n"
    assert complete("clusterddp submit job") == "file,job\n"


def test_every_command_in_the_index_exists() -> None:
    context = click.Context(cli)
    for name in cli.list_commands(context):
        command = cli.get_command(context, name)
        assert command is not None
        assert command.name == name
        assert command.get_short_help_str()


def test_help_shows_examples_before_the_commands(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["-h"]) == 0
    text = capfd.readouterr().out
    assert (
        0
        < text.index("clusterddp demo")
        < text.index("Every day:")
        < text.index("Results:")
        < text.index("This command:")
    )


def test_help_names_each_value_in_words_of_its_own(capfd: pytest.CaptureFixture[str]) -> None:
    for name in cli.list_commands(click.Context(cli)):
        assert main([name, "-h"]) == 0
        assert re.findall(r"\b(?:INTEGER|FLOAT|TEXT|RANGE|FILENAME|DIRECTORY)\b.*", capfd.readouterr().out) == [], name


def test_version(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capfd.readouterr().out == f"clusterddp {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["stauts"], 'no such command "stauts". Did you mean "status"'),
        (["status", "--wacth"], "--watch"),
        (["submit"], "missing argument 'SPEC|SCRIPT|RUN'"),
        (["wait", "a", "b"], "unexpected extra argument"),
        (["frobnicate"], 'no such command "frobnicate"'),
        (["list", "--state", "DEAD"], "'DEAD' is not one of 'pending', 'running'"),
    ],
)
def test_wrong_usage_is_reported_with_exit_code_two(
    arguments: list[str], words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert words in err
    assert "hint: clusterddp" in err


def test_without_arguments_help_is_shown(capfd: pytest.CaptureFixture[str]) -> None:
    code = main([])
    out, err = capfd.readouterr()
    assert (code, err) == (0, "")
    assert out.startswith("clusterddp - ")
    assert "clusterddp demo" in out


def _raise(error: Exception) -> Any:
    def invoke(context: click.Context) -> None:
        raise error

    return invoke


@pytest.mark.parametrize(
    ("error", "exit_code", "text"),
    [
        (ValueError("two\nlines"), 1, "error: internal: ValueError: two lines\n"),
        (PermissionError(13, "Permission denied", "/runs"), 1, "error: /runs: Permission denied\n"),
        (SpecError((Problem(source="a.yaml", message="bad", line=1, column=1),)), 2, "error: a.yaml has 1 problem"),
    ],
)
def test_no_error_shows_a_traceback(
    error: Exception,
    exit_code: int,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(cli, "invoke", _raise(error))
    assert main(["list"]) == exit_code
    err = capfd.readouterr().err
    assert err.startswith(text)
    assert "Traceback" not in err


@pytest.mark.parametrize("how", [["--debug", "status"], ["status", "--debug"]])
def test_debug_shows_the_traceback(how: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*how, "--runs", str(tmp_path)]) == 4
    assert "Traceback" in capfd.readouterr().err


def test_ctrl_c_is_130_and_quiet(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    def invoke(context: click.Context) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "invoke", invoke)
    assert main(["list"]) == 130
    assert capfd.readouterr() == ("", "")


def test_a_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    make_run(tmp_path)
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run(
        [*COMMAND, "list", "--runs", str(tmp_path)], stdout=write_end, stderr=subprocess.PIPE, timeout=60, check=False
    )
    os.close(write_end)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize("words", [["list"], ["status"], ["submit", "job.yaml"]])
def test_a_working_directory_that_is_gone_is_named(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    program = f"import os, sys; os.rmdir('../gone'); from clusterddp.cli.main import main; sys.exit(main({words}))"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path / "gone", capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert done.stderr == (
        "error: the working directory is gone: it was removed, or its file system is away\nhint: cd to another one\n"
    )


def test_a_full_disk_under_stdout_is_reported(tmp_path: Path) -> None:
    make_run(tmp_path)
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*COMMAND, "list", "--runs", str(tmp_path)],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert (done.returncode, done.stderr) == (1, "error: standard output: No space left on device\n")


def test_a_closed_stdout_is_no_traceback(tmp_path: Path) -> None:
    done = subprocess.run(
        ["sh", "-c", f'"{sys.executable}" -m clusterddp --version >&-'], capture_output=True, timeout=60, check=False
    )
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("environ", "color"),
    [
        ({}, None),
        ({"NO_COLOR": "1"}, False),
        ({"NO_COLOR": ""}, None),
        ({"TERM": "dumb"}, False),
        ({"FORCE_COLOR": "1"}, True),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
    ],
)
def test_colour_is_asked_of_the_environment(environ: dict[str, str], color: bool | None) -> None:
    assert Terminal(environ).color is color


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_name_that_the_encoding_lacks_ends_no_command(encoding: str, tmp_path: Path) -> None:
    environ = os.environ | {"PYTHONIOENCODING": encoding}
    run = make_run(tmp_path / "größer 日本")
    done = run_command("status", str(run.path), env=environ, errors="replace")
    assert (done.returncode, done.stderr) == (0, "")


def test_schema_is_json_and_nothing_else(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    out, err = capfd.readouterr()
    assert json.loads(out)["$schema"].startswith("https://json-schema.org/")
    assert err == ""


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script(shell: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    out, err = capfd.readouterr()
    assert "_CLUSTERDDP_COMPLETE" in out
    assert err == ""  # it runs at the start of every shell


@pytest.mark.parametrize("launcher", ["local", "ssh", "slurm"])
def test_init_writes_a_spec_and_never_over_a_file(
    launcher: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "my job.yaml"
    assert main(["init", "--launcher", launcher, str(path)]) == 0
    assert f"clusterddp submit '{path}' --dry-run" in capfd.readouterr().err
    assert f"launcher: {launcher}" in path.read_text()
    path.write_text("mine")
    assert main(["init", str(path)]) == 2
    assert path.read_text() == "mine"
    assert main(["init", "--force", str(path)]) == 0
    assert path.read_text() != "mine"


def test_init_into_a_missing_directory_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["init", str(tmp_path / "no" / "job.yaml")]) == 2
    assert "there is no directory" in capfd.readouterr().err


def test_the_module_is_the_command() -> None:
    assert run_command("--version").stdout == f"clusterddp {__version__}\n"
    assert main_module.main is main


@pytest.mark.parametrize(
    ("text", "columns", "shown"),
    [
        ("plain text", 5, "plain"),
        ("\u5b66\u7fd2\u5b9f\u9a13", 5, "\u5b66\u7fd2"),
        ("e\u0301te\u0301", 2, "e\u0301t"),
        (click.style("+ added", fg="green") + " after", 4, click.style("+ ad", fg="green")),
    ],
)
def test_a_text_is_cut_by_the_columns_that_a_terminal_gives_it(text: str, columns: int, shown: str) -> None:
    assert cut(text, columns) == shown
    assert width_of(shown) <= columns


def test_columns_of_wide_characters_stand_below_each_other() -> None:
    lines = table([["NAME", "STATE"], ["\u5b66\u7fd2", "RUNNING"], ["a\tb\n", "FAILED"]])
    assert [click.unstyle(line) for line in lines] == [
        "NAME        STATE",
        "\u5b66\u7fd2        RUNNING",
        r"a\x09b\x0a  FAILED",
    ]
