"""Planted faults: what the audit says of clients that are not what they claim, and of those that are.

python -m experiments.assurance.audit_faults  # runs every audit (about five minutes on one core), writes both
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from experiments.assurance.sum_runs import VICTIM, Observe, Sum, SumRuns

from bqsgd._src.audit.bound import AuditResult, Source, audit
from bqsgd._src.audit.client import Data, MakeClient, canary_runs, linear_client
from bqsgd._src.audit.encoder import CANARY_SIZE, EncoderRuns, Inputs
from bqsgd._src.client.client import Client
from bqsgd._src.noise import privacy_rng, seeded_rng
from bqsgd._src.params import Mechanism
from bqsgd._src.privacy.guarantee import rounded_down, rounded_up
from bqsgd._src.release import Release, Sampling, Scheme, Sensitivity, Terms, Trust
from bqsgd._src.secure.graph import thresholds
from bqsgd._src.secure.messages import Kind, message_kind, read_masked, read_parts
from bqsgd._src.settings.config import Config
from experiments import lab, pages

RESULTS = lab.RESULTS / "audit_faults.json"
RUNS, DELTA, CONFIDENCE = 4000, 1e-3, 0.99
DIMENSION = 64
ALARM_AUDITS, ALARM_RUNS, ALARM_CONFIDENCE = 200, 400, 0.9

FULL = Config.of(clients=1, sampling="none", batch_size=16, clip="clamp", clip_bound=1.0, levels=8, trials=60)
POISSON = FULL.but(sampling="poisson", batch_size=8, levels=6)
FIXED = FULL.but(sampling="fixed", batch_size=8, levels=3)
DUAL = FULL.but(clip="dual", clip_bound=0.25, clip_norm=1.0, range=0.25)

Values = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A claim, and what is really run under it. `source` takes a seed, or None for the operating system's noise."""

    what: str
    path: str
    claim: Callable[[], Release]
    source: Callable[[int | None], Source]
    moves: Callable[[], float] | None = None
    """By how many times the stated bound the record moves the encoder's input, where that is the fault."""


def clients(
    what: str,
    stated: Config,
    *,
    size: int = 16,
    real: Config | None = None,
    real_size: int | None = None,
    make: MakeClient = linear_client,
) -> Case:
    """Real clients; `real`, `real_size` and `make` are what they do where it is not what they state."""

    def source(seed: int | None) -> Source:
        config = (stated if real is None else real).but(seed=seed)
        return canary_runs(config, dimension=DIMENSION, dataset_size=real_size or size, make=make)

    def claim() -> Release:
        return canary_runs(stated, dimension=DIMENSION, dataset_size=size).release

    return Case(what=what, path="data to frame", claim=claim, source=source)


def realised_batch(config: Config, data: Data) -> Client:
    """A client that divides by the number of samples in its batch: without sampling, all it has."""
    return linear_client(config.but(batch_size=len(data[0])), data)


# Float32 sums: chosen data, honest model. In units of the clip bound, half of the records add 1 and take the sum S to
# a power of two, 2^16. From there on each of the others takes off 0.3 u, with u the spacing of float32 from 2^16 on.
# Below 2^16 the spacing is u/2, so 0.3 u is rounded up to u/2 and the sum runs away. With the canary's 1 before them
# the sum stands above 2^16, where 0.3 u is rounded to nothing: it never moves again.

SUMMED, SUM_DIMENSION = 1 << 17, 16
SUM_CLAIM = Release(
    mechanism=Mechanism(levels=8192, trials=20),
    terms=Terms(
        dimension=SUM_DIMENSION, sensitivity=Sensitivity(linf=1 / SUMMED), sampling=Sampling(scheme=Scheme.NONE)
    ),
)


