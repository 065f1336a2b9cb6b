"""Tests of runs with several processes: how they connect, what they compare, and how they end together."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import textwrap
import threading
import time
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import jax
import numpy as np
import pytest

from helpers import compose_run
from processes import free_address, run_teams, start_processes, wait_for_processes
from runs import TINY_ARGUMENTS, needs_sandbox, start_python, start_training
from valkyrie.parallel.mesh import build_mesh
from valkyrie.processes.child import module_command
from valkyrie.processes.distributed import DistributedConfig, find_process
from valkyrie.processes.ending import EXIT_LOST, EXIT_PREEMPTED, EXIT_REFUSED, USER_CODE_FAILED
from valkyrie.processes.hub import Connection, Goodbye, Hub, Lost
from valkyrie.processes.locks import write_lock
from valkyrie.processes.team import ALONE, ConnectedTeam, ProcessInfo, Team
from valkyrie.runs.tracking import read_metrics
from valkyrie.train.processes import abort_all_on_error, check_shared_folder
from valkyrie.train.program import StepProgram


def test_a_run_of_one_process_agrees_with_itself():
    assert ALONE.is_leader and ALONE.exchange("x", 3) == [3] and ALONE.broadcast_from_leader("y", lambda: 4) == 4
    ALONE.agree("configuration", {"steps": 1})


def test_a_child_imports_nothing_from_the_current_folder(tmp_path: Path):
    (tmp_path / "this.py").write_text("raise SystemExit('this folder')")
    result = subprocess.run(module_command("this"), cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0 and "Zen" in result.stdout


def test_values_are_exchanged_and_those_of_process_0_are_used():
    def talk(team: Team) -> Any:
        letters = team.exchange("letters", "abc"[team.index])
        folder = team.broadcast_from_leader("folder", lambda: f"runs/{team.index}")
        team.agree("configuration", {"steps": 7})
        return letters, folder

    assert run_teams(3, talk) == [(["a", "b", "c"], "runs/0")] * 3


def test_every_process_names_the_differing_setting():
    def differ(team: Team) -> None:
        team.agree("configuration", {"steps": 7, "batch": 8 if team.index < 2 else 16})

    for error in run_teams(4, differ):
        assert "batch=16" in str(error) and "on processes 2, 3." in str(error)


def test_an_error_of_process_0_is_raised_on_all_processes():
    def look(team: Team) -> None:
        def find() -> str:
            raise ValueError("no run")

        team.broadcast_from_leader("folder", find)

    assert [str(error) for error in run_teams(2, look)] == ["no run"] * 2


def test_a_missing_process_is_named_within_the_timeout():
    start = time.monotonic()
    for error in run_teams(2, lambda team: None, expected_counts=[3, 3], timeout_s=1.0):
        assert "1 of 3" in str(error) and "in time: 2." in str(error)
    assert time.monotonic() - start < 15


def test_a_process_with_another_process_count_is_named():
    for error in run_teams(2, lambda team: None, expected_counts=[2, 4]):
        assert str(error).startswith("process 1 (on ") and "4 processes" in str(error) and str(error).endswith(" 2.")


def test_a_used_port_is_named():
    with socket.socket() as server:
        server.bind(("", 0))
        server.listen()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(ValueError, match=r"port \d+ \(Address"):
            ConnectedTeam(ProcessInfo(address, 2, 0), timeout_s=1.0, heartbeat_s=2.0)


def test_another_server_is_not_mistaken_for_process_0():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()

        def answer() -> None:
            connection, _ = server.accept()
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n")
            connection.close()

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(ValueError, match="not process 0"):
            ConnectedTeam(ProcessInfo(f"127.0.0.1:{server.getsockname()[1]}", 2, 1), timeout_s=1.0, heartbeat_s=2.0)


def test_a_missing_process_0_is_reported():
    with pytest.raises(ValueError, match=r"127.0.0.1:\d+ within .* \(Connection refused\)"):
        ConnectedTeam(ProcessInfo(free_address(), 2, 1), timeout_s=0.3, heartbeat_s=2.0)


MEMBER = """
import sys, time
from valkyrie.processes.team import ConnectedTeam, ProcessInfo
index, address = int(sys.argv[1]), sys.argv[2]
team = ConnectedTeam(ProcessInfo(address, 2, index), timeout_s=20.0, heartbeat_s=3.0)
print("met", flush=True)
team.wait("both")
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("lost_index", "signal", "message"),
    [
        (1, 9, ") is lost: its connection closed"),
        (0, 9, "process 0 is lost: "),
        (1, 19, ") is lost: it sent nothing for 3 s"),
    ],
)
def test_the_other_processes_end_if_one_is_lost(lost_index: int, signal: int, message: str):
    address = free_address()
    members = [start_python("-c", MEMBER, str(index), address, cwd=Path.cwd()) for index in range(2)]
    try:
        for member in members:
            assert member.stdout is not None and member.stdout.readline() == "met\n"
        members[lost_index].send_signal(signal)
        survivor = members[1 - lost_index]
        assert survivor.wait(30) == EXIT_LOST
        assert survivor.stderr is not None and message in survivor.stderr.read()
    finally:
        for member in members:
            member.kill()
            member.communicate()


