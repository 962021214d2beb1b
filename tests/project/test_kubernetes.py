"""The manifests in examples/kubernetes: their fields exist, and their names and numbers agree.

The test_kubernetes_pods.py of tests/launcher, tests/ray and tests/spark run the jobs."""

import ast
import re

import pytest
import yaml

from tests.harness import ROOT
from tests.harness.kubernetes_schemas import problems
from tests.harness.operators import FOLDER, manifests

FILES = sorted(path.stem for path in FOLDER.glob("*.yaml"))
KINDS = {
    "job": ["Service", "Job"],
    "jobset": ["JobSet"],
    "mpijob": ["MPIJob"],
    "mpijob-elastic": ["MPIJob"],
    "pytorchjob": ["PyTorchJob"],
    "rayjob": ["ConfigMap", "RayJob"],
    "sparkapplication": ["ConfigMap", "SparkApplication"],
    "trainjob": ["TrainingRuntime", "TrainJob"],
}


def test_there_is_a_manifest_for_each_kind_of_job():
    assert sorted(KINDS) == FILES
    guide = (ROOT / "docs" / "launch-kubernetes.md").read_text()
    for name, kinds in KINDS.items():
        assert [*manifests(name)] == kinds
        assert f"examples/kubernetes/{name}.yaml" in guide


@pytest.mark.parametrize("name", FILES)
def test_fields_of_a_manifest_exist(name):
    for manifest in manifests(name).values():
        assert problems(manifest) == []
        assert re.fullmatch("[a-z]([-a-z0-9]*[a-z0-9])?", manifest["metadata"]["name"])


@pytest.mark.parametrize(
    ("name", "kind", "template"),
    [
        ("job", "Job", "spec.template"),
        ("jobset", "JobSet", "spec.replicatedJobs[0].template.spec.template"),
        ("mpijob", "MPIJob", "spec.mpiReplicaSpecs.Worker.template"),
        ("pytorchjob", "PyTorchJob", "spec.pytorchReplicaSpecs.Master.template"),
        ("rayjob", "RayJob", "spec.rayClusterSpec.workerGroupSpecs[0].template"),
    ],
)
def test_mistakes_in_the_pods_of_a_manifest_are_found(name, kind, template):
    manifest = manifests(name)[kind]
    node = manifest
    for step in re.findall(r"\w+", template):
        node = node[int(step) if step.isdecimal() else step]
    pod = node["spec"]
    pod["volume"] = pod.pop("volumes", [])
    pod["restartPolicy"] = "Sometimes"
    pod["containers"][0]["env"] = [{"name": "A", "value": 4}]
    del pod["containers"][0]["name"]
    assert problems(manifest) == [
        f"$.{template}.spec.containers[0].env[0].value: 4 is not of type 'string'",
        f"$.{template}.spec.containers[0]: 'name' is a required property",
        f"$.{template}.spec.restartPolicy: 'Sometimes' is not one of ['Always', 'OnFailure', 'Never']",
        f"$.{template}.spec: Additional properties are not allowed ('volume' was unexpected)",
    ]


@pytest.mark.parametrize(("name", "kind"), [("mpijob", "MPIJob"), ("trainjob", "TrainJob")])
def test_mistakes_in_the_fields_of_an_operator_are_found(name, kind):
    manifest = manifests(name)[kind]
    spec = manifest["spec"]
    spec["backoffLimits"] = spec["backoffPolicy"] = 1
    spec.pop("mpiReplicaSpecs" if kind == "MPIJob" else "runtimeRef")
    assert [each.partition(": ")[2] for each in problems(manifest)] == [
        f"'{'mpiReplicaSpecs' if kind == 'MPIJob' else 'runtimeRef'}' is a required property",
        "Additional properties are not allowed ('backoffLimits', 'backoffPolicy' were unexpected)",
    ]


def pods(node):
    """The pod specifications in a manifest."""
    if isinstance(node, dict):
        if "containers" in node:
            yield node
        node = [*node.values()]
    if isinstance(node, list):
        for each in node:
            yield from pods(each)


