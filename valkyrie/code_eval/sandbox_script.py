"""Generates the shell script that builds a sandbox inside its namespaces and runs the steps in sequence.

The script communicates with its parent over a socket, which is its standard input. For each step, it reports that the
step is ready, waits for a line, runs the step and reports its exit status.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

WORK_MIB = 128
"""Size of the sandbox's writable tmpfs, in MiB."""
_DEVICES = ("null", "zero", "full", "random", "urandom")
_FORBID_USER_NAMESPACES = "echo 0 > /proc/sys/user/max_user_namespaces"


@dataclass(frozen=True)
class SandboxStep:
    """A command in the work folder, and its limits.

    Args:
        command: The program and its arguments.
        time_s: Wall-clock limit in seconds. The CPU time of each process has about the same limit, in whole seconds.
        memory_mib: Limit of the address space of each process, in MiB.
        processes: Maximum number of processes and threads at a time. Applies only to isolated steps, and only if
            `Isolation.limits_processes` is true.
        file_mib: Limit of the size of each file, in MiB.
    """

    command: tuple[str, ...]
    time_s: float
    memory_mib: int
    processes: int = 16
    file_mib: int = 64


@dataclass(frozen=True)
class Isolation:
    """How programs are isolated.

    Args:
        user: User ID of the programs if this process runs as root, or None to run them in a user namespace.
        forbids_namespaces: Whether to run programs in a user namespace that forbids further ones. Necessary if
            unprivileged users can create user namespaces, in which they could mount a tmpfs of any size.
        limits_processes: Whether the kernel counts a sandbox's processes separately, so that their number can be
            limited.
    """

    user: int | None
    forbids_namespaces: bool
    limits_processes: bool


def build_script(
    steps: Sequence[SandboxStep],
    input_folder: Path,
    root: Path,
    isolation: Isolation | None,
    folders: Sequence[str],
    python_folder: str | None = None,
) -> str:
    """Return the shell script that runs the steps.

    Args:
        steps: The steps, in order.
        input_folder: Folder with the program's files. The steps run on copies in a new root if isolated, else in place.
        root: Empty folder for the new root.
        isolation: How to isolate the steps, or None to run them as this user.
        folders: System folders that the steps see, read-only.
        python_folder: Installation folder to mount at /python, or None.
    """
    lines = ["set -eu", "exec 3<&0 </dev/null", "umask 022"]
    lines += ["ulimit -c 0"]
    if isolation is None:
        lines += [f"cd {shlex.quote(str(input_folder))}"]
    else:
        lines += _enter_new_root(input_folder, root, isolation, folders, python_folder)
    for step in steps:
        command = shlex.join(_limited_command(step, isolation))
        lines += ["echo begins >&3", "read -r go <&3", "status=0", f"{command} 3<&- || status=$?", "echo $status >&3"]
        lines += ["[ $status = 0 ] || exit 0"]
    return "\n".join(lines) + "\n"


def _enter_new_root(
    input_folder: Path, root: Path, isolation: Isolation, folders: Sequence[str], python_folder: str | None
) -> list[str]:
    """Return the lines of the script that create and enter the new root, with copies of the input files in /box."""
    quoted_root, bind_flag = shlex.quote(str(root)), "--bind" if isolation.user is not None else "--rbind"
    lines = ["echo 1000 > /proc/self/oom_score_adj || true"]
    lines += [f"mount -t tmpfs -o size=4m,nr_inodes=1k,mode=755,nosuid,nodev none {quoted_root}", f"cd {quoted_root}"]
    mounts = [(folder, folder.lstrip("/")) for folder in folders]
    mounts += [] if python_folder is None else [(python_folder, "python")]
    for folder, mount_point in mounts:
        source, target = shlex.quote(folder), shlex.quote(mount_point)
        if Path(folder).is_symlink() and python_folder != folder:
            lines.append(f"ln -s {shlex.quote(str(Path(folder).readlink()))} {target}")
            continue
        make_target = f"mkdir -p {target}" if Path(folder).is_dir() else f"mkdir -p $(dirname {target}); : > {target}"
        lines += [make_target, f"mount {bind_flag} {source} {target}"]
        lines += [f"mount -o remount,bind,ro,nosuid,nodev none {quoted_root}/{target}"]
    lines += ["mkdir dev old proc box", "ln -s box tmp"]
    for device in _DEVICES:
        lines += [f": > dev/{device}", f"mount --bind /dev/{device} dev/{device}"]
    lines += [f"mount -t tmpfs -o size={WORK_MIB}m,nr_inodes=4k,mode=700,nosuid,nodev none box"]
    lines += [f"cp {shlex.quote(str(input_folder))}/* box/ 2>/dev/null || true"]
    if isolation.user is not None:
        lines += [f"chown -R {isolation.user}:{isolation.user} box"]
    else:
        lines += [f"{_FORBID_USER_NAMESPACES} || true"]
    mounts_proc = isolation.user is not None and isolation.forbids_namespaces
    lines += ["mount -t proc -o nosuid,nodev,noexec none proc" if mounts_proc else "mount --rbind /proc proc"]
    lines += [
        f"mount -o remount,bind,ro,nosuid,nodev none {quoted_root}",
        "pivot_root . old",
        "cd /box",
        "umount -l /old",
    ]
    lines += [] if mounts_proc else ["umount -l /proc"]  # umount itself needs /proc
    return [*lines, "export HOME=/box TMPDIR=/box"]


def _limited_command(step: SandboxStep, isolation: Isolation | None) -> list[str]:
    """Return a step's command, wrapped in the tools that set its limits and, if isolated, drop all privileges."""
    cpu = max(1, round(step.time_s + 0.5))
    limits = [f"--cpu={cpu}:{cpu + 1}", f"--as={step.memory_mib << 20}", f"--fsize={step.file_mib << 20}"]
    limits += ["--core=0:0", "--nofile=256:256"]
    if isolation is None:
        return ["prlimit", *limits, *step.command]
    limits += [f"--nproc={step.processes if isolation.limits_processes else 4096}"]
    command = ["prlimit", *limits, *step.command]
    unprivileged_command = ["setpriv", "--no-new-privs", "--inh-caps=-all", "--bounding-set=-all", *command]
    if isolation.user is None:
        return unprivileged_command
    user = str(isolation.user)
    switch_user = ["setpriv", "--reuid", user, "--regid", user, "--clear-groups", "--no-new-privs"]
    if not isolation.forbids_namespaces:
        return [*switch_user, "--inh-caps=-all", "--bounding-set=-all", *command]
    mount_empty_proc = "mount -t tmpfs -o ro,size=4k none /proc"
    inner_script = f"{_FORBID_USER_NAMESPACES}; {mount_empty_proc}; exec {shlex.join(unprivileged_command)}"
    return [*switch_user, "unshare", "--user", "--map-root-user", "--mount", "sh", "-c", inner_script]
