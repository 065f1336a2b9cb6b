"""valkyrie-doctor: each finding where it is fine and where it is not, what is printed, and the exit status."""

from __future__ import annotations

import fcntl
import io
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import requires, version
from pathlib import Path
from typing import Any

import jax
import pytest
from rich.console import Console

from helpers import compose_run
from processes import free_address, meet
from runs import TINY
from valkyrie.cli.doctor import main
from valkyrie.data.prepare import prepare
from valkyrie.doctor import disks, host, shared, software
from valkyrie.doctor.examine import _clocks, _of_all
from valkyrie.doctor.findings import FAILS, FINE, WARNING, Finding, Findings
from valkyrie.doctor.size import state_bytes
from valkyrie.parallel.mesh import abstract_mesh
from valkyrie.processes.team import Team
from valkyrie.train import devices
from valkyrie.train.program import StepProgram

SMALL = (*TINY, "mesh=2x1x1", "partition=dp")


def on_tpu(monkeypatch: pytest.MonkeyPatch, chips: int = 4) -> None:
    """Let this host have so many chips, as far as device files tell."""
    for module in (host, devices):
        monkeypatch.setattr(module, "accelerators", lambda: chips)


def doctor(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Return exit status, output and errors of the command in this process."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert isinstance(end.value.code, int)
    return end.value.code, *capsys.readouterr()


def test_a_target_that_is_not_this_machine_fails():
    (found,) = host.chips(compose_run("model=gpt_tiny", "mesh=2x2x1", "target=v4-8"), 1)
    assert (found.check, found.verdict) == ("chips", FAILS) and "is not this machine" in found.text


def test_simulated_devices_are_a_warning_unless_they_are_asked_for():
    assert host.chips(compose_run(*SMALL), 1)[0].verdict == WARNING
    assert host.chips(compose_run(*SMALL, "target=cpu"), 1)[0].verdict == FINE


def test_chips_and_processes_are_held_against_the_hosts_of_the_target(monkeypatch: pytest.MonkeyPatch):
    run = compose_run("model=gpt_tiny", "mesh=4x4x2", "target=v4-64", "batch=32")
    on_tpu(monkeypatch)
    assert host.chips(run, 8) == [Finding("chips", FINE, "4 v4 chips on this host")]
    assert [found.text for found in host.chips(run, 2)[1:]] == [
        "2 processes; target=v4-64 (32 v4 chips 2x4x4, 8 hosts) has 8 hosts"
    ]
    on_tpu(monkeypatch, chips=8)
    (found,) = host.chips(run, 8)
    assert (found.verdict, found.text) == (
        FAILS,
        "8 on this host; target=v4-64 (32 v4 chips 2x4x4, 8 hosts) has 4 a host",
    )


def process_with(proc: Path, pid: int, device: str) -> None:
    """Make a process in a /proc of our own that has a device file open."""
    (proc / str(pid) / "fd").mkdir(parents=True)
    (proc / str(pid) / "fd" / "7").symlink_to(device)
    (proc / str(pid) / "cmdline").write_bytes(b"python\0other.py\0")


def test_a_process_that_has_the_tpu_is_named(tmp_path: Path):
    lockfile = tmp_path / "lockfile"
    process_with(tmp_path, os.getpid(), "/dev/accel0")
    assert host.holders(tmp_path, lockfile, 4)[0].verdict == FINE
    process_with(tmp_path, 4_000_001, "/dev/null")
    assert host.holders(tmp_path, lockfile, 4)[0].verdict == FINE
    process_with(tmp_path, 4_000_002, "/dev/vfio/0")
    (found,) = host.holders(tmp_path, lockfile, 4)
    assert (found.verdict, found.text) == (FAILS, "the TPU is in use by process 4000002 (python other.py)")
    assert found.remedy.endswith("kill 4000002")
    assert host.holders(tmp_path, lockfile, 0) == []


def test_a_gpu_that_another_process_has_open_is_a_warning(tmp_path: Path):
    process_with(tmp_path, 4_000_002, "/dev/nvidia1")
    (found,) = host.holders(tmp_path, tmp_path / "lockfile", 8)
    assert (found.verdict, found.text) == (WARNING, "process 4000002 (python other.py) has a GPU open too")


def test_a_lock_of_libtpu_that_somebody_holds_is_found(tmp_path: Path):
    lockfile = tmp_path / "lockfile"
    lockfile.touch()
    assert host.holders(tmp_path, lockfile, 4)[0].verdict == FINE
    with lockfile.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        (found,) = host.holders(tmp_path, lockfile, 4)
    assert found.verdict == FAILS and "is locked by a process that this user cannot see" in found.text


def test_host_memory_holds_its_part_of_the_state():
    run = compose_run("model=gpt_1b", "mesh=4x4x2", "batch=32")
    whole = 3 * state_bytes(run)
    assert host.host_memory(run, 1, whole - 1).verdict == FAILS
    assert host.host_memory(run, 1, whole).verdict == FINE
    assert host.host_memory(run, 8, whole // 8).verdict == FINE
    on_chips = compose_run("model=gpt_1b", "mesh=4x4x2", "batch=32", "target=v4-64")
    assert host.host_memory(on_chips, 8, whole // 24).verdict == FINE
    assert host.host_memory(on_chips, 8, whole // 24 - 1).verdict == FAILS


def test_few_open_files_fail():
    assert host.open_files(8, 1024).verdict == FINE
    found = host.open_files(2000, 1024)
    assert (found.verdict, found.remedy) == (FAILS, "ulimit -n 65536")


@pytest.mark.parametrize("overrides", [(), ("optimizer.ema_decay=0.9",), ("precision=bf16",)])
def test_the_size_of_a_state_is_that_of_its_arrays(overrides: Sequence[str]):
    run = compose_run(*SMALL, *overrides)
    state = StepProgram(run, abstract_mesh(run.config.mesh), backend="cpu").abstract_state
    arrays = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    assert arrays - 64 <= state_bytes(run) <= arrays  # counters and the random key beside it


def test_the_folder_of_the_checkpoints_is_written_and_read(tmp_path: Path):
    (tmp_path / "file").write_text("")
    wrong, right = (compose_run(*SMALL, f"checkpoint.folder={tmp_path / name}") for name in ("file", "new/one"))
    assert shared.checkpoint_folder(compose_run(*SMALL)) == []
    (failed,) = shared.checkpoint_folder(wrong)
    assert failed.verdict == FAILS and "cannot be used" in failed.text and "checkpoint.folder=DIR" in failed.remedy
    (fine,) = shared.checkpoint_folder(right)
    assert fine.verdict == FINE and "can be written, read and cleared" in fine.text
    assert not (tmp_path / "new").exists()
    assert disks.disk_space(right, 1).text.startswith(f"0.0 KiB free in checkpoint.folder={tmp_path}/new/one; ")


def test_a_disk_without_room_for_the_checkpoints_fails(tmp_path: Path):
    run = compose_run(*SMALL, f"runs={tmp_path}/not/there")
    size = 3 * state_bytes(run)  # two are kept while the third is written
    assert disks.disk_space(run, size - 1).verdict == FAILS
    assert disks.disk_space(run, size + 1).verdict == WARNING
    assert disks.disk_space(run, 2 * size).verdict == FINE
    assert disks.disk_space(run).verdict == FINE


def test_a_host_without_room_for_fast_checkpoints_fails(tmp_path: Path):
    assert disks.fast_disk_space(compose_run(*SMALL), 1) == []
    run = compose_run(*SMALL, "checkpoint.fast.every=10", f"checkpoint.fast.folder={tmp_path}/not/there")
    size = 3 * state_bytes(run)
    for free, processes, verdict in ((size - 1, 1, FAILS), (size, 1, FINE), (size - 1, 2, WARNING)):
        assert disks.fast_disk_space(run, processes, free)[0].verdict == verdict
    assert disks.fast_disk_space(run, 1)[0].verdict == FINE


def test_a_folder_that_cannot_be_written_fails(tmp_path: Path):
    (tmp_path / "file").touch()
    (found,) = disks.run_folder(compose_run(*SMALL, f"runs={tmp_path}/file/runs"))
    assert found.verdict == FAILS and "cannot be written (not a directory)" in found.text


def test_looking_leaves_no_folder_behind(tmp_path: Path):
    found = disks.run_folder(compose_run(*SMALL, f"runs={tmp_path}/a/b"))
    assert [finding.verdict for finding in found] == [FINE, FINE] and list(tmp_path.iterdir()) == []


def test_a_disk_whose_clock_is_off_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    now = time.time
    monkeypatch.setattr(disks.time, "time", lambda: now() - 90)
    _, found = disks.run_folder(compose_run(*SMALL, f"runs={tmp_path}"))
    assert (found.check, found.verdict) == ("clock", WARNING) and "dated +9" in found.text


def test_a_cache_that_cannot_be_written_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "cache"))
    assert disks.compile_cache() == Finding("compile cache", FINE, str(tmp_path / "cache"))
    (tmp_path / "file").touch()
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "file" / "cache"))
    found = disks.compile_cache()
    assert found.verdict == WARNING and "every start compiles anew" in found.text


