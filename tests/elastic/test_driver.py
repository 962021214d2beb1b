"""The launcher's part of an elastic job, without processes: messages that come late, twice, or from processes that have
ended."""

import json
import random
import types

import pytest

import horoplug
from horoplug.rendezvous.elastic.messages import (
    Checks,
    Leaving,
    Mismatch,
    Pace,
    Ready,
    pack_message,
)
from horoplug.runner.elastic import driver as driver_module
from horoplug.runner.elastic.driver import ElasticDriver
from horoplug.runner.elastic.roster import Limits
from horoplug.runner.elastic.stragglers import WINDOWS, Pacing
from horoplug.runner.terms import Terms
from tests.harness.support import seed

VERSION = horoplug.__version__  # which takes a while
WINDOW = 1.0  # seconds


class Job:
    """A driver, whose clock stands still until the test lets time pass. It starts and kills nothing."""

    def __init__(self, monkeypatch, slots, *, factor=2.0, replaced=0.0, **limits):
        self.now = 1000.0
        clock = types.SimpleNamespace(monotonic=lambda: self.now, time=lambda: self.now)
        monkeypatch.setattr(driver_module, "time", clock)
        self.live, self.dead, self.said, self.outcome = {}, set(), [], None
        self.kept = {}  # the keys of the store
        self.attempts = {}
        limits = {"minimum": 1, "maximum": 4, "gather": 5.0, "start": 5.0, "wait": 1e6} | limits
        pacing = Pacing(factor, WINDOW, replaced)
        self.driver = ElasticDriver(
            self, Limits(**limits), slots, pacing=pacing, cooldown_range=(1, 2)
        )
        self.driver._hosts._clock = lambda: self.now
        self.driver.listen(self)
        self.driver.begin()
        self.advance()

    # ---- of the store's server

    def watch(self, prefix, callback):
        pass

    def mark_lost(self, process, text):
        pass

    def set(self, key, value):
        self.kept[key] = json.loads(value)

    # ---- of the workers

    def start(self, start):
        assert start.process not in self.live
        self.live[start.process] = start

    def kill(self, process):
        assert process in self.live
        self.end(process)

    def hosts_changed(self):
        pass

    def finish(self):
        self.outcome = 0

    def fail(self, finish):
        self.outcome = finish

    def say(self, text):
        assert "\n" not in text
        self.said.append(text)

    # ---- what happens

    @property
    def generation(self):
        return self.driver._roster._generation

    def advance(self, seconds=0.0):
        self.now += seconds
        while self.driver.advance():
            pass

    def send(self, message):
        self.driver.inbox.put(pack_message(message))
        self.driver.handle_events()
        self.advance()

    def ready(self, *numbers, **state):
        for number in numbers:
            attempt = self.attempts[number] = self.attempts.get(number, 0) + 1
            self.send(Ready(number, attempt, VERSION, 1, **state))

    def end(self, number, code=-9):
        self.dead.add(number)
        del self.live[number]
        self.driver.ended(number, code, "was killed by signal 9 (SIGKILL)")

    def pace(self, number, elapsed, active):
        self.send(Pace(number, self.generation, float(elapsed), float(active)))


@pytest.mark.parametrize("replaced", [0.0, 1.5])
@pytest.mark.parametrize("how", ["has ended", "is dismissed"])
def test_pace_that_completes_a_window_in_which_a_process_was_slow_that_is_no_member_any_more(
    monkeypatch, how, replaced
):
    job = Job(monkeypatch, {"a": 3, "b": 3}, replaced=replaced, maximum=3)
    job.ready(0, 1, 2)
    for window in range(1, WINDOWS + 1):
        job.pace(1, 1.1 * window, 0.0)  # it computes all the time
        if window == WINDOWS and how == "has ended":
            job.end(1)
            job.advance()
        elif window == WINDOWS:
            job.end(2)
            job.ready(0)
            job.driver._roster._live[1].dismissed = True
        job.pace(0, 1.1 * window, window)
        job.pace(2, 1.1 * window, window)
    assert not any("is slow" in line or "is replaced" in line for line in job.said)


