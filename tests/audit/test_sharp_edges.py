"""Every edge that docs/sharp_edges.md calls refused is refused, with the error it names, and every edge that the audit
is said to catch is a planted fault that `test_planted_faults` has caught."""

from __future__ import annotations

import copy
import os
import pickle
import re
import sqlite3
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bqsgd._src.errors import BqsgdError, BudgetExhausted, InvalidParameter, LedgerError, NonFiniteInput, OutOfRange
from bqsgd._src.ledger import Ledger
from bqsgd._src.mechanism import encoder
from bqsgd._src.noise import privacy_rng, seeded_rng
from bqsgd._src.params import Mechanism
from bqsgd._src.privacy.accountant import Accountant
from bqsgd._src.release import Relation, Release, Sampling, Scheme, Sensitivity, Terms

PAGE = Path(__file__).parents[2] / "docs" / "sharp_edges.md"
RELEASE = Release(
    mechanism=Mechanism(levels=1, trials=60),
    terms=Terms(dimension=1, sensitivity=Sensitivity(linf=0.125), sampling=Sampling(scheme=Scheme.NONE)),
)


def open_ledger(folder: Path, **changes: object) -> Ledger:
    arguments: dict[str, object] = {"client": 1, "budget_epsilon": 0.3, "budget_delta": 1e-5, **changes}
    return Ledger.open(folder / "ledger", **arguments)  # type: ignore[arg-type]


def spent(folder: Path) -> Ledger:
    ledger = open_ledger(folder)
    ledger.spend(RELEASE, run="a", round=0, seeded=False)
    return ledger


def noise_copied(folder: Path) -> None:
    with pytest.raises(TypeError):
        copy.copy(privacy_rng())
    pickle.dumps(privacy_rng())


def _in_child(work: Callable[[], object]) -> None:
    """Run `work` in a forked child; raise here what it raised there."""
    kinds: tuple[type[BqsgdError], ...] = (InvalidParameter, LedgerError)
    child = os.fork()
    if child == 0:
        try:
            work()
        except kinds as error:
            os._exit(1 + kinds.index(type(error)))
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code:
        raise kinds[code - 1]("in the child")


def noise_forked(folder: Path) -> None:
    source = seeded_rng(seed=1)
    _in_child(lambda: source.words(4))


def ledger_forked(folder: Path) -> None:
    with open_ledger(folder) as ledger:
        ledger.reserve(RELEASE, run="a", first_round=0, rounds=1, seeded=False)
        _in_child(lambda: ledger.spend(RELEASE, run="a", round=0, seeded=False))


def _gradients(*, normalised: bool, reduction: str) -> None:
    torch = pytest.importorskip("torch")
    from bqsgd._src.persample import clipped_gradients
    from bqsgd._src.persample.clips import Clamp

    layers = [torch.nn.Linear(3, 4), *([torch.nn.BatchNorm1d(4)] if normalised else []), torch.nn.Linear(4, 2)]
    batch = torch.zeros(5, 3), torch.zeros(5, dtype=torch.int64)
    loss = torch.nn.CrossEntropyLoss(reduction=reduction)
    clipped_gradients(torch.nn.Sequential(*layers), loss, batch, clip=Clamp(1.0), batch_size=5)


def flushed_denormals() -> None:
    torch = pytest.importorskip("torch")
    from bqsgd._src.client.objective import Objective
    from bqsgd._src.persample.clips import L2

    if not torch.set_flush_denormal(True):
        raise InvalidParameter("this processor cannot flush denormal numbers")
    try:
        form = torch.zeros(1, 3), torch.zeros(1, dtype=torch.long)
        loss = torch.nn.CrossEntropyLoss(reduction="none")
        Objective(torch.nn.Linear(3, 2), loss, clip=L2(1.0), batch_size=16).check(form)
    finally:
        torch.set_flush_denormal(False)


def no_ledger(folder: Path) -> None:
    pytest.importorskip("torch")
    from bqsgd._src.ledger.spending import Charge, Spending

    Spending(None, run="a", seeded=False).spend(Charge(release=RELEASE, round=0, last_round=3))


def budget_passed(folder: Path) -> None:
    with open_ledger(folder) as ledger:
        for number in range(100):
            ledger.spend(RELEASE, run="a", round=number, seeded=False)


def ledger_edited(folder: Path) -> None:
    spent(folder).close()
    connection = sqlite3.connect(folder / "ledger")
    connection.execute("DELETE FROM entries WHERE number = 2")
    connection.commit()
    connection.close()
    open_ledger(folder)


def sampling_mismatch(folder: Path) -> None:
    replace(
        RELEASE,
        terms=replace(
            RELEASE.terms,
            sensitivity=Sensitivity(linf=0.125, relation=Relation.REPLACE),
            sampling=Sampling(scheme=Scheme.POISSON, rate=0.1),
        ),
    )


def round_again(folder: Path) -> None:
    spent(folder).close()
    with open_ledger(folder) as ledger:
        ledger.spend(RELEASE, run="a", round=0, seeded=False)


def wrong_release(folder: Path) -> None:
    with open_ledger(folder) as ledger:
        ledger.reserve(RELEASE, run="a", first_round=0, rounds=2, seeded=False)
        ledger.spend(replace(RELEASE, terms=replace(RELEASE.terms, dimension=2)), run="a", round=0, seeded=False)


def round_twice(folder: Path) -> None:
    with spent(folder) as ledger:
        ledger.spend(RELEASE, run="a", round=0, seeded=False)


def local_steps(folder: Path) -> None:
    pytest.importorskip("torch")
    from bqsgd._src.settings.config import Config

    Config.of(local_steps=2, unit="sample")


