"""The RAND Health Insurance Experiment: who sees a physician twice or more in a year, from six sites in the USA.

5,638 people of all ages in their first year (1974 to 1979), one record each. The table comes from the PyPI package
`statsmodels` (public domain). Its sites are Dayton, Seattle, Fitchburg, Franklin County, Charleston and Georgetown
County. Each is divided into three or four practices of growing size: 20 in all, with 89 to 414 people to train on.
"""

from __future__ import annotations

import csv
import io
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from bqsgd._src.data._own_clients import Parts, Rows, of_clients
from bqsgd._src.data._sources import listed

TABLE = listed("rand-hie")
PRACTICES = {1: 4, 2: 4, 3: 3, 4: 3, 5: 3, 6: 3}
"""Site -> its practices. The i-th is i times as large as the first."""
_LABEL, _VISITS = "mdvis", 2
_Row = dict[str, str]


def features(row: _Row) -> list[float]:
    """What is known of a person before the year: about 1 in size, by constants that no data decide.

    In turn: age four times, sex twice, race, income, education, chronic diseases, physical limits, mental health, size
    of the family; coinsurance twice, individual deductible, and health as the person rates it, four times.
    """
    age, female, coinsurance = float(row["xage"]), float(row["female"]), float(row["coins"])
    return [
        *(age / 50 - 0.7, (age / 50 - 0.7) ** 2, float(age < 6), float(age < 18)),
        *(female, female * float(age >= 18), float(row["black"])),
        *(float(row["linc"]) / 4 - 2, float(row["educdec"]) / 8 - 1.5, float(row["disea"]) / 15 - 0.7),
        *(float(row["physlm"]), float(row["mhi"]) / 30 - 2.3, float(row["num"]) / 3 - 1.3),
        *(float(coinsurance > 0), coinsurance / 100, float(row["idp"])),
        *(float(row["hlthg"]), float(row["hlthf"]), float(row["hlthp"]), float(row["xghindx"]) / 20 - 3.5),
    ]


def by_practice(raw: list[bytes]) -> Parts:
    """The first year of every person. Every fifth of a practice is in the test split."""
    records = csv.DictReader(io.StringIO(raw[0].decode("ascii")))
    first = [row for row in records if row["year"] == "1"]
    train, test = [], []
    for site, practices in PRACTICES.items():
        people = [row for row in first if row["site"] == str(site)]
        # Families are neighbours in the table, so that most of them stay together.
        shares = np.cumsum(np.arange(practices + 1)) / (practices * (practices + 1) / 2)
        cuts = np.rint(shares * len(people)).astype(int)
        for start, end in pairwise(cuts):
            inputs, labels = _rows(people[start:end])
            tested = np.arange(len(labels)) % 5 == 4
            train.append((inputs[~tested], labels[~tested]))
            test.append((inputs[tested], labels[tested]))
    return of_clients(train, test, classes=2)


def _rows(people: list[_Row]) -> Rows:
    inputs: npt.NDArray[np.float32] = np.array([features(row) for row in people], np.float32)
    return inputs, np.array([float(row[_LABEL]) >= _VISITS for row in people], np.int64)
