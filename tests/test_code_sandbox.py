"""Tests of the sandbox with hostile programs: each one fails within its limits and leaves no trace."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from runs import needs_sandbox
from valkyrie.code_eval import sandbox
from valkyrie.code_eval.judge import CompletionResult, Limits, judge
from valkyrie.code_eval.problems import CodingProblem, read_problems
from valkyrie.code_eval.sandbox import SandboxStep, SandboxStepResult, run_steps, sandbox_problem

pytestmark = needs_sandbox
SLEEP_S = "98765.4321"
"""Duration in seconds that programs of these tests sleep. It identifies them among all processes."""


def running_programs() -> list[str]:
    """Return the `/proc` files of the processes of these tests that are still running."""
    running = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = file.read_bytes().split(b"\0")
        except OSError:
            continue
        running += [str(file)] if SLEEP_S.encode() in words else []
    return running


def all_have_ended() -> bool:
    """Return True if all processes of these tests end within 20 s. The kernel may end them with a delay."""
    deadline = time.monotonic() + 20
    while running_programs() and time.monotonic() < deadline:
        time.sleep(0.05)
    return not running_programs()


def shell(command: str, time_s: float = 20.0, **limits: int) -> SandboxStepResult:
    return run_steps({}, [SandboxStep(("sh", "-c", command), time_s, 256, **limits)])[0]


def judge_body(
    body: str, test: str = "assert f() is True", time_s: float = 20.0, isolated: bool = True
) -> CompletionResult:
    """Judge a completion by `test` and return the result.

    The completion is `body`, indented as the body of a function `f()`. The program may take `time_s` seconds and
    256 MiB. It runs in the sandbox unless `isolated` is False.
    """
    problem = CodingProblem("f", "python", "easy", "def f():\n", f"{test}\n")
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    return judge(problem, lines, Limits(time_s, 256, isolated))


def test_a_correct_program_passes() -> None:
    assert judge_body("return True").passed
    result = shell("echo one && echo two >&2")
    assert result.ok and result.output == "one\ntwo\n"


def test_an_endless_loop_ends_at_the_time_limit() -> None:
    start = time.monotonic()
    result = judge_body("while True: pass", time_s=1.0)
    assert not result.passed and " 1 s" in result.reason
    assert time.monotonic() - start < 30


def test_a_sleeping_program_ends_at_the_time_limit_with_its_children() -> None:
    result = shell(f"setsid sleep {SLEEP_S} & sleep {SLEEP_S} & trap '' TERM INT HUP; sleep {SLEEP_S}", time_s=1.0)
    assert (result.status, result.limit) == (137, "time") and all_have_ended()


def test_children_end_with_the_program_that_left_them() -> None:
    assert shell(f"setsid sleep {SLEEP_S} & echo ok").output == "ok\n" and all_have_ended()


def test_a_fork_bomb_is_limited_and_ends() -> None:
    before = len(list(Path("/proc").glob("[0-9]*")))
    bomb = "import os\nmost = 0\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        most += 1"
    assert " 2 s" in judge_body(bomb, time_s=2.0).reason
    assert len(list(Path("/proc").glob("[0-9]*"))) < before + 50  # others live on this machine too
    count = "import os\nn = 0\ntry:\n    while os.fork():\n        n += 1\nexcept OSError:\n    return n\nos._exit(0)"
    assert judge_body(count, "assert 1 <= f() < 16").passed


def test_endless_output_is_cut_and_ends_the_program() -> None:
    result = judge_body("while True: print('x' * 1000)")
    assert not result.passed and "printed" in result.reason
    outcome = shell("yes")
    assert outcome.limit == "output" and len(outcome.output) <= 2 * sandbox.OUTPUT_BYTES


def test_too_much_memory_is_refused() -> None:
    result = judge_body("return bool(bytearray(1 << 30))")
    assert not result.passed and "MemoryError" in result.reason
    assert judge_body("return bool(bytearray(1 << 20))").passed


def test_a_large_file_is_refused() -> None:
    big = "with open('big', 'wb') as file:\n    for _ in range(400): file.write(bytes(1 << 20))\nreturn True"
    assert not judge_body(big).passed
    several = "for i in range(9):\n    with open(f'{i}', 'wb') as file: file.write(bytes(60 << 20))\nreturn True"
    assert "No space left" in judge_body(several).reason


@pytest.mark.parametrize("place", ["tests", "home"])
def test_files_of_the_machine_are_hidden(tmp_path: Path, place: str) -> None:
    folder = tmp_path if place == "tests" else Path.home()
    secret = folder / f".valkyrie-secret-{os.getpid()}"
    secret.write_text("a secret")
    try:
        body = f"return open({str(secret)!r}).read() == 'a secret'"
        assert "No such file" in judge_body(body).reason
        assert judge_body(body, isolated=False).passed, "without a sandbox it is read: the test could fail"
    finally:
        secret.unlink()
    assert judge_body(f"import os\nreturn not os.path.exists({str(Path.home())!r})").passed


def test_system_files_cannot_be_written() -> None:
    result = shell("for f in / /usr /usr/bin /dev /etc; do echo x > $f/valkyrie-x; done; ls /; id -G; touch /box/own")
    assert result.status == 0 and result.output.count("cannot create") == 5
    assert not any(Path(folder, "valkyrie-x").exists() for folder in ("/", "/usr", "/usr/bin", "/dev", "/etc"))


def test_no_network_connection_is_possible() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        port = server.getsockname()[1]
        body = f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 5).close()\nreturn True"
        result = judge_body(body)
        assert not result.passed and ("refused" in result.reason or "unreachable" in result.reason)
        with pytest.raises(TimeoutError):
            server.accept()
        assert judge_body(body, isolated=False).passed, "without a sandbox it connects: the test could fail"


def test_no_privileges_are_gained() -> None:
    assert shell("unshare --user true").status != 0
    assert shell("mount -t tmpfs none /box").status != 0
    assert shell("mknod /box/disk b 8 0").status != 0
    assert shell("kill -9 1; sleep 0.2").ok, "the first process of the sandbox is out of reach"


def test_a_program_that_exits_before_its_tests_does_not_pass() -> None:
    (problem, *_) = read_problems("cpp")
    for result in (judge_body("import os\nos._exit(0)"), judge(problem, "    __builtin_exit(0);\n}\n")):
        assert result.compiled and not result.passed and "before" in result.reason
    result = judge(problem, "    __builtin_trap();\n}\n")
    assert result.compiled and not result.passed and " SIG" in result.reason


def test_no_step_runs_after_a_failed_one() -> None:
    result = run_steps({}, [SandboxStep((word,), 20.0, 256) for word in ("true", "false", "true")])
    assert [ended.status for ended in result] == [0, 1]


def test_a_killed_evaluation_leaves_no_program(tmp_path: Path) -> None:
    script = (
        "from valkyrie.code_eval.sandbox import *\n"
        f"run_steps({{}}, [SandboxStep(('sh', '-c', 'setsid sleep {SLEEP_S} & sleep {SLEEP_S}'), 100.0, 256)])"
    )
    job = subprocess.Popen([sys.executable, "-c", script], env={**os.environ, "TMPDIR": str(tmp_path)})
    deadline = time.monotonic() + 30
    while len(running_programs()) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(running_programs()) >= 2
    job.send_signal(signal.SIGKILL)
    job.wait()
    assert all_have_ended()


UNPRIVILEGED_PROGRAM = """
import os, sys
from valkyrie.code_eval import sandbox
from valkyrie.code_eval.sandbox import SandboxStep, run_steps, sandbox_problem
if os.geteuid() == 0:
    os.setgroups([]), os.setgid(65534), os.setuid(65534)
