"""Elastic jobs on this host: what the launcher does when processes fail, and what it says."""

import contextlib
import os
import re
import signal
import subprocess
import sys

import psutil
import pytest

from horoplug.compat.elastic_constants import RESET_LIMIT_EXCEEDED_MESSAGE
from horoplug.runner import launch
from tests.harness import ROOT
from tests.harness.elastic_launcher import PRELUDE, finish, launched, launcher_lines, start
from tests.harness.limits import scaled
from tests.harness.support import has_ended, seed, until

# A training program without a framework. fail(step) is called in each step.
TRAIN = """
ATTEMPT = int(os.environ["HOROPLUG_RESTART_COUNT"])

{fail}

hvd.init({init})
say("process", ME, "attempt", ATTEMPT, "pid", os.getpid(), "of", hvd.size())
state = ObjectState(broadcast_object, hvd.rank, step=0, total=0)
state.register_reset_callbacks([lambda: say("reset", ME, hvd.rank(), hvd.size(), state.step)])

def train(state):
    while state.step < {steps}:
        fail(state.step)
        one = hvd.allreduce(np.ones(1000), name="gradient", op=hvd.Average)
        assert (one == 1).all()
        state.step += 1
        state.commit()

run_fn(train, initialize_again)(state)
say("done", ME, "rank", hvd.rank(), "of", hvd.size(), "step", state.step)
"""


def program(fail, steps=30, init=""):
    text = PRELUDE + TRAIN.format(fail=fail, steps=steps, init=init)
    return [sys.executable, "-c", text]


def done(out):
    """By process, its rank, size and step at the end."""
    found = re.findall(r"done (\d+) rank (\d+) of (\d+) step (\d+)", out)
    return {int(process): tuple(map(int, rest)) for process, *rest in found}


# ---- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.short(failure=True)
def test_survivors_keep_their_processes_and_a_replacement_joins_at_a_commit(victim):
    fail = f"""
def fail(step):
    if ME == {victim} and step == 7:
        os.kill(os.getpid(), signal.SIGKILL)
    if step == 10 and hvd.size() == 2:  # wait for the replacement, commit by commit
        state.step -= 1
"""
    code, out, err = launched("-np", 3, "--min-np", 2, *program(fail))
    assert code == 0, err
    ends = done(out)
    survivors = [process for process in range(3) if process != victim]
    # Survivors keep their order, and the replacement follows them.
    assert {p: rank for p, (rank, _, _) in ends.items()} == {survivors[0]: 0, survivors[1]: 1, 3: 2}
    assert {size for _, size, _ in ends.values()} == {3}
    assert {step for _, _, step in ends.values()} == {30}
    pids = re.findall(r"process (\d+) attempt (\d+) pid (\d+)", out)
    assert sorted((int(process), int(attempt)) for process, attempt, _ in pids) == [
        (0, 0),
        (1, 0),
        (2, 0),
        (3, 1),
    ]
    # All survivors went on from their last commit. The operation of one may have failed that had ended on the other.
    resets = re.findall(r"reset (\d) \d 2 (\d+)", out)
    assert {int(process) for process, _ in resets} == set(survivors)
    assert {int(step) for _, step in resets} <= {6, 7}
    lines = launcher_lines(err)
    assert lines == [
        f"process {victim} (rank {victim}) on localhost was killed by signal 9 (SIGKILL)",
        "the job goes on with 2 processes on 1 host",
        "the job goes on with 3 processes on 1 host",
    ]


def test_stopped_process_is_killed_and_replaced():
    fail = """
def fail(step):
    if ME == 1 and step == 5:
        os.kill(os.getpid(), signal.SIGSTOP)
"""
    code, out, err = launched("-np", 3, "--min-np", 2, "--gloo-timeout-seconds", 2, *program(fail))
    assert code == 0, err
    assert {0, 2} <= done(out).keys()
    assert "process 1 (rank 1) on localhost has not reacted to a failure for 7 s" in launcher_lines(
        err
    )


