"""A client that is started anew for every message: it goes on where it was, and never back."""

import os
import shutil
import threading

import numpy as np
import pytest
from secure_sums import SMALL_SPARSE, Federation, agreement, identity, plain_sum, request_keys, some_codes

from bqsgd._src.errors import ConflictingSurvivors, InvalidParameter, NotWritten, RoundUsed, SecureSumError, WrongRound
from bqsgd._src.secure import messages, state
from bqsgd._src.secure.client import SumClient
from bqsgd._src.secure.messages import Kind, SumHeader
from bqsgd._src.secure.state import EpochFile, StateFile


def agreed_on(graph, *, seeded=True):
    if graph == "full":
        return agreement(4, dropouts=1, dimension=6, width=9, trials=9, seeded=seeded)
    return agreement(12, dropouts=2, dimension=6, width=9, trials=9, sparse=SMALL_SPARSE, seeded=seeded)


class EveryTimeAnew(dict):
    """Clients by number, each from its file whenever it is asked for."""

    def __init__(self, agreed, folder, seed=5):
        super().__init__(dict.fromkeys(agreed.members.clients))
        self.agreed, self.folder, self.seed, self.rounds = agreed, folder, seed, None

    def __getitem__(self, number):
        file = StateFile(self.folder / f"{number}.state")
        return SumClient(
            self.agreed, identity=identity(number), number=number, keep=file, seed=self.seed, rounds=self.rounds
        )


@pytest.mark.parametrize("graph", ["full", "sparse"])
def test_a_process_for_every_message_gives_the_same_bytes(tmp_path, graph):
    agreed = agreed_on(graph)
    lasting, anew = Federation(agreed, seed=5), Federation(agreed, seed=5)
    anew.clients = EveryTimeAnew(agreed, tmp_path)
    codes = some_codes(agreed)
    totals = []
    for federation in (lasting, anew):
        federation.begin(rounds=2)
        federation.sum(codes)
        totals.append(federation.sum(codes, round=1, masked=[c for c in agreed.members.clients if c != 2]))
    assert lasting.masked == anew.masked
    assert np.array_equal(totals[0].lanes, totals[1].lanes)
    assert oct(next(tmp_path.glob("*.state")).stat().st_mode)[-3:] == "600"


def survivors(agreed, listed, client=1):
    header = SumHeader(kind=Kind.SURVIVORS, epoch=1, round=0, client=client)
    return messages.write_listed(header, agreed, listed)


def masked_anew(tmp_path, graph="full"):
    """A federation of which client 1 has masked round 0 and lives in a file."""
    agreed = agreed_on(graph)
    federation = Federation(agreed, seed=5)
    federation.clients = EveryTimeAnew(agreed, tmp_path)
    federation.begin(rounds=1)
    codes = some_codes(agreed)
    for number in agreed.members.clients:
        federation.clients[number].mask(0, codes[number])
    return federation


@pytest.mark.parametrize("back", ["state", "state gone", "died before the state"])
def test_no_second_list_is_signed_after_a_restart_or_with_an_earlier_state(tmp_path, back):
    federation = masked_anew(tmp_path)
    agreed, file = federation.agreement, tmp_path / "1.state"
    shutil.copy(file, tmp_path / "earlier")
    signed = federation.clients[1].sign(survivors(agreed, (0, 1, 2, 3)))
    assert federation.clients[1].sign(survivors(agreed, (0, 1, 2, 3))) == signed
    with pytest.raises(ConflictingSurvivors):
        federation.clients[1].sign(survivors(agreed, (0, 1, 2)))
    if back == "state gone":
        file.unlink()
    else:
        shutil.copy(tmp_path / "earlier", file)
    if back == "died before the state":  # the count was written, the state was not
        StateFile(file).save(1, b"{}")
        shutil.copy(tmp_path / "earlier", file)
    with pytest.raises(WrongRound):
        federation.clients[1].sign(survivors(agreed, (0, 1, 2)))
    with pytest.raises(WrongRound):
        request_keys(federation.clients[1], epoch=1)
    assert request_keys(federation.clients[1], epoch=2)


def test_two_processes_of_one_client_never_use_the_same_masks(tmp_path):
    agreed = agreed_on("full")
    federation = Federation(agreed, seed=5)
    federation.clients = EveryTimeAnew(agreed, tmp_path)
    federation.begin(rounds=1)
    one, other = federation.clients[1], federation.clients[1]  # both have read the state
    codes = some_codes(agreed)
    one.mask(0, codes[1])
    with pytest.raises(RoundUsed, match="another process"):
        other.mask(0, codes[2])


def meanwhile(monkeypatch, first, second):
    """Do `second` while `first` writes, as soon as it has found that it may; the errors of both, None for none."""
    real, errors = state.write_atomic, [None, None]

    def attempt(place, act):
        try:
            act()
        except SecureSumError as error:
            errors[place] = error

    other = threading.Thread(target=attempt, args=(1, second))

    def write(path, content):
        if other.ident is None:
            other.start()
            other.join(0.2)  # it waits for the lock, or would have written by then
        real(path, content)

    monkeypatch.setattr(state, "write_atomic", write)
    attempt(0, first)
    other.join()
    return errors