@pytest.mark.parametrize("name", FILES)
def test_manifest_says_what_to_change(name):
    text = (FOLDER / f"{name}.yaml").read_text()
    comment = re.match(r"(# .*\n)+", text)
    assert comment
    assert "# Change: image" in comment[0]
    assert "Launcher" not in text or "target sshd" in comment[0]


@pytest.mark.parametrize("name", FILES)
def test_pods_of_a_manifest_are_restricted(name):
    """They fulfil most of Kubernetes' standard "restricted": no root, no privileges, limits of memory."""
    found = manifests(name)
    specs = [each for manifest in found.values() for each in pods(manifest)]
    security = [(spec["securityContext"], spec["containers"]) for spec in specs]
    if name == "sparkapplication":
        spec = found["SparkApplication"]["spec"]
        roles = (spec["driver"], spec["executor"])
        security = [(role["podSecurityContext"], [role]) for role in roles]
    assert security
    for pod, containers in security:
        assert pod["runAsNonRoot"] is True
        assert pod["runAsUser"] == pod["runAsGroup"] == pod["fsGroup"] > 0
        for container in containers:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
            }
    images = {container["image"] for spec in specs for container in spec["containers"]}
    assert all(image.startswith("registry.example.org/horoplug-") for image in images)


@pytest.mark.parametrize("name", FILES)
def test_volumes_of_a_manifest_exist(name):
    """Each mount has its volume, each volume its mount, and each config map is in the file."""
    found = manifests(name)
    for spec in (each for manifest in found.values() for each in pods(manifest)):
        volumes = {volume["name"]: volume for volume in spec.get("volumes", ())}
        mounts = [m for c in spec["containers"] for m in c.get("volumeMounts", ())]
        assert {mount["name"] for mount in mounts} == set(volumes)
        for volume in volumes.values():
            if "configMap" in volume:
                assert volume["configMap"]["name"] == found["ConfigMap"]["metadata"]["name"]
            if "secret" in volume:  # only root and the pod's group may read it
                assert volume["secret"] == {"secretName": "horoplug", "defaultMode": 0o440}
        for container in spec["containers"]:
            variables = {entry["name"]: entry["value"] for entry in container.get("env", ())}
            paths = {mount["mountPath"] for mount in container.get("volumeMounts", ())}
            if file := variables.get("HOROPLUG_SECRET_FILE"):
                assert file.rpartition("/")[0] in paths
                assert file.endswith("/key")


def container(spec):
    (found,) = spec["template"]["spec"]["containers"]
    return found, {entry["name"]: entry["value"] for entry in found.get("env", ())}


def test_numbers_of_ranks_agree():
    job = manifests("job")["Job"]
    _, variables = container(job["spec"])
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == int(variables["WORLD_SIZE"])
    assert job["spec"]["backoffLimit"] % job["spec"]["completions"] == 0
    assert (
        variables["MASTER_ADDR"]
        == f"{job['metadata']['name']}-0.{manifests('job')['Service']['metadata']['name']}"
    )

    jobset = manifests("jobset")["JobSet"]
    (group,) = jobset["spec"]["replicatedJobs"]
    spec, name = group["template"]["spec"], jobset["metadata"]["name"]
    _, variables = container(spec)
    assert spec["completions"] == spec["parallelism"] == int(variables["WORLD_SIZE"])
    assert variables["MASTER_ADDR"] == f"{name}-{group['name']}-0-0.{name}"

    static = manifests("mpijob")["MPIJob"]["spec"]
    groups = static["mpiReplicaSpecs"]
    words = container(groups["Launcher"])[0]["command"]
    ranks = int(words[words.index("-np") + 1])
    assert ranks == groups["Worker"]["replicas"] * static["slotsPerWorker"]

    elastic = manifests("mpijob-elastic")["MPIJob"]["spec"]
    text = " ".join(container(elastic["mpiReplicaSpecs"]["Launcher"])[0]["command"])
    slots, workers = elastic["slotsPerWorker"], elastic["mpiReplicaSpecs"]["Worker"]["replicas"]
    assert f"--slots-per-host={slots} " in text
    assert f"--max-np={slots * workers} " in text
    assert "--host-discovery-script=/etc/mpi/discover_hosts.sh " in text