def chosen_addends() -> npt.NDArray[np.float32]:
    """What each record adds to a coordinate, in units of the clip bound; the canary's 1 comes first."""
    small = -0.3 * float(np.spacing(np.float32(SUMMED // 2)))
    return np.repeat(np.array([1.0, 1.0, small], np.float32), [1, SUMMED // 2, SUMMED // 2])


def float32_sums() -> Inputs:
    """The encoder's inputs when the clipped gradients are added up one after another in float32."""
    addends = chosen_addends()
    sums = [np.add.accumulate(part)[-1] / SUMMED for part in (addends[1:], addends)]  # float32 throughout
    return Inputs(without=np.full(SUM_DIMENSION, sums[0]), with_record=np.full(SUM_DIMENSION, sums[1]))


# Row dependence: a kernel whose order of summation follows from the alignment of the row, as measured on linear layers
# with rows of 3,969 floats. The server's weights cancel on the records, so that the logit is rounding error alone and
# its sign depends on the row. A canary put in front moves every other record by one row.

FEATURES, OTHERS, ALIGNMENTS = 3969, 64, 4
ROW_BOUND, DECIDED = 0.25, 25.0
"""Clip bound; a logit beyond +-DECIDED makes the logistic loss's gradient 0 or the whole record."""
ROW_CLAIM = Release(
    mechanism=Mechanism(levels=1, trials=180),
    terms=Terms(dimension=FEATURES, sensitivity=Sensitivity(linf=1 / OTHERS), sampling=Sampling(scheme=Scheme.NONE)),
)


def aligned_dot(x: npt.NDArray[np.float32], w: npt.NDArray[np.float32], row: int) -> float:
    """x . w in float32 the way a vector kernel adds: single steps to the next aligned address, then four lanes."""
    products = x * w
    head = -row * FEATURES % ALIGNMENTS
    tail = head + (FEATURES - head) // ALIGNMENTS * ALIGNMENTS
    lanes = np.add.accumulate(products[head:tail].reshape(-1, ALIGNMENTS))[-1]
    rest = np.concatenate([products[:head], lanes, products[tail:]])
    return float(np.add.accumulate(rest)[-1])


def cancelling_attack(*, seed: int = 1) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """(weights, records): record i has the logit +large in row i and -large in row i + 1, out of rounding error."""
    rng = np.random.default_rng(seed)
    w = (rng.normal(size=FEATURES) * 1e7).astype(np.float32)
    wide, records = w.astype(np.float64), []
    for row in range(ALIGNMENTS):
        while True:
            x = rng.uniform(1, 2, size=FEATURES)
            x = (x - (x @ wide) / (wide @ wide) * wide).astype(np.float32)
            if aligned_dot(x, w, row) > DECIDED and aligned_dot(x, w, row + 1) < -DECIDED:
                records.append(x)
                break
    return w, np.tile(np.stack(records), (OTHERS // ALIGNMENTS, 1))


def row_dependent_forward() -> Inputs:
    """The encoder's inputs when a record's logit depends on its row; clipped and summed without a flaw."""
    w, records = cancelling_attack()

    def mean(first_row: int) -> Values:
        logits = np.array([aligned_dot(x, w, first_row + i) for i, x in enumerate(records)])
        errors = 1 / (1 + np.exp(-logits)) - 1  # the logistic loss with target 1
        gradients = np.clip(errors[:, None] * records.astype(np.float64), -ROW_BOUND, ROW_BOUND)
        return gradients.sum(axis=0) / OTHERS / ROW_BOUND

    return Inputs(without=mean(0), with_record=np.clip(mean(1) + 1 / OTHERS, -1, 1))


def encoder(what: str, claim: Release, inputs: Callable[[], Inputs]) -> Case:
    """The mean is a function of the data without sampling, so it is computed once and encoded in every run."""

    def source(seed: int | None) -> Source:
        rng = privacy_rng() if seed is None else seeded_rng(seed=seed)
        return EncoderRuns(claim, rng=rng, inputs=inputs())

    def moves() -> float:
        pair = inputs()
        return float(np.abs(pair.with_record - pair.without).max() / claim.terms.sensitivity.linf)

    return Case(what=what, path="mean to codes", claim=lambda: claim, source=source, moves=moves)


# Secure sums: nine clients of which four may be missing. The claim is that of 60 trials in the sum, of which a client
# keeps seven at most.

SUM_RULE = thresholds(clients=9, dropouts=4, colluders=0)
SECURE_CLAIM = Release(
    mechanism=Mechanism(levels=8, trials=60),
    terms=Terms(
        dimension=DIMENSION,
        sensitivity=Sensitivity(linf=1 / 16),
        sampling=Sampling(scheme=Scheme.NONE),
        trust=Trust.SUMS_ONLY,
    ),
)
LEFT = frozenset({5, 6, 7, 8})


def noise_not_replaced(runs: SumRuns, seed: int, values: Mapping[int, Values]) -> npt.NDArray[np.int64]:
    """Every client brings a ninth of the noise, and what the missing ones would have brought is missing too."""
    agreement, rng = runs.agreement(values[VICTIM].size, trials=0), runs.source(seed)
    codes = {
        client: runs.encoded(held, trials=runs.plan.trials // SUM_RULE.clients, rng=rng)
        for client, held in values.items()
    }
    total = Sum(agreement, seed).run(codes, missing=runs.missing).total
    assert total is not None
    return total.lanes.astype(np.int64) - (len(total.survivors) - 1) * runs.plan.levels


def both_shares_revealed(runs: SumRuns, seed: int, values: Mapping[int, Values]) -> npt.NDArray[np.int64]:
    """Clients that answer for two lists, one with the victim and one without: the difference is the victim's vector.

    The noise that is in one sum and not in the other comes from seeds that were revealed.
    """
    agreement, rng = runs.agreement(values[VICTIM].size), runs.source(seed)
    noise, run = agreement.noise, agreement.run_digest
    codes = {client: runs.encoded(held, trials=noise.cuts[0], rng=rng) for client, held in values.items()}
    whole, without = Sum(agreement, seed), Sum(agreement, seed)
    total = whole.run(codes).total
    rest = without.run(codes, missing=frozenset({VICTIM})).total
    assert total is not None
    assert rest is not None
    lanes = rest.lanes.copy()
    for rank, client in enumerate(rest.survivors):
        first = noise.first_unneeded(len(total.survivors), total.survivors.index(client))
        last = noise.first_unneeded(len(rest.survivors), rank)
        seeds = [read_parts(sums.said[client][-1], agreement, Kind.UNMASKING).own for sums in (whole, without)]
        about = {"client": client, "round": 0}
        chains = [noise.chain(part, s, run, **about) for part, s in zip((first, last), seeds, strict=True)]
        noise.add_parts(first, chains[0], lanes, run, subtract=True)
        noise.add_parts(last, chains[1], lanes, run)
    modulus = 1 << runs.plan.width
    return (total.lanes.astype(np.int64) - lanes.astype(np.int64)) % modulus


def mask_reused(runs: SumRuns, seed: int, values: Mapping[int, Values]) -> npt.NDArray[np.int64]:
    """A client that masks two vectors with one mask: their difference has none. The second holds nothing, as known."""
    agreement, rng = runs.agreement(values[VICTIM].size), runs.source(seed)
    base = agreement.noise.cuts[0]
    lanes = []
    for held in (values, {client: np.zeros_like(given) for client, given in values.items()}):
        codes = {client: runs.encoded(given, trials=base, rng=rng) for client, given in held.items()}
        sums = Sum(agreement, seed)
        sums.run(codes)
        masked = next(said for said in sums.said[VICTIM] if said and message_kind(said) is Kind.MASKED)
        lanes.append(read_masked(masked, agreement)[1].astype(np.int64))
    modulus = 1 << runs.plan.width
    return (lanes[0] - lanes[1] + runs.plan.levels + base) % modulus


def sums(
    what: str, *, missing: frozenset[int] = LEFT, observe: Observe | None = None, trials: int | None = None
) -> Case:
    """Whole protocols; `observe` is what a server sees of clients that are not what they claim."""

    def source(seed: int | None) -> Source:
        return SumRuns(SECURE_CLAIM, rule=SUM_RULE, missing=missing, observe=observe, trials=trials, seed=seed)

    return Case(what=what, path="values to sum", claim=lambda: SECURE_CLAIM, source=source)


FAULTS = {
    "no clip": clients(
        "no sample is clipped; only the mean is held to the range",
        FULL,
        real=FULL.but(clip_bound=10 * CANARY_SIZE, range=1.0),
    ),
    "batch-mean clip": clients(
        "the mean is clipped, not the samples, and stated as a per-sample clip",
        FULL,
        real=FULL.but(clip="batch-mean"),
    ),
    "realised batch size": clients(
        "the sum is divided by the samples in the batch, not by the public L", FULL, make=realised_batch
    ),
    "halved noise": clients(
        "half the trials that are stated, so half the variance",
        FULL,
        real=FULL.but(trials=(FULL.privacy.trials or 0) // 2),
    ),
    "understated sampling rate": clients(
        "a sample takes part with probability 1/2, stated is 1/4", POISSON, size=32, real_size=16
    ),
    "float32 sums": encoder("clipped gradients of 131,072 chosen records added up in float32", SUM_CLAIM, float32_sums),
    "row dependence": encoder(
        "a record's logit depends on its row; weights that cancel, a canary in front of 64 records",
        ROW_CLAIM,
        row_dependent_forward,
    ),
    "noise of dropouts not replaced": sums(
        "a secure sum over 5 of 9 clients, each with a ninth of the noise", observe=noise_not_replaced, trials=30
    ),
    "both share kinds revealed": sums(
        "clients answer for a list of survivors with the victim and for one without",
        missing=frozenset(),
        observe=both_shares_revealed,
        trials=7,
    ),
    "mask reused": sums(
        "two vectors of a client under one mask, the second known", missing=frozenset(), observe=mask_reused, trials=12
    ),
}
HONEST = {
    "clamp, no sampling": clients("the clamp, all records", FULL),
    "clamp, Poisson": clients("the clamp, Poisson batches", POISSON, size=32),
    "clamp, fixed size": clients("the clamp, batches of one size", FIXED, size=32),
    "dual clip, no sampling": clients("clamp and norm, all records", DUAL),
    "secure sum, nobody missing": sums("a secure sum over 9 clients", missing=frozenset()),
    "secure sum, four missing": sums("a secure sum over 5 of 9 clients"),
}


def run(case: Case, *, seed: int | None = None, runs: int = RUNS, confidence: float = CONFIDENCE) -> AuditResult:
    """Audit one case."""
    return audit(case.source(seed), claim=case.claim(), samples=runs, delta=DELTA, confidence=confidence)


def false_alarms() -> int:
    """How many audits of the real encoder at its worst case, each with few runs and a low confidence, cry wolf."""
    claim = replace(
        SUM_CLAIM,
        mechanism=Mechanism(levels=8, trials=60),
        terms=replace(SUM_CLAIM.terms, sensitivity=Sensitivity(linf=1 / 16)),
    )
    audits = (
        audit(
            EncoderRuns(claim, rng=privacy_rng()),
            claim=claim,
            samples=ALARM_RUNS,
            delta=DELTA,
            confidence=ALARM_CONFIDENCE,
        )
        for _ in range(ALARM_AUDITS)
    )
    return sum(result.violated for result in audits)


def fields(case: Case, result: AuditResult, seconds: float) -> dict[str, Any]:
    """One row."""
    return {
        "what": case.what,
        "path": case.path,
        "moves": None if case.moves is None else case.moves(),
        "violated": result.violated,
        "claimed_epsilon": result.claimed.epsilon,
        "claimed_text": result.claimed.epsilon_text,
        "epsilon_lower": result.lower.epsilon,
        "point": {
            "delta": result.curve.lower.delta,
            "claimed_epsilon": result.curve.claimed_epsilon,
            "epsilon_lower": result.curve.lower.epsilon,
            "delta_lower": result.curve.delta_lower,
        },
        "release": result.claim.to_dict(),
        "seconds": round(seconds, 1),
    }


def compute(kept: dict[str, Any] | None = None, *, path: str | None = None) -> dict[str, Any]:
    """Every fault and every honest client, with noise from the operating system; with a path, only those of it."""
    torch.set_num_threads(1)
    results: dict[str, Any] = {"runs": RUNS, "delta": DELTA, "confidence": CONFIDENCE}
    for group, cases in {"faults": FAULTS, "honest": HONEST}.items():
        results[group] = {}
        for name, case in cases.items():
            if kept is not None and case.path != path:
                results[group][name] = kept[group][name]
                continue
            started = time.perf_counter()
            result = run(case)
            results[group][name] = fields(case, result, time.perf_counter() - started)
            print(name, result.verdict, flush=True)
    if kept is not None:
        return results | {"false_alarms": kept["false_alarms"]}
    alarms = {"audits": ALARM_AUDITS, "runs": ALARM_RUNS, "confidence": ALARM_CONFIDENCE, "alarms": false_alarms()}
    return results | {"false_alarms": alarms}


def section(results: dict[str, Any]) -> str:
    """Both tables, every figure from the results."""
    alarms = results["false_alarms"]
    head = (
        "| case | what is run | from | moves | claimed epsilon | audited "
        "| at the point chosen: delta claimed, audited | violation |"
    )
    lines = [
        "## Planted faults",
        "",
        "Made by `python -m experiments.assurance.audit_faults` from "
        "`experiments/results/audit_faults.json`; do not edit.",
        "",
        f"{results['runs']:,} runs per side, confidence {results['confidence']:g}, noise from the operating system. "
        f"**Claimed epsilon** and **audited** are at delta {results['delta']:g}; the point is where the first "
        "half of the runs saw the claimed curve broken most clearly, often at epsilon 0, where delta is the total "
        "variation distance. **Moves**: how far the record moves the mean, in "
        "units of the stated bound, where that is the fault.",
        "",
        head,
        "|---" * 8 + "|",
        *(_row(name, row) for name, row in results["faults"].items()),
        "",
        "Float32 sums and row dependence compute the mean once (it is a function of the data) and encode it in every "
        "run. Secure sums run whole protocols, 500 runs in one long vector. The others run everything each time. "
        "`tests/audit/test_planted_faults.py` runs all of them.",
        "",
        "## Honest clients",
        "",
        head,
        "|---" * 8 + "|",
        *(_row(name, row) for name, row in results["honest"].items()),
        "",
        f"An honest client is accused with probability at most {1 - results['confidence']:.2g}. Seen: "
        f"{alarms['alarms']} of {alarms['audits']} audits of the encoder at its worst case, each with "
        f"{alarms['runs']} runs per side and confidence {alarms['confidence']:g}, so at most "
        f"{(1 - alarms['confidence']) * alarms['audits']:.0f} were to be expected: Clopper-Pearson bounds are "
        "cautious.",
    ]
    return "\n".join(lines)


def _row(name: str, row: dict[str, Any]) -> str:
    point = row["point"]
    cells = (
        name,
        row["what"],
        row["path"],
        "–" if row["moves"] is None else f"{row['moves']:.0f} times",
        row["claimed_text"],
        f"≥ {rounded_down(row['epsilon_lower'], 3)}",
        f"epsilon {rounded_up(point['claimed_epsilon'], 3)}: {rounded_up(point['delta'], 3)}, "
        f"≥ {rounded_down(point['delta_lower'], 3)}",
        "**yes**" if row["violated"] else "no",
    )
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Run all cases, or those of one path."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", help="only run the cases of one path, such as 'values to sum'")
    path = parser.parse_args().path
    lab.write_json(RESULTS, compute(None if path is None else lab.read_json(RESULTS), path=path))
    pages.write()


if __name__ == "__main__":
    main()
