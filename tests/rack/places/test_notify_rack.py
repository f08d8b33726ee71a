"""Messages and the report of a run on Slurm, whose job ends every process, and on hosts that share nothing."""

from __future__ import annotations

import json

import pytest

from clusterddp.places.state import read_state
from clusterddp.submission.notices import send_left
from clusterddp.system.files import read_jsonl
from tests.support.launch_runs import HELLO
from tests.support.slurm_runs import await_final_end, environment, make_slurm_run, start_run
from tests.support.ssh_place import SshPlace
from tests.support.waiting import wait_until
from tests.support.webhook import Webhook
from tests.testbed.plan import RackPlan
from tests.testbed.rack import running_rack

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("needs_rack")]
FAILS = HELLO + "import sys\nsys.exit(3 if os.environ['RANK'] == '1' else 0)\n"


def test_a_job_that_fails_waits_for_its_message_and_its_report_and_a_later_command_sends_the_rest():
    with running_rack(RackPlan(nodes=["node1", "node2"])) as rack, Webhook() as webhook:
        hook = {"HOOK": webhook.url}
        keys = "webhook: '${HOOK}', command: [sh, -c, 'sleep 2; cat > said']"
        run = make_slurm_run(rack, "run", FAILS, more=f"notify: {{on: fail, {keys}}}", environ=hook)
        start_run(rack, run, hook)
        assert await_final_end(run, 60).outcome == "FAILED"
        wait_until(lambda: {row.get("by") for row in read_jsonl(run.events)} >= {"command", "webhook"}, 40)
        wait_until(run.report.exists, 20)
        assert json.loads((run.path / "said").read_text())["event"] == "fail"
        failed = [row for row in read_jsonl(run.events) if row["event"] == "notify_failed"]
        assert [row["by"] for row in failed] == ["webhook"], "the nodes have no way to this machine's loopback"
        send_left(run, read_state(run), environment() | hook, patience_s=15.0)
        assert [message["state"] for message in webhook.received] == ["FAILED"]


def test_over_ssh_the_host_posts_and_the_laptop_runs_the_command_and_writes_the_report(ssh_place: SshPlace):
    hosts = "launcher: ssh\nssh: {hosts: [node1, node2]}\npython: /opt/bare/bin/python\nsnapshot: false\n"
    keys = "webhook: '${HOOK}', command: [sh, -c, 'cat >> said']"
    entry = "entry: {command: [sh, -c, 'test $RANK = 0 || exit 3; sleep 60']}\n"
    ssh_place.environ["HOOK"] = "http://127.0.0.1:9/hunter2"
    run = ssh_place.submit(f"name: a\ndevice: cpu\n{hosts}{entry}notify: {{{keys}}}\n")
    assert ssh_place.clusterddp("wait", run.name, check=False).returncode == 5
    assert json.loads((run.path / "said").read_text())["state"] == "FAILED"
    results = [(row["event"], row["by"]) for row in read_jsonl(run.events) if row["event"].startswith("notif")]
    assert ("notify_failed", "webhook") in results
    assert ("notified", "command") in results
    status = ssh_place.status(run)
    assert status["report"] == str(run.report)
    assert "notify.webhook was not sent (end): 127.0.0.1 cannot be reached" in status["warning"]
    for kept in (run, ssh_place.host_run_dir("node1", run)):
        assert "hunter2" not in kept.events.read_text()