def with_secure_sums(**settings: str) -> None:
    pytest.importorskip("torch")
    from bqsgd._src.settings.config import Config

    Config.of(clients=8, rate=0.1, secure=True, **settings)


def training_loss(folder: Path) -> None:
    torch = pytest.importorskip("torch")
    from bqsgd._src.settings.config import Config
    from tiny_task import client_of

    config, loss_fn = Config.of(batch_size=4, private_metrics=True), torch.nn.CrossEntropyLoss(reduction="none")
    client_of(config, torch.nn.Linear(2, 2), loss_fn, (np.zeros((8, 2), np.float32), np.zeros(8, np.int64)))


def raw_gradients(folder: Path) -> None:
    torch = pytest.importorskip("torch")
    from bqsgd._src.private import make_private

    model, data = torch.nn.Linear(2, 2), (torch.randn(8, 2), torch.zeros(8, dtype=torch.long))
    optimizer, loss = torch.optim.SGD(model.parameters(), lr=0.1), torch.nn.CrossEntropyLoss(reduction="none")
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*data), batch_size=4)
    settings = {"epsilon": 8.0, "delta": 1e-5, "epochs": 1, "mechanism": Mechanism(levels=4, trials=60), "range": 0.5}
    private = make_private(model, optimizer, loader, loss_fn=loss, ledger=None, seed=0, **settings)
    private.backward(next(iter(private.loader)))
    loss(model(data[0]), data[1]).sum().backward()
    optimizer.step()


def _encode(value: float) -> None:
    encoder.encode(np.array([value]), RELEASE.mechanism, range=1.0, rng=privacy_rng())


REFUSALS: dict[str, tuple[Callable[[Path], object], type[Exception]]] = {
    "noise-copied": (noise_copied, TypeError),
    "noise-forked": (noise_forked, InvalidParameter),
    "reduced-loss": (lambda _: _gradients(normalised=False, reduction="mean"), InvalidParameter),
    "batch-norm": (lambda _: _gradients(normalised=True, reduction="none"), InvalidParameter),
    "flushed-denormals": (lambda _: flushed_denormals(), InvalidParameter),
    "no-clip": (lambda _: _encode(1.5), OutOfRange),
    "not-finite": (lambda _: _encode(float("nan")), NonFiniteInput),
    "no-ledger": (no_ledger, InvalidParameter),
    "budget-passed": (budget_passed, BudgetExhausted),
    "ledger-lost": (lambda folder: open_ledger(folder, create_missing=False), LedgerError),
    "ledger-edited": (ledger_edited, LedgerError),
    "sampling-mismatch": (sampling_mismatch, InvalidParameter),
    "re-noised-resume": (round_again, LedgerError),
    "round-twice": (round_twice, LedgerError),
    "wrong-release": (wrong_release, LedgerError),
    "ledger-forked": (ledger_forked, LedgerError),
    "local-steps": (local_steps, InvalidParameter),
    "raw-gradients": (raw_gradients, InvalidParameter),
    "entropy-coding": (lambda _: with_secure_sums(coding="entropy"), InvalidParameter),
    "robust-rules": (lambda _: with_secure_sums(aggregation="median"), InvalidParameter),
    "training-loss": (training_loss, InvalidParameter),
    "reused-run-name": (round_again, LedgerError),
}


@pytest.mark.parametrize("edge", REFUSALS)
def test_the_edge_is_refused(edge: str, tmp_path: Path) -> None:
    attempt, error = REFUSALS[edge]
    with pytest.raises(error):
        attempt(tmp_path)


def test_the_page_calls_refused_what_is_refused() -> None:
    edges = dict(re.findall(r"^\| `([a-z-]+)` \| (.*) \|$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE))
    assert len(edges) > 30
    called = {edge for edge, text in edges.items() if "**Refused**" in text}
    assert called == REFUSALS.keys()
    for edge in called:
        assert f"`{REFUSALS[edge][1].__name__}`" in edges[edge], edge


CAUGHT = {
    "batch-mean-clip": "batch-mean clip",
    "no-clip": "no clip",
    "realised-batch-size": "realised batch size",
    "data-set-size": "understated sampling rate",
}
"""Edge: the planted fault that shows it."""


def test_the_audit_is_said_to_catch_what_a_planted_fault_shows() -> None:
    pytest.importorskip("torch")
    sys.path.insert(0, str(PAGE.parents[1]))
    from experiments.assurance.audit_faults import FAULTS

    edges = re.findall(r"^\| `([a-z-]+)` \| (.*) \|$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    said = {
        edge for edge, text in edges if re.search(r"audit (catches|finds|sees)|(caught|found|seen) by the audit", text)
    }
    assert said == CAUGHT.keys()
    assert set(CAUGHT.values()) <= FAULTS.keys()
    planted = (Path(__file__).parent / "test_planted_faults.py").read_text(encoding="utf-8")
    assert '@pytest.mark.parametrize("fault", others_slow(planted.FAULTS, ' in planted


def test_what_is_marked_is_marked() -> None:
    quiet = replace(RELEASE, mechanism=Mechanism(levels=1, trials=0))
    assert Accountant().compose(quiet).epsilon(1e-5) == float("inf")
    assert "no privacy claim" in str(Accountant().compose(RELEASE).guarantee(delta=1e-5, seeded=True))
    replaced = replace(
        RELEASE, terms=replace(RELEASE.terms, sensitivity=Sensitivity(linf=0.125, relation=Relation.REPLACE))
    )
    mixed = Accountant().compose(RELEASE).compose(replaced).guarantee(delta=1e-5)
    assert mixed.relation is Relation.ADD_REMOVE
    assert mixed.epsilon >= Accountant().compose(RELEASE).guarantee(delta=1e-5).epsilon
