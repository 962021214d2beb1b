"""Parsing of hosts, placement of ranks, and the start protocol between launcher and agents, without a process."""

import json
import random
import socket
import subprocess
import sys
import threading

import pytest

from horoplug.rendezvous.network.interfaces import interfaces, select_interfaces
from horoplug.runner.agent.agent import COMMAND, FINISH, GREETING
from horoplug.runner.agent.source import agent_source
from horoplug.runner.checks import UsageError
from horoplug.runner.command.arguments import parse
from horoplug.runner.forwarding import FORWARDED, forwarded, not_forwarded
from horoplug.runner.hosts.host_names import HostNames
from horoplug.runner.hosts.hosts import (
    Host,
    assign_ranks,
    is_this_host,
    local_and_cross_ranks,
    lookup,
    parse_hostfile,
    parse_hosts,
)
from horoplug.runner.network.preflight import PATIENCE, Elastic, Preflight, StartError
from horoplug.runner.start.ssh import BOOTSTRAP, END_OF_SOURCE, Ssh
from tests.harness import ROOT
from tests.harness.limits import scaled
from tests.harness.support import seed

# ---- hosts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a", [("a", 1)]),
        ("a:2,b", [("a", 2), ("b", 1)]),
        (" a:2 , b:1 ", [("a", 2), ("b", 1)]),
        ("a:1,b:2,a:3", [("a", 4), ("b", 2)]),
        ("user@node-1.cluster:4", [("user@node-1.cluster", 4)]),
        ("10.0.0.1:2,[fd00::1]:3,[::1]", [("10.0.0.1", 2), ("fd00::1", 3), ("::1", 1)]),
        ("u@[fe80::1%eth0]:2", [("u@fe80::1%eth0", 2)]),
        ("a_b.:1,n\u00f6de:2", [("a_b.", 1), ("n\u00f6de", 2)]),
    ],
)
def test_host_argument_is_parsed(text, expected):
    assert parse_hosts(text) == expected


MALFORMED = [
    *("", ",", "a,,b", "a,", "a b", "a\nb", "a\tb:1", "fd00::1"),
    *("a:", ":2", "a:0", "a:-1", "a:+1", "a:two", "a:1.5", "a:22:4", "a:\u0663", "a:" + "9" * 5000),
    *("[a", "[a]:1", "[]", "[1.2.3.4]:1", "[fd00::1]2", "a]"),
    *("-oX=y:1", "u@-oX=y", "-u@a", "@a", "u@", "a@b@c"),
    *("a;b", "a$b", "a/b", "a|b", "a'b", "..", "a..b", ".a", "a\0b", "\udcff"),
]


@pytest.mark.parametrize("text", MALFORMED, ids=lambda text: ascii(text[:20]))
def test_invalid_host_arguments_are_refused(text):
    """In one line, also with a list that is too long for one."""
    for whole in (text, f"h1:1,{text}"):
        with pytest.raises(
            UsageError, match=r"\A-H wants host:slots,host:slots, for .*\Z"
        ) as caught:
            parse_hosts(whole)
        assert len(str(caught.value)) < 500


def test_hostfile_is_parsed(tmp_path):
    file = tmp_path / "hosts"
    file.write_text(
        "\ufeff# a comment\n\nnode1 slots=4 max_slots = 8  # another\n"
        "  node2:2\nnode3\nnode1 slots =1\n[fd00::1] slots= 2\n"
    )
    assert parse_hostfile(str(file)) == [
        ("node1", 5),
        ("node2", 2),
        ("node3", 1),
        ("fd00::1", 2),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a slots=0\n", "line 1: a line like host slots=4 is wanted, not 'a slots=0'"),
        ("a\nb slots\n", "line 2: "),
        ("a slots = \n", "line 1: a line like host slots=4 is wanted, not 'a slots ='"),
        ("a slots = 2 3\n", "line 1: "),
        ("a:2:3\n", "line 1: "),
        ("a slots=2 b\n", "line 1: "),
        ("a slots=" + 5000 * "9", "line 1: "),
        ("a;b slots=2\n", "line 1: "),
        ("# nothing\n", "there are no hosts in"),
        ("\0\udcff", "it is not a text file"),
    ],
)
def test_invalid_hostfiles_are_refused(tmp_path, text, message):
    file = tmp_path / "hosts"
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(UsageError, match=message):
        parse_hostfile(str(file))


