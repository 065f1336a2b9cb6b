"""Tests of `valkyrie-doctor`: each check passing and failing, the output, and the exit status."""

from __future__ import annotations

import fcntl
import io
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import requires
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from omegaconf import OmegaConf
from rich.console import Console

from helpers import assert_golden_message, compose_run
from processes import free_address, run_teams
from runs import TINY_ARGUMENTS, copy_run, trained_run
from valkyrie.cli.doctor import main
from valkyrie.config.arguments import parse_run
from valkyrie.config.run import Run
from valkyrie.data.prepare import prepare
from valkyrie.doctor import disks, host
from valkyrie.doctor.disks import state_bytes
from valkyrie.doctor.examine import HOST_CHECKS, RESUME_CHECK, TEAM_CHECKS, check_clocks, check_device_memory
from valkyrie.doctor.findings import (
    FAILURE,
    OK,
    WARNING,
    Check,
    CheckContext,
    CheckResults,
    Finding,
    FindingsTable,
    run_checks,
)
from valkyrie.parallel.mesh import abstract_mesh
from valkyrie.processes.team import Team
from valkyrie.runs.folder import installed_version
from valkyrie.train import devices
from valkyrie.train.program import StepProgram

SMALL_OVERRIDES = (*TINY_ARGUMENTS, "mesh=2x1x1", "partition=dp")
UNWRITABLE = "/proc/valkyrie"
"""A folder that nobody can create, not even root."""


def set_accelerator_count(monkeypatch: pytest.MonkeyPatch, chips: int = 4) -> None:
    """Make this host appear to have `chips` accelerators, by replacing `count_accelerators`."""
    for module in (host, devices):
        monkeypatch.setattr(module, "count_accelerators", lambda: chips)