def test_process_0_hears_of_a_failure_last():
    """It then ends, and the hub with it."""
    hub, order = object.__new__(Hub), []
    hub._lock, hub._has_ended, hub._hosts = threading.Lock(), False, {2: "host"}
    hub._connections = {i: SimpleNamespace(send=lambda message, i=i: order.append(i)) for i in range(3)}
    hub.report_failure(2, "no", 2)
    assert sorted(order) == [0, 1, 2] and order[-1] == 0


def test_a_failure_of_process_0_is_sent_before_it_ends(monkeypatch: pytest.MonkeyPatch):
    send, failing_threads, sending_threads = Connection.send, [], []

    def record(self: Connection, message: Any) -> None:
        if isinstance(message, Lost):
            sending_threads.append(threading.current_thread())
        send(self, message)
        if isinstance(message, Goodbye):
            time.sleep(0.2)  # the thread of the hub reads it in the meantime

    def fail(team: Team) -> None:
        if team.is_leader:
            failing_threads.append(threading.current_thread())
            team.fail(2, "no")
        else:
            time.sleep(0.5)

    monkeypatch.setattr(Connection, "send", record)
    run_teams(2, fail)
    assert sending_threads == 2 * failing_threads


@pytest.mark.parametrize("has_failed", [False, True])
def test_a_value_that_cannot_be_sent_reports_the_status_of_process_0(monkeypatch: pytest.MonkeyPatch, has_failed: bool):
    """The status is that of its failure, or that it was lost."""
    statuses: list[int] = []

    def talk(team: Any) -> None:
        if team.is_leader:
            time.sleep(0.5)
            if has_failed:
                team.fail(EXIT_REFUSED, "no")
        else:
            team.on_loss = lambda line, status: statuses.append(status)
            monkeypatch.setattr(team._connection, "send", Mock(side_effect=BrokenPipeError(32, "Broken pipe")))
            with pytest.raises(BrokenPipeError):
                team.exchange("values")

    run_teams(2, talk)
    assert statuses[:1] == [EXIT_REFUSED if has_failed else EXIT_LOST]


ENVIRONMENT = {"JAX_COORDINATOR_ADDRESS": "10.0.0.2:8476", "JAX_PROCESS_COUNT": "4", "JAX_PROCESS_INDEX": "3"}
OTHER_NAMES = {"JAX_COORDINATOR_ADDRESS": "10.0.0.2:8476", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "3"}


@pytest.mark.parametrize("environment", [ENVIRONMENT, OTHER_NAMES])
def test_the_environment_gives_coordinator_count_and_index(environment: dict[str, str]):
    assert find_process(DistributedConfig(), environment=environment) == ProcessInfo("10.0.0.2:8476", 4, 3)
    assert find_process(DistributedConfig(name="off"), environment=environment) is None


