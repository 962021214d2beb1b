"""Jobs of the manifests in examples/kubernetes: their pods run in namespaces, with what Kubernetes and the operators
give them, in the image that the Dockerfile's steps make."""

import re
import subprocess

import pytest

from tests.harness import operators, program_text
from tests.harness.image import STEPS, Image
from tests.harness.pods import KUBERNETES, SECRETS, Pods, why_not

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

JOB = """
import numpy as np
import horoplug as hvd

hvd.init()
rank, size = hvd.rank(), hvd.size()
assert hvd.allreduce(np.array([rank]), op=hvd.Sum) == size * (size - 1) // 2
large = hvd.allreduce(np.full(1 << 20, rank, np.float32), op=hvd.Sum)
assert (large == size * (size - 1) // 2).all()
print(f"rank {rank} of {size} on {hvd.cross_rank()} of {hvd.cross_size()} is done")
"""
# Runs until a rank fails.
ENDLESS = """
import numpy as np
import horoplug as hvd

hvd.init()
print(f"rank {hvd.rank()} is there", flush=True)
while True:
    hvd.allreduce(np.ones(1), name="step")
"""

# Ends some steps after the job has had 2 ranks, 1, and 2 again.
ELASTIC = program_text("tests/launcher/programs/kubernetes_pods_elastic.py")


@pytest.fixture(scope="module")
def image():
    with Image("runtime", "sshd") as made:
        yield made


@pytest.fixture
def pods(image, request):
    """Pods whose program is JOB, or the test's parameter."""
    with Pods(image, {"/workspace/train.py": getattr(request, "param", JOB)}) as made:
        yield made


def finished(text):
    """What the ranks have printed: rank, size, host, number of hosts."""
    found = re.findall(r"rank (\d+) of (\d+) on (\d+) of (\d+) is done", text)
    return sorted(tuple(map(int, numbers)) for numbers in found)


@pytest.mark.parametrize(
    "start", [operators.indexed_job, operators.jobset, operators.trainer, operators.pytorch_job]
)
@pytest.mark.short
def test_job_with_a_rank_in_each_pod(pods, start):
    """The pods share the key of the secret that docs/launch-kubernetes.md creates."""
    started = start(pods)
    ends = [pod.wait() for pod in started]
    assert [status for status, _ in ends] == [0] * 4, ends
    assert [finished(text) for _, text in ends] == [[(rank, 4, rank, 4)] for rank in range(4)]


@pytest.mark.parametrize("pods", [ENDLESS], indirect=True, ids=["endless"])
@pytest.mark.short(failure=True)
def test_ranks_end_with_an_evicted_pod_and_their_successors_find_each_other(pods):
    """A plain Job creates the failed pods again, with the same names, other addresses, and the same key."""
    for _ in range(2):
        started = operators.indexed_job(pods)
        for rank, pod in enumerate(started):
            pod.wait_for(f"rank {rank} is there")
        pods.evict(started[2])
        for pod in (started[0], started[1], started[3]):
            status, text = pod.wait()
            assert status == 1, text
            assert re.search("HorovodInternalError: .*step.*rank 2", text), text
            pods.evict(pod)


def test_pod_with_another_key_is_no_rank(pods, monkeypatch):
    monkeypatch.setitem(KUBERNETES, "HOROPLUG_START_TIMEOUT", "4")
    manifest = operators.manifests("job")["Job"]["spec"]["template"]["spec"]
    common = {"WORLD_SIZE": "2"}
    started = []
    for index in range(2):
        monkeypatch.setitem(SECRETS, "horoplug", {"key": f"{index + 1:064x}"})
        variables = common | {"JOB_COMPLETION_INDEX": str(index)}
        name = f"train-{index}"
        started.append(pods.start(manifest, name=name, subdomain="train", env=variables))
    for pod, said in zip(
        started, ("rank 1", "is not found within 4 s on train-0.train"), strict=False
    ):
        status, text = pod.wait()
        assert status == 1, text
        assert said in text, text


