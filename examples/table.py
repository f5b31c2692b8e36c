"""A private classifier for a table: scikit-learn's breast cancer data, beside the same model without privacy."""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
from sklearn.datasets import load_breast_cancer
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer

from bqsgd.tables import PrivateClassifier

# Round numbers above the ranges that the public description of this data set states (load_breast_cancer().DESCR).
# For a private table they must come from knowledge of what was measured, never from the table.
SIZES = [(0, 40), (0, 60), (0, 300), (0, 5000), (0, 0.3), (0, 1.5), (0, 1.5), (0, 0.5), (0, 0.8), (0, 0.3)]
ERRORS = [(0, 4), (0, 6), (0, 30), (0, 600), (0, 0.05), (0, 0.2), (0, 0.5), (0, 0.1), (0, 0.1), (0, 0.05)]
BOUNDS = SIZES + ERRORS + SIZES


def scaled(table):
    """The same public scale, for the model without privacy."""
    low, high = np.array(BOUNDS).T
    return 2 * (table - low) / (high - low) - 1


epsilon = float(sys.argv[1]) if len(sys.argv) > 1 else 2.0
folder = Path(tempfile.mkdtemp())  # for a first look; of your own data, keep the ledger as long as the data
x, y = load_breast_cancer(return_X_y=True)

private, plain = [], []
for split in range(3):
    train_x, test_x, train_y, test_y = train_test_split(x, y, test_size=0.3, random_state=split, stratify=y)
    model = PrivateClassifier(
        ledger=folder / f"split-{split}.ledger", bounds=BOUNDS, classes=[0, 1], epsilon=epsilon, delta=1e-5
    )
    private.append(model.fit(train_x, train_y).score(test_x, test_y))
    other = make_pipeline(FunctionTransformer(scaled), LogisticRegression(max_iter=1000))
    plain.append(other.fit(train_x, train_y).score(test_x, test_y))

print(f"{len(train_x)} rows, {x.shape[1]} features; means over {len(private)} splits")
print(f"private      accuracy {np.mean(private):.1%}, {model.guarantee_}")
print(f"not private  accuracy {np.mean(plain):.1%}")
if len(sys.argv) > 2:
    figures = {"private": private, "not_private": plain, "guarantee": model.guarantee_.to_dict()}
    Path(sys.argv[2]).write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
