"""Gangs whose storage is full, read-only, or away: how they end, and where the end is recorded."""

import time

import pytest

from clusterddp.run.attempts import read_spooled
from clusterddp.system.storage import HOST_SILENCE_S
from tests.support.gang_runs import running
from tests.support.storage_faults import away, disk
from tests.support.waiting import wait_until


@pytest.mark.root
def test_a_rank_that_completes_while_its_log_s_disk_is_full_has_not_failed(tmp_path):
    with disk(tmp_path / "disk") as full, running(full.path, "print('x' * 7000)\nuntil_stop()") as gang:
        gang.await_up()
        filler = full.fill()
        gang.attempt().stop_file.touch()
        wait_until(lambda: not gang.pids("n0") + gang.pids("n1"))
        filler.unlink()
        assert gang.await_end() == [0, 0]
        assert {rank.exit_code for rank in gang.ranks()} == {0}


@pytest.mark.root
def test_a_full_disk_leaves_no_rank_running(tmp_path):
    code = "up()\nif rank == 0: time.sleep(0.5); os._exit(4)\nforever()"
    with disk(tmp_path / "disk") as full, running(full.path, code) as gang:
        gang.await_up()
        filler = full.fill()
        wait_until(lambda: not gang.pids("n0") + gang.pids("n1"), 5)
        filler.unlink()
        assert gang.await_end() == [1, 1]
        assert gang.end().root_cause.error == "rank 0 on host0 exited with code 4"


@pytest.mark.root
def test_the_cause_of_an_end_that_a_read_only_disk_does_not_take_is_spooled(tmp_path):
    code = "up()\nif rank == 0: time.sleep(1.5); os._exit(4)\nforever()"
    with disk(tmp_path / "disk") as disk_, running(disk_.path, code) as gang:
        gang.await_up()
        wait_until(gang.attempt().start.exists)
        disk_.make_read_only()
        assert gang.await_end() == [1, 1]
        end = read_spooled(gang.gang.token, 0)
        assert end.root_cause.error == "rank 0 on host0 exited with code 4"
        assert "Read-only file system" in end.reason


def test_a_gang_that_starts_again_while_its_storage_is_away_goes_on(tmp_path):
    code = "up()\nif attempt: sys.exit(0)\nwhile run_dir.exists(): time.sleep(0.02)\nos._exit(3)"
    place = tmp_path / "storage"
    place.mkdir()
    with running(place, code, restarts=1) as gang:
        gang.await_up()
        wait_until(gang.attempt().start.exists)
        with away(place):
            time.sleep(3)
            assert not place.exists()
        gang.await_end()
        assert gang.end(0).will_restart
        assert gang.end(1).outcome == "COMPLETED"


def test_storage_is_waited_for_as_long_as_hosts_are(tmp_path):
    code = "up()\nwhile run_dir.exists(): time.sleep(0.02)\nos._exit(3)"
    place = tmp_path / "storage"
    place.mkdir()
    with running(place, code, host_silence_s=1.0) as gang:
        gang.await_up()
        wait_until(gang.attempt().start.exists)
        with away(place):
            began = time.monotonic()
            wait_until(lambda: read_spooled(gang.gang.token, 0))
            assert time.monotonic() - began < HOST_SILENCE_S