def test_replacement_that_stops_before_the_broadcast_of_the_state_is_killed_and_replaced():
    """The survivors wait for it in the broadcast."""
    fail = """
if ME == 3:
    ObjectState.sync = lambda self: os.kill(os.getpid(), signal.SIGSTOP)

def fail(step):
    if ME == 1 and step == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    if step == 20 and hvd.size() == 2:
        state.step -= 1
"""
    code, out, err = launched("-np", 3, "--min-np", 2, "--gloo-timeout-seconds", 2, *program(fail))
    assert code == 0, err
    assert done(out) == {0: (0, 3, 30), 2: (1, 3, 30), 4: (2, 3, 30)}
    late = "process 3 (rank 2) on localhost has not reacted to a failure for 7 s"
    assert late in launcher_lines(err)


def test_several_processes_that_die_at_once_are_replaced():
    number = seed()
    fail = f"""
VICTIMS = random.Random({number}).sample(range(5), 4)
STEP = random.Random({number}).randint(0, 20)

def fail(step):
    if ME in VICTIMS and step == STEP:
        os.kill(os.getpid(), signal.SIGKILL)
"""
    code, out, err = launched("-np", 5, "--min-np", 4, *program(fail))
    assert code == 0, err
    ends = done(out)
    assert len(ends) >= 4
    assert {step for _, _, step in ends.values()} == {30}
    # The only survivor has the state, and is rank 0.
    (survivor,) = [process for process in ends if process < 5]
    assert ends[survivor][0] == 0


def test_program_without_elastic_code_is_started_again():
    text = """
import os, sys
import numpy as np
import horoplug as hvd

hvd.init()
attempt = int(os.environ["HOROPLUG_RESTART_COUNT"])
for step in range(10):
    hvd.allreduce(np.ones(3), name="gradient")
    if step == 5 and hvd.rank() == 1 and attempt < 2:
        sys.exit(7)
sys.stdout.write(f"rank {hvd.rank()} of {hvd.size()} is done in attempt {attempt}\\n")
"""
    code, out, err = launched("-np", 3, "--min-np", 3, sys.executable, "-c", text)
    assert code == 0, err
    assert sorted(re.findall(r"rank \d of 3 is done in attempt \d", out)) == [
        f"rank {rank} of 3 is done in attempt 2" for rank in range(3)
    ]


@pytest.mark.short(failure=True)
def test_program_that_always_fails_ends_with_its_exit_code_and_its_traceback():
    text = "import horoplug as hvd, os; hvd.init(); raise KeyError(hvd.rank())"
    code, _, err = launched("-np", 2, "--min-np", 1, sys.executable, "-c", text)
    assert code == 1
    assert "KeyError" in err
    last = launcher_lines(err)[-1]
    assert re.fullmatch(
        r"the job has failed 3 times in a row soon after its start; process \d \(rank \d\) on localhost "
        r"exited with code 1.*",
        last,
    ), last


def test_program_that_cannot_start_ends_the_job_after_a_few_attempts():
    code, _, err = launched(
        "-np", 2, "--min-np", 2, sys.executable, "-c", "import sys; sys.exit(9)"
    )
    assert code == 9
    assert re.match(
        r"fewer than 2 processes \(--min-np\) are left; process \d on localhost exited with code 9",
        launcher_lines(err)[-1],
    )


def test_reset_limit_ends_the_job_with_the_first_failure():
    fail = """
def fail(step):
    if hvd.rank() == hvd.size() - 1 and step == 3:
        os.kill(os.getpid(), signal.SIGKILL)
"""
    code, _, err = launched("-np", 3, "--min-np", 1, "--reset-limit", 1, *program(fail))
    assert code == 128 + signal.SIGKILL
    assert RESET_LIMIT_EXCEEDED_MESSAGE.format(1) in launcher_lines(err)[-1]
    assert re.match(
        r"the job was formed again 1 time \(--reset-limit\); process \d \(rank 1\) on localhost was killed by "
        r"signal 9",
        launcher_lines(err)[-1],
    )


def test_program_that_does_not_communicate_may_end_in_any_order():
    code, out, _ = launched("-np", 3, "--min-np", 1, "echo", "hello")
    assert code == 0
    assert out.count("hello") == 3


