"""Runs torchrun, accelerate or deepspeed, as its user would, in the user's Python; their ranks are started by our task.

`PYTHON step_launcher.py FACTS SCRIPT|-m MODULE ARGUMENTS`. The launcher parses its own command line and makes the
command of its ranks; only that command gets our words in front. FACTS is JSON of step_command.py. This file runs on any
Python from 3.8 and imports nothing of clusterddp.
"""

import sys

if sys.path and sys.path[0] == __file__.rpartition("/")[0]:
    del sys.path[0]  # the modules beside this file, such as queue, are not the user's

import importlib
import json
import os
import runpy
import subprocess

_DEEPSPEED = "deepspeed.launcher.launch"
_TORCHRUN = "torch.distributed.run"


def main():
    facts = json.loads(sys.argv[1])
    target = sys.argv[2]
    is_module = target == "-m"
    if is_module:
        target = sys.argv[3]
    elif "/" not in target:
        target = _find_behind(target, facts["bin"])
    command = sys.argv[4 if is_module else 3 :]
    insert = Insert(facts, command)
    sys.argv = [target, *command]
    if is_module:
        if not sys.flags.isolated and not getattr(sys.flags, "safe_path", False):
            sys.path.insert(0, os.getcwd())
    else:
        sys.path.insert(0, os.path.dirname(os.path.realpath(target)))
    try:
        insert.patch(facts["name"], target)
    except Exception as error:
        _warn(error)
    if target in (_DEEPSPEED, _TORCHRUN):  # whose patched functions `runpy` would define anew
        module = importlib.import_module(target)
        sys.argv[0] = module.__file__
        sys.exit(module.main())
    if is_module:
        runpy.run_module(target, None, "__main__", True)
    else:
        runpy.run_path(target, None, "__main__")


class Insert:
    """Puts our task in front of the program of the ranks."""

    def __init__(self, facts, command):
        self._facts = facts
        self._command = command
        self._words = None
        self._line = os.environ.pop("CLUSTERDDP_LINE", "")

    def patch(self, name, target):
        """Wrap the function of the launcher that makes or starts the command of its ranks."""
        if target == _DEEPSPEED:
            self._patch_popen(importlib.import_module(_DEEPSPEED), self._start_rank)
        elif name == "deepspeed":
            self._patch_popen(importlib.import_module("deepspeed.launcher.runner"), self._start_launch)
        elif name == "torchrun" or "launch" in (*self._command[:1], target.rpartition(".")[2]):
            self._patch_torchrun(importlib.import_module(_TORCHRUN))

    def _patch_torchrun(self, run):
        make = run.config_from_args

        def config_from_args(args):
            config, program, arguments = make(args)
            if callable(program):  # --run-path: a function, run in a process that the launcher forks
                code = "import sys; from torch.distributed.run import run_script_path; run_script_path(*sys.argv[1:])"
                words = [sys.executable, "-c", code, *arguments]
            else:
                words = [program, *arguments]
            rendezvous = [config.rdzv_backend, config.rdzv_endpoint, config.run_id]
            task = self._ask(words, num_agents=config.max_nodes, rendezvous=rendezvous)
            return (config, task[0], [*task[1:], *words]) if task else (config, program, arguments)

        run.config_from_args = config_from_args

    def _patch_popen(self, module, start):
        """Give a module a `subprocess` of its own whose Popen is `start`."""
        own = type(subprocess)("subprocess")
        own.__dict__.update(vars(subprocess), Popen=start)
        module.subprocess = own

    def _start_launch(self, command, *args, **kwargs):
        if list(command[1:4]) == ["-u", "-m", _DEEPSPEED]:
            command = [command[0], "-u", __file__, json.dumps(self._facts), *command[2:]]
        return subprocess.Popen(command, *args, **kwargs)

    def _start_rank(self, command, *args, **kwargs):
        if self._words is None:
            environ = kwargs.get("env") or os.environ
            nodes = int(environ.get("CROSS_SIZE", 1))
            rendezvous = [environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")]
            self._words = self._ask(command, num_agents=nodes, rendezvous=rendezvous)
        return subprocess.Popen([*self._words, *command], *args, **kwargs)

    def _ask(self, program, num_agents, rendezvous):
        """Ask for the words of our task; none, if our side fails."""
        command = self._command
        tail = next((at for at in range(len(program)) if command[-len(program) + at :] == list(program[at:])), None)
        if tail is not None:
            command = command[: len(command) - len(program) + tail]
        asked = {
            "command": command,
            "program": list(program),
            "num_agents": num_agents,
            "rendezvous": " ".join(map(str, rendezvous)),
        }
        try:
            done = subprocess.run(
                self._facts["ask"],
                input=json.dumps(asked).encode(),
                stdout=subprocess.PIPE,
                env=dict(os.environ, CLUSTERDDP_LINE=self._line),
                check=True,
                timeout=90,
            )
            return json.loads(done.stdout.decode())
        except Exception as error:
            _warn(error)
            return []


def _find_behind(name, own):
    for folder in os.environ.get("PATH", os.defpath).split(":"):
        path = os.path.join(folder, name)
        if not folder.endswith("/launcher/bin") and os.access(path, os.X_OK) and os.path.isfile(path):
            return path
    sys.exit("%s: command not found" % name)


def _warn(error):
    sys.stderr.write("clusterddp: the ranks are not watched: %s: %s\n" % (type(error).__name__, error))


if __name__ == "__main__":
    main()