def test_checks_of_an_earlier_round_or_generation_do_not_count(monkeypatch):
    job = Job(monkeypatch, {"a": 2}, maximum=2)
    job.ready(0)
    job.advance(5.0)
    job.ready(1)
    assert job.kept["elastic/update/1/0"]["change"]
    for late in (Checks(0, 0, 0, 7), Checks(0, 1, 1, 8), Checks(1, 1, 0, 9), Checks(77, 1, 0, 9)):
        job.send(late)
    assert "elastic/stop/1/0" not in job.kept
    job.send(Checks(0, 1, 0, 4))
    assert job.kept["elastic/stop/1/0"] == 5
    job.send(Checks(0, 1, 0, 40))
    assert job.kept["elastic/stop/1/0"] == 5


def test_messages_of_any_process_at_any_time_neither_end_the_job_nor_keep_it_from_its_full_size(
    monkeypatch,
):
    """Each kind of message, about starting processes, members, dead, dismissed and unknown ones, and about other
    memberships; ends of processes and hosts that are reported twice; and bytes that are no message."""
    first = seed()
    for number in range(first, first + 60):
        print(f"job {number}")
        _random_job(monkeypatch, random.Random(number))


def _random_job(monkeypatch, draw):
    replaced = draw.choice([0.0, 2.0])
    job = Job(monkeypatch, {"a": 2, "b": 2}, replaced=replaced, maximum=4, hosts_may_come=True)
    told = set()  # to leave: the job replaces them
    for _ in range(60):
        number = draw.choice([*job.live, *job.dead, 77])
        generation = max(0, job.generation - draw.randrange(2))
        match draw.randrange(11):
            case 0:
                job.send(Leaving(number))
                told.add(number)
            case 1:
                job.send(Mismatch(number, "its state is another one"))
            case 2:
                round_number = draw.randrange(3)
                job.send(Checks(number, generation, round_number, draw.randrange(5)))
            case 3 | 4 | 9 | 10:
                for each in [number, *job.driver.members]:
                    elapsed = job.now - draw.choice([0, 0, 0, 2])
                    active = 0.0 if each in job.driver.members[-1:] else elapsed
                    job.send(Pace(each, generation, elapsed, active))
            case 5:
                attempt = draw.randrange(job.attempts.get(number, 0) + 1)  # an earlier one
                job.send(Ready(number, attempt, VERSION, 0, kept=True))
            case 6:
                job.driver.inbox.put(draw.choice([b"", b"[]", b'["Ready",{}]', b'["Pace",7]']))
                job.driver.handle_events()
            case 7:
                if number in job.live and draw.random() < 0.5:
                    job.end(number)
                else:
                    job.driver.ended(number, 1, "exited with code 1")
                    job.live.pop(number, None)
                    job.dead.add(number)
            case 8:
                host = draw.choice(["a", "b", "c"])
                job.dead |= {each for each, start in job.live.items() if start.host == host}
                job.live = {each: start for each, start in job.live.items() if start.host != host}
                job.driver.host_lost(host, "the connection was lost")
        job.advance(draw.uniform(0, 3))
        assert job.outcome is None or "times in a row" in job.outcome.text(Terms())
        if job.outcome is not None:
            return
        if draw.random() < 0.4:
            job.ready(*job.live)
    _settle(job)
    assert len(job.driver.members) == 4
    assert set(job.driver.members) <= job.live.keys()


def _settle(job):
    """Let excluded hosts come back, and all processes do what they are told."""
    for _ in range(30):
        job.advance(1.0)
        for number in list(job.live):
            attempt = job.attempts.get(number, 0)
            answer = job.kept.get(f"elastic/answer/{number}/{attempt}", {})
            if "leave" in answer or "error" in answer:
                job.end(number, 0 if "leave" in answer else 1)
        job.advance()
        if len(job.live) == 4 and set(job.driver.members) == job.live.keys():
            return
        job.ready(*sorted(job.live, reverse=True))  # newcomers before the members, who then stop
