"""The launcher, with real msrun ranks. Ranks that need no collective do not import MindSpore."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
import uuid
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest

from picospore import launch
from picospore.launch import Outcome

REPO = Path(__file__).parents[1]
PROGRAM = """
import os, signal, sys, time
from pathlib import Path
from picospore.launch import is_rank, is_scheduler, rank_main, run_ranks

RANK = int(os.environ.get("RANK_ID", -1))

def body():
{body}

if is_rank() or is_scheduler():
    sys.exit(rank_main(body))
sys.exit(run_ranks(sys.argv, log_dir=Path(__file__).parent / "logs", **{options}))
"""
READY_THEN_SLEEP = """
Path(sys.argv[0]).with_name(f"ready_{RANK}").touch()
time.sleep(120)
"""


class Launched:
    """A program started as a user starts it; its processes are known by a marker in their command lines."""

    def __init__(self, folder: Path, body: str, *, env: dict[str, str] | None = None, **options):
        script = folder / f"program_{options.get('node_rank', 0)}.py"
        script.write_text(PROGRAM.format(body=textwrap.indent(body, "    "), options=options))
        self.folder, self.marker, self.ranks = folder, uuid.uuid4().hex, options["ranks"]
        self.output = folder / f"output_{self.marker}"
        with self.output.open("wb") as output:
            self.launcher = subprocess.Popen(
                [sys.executable, str(script), self.marker],
                env={**os.environ, "PYTHONPATH": str(REPO)} | (env or {}),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if self.marker in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def rank(self, rank: int) -> psutil.Process:
        workers = [p for p in self.processes() if p.environ().get("MS_ROLE") == "MS_WORKER"]
        return next(p for p in workers if p.environ()["RANK_ID"] == str(rank))

    def wait_until_ready(self) -> None:
        deadline_s = time.monotonic() + 60
        while len(list(self.folder.glob("ready_*"))) < self.ranks:
            assert time.monotonic() < deadline_s and self.launcher.poll() is None, self.output.read_text()
            time.sleep(0.05)

    def end(self, within_s: float) -> tuple[int, str]:
        """Exit code and output, having checked that nothing was left running."""
        code = self.launcher.wait(timeout=within_s)
        text = self.output.read_text()
        assert self.processes() == [], text
        return code, text


@pytest.fixture
def launched(tmp_path):
    started = []

    def start(body: str, **options) -> Launched:
        started.append(Launched(tmp_path, body, **options))
        return started[-1]

    yield start
    for job in started:
        for process in job.processes():
            process.kill()
        job.launcher.wait()


@pytest.mark.slow
def test_four_ranks_sum_to_the_known_answer_and_rank_0_is_heard(launched):
    job = launched(
        """
import numpy as np
from mindspore import Tensor, ops
from mindspore.communication import init
init()
total = ops.AllReduce()(Tensor(np.array([10.0**RANK], np.float32))).asnumpy()[0]
print(f"rank {RANK} says {total:.0f}")
return 0 if total == 1111 else 1
""",
        ranks=4,
    )
    code, output = job.end(within_s=90)
    assert code == 0, output
    assert output == "rank 0 says 1111\n"  # nothing of MindSpore's own chatter, nothing of the other ranks
    (run_dir,) = (job.folder / "logs").iterdir()
    assert "rank 3 says 1111" in (run_dir / "worker_3.log").read_text()
    assert "WARNING" in (run_dir / "rank_3.cpp.log").read_text()


@pytest.mark.slow
def test_two_launchers_as_nodes_form_one_job(launched):
    body = """
import numpy as np
from mindspore import Tensor, ops
from mindspore.communication import init
init()
total = ops.AllReduce()(Tensor(np.array([10.0**RANK], np.float32))).asnumpy()[0]
time.sleep(3 if RANK == 1 else 0)  # node 0 must not take the scheduler away
return 0 if total == 11 else 1
"""
    nodes = {"ranks": 2, "nnodes": 2, "master_port": launch.choose_port(None, nnodes=1, node_rank=0)}
    first = launched(body, node_rank=0, **nodes)
    time.sleep(1)  # both nodes are this machine here, where the scheduler of the first to start wins
    second = launched(body, node_rank=1, **nodes)
    for job in (first, second):
        code, output = job.end(within_s=90)
        assert code == 0, output


@pytest.mark.slow
def test_an_exception_ends_ranks_that_wait_in_a_collective_and_is_the_error_shown(launched):
    job = launched(
        """
import numpy as np
from mindspore import Tensor, ops
from mindspore.communication import init
init()
if RANK == 1:
    Path(sys.argv[0]).with_name("raised").write_text(str(time.time()))
    raise ValueError("the shape of this is wrong")
