import os
import pty
import select
import subprocess
import sys

terminal, other = pty.openpty()
command = ["srun", "-n", "2", "--pty", "bash", "--norc", "--noprofile", "-i"]
shell = subprocess.Popen(command, stdin=other, stdout=other, stderr=other, start_new_session=True)
os.close(other)
os.write(terminal, f"{sys.executable} {sys.argv[1]}; exit\n".encode())
try:
    while select.select([terminal], [], [], 40)[0] and (data := os.read(terminal, 4096)):
        os.write(1, data)
except OSError:  # the shell has ended
    pass
sys.exit(shell.wait(10))
