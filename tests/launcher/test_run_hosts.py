"""``horoplug.run`` and mpirun on several hosts, which are network namespaces with an sshd each."""

import os
import re
import sys

import pytest

from tests.harness import program_text
from tests.harness.horovodrun_mpi import JOB
from tests.harness.horovodrun_mpi import place as place
from tests.harness.mpi_jobs import between_hosts
from tests.harness.netns import cluster_fixture, finish, why_not
from tests.harness.netns import nothing_left as nothing_left

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())


cluster = cluster_fixture(2)

FUNCTIONS = program_text("tests/launcher/programs/run_hosts_functions.py")


def test_run_function_on_several_hosts(cluster, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(FUNCTIONS)
    code, out, err = finish(cluster.popen(0, sys.executable, program), 60)
    assert code == 0, out + err
    results, failure, nobody = out.splitlines()
    hosts = ("h0", "h1", "h1")
    assert results == str([(host, rank, 1_500_000.0) for rank, host in enumerate(hosts)])
    assert failure == "2 KeyError('there') True"
    assert re.match("(host )?nonesuch", nobody), nobody


def test_variables_of_a_function_on_several_hosts(cluster, tmp_path):
    """Those that ``env`` adds or changes reach other hosts; others of the caller only if they are listed."""
    program = tmp_path / "program.py"
    program.write_text(
        "import horoplug, os\n"
        "def work():\n"
        "    return [os.environ.get(name) for name in ('DATA_DIR', 'PLAIN', 'OMP_NUM_THREADS', 'HOME')]\n"
        "if __name__ == '__main__':\n"
        "    env = dict(os.environ, DATA_DIR='/data', HOME='/nonesuch')\n"
        "    print(horoplug.run(work, num_proc=1, hosts='h1:1', env=env))\n"
    )
    outer = {"PLAIN": "kept", "OMP_NUM_THREADS": "3"}
    code, out, err = finish(cluster.popen(0, sys.executable, program, env=outer), 60)
    assert code == 0, out + err
    assert out == str([["/data", None, "3", os.path.expanduser("~root")]]) + "\n"


def test_mpirun_on_several_hosts(cluster, place):
    """The ssh command of this cluster has options."""
    env = between_hosts(place) | {"HOROVOD_CACHE_CAPACITY": "77"}
    arguments = ["--mpi", "--tcp", "-np", 3, "-H", "h0:2,h1:1"]
    process = cluster.start(0, *arguments, sys.executable, "-c", JOB, env=env)
    code, out, err = finish(process, 60)
    assert code == 0, out + err
    assert sorted(re.findall(r"rank (\d) of 3: 6", out)) == ["0", "1", "2"], out + err


def test_run_function_with_mpirun_on_several_hosts(cluster, place, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import horoplug, os, socket\n"
        "def work():\n"
        "    import horoplug as hvd\n"
        "    hvd.init()\n"
        "    return hvd.rank(), os.readlink('/proc/self/ns/net')\n"
        "if __name__ == '__main__':\n"
        "    found = horoplug.run(work, num_proc=2, hosts='h0:1,h1:1', use_mpi=True)\n"
        "    assert [rank for rank, _ in found] == [0, 1]\n"
        "    print(len(set(space for _, space in found)))\n"
    )
    process = cluster.popen(0, sys.executable, program, env=between_hosts(place))
    code, out, err = finish(process, 60)
    assert (out, code) == ("2\n", 0), err
