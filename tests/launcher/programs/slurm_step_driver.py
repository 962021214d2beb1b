import json
import os
import re  # noqa: F401  # actions use it
import signal  # noqa: F401  # actions use it
import subprocess
import sys
import time

import psutil

count, action, *command = sys.argv[1:]
run = subprocess.Popen(
    command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
)
lines = []
while sum("ready" in line for line in lines) < int(count):
    lines.append(run.stdout.readline())
    assert lines[-1], run.communicate()


def of_job():
    # All processes of this Slurm job but this one.
    found = []
    for process in psutil.process_iter():
        try:
            job = process.environ().get("SLURM_JOB_ID")
            if job == os.environ["SLURM_JOB_ID"] and process.pid != os.getpid():
                found.append(process)
        except psutil.Error:
            pass
    return found


def named(program, text):
    found = []
    for process in of_job():
        try:
            words = process.cmdline()
            if words and words[0].endswith(program) and text in words:
                found.append(process)
        except psutil.Error:
            pass
    return found


def sruns():
    # srun and the child that it forks, in this order.
    found = named("srun", "--overlap")
    return sorted(found, key=lambda process: process.ppid() in [each.pid for each in found])


exec(action)
out, err = run.communicate(timeout=40)
deadline = time.monotonic() + 20
while (left := of_job()) and time.monotonic() < deadline:
    time.sleep(0.05)
print("RESULT", json.dumps([run.returncode, "".join(lines) + out, err, list(map(str, left))]))
