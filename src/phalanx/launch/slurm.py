"""On Slurm: a job script that starts one supervisor a node, submitted and followed.

Slurm places, queues, requeues and accounts. The script asks for a signal before its time is over, has ranks save, and
puts itself back into the queue; a job that is preempted or loses a node Slurm puts there. Each start goes on from the
run's folder.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Self

from phalanx.errors import CannotHere, WrongUse
from phalanx.files import write_whole
from phalanx.folder_files import make_folder
from phalanx.launch import place
from phalanx.launch.following import follow, looked_away
from phalanx.launch.place import ENDED, QUEUED, RUNNING, UNKNOWN, Command, Place, Status
from phalanx.launch.stopping import ENDING, handled
from phalanx.run import Run
from phalanx.verdict import Verdict

SETS = ("job-name", "ntasks", "ntasks-per-node", "output", "error", "signal", "requeue", "open-mode", "chdir", "wrap")
"""Of sbatch's options those that the script needs as they are."""
MARGIN_SECONDS = 60
"""Beside the time that ranks have to save in: for Slurm to look, and to end the step."""
ANSWER_SECONDS = 120.0
"""In which Slurm must answer a question."""
OVER = {
    "COMPLETED": 0, "BOOT_FAIL": 1, "CANCELLED": 130, "DEADLINE": 1, "FAILED": 1, "NODE_FAIL": 1, "OUT_OF_MEMORY": 1,
    "PREEMPTED": 1, "REVOKED": 1, "TIMEOUT": 1,
}  # fmt: skip
"""States that a job does not leave by itself, with what they come to where Slurm has no exit code."""
HOPELESS = {
    "PartitionConfig": "the partition has not so many nodes",
    "PartitionNodeLimit": "the partition does not give so many nodes",
    "PartitionTimeLimit": "the partition does not give so much time",
    "BadConstraints": "no node has what is asked for",
    "ReqNodeNotAvail": "nodes that it needs are down or reserved",
    "DependencyNeverSatisfied": "what it waits for will not come",
}
"""Why a job may stay in the queue for ever."""
SCRIPT = """\
#!/bin/bash
{options}

cd {folder} || exit 3

# Before the time is over, or when it is preempted or cancelled, ranks save and end.
saved() {{ grep '^{{"kind": "checkpoint"' {events} 2>/dev/null | tail -n 1; }}
preempted() {{ scontrol show job "$SLURM_JOB_ID" | grep -q 'PreemptTime=[0-9]'; }}
finish() {{ scancel --signal=TERM "$SLURM_JOB_ID"; }}  # ranks alone: srun would kill them if it were told itself
before=$(saved)
out_of_time=
trap 'out_of_time=yes; finish' USR1
trap finish USR2 TERM

# One supervisor a node. They find each other, start the ranks, and start them again if one fails.
{step} &
step=$!
code=130
while kill -0 "$step" 2>/dev/null; do wait "$step"; code=$?; done

# Then the job queues up again if there is more to do and it came further than it was; also where a node was lost (3).
why=
if [ "$code" -eq 0 ]; then exit 0
elif [ -n "$out_of_time" ]; then why="its time is nearly over"
elif [ "$code" -eq 3 ]; then why="its nodes cannot go on"
elif preempted; then why="it is preempted"
fi
if [ -n "$why" ] && [ "$(saved)" != "$before" ]; then
  echo "  again  $why: the job queues up again, and goes on from what is saved"
  scontrol requeue "$SLURM_JOB_ID" && sleep 60
elif [ -n "$why" ]; then
  echo "   stop  $why, and nothing new was saved: the job does not queue up again"
fi
exit "$code"
"""


