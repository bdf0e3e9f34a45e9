"""Start a script on N ranks through msrun, and say in one sentence how that ended.

In the launcher:  code = run_ranks(["pretrain.py", "--dp_size", "8"], ranks=8, log_dir=Path("logs"))
In each rank:     code = rank_main(body), where body does all that the rank does

msrun starts the processes. How the job went is not left to it: when one rank fails it kills those that are
still saving, it leaves processes behind, and now and then it fails a job that was complete. So each rank
writes down its own outcome and exits quietly; the launcher watches those files and the processes. Each launch
has a folder:

    worker_3.log    what rank 3 printed          rank_3.json      its outcome
    rank_3.cpp.log  MindSpore's C++ messages     msrun.log, scheduler.log
"""

import contextlib
import ctypes
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import BinaryIO

import psutil

EXIT_FAILED, EXIT_USAGE, EXIT_STOPPED = 1, 2, 75  # stopped: by a signal, after saving
DEFAULT_PORT = 8118  # msrun's own; on several nodes all launchers must name the same one
POLL_S = 0.1
MSRUN_POLL_S = 1.5  # msrun looks every second, and as the parent only it learns how a rank died
TEARDOWN_S = 10.0  # after the last outcome, for MindSpore to let go of its devices
STOP_GRACE_S = 300.0  # after a SIGTERM, for the ranks to end their step and save
LAUNCH_ENV = "PICOSPORE_LAUNCH"  # how launcher and ranks find each other; holds no configuration
# Left over from another launch these make MindSpore join a cluster that is gone, or (the cache) not train.
STALE = re.compile(
    r"RANK_ID|RANK_SIZE|DEVICE_ID|RANK_TABLE_FILE|MS_ROLE|MS_SCHED_\w+|MS_WORKER_NUM|MS_NODE_ID"
    r"|MS_COMPILER_CACHE_ENABLE"
)


@dataclass(frozen=True)
class Outcome:
    """How one rank ended, in its own words."""

    rank: int
    exit_code: int
    error: str | None = None  # one line
    traceback: str | None = None
    time_s: float = 0.0  # since the epoch: the earliest failure is the cause, later ones its consequences


# ---- in a rank ---------------------------------------------------------------------------------------------


def is_rank() -> bool:
    """True in a worker that msrun started. A lone MS_ROLE left behind in a shell does not count."""
    return os.environ.get("MS_ROLE") == "MS_WORKER" and "MS_SCHED_PORT" in os.environ


def is_scheduler() -> bool:
    return os.environ.get("MS_ROLE") == "MS_SCHED" and "MS_SCHED_PORT" in os.environ


def on_terminal() -> bool:
    """Does somebody watch what is printed here? A rank prints to a file, only its launcher knows."""
    return _launch()["on_terminal"] if is_rank() and _launch() else sys.stdout.isatty()


def rank_main(body: Callable[[], int]) -> int:
    """Be what this process is: a rank or a single process, which run body(), or the scheduler."""
    if not (is_rank() or is_scheduler()):
        forget_stale_environment(os.environ, keep="DEVICE_ID")  # without a launcher it chooses the card
        return body()
    launch = _launch()
    if launch:
        _die_with_parent()
        if psutil.Process(os.getppid()).ppid() != launch["pid"]:  # died before that took effect
            os._exit(EXIT_FAILED)
    if is_scheduler():
        from mindspore.communication import init

        init()  # waits inside until the cluster has dissolved
        return 0
    if launch:
        _separate_cpp_messages(Path(launch["run_dir"]))
    outcome = _run(body)
    sys.stdout.flush()
    sys.stderr.flush()
    if launch:
        path = Path(launch["run_dir"]) / f"rank_{outcome.rank}.json"
        path.with_suffix(".part").write_text(json.dumps(asdict(outcome)))
        path.with_suffix(".part").replace(path)  # the launcher never reads half a file
    if outcome.exit_code != 0:
        # Skip MindSpore's teardown, which would wait for ranks that wait for this one. To msrun this looks
        # like success, or it would kill those that are still saving.
        os._exit(0 if launch else outcome.exit_code)
    return 0


def _launch() -> dict:
    """What the launcher told its ranks; empty when msrun was started by hand."""
    return json.loads(os.environ.get(LAUNCH_ENV, "{}"))


