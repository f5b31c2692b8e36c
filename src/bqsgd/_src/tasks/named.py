"""Tasks by name: a data set, its features, its shares among the clients and a model, all chosen by settings.

Also presets by name: the points of the frontier (docs/frontier.md), each found on held-out training data.
"""

from __future__ import annotations

import importlib
import os
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from bqsgd._src.client.draws import Purpose, seed_for
from bqsgd._src.data.dataset import Split, load
from bqsgd._src.data.features import FEATURES, PUBLIC_DATA, features_shape, whole_features
from bqsgd._src.data.shares import load_shares
from bqsgd._src.errors import InvalidParameter
from bqsgd._src.params import check_choice, check_int
from bqsgd._src.settings.config import CONFIG_GROUPS, Config
from bqsgd._src.settings.fit import Sizes
from bqsgd._src.settings.group import Group, by_group, file_setting, setting

if TYPE_CHECKING:
    from torch import nn

    from bqsgd._src.tasks.task import Task


@dataclass(frozen=True, kw_only=True)
class NamedTask(Group):
    """A task that the settings describe by names; your own `Task` has none of these settings.

    init_seed: decides the initial model and which client holds which samples; both are public.

    >>> NamedTask.of(dataset="digits").features
    'none'
    """

    title = "Data and model"
    dataset: str = setting(
        "mnist",
        "mnist, fashion-mnist, cifar-10, shakespeare, rand-hie or digits. Default: mnist if its files are here, else "
        "digits.",
    )
    data_folder: str | None = setting(None, "Folder that holds the files of the data set.")
    features: str = setting(
        "none",
        "none; scattering: fixed wavelet features; whitened: those for fewer rounds; imagenet: of a network trained on "
        "ImageNet; or imagenet-pair: of two.",
        choices=FEATURES,
    )
    model: str | None = setting(
        None, "lenet5, cnn, alexnet28, mlp, linear, pooled or context. Default: one that fits the data."
    )
    activation: str = file_setting("tanh", "tanh or relu.")
    concentration: float | None = setting(
        None,
        "Skew of the labels between clients: a Dirichlet concentration, smaller is more skewed. Default: even shares.",
        positive=True,
    )
    init_seed: int = setting(0, "Public seed of the initial model and of the data shares.", between=(0, 2**63 - 1))

    def sizes(self, method: str = "sgd") -> Sizes:
        """How large the data and the model are. No feature is computed for this."""
        from bqsgd._src.tasks.task import sizes_of

        dataset = load(self.dataset, folder=self.data_folder)
        make_model = self._make_model(features_shape(self.features, dataset.input_shape), dataset.classes)
        return sizes_of(make_model(), samples=len(dataset.train), method=method)

    def task(self, config: Config, *, client: int | None = None, simulated: bool = False) -> Task:
        """The task among the clients of `config`.

        client: the only one whose share is loaded, in a process that works for one; client 0 has the test data too.
        simulated: the process works for many clients in turn, so it reads the data once, for all of them.
        """
        if simulated and client is not None:
            whole = self.task(config)
            return replace(whole, shares=[whole.shares[check_int("client", client, 0, config.clients.count - 1)]])
        divided = load_shares(
            self.dataset,
            folder=self.data_folder,
            features=self.features,
            clients=config.clients.count,
            client=client,
            seed=seed_for(self.init_seed, Purpose.SHARES),
            concentration=self.concentration,
            threads=config.clients.workers,
        )
        return self._task(divided.input_shape, divided.classes, divided.test, divided.shares)

    def server_task(self, config: Config) -> Task:
        """The task of a server without clients of its own: the initial model and the test data."""
        dataset = load(self.dataset, folder=self.data_folder)
        test = whole_features(self.features, "test", of=dataset, threads=config.clients.workers)
        return self._task(features_shape(self.features, dataset.input_shape), dataset.classes, test)

    def _task(self, shape: tuple[int, ...], classes: int, test: Split | None, shares: Iterable[Split] = ()) -> Task:
        from bqsgd._src.tasks.task import Task  # imported here because it loads torch

        return Task(
            make_model=self._make_model(shape, classes),
            shares=[(share.inputs, share.labels) for share in shares],
            test=None if test is None else (test.inputs, test.labels),
            public_data=PUBLIC_DATA.get(self.features, ""),
            source=self,
        )

    def _make_model(self, shape: tuple[int, ...], classes: int) -> Callable[[], nn.Module]:
        from bqsgd._src import models

        name = self.model or models.default_for(shape, features=self.features)
        seed = seed_for(self.init_seed, Purpose.MODEL)
        return lambda: models.build(name, input_shape=shape, classes=classes, seed=seed, activation=self.activation)