@pytest.mark.parametrize("name", ["mpijob", "mpijob-elastic"])
def test_ssh_settings_agree_with_the_image(name):
    """Port and folder of the keys are those of the image's sshd."""
    steps = (ROOT / "scripts" / "image-steps").read_text()
    spec = manifests(name)["MPIJob"]["spec"]
    worker, _ = container(spec["mpiReplicaSpecs"]["Worker"])
    assert f"Port {worker['readinessProbe']['tcpSocket']['port']}\n" in steps
    assert spec["sshAuthMountPath"] == "/home/horoplug/.ssh"
    assert "HostKey $home/.ssh/id_rsa\n" in steps
    assert "user=horoplug\n" in steps


def test_versions_of_ray_and_spark_are_those_that_the_tests_use():
    pinned = (ROOT / "requirements" / "clusters.txt").read_text()
    ray = manifests("rayjob")["RayJob"]["spec"]["rayClusterSpec"]["rayVersion"]
    spark = manifests("sparkapplication")["SparkApplication"]["spec"]["sparkVersion"]
    assert re.search(rf"^ray=={re.escape(ray)}$", pinned, re.M)
    assert re.search(rf"^pyspark=={re.escape(spark)}$", pinned, re.M)


def calls(source, name):
    """The keyword arguments, constants, of the only call of a function in a program."""
    (found,) = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == name
    ]
    return {
        word.arg: word.value.value
        for word in found.keywords
        if isinstance(word.value, ast.Constant)
    }


def test_ray_driver_fits_its_cluster():
    found = manifests("rayjob")
    cluster = found["RayJob"]["spec"]["rayClusterSpec"]
    (group,) = cluster["workerGroupSpecs"]
    given = calls(found["ConfigMap"]["data"]["driver.py"], "RayExecutor")
    assert given["num_hosts"] == group["replicas"] == group["minReplicas"] == group["maxReplicas"]
    cpus = container(group)[0]["resources"]["limits"]["cpu"]
    assert given["num_workers_per_host"] * given["cpus_per_worker"] == int(cpus)
    head, _ = container(cluster["headGroupSpec"])
    path = head["volumeMounts"][0]["mountPath"]
    assert found["RayJob"]["spec"]["entrypoint"] == f"python {path}/driver.py"


def test_spark_driver_fits_its_executors():
    found = manifests("sparkapplication")
    spec = found["SparkApplication"]["spec"]
    ranks = calls(found["ConfigMap"]["data"]["driver.py"], "horoplug.spark.run")["num_proc"]
    assert ranks == spec["executor"]["instances"] * spec["executor"]["cores"]
    (mounted,) = spec["driver"]["configMaps"]
    assert mounted["name"] == found["ConfigMap"]["metadata"]["name"]
    assert spec["mainApplicationFile"] == f"local://{mounted['path']}/driver.py"
    assert "barrier" in (FOLDER / "sparkapplication.yaml").read_text()
    assert spec["sparkConf"]["spark.dynamicAllocation.enabled"] == "false"


def test_manifests_start_the_program_of_the_image():
    steps = (ROOT / "scripts" / "image-steps").read_text()
    assert "/workspace/train.py\n" in steps
    for name in FILES:
        assert "/workspace/train.py" in (FOLDER / f"{name}.yaml").read_text()
    dockerfile = (ROOT / "Dockerfile").read_text()
    targets = re.findall(r"^FROM \S+ AS (\w+)$", dockerfile, re.M)
    assert targets == ["development", "wheel", "runtime", "sshd", "example"]
    # Without --target, the image for development is made.
    assert dockerfile.endswith("\nFROM development\n")
    for step in ("runtime", "sshd", "example"):
        assert f"/tmp/image-steps {step}" in dockerfile
        last = dockerfile.split(f"AS {step}\n")[1].split("FROM")[0]
        assert last.rstrip().endswith("USER 1000:1000")


def test_yaml_files_have_no_tabs_or_duplicates():
    class Strict(yaml.SafeLoader):
        def construct_mapping(self, node, deep=False):
            names = [self.construct_object(key) for key, _ in node.value]
            assert len(names) == len(set(names)), names
            return super().construct_mapping(node, deep)

    for name in FILES:
        [*yaml.load_all((FOLDER / f"{name}.yaml").read_text(), Strict)]