def test_first_process_to_end_its_program_does_not_end_the_work_of_others():
    text = """
import os, sys, time
import numpy as np
import horoplug as hvd

hvd.init()
rank = hvd.rank()
first = int(hvd.broadcast(np.array([os.getpid()]), 0)[0])
hvd.shutdown()
while rank == 1 and os.path.exists(f"/proc/{first}"):
    time.sleep(0.01)
sys.stdout.write(f"rank {rank} has ended\\n")
"""
    code, out, err = launched("-np", 2, "--min-np", 1, sys.executable, "-c", text)
    assert code == 0, err
    assert {"rank 0 has ended", "rank 1 has ended"} == set(re.findall(r"rank \d has ended", out))


def test_what_a_failed_process_leaves_behind_is_killed():
    fail = """
import subprocess
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
say("child", child.pid)

def fail(step):
    if ME == 1 and step == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    if step == 20 and not os.path.exists(os.environ["GO_ON"]):
        state.step -= 1
"""
    folder = os.environ["TMPDIR"]
    go_on = os.path.join(folder, f"go-on-{os.getpid()}-{seed()}")
    process = start("-np", 2, "--min-np", 1, *program(fail), GO_ON=go_on)
    try:
        children = {}
        while len(children) < 3:  # the children of both processes, and of the replacement
            line = process.stdout.readline()
            assert line, finish(process)
            if match := re.search(r"\[(\d)\]<stdout>:child (\d+)", line):
                children[int(match[1])] = int(match[2])
        until(lambda: has_ended(children[1]))
        assert psutil.pid_exists(children[0])
        with open(go_on, "w"):
            pass
        assert finish(process)[0] == 0
        assert not any(map(psutil.pid_exists, children.values()))
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_the_job_while_it_waits_for_processes(number, tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost:1\n")
    process = start(
        *("--min-np", 2, "--host-discovery-script", f"cat {hosts}", "--verbose"),
        *program("def fail(step): pass"),
    )
    while "rank 0 is pid" not in process.stderr.readline():
        pass
    process.send_signal(number)
    code, _, err = finish(process)
    assert code == 128 + number
    what = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}[number]
    assert launcher_lines(err)[-1] == f"{what}; all ranks were ended"


def test_process_that_was_told_to_leave_does_so_at_a_commit_and_nothing_is_restored():
    fail = """
signal.signal(signal.SIGUSR1, lambda *_: say("own handler", ME))

def fail(step):
    if ME == 1 and step == 5:
        os.kill(os.getpid(), signal.SIGUSR1)
    if step == 20 and hvd.size() == 3:
        state.step -= 1
"""
    code, out, err = launched(
        "-np", 3, "--min-np", 2, *program(fail), HOROPLUG_NOTICE_SIGNAL="SIGUSR1"
    )
    assert code == 0, err
    assert done(out) == {0: (0, 2, 30), 2: (1, 2, 30)}
    assert "own handler 1" in out
    (steps,) = set(re.findall(r"reset \d \d 2 (\d+)", out))
    assert int(steps) >= 6
    assert launcher_lines(err) == [
        "process 1 (rank 1) on localhost was told to leave",
        "host localhost gets no new processes for now",
        "the job goes on with 2 processes on 1 host",
    ]


def test_process_that_was_told_to_leave_stays_while_the_job_needs_it():
    fail = """
def fail(step):
    if ME == 1 and step == 5:
        os.kill(os.getpid(), signal.SIGUSR1)
"""
    code, out, err = launched(
        "-np", 2, "--min-np", 2, *program(fail), HOROPLUG_NOTICE_SIGNAL="usr1"
    )
    assert code == 0, err
    assert done(out) == {0: (0, 2, 30), 1: (1, 2, 30)}


def test_hosts_update_without_a_commit_keeps_all_of_the_current_state(tmp_path):
    fail = """
class Never(ObjectState):
    def commit(self):
        self.check_host_updates()

ObjectState = Never

def fail(step):
    if ME == 1 and step == 5:
        os.kill(os.getpid(), signal.SIGUSR1)
    if step == 20 and hvd.size() == 3:
        state.step -= 1
"""
    code, out, err = launched(
        "-np", 3, "--min-np", 2, *program(fail), HOROPLUG_NOTICE_SIGNAL="SIGUSR1"
    )
    assert code == 0, err
    (step,) = set(re.findall(r"reset \d \d 2 (\d+)", out))
    assert int(step) >= 6


