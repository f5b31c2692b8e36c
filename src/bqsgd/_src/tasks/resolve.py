"""The settings of a new run, resolved once: (options, settings file, preset, data) -> what is learnt and how.

Options win over the file, the file over the preset, and the preset over the recipe for the data (`settings.fit`).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bqsgd._src.data.dataset import load
from bqsgd._src.errors import DataUnavailable, InvalidParameter
from bqsgd._src.settings.config import Config
from bqsgd._src.settings.fit import Sizes, fit, implied
from bqsgd._src.settings.group import by_group, read_tables
from bqsgd._src.storage import read_toml
from bqsgd._src.tasks.named import ALL_GROUPS, NamedTask, OwnTask
from bqsgd._src.tasks.named import preset as preset_settings
from bqsgd._src.tasks.task import Task


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """What a run learns, and with which settings.

    sizes: of the data and the model; None for a resumed run, and for your own task if it lacks a client's data.
    task: your own task, which is made to find its sizes; None for a named task, whose features are not computed yet.
    """

    source: NamedTask | OwnTask
    config: Config
    sizes: Sizes | None = None
    task: Task | None = None

    def make_task(self, *, client: int | None = None) -> Task:
        """The task itself. client: the only one whose data this process holds; None if it holds all."""
        return self.task or self.source.task(self.config, client=client)


def resolve(options: Mapping[str, Any], *, preset: str | None = None, file: Path | None = None) -> Resolved:
    """The task and the configuration of a new run.

    options: settings by name; `task` ("module:name") is your own task, instead of a data set and a model by name.

    Raises:
        InvalidParameter: a setting is invalid or unknown, or settings do not fit each other or the data.
    """
    settings: dict[str, Any] = {} if preset is None else preset_settings(preset)
    if file is not None:
        settings |= read_settings_file(file)
    settings |= options
    if "task" in settings:
        return _resolve_own(settings)
    if "dataset" not in settings:
        settings["dataset"] = available_dataset(settings.get("data_folder"))
    # Sorting refuses unknown names before the data are read, which may download them.
    grouped = by_group(ALL_GROUPS, settings)
    source = NamedTask(**grouped.pop("data"))
    chosen = {name: value for name, value in settings.items() if name not in NamedTask.settings()}
    sizes = source.sizes(chosen.get("method", "sgd"))
    return Resolved(source=source, config=fit(chosen, sizes), sizes=sizes)


def _resolve_own(settings: dict[str, Any]) -> Resolved:
    """A run with your own task: as many clients as it has shares, unless `clients` is given."""
    named = sorted(set(settings) & set(NamedTask.settings()))
    if named:
        raise InvalidParameter(f"--task brings its own data and model: leave out {', '.join(named)} (or the preset)")
    source = OwnTask.of(task=settings.pop("task"))
    # A function (config) -> Task has no shares yet: it needs the number of clients first.
    shares = getattr(source.load(), "shares", ())
    settings = ({"clients": len(shares)} if shares else {}) | settings
    config = Config.of(**implied(settings) | settings)
    task = source.task(config)
    if "clients" not in settings and len(task.shares) > 1:  # the function has divided its data by itself
        settings["clients"] = len(task.shares)
        config = config.but(clients=len(task.shares))
        task = source.task(config)
    if len(task.shares) != config.clients.count:  # other processes hold the other shares, so the sizes are unknown
        return Resolved(source=source, config=config, sizes=None, task=task)
    sizes = task.sizes(config.run.method)
    return Resolved(source=source, config=fit(settings, sizes), sizes=sizes, task=task)


def read_settings_file(path: Path) -> dict[str, Any]:
    """The settings of a TOML file with a table per group, by the names that options and keywords have."""
    return read_tables(ALL_GROUPS, read_toml(path))


def available_dataset(folder: str | None = None) -> str:
    """MNIST, or `digits` if no source of MNIST is available."""
    try:
        load("mnist", folder=folder)
    except DataUnavailable as error:
        print(f"{error}\nMNIST is unavailable, so this run uses digits instead.", file=sys.stderr)
        return "digits"
    return "mnist"