def _run(body: Callable[[], int]) -> Outcome:
    code, error, trace = 0, None, None
    try:
        code = body()
    except SystemExit as exit_:
        code, error = (exit_.code, None) if not isinstance(exit_.code, str) else (EXIT_FAILED, exit_.code)
    except BaseException as exc:  # whatever it is, it ends this rank and must be reported
        code, trace = EXIT_FAILED, traceback.format_exc()
        error = f"{type(exc).__name__}: {next(iter(str(exc).strip().splitlines()), '')}"
    if error:
        print(trace or error, file=sys.stderr)
    return Outcome(int(os.environ["RANK_ID"]), code or 0, error, trace, time.time())


def _separate_cpp_messages(run_dir: Path) -> None:
    """Descriptor 2, where MindSpore's C++ writes, gets a file; what Python prints stays in worker_N.log."""
    sys.stderr = os.fdopen(os.dup(1), "w", buffering=1, errors="backslashreplace")
    with (run_dir / f"rank_{os.environ['RANK_ID']}.cpp.log").open("ab") as file:
        os.dup2(file.fileno(), 2)


def _die_with_parent() -> None:
    """Launcher, msrun, ranks: when one is killed, those below go too."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1: PR_SET_PDEATHSIG


# ---- in the launcher ---------------------------------------------------------------------------------------


@dataclass
class Job:
    """A started msrun and what is known of its processes."""

    msrun: subprocess.Popen
    run_dir: Path
    ranks: int
    local: range  # the ranks of this node
    has_scheduler: bool
    started_s: float  # on the clock of psutil's create_time, which is not time.time()
    processes: dict[int | str, psutil.Process] = field(default_factory=dict)  # by rank, and "scheduler"
    outcomes: dict[int, Outcome] = field(default_factory=dict)

    def look(self) -> None:
        """Learn of new processes and new outcomes."""
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self.msrun.pid).children():
                if child not in self.processes.values() and (name := _name_of(child)) is not None:
                    self.processes[name] = child
        for rank in self.unfinished():
            if (path := self.run_dir / f"rank_{rank}.json").exists():
                self.outcomes[rank] = Outcome(**json.loads(path.read_text()))

    def unfinished(self) -> list[int]:
        return [rank for rank in self.local if rank not in self.outcomes]

    def alive(self, name: int | str) -> bool:
        with contextlib.suppress(psutil.Error, KeyError):
            process = self.processes[name]
            return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        return False

    def died_silently(self) -> list[int]:
        gone = {rank for rank in self.unfinished() if rank in self.processes and not self.alive(rank)}
        self.look()  # a rank writes its outcome before it goes, so look for it afterwards
        return [rank for rank in self.unfinished() if rank in gone]

    def named(self, rank: int | str) -> str:
        pid = f" (pid {self.processes[rank].pid})" if rank in self.processes else ""
        return f"rank {rank} of {self.ranks}{pid}"


def run_ranks(
    script_argv: list[str],
    ranks: int,
    log_dir: Path,
    *,
    nnodes: int = 1,
    node_rank: int = 0,
    master_addr: str = "127.0.0.1",
    master_port: int | None = None,
    stop_grace_s: float = STOP_GRACE_S,
) -> int:
    """Run a script on `ranks` ranks in all, an equal share of them on this node; returns the exit code."""
    if ranks < 1 or ranks % nnodes or not 0 <= node_rank < nnodes:
        arithmetic = f"{ranks} ranks / {nnodes} nodes, this being node {node_rank}"
        return _verdict(
            f"{arithmetic}: take a multiple of the nodes, which count from 0 to {nnodes - 1}", EXIT_USAGE
        )
    port = choose_port(master_port, nnodes, node_rank)
    if port is None:
        return EXIT_USAGE
    n_local = ranks // nnodes
    local = range(node_rank * n_local, (node_rank + 1) * n_local)
    run_dir = new_folder(log_dir)
    command = [sys.executable, "-m", "mindspore.parallel.cluster.run", "--join=True", f"--log_dir={run_dir}"]
    command += [f"--worker_num={ranks}", f"--local_worker_num={n_local}", f"--node_rank={node_rank}"]
    command += [f"--master_addr={master_addr}", f"--master_port={port}"]
    command += [f"--tail_worker_log={ranks}"]  # a rank that is not there: it would start a `tail` for each
    if not (Path(sys.executable).parent / "python").exists():
        command.append("python3")  # msrun runs the script with `python` unless told so
    with _signals_noted() as signals, _tail_of_rank_0(run_dir, local) as tail:
        env = _rank_environment(run_dir, n_local)
        msrun = _start(command + script_argv, env, run_dir)
        started_s = psutil.Process(msrun.pid).create_time()
        job = Job(msrun, run_dir, ranks, local, node_rank == 0, started_s)
        try:
            return _follow(job, tail, signals, stop_grace_s)
        finally:
            end_all(job)


def _follow(job: Job, tail: BinaryIO, signals: list[int], stop_grace_s: float) -> int:
    """Watch the job until it is decided."""
    stopped_by, deadline_s = None, None
    while True:
        msrun_ended = job.msrun.poll() is not None  # asked first: outcomes that came before its end count
        silent = job.died_silently()
        _copy_new(tail)
        for number in signals:
            if number == signal.SIGINT:
                return _verdict("interrupted, all ranks ended", 130)
            stopped_by = number
            _forward(job, number)
        signals.clear()
        if stopped_by and (silent or not job.processes):
            name = signal.Signals(stopped_by).name
            return _verdict(f"{name} ended the ranks before they could save", 128 + stopped_by)
        if silent or (msrun_ended and job.unfinished()):
            return _explain_silence(job, silent or job.unfinished())
        if failed := first_failure(job.outcomes.values()):
            return _explain_failure(job, failed)
        if not job.unfinished():
            _wait_for_teardown(job)
            _copy_new(tail)
            return exit_code_of(job.outcomes.values())
        if job.has_scheduler and "scheduler" in job.processes and not job.alive("scheduler"):
            return _explain_scheduler(job)
        if stopped_by or any(outcome.exit_code == EXIT_STOPPED for outcome in job.outcomes.values()):
            deadline_s = deadline_s or time.monotonic() + stop_grace_s
            if time.monotonic() > deadline_s:
                return _verdict(
                    f"ranks {job.unfinished()} did not stop within {stop_grace_s:.0f} s", EXIT_FAILED
                )
        time.sleep(POLL_S)


def _forward(job: Job, number: int) -> None:
    for rank in job.unfinished():
        if job.alive(rank):
            job.processes[rank].send_signal(number)


def _wait_for_teardown(job: Job) -> None:
    """Let the ranks close their devices. The scheduler looks only every 5 s whether they have, so wait for
    it just where ranks of other nodes, which may still be saving, need it."""
    one_node = len(job.local) == job.ranks
    needed = [*job.local] if one_node else [*job.local, "scheduler"]
    deadline_s = time.monotonic() + (TEARDOWN_S if one_node else STOP_GRACE_S)
    while any(job.alive(name) for name in needed) and time.monotonic() < deadline_s:
        time.sleep(POLL_S)


# ---- the one sentence --------------------------------------------------------------------------------------


def first_failure(outcomes: Iterable[Outcome]) -> Outcome | None:
    failures = [outcome for outcome in outcomes if outcome.exit_code not in (0, EXIT_STOPPED)]
    return min(failures, key=lambda outcome: outcome.time_s, default=None)


def exit_code_of(outcomes: Iterable[Outcome]) -> int:
    """Of a job whose ranks have all reported; what msrun thinks of it does not count."""
    outcomes = list(outcomes)
    if failed := first_failure(outcomes):
        return EXIT_USAGE if failed.exit_code == EXIT_USAGE else EXIT_FAILED
    return max((outcome.exit_code for outcome in outcomes), default=EXIT_FAILED)  # 0, or 75 if any


def _explain_failure(job: Job, failed: Outcome) -> int:
    if failed.traceback and failed.rank != 0:  # rank 0's is on the terminal already
        print(*failed.traceback.splitlines()[-40:], sep="\n", file=sys.stderr)
    reason = failed.error or f"exit code {failed.exit_code}"
    log = job.run_dir / f"worker_{failed.rank}.log"
    return _verdict(f"rank {failed.rank} of {job.ranks} failed: {reason}; log: {log}", exit_code_of([failed]))


def _explain_silence(job: Job, silent: list[int]) -> int:
    """Ranks went without an outcome: killed, crashed, or they did not get as far as rank_main."""
    pid, status = _first_casualty(job)
    if not job.processes and status is None:
        end = _end_of(job.run_dir / "msrun.log")
        return _verdict(f"msrun could not start the ranks:\n{end}", EXIT_FAILED)
    unseen = [rank for rank in job.unfinished() if rank not in job.processes]  # too short-lived for us
    rank = next(
        (name for name, process in job.processes.items() if process.pid == pid), (unseen or silent)[0]
    )
    log = job.run_dir / f"worker_{rank}.log"
    if status is None or status == -signal.SIGKILL:
        advice = "if nobody did that, the out-of-memory killer is the usual reason: see `dmesg`"
        how = "was killed (SIGKILL)" if status else "died without a word"
        return _verdict(f"{job.named(rank)} {how}; {advice}; log: {log}", EXIT_FAILED)
    end = _end_of(log)
    print(end, _end_of(job.run_dir / f"rank_{rank}.cpp.log"), sep="\n", file=sys.stderr)
    if status < 0:
        return _verdict(
            f"{job.named(rank)} was ended by {signal.Signals(-status).name}; log: {log}", EXIT_FAILED
        )
    reason = _last_error(end) or f"exit code {status}"
    code = EXIT_USAGE if status == EXIT_USAGE else EXIT_FAILED
    return _verdict(f"{job.named(rank)} failed before it began: {reason}; log: {log}", code)


def _first_casualty(job: Job) -> tuple[int | None, int | None]:
    """Process id and exit status of the worker that msrun found dead first, once it has looked."""
    deadline_s = time.monotonic() + MSRUN_POLL_S
    while True:
        last_look = job.msrun.poll() is not None or time.monotonic() > deadline_s
        text = (job.run_dir / "msrun.log").read_text(errors="replace")
        if found := re.search(r"Worker process (\d+) exit with exception. Error code: (-?\d+)", text):
            return int(found[1]), int(found[2])
        if last_look:
            return None, None
        time.sleep(POLL_S)


def _explain_scheduler(job: Job) -> int:
    log = job.run_dir / "scheduler.log"
    print(end := _end_of(log), file=sys.stderr)
    busy = re.search(r"url: (\S+) Address already in use", end)
    reason = f"{busy[1]} is already in use" if busy else _last_error(end) or "it was killed"
    return _verdict(f"the scheduler ended before the ranks: {reason}; log: {log}", EXIT_FAILED)


def _end_of(log: Path, lines: int = 25) -> str:
    text = log.read_text(errors="replace") if log.exists() else ""
    return "\n".join(text.rstrip().splitlines()[-lines:])


def _last_error(end: str) -> str | None:
    """The line that names the exception; MindSpore adds paragraphs after it. Without one, the last line."""
    lines = end.splitlines()
    named = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Interrupt)\b", line)]
    return next(reversed(named or lines), None)


def _note(sentence: str) -> None:
    sys.stdout.flush()
    print(f"launch: {sentence}", file=sys.stderr, flush=True)


def _verdict(sentence: str, code: int) -> int:
    print(file=sys.stderr)  # rank 0 may have been in the middle of a line
    _note(sentence)
    return code


# ---- starting ----------------------------------------------------------------------------------------------


def choose_port(asked: int | None, nnodes: int, node_rank: int) -> int | None:
    """A free port. On a single node any will do; on several all have to use the one that was asked for."""
    if nnodes > 1:
        port = asked or DEFAULT_PORT
        if node_rank == 0 and not _is_free(port):
            remedy = f"end what holds it (`ss -ltnp | grep {port}`) or give all nodes another --master_port"
            _note(f"port {port} is in use: {remedy}")
            return None
        return port
    if asked and _is_free(asked):
        return asked
    with socket.socket() as sock:
        sock.bind(("", 0))
        port = sock.getsockname()[1]
    if asked:
        _note(f"port {asked} is in use, taking {port}")
    return port


def _is_free(port: int) -> bool:
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # an expiring connection does not hold it
        try:
            sock.bind(("", port))
        except OSError:
            return False
        return True


def forget_stale_environment(env: MutableMapping[str, str], keep: str = "") -> None:
    found = [name for name in env if STALE.fullmatch(name) and name != keep]
    if found:
        settings = ", ".join(f"{name}={env.pop(name)}" for name in found)
        _note(f"ignoring {settings}: left in the environment by another launch")


def thread_env(local_ranks: int, cores: int | None = None) -> dict[str, str]:
    """This process's cores, shared fairly: with more threads than cores, ranks wait for each other."""
    if cores is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    return dict.fromkeys(names, str(max(1, cores // local_ranks)))


def _rank_environment(run_dir: Path, local_ranks: int) -> dict[str, str]:
    env = dict(os.environ)
    forget_stale_environment(env)
    launch = {"pid": os.getpid(), "run_dir": str(run_dir), "on_terminal": sys.stdout.isatty()}
    # On CPU the ranks ask for each other's addresses up to 20 times, 3 to 5 s apart. Asking every second, 8
    # ranks on 2 cores are ready after 16 to 21 s instead of 25 to 30, and none had to ask more than twice.
    retry = {"MS_RETRY_INTERVAL_LOWER": "1", "MS_RETRY_INTERVAL_UPPER": "1"}
    return {**retry, **env} | {
        **thread_env(local_ranks),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{env.get('PATH', '')}",  # msrun runs its `python`
        "PYTHONUNBUFFERED": "1",  # rank 0's lines reach the terminal as they are printed
        LAUNCH_ENV: json.dumps(launch),
    }


def new_folder(log_dir: Path) -> Path:
    """One folder per launch: the logs of the run that failed are still there after the next."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    names = itertools.chain([stamp], (f"{stamp}-{n}" for n in itertools.count(2)))
    folder = next(f for name in names if not (f := log_dir.resolve() / name).exists())
    folder.mkdir(parents=True)
    return folder


def _start(command: list[str], env: dict[str, str], run_dir: Path) -> subprocess.Popen:
    """In its own session, so that the terminal's Ctrl-C reaches only the launcher, which ends the ranks."""
    with (run_dir / "msrun.log").open("wb") as log:
        return subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )


def _name_of(child: psutil.Process) -> int | str | None:
    """The rank of a worker, or "scheduler"; None for a process that is not quite started."""
    with contextlib.suppress(psutil.Error):
        env = child.environ()
        if env.get("MS_ROLE") == "MS_WORKER":
            return int(env["RANK_ID"])
        return "scheduler" if env.get("MS_ROLE") == "MS_SCHED" else None
    return None


@contextlib.contextmanager
def _signals_noted() -> Iterator[list[int]]:
    """Signals to the launcher are appended to a list. A closed terminal counts as SIGTERM."""
    noted: list[int] = []
    means = {number: number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    means[signal.SIGHUP] = signal.SIGTERM
    before = {number: signal.signal(number, lambda n, _: noted.append(means[n])) for number in means}
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _tail_of_rank_0(run_dir: Path, local: range) -> Iterator[BinaryIO]:
    """Where rank 0's output can be read as it grows; on other nodes, nothing."""
    log = run_dir / "worker_0.log"
    if 0 in local:
        log.touch()
    with (log if 0 in local else Path(os.devnull)).open("rb") as tail:
        yield tail
        _copy_new(tail)


def _copy_new(tail: BinaryIO) -> None:
    """Raw bytes, so that the \\r of a progress bar works."""
    if data := tail.read():
        sys.stdout.flush()
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()


# ---- ending ------------------------------------------------------------------------------------------------


def end_all(job: Job) -> None:
    """Kill msrun and everything in its session and those of its ranks (each has its own), so that even a
    data worker that a killed rank left behind goes. Nobody is asked politely: who had to save has saved."""
    with contextlib.suppress(ProcessLookupError):
        job.msrun.send_signal(signal.SIGSTOP)  # it must not start anything now
    job.look()
    sessions = {job.msrun.pid, *(process.pid for process in job.processes.values())}
    while family := [process for process in psutil.process_iter() if _is_ours(process, job, sessions)]:
        for process in family:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(family, timeout=1)
    job.msrun.kill()
    job.msrun.wait()


def _is_ours(process: psutil.Process, job: Job, sessions: set[int]) -> bool:
    with contextlib.suppress(psutil.Error, ProcessLookupError):
        ours = process in job.processes.values() or os.getsid(process.pid) in sessions
        # Older processes only happen to have one of these ids; dead ones wait for their parent.
        return ours and process.create_time() >= job.started_s and process.status() != psutil.STATUS_ZOMBIE
    return False