def test_the_command_line_overrides_the_environment():
    config = DistributedConfig(coordinator="a:1", processes=2, process=1)
    assert find_process(config, environment=ENVIRONMENT) == ProcessInfo("a:1", 2, 1)
    assert find_process(DistributedConfig(), environment={}) is None
    assert find_process(DistributedConfig(), environment={"JAX_PROCESS_COUNT": "1"}) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"JAX_PROCESS_INDEX": "4"}, "JAX_PROCESS_INDEX=4 "),
        ({"JAX_PROCESS_COUNT": "0"}, "JAX_PROCESS_COUNT=0 "),
        ({"JAX_PROCESS_INDEX": "one"}, "JAX_PROCESS_INDEX=one "),
        ({"JAX_PROCESS_INDEX": ""}, "not JAX_PROCESS_INDEX."),
        ({"JAX_COORDINATOR_ADDRESS": ""}, "not JAX_COORDINATOR_ADDRESS."),
        ({"JAX_COORDINATOR_ADDRESS": "10.0.0.2"}, "HOST:PORT"),
        ({"JAX_PROCESS_COUNT": "", "JAX_PROCESS_INDEX": ""}, "not JAX_PROCESS_COUNT and JAX_PROCESS_INDEX."),
    ],
)
def test_incomplete_process_settings_are_refused(change: dict[str, str], message: str):
    with pytest.raises(ValueError) as error:
        find_process(DistributedConfig(), environment=ENVIRONMENT | change)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("partition", "rows", "columns"), [("dp", 4, 16), ("fsdp", 2, 16), ("2d_tp", 4, 16), ("sp", 8, 4)]
)
def test_a_batch_is_placed_by_its_sharding(partition: str, rows: int, columns: int):
    mesh = {"dp": "2x1x1", "fsdp": "2x2x1", "2d_tp": "1x2x2", "sp": "4x1x1"}[partition]
    run = compose_run(*TINY_ARGUMENTS, f"mesh={mesh}", f"partition={partition}")
    program = StepProgram(run, build_mesh(run.config.mesh, jax.devices()))
    assert program.local_rows == list(range(8))
    batch = program.task.random_batch(8, 16, 20, 0, program.local_rows)
    placed = program.place(batch)
    for name, array in placed.items():
        np.testing.assert_array_equal(np.asarray(array), batch[name])
        assert {shard.data.shape for shard in array.addressable_shards} == {(rows, columns)}


def losses(folder: Path) -> list[float]:
    return [record["loss"] for record in read_metrics(folder / "metrics.jsonl") if "loss" in record]


@pytest.mark.timeout(400)
@pytest.mark.slow
@pytest.mark.parametrize("partition", ["dp", "fsdp", "1d_tp", "2d_tp", "fsdp_tp"])
@pytest.mark.parametrize("processes", [2, 4])
def test_several_processes_train_like_one(partition: str, processes: int, tmp_path: Path):
    overrides = [*TINY_ARGUMENTS, "mesh=2x2x2", f"partition={partition}", "steps=10", "name=run", "eval_every=10"]
    for folder in ("one", "many"):
        (tmp_path / folder).mkdir()
    (alone,) = wait_for_processes([start_training(*overrides, cwd=tmp_path / "one")])
    sharded_steps = wait_for_processes(start_processes(processes, *overrides, cwd=tmp_path / "many"))
    assert alone[0] == 0, alone[2]
    assert [status for status, _, _ in sharded_steps] == [0] * processes, sharded_steps
    np.testing.assert_allclose(losses(tmp_path / "many/runs/run"), losses(tmp_path / "one/runs/run"), rtol=2e-5)
    assert all(out == "" for _, out, _ in sharded_steps[1:])
    logs = sorted(path.name for path in (tmp_path / "many/runs/run/logs").iterdir())
    assert logs == [f"process-{index}.log" for index in range(1, processes)]


@pytest.mark.slow
def test_a_run_resumes_with_another_number_of_processes(tmp_path: Path):
    overrides = [*TINY_ARGUMENTS, "partition=fsdp", "name=run", "checkpoint.every=2"]
    (whole,) = wait_for_processes(
        [start_training(*overrides, "mesh=2x2x1", "steps=6", "runs=whole", "optimizer.decay_steps=6", cwd=tmp_path)]
    )
    assert whole[0] == 0, whole[2]
    for processes, mesh, steps in ((2, "2x2x1", 2), (1, "4x1x1", 4), (4, "2x2x2", 6)):
        workers = start_processes(
            processes, *overrides, f"mesh={mesh}", f"steps={steps}", "optimizer.decay_steps=6", cwd=tmp_path
        )
        assert [status for status, _, _ in wait_for_processes(workers)] == [0] * processes
    np.testing.assert_allclose(losses(tmp_path / "runs/run"), losses(tmp_path / "whole/run"), rtol=2e-5)