def run_doctor(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Run the command in this process. Return its exit status, stdout and stderr."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert isinstance(end.value.code, int)
    return end.value.code, *capsys.readouterr()


def single_finding(check: Callable[[CheckContext], CheckResults], run: Run, processes: int = 1) -> tuple[str, ...]:
    """Return the only finding of a check: severity, text and, if there is one, a remedy."""
    (finding,) = check(CheckContext(run, processes))
    return finding


def test_a_target_that_is_not_this_machine_fails():
    (finding,) = run_checks(HOST_CHECKS[:2], CheckContext(compose_run("model=gpt_tiny", "mesh=2x2x1", "target=v4-8")))
    assert (finding.check, finding.severity) == ("chips", FAILURE) and "target=v4-8 " in finding.text


def test_a_problem_of_the_environment_is_reported_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JAX_DISABLE_JIT", "1")
    findings = run_checks(HOST_CHECKS[:2], CheckContext(compose_run(*SMALL_OVERRIDES, "target=cpu")))
    assert [(finding.check, finding.severity) for finding in findings] == [("environment", FAILURE), ("chips", OK)]


def test_simulated_devices_are_a_warning_unless_they_are_asked_for():
    assert single_finding(host.check_chips, compose_run(*SMALL_OVERRIDES))[0] == WARNING
    assert single_finding(host.check_chips, compose_run(*SMALL_OVERRIDES, "target=cpu"))[0] == OK


def test_chips_and_processes_are_compared_with_the_hosts_of_the_target(monkeypatch: pytest.MonkeyPatch):
    run = compose_run("model=gpt_tiny", "mesh=4x4x2", "target=v4-64", "batch=32")
    set_accelerator_count(monkeypatch)
    assert single_finding(host.check_chips, run, 8)[0] == OK and list(host.check_processes(CheckContext(run, 8))) == []
    severity, text, _ = single_finding(host.check_processes, run, 2)
    assert severity == FAILURE and text.startswith("2 processes") and text.endswith("8 hosts")
    set_accelerator_count(monkeypatch, chips=8)
    severity, text, _ = single_finding(host.check_chips, run, 8)
    assert severity == FAILURE and text.startswith("8 chips on") and text.endswith("4 per host")


def add_process(proc: Path, pid: int, device: str) -> None:
    """Add a process to a fake /proc. The process has a device file open."""
    (proc / str(pid) / "fd").mkdir(parents=True)
    (proc / str(pid) / "fd" / "7").symlink_to(device)
    (proc / str(pid) / "cmdline").write_bytes(b"python\0other.py\0")


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that replaces /proc, on a host with four accelerators. libtpu's lock file is `lockfile` in it."""
    set_accelerator_count(monkeypatch)
    monkeypatch.setattr(host, "PROC", tmp_path)
    monkeypatch.setattr(host, "LOCK_FILE", tmp_path / "lockfile")
    return tmp_path


def test_a_process_that_holds_the_tpu_is_named(proc: Path, monkeypatch: pytest.MonkeyPatch):
    run = compose_run(*SMALL_OVERRIDES)
    add_process(proc, os.getpid(), "/dev/accel0")
    assert single_finding(host.check_chips_free, run)[0] == OK
    add_process(proc, 4_000_001, "/dev/null")
    assert single_finding(host.check_chips_free, run)[0] == OK
    add_process(proc, 4_000_002, "/dev/vfio/0")
    severity, text, remedy = single_finding(host.check_chips_free, run)
    assert severity == FAILURE and text.endswith("4000002 (python other.py)") and remedy.endswith("kill 4000002")
    set_accelerator_count(monkeypatch, chips=0)
    assert list(host.check_chips_free(CheckContext(run))) == []


def test_a_gpu_that_another_process_has_open_is_a_warning(proc: Path):
    add_process(proc, 4_000_002, "/dev/nvidia1")
    severity, text, _ = single_finding(host.check_chips_free, compose_run(*SMALL_OVERRIDES))
    assert severity == WARNING and "4000002 (python other.py)" in text


def test_a_held_libtpu_lock_is_found(proc: Path):
    lockfile = proc / "lockfile"
    lockfile.touch()
    assert single_finding(host.check_chips_free, compose_run(*SMALL_OVERRIDES))[0] == OK
    with lockfile.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        severity, text, _ = single_finding(host.check_chips_free, compose_run(*SMALL_OVERRIDES))
    assert severity == FAILURE and text.startswith(f"{lockfile} is locked")


@pytest.mark.parametrize(
    ("overrides", "severity"),
    [
        (("partition=fsdp",), OK),
        (("partition=fsdp", "batch=2048", "remat=none"), WARNING),
        (("partition=dp", "force=true"), WARNING),
        (("partition=dp",), FAILURE),
    ],
)
def test_the_device_memory_of_the_target_must_hold_the_run(overrides: tuple[str, ...], severity: str):
    run = compose_run("target=v4-64", "model=llama_7b", "mesh=32x1x1", "batch=32", *overrides)
    (finding,) = run_checks([Check("device memory", check_device_memory)], CheckContext(run))
    assert finding.severity == severity and "30.8 GiB" in finding.text


def test_host_memory_must_hold_its_part_of_the_state(monkeypatch: pytest.MonkeyPatch):
    run = compose_run("model=gpt_1b", "mesh=4x4x2", "batch=32")
    run_on_chips = compose_run("model=gpt_1b", "mesh=4x4x2", "batch=32", "target=v4-64")
    state_size = 3 * state_bytes(run)
    for case_run, processes, free, severity in (
        (run, 1, state_size - 1, FAILURE),
        (run, 1, state_size, OK),
        (run, 8, state_size // 8, OK),
        (run_on_chips, 8, state_size // 24, OK),
        (run_on_chips, 8, state_size // 24 - 1, FAILURE),
    ):
        monkeypatch.setattr(host, "free_memory", lambda free=free: free)
        assert single_finding(host.check_host_memory, case_run, processes)[0] == severity


def test_a_low_limit_of_open_files_fails(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host.resource, "getrlimit", lambda _: (1024, 1024))
    assert single_finding(host.check_open_files, compose_run(*SMALL_OVERRIDES), 8)[0] == OK
    assert single_finding(host.check_open_files, compose_run(*SMALL_OVERRIDES), 2000)[0] == FAILURE


@pytest.mark.parametrize("overrides", [(), ("optimizer.ema_decay=0.9",), ("precision=bf16",), ("optimizer=muon",)])
def test_the_state_size_equals_that_of_its_arrays(overrides: Sequence[str]):
    run = compose_run(*SMALL_OVERRIDES, *overrides)
    state = StepProgram(run, abstract_mesh(run.config.mesh), backend="cpu").abstract_state
    array_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    tolerance = 512 if "optimizer=muon" in overrides else 64  # counters, the random key, Muon's moments of rows
    assert array_bytes - tolerance <= state_bytes(run) <= array_bytes


def test_the_doctor_checks_the_checkpoint_folder_and_leaves_no_files(tmp_path: Path):
    unusable_run, run_in_new_folder = (
        compose_run(*SMALL_OVERRIDES, f"checkpoint.folder={folder}") for folder in (UNWRITABLE, tmp_path / "new/one")
    )
    assert list(disks.check_checkpoint_folder(CheckContext(compose_run(*SMALL_OVERRIDES)))) == []
    severity, text, remedy = single_finding(disks.check_checkpoint_folder, unusable_run)
    assert severity == FAILURE and "cannot be used" in text and "checkpoint.folder=DIR" in remedy
    assert single_finding(disks.check_checkpoint_folder, run_in_new_folder)[0] == OK
    assert not (tmp_path / "new").exists()
    assert f"checkpoint.folder={tmp_path}/new/one" in single_finding(disks.check_disk_space, run_in_new_folder)[1]


def test_a_shared_disk_that_is_not_mounted_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    mounts = {Path("/")}
    monkeypatch.setattr(os.path, "ismount", mounts.__contains__)
    settings = ("model=gpt_tiny", "mesh=4x4x2", f"runs={tmp_path}/shared/me/runs")
    run = compose_run("target=v4-64", *settings)
    severity, text, remedy = single_finding(disks.check_mounted_disk, run)
    assert severity == WARNING and f"{tmp_path}/shared does not exist" in text and "runs=DIR" in remedy
    on_one_host = compose_run("target=v4-8", *settings, "mesh=2x2x1")
    in_bucket = compose_run("target=v4-64", *settings, "checkpoint.folder=gs://b/c")
    assert not any(list(disks.check_mounted_disk(CheckContext(other))) for other in (on_one_host, in_bucket))
    mounts.add(tmp_path)
    assert not list(disks.check_mounted_disk(CheckContext(run)))


def checkpoint_findings(folder: Path, *overrides: str) -> list[Finding]:
    """Return the doctor's findings about the checkpoint from which `resume=FOLDER` would continue."""
    return run_checks([RESUME_CHECK], CheckContext(parse_run([f"resume={folder}", *overrides])))


@pytest.mark.slow
def test_the_checkpoint_to_resume_from_is_verified(tmp_path: Path):
    folder = copy_run(trained_run("checkpoint.every=4", "steps=6"), tmp_path)
    assert [finding.severity for finding in checkpoint_findings(folder)] == [OK]
    (finding,) = checkpoint_findings(folder, "model.embed=32")
    assert finding.severity == FAILURE and "is of a different model: embedding" in finding.text
    (finding,) = checkpoint_findings(folder, "model.tokenizer=gpt2")
    assert finding.severity == FAILURE and finding.text.startswith("model.tokenizer=gpt2 assigns other ids than bytes")
    assert [finding.severity for finding in checkpoint_findings(folder, "data.documents=61")] == [OK], "not prepared"
    other_run = parse_run([f"resume={folder}", "data.documents=61"])
    prepare(other_run.config.data, other_run.tokenizer)
    (finding,) = checkpoint_findings(folder, "data.documents=61")
    assert finding.severity == FAILURE and finding.text.startswith("data= differs from the data")
    for damaged_step, severities in ((6, [WARNING, OK]), (4, [FAILURE, FAILURE])):
        (folder / "checkpoints" / str(damaged_step) / "state" / "manifest.ocdbt").write_bytes(b"")
        assert [finding.severity for finding in checkpoint_findings(folder)] == severities
    assert run_checks([RESUME_CHECK], CheckContext(compose_run(*SMALL_OVERRIDES, f"runs={tmp_path}", "name=new"))) == []


def set_free_bytes(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Make every disk appear to have `size` free bytes."""
    monkeypatch.setattr(disks, "_free_bytes", lambda _: size)


def test_a_disk_without_room_for_the_checkpoints_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = compose_run(*SMALL_OVERRIDES, f"runs={tmp_path}/not/there")
    assert single_finding(disks.check_disk_space, run)[0] == OK
    size = 3 * state_bytes(run)  # two are kept while the third is written
    for free, severity in ((size - 1, FAILURE), (size + 1, WARNING), (2 * size, OK)):
        set_free_bytes(monkeypatch, free)
        assert single_finding(disks.check_disk_space, run)[0] == severity


def test_the_disk_of_a_folder_in_the_home_folder_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folders: list[Path] = []
    monkeypatch.setenv("HOME", str(tmp_path))
    run = compose_run(*SMALL_OVERRIDES, "checkpoint.folder='~/x'", "checkpoint.fast.folder='~'")
    run.config.checkpoint.fast.every = 1
    usage = SimpleNamespace(free=2**60)
    monkeypatch.setattr(disks.shutil, "disk_usage", lambda folder: folders.append(folder) or usage)
    for check in (disks.check_disk_space, disks.check_fast_disk_space):
        assert single_finding(check, run)[0] == OK
    assert folders == [tmp_path, tmp_path]


def test_a_host_without_room_for_fast_checkpoints_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert list(disks.check_fast_disk_space(CheckContext(compose_run(*SMALL_OVERRIDES)))) == []
    run = compose_run(*SMALL_OVERRIDES, "checkpoint.fast.every=10", f"checkpoint.fast.folder={tmp_path}/not/there")
    assert single_finding(disks.check_fast_disk_space, run)[0] == OK
    size = 3 * state_bytes(run)
    for free, processes, severity in ((size - 1, 1, FAILURE), (size, 1, OK), (size - 1, 2, WARNING)):
        set_free_bytes(monkeypatch, free)
        assert single_finding(disks.check_fast_disk_space, run, processes)[0] == severity


FOLDER_CHECKS = [check for check in HOST_CHECKS if check.name in ("run folder", "clock")]


def test_a_folder_that_cannot_be_written_fails_once():
    (finding,) = run_checks(FOLDER_CHECKS, CheckContext(compose_run(*SMALL_OVERRIDES, f"runs={UNWRITABLE}")))
    assert finding.severity == FAILURE and "cannot be written" in finding.text


def test_checks_leave_no_folder_behind(tmp_path: Path):
    findings = run_checks(FOLDER_CHECKS, CheckContext(compose_run(*SMALL_OVERRIDES, f"runs={tmp_path}/a/b")))
    assert [finding.severity for finding in findings] == [OK, OK] and list(tmp_path.iterdir()) == []


def test_a_disk_with_a_wrong_clock_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    original_time = time.time
    monkeypatch.setattr(disks.time, "time", lambda: original_time() - 90)
    severity, text, _ = single_finding(disks.check_disk_clock, compose_run(*SMALL_OVERRIDES, f"runs={tmp_path}"))
    assert severity == WARNING and "+9" in text


def test_a_cache_that_cannot_be_written_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "cache"))
    assert single_finding(disks.check_compile_cache, compose_run(*SMALL_OVERRIDES)) == (OK, str(tmp_path / "cache"))
    (tmp_path / "file").touch()
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert single_finding(disks.check_compile_cache, compose_run(*SMALL_OVERRIDES))[0] == WARNING


def data_finding(*overrides: str) -> Finding:
    (finding,) = run_checks([Check("data", disks.check_data)], CheckContext(compose_run(*overrides)))
    return finding


def test_data_must_fill_a_batch():
    run = compose_run(*SMALL_OVERRIDES, "steps=10")
    prepare(run.config.data, run.tokenizer)
    assert data_finding(*SMALL_OVERRIDES, "steps=10").severity == OK
    finding = data_finding(*SMALL_OVERRIDES, "batch=1024")
    assert finding.severity == FAILURE and "batch=1024" in finding.text
    assert data_finding(*SMALL_OVERRIDES, "steps=100000").severity == WARNING


def test_missing_data_fails_but_unprepared_data_does_not(tmp_path: Path):
    for path in (f"{tmp_path}/*.txt", "memory://none/*.txt"):
        finding = data_finding("model=gpt_tiny", "mesh=1x1x1", "data=text", f"data.paths=[{path}]")
        assert finding.severity == FAILURE and path in finding.text
    finding = data_finding(*SMALL_OVERRIDES, f"data.cache_dir={tmp_path}")
    assert finding.severity == OK and "not prepared yet" in finding.text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("mode", "key", "has_netrc", "expected_severity", "text"),
    [
        ("off", "", False, OK, "off"),
        ("auto", "", False, OK, "offline"),
        ("auto", "", True, WARNING, "offline"),
        ("online", "", False, WARNING, "online"),
        ("online", "", True, OK, "online, with"),
        ("auto", "abc", False, WARNING, "the W&B key has 3"),
        ("auto", "local-" + 40 * "a", False, OK, "online, with"),
    ],
)
def test_the_wandb_key_is_checked(
    mode: str,
    key: str,
    has_netrc: bool,
    expected_severity: str,
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    file = tmp_path / "netrc"
    file.write_text(f"machine api.wandb.ai login user password {40 * 'b'}\n" if has_netrc else "")
    monkeypatch.setenv("NETRC", str(file))
    monkeypatch.setenv("WANDB_API_KEY", key)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    finding = single_finding(
        disks.check_wandb_key, compose_run(*SMALL_OVERRIDES, "tracking=wandb", f"tracking.wandb={mode}")
    )
    assert finding[0] == expected_severity and finding[1].startswith(text)


def test_incompatible_versions_are_named(monkeypatch: pytest.MonkeyPatch):
    run = compose_run(*SMALL_OVERRIDES)
    assert single_finding(host.check_versions, run)[0] == OK
    (required_version,) = [line.partition("libtpu")[2] for line in requires("jax") or [] if line.startswith("libtpu")]
    other = {"jaxlib": "0.4.1", "libtpu": "0.0.1"}
    monkeypatch.setattr(host, "installed_version", lambda name: other.get(name) or installed_version(name))
    severity, text, _ = single_finding(host.check_versions, run)
    assert severity == FAILURE and "jaxlib 0.4.1" in text
    assert "libtpu 0.0.1" in text and required_version.partition(";")[0].strip() in text


def test_a_tpu_needs_libtpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host, "installed_version", lambda name: None if name == "libtpu" else installed_version(name))
    assert single_finding(host.check_versions, compose_run(*SMALL_OVERRIDES))[0] == OK
    severity, text, remedy = single_finding(
        host.check_versions, compose_run("model=gpt_tiny", "mesh=2x2x1", "target=v4-8")
    )
    assert severity == FAILURE and "libtpu" in text and remedy.endswith("--extra tpu")


@pytest.mark.parametrize(("offset_s", "expected_severity"), [(1.0, OK), (30.0, WARNING), (-900.0, FAILURE)])
def test_a_clock_that_differs_from_that_of_process_0_is_found(offset_s: float, expected_severity: str):
    class FakeSecondProcess(Team):
        def exchange(self, name: str, value: Any = None) -> list[Any]:
            return [1000.0, 1000.0 + offset_s]

    ((severity, text, *_),) = check_clocks(CheckContext(compose_run(*SMALL_OVERRIDES), 2, FakeSecondProcess(2, 1)))
    assert severity == expected_severity and (expected_severity == OK or f"{offset_s:+.0f} s" in text)


def test_differing_processes_are_found(tmp_path: Path):
    runs = [compose_run(*SMALL_OVERRIDES, f"runs={tmp_path}", f"steps={3 + index}") for index in range(2)]
    for findings in run_teams(2, lambda team: run_checks(TEAM_CHECKS, CheckContext(runs[team.index], 2, team))):
        severities = {finding.check: finding.severity for finding in findings if finding.check != "same data"}
        assert severities == {"same code": OK, "same settings": FAILURE, "clocks": OK, "shared folder": OK}
        assert "steps=4" in findings[1].text


def test_processes_may_have_caches_in_different_folders(tmp_path: Path):
    runs = [compose_run(*SMALL_OVERRIDES, f"data.cache_dir={tmp_path}/{index}") for index in range(2)]
    (check,) = (check for check in TEAM_CHECKS if check.name == "same settings")
    for findings in run_teams(2, lambda team: run_checks([check], CheckContext(runs[team.index], 2, team))):
        assert [finding.severity for finding in findings] == [OK]


def test_differing_data_is_found():
    runs = [compose_run(*SMALL_OVERRIDES, f"data.documents={documents}") for documents in (60, 60, 61)]
    for run in runs[1:]:
        prepare(run.config.data, run.tokenizer)
    findings = run_teams(3, lambda team: list(disks.check_same_data(CheckContext(runs[team.index], 3, team))))
    assert [severity for ((severity, *_),) in findings] == [OK, OK, FAILURE]
    unprepared_run = compose_run(*SMALL_OVERRIDES, "data.documents=62")
    alone = run_teams(
        2,
        lambda team: list(disks.check_same_data(CheckContext(unprepared_run if team.is_leader else runs[1], 2, team))),
    )
    assert alone == [[], []]


def test_a_folder_that_is_not_shared_is_found(tmp_path: Path):
    runs = [compose_run(*SMALL_OVERRIDES, f"runs={tmp_path}/{index // 2}") for index in range(3)]
    findings = run_teams(3, lambda team: list(disks.check_shared_folder(CheckContext(runs[team.index], 3, team))))
    assert [severity for ((severity, *_),) in findings] == [OK, OK, FAILURE]


def test_the_table_lists_equal_findings_once_with_their_processes():
    console = Console(width=140, record=True, file=io.StringIO())
    findings = FindingsTable(console, ["a", "b", "c"])
    ok_finding, failing_finding = Finding("disk", OK, "4 GiB free"), Finding("disk", FAILURE, "none", "Free some.")
    findings.add([[ok_finding], [ok_finding], [ok_finding]])
    findings.add([[ok_finding], [failing_finding], [ok_finding]])
    assert findings.print_summary() == 1
    rows = [re.split("  +", line.rstrip()) for line in console.export_text().splitlines()]
    assert rows[0] == ["ok", "disk", ok_finding.text] and rows[3] == ["", failing_finding.remedy] and len(rows) == 5
    equal_row, different_row = rows[1:3]
    assert equal_row[:2] == ["ok", "disk"] and " 0, 2: " in equal_row[2] and equal_row[2].endswith(ok_finding.text)
    assert (
        different_row[:2] == ["FAILS", "disk"]
        and " 1 (b): " in different_row[2]
        and different_row[2].endswith(failing_finding.text)
    )
    assert rows[4][0].startswith("1 ")


def test_long_lists_are_cut_but_failures_are_not():
    console = Console(width=140, record=True, file=io.StringIO())
    findings = FindingsTable(console)
    findings.add([[Finding("memory", OK if i < 60 else FAILURE, f"{i} GiB")] for i in range(64)])
    lines = console.export_text().splitlines()
    assert len(lines) == 8 + 4 and re.search(r"\b7: 7 GiB .*\b52\b", lines[7])
    assert findings.failed


def test_status_is_0_without_failures_and_no_files_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    status, out, err = run_doctor(capsys, *SMALL_OVERRIDES, "steps=10")
    assert (status, err) == (0, "")
    assert "2x1x1-dp" in out.splitlines()[0] and "x simulated cpu" in out and out.endswith("1 warning\n")
    assert list(tmp_path.iterdir()) == []


def test_status_is_1_for_a_failure_and_later_checks_are_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    status, out, _ = run_doctor(capsys, *SMALL_OVERRIDES, f"runs={UNWRITABLE}", "--dry-run", "5")
    assert status == 1
    assert "FAILS    run folder" in out and "dry run" in out and not re.search("^ok +devices", out, re.M)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--dry-run"],
        ["--dry-run", "mesh=2x2x2"],
        ["--dry-run=0"],
        ["--steps=5"],
        ["--dry=5"],
        ["modle=gpt_tiny"],
        ["batch=0", "mesh=2x2x2"],
        ["mesh=2x2x2", "batch=7"],
        ["runs=gs://bucket/x"],
        ["mode=measure"],
    ],
)
def test_a_mistake_is_reported_in_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str]):
    status, out, err = run_doctor(capsys, *arguments)
    assert (status, out) == (2, "") and err.startswith("valkyrie-doctor: ") and err.count("\n") == 1
    assert_golden_message("doctor", arguments, err)


def test_all_problems_of_a_layout_are_reported_at_once(capsys: pytest.CaptureFixture[str]):
    status, out, err = run_doctor(capsys, "mesh=3x2x2", "partition=2d_tp", "batch=7")
    assert (status, out) == (2, "")
    assert err.splitlines()[0] == "valkyrie-doctor: 5 problems" and err.count("\n  - ") == 5


def test_a_used_port_is_a_finding(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        settings = {"coordinator": address, "processes": 2, "process": 0}
        arguments = [f"distributed.{key}={value}" for key, value in settings.items()]
        status, out, _ = run_doctor(capsys, *SMALL_OVERRIDES, *arguments)
    assert status == 1 and re.search("FAILS +processes", out) and address.rpartition(":")[2] in out


def test_a_missing_process_0_is_a_finding(capsys: pytest.CaptureFixture[str]):
    settings = {"coordinator": free_address(), "processes": 2, "process": 1, "timeout_s": 0.2}
    status, out, _ = run_doctor(
        capsys, *SMALL_OVERRIDES, *(f"distributed.{key}={value}" for key, value in settings.items())
    )
    assert status == 1 and re.search("FAILS +processes", out) and settings["coordinator"] in out


def test_incomplete_process_settings_are_a_finding(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("JAX_PROCESS_COUNT", "2")
    status, out, _ = run_doctor(capsys, *SMALL_OVERRIDES)
    assert status == 1 and re.search("FAILS +processes", out) and "JAX_PROCESS_COUNT" in out


def test_jax_is_not_imported_if_a_cheap_check_fails(tmp_path: Path):
    arguments = [*SMALL_OVERRIDES, f"runs={UNWRITABLE}"]
    code = (
        "import sys\nfrom valkyrie.cli.doctor import main\n"
        f"try: main({arguments!r})\nexcept SystemExit as end: print(end.code, 'jax' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "1 False", result.stdout


def run_several_processes(count: int, arguments: Sequence[str], cwd: Path) -> list[tuple[int, str, str]]:
    """Run the command in `count` processes. Return status, stdout and stderr of each."""
    variables: dict[str, Any] = {"JAX_COORDINATOR_ADDRESS": free_address(), "JAX_PROCESS_COUNT": str(count)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "valkyrie.cli.doctor", *arguments],
            cwd=cwd,
            env={**os.environ, **variables, "JAX_PROCESS_INDEX": str(index)},
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
def test_several_processes_check_together(tmp_path: Path):
    arguments = [*TINY_ARGUMENTS, "mesh=2x2x1", "partition=2d_tp", "steps=10", "--dry-run", "3"]
    first, second = run_several_processes(2, arguments, tmp_path)
    assert (first[0], second[0]) == (0, 0), (first, second)
    for text in ("2 are connected", "2 per process", "for 3 steps", "bitwise equal"):
        assert text in first[1], first[1]
    assert "FAILS" not in first[1] and first[1].count("over x=2") == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_failure_on_one_process_gives_all_the_same_status(tmp_path: Path):
    (tmp_path / "runs").touch()
    first, second = run_several_processes(2, [*SMALL_OVERRIDES, "--dry-run", "3"], tmp_path)
    assert first[0] == second[0] == 2


def test_an_error_of_a_resolver_is_reported_without_the_text_of_omegaconf():
    def refuse() -> None:
        raise ValueError("no home folder")

    def check(context: CheckContext) -> CheckResults:
        OmegaConf.register_new_resolver("test_doctor.refuse", refuse, replace=True)
        return OmegaConf.create({"folder": "${test_doctor.refuse:}"}).folder

    (finding,) = run_checks([Check("cache", check)], CheckContext(compose_run(*SMALL_OVERRIDES)))
    assert (finding.severity, finding.text) == (FAILURE, "no home folder")