ops.AllReduce()(Tensor(np.ones(1, np.float32))).asnumpy()
""",
        ranks=2,
    )
    code, output = job.end(within_s=90)
    assert time.time() - float((job.folder / "raised").read_text()) < 5
    assert code == 1
    assert "launch: rank 1 of 2 failed: ValueError: the shape of this is wrong; log: " in output
    assert output.count("Traceback") == 1


@pytest.mark.slow
def test_a_killed_rank_is_named_and_ends_the_job_and_its_orphans(launched):
    sleeper = "[sys.executable, '-c', 'import time; time.sleep(99)', sys.argv[1]]"
    orphan = f"import subprocess\nsubprocess.Popen({sleeper})\n"
    job = launched(orphan + READY_THEN_SLEEP, ranks=3)
    job.wait_until_ready()
    victim = job.rank(1)
    victim.kill()
    code, output = job.end(within_s=5)
    assert code == 1
    assert f"rank 1 of 3 (pid {victim.pid}) was killed (SIGKILL)" in output
    assert "out-of-memory killer" in output


@pytest.mark.slow
def test_a_crash_is_named_by_its_signal(launched):
    code, output = launched("os.kill(os.getpid(), signal.SIGSEGV)", ranks=2).end(within_s=30)
    assert code == 1
    assert "SIGSEGV" in output


@pytest.mark.slow
def test_ctrl_c_ends_everything_at_once(launched):
    job = launched(READY_THEN_SLEEP, ranks=2)
    job.wait_until_ready()
    os.killpg(job.launcher.pid, signal.SIGINT)  # as a terminal does: to all in the foreground
    code, output = job.end(within_s=5)
    assert code == 130
    assert "KeyboardInterrupt" not in output


@pytest.mark.slow
def test_sigterm_lets_the_ranks_save_and_its_exit_code_is_theirs(launched):
    job = launched(
        """
stop = []
signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
Path(sys.argv[0]).with_name(f"ready_{RANK}").touch()
while not stop:
    time.sleep(0.05)