def test_names_of_this_host_are_recognised():
    own = socket.gethostname()
    for name in ("localhost", "127.0.0.1", "127.9.9.9", "::1", own, own.upper()):
        assert is_this_host(name), name
    for one in interfaces():
        assert is_this_host(one.address), one
    for name in ("root@localhost", "nonesuch.invalid", "192.0.2.77"):
        assert not is_this_host(name), name


def test_host_names_are_resolved_in_parallel_with_a_limit(monkeypatch):
    def answer(name, *_, **__):
        if name == "slow":
            over.wait(scaled(60))
        if name == "unknown":
            raise socket.gaierror
        return [(0, 0, 0, "", ("192.0.2.1", 0))]

    over = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", answer)
    found = lookup(["slow", "unknown", "user@a", "a", "a"], seconds=0.5)
    over.set()
    assert found == {"slow": [], "unknown": [], "user@a": ["192.0.2.1"], "a": ["192.0.2.1"]}


def test_ranks_are_placed_on_hosts_in_order():
    placed = assign_ranks(parse_hosts("a.invalid:2,localhost:1,b.invalid:3,127.0.0.1:1"), 6)
    assert [(one.name, one.is_local, one.ranks) for one in placed] == [
        ("a.invalid", False, (0, 1)),
        ("localhost", True, (2, 3)),
        ("b.invalid", False, (4, 5)),
    ]
    assert [one.name for one in assign_ranks([Host("a.invalid", 2), Host("b.invalid", 2)], 2)] == [
        "a.invalid"
    ]
    with pytest.raises(
        UsageError,
        match=r"^-np 4 is more than a.invalid:2,b.invalid:1 has: 3 slots; give fewer, or name more",
    ):
        assign_ranks(parse_hosts("a.invalid:2,b.invalid"), 4)


def test_names_that_differ_in_spelling_only_are_one_host(tmp_path):
    file = tmp_path / "hosts"
    file.write_text("Node-1.invalid slots=2\nuser@node-1.invalid\nnode-1.INVALID.:3\n")
    merged = [("Node-1.invalid", 5), ("user@node-1.invalid", 1)]
    assert parse_hostfile(str(file)) == merged
    assert parse_hosts("Node-1.invalid:2,user@node-1.invalid,node-1.INVALID.:3") == merged
    placed = assign_ranks([Host("2001:db8::7", 1), Host("2001:DB8:0:0::7", 2)], 3)
    assert [(one.name, one.ranks) for one in placed] == [("2001:db8::7", (0, 1, 2))]


def test_a_machine_keeps_its_name_while_its_names_come_and_go():
    """Each case: the names that are found, where each leads, and the hosts of the job."""
    machines = {}
    names = HostNames(lambda wanted: {name: machines[name] for name in wanted})
    for found, led, expected in (
        ({"a": 1, "b": 2, "c": 4}, {"a": 1, "b": 1, "c": 2}, {"a": 3, "c": 4}),
        ({"b": 2, "c": 4}, {"b": 1, "c": 2}, {"a": 2, "c": 4}),
        ({"c": 4, "b": 2, "a": 1}, {"a": 1, "b": 1, "c": 2}, {"c": 4, "a": 3}),
        ({"b": 2, "a": 8}, {"a": 3, "b": 1}, {"b": 2, "a": 8}),  # a is another machine now
        ({"b": 2, "a": 8}, {"a": 3, "b": None}, {"a": 8}),
        ({}, {}, {}),
        ({"c": 3}, {"c": 2}, {"c": 3}),
    ):
        machines.update(led)
        assert names.merge(found.items()) == expected, (found, led)