def test_all_processes_refuse_a_run_folder_that_one_of_them_cannot_see(tmp_path: Path):
    def look(team: Team) -> None:
        folder = tmp_path / str(team.index // 2)
        if team.is_leader:
            with write_lock(folder):
                check_shared_folder(team, folder)
        else:
            check_shared_folder(team, folder)

    for error in run_teams(3, look):
        assert "process 2 " in str(error)


def wait_for_step(folder: Path, step: int) -> None:
    """Wait until a training run has logged `step` or a later step. Raises AssertionError after 120 s."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        file = folder / "metrics.jsonl"
        if file.is_file() and any(record.get("step", 0) >= step for record in read_metrics(file)):
            return
        time.sleep(0.1)
    raise AssertionError(f"{folder} has no step {step}")


@pytest.mark.slow
@pytest.mark.parametrize("preempted_index", [0, 1])
def test_a_preemption_of_one_process_saves_on_all_at_the_same_step(preempted_index: int, tmp_path: Path):
    overrides = [*TINY_ARGUMENTS, "mesh=2x1x1", "partition=fsdp", "steps=100000", "name=run", "checkpoint.every=null"]
    processes = start_processes(2, *overrides, cwd=tmp_path)
    wait_for_step(tmp_path / "runs/run", 5)
    processes[preempted_index].terminate()
    start = time.monotonic()
    assert [status for status, _, _ in wait_for_processes(processes)] == [EXIT_PREEMPTED] * 2
    assert time.monotonic() - start < 30
    (step,) = (int(path.name) for path in (tmp_path / "runs/run/checkpoints").iterdir())
    assert step >= 5
    resumed_processes = start_processes(2, *overrides, f"steps={step + 2}", cwd=tmp_path)
    first, _ = wait_for_processes(resumed_processes)
    assert first[0] == 0 and f"step {step} to" in first[1]


@pytest.mark.slow
@pytest.mark.parametrize("killed_index", [0, 1])
def test_the_others_end_if_a_process_is_killed_and_the_run_resumes(killed_index: int, tmp_path: Path):
    overrides = [*TINY_ARGUMENTS, "mesh=2x1x1", "partition=fsdp", "name=run", "checkpoint.every=5"]
    processes = start_processes(2, *overrides, "steps=100000", cwd=tmp_path)
    wait_for_step(tmp_path / "runs/run", 20)
    processes[killed_index].kill()
    start = time.monotonic()
    survivor = wait_for_processes(processes)[1 - killed_index]
    assert survivor[0] in (EXIT_LOST, -6) and time.monotonic() - start < 15  # -6: JAX's own end, where it is faster
    again = wait_for_processes(start_processes(2, *overrides, "steps=40", cwd=tmp_path))
    assert [status for status, _, _ in again] == [0, 0] and "continuing run" in again[0][1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "pattern"),
    [
        (["steps=3"], r"\bsteps=4 on process 0\b.*\bsteps=3 on process 1\b"),
        (["mesh=1x2x1"], r"\bmesh\b"),
        (["data.documents=61"], r"\bdocuments=60 on process 0\b.*\bdata\.documents=61 on process 1\b"),
    ],
)
def test_every_process_refuses_mismatched_settings(change: list[str], pattern: str, tmp_path: Path):
    overrides = [*TINY_ARGUMENTS, "mesh=2x1x1", "partition=fsdp", "steps=4", "name=run"]
    variables = {"JAX_COORDINATOR_ADDRESS": free_address(), "JAX_PROCESS_COUNT": "2"}
    processes = [
        start_training(*overrides, *(change if index else []), cwd=tmp_path, **variables, JAX_PROCESS_INDEX=str(index))
        for index in range(2)
    ]
    for status, _, err in wait_for_processes(processes):
        assert status == 2 and re.search(pattern, err) and "Traceback" not in err
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_several_processes_measure_and_evaluate(tmp_path: Path):
    overrides = [*TINY_ARGUMENTS, "mesh=2x1x1", "partition=fsdp", "steps=2", "name=run"]
    assert [status for status, _, _ in wait_for_processes(start_processes(2, *overrides, cwd=tmp_path))] == [0, 0]
    measured = wait_for_processes(start_processes(2, *overrides, "mode=measure", "mode.repeats=2", cwd=tmp_path))
    assert [status for status, _, _ in measured] == [0, 0], measured
    assert json.loads((tmp_path / "runs/run-measure/measure.json").read_text())["status"] == "ok"
    for mode in ("mode=eval", "mode=generate"):
        first, second = wait_for_processes(start_processes(2, "resume=run", mode, "sample_tokens=3", cwd=tmp_path))
        assert (first[0], second[0], second[1]) == (0, 0, ""), (first, second)
        assert "at step 2" in first[1] + first[2]


@pytest.mark.slow
@needs_sandbox
def test_only_one_process_judges_generated_code(tmp_path: Path):
    code = ("code_eval.problems=python", "code_eval.samples=1", "code_eval.tokens=4", "code_eval_every=1")
    overrides = [*TINY_ARGUMENTS, "mesh=2x1x1", "partition=fsdp", "steps=2", "name=run", *code]
    results = wait_for_processes(start_processes(2, *overrides, cwd=tmp_path))
    assert [status for status, _, _ in results] == [0, 0], results
    folder = tmp_path / "runs/run"
    assert [r["step"] for r in read_metrics(folder / "metrics.jsonl") if "python_pass_rate" in r] == [1, 2]
    assert (folder / "code_eval.json").is_file()
    first, second = wait_for_processes(start_processes(2, "resume=run", "mode=code_eval", cwd=tmp_path))
    assert (first[0], second[0], second[1]) == (0, 0, ""), (first, second)
    assert "step 2: python: " in first[1]


FULL_DISK = textwrap.dedent("""
    import os
    from orbax.checkpoint._src.serialization import serialization

    write, calls = serialization.async_serialize_from_host, []

    async def write_or_fail(*args, **kwargs):
        calls.append(1)
        if len(calls) == 5 and os.environ["JAX_PROCESS_INDEX"] == "1":
            raise OSError(28, "No space left on device")
        return await write(*args, **kwargs)

    serialization.async_serialize_from_host = write_or_fail
    from valkyrie.cli.train import main
    main()
""")


@pytest.mark.slow
def test_a_failed_write_on_one_process_ends_all_processes(tmp_path: Path):
    script = tmp_path / "full_disk.py"
    script.write_text(FULL_DISK)
    overrides = [*TINY_ARGUMENTS, "mesh=2x1x1", "partition=fsdp", "name=run", "steps=4000", "checkpoint.every=3"]
    variables = {"JAX_COORDINATOR_ADDRESS": free_address(), "JAX_PROCESS_COUNT": "2"}
    processes = [
        start_python("-W", "ignore", str(script), *overrides, cwd=tmp_path, **variables, JAX_PROCESS_INDEX=str(index))
        for index in range(2)
    ]
    (first, _, err), (second, _, _) = wait_for_processes(processes)
    assert (first, second) == (69, 1)
    assert "process 1 (on " in err and "with status 1" in err
    log = (tmp_path / "runs/run/logs/process-1.log").read_text()
    assert "at step 3" in log and "no space left" in log


@pytest.mark.parametrize("kind", ["ValueError", "AttributeError", "FileNotFoundError"])
def test_an_error_in_a_users_module_ends_a_run_with_its_own_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], kind: str
):
    (tmp_path / f"failing_{kind}.py").write_text(f"def fail(): raise {kind}('no')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("VALKYRIE_MODULES", str(tmp_path))
    statuses: list[int] = []
    monkeypatch.setattr("valkyrie.train.processes.end_process", lambda status, reason: statuses.append(status))
    with abort_all_on_error(ALONE):
        import_module(f"failing_{kind}").fail()
    assert statuses == [USER_CODE_FAILED]
    err = capfd.readouterr().err
    assert f"in fail: {kind}: no " in err and "HYDRA_FULL_ERROR=1" in err and "Traceback" not in err