time.sleep(3 * RANK)  # rank 1 saves longer than msrun would let it live
Path(sys.argv[0]).with_name(f"saved_{RANK}").touch()
return 75
""",
        ranks=2,
    )
    job.wait_until_ready()
    job.launcher.send_signal(signal.SIGTERM)
    code, output = job.end(within_s=15)
    assert code == 75, output
    assert (job.folder / "saved_1").exists()


@pytest.mark.slow
def test_a_rank_that_ignores_sigterm_is_ended_after_the_grace_period(launched):
    job = launched(
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + READY_THEN_SLEEP, ranks=2, stop_grace_s=1
    )
    job.wait_until_ready()
    job.launcher.send_signal(signal.SIGTERM)
    code, output = job.end(within_s=6)
    assert code == 1
    assert "ranks [0, 1] did not stop within 1 s" in output


@pytest.mark.slow
def test_the_ranks_go_when_the_launcher_is_killed(launched):
    job = launched(READY_THEN_SLEEP, ranks=2)
    job.wait_until_ready()
    job.launcher.kill()
    job.launcher.wait()
    deadline_s = time.monotonic() + 5
    while job.processes() and time.monotonic() < deadline_s:
        time.sleep(0.1)
    assert job.processes() == []


@pytest.mark.slow
def test_a_scheduler_that_dies_is_reported(launched):
    job = launched(READY_THEN_SLEEP, ranks=2)
    job.wait_until_ready()
    next(p for p in job.processes() if p.environ().get("MS_ROLE") == "MS_SCHED").kill()
    code, output = job.end(within_s=5)
    assert code == 1
    assert "the scheduler ended before the ranks" in output


@pytest.mark.slow
def test_exit_code_2_of_a_rank_stays_2(launched):
    code, output = launched("if RANK == 1: sys.exit(2)\ntime.sleep(120)", ranks=2).end(within_s=30)
    assert code == 2
    assert "rank 1 of 2 failed: exit code 2" in output


@pytest.mark.slow
def test_what_another_launch_left_in_the_environment_is_ignored_and_said(launched):
    stale = {"RANK_ID": "7", "RANK_SIZE": "64", "MS_ROLE": "MS_SCHED", "MS_COMPILER_CACHE_ENABLE": "1"}
    job = launched(
        "print(RANK, os.environ['RANK_SIZE'], os.environ.get('MS_COMPILER_CACHE_ENABLE'))\nreturn 0",
        ranks=1,
        env=stale,
    )
    code, output = job.end(within_s=30)
    assert code == 0, output
    assert "0 1 None" in output
    assert output.count("launch: ignoring") == 1
    assert "RANK_ID=7" in output and "MS_ROLE=MS_SCHED" in output


@pytest.mark.slow
def test_a_program_that_cannot_be_imported_shows_its_error(tmp_path):
    broken = tmp_path / "broken.py"
    broken.write_text("import surely_not_installed")
    code = (
        "import sys; from picospore.launch import *; sys.exit(run_ranks([sys.argv[1]], 2, Path(sys.argv[2])))"
    )
    argv = [sys.executable, "-c", code, str(broken), str(tmp_path / "logs")]
    done = subprocess.run(argv, cwd=REPO, capture_output=True, text=True, timeout=30)
    assert done.returncode == 1
    assert "launch: " in done.stderr
    assert "ModuleNotFoundError: No module named 'surely_not_installed'" in done.stderr.splitlines()[-1]


def test_a_port_in_use_is_replaced_on_one_node_and_refused_on_several(capsys):
    with socket.socket() as holder:
        holder.bind(("", 0))
        holder.listen()
        port = holder.getsockname()[1]
        taken = launch.choose_port(port, nnodes=1, node_rank=0)
        assert taken not in (None, port)
        assert f"port {port} is in use, taking {taken}" in capsys.readouterr().err
        assert launch.choose_port(port, nnodes=2, node_rank=0) is None
        assert f"port {port} is in use" in capsys.readouterr().err
        assert launch.run_ranks(["x.py"], 2, Path("nowhere"), nnodes=2, master_port=port) == 2
    assert launch.choose_port(port, nnodes=1, node_rank=0) == port


def test_ranks_that_do_not_divide_among_the_nodes_are_refused(tmp_path, capsys):
    assert launch.run_ranks(["x.py"], 3, tmp_path, nnodes=2) == 2
    assert launch.run_ranks(["x.py"], 4, tmp_path, nnodes=2, node_rank=2) == 2
    assert "3 ranks / 2 nodes" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_earliest_failure_is_the_cause():
    outcomes = [Outcome(0, 1, "lost a peer", time_s=9.0), Outcome(1, 75), Outcome(2, 2, "cause", time_s=8.0)]
    assert launch.first_failure(outcomes).error == "cause"
    assert launch.exit_code_of(outcomes) == 2
    assert launch.exit_code_of([Outcome(0, 0), Outcome(1, 139)]) == 1
    assert launch.exit_code_of([Outcome(0, 0), Outcome(1, 75)]) == 75
    assert launch.exit_code_of([Outcome(0, 0), Outcome(1, 0)]) == 0


def test_msrun_failing_after_all_ranks_finished_is_not_a_failure(tmp_path):
    msrun = subprocess.Popen([sys.executable, "-c", "raise SystemExit(1)"])
    assert msrun.wait() == 1
    (tmp_path / "msrun.log").write_text("RuntimeError: Distributed job exited with exception.")
    job = launch.Job(msrun, tmp_path, ranks=2, local=range(2), has_scheduler=True, started_s=0.0)
    for rank in job.local:
        (tmp_path / f"rank_{rank}.json").write_text(json.dumps(asdict(Outcome(rank, 0))))
    with Path(os.devnull).open("rb") as tail:
        assert launch._follow(job, tail, [], stop_grace_s=1) == 0


def test_each_launch_has_a_folder_of_its_own(tmp_path):
    folders = {launch.new_folder(tmp_path) for _ in range(3)}
    assert len(folders) == 3


def test_threads_of_all_ranks_together_do_not_exceed_the_cores():
    assert launch.thread_env(2, cores=8)["OMP_NUM_THREADS"] == "4"
    assert launch.thread_env(8, cores=2)["OMP_NUM_THREADS"] == "1"


def test_a_lone_role_in_the_environment_does_not_make_a_rank(monkeypatch):
    monkeypatch.delenv("MS_SCHED_PORT", raising=False)
    monkeypatch.setenv("MS_ROLE", "MS_WORKER")
    assert not launch.is_rank()
    assert launch.rank_main(lambda: 0 if "MS_ROLE" not in os.environ else 1) == 0


def test_a_single_process_keeps_its_own_exit_code_and_exceptions():
    assert launch.rank_main(lambda: 75) == 75
    with pytest.raises(ValueError, match="mine"):
        launch.rank_main(lambda: (_ for _ in ()).throw(ValueError("mine")))


def test_the_launcher_does_not_wait_for_mindspore_to_import():
    code = "import sys, picospore.launch; sys.exit('mindspore' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=REPO).returncode == 0
