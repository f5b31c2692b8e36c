"""The ledger's contract: durable before sending, never past the budget, never the same round twice."""

from __future__ import annotations

import json
import os
import sqlite3
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bqsgd._src.errors import BudgetExhausted, InvalidParameter, LedgerError
from bqsgd._src.ledger import Ledger
from bqsgd._src.ledger._budget import Headroom, PrivacyBudget
from bqsgd._src.ledger._entries import EntryKind, LedgerEntry, LedgerState
from bqsgd._src.params import Coarsening, Mechanism
from bqsgd._src.privacy.accountant import Accountant
from bqsgd._src.release import Release, Sampling, Scheme, Sensitivity, Terms

RELEASE = Release(
    mechanism=Mechanism(levels=1, trials=60),
    terms=Terms(dimension=4, sensitivity=Sensitivity(linf=0.125), sampling=Sampling(scheme=Scheme.POISSON, rate=0.1)),
)
FINER = replace(RELEASE, mechanism=Mechanism(levels=2, trials=60))
DELTA = 1e-5


def open_ledger(path: Path, *, epsilon: float = 0.4, **changes: Any) -> Ledger:
    return Ledger.open(path, **{"client": 3, "budget_epsilon": epsilon, "budget_delta": DELTA, **changes})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "client-3.ledger"


def exact(*content: tuple[Release, int]) -> float:
    accountant = Accountant()
    for release, rounds in content:
        accountant = accountant.compose(release, rounds)
    return accountant.epsilon(DELTA)


def test_coarse_releases_cost_what_fine_ones_do_and_old_entries_still_load(path: Path) -> None:
    coarse = replace(RELEASE, mechanism=replace(RELEASE.mechanism, coarsening=Coarsening(points=4, width=20)))
    with open_ledger(path) as ledger:
        assert ledger.headroom(coarse) == ledger.headroom(RELEASE)
        ledger.spend(coarse, run="a", round=0, seeded=False)
        ledger.spend(RELEASE, run="a", round=1, seeded=False)
        guarantee = ledger.guarantee()
        assert guarantee is not None
        assert guarantee.epsilon == exact((RELEASE, 2))
        entry = next(e for e in ledger.entries if e.release == RELEASE)
    assert "coarsening" not in entry.to_json()
    assert LedgerEntry.from_json(entry.to_json()) == entry
    with open_ledger(path) as ledger:
        assert [e.release for e in ledger.entries if e.release] == [coarse, RELEASE]


def test_spending_stops_exactly_at_the_budget(path: Path) -> None:
    with open_ledger(path) as ledger:
        room = ledger.headroom(RELEASE)
        assert room > 2
        ledger.reserve(RELEASE, run="a", first_round=0, rounds=room, seeded=False)
        for number in range(room):
            ledger.spend(RELEASE, run="a", round=number, seeded=False)
        with pytest.raises(BudgetExhausted, match="0 round\\(s\\) of this release are left"):
            ledger.spend(RELEASE, run="a", round=room, seeded=False)
        guarantee = ledger.guarantee()
    assert guarantee is not None
    assert guarantee.epsilon <= 0.4 < exact((RELEASE, room + 1))
    assert guarantee.epsilon == pytest.approx(exact((RELEASE, room)))
    assert (guarantee.delta, guarantee.seeded) == (DELTA, False)


def test_a_refused_reservation_records_nothing_and_names_what_is_left(path: Path) -> None:
    with open_ledger(path) as ledger:
        room = ledger.headroom(RELEASE)
        ledger.spend(RELEASE, run="a", round=0, seeded=False)
        with pytest.raises(
            BudgetExhausted, match=f"{room - 1} round\\(s\\) of this release are left; spent so far: eps"
        ):
            ledger.reserve(RELEASE, run="a", first_round=1, rounds=room, seeded=False)
        assert ledger.spent_rounds == 1
        ledger.reserve(RELEASE, run="a", first_round=1, rounds=room - 1, seeded=False)


def test_different_releases_compose(path: Path) -> None:
    with open_ledger(path) as ledger:
        ledger.spend(RELEASE, run="a", round=0, seeded=False)
        ledger.spend(FINER, run="a", round=1, seeded=False)
        room = ledger.headroom(FINER)
        guarantee = ledger.guarantee()
    assert guarantee is not None
    assert guarantee.epsilon == pytest.approx(exact((RELEASE, 1), (FINER, 1)))
    assert exact((RELEASE, 1), (FINER, 1 + room)) <= 0.4 < exact((RELEASE, 1), (FINER, 2 + room))