@dataclass(frozen=True, kw_only=True)
class OwnTask(Group):
    """Your own `Task`, found by module and name.

    bqsgd imports only what the user of this process typed, never what a server or a file from elsewhere names.

    load_from: "module:name" of a `Task`, or of a function (config) -> Task; the current folder is searched first.
    """

    title = "Data and model"
    load_from: str = setting("", "module:name of a Task of your own, or of a function (config) -> Task.", name="task")

    @property
    def dataset(self) -> str:
        """What a run folder is named after."""
        return self.load_from.partition(":")[0].rpartition(".")[2]

    def load(self) -> Any:
        """Import the Task, or the function (config) -> Task.

        Raises:
            InvalidParameter: there is no such module, or no such name in it.
        """
        module, colon, name = self.load_from.partition(":")
        if not (module and colon and name):
            raise InvalidParameter(f"--task must be module:name, for example my_module:task, got {self.load_from!r}")
        # The `bqsgd` command does not search the current folder, unlike `python -m`.
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
        try:
            return getattr(importlib.import_module(module), name)
        except AttributeError as error:
            raise InvalidParameter(f"--task {self.load_from}: {error}") from error
        except Exception as error:  # a user's module may raise anything while it is imported
            raise InvalidParameter(
                f"--task {self.load_from}: importing {module} failed: {type(error).__name__}: {error}"
            ) from error

    def task(self, config: Config, *, client: int | None = None) -> Task:
        """The task with the shares of all clients; a process that works for one client uses only its share."""
        from bqsgd._src.tasks.task import Task

        task = self.load()
        if not isinstance(task, Task) and callable(task):
            try:
                task = task(config)
            except Exception as error:
                raise InvalidParameter(f"--task {self.load_from}: {type(error).__name__}: {error}") from error
        if not isinstance(task, Task):
            raise InvalidParameter(
                f"--task {self.load_from} is {type(task).__name__}, not a bqsgd.Task or a function (config) -> Task"
            )
        return replace(task, source=self)


ALL_GROUPS: dict[str, type[Group]] = {"data": NamedTask, **CONFIG_GROUPS}


def stored_task(data: Mapping[str, Any]) -> NamedTask | OwnTask:
    """The task of a run folder's [data] table."""
    # Nothing is imported yet: `bqsgd train --resume` first compares the name with the one that the user typed.
    kind = OwnTask if "load_from" in data else NamedTask
    return kind.of(**kind.read_table("data", data))


def settings_of(**values: Any) -> tuple[NamedTask, Config]:
    """A named task and the settings of a run, from the names of both. An unknown name is refused.

    >>> named, config = settings_of(dataset="digits", rounds=30)
    >>> named.dataset, config.run.rounds
    ('digits', 30)
    """
    grouped = by_group(ALL_GROUPS, values)
    named = NamedTask(**grouped.pop("data"))
    groups: dict[str, Any] = {name: CONFIG_GROUPS[name](**table) for name, table in grouped.items()}
    return named, Config(**groups)


def plain_settings(named: NamedTask | OwnTask | None, config: Config) -> dict[str, Any]:
    """Every setting that is set, by name: the inverse of `settings_of`."""
    task = {} if named is None else {name: getattr(named, field.name) for name, field in named.settings().items()}
    return {name: value for name, value in (task | config.flat()).items() if value is not None}


@lru_cache(maxsize=1)
def presets() -> dict[str, dict[str, Any]]:
    """Every preset as plain settings, by name."""
    text = resources.files(__package__).joinpath("presets.toml").read_text(encoding="utf-8")
    tables = tomllib.loads(text)
    shared = {name: value for name, value in tables.items() if not isinstance(value, dict)}
    return {name: shared | table for name, table in tables.items() if isinstance(table, dict)}


def preset(name: str) -> dict[str, Any]:
    """A copy of the settings of the preset `name`, for the caller to change.

    >>> preset("mnist-eps1")["epsilon"]
    1.16
    """
    known = presets()
    return dict(known[check_choice("preset", name, known)])  # a copy, because `presets` is cached