@dataclass(frozen=True, kw_only=True)
class Slurm(Place):
    """Nodes of a Slurm cluster."""

    word: ClassVar[str] = "slurm"
    job: ClassVar[str] = "[0-9]{1,12}"
    given: Mapping[str, str] = field(default_factory=dict)
    """Options that are handed to sbatch as they are."""
    text: str = "slurm"

    @classmethod
    def parse(cls, options: Mapping[str, str], rest: str) -> Self:
        inside = int(os.environ.get("SLURM_JOB_NUM_NODES", 1)) if in_allocation() else 1
        nodes, gpus = place.count(options, "nodes", inside), place.count(options, "gpus", 0, least=0)
        given = {name: value for name, value in options.items() if name not in ("nodes", "gpus", "ranks")}
        given |= dict.fromkeys(rest.split(",") if rest else (), "")
        for name in given:
            if name in SETS or not re.fullmatch("[a-z][a-z-]*", name):
                raise WrongUse(f"--on slurm: {name} is not to be set there. Leave it out; the job script has its own.")
        text = ",".join(name if value == "" else f"{name}={value}" for name, value in {**options, **given}.items())
        ranks = place.count(options, "ranks", gpus or 1)
        return cls(nodes=nodes, gpus=gpus, ranks=ranks, given=given, text=f"slurm:{text}".rstrip(":"))

    def preview(self, command: Command) -> str:
        return shlex.join(self._step(command)) if in_allocation() else self.script(command)

    def script(self, command: Command) -> str:
        """What sbatch is given."""
        logs = command.run / "slurm"
        options = {
            "job-name": command.name, "nodes": str(self.nodes), "ntasks-per-node": "1",
            **({"gpus-per-node": str(self.gpus)} if self.gpus else {}), "cpus-per-task": self._cores, **self.given,
            "output": f"{str(logs).replace('%', '%%')}/{'%A-%a' if self._array else '%j'}.out",
            "open-mode": "append", "requeue": "",
            "signal": f"B:USR1@{self._early(command.grace)}",
        }  # fmt: skip
        lines = [
            f"#SBATCH --{name}={shlex.quote(value) if re.search('[ #]', value) else value}".rstrip("=")
            for name, value in options.items()
        ]
        if any("\n" in line for line in lines):
            raise WrongUse("--on slurm: an option has a line break in it. Leave that out.")
        run = f"{command.run}-%a" if self._array else str(command.run)
        words = [self._quoted(word) for word in self._step(command, run)]
        return SCRIPT.format(
            options="\n".join(lines), folder=shlex.quote(str(command.folder)), step=" ".join(words),
            events=self._quoted(str(Run(run).events_path(0))),
        )  # fmt: skip

    def tried(self, word: str) -> str:
        first = re.match(r"\d+", self.given.get("array", ""))
        return word.replace("%a", first[0]) if first else word

    @property
    def _array(self) -> bool:
        return "array" in self.given

    def _quoted(self, word: str) -> str:
        """For the shell; ``%a`` is the number of a job array's task."""
        if not (self._array and "%a" in word):
            return shlex.quote(word)
        return '"$SLURM_ARRAY_TASK_ID"'.join(shlex.quote(part) if part else "" for part in word.split("%a"))

    def _step(self, command: Command, run: str | None = None) -> list[str]:
        gpus = [f"--gpus-per-node={self.gpus}"] if self.gpus else []
        nodes = [f"--nodes={self.nodes}", "--ntasks-per-node=1", *gpus, f"--cpus-per-task={self._cores}"]
        return ["srun", *nodes, "--kill-on-bad-exit=0", *command.on(self.ranks, run)]

    @property
    def _cores(self) -> str:
        """For the one process a node whose ranks are many; srun does not take it from the job by itself."""
        return self.given.get("cpus-per-task", str(self.ranks))

    def _early(self, grace: float) -> int:
        """So many seconds before its time is over the job is told; not so many that it would have no time at all."""
        wanted = round(grace) + MARGIN_SECONDS
        limit = seconds(self.given.get("time", ""))
        return min(wanted, limit // 3) if limit else wanted

    def train(self, command: Command, check: Callable[[], object]) -> Verdict:
        if in_allocation():
            check()
            self._check()
            return self._stepped(command)
        run, logs = Run(command.run), command.run / "slurm"
        new = not logs.exists()
        try:
            job = self.submit(command)
        except BaseException:
            _removed(logs, new)
            raise
        os.nice(10)  # a login node is shared
        try:
            check()  # while the job waits for its nodes, or they start
        except KeyboardInterrupt:
            return looked_away(self, run, job)
        except BaseException:
            _told("scancel", job)
            place.forget(run)
            _removed(logs, new)
            raise
        print(f" submit  Slurm job {job}: {logs / 'job.sh'}", flush=True)
        if self._array:
            return Verdict(True, f"submitted as an array: each task in {run.path}-TASK", next="See: phalanx status")
        return follow(self, run, job)

    def _stepped(self, command: Command) -> Verdict:
        """In this allocation, to its end; who asks for that asks the ranks, which save."""
        asked: list[int] = []

        def finish(number: int, frame: object) -> None:
            asked.append(number)
            _told("scancel", "--signal=TERM", os.environ["SLURM_JOB_ID"])

        with handled(ENDING, finish):
            process = subprocess.Popen(self._step(command), cwd=command.folder, start_new_session=True)
            code = process.wait()
        code = code if code >= 0 else 128 - code
        return Verdict(code == 0, f"srun left with exit code {code}", code=130 if asked and code else code)

    def submit(self, command: Command) -> str:
        """The job's number."""
        self._check()
        run, logs, script = Run(command.run), command.run / "slurm", self.script(command)
        place.check_over(run)
        make_folder(run.path, logs)
        done = _told("sbatch", "--parsable", cwd=command.folder, text=script)
        if done.returncode:
            raise CannotHere(f"Slurm does not take the job: {_words(done.stderr)}. {self._advice(done.stderr)}")
        job = done.stdout.strip().partition(";")[0]
        write_whole(logs / "job.sh", script, within=run.path)
        place.note(run, self.text, job)
        return job

    def _check(self) -> None:
        missing = [tool for tool in ("sbatch", "srun", "scontrol", "scancel") if shutil.which(tool) is None]
        if missing:
            raise CannotHere(
                f"{', '.join(missing)} not found: this machine does not submit to Slurm. Run this on one that does, or "
                "add --dry-run to see the job script."
            )

    @staticmethod
    def _advice(said: str) -> str:
        if "partition" in said:
            found = _told("sinfo", "--noheader", "--format=%R").stdout.split()
            return f"Choose partition= of: {', '.join(dict.fromkeys(found)) or 'none that sinfo knows'}."
        if "configuration source" in said or "contact" in said:
            return "Run this where sinfo lists the cluster's nodes, or add --dry-run to see the job script."
        if "account" in said:
            return "Give account= one that sacctmgr show associations lists for you."
        return "Change the options after --on slurm:, or ask for fewer or smaller nodes (sinfo shows them)."

    def status(self, run: Run, job: str) -> Status:
        self._check()
        done = _told("scontrol", "show", "job", "-o", job)
        if done.returncode:
            return self._accounted(job, done.stderr)
        every = [self._status(run, line) for line in done.stdout.splitlines() if line.strip()] or [Status(UNKNOWN)]
        going = [one for one in every if one.state != ENDED] or every
        worst = max(going, key=lambda one: (one.state == RUNNING, one.code or 0))
        more = f"; {len(going)} of {len(every)} tasks like it" if len(every) > 1 else ""
        return replace(worst, detail=worst.detail + more)

    @staticmethod
    def _status(run: Run, text: str) -> Status:
        """Of a line that scontrol has for a job, or for a task of an array."""
        found = dict(re.findall(r"\b(JobState|Reason|ExitCode|NodeList|Restarts|RunTime|StartTime)=(\S*)", text))
        state = found.get("JobState", "")
        restarts = f", requeued {found['Restarts']} times" if found.get("Restarts", "0") != "0" else ""
        if state in OVER:
            return Status(ENDED, f"{state}{restarts}", _exit_code(found.get("ExitCode", ""), OVER[state]))
        if state in ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED"):
            return Status(RUNNING, f"{state} on {found.get('NodeList')} for {found.get('RunTime')}{restarts}")
        reason = found.get("Reason", "")
        hint = f": {HOPELESS[reason]} (end it with phalanx cancel {run.in_shell})" if reason in HOPELESS else ""
        return Status(QUEUED, f"{state}, {reason}{restarts}{hint}")

    @staticmethod
    def _accounted(job: str, why: str) -> Status:
        """Of a job that the controller has forgotten."""
        done = (
            _told("sacct", "-n", "-X", "-P", f"--jobs={job}", "--format=State,ExitCode")
            if shutil.which("sacct")
            else None
        )
        line = done.stdout.splitlines()[0] if done is not None and done.stdout.strip() else ""
        state, _, code = line.partition("|")
        state = state.partition(" ")[0]
        if state in OVER:
            return Status(ENDED, state, _exit_code(code, OVER[state]))
        return Status(ENDED if "Invalid job id" in why else UNKNOWN, _words(why))

    def cancel(self, run: Run, job: str) -> None:
        self._check()
        place.check_own(run, f"scancel {job}")
        said = _told("scontrol", "show", "job", "-o", job).stdout
        logs = str(run.path.resolve() / "slurm")
        if not any(f" StdOut={each}/" in said for each in (logs, logs.replace("%", "%%"))):
            raise CannotHere(
                f"Slurm job {job} does not print to {logs}, as this run's would. If it is this run's all the same, end "
                f"it yourself: scancel {job}"
            )
        running = self.status(run, job).state == RUNNING
        done = _told("scancel", *(("--batch", "--signal=USR2") if running else ()), job)  # its script has ranks save
        if done.returncode:
            raise CannotHere(f"Slurm does not end job {job}: {_words(done.stderr)}. See: scontrol show job {job}")

    def output(self, run: Run, job: str) -> Path:
        return run.path / "slurm" / f"{job}.out"


def in_allocation() -> bool:
    """Whether this process is in a job's script or in the shell of salloc, and not in a step of it."""
    return "SLURM_JOB_ID" in os.environ and "SLURM_STEP_ID" not in os.environ


def seconds(limit: str) -> int:
    """Of Slurm's ``minutes``, ``minutes:seconds``, ``hours:minutes:seconds``, ``days-hours:minutes:seconds``; or 0."""
    if not re.fullmatch(r"(\d+-)?\d+(:\d+){0,2}", limit):
        return 0
    days, dash, clock = limit.rpartition("-")
    numbers = [int(part) for part in clock.split(":")]
    if not dash and len(numbers) < 3:
        numbers = [0, *numbers]
    total = sum(number * size for number, size in zip(numbers, (3600, 60, 1), strict=False))
    return int(days or 0) * 86400 + total


def _removed(logs: Path, new: bool) -> None:
    """The folder of a job that is not to be, if it was made for it."""
    if new:
        shutil.rmtree(logs, ignore_errors=True)


def _exit_code(text: str, otherwise: int) -> int:
    """Of Slurm's ``code:signal``."""
    code, _, number = text.partition(":")
    if code.isdecimal() and int(code):
        return int(code)
    return 128 + int(number) if number.isdecimal() and int(number) else otherwise


def _told(*words: str, cwd: Path | None = None, text: str = "") -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(words, capture_output=True, text=True, cwd=cwd, input=text, timeout=ANSWER_SECONDS)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(words, 1, "", f"{words[0]} does not answer in {ANSWER_SECONDS:g} s")


def _words(said: str) -> str:
    """Slurm's errors in one line."""
    lines = [re.sub(r"^\w+: (error: )?", "", line.strip()) for line in said.splitlines()]
    return "; ".join(dict.fromkeys(line for line in lines if line)) or "it does not say why"
