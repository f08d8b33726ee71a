"""Kills of runs on a LAN of private hosts, and whether each was borne as it should be; seen from outside.

`benchmarks/ssh_kills.py` makes many rounds, `test_ssh_kills.py` a few.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from clusterddp.run.directory import RunDir
from clusterddp.run.find import list_runs
from tests.support.ssh_kill_kinds import (
    BOTH,
    CABLE,
    GANG,
    GUARD,
    LAUNCHER,
    LISTENER,
    NODES,
    POWER,
    RANK,
    SESSION,
    SPEC,
    SUPERVISOR,
    Kill,
)
from tests.support.ssh_place import HostProcess, SshPlace, send, ssh_place_on
from tests.support.ssh_traces import is_up, parent_of, rank_of, sshd_listener, sshd_sessions
from tests.support.waiting import NotInTimeError, wait_until
from tests.testbed.plan import HEAD
from tests.testbed.rack import Rack, RackError

WITHIN_S = 20.0
HOST_WITHIN_S = 45.0
"""The same where a host is lost: it may be silent for 30 s (network.host_silence)."""
CABLE_S = 60.0
GOES_ON_S = 3.0


@dataclass(kw_only=True)
class Round:
    """What one kill brought about."""

    place: SshPlace
    kill: Kill
    cable_s: float
    run: RunDir | None = None
    token: str = ""
    killed_at: float = 0.0
    victims: list[HostProcess] = field(default_factory=list)
    rank: int | None = None
    """The one that was killed."""
    facts: dict[str, Any] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    said: str = ""

    @property
    def within_s(self) -> float:
        return HOST_WITHIN_S if self.kill.victim in {POWER, CABLE} else WITHIN_S

    @property
    def rack(self) -> Rack:
        return self.place.rack

    def play(self) -> None:
        """Submit, kill, look."""
        (self.place.path / "gang.py").write_text(GANG)
        (self.place.path / "job.yaml").write_text(SPEC)
        command = self.place.start("submit", "job.yaml")
        watcher: subprocess.Popen[str] | None = None
        try:
            wait_until(lambda: bool(self._find_run()), 60)
            if self.kill.moment == "start":
                time.sleep(self.kill.delay_s)
            else:
                wait_until(lambda: self.is_up() or command.poll() not in (None, 0), 60)
                self.expect(self.is_up(), "it has not come up")
                if self.kill.victim == SESSION:
                    watcher = self.place.start("wait", self.run.name)
                    wait_until(lambda: bool(sshd_sessions(self.rack, self.kill.host)), 20)
                time.sleep(self.kill.delay_s)
            before = self._ranks()
            self.strike(command)
            self._judge(command, before)
            self._mend()
            if watcher is not None:
                self.said += watcher.communicate(timeout=240)[1]
                self.expect(watcher.returncode == 6, f"the watching command left with {watcher.returncode}")
        finally:
            self._mend()
            for process in (command, watcher):
                if process is not None and process.poll() is None:
                    send(process, signal.SIGKILL)
            self.said += command.communicate()[1]

    def is_up(self) -> bool:
        run = self._find_run()
        return run is not None and is_up(self.place, run)

    def strike(self, command: subprocess.Popen[str]) -> None:
        """Kill the victim as soon as it is there."""
        kill = self.kill
        if kill.victim in {RANK, SUPERVISOR, GUARD, BOTH}:
            wait_until(lambda: self._choose() or command.poll() not in (None, 0), 60)
            self.facts["killed"] = [f"{each.role} {each.pid}" for each in self.victims]
            self._stamp()
            self.expect(self.victims, "there is no victim")
            for victim in self.victims:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(victim.pid, signal.SIGKILL)
        elif kill.victim == LAUNCHER:
            self._stamp()
            send(command, signal.SIGKILL)
        elif kill.victim in {SESSION, LISTENER}:
            which = sshd_sessions if kill.victim == SESSION else sshd_listener
            with contextlib.suppress(NotInTimeError):
                wait_until(lambda: bool(which(self.rack, kill.host)) or command.poll() is not None, 30)
            pids = which(self.rack, kill.host)
            self.expect(pids, "there is no victim")
            self.facts["killed"] = pids
            self._stamp()
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        elif kill.victim == POWER:
            self._stamp()
            self.rack.power_off(kill.host)
        else:
            self._stamp()
            self.rack.pull_cable(kill.host)

    def expect(self, right: object, words: str) -> None:
        if not right:
            self.wrong.append(words)

    def _stamp(self) -> None:
        self.killed_at = time.monotonic()

    @property
    def since(self) -> float:
        return round(time.monotonic() - self.killed_at, 2)

    def _choose(self) -> bool:
        """Find the victims; False while they are not there."""
        kill = self.kill
        found = self._living(kill.host)
        roles = {SUPERVISOR: "s", GUARD: "g", BOTH: "sg", RANK: "n"}[kill.victim]
        supervisors = [each.pid for each in found if each.role.startswith("s")]
        children = [each for each in found if parent_of(each.pid) in supervisors]
        victims = [each for each in found if each.role[:1] in roles and (each.role[:1] == "s" or each in children)]
        if kill.victim == RANK:
            # What a rank has left is a child of the supervisor, too.
            ranks = [each for each in victims if "node.rank" in each.command]
            victims = ranks[int(kill.delay_s * 1000) % 2 :][:1]
            self.rank = next((rank_of(each.pid) for each in victims), None)
        if {each.role[:1] for each in victims} != set(roles):
            return False
        self.victims = sorted(victims, key=lambda each: each.role, reverse=self.kill.delay_s % 0.02 < 0.01)
        return True

    def _judge(self, command: subprocess.Popen[str], before: set[int]) -> None:
        bears = self.kill.goes_on
        if bears and self.kill.moment == "start":
            # Whole or nothing: which of them shows when the command has ended and nothing moves any more.
            with contextlib.suppress(subprocess.TimeoutExpired):
                command.wait(timeout=240)
            before = set()
            with contextlib.suppress(NotInTimeError):
                wait_until(lambda: self.is_up() or not self._all(), self.within_s)
            bears = self.is_up()
            self.facts["whole"] = bears
            if not bears:
                self._judge_nothing()
                return
        if bears:
            self._judge_going_on(before or self._ranks())
        else:
            self._judge_end()

    def _judge_going_on(self, before: set[int]) -> None:
        time.sleep(GOES_ON_S)
        status = self._status()
        self._note(status)
        unheard = self.kill.victim == LISTENER and self.kill.node == 0  # the head cannot be asked, and status says so
        named = status.get("state") == "UNKNOWN" and NODES[0] in words_of(status)
        self._mend()
        if unheard:
            status = self._status()
        self.expect(status.get("state") == "RUNNING" and (named or not unheard), "it does not go on")
        self.expect(self._ranks() == before, "its ranks are not those of before")
        if self.kill.victim == GUARD:
            new = {each.pid for each in self._living(self.kill.host) if each.role.startswith("g")}
            self.expect(new and not new & {each.pid for each in self.victims}, "there is no other guard")
        self._stamp()
        self.said += self.place.clusterddp("cancel", self.run.name, check=False).stderr
        self._await_gone()
        self.expect(self._status().get("state") == "CANCELLED", "it is not CANCELLED after that")

    def _judge_nothing(self) -> None:
        """Nothing is there: the launcher never came to a start, or took it back."""
        self._await_gone()
        states = ("FAILED", "LOST") if self.kill.victim == LAUNCHER else ("FAILED",)
        names = "" if self.kill.victim == LAUNCHER else self.kill.host
        self._await_status(lambda status: status.get("state") in states and names in words_of(status))

    def _judge_end(self) -> None:
        if self.kill.victim == BOTH:
            # The ranks end with their supervisor; what they have started is left for gc.
            wait_until(lambda: all(each.command.startswith("sleep") for each in self._living(self.kill.host)), 20)
            self.said += self.place.clusterddp("gc", self.run.name, "--yes", check=False).stderr
        self._await_gone()
        self._await_status(self._is_reported_right)
        if self.kill.victim == CABLE:
            time.sleep(max(0.0, self.killed_at + self.cable_s - time.monotonic()))
        if self.kill.victim in {POWER, CABLE}:
            self._mend()
            time.sleep(1.0)
            self.expect(not self._all(), f"back on the network it has {self._all()}")
            status = self._status()
            self.facts["after"] = {"state": status.get("state"), "cause": status.get("root_cause")}
            self.expect(self._is_reported_right(status), "status reports another state or cause now")

    def _is_reported_right(self, status: dict[str, Any]) -> bool:
        kill, cause = self.kill, status.get("root_cause") or {}
        if status.get("state") != "FAILED" or not cause:
            return False
        words = str(cause.get("error"))
        early = kill.moment == "start" and kill.host in words
        if kill.victim == RANK:
            named = (cause["rank"], cause["host"]) == (self.rank, kill.host) and "SIGKILL" in words
        elif kill.victim in {SUPERVISOR, BOTH}:
            named = cause["host"] == kill.host and f"node {kill.node} " in words
        else:
            named = cause["host"] == kill.host and kill.host in words
        return bool(named or early)

    def _await_gone(self) -> None:
        """Wait for the end of every process of the run on hosts that are on."""
        try:
            wait_until(lambda: not self._all(), self.within_s - self.since)
            self.facts["gone_s"] = self.since
            self.expect(self.facts["gone_s"] <= self.within_s, "the last of it has gone too late")
        except NotInTimeError:
            self.wrong.append(f"left after {self.since} s: {self._all()}")

    def _await_status(self, is_right: Callable[[dict[str, Any]], bool]) -> None:
        """Ask until the answer is right; it has to be when it is asked for within 20 s."""
        asked_s = self.since
        while not is_right(status := self._status()) and self.since < self.within_s:
            time.sleep(0.3)
            asked_s = self.since
        self._note(status)
        self.facts |= {"asked_s": asked_s, "told_s": self.since}
        self.expect(is_right(status) and asked_s <= self.within_s, "status does not report it in time")

    def _note(self, status: dict[str, Any]) -> None:
        self.facts |= {"state": status.get("state"), "cause": status.get("root_cause")}
        if not status.get("root_cause"):
            self.facts["reason"] = status.get("reason")

    def _status(self) -> dict[str, Any]:
        done = self.place.clusterddp("status", self.run.name, "-o", "json", check=False)
        return dict(json.loads(done.stdout)) if done.stdout else {"state": None, "reason": done.stderr}

    def _mend(self) -> None:
        """Put the hosts in order again."""
        if self.kill.victim == CABLE:
            self.rack.plug_cable(self.kill.host)
        if self.kill.victim == POWER and self.kill.host not in self.rack.powered:
            self.rack.power_on(self.kill.host)
        if self.kill.victim == LISTENER and not sshd_listener(self.rack, self.kill.host):
            config, key = "/run/rack/sshd_config.private", f"/run/rack/hostkey.{self.kill.host}"
            self.rack.run(self.kill.host, ["/usr/sbin/sshd", "-f", config, "-h", key])

    def _find_run(self) -> RunDir | None:
        runs = list_runs(self.place.runs_dir) if self.place.runs_dir.exists() else []
        if runs and self.run is None:
            self.token = self.place.record(runs[0]).token
            self.run = runs[0]
        return self.run

    def _living(self, host: str) -> list[HostProcess]:
        return self.place.processes(host, self.token) if host in self.rack.powered else []

    def _all(self) -> list[HostProcess]:
        return [each for host in NODES for each in self._living(host)]

    def _ranks(self) -> set[int]:
        return {each.pid for each in self._all() if each.role.startswith("n")} if self.run else set()

    def logs(self) -> str:
        """Read all that was written of the run, here and on its hosts."""
        places = (
            {HEAD: self.run, **{node: self.place.host_run_dir(node, self.run) for node in NODES}} if self.run else {}
        )
        texts = [f"== the command\n{self.said}"]
        for host, run in places.items():
            patterns = (
                "launcher/*.log",
                "launcher/hosts.json",
                "events.jsonl",
                "attempts/*/*.json",
                "attempts/*/logs/*",
            )
            for path in [path for pattern in patterns for path in sorted(run.path.glob(pattern))]:
                if text := path.read_text(errors="replace"):
                    texts.append(f"== {host} {path.relative_to(run.path)}\n{text[-6000:]}")
        return "\n".join(texts)


def play_round(
    rack: Rack, kill: Kill, *, seed: int = 0, number: int = 0, cable_s: float = CABLE_S
) -> tuple[dict[str, Any], str]:
    """Play one round; return its line, and the logs when it was borne otherwise than it should be."""
    with ssh_place_on(rack) as place:
        round_ = Round(place=place, kill=kill, cable_s=cable_s)
        try:
            round_.play()
        except (AssertionError, RackError, subprocess.TimeoutExpired, OSError) as error:
            round_.wrong.append(f"{type(error).__name__}: {error}")
        line = {
            "seed": seed,
            "number": number,
            "right": not round_.wrong,
            "victim": kill.victim,
            "host": kill.host,
            "moment": kill.moment,
            "delay_s": round(kill.delay_s, 2),
            **round_.facts,
        }
        if round_.wrong:
            line["wrong"] = round_.wrong
        return line, round_.logs() if round_.wrong else ""


def words_of(status: dict[str, Any]) -> str:
    return json.dumps([status.get("reason"), status.get("root_cause")])
