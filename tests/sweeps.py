"""Multiruns with fake trials: processes that measure, fail, hang or die as a test prescribes.

Python imports `sitecustomize.py` when it starts. `FakeMultirun` writes one that looks up the behaviour of a trial's
partition in the trial's process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from valkyrie.sweep import launcher
from valkyrie.sweep.plan import TrialPlan
from valkyrie.sweep.results import Outcome
from valkyrie.sweep.run import Watcher
from valkyrie.sweep.trial import Status, Trial, TrialLog

TRIAL_SCRIPT = """
import hashlib, json, os, pathlib, re, resource, signal, sys, time, traceback

if "valkyrie.sweep.child" in sys.orig_argv:
    folder = pathlib.Path(sys.orig_argv[-1])
    partition = re.search(r"^partition:\\n  name: (\\S+)", folder.joinpath("run.yaml").read_text(), re.MULTILINE)[1]
    behaviour = json.loads(os.environ["BEHAVIOURS"]).get(partition, "measure")
    with open(os.environ["STARTS"], "a") as starts:
        starts.write(folder.name + "\\n")

    def leave(status, reason, results):
        outcome = {"status": status, "reason": reason, "results": results}
        folder.joinpath("outcome.json").write_text(json.dumps(outcome))
        os._exit(0)

    if behaviour == "fail":
        print("ValueError: the trial was asked to fail", file=sys.stderr)
        os._exit(1)
    elif behaviour == "refuse":
        leave("refused", "partition=x cannot be. Use another.", {})
    elif behaviour == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif behaviour == "hang":
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        time.sleep(600)
    elif behaviour == "memory":
        resource.setrlimit(resource.RLIMIT_AS, (2**29, 2**29))
        try:
            held = bytearray(2**30)
        except MemoryError:
            traceback.print_exc()
            os._exit(1)
    elif behaviour.startswith("measure"):
        time.sleep(float(behaviour.partition(" ")[2] or 0))
        speed = float(int(hashlib.sha256(folder.name.encode()).hexdigest()[:4], 16) + 1)
        step = {"step_s": 1 / speed, "tokens_per_second": 8 * speed, "tokens_per_second_per_chip": speed}
        leave("ok", None, {"simulated": True, "step": step, "memory": {"peak": 2**20}})
"""
"""Content of `sitecustomize.py`. A trial runs normally if the behaviour of its partition (`BEHAVIOURS`) is `real`."""


class FakeMultirun:
    """A folder for multiruns with fake trials.

    `behaviours` maps partitions to the behaviour of their trials: `measure` (the default), `measure SECONDS`, `fail`,
    `refuse`, `kill`, `hang`, `memory` or `real`.
    """

    def __init__(self, folder: Path, **behaviours: str) -> None:
        self.folder, self.runs = folder, folder / "runs"
        self.starts_file = folder / "starts"
        (folder / "site").mkdir(parents=True, exist_ok=True)
        (folder / "site" / "sitecustomize.py").write_text(TRIAL_SCRIPT)
        path = os.pathsep.join([str(folder / "site"), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.environment = {"PYTHONPATH": path, "STARTS": str(self.starts_file)}
        self.set_behaviours(**behaviours)

    def set_behaviours(self, **behaviours: str) -> None:
        """Set the behaviour of trials by partition. `_1d_tp` means `1d_tp`: a keyword cannot begin with a digit."""
        self.environment["BEHAVIOURS"] = json.dumps(
            {partition.removeprefix("_"): behaviour for partition, behaviour in behaviours.items()}
        )

    def activate(self, monkeypatch: pytest.MonkeyPatch, **behaviours: str) -> None:
        """Make commands in this process use this folder and these behaviours."""
        self.set_behaviours(**behaviours)
        monkeypatch.chdir(self.folder)
        for name, value in self.environment.items():
            monkeypatch.setenv(name, value)

    def arguments(self, *arguments: str) -> list[str]:
        """Return the arguments of a multirun in this folder."""
        return [
            "-m",
            "model=s5_tiny",
            "batch=8",
            "mesh=2x2x1",
            "mode=measure",
            "tracking=off",
            f"runs={self.runs}",
            "name=swept",
            *arguments,
        ]

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start the process of a multirun, with stdout and stderr in one pipe."""
        return subprocess.Popen(
            [sys.executable, "-m", "valkyrie.cli.train", *self.arguments(*arguments)],
            cwd=self.folder,
            env={**os.environ, **self.environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    @property
    def sweep_folder(self) -> Path:
        """Folder of the multirun that `arguments` describes."""
        return self.runs / "swept"

    def trials(self) -> dict[str, Trial]:
        """Return the trials recorded in `trials.jsonl`, by partition."""
        trials = {trial.about.partition: trial for trial in TrialLog(self.sweep_folder).read()}
        return dict(sorted(trials.items()))

    def count_lines(self) -> int:
        """Return the number of lines of `trials.jsonl`."""
        return len((self.sweep_folder / "trials.jsonl").read_text().splitlines())

    def started_trials(self) -> list[str]:
        """Return the names of trials that started, in order."""
        return self.starts_file.read_text().splitlines() if self.starts_file.is_file() else []


def multirun_plans(command: Any, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> list[TrialPlan]:
    """Return the plans of all jobs of a multirun, without running them."""
    plans: list[TrialPlan] = []

    def run_trials(trial_plans: Sequence[TrialPlan], *_: Any) -> dict[str, Trial]:
        plans.extend(trial_plans)
        return {plan.key: plan.to_trial(Outcome(Status.ok), "", 0.0) for plan in trial_plans}

    monkeypatch.setattr(launcher, "run_trials", run_trials)
    result = command(*arguments)
    assert result.status == 0, result.err
    return plans


def fake_outcomes(monkeypatch: pytest.MonkeyPatch, **outcomes: Status | BaseException) -> None:
    """Replace the trials of multiruns, so that no processes are started.

    `outcomes` maps each partition to the status of its trials, or to an exception that running the trials raises.
    """

    def run_trials(plans: Sequence[TrialPlan], n_jobs: int, watcher: Watcher) -> dict[str, Trial]:
        trials = {}
        for plan in plans:
            status = outcomes[plan.about.partition]
            if isinstance(status, BaseException):
                raise status
            outcome = Outcome(status, None if status is Status.ok else "so it was")
            trials[plan.key] = plan.to_trial(outcome, plan.key, 1.0)
            TrialLog(plan.folder).append([trials[plan.key]])
            watcher.show_ended(plan, trials[plan.key], recorded_earlier=False)
        return trials

    monkeypatch.setattr(launcher, "run_trials", run_trials)
