"""Hints that wait: nothing unused is ever committed, nothing is forgotten, nobody gets more than a turn and a cap."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from uuid import UUID

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from app.claim.kafka.buffer import HintBuffer
from app.claim.load import TenantLoad
from app.domain.ids import RunId, TenantId
from app.domain.run import RunRef

START = datetime(2026, 1, 1, tzinfo=UTC)
SECOND = timedelta(seconds=1)
ENDLESS = START + timedelta(days=365)
CAP = 3
CAPACITY = 12


def tenant(number: int) -> TenantId:
    return TenantId(UUID(int=number))


def hint(number: int, *, of: int = 1, due: float = 0) -> RunRef:
    """Hint `number` of a tenant, due so many seconds after the start."""
    return RunRef(RunId(UUID(int=number)), tenant(of), START, START + timedelta(seconds=due))


def a_load(*, slots: int = 1000, cap: int = 1000) -> TenantLoad:
    return TenantLoad(slots=slots, cap=cap)


def filled(refs: Iterable[RunRef], *, capacity: int = 1000) -> HintBuffer:
    """All on partition 0, from offset 0 on."""
    buffer = HintBuffer(capacity)
    for offset, ref in enumerate(refs):
        buffer.add(ref, partition=0, offset=offset)
    return buffer


def test_only_due_hints_are_taken_and_the_oldest_first() -> None:
    late, early, now = hint(1, due=3), hint(2, due=1), hint(3, due=2)
    buffer = filled([late, early, now])
    assert buffer.take(START, 10, a_load()) == []
    assert buffer.next_due_at() == early.fire_after
    assert buffer.take(now.fire_after, 10, a_load()) == [early, now]
    assert buffer.take(late.fire_after, 10, a_load()) == [late]
    assert buffer.next_due_at() is None


def test_a_hint_that_waits_for_its_time_keeps_its_partition_uncommitted() -> None:
    soon, later = hint(1, due=1), hint(2, due=9)
    buffer = filled([later, soon, later])
    buffer.used(buffer.take(soon.fire_after, 10, a_load()))
    assert buffer.committable() == {0: 0}
    buffer.used(buffer.take(later.fire_after, 10, a_load()))
    assert buffer.committable() == {0: 3}


def test_a_taken_hint_is_not_used_yet() -> None:
    buffer = filled([hint(1)])
    taken = buffer.take(START, 10, a_load())
    assert buffer.committable() == {0: 0}
    assert len(buffer) == 1
    buffer.put_back(taken)
    assert buffer.take(START, 10, a_load()) == taken
    buffer.used(taken)
    assert buffer.committable() == {0: 1}
    assert len(buffer) == 0


def test_a_message_that_is_no_hint_holds_nothing_up() -> None:
    buffer = HintBuffer(10)
    for offset in range(3):
        buffer.passed_over(4, offset)
    assert buffer.committable() == {4: 3}


def test_tenants_are_served_in_turns() -> None:
    many = [hint(number, of=1) for number in range(6)]
    few = [hint(number, of=2) for number in range(10, 12)]
    one = [hint(20, of=3)]
    buffer = filled(many + few + one)
    assert [ref.tenant_id.int for ref in buffer.take(START, 6, a_load())] == [1, 2, 3, 1, 2, 1]
    assert [ref.tenant_id.int for ref in buffer.take(START, 6, a_load())] == [1, 1, 1]


def test_turns_go_on_where_they_stopped() -> None:
    buffer = filled([hint(10 * of + number, of=of) for number in range(4) for of in (1, 2, 3)])
    seen = [buffer.take(START, 1, a_load())[0].tenant_id.int for _ in range(12)]
    assert seen == [1, 2, 3] * 4


def test_a_tenant_at_its_cap_waits_and_the_others_do_not() -> None:
    load = a_load(cap=2)
    load.take(tenant(1))
    buffer = filled([hint(number, of=1) for number in range(4)] + [hint(9, of=2)])
    taken = buffer.take(START, 10, load)
    assert Counter(ref.tenant_id.int for ref in taken) == {1: 1, 2: 1}
    load.take(tenant(1))
    assert not buffer.has_ripe(START, load)
    assert buffer.take(START, 10, load) == []
    load.give(tenant(1))
    assert buffer.has_ripe(START, load)
    assert len(buffer.take(START, 10, load)) == 1


def test_a_hint_that_comes_twice_is_asked_for_once_and_frees_both_places() -> None:
    twice, other = hint(1), hint(2, due=5)
    buffer = filled([twice, other, twice])
    buffer.add(twice, partition=7, offset=40)
    assert len(buffer) == 4
    assert buffer.take(START, 10, a_load()) == [twice]
    buffer.used([twice])
    assert buffer.committable() == {0: 1, 7: 41}
    assert len(buffer) == 1


def test_a_hint_that_comes_again_while_it_is_asked_for_is_done_with_too() -> None:
    buffer = filled([hint(1)])
    taken = buffer.take(START, 10, a_load())
    buffer.add(hint(1), partition=0, offset=1)
    buffer.used(taken)
    assert buffer.take(START, 10, a_load()) == []
    assert buffer.committable() == {0: 2}


def test_false_hints_for_another_time_or_tenant_do_not_hide_the_true_one() -> None:
    true = hint(1, of=1, due=0)
    buffer = filled([hint(1, of=1, due=500), hint(1, of=2, due=0), true])
    assert set(buffer.take(START, 10, a_load())) == {true, hint(1, of=2, due=0)}


def test_a_partition_that_is_read_again_is_committed_from_where_it_is_read_now() -> None:
    first, second = hint(1, due=5), hint(2, due=5)
    buffer = filled([first, second])
    buffer.add(first, partition=0, offset=0)
    assert buffer.committable() == {0: 0}
    buffer.add(second, partition=0, offset=1)
    buffer.used(buffer.take(START + 5 * SECOND, 10, a_load()))
    assert buffer.committable() == {0: 2}


def test_hints_of_a_topic_that_is_gone_do_not_commit_those_of_the_one_made_anew() -> None:
    gone, new = hint(1, due=0), hint(2, due=9)
    buffer = filled([gone, gone, gone])
    buffer.add(new, partition=0, offset=0)
    buffer.used(buffer.take(START, 10, a_load()))
    assert buffer.committable() == {0: 0}


def test_after_a_rebalance_what_was_received_before_is_not_committed_and_still_used() -> None:
    buffer = filled([hint(1)])
    buffer.forget_partitions()
    assert buffer.committable() == {}
    buffer.used(buffer.take(START, 10, a_load()))
    assert len(buffer) == 0
    assert buffer.committable() == {}


def test_it_is_full_at_its_capacity_and_not_any_more_when_hints_were_used() -> None:
    buffer = filled([hint(number) for number in range(3)], capacity=3)
    assert buffer.is_full
    buffer.used(buffer.take(START, 1, a_load()))
    assert not buffer.is_full


def test_one_hint_over_and_over_fills_it_too() -> None:
    assert filled([hint(1)] * 3, capacity=3).is_full


def test_old_hints_are_given_up_whether_they_were_looked_at_or_not() -> None:
    old, young, unseen = hint(1, due=1), hint(2, of=2, due=8), hint(3, of=3, due=2)
    buffer = filled([old, young])
    assert buffer.take(START + 9 * SECOND, 0, a_load()) == []
    buffer.add(unseen, partition=0, offset=2)
    assert buffer.drop_older(START + 5 * SECOND) == 2
    assert buffer.committable() == {0: 1}
    assert buffer.take(START + 9 * SECOND, 10, a_load()) == [young]
    assert buffer.drop_older(ENDLESS) == 0


@dataclass
class Log:
    """One partition as this reader has seen it since it last went back."""

    next: int
    waiting: set[int] = field(default_factory=set)


class BufferMachine(RuleBasedStateMachine):
    """Against a plain model: every place that was received, since the last time its partition was read again."""

    def __init__(self) -> None:
        super().__init__()
        self.buffer = HintBuffer(CAPACITY)
        self.load = TenantLoad(slots=100, cap=CAP)
        self.now = START
        self.logs: dict[int, Log] = {}
        self.places: dict[RunRef, list[tuple[Log, int]]] = {}
        self.taken: list[RunRef] = []
        self.running: list[TenantId] = []

    @initialize(ends=st.lists(st.integers(0, 50), min_size=3, max_size=3))
    def begin(self, ends: list[int]) -> None:
        self.ends = ends

    def log(self, partition: int, offset: int) -> Log:
        log = self.logs.get(partition)
        if log is None or offset < log.next:
            log = self.logs[partition] = Log(offset)
        log.next = offset + 1
        return log

    def use(self, refs: Iterable[RunRef]) -> None:
        for ref in refs:
            for log, offset in self.places.pop(ref):
                log.waiting.discard(offset)

    @rule(partition=st.integers(0, 2), number=st.integers(0, 15), gap=st.integers(0, 2))
    def receive(self, partition: int, number: int, gap: int) -> None:
        offset = self.ends[partition] + gap
        self.ends[partition] = offset + 1
        ref = hint(number, of=number % 4, due=number)
        self.buffer.add(ref, partition=partition, offset=offset)
        log = self.log(partition, offset)
        log.waiting.add(offset)
        self.places.setdefault(ref, []).append((log, offset))

    @rule(partition=st.integers(0, 2))
    def pass_over(self, partition: int) -> None:
        self.buffer.passed_over(partition, self.ends[partition])
        self.log(partition, self.ends[partition])
        self.ends[partition] += 1

    @rule(partition=st.integers(0, 2), back=st.integers(1, 60))
    def go_back(self, partition: int, back: int) -> None:
        self.ends[partition] = max(0, self.ends[partition] - back)

    @rule()
    def rebalance(self) -> None:
        self.buffer.forget_partitions()
        self.logs.clear()

    @rule(seconds=st.integers(0, 6))
    def pass_time(self, seconds: int) -> None:
        self.now += timedelta(seconds=seconds)

    @rule(limit=st.integers(0, 8))
    def take(self, limit: int) -> None:
        could = Counter(
            ref.tenant_id for ref in self.places if ref.fire_after <= self.now and ref not in self.taken
        )
        has_ripe = self.buffer.has_ripe(self.now, self.load)
        taken = self.buffer.take(self.now, limit, self.load)
        assert all(ref.fire_after <= self.now and ref in self.places for ref in taken)
        assert len(set(taken)) == len(taken)
        assert not set(taken) & set(self.taken), "taken before, and neither used nor put back"
        by_tenant = Counter(ref.tenant_id for ref in taken)
        free = {one: max(0, min(count, self.load.room(one))) for one, count in could.items()}
        assert all(count <= free[one] for one, count in by_tenant.items())
        assert len(taken) == min(limit, sum(free.values())), "as many as there may be"
        assert has_ripe == (sum(free.values()) > 0)
        self.taken += taken

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def claim(self, data: st.DataObject) -> None:
        """What was taken is asked for; some of it is leased and runs."""
        refs, self.taken = self.taken, []
        leased = data.draw(st.sets(st.sampled_from(refs)))
        for ref in sorted(leased, key=lambda ref: ref.id):
            if self.load.room(ref.tenant_id) > 0:
                self.load.take(ref.tenant_id)
                self.running.append(ref.tenant_id)
        self.buffer.used(refs)
        self.use(refs)

    @precondition(lambda self: self.taken)
    @rule()
    def fail(self) -> None:
        self.buffer.put_back(self.taken)
        self.taken = []

    @precondition(lambda self: self.running)
    @rule()
    def end_one(self) -> None:
        self.load.give(self.running.pop())

    @precondition(lambda self: not self.taken)
    @rule(ago=st.integers(0, 10))
    def drop_older(self, ago: int) -> None:
        than = self.now - timedelta(seconds=ago)
        size = len(self.places)
        # Which ones stay behind younger ones of their tenant is the buffer's matter; that all are old is not.
        dropped = self.buffer.drop_older(than)
        left = set(self.buffer._places)
        gone = set(self.places) - left
        assert len(gone) == dropped == size - len(left)
        assert all(ref.fire_after < than for ref in gone)
        self.use(gone)

    @invariant()
    def commits_never_pass_an_unused_hint(self) -> None:
        assert self.buffer.committable() == {
            partition: min(log.waiting, default=log.next) for partition, log in self.logs.items()
        }

    @invariant()
    def counts_its_places(self) -> None:
        places = sum(map(len, self.places.values()))
        assert len(self.buffer) == places
        assert self.buffer.is_full == (places >= CAPACITY)

    def teardown(self) -> None:
        """Nothing was forgotten: with room for everybody and all the time, every hint is taken once."""
        everything = self.buffer.take(ENDLESS, 10_000, a_load())
        assert sorted(ref.id for ref in everything) == sorted(
            ref.id for ref in self.places if ref not in self.taken
        )
        self.buffer.used(everything + self.taken)
        assert len(self.buffer) == 0
        assert self.buffer.committable() == {partition: log.next for partition, log in self.logs.items()}


TestBufferMachine = BufferMachine.TestCase
