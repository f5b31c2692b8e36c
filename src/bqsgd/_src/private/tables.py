"""Private learning from tables, with scikit-learn's interface: `PrivateClassifier` and `PrivateRegressor`.

An estimator adds no privacy of its own. It maps every row by public constants to numbers in [-1, 1], and trains on them
with `make_private`, whose ledger counts every step. So the whole argument about the table itself is this:

1. What a row becomes depends on that row and on public parameters: the bounds of the features, the classes, the bounds
   of the target. Nothing is fitted to the other rows: no mean, no standard deviation, no set of labels.
2. The map is defined for every row: what lies outside its bounds is moved to the nearest bound, a missing feature
   counts as the middle, and a row whose label is not among the classes, or whose target is missing, adds nothing. So no
   value of a row decides whether there is a model.
3. The plan is made before the table is used, on made-up rows of the same shape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import check_array, check_consistent_length, column_or_1d
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from bqsgd._src.errors import BudgetExhausted, InvalidParameter
from bqsgd._src.ledger import Ledger, PrivacyBudget
from bqsgd._src.models import dimension_of
from bqsgd._src.params import Mechanism, check_int, check_positive
from bqsgd._src.persample.clips import L2
from bqsgd._src.persample.program import LossFunction
from bqsgd._src.planner.plan import Budget
from bqsgd._src.planner.recipe import CLIP_NORM, Federation, rounds_for
from bqsgd._src.privacy.guarantee import Guarantee, rounded_up
from bqsgd._src.private.gate import opened_ledger
from bqsgd._src.private.loop import Private, make_private

_Array = npt.NDArray[Any]
FROM_Y = "from_y"
NO_CLASS = -100
"""The label of a row that adds nothing: torch's cross-entropy leaves it out."""
_MOMENTUM = 0.9
_PUBLIC_CLASSES = "the set of labels that occur in the data is public"