def test_data_are_enough_for_a_batch():
    run = compose_run(*SMALL, "steps=10")
    prepare(run.config.data, run.tokenizer)
    assert disks.data(run).verdict == FINE
    found = disks.data(compose_run(*SMALL, "batch=1024"))
    assert found.verdict == FAILS and "fewer than batch=1024" in found.text
    assert disks.data(compose_run(*SMALL, "steps=100000")).verdict == WARNING


def test_data_that_are_not_there_fail_and_those_not_prepared_do_not(tmp_path: Path):
    found = disks.data(compose_run("model=gpt_tiny", "mesh=1x1x1", "data=text", f"data.paths=[{tmp_path}/*.txt]"))
    assert found.verdict == FAILS and str(tmp_path) in found.text
    found = disks.data(compose_run("model=gpt_tiny", "mesh=1x1x1", "data=text", "data.paths=[memory://none/*.txt]"))
    assert found.verdict == FAILS and "memory://none/*.txt matches 0 files" in found.text
    found = disks.data(compose_run(*SMALL, f"data.cache_dir={tmp_path}"))
    assert found.verdict == FINE and "is not prepared yet" in found.text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("mode", "key", "netrc", "verdict", "text"),
    [
        ("off", "", False, FINE, "off"),
        ("auto", "", False, FINE, "offline"),
        ("auto", "", True, WARNING, "offline: `wandb login` has left a key"),
        ("online", "", False, WARNING, "online, and there is no key"),
        ("online", "", True, FINE, "online, with a key"),
        ("auto", "abc", False, WARNING, "the key has 3 signs"),
        ("auto", "local-" + 40 * "a", False, FINE, "online, with a key"),
    ],
)
def test_the_key_of_wandb(
    mode: str, key: str, netrc: bool, verdict: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file = tmp_path / "netrc"
    file.write_text(f"machine api.wandb.ai login user password {40 * 'b'}\n" if netrc else "")
    monkeypatch.setenv("NETRC", str(file))
    monkeypatch.setenv("WANDB_API_KEY", key)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    found = disks.tracking(compose_run(*SMALL, "tracking=wandb", f"tracking.wandb={mode}"))
    assert found.verdict == verdict and found.text.startswith(text)


def test_versions_that_do_not_fit_together_are_named(monkeypatch: pytest.MonkeyPatch):
    run = compose_run(*SMALL)
    assert software.versions_fit(run).verdict == FINE
    (wanted,) = [line.partition("libtpu")[2] for line in requires("jax") or [] if line.startswith("libtpu")]
    other = {"jaxlib": "0.4.1", "libtpu": "0.0.1"}
    monkeypatch.setattr(software, "version", lambda name: other.get(name) or version(name))
    found = software.versions_fit(run)
    assert found.verdict == FAILS and "jaxlib 0.4.1 is not " in found.text
    assert f"libtpu 0.0.1 is not {wanted.partition(';')[0].strip()}, as jax" in found.text


def test_a_tpu_needs_libtpu(monkeypatch: pytest.MonkeyPatch):
    def without(name: str) -> str:
        if name == "libtpu":
            raise software.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(software, "version", without)
    assert software.versions_fit(compose_run(*SMALL)).verdict == FINE
    found = software.versions_fit(compose_run("model=gpt_tiny", "mesh=2x2x1", "target=v4-8"))
    assert found.verdict == FAILS and "libtpu is not installed" in found.text and found.remedy.endswith("--extra tpu")


def test_a_clock_that_is_off_that_of_process_0():
    second = Team(2, 1)
    assert _clocks([100.0, 101.0], second)[0].verdict == FINE
    assert _clocks([100.0, 130.0], second) == [
        Finding("clocks", WARNING, "+30 s off that of process 0", "Let all hosts keep the time: timedatectl, chrony.")
    ]
    assert _clocks([1000.0, 100.0], second)[0].verdict == FAILS


def test_processes_that_differ_are_found(tmp_path: Path):
    runs = [compose_run(*SMALL, f"runs={tmp_path}", f"steps={3 + index}") for index in range(2)]

    def look(team: Team) -> list[Finding]:
        return _of_all(runs[team.index], team)

    for found in meet(2, look):
        verdicts = {finding.check: finding.verdict for finding in found if finding.check != "same data"}
        assert verdicts == {"same code": FINE, "same settings": FAILS, "clocks": FINE, "shared folder": FINE}
        assert "steps=4 on process 1, 3 on process 0" in found[1].text


def test_data_that_differ_are_found():
    runs = [compose_run(*SMALL, f"data.documents={documents}") for documents in (60, 60, 61)]
    for run in runs[1:]:
        prepare(run.config.data, run.tokenizer)
    first, second, third = meet(3, lambda team: disks.same_data(runs[team.index], team))
    assert [found.verdict for found in (*first, *second, *third)] == [FINE, FINE, FAILS]
    assert third[0].text.endswith(" on process 0")
    not_there = compose_run(*SMALL, "data.documents=62")
    assert meet(2, lambda team: disks.same_data(not_there if team.leads else runs[1], team)) == [[], []]


def test_a_folder_that_the_others_do_not_see_is_found(tmp_path: Path):
    runs = [compose_run(*SMALL, f"runs={tmp_path}/{index // 2}") for index in range(3)]

    def look(team: Team) -> Finding:
        return _of_all(runs[team.index], team)[-1]

    first, second, third = meet(3, look)
    assert (first.verdict, second.verdict, third.verdict) == (FINE, FINE, FAILS)
    assert "is not seen here" in third.text


def test_the_table_has_equal_answers_once_and_the_others_beside_them():
    console = Console(width=140, record=True, file=io.StringIO())
    findings = Findings(console, ["a", "b", "c"])
    fine, wrong = Finding("disk", FINE, "4 GiB free"), Finding("disk", FAILS, "none", "Free some.")
    findings.add([[fine], [fine], [fine]])
    findings.add([[fine], [wrong], [fine]])
    assert findings.conclude() == 1
    lines = [line.rstrip() for line in console.export_text().splitlines()]
    assert lines == [
        "ok       disk              4 GiB free",
        "ok       disk              processes 0, 2: 4 GiB free",
        "FAILS    disk              process 1 (b): none",
        "                           Free some.",
        "1 of these would fail",
    ]


def test_many_answers_are_cut_and_what_is_amiss_is_not():
    console = Console(width=140, record=True, file=io.StringIO())
    findings = Findings(console)
    findings.add([[Finding("memory", FINE if i < 60 else FAILS, f"{i} GiB")] for i in range(64)])
    lines = console.export_text().splitlines()
    assert len(lines) == 8 + 4 and lines[7].rstrip().endswith("process 7: 7 GiB (and 52 more answers that are fine)")
    assert findings.failed


def test_all_fine_is_status_0_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    status, out, err = doctor(capsys, *SMALL, "steps=10")
    assert (status, err) == (0, "")
    assert out.splitlines()[0] == "s5_tiny under 2x1x1-dp on target=auto"
    assert "x simulated cpu" in out and out.splitlines()[-1] == "nothing here would fail, 1 warning"
    assert list(tmp_path.iterdir()) == []


def test_what_would_fail_is_status_1_and_spares_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").touch()
    status, out, _ = doctor(capsys, *SMALL, "--dry-run", "5")
    assert status == 1
    assert "FAILS    run folder" in out and "left out for what would fail" in out and "devices" not in out.split("\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dry-run"], "argument --dry-run: expected one argument"),
        (["--dry-run", "mesh=2x2x2"], "argument --dry-run: mesh=2x2x2 is no number of steps: write --dry-run 5"),
        (["--dry-run=0"], "argument --dry-run: 0 is no number of steps: write --dry-run 5"),
        (["--steps=5"], "--steps=5: settings are written without dashes: steps=5."),
        (["--dry=5"], "--dry=5 is a flag of valkyrie-train: here only KEY=VALUE is read."),
        (["modle=gpt_tiny"], "modle is not a key. Did you mean model? "),
        (["batch=0", "mesh=2x2x2"], "batch=0: at least 1 is needed."),
        (["mesh=2x2x2", "batch=7"], "batch=7 is not divisible by 8: "),
        (["runs=gs://bucket/x"], "runs=gs://bucket/x: gs:// is not read or written directly."),
    ],
)
def test_a_mistake_is_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str):
    status, out, err = doctor(capsys, *arguments)
    assert (status, out) == (2, "") and err.startswith(f"valkyrie-doctor: {message}") and err.count("\n") == 1


