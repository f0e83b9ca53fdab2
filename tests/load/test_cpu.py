"""CPU times out of /proc: read right whatever a process is called, and counted for whole trees."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from app.errors import CarillonError
from app.load import cpu
from app.load.cpu import CpuReading, MachineTimes, Processes
from tests.eventually import eventually

BURN = "t=__import__('time'); e=t.process_time()+0.3\nwhile t.process_time()<e: pass\n"


def test_a_line_of_stat_is_read_behind_any_name() -> None:
    times = cpu.parse_stat(
        "4711 (a) R (b 1 2) S 17 4711 4711 0 -1 4194304 10 20 0 0 150 50 1000 500 20 0 1 0 12345 0 0\n"
    )

    assert (times.pid, times.parent) == (4711, 17)
    assert times.own == 200 / cpu.TICKS
    assert times.ended == 1500 / cpu.TICKS


def test_the_machines_time_leaves_waiting_and_idling_out() -> None:
    machine = cpu.parse_machine("cpu  100 20 30 9999 8888 5 6 7 0 0\ncpu0 1 2 3 4 5 6 7 8 0 0\n")

    assert machine.busy == pytest.approx(161 / cpu.TICKS)
    assert machine.stolen == pytest.approx(7 / cpu.TICKS)


def test_own_time_is_about_what_the_process_says_itself() -> None:
    assert cpu.own_seconds(os.getpid()) == pytest.approx(sum(os.times()[:2]), abs=0.1)


async def test_a_tree_counts_children_that_live_and_that_have_ended(tmp_path: Path) -> None:
    program = f"""
import os, subprocess, sys, time
subprocess.run([sys.executable, "-c", {BURN!r}], check=True)
child = subprocess.Popen([sys.executable, "-c", {BURN!r} + "open('burnt', 'w').close(); t.sleep(60)"])
child.wait()
"""
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, cwd=tmp_path, start_new_session=True
    )
    try:
        await eventually((tmp_path / "burnt").exists)

        assert cpu.tree_seconds(parent.pid) >= 0.6
        assert cpu.own_seconds(parent.pid) < 0.3
    finally:
        os.killpg(parent.pid, signal.SIGKILL)
        await parent.wait()


def test_a_process_that_has_ended_has_no_figure() -> None:
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()

    for read in (cpu.own_seconds, cpu.tree_seconds):
        with pytest.raises(CarillonError, match="has ended"):
            read(done.pid)


def test_use_between_two_readings_leaves_the_rest_of_the_machine_to_others() -> None:
    earlier = CpuReading({"executor": 1.0, "postgres": 2.0}, MachineTimes(10.0, 1.0))
    later = CpuReading({"executor": 2.5, "postgres": 2.25}, MachineTimes(13.0, 1.5))

    use = later.since(earlier)

    assert use.parts == {"executor": 1.5, "postgres": 0.25}
    assert use.ours == 1.75
    assert use.others == 1.25
    assert use.stolen == 0.5


def test_parts_are_sums_of_their_processes() -> None:
    me = os.getpid()

    reading = cpu.read(Processes({"executor": (me, me)}, {}))

    assert reading.parts["executor"] == pytest.approx(2 * sum(os.times()[:2]), abs=0.2)