@dataclass(kw_only=True, eq=False, repr=False)
class _Tables(BaseEstimator):
    """What both estimators share: features within public bounds, and a model of dense layers trained privately.

    Parameters are fields, so that scikit-learn finds them in the signature of `__init__`.
    """

    ledger: str | Path | None = None
    bounds: Any = None
    epsilon: float = 1.0
    delta: float = 1e-6
    hidden: Sequence[int] = ()
    epochs: int | None = None
    batch_size: int | None = None
    learning_rate: float | None = None
    clip_norm: float = CLIP_NORM
    mechanism: Mechanism | None = None
    force: bool = False
    seed: int | None = None

    guarantee_: Guarantee | None = field(init=False)
    layers_: list[tuple[_Array, _Array]] = field(init=False)
    n_features_in_: int = field(init=False)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        tags.non_deterministic = self.seed is None
        return tags

    def _table(self, X: Any, y: Any) -> tuple[_Array, _Array]:
        """Check the shapes and types of a table and its targets. Values are not looked at."""
        X, y = validate_data(
            self,
            X,
            y,
            validate_separately=(
                {"dtype": np.float64, "ensure_all_finite": False},
                {"dtype": None, "ensure_2d": False, "ensure_all_finite": False},
            ),
        )
        y = column_or_1d(y, warn=True)
        check_consistent_length(X, y)
        return X, y

    def _inputs(self, X: _Array) -> Tensor:
        """Every feature from its bounds to [-1, 1]; outside is moved to the nearest bound, missing is the middle."""
        low, high = _feature_bounds(self.bounds, self.n_features_in_, getattr(self, "feature_names_in_", None))
        return torch.from_numpy(_scaled(X, low, high).astype(np.float32))

    def _train(self, inputs: Tensor, targets: Tensor, *, outputs: int, loss_fn: LossFunction) -> None:
        """Train, and set what `predict` uses and the guarantee."""
        # An earlier fit's model and guarantee would understate what is spent if this fit fails in the middle.
        for name in ("layers_", "guarantee_", "n_steps_"):
            self.__dict__.pop(name, None)
        self._check_ledger()
        model = _dense(self.n_features_in_, self.hidden, outputs)
        budget, samples = Budget(bits=8, epsilon=self.epsilon, delta=self.delta), len(inputs)
        federation = Federation(samples=samples, clients=1, dimension=dimension_of(model))
        rounds = rounds_for(samples)
        batch_size = _given("batch_size", self.batch_size, federation.batch_size(budget, messages=rounds))
        steps = -(-samples // batch_size)
        epochs = _given("epochs", self.epochs, max(1, round(rounds / steps)))
        rate = federation.learning_rate(budget) if self.learning_rate is None else self.learning_rate
        optimizer = torch.optim.SGD(model.parameters(), lr=check_positive("learning_rate", rate), momentum=_MOMENTUM)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, total_iters=epochs * steps)

        def private(inputs: Tensor, targets: Tensor, **given: Any) -> Private:
            loader = DataLoader(TensorDataset(inputs, targets), batch_size=batch_size)
            same: dict[str, Any] = {"epochs": epochs, "clip": L2(self.clip_norm), "force": self.force}
            return make_private(model, optimizer, loader, loss_fn=loss_fn, **same, **given)

        asked: dict[str, Any] = {"epsilon": self.epsilon, "delta": self.delta}
        # Planned on made-up rows, for this fit alone: seeded noise needs no ledger, and nothing is encoded.
        made_up = torch.zeros(1, inputs.shape[1]).expand(inputs.shape), targets.new_zeros(1).expand(targets.shape)
        with private(*made_up, **asked, ledger=None, seed=0, mechanism=self.mechanism) as planned:
            chosen: dict[str, Any] = {"mechanism": planned.plan.mechanism, "range": planned.range}
        ledger = self._opened_ledger()
        if ledger is not None:
            asked = {"epsilon": ledger.budget.epsilon, "delta": ledger.budget.delta}
        try:
            with private(inputs, targets, **asked, **chosen, ledger=ledger, seed=self.seed) as training:
                if ledger is not None:
                    _check_room(training, ledger)
                for _ in range(epochs):
                    for batch in training.loader:
                        training.step(batch)
                        schedule.step()
                guarantee, taken = training.guarantee(), training.steps
        finally:
            if ledger is not None:
                ledger.close()
        dense = [layer for layer in model if isinstance(layer, nn.Linear)]
        self.layers_ = [(each.weight.detach().numpy().copy(), each.bias.detach().numpy().copy()) for each in dense]
        self.guarantee_, self.n_steps_ = guarantee, taken

    def _check_ledger(self) -> None:
        if self.ledger is None and self.seed is None:
            raise InvalidParameter(
                "give ledger='some/path.ledger', the file that counts what all fits on these data spend together; "
                "one per data set, kept for as long as the data are (without one only with a seed, which makes no "
                "privacy claim)"
            )
        if not (self.ledger is None or isinstance(self.ledger, (str, Path))):
            raise InvalidParameter(f"ledger must be the path of a file, got {type(self.ledger).__name__}")

    def _opened_ledger(self) -> Ledger | None:
        if self.ledger is None:
            return None
        ledger = opened_ledger(self.ledger, PrivacyBudget(epsilon=self.epsilon, delta=self.delta))
        if ledger.budget.delta != self.delta:
            ledger.close()
            raise InvalidParameter(
                f"the budget of {self.ledger} is stated at delta {ledger.budget.delta:g}, this fit at {self.delta:g}; "
                "use the ledger's delta"
            )
        return ledger

    def _outputs(self, X: Any) -> npt.NDArray[np.float64]:
        check_is_fitted(self, "layers_")
        X = validate_data(self, X, reset=False, dtype=np.float64, ensure_all_finite=False)
        values = self._inputs(X).numpy().astype(np.float64)
        for weights, offset in self.layers_[:-1]:
            # einsum, whose sums do not depend on how many rows are predicted at once, unlike those of a matrix product.
            values = np.tanh(np.einsum("ij,kj->ik", values, weights) + offset)
        weights, offset = self.layers_[-1]
        return np.asarray(np.einsum("ij,kj->ik", values, weights) + offset)