def test_all_problems_of_a_layout_are_told_at_once(capsys: pytest.CaptureFixture[str]):
    status, out, err = doctor(capsys, "mesh=3x2x2", "partition=2d_tp", "batch=7")
    assert (status, out) == (2, "")
    assert err.splitlines()[0] == "valkyrie-doctor: 5 problems" and err.count("\n  - ") == 5


def test_a_port_that_is_taken_is_a_finding(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        given = {"coordinator": address, "processes": 2, "process": 0}
        asked = [f"distributed.{key}={value}" for key, value in given.items()]
        status, out, _ = doctor(capsys, *SMALL, *asked)
    assert status == 1 and "FAILS    processes         process 0 cannot listen on port" in out


def test_a_process_0_that_is_not_there_is_a_finding(capsys: pytest.CaptureFixture[str]):
    given = {"coordinator": free_address(), "processes": 2, "process": 1, "timeout_s": 0.2}
    status, out, _ = doctor(capsys, *SMALL, *(f"distributed.{key}={value}" for key, value in given.items()))
    assert status == 1 and "process 0 does not answer at" in out


def test_half_a_place_is_a_finding(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("JAX_PROCESS_COUNT", "2")
    status, out, _ = doctor(capsys, *SMALL)
    assert status == 1 and "missing in the environment, beside JAX_PROCESS_COUNT" in out


def test_jax_is_not_imported_where_a_cheap_check_fails(tmp_path: Path):
    (tmp_path / "runs").touch()
    code = (
        "import sys\nfrom valkyrie.cli.doctor import main\n"
        f"try: main({list(SMALL)!r})\nexcept SystemExit as end: print(end.code, 'jax' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "1 False", done.stdout


def several(count: int, arguments: Sequence[str], cwd: Path) -> list[tuple[int, str, str]]:
    """Return status, output and errors of the command in so many processes."""
    given: dict[str, Any] = {"JAX_COORDINATOR_ADDRESS": free_address(), "JAX_PROCESS_COUNT": str(count)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "valkyrie.cli.doctor", *arguments],
            cwd=cwd,
            env={**os.environ, **given, "JAX_PROCESS_INDEX": str(index)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(count)
    ]
    try:
        return [(p.wait(200), *p.communicate()) for p in processes]
    finally:
        for process in processes:
            process.kill()


@pytest.mark.slow
def test_several_processes_look_together(tmp_path: Path):
    arguments = [*TINY, "mesh=2x2x1", "partition=2d_tp", "steps=10", "--dry-run", "3"]
    first, second = several(2, arguments, tmp_path)
    assert (first[0], second[0]) == (0, 0), (first, second)
    for text in ("2 have met at", "4 x simulated cpu, 2 a process", "3 of 3 with finite loss", "equal bit for bit"):
        assert text in first[1], first[1]
    assert "FAILS" not in first[1] and first[1].count("a sum over x=2 takes") == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_what_one_of_several_processes_finds_ends_all_with_1(tmp_path: Path):
    (tmp_path / "runs").touch()
    first, second = several(2, [*SMALL, "--dry-run", "3"], tmp_path)
    assert (first[0], second[0]) == (1, 1) and "FAILS    run folder" in first[1]