def test_a_state_is_not_written_between_another_process_looking_and_writing(tmp_path, monkeypatch):
    files = [StateFile(tmp_path / "1.state") for _ in range(2)]
    for file in files:
        file.load()
    errors = meanwhile(monkeypatch, lambda: files[0].save(1, b"one"), lambda: files[1].save(1, b"other"))
    assert errors[0] is None
    assert isinstance(errors[1], RoundUsed)
    assert StateFile(tmp_path / "1.state").load() == (1, b"one")


def test_an_epoch_is_not_begun_between_another_process_looking_and_writing(tmp_path, monkeypatch):
    agreed = agreed_on("full", seeded=False)
    one, other = (
        SumClient(agreed, identity=identity(1), number=1, last_epoch=EpochFile(tmp_path / "epoch")) for _ in range(2)
    )
    batch = {"epoch": 3, "first_round": 0, "rounds": 1}
    errors = meanwhile(monkeypatch, lambda: request_keys(one, **batch), lambda: request_keys(other, **batch))
    assert errors[0] is None
    assert isinstance(errors[1], WrongRound)
    assert EpochFile(tmp_path / "epoch")() == 3


def test_two_processes_of_one_client_do_not_begin_the_same_batch(tmp_path):
    agreed = agreed_on("full", seeded=False)
    one, other = (
        SumClient(agreed, identity=identity(1), number=1, last_epoch=EpochFile(tmp_path / "epoch")) for _ in range(2)
    )
    request_keys(one, epoch=3)
    with pytest.raises(WrongRound):
        request_keys(other, epoch=3)


def secrets_in(client):
    """Everything that masks a vector or makes its noise."""
    batch = client._state.batch
    seeds = [seed for round in batch.secrets for seed in client._chain(round)]
    pairs = [keys[at : at + 16] for keys in batch.pairs.values() for at in range(0, len(keys), 16)]
    return seeds + pairs


@pytest.mark.parametrize("kept", ["in memory", "in a file", "epochs alone"])
def test_a_round_made_again_has_nothing_of_its_first_secrets(tmp_path, kept):
    """A server that asks for the same rounds in one epoch after another, whatever its clients remember."""
    agreed = agreed_on("full", seeded=False)
    federation = Federation(agreed, seed=None)
    codes, seen, vectors = some_codes(agreed), [], []
    for epoch in range(3):
        if kept == "in a file":
            federation.clients = EveryTimeAnew(agreed, tmp_path, seed=None)
        if kept == "epochs alone":
            federation.clients = {
                number: SumClient(
                    agreed, identity=identity(number), number=number, last_epoch=EpochFile(tmp_path / f"{number}")
                )
                for number in agreed.members.clients
            }
        federation.begin(epoch=epoch, rounds=2)
        seen += secrets_in(federation.clients[1])
        vectors += [bytes(federation.clients[1].mask(round, codes[1])) for round in range(2)]
    assert len(set(seen)) == len(seen) == 3 * (2 * (1 + agreed.noise.parts) + 2 * 3)
    assert len(set(vectors)) == len(vectors)


def test_no_second_vector_is_masked_with_an_earlier_state(tmp_path):
    federation = masked_anew(tmp_path)
    codes = some_codes(federation.agreement)
    with pytest.raises(RoundUsed):
        federation.clients[1].mask(0, codes[1])
    agreed = agreed_on("full")
    other = Federation(agreed, seed=5)
    other.clients = EveryTimeAnew(agreed, tmp_path / "other")
    (tmp_path / "other").mkdir()
    other.begin(rounds=1)
    shutil.copy(tmp_path / "other" / "1.state", tmp_path / "earlier")
    other.clients[1].mask(0, codes[1])
    shutil.copy(tmp_path / "earlier", tmp_path / "other" / "1.state")
    with pytest.raises(WrongRound):
        other.clients[1].mask(0, codes[1])


@pytest.mark.parametrize("step", ["keys", "mask", "sign"])
def test_an_answer_leaves_only_once_its_state_is_written(tmp_path, monkeypatch, step):
    federation = masked_anew(tmp_path)
    agreed, codes = federation.agreement, some_codes(federation.agreement)
    if step == "mask":
        federation.begin(epoch=2, first_round=1, rounds=1)
    client = federation.clients[1]
    with monkeypatch.context() as patched:

        def full(*_):
            raise NotWritten("the disk is full")

        patched.setattr(state, "write_atomic", full)
        answers = {
            "keys": lambda: request_keys(client, epoch=2, first_round=1, rounds=1),
            "mask": lambda: client.mask(1, codes[1]),
            "sign": lambda: client.sign(survivors(agreed, (0, 1, 2, 3))),
        }
        with pytest.raises(NotWritten):
            answers[step]()
    with pytest.raises(WrongRound):  # nor later
        answers[step]()