@dataclass(kw_only=True, eq=False, repr=False)
class PrivateClassifier(ClassifierMixin, _Tables):  # type: ignore[misc]
    """A classifier for tables whose `fit` is differentially private; scikit-learn's interface.

    Every `fit` spends `epsilon`, and the ledger adds up all fits on the same data: a grid search of 20 candidates in 5
    folds is 101 fits. Scores on held-out rows of the private table are released without noise: choose by public data.

    Args:
        ledger: path of the file that counts what fits on these data spend. If it does not exist it is made, with this
            fit's epsilon and delta as the budget of all fits; make it with `Ledger.open` to allow several. A fit that
            would exceed the budget is refused before it begins.
        bounds: public bounds of the features: one pair (low, high) for all, a pair for each, or a mapping from column
            names to pairs. Never look them up in the data. A value outside counts as the nearest bound, NaN as the
            middle.
        classes: the labels that there may be, known without the data. A row with another label adds nothing. "from_y"
            takes those that occur in y; the guarantee then assumes that they are public.
        epsilon, delta: what one fit spends.
        hidden: widths of hidden layers with tanh; none for a linear model.
        epochs, batch_size, learning_rate: by the recipe of `bqsgd train`, which knows the number of rows and features
            and no values, unless given. The learning rate falls along a line.
        clip_norm: Euclidean bound of a row's gradient.
        mechanism: levels and trials instead of planned ones. A fit then spends what they cost instead of epsilon; the
            ledger still enforces its budget.
        force: train even if the planned noise leaves next to nothing to be learnt.
        seed: reproducible noise and batches; anyone who knows it can remove the noise: no privacy claim.

    Attributes:
        guarantee_: what everything in the ledger guarantees, this fit included, with relation, unit, trust and method.
        classes_: the labels, sorted.
        n_steps_: private steps of the fit.

    There are no sample weights: a weight would multiply what one row can change.

    Raises (from `fit`):
        InvalidParameter: no ledger, no bounds or no classes, or one of them is not valid. Nothing was spent.
        CannotLearn: the noise for this epsilon is larger than anything that could be learnt. Nothing was spent.
        BudgetExhausted: the ledger has no room for this fit. Nothing was spent.

    >>> import tempfile
    >>> X = np.linspace(-1, 1, 400)[:, None]
    >>> model = PrivateClassifier(ledger=tempfile.mkdtemp() + "/me.ledger", bounds=(-1, 1), classes=[0, 1],
    ...                           epsilon=4, epochs=3, batch_size=400, mechanism=Mechanism(levels=1, trials=3000))
    >>> model.fit(X, X[:, 0] > 0).predict([[-0.9], [0.9]]).shape
    (2,)
    >>> model.guarantee_.epsilon <= 4, model.guarantee_.unit.value, model.guarantee_.relation.value
    (True, 'sample', 'add/remove one')
    """

    classes: Any = None
    classes_: _Array = field(init=False)

    def fit(self, X: Any, y: Any) -> Self:
        """Learn from the table X (a row per sample) and its labels y; this spends from the ledger."""
        X, y = self._table(X, y)
        classes = _classes_of(self.classes, y)
        inputs, labels = self._inputs(X), torch.from_numpy(_numbers_of(y, classes))
        self._train(inputs, labels, outputs=len(classes), loss_fn=nn.CrossEntropyLoss(reduction="none"))
        if _is_from_y(self.classes) and self.guarantee_ is not None:
            self.guarantee_ = self.guarantee_.assuming(_PUBLIC_CLASSES)
        self.classes_ = classes
        return self

    def predict_proba(self, X: Any) -> npt.NDArray[np.float64]:
        """The probability of each class, in the order of `classes_`."""
        scores = self._outputs(X)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        return np.asarray(weights / weights.sum(axis=1, keepdims=True))

    def predict(self, X: Any) -> _Array:
        """The most probable class of each row."""
        scores = self._outputs(X)
        return np.asarray(self.classes_[scores.argmax(axis=1)])


@dataclass(kw_only=True, eq=False, repr=False)
class PrivateRegressor(RegressorMixin, _Tables):  # type: ignore[misc]
    """A regressor for tables whose `fit` is differentially private; scikit-learn's interface.

    Args:
        target_bounds: public bounds (low, high) of the target. A target outside counts as the nearest bound, and a row
            whose target is NaN adds nothing. Predictions lie within them.

    All other parameters, attributes and errors are those of `PrivateClassifier`. Every fit spends.
    """

    target_bounds: Any = None

    def fit(self, X: Any, y: Any) -> Self:
        """Learn from the table X (a row per sample) and its targets y; this spends from the ledger."""
        X, y = self._table(X, y)
        low, high = _pair("target_bounds", self.target_bounds)
        if y.dtype.kind not in "biuf":
            y = y.astype(np.float64)
        targets = _scaled(y.astype(np.float64), low, high, missing=np.nan)
        self._train(
            self._inputs(X), torch.from_numpy(targets.astype(np.float32)), outputs=1, loss_fn=_half_squared_error
        )
        return self

    def predict(self, X: Any) -> npt.NDArray[np.float64]:
        """The expected target of each row, within the target's bounds."""
        outputs = self._outputs(X)[:, 0]
        low, high = _pair("target_bounds", self.target_bounds)
        return np.asarray(low + (np.clip(outputs, -1, 1) + 1) / 2 * (high - low))


def _half_squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs[:, 0] - targets).square() / 2


