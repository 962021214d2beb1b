"""Runs the programs of tests/harness/compiled_programs.py: python compiled.py FOLDER BACKEND [PROGRAM...].

Saves their outcomes as RANK.pt: by program, and by compiler, of which the empty name is none. Without programs: all."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

import horoplug.torch  # noqa: F401  PyTorch 2.4 does not do so for init_process_group("horoplug")
from tests.harness import compiled_programs

folder, backend, *names = sys.argv[1:]
dist.init_process_group(backend)
found = {}
for program in compiled_programs.PROGRAMS:
    if names and program.__name__ not in names:
        continue
    for compiler in ("", *compiled_programs.COMPILERS):
        outcome = compiled_programs.outcome(program, compiler)
        found[program.__name__, compiler] = outcome
        says = outcome if isinstance(outcome, str) else "works"
        print(f"{backend} {program.__name__} {compiler or 'no compiler'}: {says}", flush=True)
torch.save(found, Path(folder) / f"{dist.get_rank()}.pt")
dist.destroy_process_group()