assert sandbox_problem() is None, sandbox_problem()
assert sandbox.choose_isolation().user is None
command = "ls -d /home /root; unshare --user true || mount -t tmpfs none /box || echo x > /x || echo kept apart"
print(run_steps({}, [SandboxStep(("sh", "-c", command), 20.0, 256)])[0].output)
"""


def test_a_user_without_privileges_has_the_same_sandbox() -> None:
    if os.geteuid() == 0 and not sandbox._can_nest_namespaces():
        # Some kernels allow user namespaces only to root. Other users then have no sandbox, so there is none to test.
        pytest.skip("this kernel allows user namespaces only to root")
    environment = {**os.environ, "TMPDIR": "/tmp"}
    result = subprocess.run(
        [sys.executable, "-c", UNPRIVILEGED_PROGRAM], env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("No such file") == 2 and result.stdout.strip().endswith("kept apart")


# Without user namespaces, the sandbox changes to another user, which the kernel allows only to root. The test above
# covers other users.
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can change to another user")
def test_root_keeps_programs_apart_without_user_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_can_nest_namespaces", lambda: False)
    result = shell("id -u; ls -d /root /home /proc/1; touch /box/own && echo wrote")
    assert int(result.output.split()[0]) > 1000 and result.output.count("No such file") == 3
    assert result.output.endswith("wrote\n")


def test_two_programs_run_as_different_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(sandbox, "_can_nest_namespaces", lambda: False)
    monkeypatch.setattr(sandbox, "_is_mapped", lambda user: True)
    assert sandbox.choose_isolation().user != sandbox.choose_isolation().user
    monkeypatch.setattr(sandbox, "_is_mapped", lambda user: False)
    assert sandbox.choose_isolation().user == 65534


def test_missing_parts_of_the_sandbox_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox.shutil, "which", lambda tool: None if tool == "unshare" else f"/bin/{tool}")
    reason = sandbox_problem.__wrapped__() or ""
    assert "unshare" in reason and not [tool for tool in sandbox.TOOLS if tool != "unshare" and f"{tool}," in reason]
    monkeypatch.setattr(sandbox.platform, "system", lambda: "Darwin")
    assert "Darwin" in (sandbox_problem.__wrapped__() or "")


def test_refusals_of_the_system_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sandbox, "_namespace_command", lambda isolation: ["sh", "-c", "echo no namespaces here; exit 1", "--"]
    )
    assert "no namespaces here" in (sandbox_problem.__wrapped__() or "")