def test_files_that_are_damaged_or_of_another_client_are_refused(tmp_path):
    federation = masked_anew(tmp_path)
    file = tmp_path / "1.state"
    shutil.copy(tmp_path / "0.state", file)
    shutil.copy(tmp_path / "0.state.step", tmp_path / "1.state.step")
    with pytest.raises(InvalidParameter, match="another"):
        federation.clients[1]
    content = bytearray(file.read_bytes())
    content[40] ^= 1
    file.write_bytes(content)
    with pytest.raises(InvalidParameter, match="damaged"):
        federation.clients[1]
    for text in ("", "what", "1", "1 2 3", "x 1"):
        (tmp_path / "1.state.step").write_text(text)
        with pytest.raises(InvalidParameter):
            federation.clients[1]
    (tmp_path / "1.state.step").unlink()
    with pytest.raises(InvalidParameter, match="missing"):
        federation.clients[1]


@pytest.mark.parametrize("graph", ["full", "sparse"])
def test_a_state_is_read_back_whole(graph):
    agreed = agreed_on(graph)
    federation = Federation(agreed, seed=5)
    federation.begin(rounds=2)
    federation.sum(some_codes(agreed), unmasked=agreed.members.clients[1:])
    for number, client in federation.clients.items():
        content = state.write_state(client._state, agreed, number)
        assert state.read_state(content, agreed, number) == client._state


def test_cohorts_change_from_batch_to_batch(tmp_path):
    """Three of six clients in every batch; each keeps its keys, and nothing of one cohort passes in another."""
    rule = agreement(3, dropouts=1).rule
    base = agreement(6, dropouts=1, dimension=6, width=9, trials=9)
    agreed = state.Agreement(roster=base.roster, run="cohorts", rule=rule, dimension=6, width=9, seeded=True)
    federation = Federation(agreed)
    codes = some_codes(agreed)
    for epoch, cohort in enumerate([(0, 1, 2), (1, 3, 5), (0, 1, 5)]):
        federation.begin(epoch=epoch, first_round=2 * epoch, rounds=2, cohort=cohort)
        assert tuple(federation.server.requests()) == cohort
        total = federation.sum(codes, round=2 * epoch)
        assert np.array_equal(total.lanes, plain_sum(codes, cohort, 9))
        total = federation.sum(codes, round=2 * epoch + 1, masked=cohort[1:])
        assert np.array_equal(total.lanes, plain_sum(codes, cohort[1:], 9))


def test_the_state_is_deleted_after_the_last_round_and_the_epoch_stays(tmp_path):
    agreed = agreed_on("full")
    federation = Federation(agreed, seed=5)
    anew = EveryTimeAnew(agreed, tmp_path)
    anew.rounds = 2
    federation.clients = anew
    federation.begin(rounds=2)
    codes = some_codes(agreed)
    federation.sum(codes)
    assert len(list(tmp_path.glob("*.state"))) == 4
    federation.sum(codes, round=1)
    assert list(tmp_path.glob("*.state")) == []
    with pytest.raises(WrongRound):
        federation.clients[1].sign(survivors(agreed, (0, 1, 2, 3)))
    with pytest.raises(WrongRound):
        request_keys(federation.clients[1], epoch=1)
    assert request_keys(federation.clients[1], epoch=2)


def test_a_process_that_dies_while_it_deletes_its_state_is_back_with_the_next_batch(tmp_path, monkeypatch):
    agreed = agreed_on("full")
    federation = Federation(agreed, seed=5)
    federation.clients = anew = EveryTimeAnew(agreed, tmp_path)
    anew.rounds = 1
    federation.begin()
    with monkeypatch.context() as patch:
        patch.setattr(state.Path, "unlink", lambda path, missing_ok: None)
        federation.sum(some_codes(agreed))
    assert len(list(tmp_path.glob("*.state"))) == 4
    with pytest.raises(WrongRound):
        request_keys(anew[1], epoch=1)
    assert request_keys(anew[1], epoch=2)


def test_a_folder_keeps_the_states_of_few_runs(tmp_path):
    for run in range(12):
        file = StateFile(tmp_path / f"client-0001-{run:02}.sums")
        file.forget_oldest("client-0001-*.sums")
        file.save(run, b"secret")
        os.utime(file.path, (run, run))
    assert [path.name[12:14] for path in sorted(tmp_path.glob("*.sums"))] == [f"{run:02}" for run in range(4, 12)]
    assert StateFile(tmp_path / "client-0001-00.sums").load() == (0, None)
    other = StateFile(tmp_path / "client-0001-11.sums")
    other.forget_oldest("client-0001-*.sums")  # it is there, so nothing is deleted
    assert len(list(tmp_path.glob("*.sums"))) == 8


def test_a_state_that_vanishes_while_the_oldest_are_looked_for_is_passed_over(tmp_path):
    (tmp_path / "client-0001-gone.sums").symlink_to(tmp_path / "nowhere")  # listed, but not there when it is looked at
    StateFile(tmp_path / "client-0001-new.sums").forget_oldest("client-0001-*.sums")
    assert (tmp_path / "client-0001-gone.sums").is_symlink()