def test_mpi_job(pods):
    """The launcher reaches the workers by the operator's keys and takes hosts and slots from the operator's file."""
    job = operators.MpiJob(pods, "mpijob")
    for index in range(job.workers):
        job.start_worker(index)
    launcher = job.start_launcher()
    status, text = launcher.wait()
    assert status == 0, text
    assert finished(text) == [(rank, 4, rank // 2, 2) for rank in range(4)]


@pytest.mark.parametrize("pods", [ELASTIC], indirect=True, ids=["elastic"])
def test_elastic_mpi_job_survives_an_evicted_pod(pods):
    """A worker is killed. It comes back under its name with another address, and takes part again."""
    job = operators.MpiJob(pods, "mpijob-elastic", workers=2)
    first = [job.start_worker(index) for index in range(2)]
    launcher = job.start_launcher()
    launcher.wait_for(f"rank 1 of 2 at {first[1].address}")
    pods.evict(first[1])
    job.list_workers()
    launcher.wait_for(f"rank 0 of 1 at {first[0].address}")
    replacement = job.start_worker(1)
    assert replacement.address != first[1].address
    launcher.wait_for(f"rank 1 of 2 at {replacement.address}")
    status, text = launcher.wait()
    assert status == 0, text
    ends = re.findall(r"rank (\d) of 2 is done after (\d+) steps of \[2, 1, 2\]", text)
    assert sorted(rank for rank, _ in ends) == ["0", "1"], text
    assert len({steps for _, steps in ends}) == 1


def test_host_without_the_keys_of_the_job_is_refused(pods):
    """A pod that has taken the name of a worker gets neither the program nor the secret."""
    job, other = operators.MpiJob(pods, "mpijob"), operators.MpiJob(pods, "mpijob-elastic")
    for index in range(job.workers):
        pod = pods.start(
            job.worker_spec,
            name=f"{job.name}-worker-{index}",
            subdomain=job.name,
            env={},
            mounts=other.mounted_keys,
        )
        pods.listening(pod, 2222)
    launcher = job.start_launcher()
    status, text = launcher.wait()
    assert status == 1, text
    assert re.fullmatch(
        r"horovodrun: host train-worker-[01]\S+: Host key verification failed\..*\n", text
    ), text


# ---- the image -------------------------------------------------------------------------------------------------------


def test_image_runs_programs_as_a_user_who_can_change_nothing(image):
    done = image.run("sh", "-c", "id -u; python -c 'import horoplug; print(horoplug.__file__)'")
    user, file = done.stdout.split()
    assert user == "1000"
    assert file.startswith("/opt/horoplug/lib/")
    for place in ("/opt/horoplug/bin", "/workspace", file.rpartition("/")[0], "/etc"):
        assert image.run("test", "-w", place, check=False).returncode == 1
    program = "import horoplug as hvd; hvd.init(); print(hvd.size())"
    done = image.run("horovodrun", "-np", "2", "python", "-c", program)
    assert sorted(done.stdout.split()) == ["[0]<stdout>:2", "[1]<stdout>:2"]


def test_image_has_only_what_the_wheel_needs(image):
    done = image.run("pip", "list", "--format=freeze", "--disable-pip-version-check")
    names = {line.partition("==")[0].lower() for line in done.stdout.split()}
    assert names - {"pip", "setuptools"} == {
        "horoplug",
        "cloudpickle",
        "numpy",
        "packaging",
        "pyyaml",
    }


def test_image_has_no_keys_of_its_own(image):
    """Keys in an image would be the same for all who have the image."""
    names = image.run("ls", "-A", "/etc/ssh", "/home/horoplug").stdout.split()
    assert "sshd_config" in names
    assert ".ssh" not in names
    assert not [name for name in names if "key" in name]


def test_unknown_step_of_an_image_is_an_error():
    done = subprocess.run([STEPS, "nonesuch"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "image-steps: there is no step nonesuch\n")