def test_a_crash_leaves_reserved_rounds_counted_and_a_clean_close_gives_them_back(path: Path) -> None:
    ledger = open_ledger(path)
    ledger.reserve(RELEASE, run="a", first_round=0, rounds=5, seeded=False)
    ledger.spend(RELEASE, run="a", round=0, seeded=False)
    ledger.spend(RELEASE, run="a", round=3, seeded=False)
    with Ledger(path) as seen_after_a_crash:
        assert seen_after_a_crash.spent_rounds == 5
    ledger.close()
    with open_ledger(path) as again:
        assert again.spent_rounds == 2
        again.spend(RELEASE, run="a", round=1, seeded=False)  # given back, so free to be used
        with pytest.raises(LedgerError, match="already recorded"):
            again.spend(RELEASE, run="a", round=3, seeded=False)


def test_a_recorded_round_is_refused_and_new_noise_for_it_is_counted_again(path: Path) -> None:
    with open_ledger(path) as ledger:
        ledger.reserve(RELEASE, run="a", first_round=0, rounds=2, seeded=False)
        for number in (0, 1):
            ledger.spend(RELEASE, run="a", round=number, seeded=False)
        with pytest.raises(LedgerError, match="resume=True"):
            ledger.spend(RELEASE, run="a", round=1, seeded=False)
        assert ledger.spent_rounds == 2
        ledger.spend(RELEASE, run="a", round=1, seeded=False, resume=True)
        assert ledger.spent_rounds == 3
        ledger.spend(RELEASE, run="b", round=1, seeded=False)
        assert ledger.spent_rounds == 4


def test_returning_an_unsent_second_attempt_keeps_the_first(path: Path) -> None:
    with open_ledger(path) as ledger:
        ledger.spend(RELEASE, run="a", round=0, seeded=False)
    with open_ledger(path) as ledger:
        ledger.reserve(RELEASE, run="a", first_round=0, rounds=3, seeded=False, resume=True)
        assert ledger.spent_rounds == 4
    with open_ledger(path) as ledger:
        assert ledger.spent_rounds == 1
        with pytest.raises(LedgerError, match="already recorded"):
            ledger.spend(RELEASE, run="a", round=0, seeded=False)


def test_a_seeded_resume_makes_the_same_bytes_and_is_not_charged_again(path: Path) -> None:
    with open_ledger(path) as ledger:
        for number in range(3):
            ledger.spend(RELEASE, run="a", round=number, seeded=True)
    with open_ledger(path) as ledger:
        ledger.reserve(RELEASE, run="a", first_round=1, rounds=4, seeded=True, resume=True)
        assert ledger.spent_rounds == 5
        ledger.spend(RELEASE, run="a", round=1, seeded=True)
        guarantee = ledger.guarantee()
        assert guarantee is not None
        assert guarantee.seeded
        assert "no privacy claim" in str(guarantee)
    with open_ledger(path) as ledger:
        assert ledger.spent_rounds == 3  # rounds 3 and 4 were not sent
        # Unseeded noise, or another release, for a seeded round is something new.
        ledger.spend(RELEASE, run="a", round=0, seeded=False, resume=True)
        ledger.spend(FINER, run="a", round=1, seeded=True, resume=True)
        assert ledger.spent_rounds == 5


def test_a_reservation_is_for_one_release_and_one_noise_source(path: Path) -> None:
    with open_ledger(path) as ledger:
        ledger.reserve(RELEASE, run="a", first_round=0, rounds=2, seeded=False)
        with pytest.raises(LedgerError, match="another release"):
            ledger.spend(FINER, run="a", round=0, seeded=False)
        with pytest.raises(LedgerError, match="noise source"):
            ledger.spend(RELEASE, run="a", round=0, seeded=True)
        with pytest.raises(LedgerError, match="not sent yet"):
            ledger.reserve(RELEASE, run="a", first_round=1, rounds=2, seeded=False, resume=True)
        ledger.spend(RELEASE, run="a", round=0, seeded=False)


def test_the_budget_changes_only_by_an_explicit_recorded_call(path: Path) -> None:
    with open_ledger(path) as ledger:
        room = ledger.headroom(RELEASE)
        with pytest.raises(InvalidParameter, match="reason"):
            ledger.change_budget(epsilon=0.8, delta=DELTA, reason=" ")
        ledger.change_budget(epsilon=0.8, delta=DELTA, reason="board decision 7")
        assert ledger.headroom(RELEASE) > room
        ledger.spend(RELEASE, run="a", round=0, seeded=False)
    with pytest.raises(LedgerError, match="change_budget"):
        open_ledger(path)
    with open_ledger(path, epsilon=0.8) as ledger:
        assert [entry.reason for entry in ledger.entries if entry.kind is EntryKind.BUDGET] == [
            "ledger made",
            "board decision 7",
        ]
        ledger.change_budget(epsilon=1e-6, delta=DELTA, reason="stop")
        assert ledger.headroom(RELEASE) == 0
        with pytest.raises(BudgetExhausted):
            ledger.spend(RELEASE, run="a", round=1, seeded=False)


