import ctypes
import os
import struct
import sys

at = sys.argv.index("--")
*numbers, error = map(int, sys.argv[1:at])
LOAD, EQUAL, RETURN = 0x20, 0x15, 0x06
program = [(LOAD, 0, 0, 0)]  # the number of the call
for i, number in enumerate(numbers):
    program.append((EQUAL, len(numbers) - i, 0, number))
program += [(RETURN, 0, 0, 0x7FFF0000), (RETURN, 0, 0, 0x00050000 | error)]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
libc = ctypes.CDLL(None, use_errno=True)
filter = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program), ctypes.addressof(code)))
assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
assert libc.prctl(22, 2, filter, 0, 0) == 0, ctypes.get_errno()  # PR_SET_SECCOMP
os.execvp(sys.argv[at + 1], sys.argv[at + 1 :])