def test_rank_numbers_of_each_host():
    placed = assign_ranks(parse_hosts("a.invalid:1,b.invalid:3,c.invalid:2"), 6)
    found = local_and_cross_ranks(placed)
    names = ("LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
    assert [tuple(int(found[rank][name]) for name in names) for rank in range(6)] == [
        (0, 1, 0, 3),
        *((0, 3, 1, 3), (1, 3, 0, 2), (2, 3, 0, 1)),
        *((0, 2, 2, 3), (1, 2, 1, 2)),
    ]


# ---- interfaces, environment, ssh ------------------------------------------------------------------------------------


def test_common_network_interfaces_are_chosen():
    known = interfaces()
    assert ("lo", "127.0.0.1", True) in known
    assert {one.name for one in known} <= {name for _, name in socket.if_nameindex()}
    assert not any(one.address.startswith("fe80") for one in known)
    assert select_interfaces(["nonesuch0", "lo"])[0].address == "127.0.0.1"
    with pytest.raises(
        ValueError, match=r"no network interface x or y with an address .there are .*lo"
    ):
        select_interfaces(["x", "y"])


STAYS = ["HOME", "USER", "SSH_AUTH_SOCK", "BASH_FUNC_f%%", "OLDPWD", "CUDA_VISIBLE_DEVICES"]
"""Wrong on another host."""
SECRETS = [
    "WANDB_API_KEY",
    "HF_TOKEN",
    "AWS_SECRET_ACCESS_KEY",
    "TF_TOKEN_app_terraform_io",
    "MY_HOME",
]
GOES = [
    "PATH",
    "PYTHONPATH",
    "PYTHONHASHSEED",
    "LD_LIBRARY_PATH",
    "VIRTUAL_ENV",
    "HOROVOD_LOG_LEVEL",
    "HOROPLUG_NUM_STREAMS",
    "LC_ALL",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "NCCL_SOCKET_IFNAME",
    "TF_CPP_MIN_LOG_LEVEL",
    "XLA_FLAGS",
    "JAX_PLATFORMS",
    "TORCH_HOME",
    "TORCHINDUCTOR_CACHE_DIR",
    "PYTORCH_CUDA_ALLOC_CONF",
    "UCX_TLS",
    "OMPI_MCA_btl",
    "KERAS_BACKEND",
]


def environment(*names):
    return dict.fromkeys(names, "x")


def test_listed_variables_are_forwarded_and_no_others():
    env = environment(*STAYS, *SECRETS, *GOES)
    assert set(forwarded(env)) == set(GOES)
    assert not_forwarded(env) == sorted(SECRETS)


def test_user_names_further_variables_to_forward():
    env = environment(*STAYS, *SECRETS, *GOES)
    assert set(forwarded(env, ["HF_TOKEN, MY_*", "AWS_*"])) == {
        *(*GOES, "HF_TOKEN", "MY_HOME", "AWS_SECRET_ACCESS_KEY")
    }
    # A name is meant; a pattern does not reach what is wrong on another host.
    assert {"CUDA_VISIBLE_DEVICES", "TF_TOKEN_app_terraform_io"} <= forwarded(
        env, ["CUDA_VISIBLE_DEVICES", "TF_TOKEN_app_terraform_io"]
    ).keys()
    assert set(forwarded(env, ["*"])) == {*GOES, *SECRETS}
    assert not_forwarded(env, ["*"]) == []
    by_variable = env | {"HOROPLUG_FORWARD": "HF_TOKEN"}
    assert set(forwarded(by_variable)) == {*GOES, "HF_TOKEN", "HOROPLUG_FORWARD"}


def test_user_excludes_variables_from_forwarding():
    env = environment(*GOES, "MY_HOME") | {"HOROPLUG_FORWARD_EXCEPT": "PATH, TF_*"}
    goes = {*GOES, "HOROPLUG_FORWARD_EXCEPT"} - {"PATH", "TF_CPP_MIN_LOG_LEVEL"}
    assert set(forwarded(env)) == goes
    assert set(forwarded(env, ["PATH", "TF_*"])) == goes | {"PATH"}


def test_guide_lists_the_forwarded_variables():
    page = (ROOT / "docs" / "launch-ssh.md").read_text()
    for family in FORWARDED:
        assert f"| {family.purpose} |" in page
        assert all(f"`{pattern}`" in page for pattern in family.patterns), family


@pytest.mark.parametrize("wrong", ["HF_TOKEN=secret", "A,,B", "", "a b"])
def test_invalid_name_to_forward_is_refused(wrong):
    with pytest.raises(UsageError, match="names of variables are wanted") as caught:
        parse(["-np", "1", "-x", wrong, "true"])
    assert "secret" not in str(caught.value)


def test_ssh_command():
    ssh = Ssh(("ssh", "-v"), 2222, "/a key", "/a python")
    command = ssh.command("user@node", 7.9)
    assert command[:2] == ["ssh", "-v"]
    for option in ("BatchMode=yes", "ConnectTimeout=7", "StrictHostKeyChecking=accept-new"):
        assert command[command.index(option) - 1] == "-o"
    assert command[command.index("-p") + 1] == "2222"
    assert command[command.index("-i") + 1] == "/a key"
    assert command[-3:-1] == ["--", "user@node"]
    assert command[-1].startswith("exec '/a python' -I -S ")
    assert "StrictHostKeyChecking=yes" in Ssh(strict=True).command("node", 5)


def test_agent_source_can_be_sent_to_a_host():
    """The source ends with the call that starts the agent, has no zero byte, which marks its end, and needs nothing of
    the other host but Python."""
    source = agent_source()
    assert b"\0" not in source
    *_, last = source.splitlines()
    assert b"guarded(" in last
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", BOOTSTRAP],
        input=source + END_OF_SOURCE + COMMAND.pack(FINISH, 0),
        capture_output=True,
        cwd="/",
        timeout=scaled(60),
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.startswith(GREETING)


# ---- preflight -------------------------------------------------------------------------------------------------------


class Talk:
    """A preflight of hosts a, b and c whose probes the test imitates."""

    def __init__(self, candidates=2, hosts="abc", elastic=None):
        addresses = [(f"10.0.{i}.1", 1000 + i) for i in range(candidates)]
        self.preflight = Preflight(dict(enumerate(hosts)), addresses, "1.0", elastic=elastic)
        self.sent = []

    def say(self, host, now=0.0, **message):
        for target, line in self.preflight.feed(host, message, now):
            self.sent.append((target, json.loads(line)))

    def hello(self, host, **more):
        self.say(host, hello={"version": "1.0"} | more)

    def tried(self, host, number, own=None, reason=None, now=0.0):
        self.say(host, now, launcher={"number": number, "own": own, "reason": reason})

    def peer(self, host, number, own=None, reason=None):
        self.say(host, peer={"number": number, "own": own, "reason": reason})


def test_agents_start_and_report_their_addresses():
    talk = Talk()
    for host in range(3):
        talk.hello(host)
        talk.tried(host, 0, own=f"10.0.0.{host + 2}")
    assert talk.preflight.server == 0
    assert talk.sent == [(host, {"listen": f"10.0.0.{host + 2}"}) for host in range(3)]
    talk.sent.clear()
    for host in range(3):
        assert not talk.sent
        talk.say(host, listening=50 + host)
    everyone = [[host, f"10.0.0.{host + 2}", 50 + host] for host in range(3)]
    assert talk.sent == [(host, {"peers": everyone[:host]}) for host in range(3)]
    talk.peer(1, 0, own="10.0.0.3")
    talk.peer(2, 1, own="10.0.0.4")
    assert not talk.preflight.done
    assert talk.preflight.waiting_for() == "no answer from c"
    talk.peer(2, 0, own="10.0.0.4")
    assert talk.preflight.done


def test_first_address_is_preferred_for_a_short_time():
    talk = Talk(hosts="ab")
    for host in range(2):
        talk.hello(host)
        talk.tried(host, 1, own=f"10.0.1.{host + 2}", now=5.0)
    assert talk.preflight.server is None
    assert talk.preflight.due == 5.0 + PATIENCE
    talk.preflight.advance(5.0 + PATIENCE)
    assert talk.preflight.server == 1
    talk = Talk(hosts="ab")
    talk.tried(0, 0, reason="no answer")
    for host in range(2):
        talk.tried(host, 1, own=f"10.0.1.{host + 2}")
    assert talk.preflight.server == 1  # the first address is excluded


def test_prescribed_interfaces():
    talk = Talk(hosts="ab")
    talk.hello(0, interface="ib0", address="10.9.0.1")
    talk.hello(1, interface="ib1", address="10.9.0.2")
    for host in range(2):
        talk.tried(host, 0, own=f"10.0.0.{host + 2}")
    assert [talk.preflight.interface(host) for host in range(2)] == ["ib0", "ib1"]
    assert talk.sent == [(host, {"listen": f"10.9.0.{host + 1}"}) for host in range(2)]


@pytest.mark.parametrize(
    ("play", "message"),
    [
        (lambda t: t.hello(1, version="2.0"), "^b has horoplug 2.0, and this host 1.0"),
        (lambda t: t.hello(2, error="there is no x"), "^c: there is no x$"),
        (lambda t: t.say(0, failed="cannot listen"), "^a cannot listen$"),
        (
            lambda t: [t.tried(h, n, reason="refused") for n in range(2) for h in range(3)],
            r"^a does not reach this host at any .*: 10.0.0.1 \(refused\), 10.0.1.1 \(refused\); let f",
        ),
        (
            lambda t: [
                t.tried(h, n, **({"own": "x"} if n == h % 2 else {"reason": "refused"}))
                for n in range(2)
                for h in range(3)
            ],
            "^no address .* a reaches it at 10.0.0.1; b reaches it at 10.0.1.1; c reaches it at 10.0.0.1;",
        ),
        (lambda t: t.peer(2, 1, reason="refused"), "^c does not reach b at None: refused; let"),
    ],
    ids=["version", "interface", "listen", "none", "no common", "peer"],
)
def test_impossible_starts_are_refused(play, message):
    talk = Talk()
    with pytest.raises(StartError, match=message):
        play(talk)


def test_late_hosts_are_named():
    talk = Talk()
    talk.hello(1)
    assert talk.preflight.waiting_for() == "no answer from a, c"
    talk.hello(0)
    talk.hello(2)
    for host in (0, 2):
        for number in range(2):
            talk.tried(host, number, own="x")
    assert talk.preflight.waiting_for() == "no answer from b"


# ---- preflight of an elastic job -------------------------------------------------------------------------------------

HINT = "let firewalls pass TCP between the hosts, or choose a network with --network-interface"


def meet(talk, hosts):
    """Let hosts reach the launcher at its first address, and listen."""
    for host in hosts:
        talk.hello(host)
        talk.tried(host, 0, own=f"10.0.0.{host + 2}")
    for host in hosts:
        talk.say(host, listening=50 + host)


def test_hosts_of_an_elastic_job_reach_each_other_in_both_directions():
    talk = Talk(candidates=1, elastic=Elastic())
    meet(talk, range(3))
    peers = {host: {each[0] for each in m["peers"]} for host, m in talk.sent if "peers" in m}
    assert peers == {0: {1, 2}, 1: {0, 2}, 2: {0, 1}}
    for host in range(3):
        for other in {0, 1, 2} - {host}:
            assert not talk.preflight.done
            talk.peer(host, other, own="x")
    assert talk.preflight.done
    assert talk.preflight.failed == {}


@pytest.mark.parametrize(
    ("play", "why"),
    [
        (
            lambda t: t.hello(2, version="2.0"),
            "it has horoplug 2.0, and this host 1.0: all hosts need the same version",
        ),
        (lambda t: t.hello(2, error="there is no x"), "there is no x"),
        (lambda t: t.say(2, failed="cannot listen on x"), "it cannot listen on x"),
        (
            lambda t: [t.tried(2, number, reason="refused") for number in range(2)],
            "it does not reach this host at any of its addresses: 10.0.0.1 (refused), 10.0.1.1 (refused); "
            + HINT,
        ),
        (
            lambda t: [
                t.tried(h, n, **({"own": "x"} if n == (h == 2) else {"reason": "refused"}))
                for n in range(2)
                for h in range(3)
            ],
            f"it reaches this host at 10.0.1.1, and others at 10.0.0.1; {HINT}",
        ),
    ],
    ids=["version", "interface", "listen", "none", "no common"],
)
def test_host_that_an_elastic_job_cannot_use_is_left_out(play, why):
    """The others pass."""
    talk = Talk(elastic=Elastic())
    play(talk)
    assert talk.preflight.failed == {2: why}
    meet(talk, range(2))
    talk.peer(0, 1, own="x")
    talk.peer(1, 0, own="x")
    talk.say(2, listening=7)  # late
    assert talk.preflight.done
    assert set(talk.preflight.hosts) == {0, 1}


def test_later_host_of_an_elastic_job_has_to_reach_the_members_and_the_chosen_address():
    elastic = Elastic(members={0, 1}, server=1)
    for missing in (0, 1):
        talk = Talk(elastic=elastic)
        for host in range(3):
            talk.hello(host)
            talk.tried(host, 1, own="x")
        assert talk.preflight.server == 1
        for host in range(3):
            talk.say(host, listening=50 + host)
        for host in range(3):
            for other in {0, 1} if host == 2 else {2}:
                is_missing = {host, other} == {2, missing}
                talk.peer(host, other, **({"reason": "refused"} if is_missing else {"own": "x"}))
        name = "ab"[missing]
        # With both directions broken, the text is about the first report.
        assert talk.preflight.failed == {
            2: f"it is not reached: {name} does not reach c at x: refused; {HINT}"
        }
    talk = Talk(elastic=elastic)
    talk.tried(2, 0, own="x")
    talk.tried(2, 1, reason="refused")
    assert list(talk.preflight.failed) == [2]


def test_members_of_an_elastic_job_need_not_reach_each_other_again():
    """They have done so, and a firewall since then does not break their connections."""
    talk = Talk(candidates=1, elastic=Elastic(members={0, 1}, server=0))
    meet(talk, range(3))
    peers = {host: {each[0] for each in m["peers"]} for host, m in talk.sent if "peers" in m}
    assert peers == {0: {2}, 1: {2}, 2: {0, 1}}
    for host, others in peers.items():
        for other in others:
            assert not talk.preflight.done
            talk.peer(host, other, own="x")
    assert talk.preflight.done
    assert talk.preflight.failed == {}


def test_hosts_that_do_not_answer_are_left_out_of_an_elastic_job():
    """In each phase: a lost one is not waited for, and one that is late fails."""
    for phase in range(3):
        talk = Talk(candidates=1, hosts="abcd", elastic=Elastic(members={0}))
        for host in range(4 if phase > 0 else 2):
            talk.hello(host)
            talk.tried(host, 0, own="x")
        for host in range(4 if phase > 1 else 2):
            talk.say(host, listening=50 + host)
        assert talk.preflight.phase == phase
        for host in (0, 1) if phase > 1 else ():
            for other in {0, 1, 2, 3} - {host}:
                talk.peer(host, other, **({"own": "x"} if other < 2 else {"reason": "no answer"}))
        talk.preflight.drop(3)
        talk.preflight.fail_late(5.0)
        assert talk.preflight.failed == {2: "no answer within 5 s"}
        for target, line in talk.preflight.advance(0.0):
            talk.sent.append((target, json.loads(line)))
        meet(talk, range(2))
        talk.peer(0, 1, own="x")
        talk.peer(1, 0, own="x")
        assert talk.preflight.done


def test_hosts_that_pass_reach_each_other_whatever_the_network_is():
    """Random connections work, in random order. Members are not left out, and no host is that reaches all others."""
    rng = random.Random(seed())
    for _ in range(100):
        check_random_network(rng)


def check_random_network(rng):
    size = rng.randint(2, 7)
    members = set(range(rng.randint(0, size - 1)))
    talk = Talk(candidates=1, hosts="abcdefg"[:size], elastic=Elastic(members))
    meet(talk, rng.sample(range(size), size))
    share = rng.random() * 0.5
    peers = {host: [each[0] for each in m["peers"]] for host, m in talk.sent if "peers" in m}
    pairs = [(host, other) for host, others in peers.items() for other in others]
    broken = {pair for pair in pairs if rng.random() < share}
    for pair in rng.sample(pairs, len(pairs)):
        talk.peer(*pair, **({"reason": "refused"} if pair in broken else {"own": "x"}))
    passed = set(talk.preflight.hosts)
    assert talk.preflight.done
    assert passed >= members
    assert not [pair for pair in broken if passed >= set(pair)]
    assert passed | talk.preflight.failed.keys() == set(range(size))
    involved = {host for pair in broken for host in pair}
    assert talk.preflight.failed.keys() <= involved
    assert all("\n" not in why and HINT in why for why in talk.preflight.failed.values())