def _dense(features: int, hidden: Sequence[int], outputs: int) -> nn.Sequential:
    """Dense layers with tanh between them. The last begins at zero, the others at public constants."""
    widths = [features, *(check_int("hidden", width, 1, 2**20) for width in hidden), outputs]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        for inner, outer in pairwise(widths):
            layers += [nn.Linear(inner, outer), nn.Tanh()]
    last = layers[-2]
    assert isinstance(last, nn.Linear)
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    return nn.Sequential(*layers[:-1])


def _scaled(values: _Array, low: Any, high: Any, *, missing: float = 0.0) -> npt.NDArray[np.float64]:
    """From [low, high] to [-1, 1], clamped; NaN becomes `missing`."""
    share = (np.clip(values, low, high) - low) / (np.asarray(high) - low)
    return np.where(np.isnan(values), missing, np.clip(2 * share - 1, -1, 1))


def _pair(name: str, pair: Any) -> tuple[float, float]:
    if pair is None:
        raise InvalidParameter(
            f"give {name}: public limits (low, high), known without the data. Limits taken from the data would tell "
            "its smallest and largest values"
        )
    try:
        low, high = (float(value) for value in pair)
    except (TypeError, ValueError):
        raise InvalidParameter(f"{name} must be a pair (low, high), got {pair!r}") from None
    if not (np.isfinite([low, high, high - low]).all() and low < high):
        raise InvalidParameter(f"{name} must be finite with low < high, got {pair!r}")
    return low, high


def _feature_bounds(bounds: Any, features: int, names: Any) -> tuple[_Array, _Array]:
    """The lower and the upper bound of every feature."""
    if isinstance(bounds, Mapping):
        if names is None:
            raise InvalidParameter("bounds by column name need a table with column names")
        unbounded = [name for name in names if name not in bounds]
        if unbounded:
            raise InvalidParameter(f"bounds has no pair for the columns {', '.join(map(str, unbounded))}")
        pairs = [_pair(f"bounds[{name!r}]", bounds[name]) for name in names]
    else:
        if bounds is None or np.ndim(bounds) < 2:
            pairs = [_pair("bounds", bounds)] * features
        else:
            pairs = [_pair(f"bounds[{number}]", pair) for number, pair in enumerate(bounds)]
        if len(pairs) != features:
            raise InvalidParameter(f"bounds has {len(pairs)} pairs for a table of {features} features")
    low, high = np.asarray(pairs, dtype=np.float64).T
    return low, high


def _given(name: str, value: int | None, otherwise: int) -> int:
    return otherwise if value is None else check_int(name, value, 1, 2**31)


def _is_from_y(classes: Any) -> bool:
    return isinstance(classes, str) and classes == FROM_Y


def _classes_of(classes: Any, y: _Array) -> _Array:
    """The labels, sorted."""
    if classes is None or (isinstance(classes, str) and classes != FROM_Y):
        raise InvalidParameter(
            "give classes: the labels that there may be, known without the data, such as [0, 1]. If the labels that "
            f'occur in y are public, classes="{FROM_Y}" takes those'
        )
    if _is_from_y(classes):
        if y.dtype.kind == "f" and not np.isfinite(y).all():
            raise InvalidParameter("y holds NaN or infinity, which are no labels; give classes")
        check_classification_targets(y)
        labels = np.unique(y)
    else:
        labels = np.unique(check_array(classes, ensure_2d=False, dtype=None, input_name="classes"))
        numeric = [array.dtype.kind in "biuf" for array in (labels, y)]
        if numeric[0] != numeric[1]:
            raise InvalidParameter(f"classes has labels of type {labels.dtype}, and y of type {y.dtype}")
    if len(labels) < 2:
        raise InvalidParameter(f"a classifier needs at least two classes, got one class: {labels.tolist()}")
    return labels


def _numbers_of(y: _Array, classes: _Array) -> npt.NDArray[np.int64]:
    """The number of each row's label; NO_CLASS for a label that is not among the classes."""
    numbers = np.full(len(y), NO_CLASS, dtype=np.int64)
    for number, label in enumerate(classes):
        numbers[y == label] = number
    return numbers


def _check_room(training: Private, ledger: Ledger) -> None:
    """Raise if this fit, after everything that the ledger holds, would exceed the ledger's budget."""
    total = training.plan.guarantee
    if not total.epsilon <= ledger.budget.epsilon:
        spent = training.guarantee()
        raise BudgetExhausted(
            f"this fit would bring what {ledger.path} counts from epsilon "
            f"{0 if spent is None else rounded_up(spent.epsilon)} to {rounded_up(total.epsilon)} at delta "
            f"{total.delta:g}, and the budget of all fits on these data is {ledger.budget.epsilon}: keep the model "
            "that is fitted, ask for less, or raise the budget with Ledger(path).change_budget(...). Nothing was spent"
        )