def test_process_sets_of_init_exist_again_after_a_failure_as_far_as_their_ranks_do():
    fail = """
small, large = hvd.ProcessSet([0, 1]), hvd.ProcessSet([1, 2])

def fail(step):
    if ME == 1 and step == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    if small.included():
        assert hvd.allreduce(np.ones(1), op=hvd.Sum, name="small", process_set=small) == 2
    if large.included():
        assert hvd.allreduce(np.ones(1), op=hvd.Sum, name="large", process_set=large) == 2
    assert (large.included() is None) == (hvd.size() == 2)
    if step == 20 and hvd.size() == 2:
        state.step -= 1
"""
    init = "process_sets=[small, large]"
    code, out, err = launched("-np", 3, "--min-np", 2, *program(fail, init=init))
    assert code == 0, err
    assert done(out) == {0: (0, 3, 30), 2: (1, 3, 30), 3: (2, 3, 30)}


# ---- hosts that come and go, as slots of this host -------------------------------------------------------------------


def test_job_grows_and_shrinks_with_the_discovered_slots_without_restoring(tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost:2\n")
    fail = """
def write(hosts):  # the script never reads an incomplete file
    path = os.environ["HOSTS"]
    open(path + ".new", "w").write(hosts + "\\n")
    os.replace(path + ".new", path)

def fail(step):
    if hvd.rank() == 0 and step == 3:
        write("localhost:4")
    if step == 10 and hvd.size() < 4:
        state.step -= 1
    if hvd.rank() == 0 and step == 12:
        write("localhost:3")
    if step == 20 and hvd.size() > 3:
        state.step -= 1
"""
    code, out, err = launched(
        *("--min-np", 2, "--host-discovery-script", f"cat {hosts}"),
        *program(fail),
        HOSTS=str(hosts),
    )
    assert code == 0, err
    assert done(out) == {0: (0, 3, 30), 1: (1, 3, 30), 2: (2, 3, 30)}
    sizes = [int(line.split()[5]) for line in launcher_lines(err)]
    assert sizes in (
        [4, 3],
        [3, 4, 3],
    )  # both processes may be ready before the same commit, or not


def test_names_of_one_machine_get_its_slots_once(tmp_path):
    """The processes run until the hosts were found several times."""
    script, looks, started = tmp_path / "hosts.sh", tmp_path / "looks", tmp_path / "started"
    script.write_text(f"echo >>{looks}; echo localhost:1; echo 127.0.0.7:2; echo $(hostname)\n")
    started.touch()
    wait = f"echo >>{started}; until [ $(wc -l <{looks}) -ge 4 ]; do sleep 0.05; done"
    code, _, err = launched(
        *("-np", 2, "--min-np", 2, "--max-np", 5, "--host-discovery-script", f"sh {script}"),
        *("sh", "-c", wait),
    )
    assert code == 0, err
    assert launcher_lines(err) == []
    assert started.read_text().count("\n") == 4


def test_job_ends_with_one_line_if_hosts_do_not_come_in_time(tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost:1\n")
    code, _, err = launched(
        *("--min-np", 2, "--elastic-timeout", 1, "--host-discovery-script", f"cat {hosts}"),
        *program("def fail(step): pass"),
    )
    assert code == 1
    (line,) = launcher_lines(err)
    assert line.startswith(
        "fewer than 2 processes (--min-np) were ready for 1 s (--elastic-timeout)"
    )


def test_discovery_script_that_hangs_ends_with_a_launcher_that_is_killed(tmp_path):
    """With its own processes. The first run has found the host, so that the job has begun."""
    script, pids = tmp_path / "script.sh", tmp_path / "pids"
    script.write_text(
        f"[ -e {tmp_path}/begun ] || {{ : >{tmp_path}/begun; echo localhost:1; exit; }}\n"
        f"sleep 600 & echo $$ $! >{pids}.new; mv {pids}.new {pids}; wait\n"
    )
    process = start(
        *("--min-np", 1, "--host-discovery-script", f"sh {script}"),
        *program("def fail(step): state.step -= 1"),
    )
    try:
        until(pids.exists)
        hanging = [psutil.Process(int(pid)) for pid in pids.read_text().split()]
        process.kill()
        process.communicate(timeout=scaled(30))
        try:
            until(lambda: not any(map(psutil.Process.is_running, hanging)))
        finally:
            for each in hanging:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
    finally:
        process.kill()
        process.wait()


def test_wrong_output_of_the_discovery_script_is_reported_once_and_the_job_goes_on(tmp_path):
    hosts, script = tmp_path / "hosts", tmp_path / "script.sh"
    hosts.write_text("localhost:2\n")
    script.write_text(f"cat {hosts}; if grep -q fail {hosts}; then exit 3; fi\n")
    fail = """
import pathlib
SEEN = pathlib.Path(os.environ["HOSTS"])

def fail(step):
    if hvd.rank() == 0 and step == 3:
        SEEN.write_text("localhost:2\\nlocalhost:two\\n")
    if hvd.rank() == 0 and step == 6:
        SEEN.write_text("fail\\n")
    if hvd.rank() == 0 and step == 9:
        SEEN.write_text("localhost:3\\n")
    if step == 12 and hvd.size() < 3:
        state.step -= 1
"""
    code, out, err = launched(
        *("--min-np", 2, "--host-discovery-script", f"sh {script}"),
        *program(fail),
        HOSTS=str(hosts),
    )
    assert code == 0, err
    assert len(done(out)) == 3
    for line in launcher_lines(err):
        assert re.match(r"host discovery: |the job goes on with 3 processes", line), line


# ---- variables of the processes --------------------------------------------------------------------------------------


def test_slots_of_live_processes_are_unique_and_a_replacement_gets_the_free_one():
    fail = """
say("slot", ME, os.environ["HOROVOD_LOCAL_RANK"], os.environ["HOROVOD_RANK"])

def fail(step):
    if ME == 1 and step == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    if step == 10 and hvd.size() == 2:
        state.step -= 1
"""
    code, out, err = launched("-np", 3, "--min-np", 2, *program(fail))
    assert code == 0, err
    slots = re.findall(r"slot (\d) (\d) (\d)", out)
    assert sorted(slots) == [("0", "0", "0"), ("1", "1", "1"), ("2", "2", "2"), ("3", "1", "1")]


def test_program_that_runs_horovods_launcher_itself(tmp_path):
    launcher = """
import sys
import horoplug.compat
horoplug.compat.install()
from horovod.runner.launch import _run_elastic, parse_args

args = parse_args()
assert (args.np, args.min_np, args.max_np, args.slots, args.cooldown_range) == (2, 1, None, None, None)
args.num_proc = 3
_run_elastic(args)
args.command = [sys.executable, "-c", "import sys; sys.exit(4)"]
try:
    _run_elastic(args)
except RuntimeError as error:
    sys.stdout.write(f"failed: {error}\\n")
"""
    text = program("def fail(step): pass", steps=3)
    done_by = subprocess.run(
        [sys.executable, "-c", launcher, "-np", "2", "--min-np", "1", *text],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=scaled(90),
    )
    assert done_by.returncode == 0, done_by.stderr
    assert len(done(done_by.stdout)) == 3
    assert "failed: fewer than 1 process (--min-np) are left" in done_by.stdout


# ---- wrong command lines ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--min-np 3 --max-np 2", "--min-np 3 is more than --max-np 2"),
        ("-np 2 --min-np 3", "--min-np 3 is more than -np 2"),
        ("-np 4 --max-np 3", "-np 4 is more than --max-np 3"),
        ("-np 2 --min-np 1 --mpi", "--mpi: processes of an MPI job cannot come and go"),
        (
            "--min-np 1 -H a:2 --host-discovery-script ./hosts",
            "--host-discovery-script: not allowed with -H or -hostfile",
        ),
        (
            "-np 2 --min-np 1 --blacklist-cooldown-range 20 10",
            "--blacklist-cooldown-range: 20 is more than 10",
        ),
        ("--min-np 0", "at least 1 is wanted, not 0"),
        ("-np 2 --min-np 1 --elastic-timeout 0", "a positive number of seconds is wanted"),
        ("-np 2 --min-np 1 nonesuch-program", "there is no program 'nonesuch-program'"),
    ],
)
def test_wrong_command_lines_are_refused_in_one_line(arguments, message, capsys):
    assert launch.main([*arguments.split(), "true"]) == 2
    error = capsys.readouterr().err
    assert re.fullmatch(r"horovodrun: [^\n]+\n", error)
    assert message in error