def test_a_ledger_belongs_to_one_client_and_is_not_made_where_it_must_exist(path: Path) -> None:
    with pytest.raises(LedgerError, match="no ledger at"):
        open_ledger(path, create_missing=False)
    assert not path.exists()
    open_ledger(path).close()
    with pytest.raises(LedgerError, match="no ledger of client 4, but of client 3"):
        open_ledger(path, client=4)
    assert sorted(entry.name for entry in path.parent.iterdir()) == [path.name]


@pytest.mark.parametrize(
    ("field", "value"),
    [("client", -1), ("budget_epsilon", 0.0), ("budget_epsilon", float("nan")), ("budget_delta", 1.0)],
)
def test_bad_arguments_are_named(path: Path, field: str, value: float) -> None:
    with pytest.raises(InvalidParameter, match=field.removeprefix("budget_")):
        open_ledger(path, **{field: value})
    assert not path.exists()


def _edit(statement: str) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        connection = sqlite3.connect(path)
        connection.execute(statement)
        connection.commit()
        connection.close()

    return damage


def _overwrite(data: bytes) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(data) and None


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 4096)


DAMAGE = {
    "emptied": (_overwrite(b""), "is empty"),
    "not a database": (_overwrite(b"round,epsilon\n" * 500), "not a readable ledger"),
    "cut short": (_cut, "ledger"),
    "a round removed from the middle": (_edit("DELETE FROM entries WHERE number = 2"), "altered or removed"),
    "the last round removed": (_edit("DELETE FROM entries WHERE number = 3"), "lost entries"),
    "all entries removed": (_edit("DELETE FROM entries"), "lost entries"),
    "no head": (_edit("DELETE FROM head"), "damaged"),
    "fewer rounds": (_edit("UPDATE entries SET body = replace(body, '\"rounds\":5', '\"rounds\":1')"), "altered"),
    "bytes for text": (_edit("UPDATE entries SET body = x'00ff' WHERE number = 2"), "altered"),
    "a client that is no number": (_edit("UPDATE head SET client = 'me'"), "damaged"),
    "another client": (_edit("UPDATE head SET client = 9"), "altered"),
    "a trigger": (_edit("CREATE TRIGGER t AFTER INSERT ON entries BEGIN DELETE FROM entries; END"), "another program"),
    "a later format": (_edit("PRAGMA user_version = 3"), "format 3"),
    "another application's file": (_edit("PRAGMA application_id = 7"), "not a bqsgd ledger"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_or_foreign_file_is_refused(path: Path, kind: str) -> None:
    with open_ledger(path) as ledger:
        ledger.reserve(RELEASE, run="a", first_round=0, rounds=5, seeded=False)
        for number in range(5):
            ledger.spend(RELEASE, run="a", round=number, seeded=False)
        ledger.spend(RELEASE, run="a", round=5, seeded=False)
    damage, message = DAMAGE[kind]
    damage(path)
    with pytest.raises(LedgerError, match=message):
        open_ledger(path)


def _roll_back(path: Path) -> None:
    _edit("DELETE FROM entries WHERE number = 2")(path)
    _edit("UPDATE head SET count = 1, chain = (SELECT chain FROM entries WHERE number = 1)")(path)


def _replace(path: Path) -> None:
    path.rename(path.with_suffix(".old"))
    open_ledger(path).close()


@pytest.mark.parametrize(
    ("meddle", "message"),
    [(_roll_back, "lost entries"), (_replace, "moved or replaced"), (Path.unlink, "moved or replaced")],
)
def test_meddling_with_an_open_ledger_is_found_before_the_next_message(
    path: Path, meddle: Callable[[Path], None], message: str
) -> None:
    with open_ledger(path) as ledger:
        ledger.spend(RELEASE, run="a", round=0, seeded=False)
        meddle(path)
        with pytest.raises(LedgerError, match=message):
            ledger.spend(RELEASE, run="a", round=1, seeded=False)


def test_a_failed_write_is_not_taken_for_a_spend(path: Path) -> None:
    ledger = open_ledger(path)
    ledger.headroom(RELEASE)
    blocker = sqlite3.connect(path)
    blocker.execute("BEGIN IMMEDIATE")
    ledger._file.connection.execute("PRAGMA busy_timeout = 50")
    with pytest.raises(LedgerError, match="nothing was recorded"):
        ledger.spend(RELEASE, run="a", round=0, seeded=False)
    blocker.rollback()
    blocker.close()
    ledger.spend(RELEASE, run="a", round=0, seeded=False)
    assert ledger.spent_rounds == 1
    ledger.close()


def test_threads_share_one_ledger(path: Path) -> None:
    with open_ledger(path) as ledger:
        room = min(ledger.headroom(RELEASE), 24)
        ledger.reserve(RELEASE, run="a", first_round=0, rounds=room, seeded=False)
        sent: list[int] = []
        refused: list[int] = []

        def work() -> None:
            for number in range(room):
                try:
                    ledger.spend(RELEASE, run="a", round=number, seeded=False)
                    sent.append(number)
                except LedgerError:
                    refused.append(number)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(sent) == list(range(room))
        assert len(refused) == 3 * room


def test_a_ledger_does_not_survive_a_fork(path: Path) -> None:
    with open_ledger(path) as ledger:
        ledger.reserve(RELEASE, run="a", first_round=0, rounds=2, seeded=False)
        ledger._file._pid += 1  # what a forked child sees
        with pytest.raises(LedgerError, match="fork"):
            ledger.spend(RELEASE, run="a", round=0, seeded=False)
        ledger.close()  # gives nothing back: the rounds are the parent's
        ledger._file._pid -= 1
        assert ledger.spent_rounds == 2


def test_the_dictionary_is_json_and_complete(path: Path) -> None:
    with open_ledger(path) as ledger:
        assert ledger.to_dict()["guarantee"] is None
        ledger.spend(RELEASE, run="a", round=0, seeded=False)
        fields = json.loads(json.dumps(ledger.to_dict(delta=1e-3)))
    assert fields["guarantee"].keys() >= {"epsilon", "delta", "relation", "unit", "trust", "sampling", "method"}
    assert fields["guarantee"]["delta"] == 1e-3
    assert [entry["kind"] for entry in fields["entries"]] == ["budget", "spend"]


def test_an_entry_that_cannot_be_read_stops_the_ledger_for_good(path: Path) -> None:
    with open_ledger(path) as other, open_ledger(path) as ledger:
        file = other._file
        with file.exclusive():
            file.append(3, other._end, ['{"kind":"of a later version"}'])
        for _ in range(2):  # once the error was raised, the ledger must not go on as if the entry were not there
            with pytest.raises(LedgerError, match="cannot be read"):
                ledger.spend(RELEASE, run="a", round=0, seeded=False)


class Counting:
    """An accountant of plain arithmetic (epsilon = rounds x levels) that counts how often it is asked."""

    asked = 0

    def __init__(self, total: float = 0.0) -> None:
        self.total = total

    def compose(self, release: Release, rounds: int = 1) -> Counting:
        return Counting(self.total + rounds * release.mechanism.levels)

    def epsilon(self, delta: float) -> float:
        Counting.asked += 1
        return self.total


@given(st.integers(1, 3000), st.integers(0, 100), st.lists(st.integers(1, 60), max_size=80))
def test_headroom_is_exact_and_seldom_asks(limit: int, other: int, steps: list[int]) -> None:
    Counting.asked = 0
    budget, room = PrivacyBudget(epsilon=float(limit), delta=DELTA), Headroom(Counting())
    content = {FINER: other, RELEASE: 0}
    for step in steps:
        fits = room.fits(content, RELEASE, step, budget)
        assert fits == (2 * other + content[RELEASE] + step <= limit)
        assert room.known_to_fit(content, RELEASE, step, budget) == fits
        content[RELEASE] += step * fits
    assert room.most(content, RELEASE, budget) == max(0, limit - 2 * other - content[RELEASE])
    assert Counting.asked <= 60


def test_headroom_of_an_unlimited_budget_ends() -> None:
    room = Headroom(Counting())
    assert room.most({}, RELEASE, PrivacyBudget(epsilon=1e12, delta=DELTA)) == 1 << 20


@settings(max_examples=30)
@given(
    st.lists(
        st.tuples(st.integers(0, 50), st.integers(1, 50), st.booleans(), st.booleans()),
        max_size=8,
    )
)
def test_entries_survive_their_stored_form_and_add_up(spends: list[tuple[int, int, bool, bool]]) -> None:
    state = LedgerState()
    for first, count, seeded, again in spends:
        entry = LedgerEntry(
            kind=EntryKind.SPEND,
            time="t",
            release=RELEASE,
            run="r",
            first_round=first,
            rounds=count,
            seeded=seeded,
            again=again,
        )
        assert LedgerEntry.from_json(entry.to_json()) == entry
        state.add(entry)
    assert state.total_rounds == sum(count for _, count, _, _ in spends)
    assert state.seeded_rounds == sum(count for _, count, seeded, _ in spends if seeded)
    too_much = LedgerEntry(
        kind=EntryKind.RETURN, time="t", release=RELEASE, run="r", first_round=0, rounds=state.total_rounds + 1
    )
    with pytest.raises(LedgerError, match="more rounds than it spent"):
        state.add(too_much)
