"""The settings of a new run, resolved once: (options, settings file, preset, data) -> what is learnt and how.

What is given later wins: first the recipe for the data (`settings.fit`), then the preset, the file and the options.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bqsgd._src import data
from bqsgd._src.errors import DataUnavailable, InvalidParameter
from bqsgd._src.settings.config import Config
from bqsgd._src.settings.fit import Sizes, fit
from bqsgd._src.settings.group import by_group, group_of
from bqsgd._src.storage import read_toml
from bqsgd._src.tasks.named import ALL_GROUPS, NamedTask, OwnTask
from bqsgd._src.tasks.named import preset as preset_settings
from bqsgd._src.tasks.task import Task


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """What a run learns, with which settings.

    sizes: of the data and the model; None for a resumed run, and for a task of your own that does not hold every
        client's data.
    task: your own task as it was made to be sized; None for a named one, whose features are not computed yet.
    """

    source: NamedTask | OwnTask
    config: Config
    sizes: Sizes | None = None
    task: Task | None = None

    def make_task(self, *, client: int | None = None) -> Task:
        """The task itself; client: the only one whose data this process holds, None when it holds all."""
        return self.task or self.source.task(self.config, client=client)


def resolve(options: Mapping[str, Any], *, preset: str | None = None, file: Path | None = None) -> Resolved:
    """The task and the configuration of a new run.

    options: settings by name; `task` ("module:name") is your own task, in place of a data set and a model by name.

    Raises:
        InvalidParameter: an invalid or unknown setting, or settings that do not fit each other or the data.
    """
    settings: dict[str, Any] = {} if preset is None else preset_settings(preset)
    if file is not None:
        settings |= read_settings_file(file)
    settings |= options
    if "task" in settings:
        return _resolve_own(settings)
    if "dataset" not in settings:
        settings["dataset"] = available_dataset(settings.get("data_folder"))
    grouped = by_group(ALL_GROUPS, settings)
    source = NamedTask(**grouped.pop("data"))
    chosen = {name: value for name, value in settings.items() if name not in NamedTask.settings()}
    sizes = source.sizes(chosen.get("method", "sgd"))
    return Resolved(source=source, config=fit(chosen, sizes), sizes=sizes)


def _resolve_own(settings: dict[str, Any]) -> Resolved:
    """A run with your own task: as many clients as it has shares, unless `clients` is given."""
    foreign = sorted(set(settings) & set(NamedTask.settings()))
    if foreign:
        raise InvalidParameter(f"--task brings its own data and model: leave out {', '.join(foreign)} (or the preset)")
    source = OwnTask.of(task=settings.pop("task"))
    shares = getattr(source.load(), "shares", ())
    settings = ({"clients": len(shares)} if shares else {}) | settings
    config = Config.of(**settings)
    task = source.task(config)
    if len(task.shares) != config.clients.count:  # other processes hold the other shares: nothing to fit to
        return Resolved(source=source, config=config, sizes=None, task=task)
    sizes = task.sizes(config.run.method)
    return Resolved(source=source, config=fit(settings, sizes), sizes=sizes, task=task)


def read_settings_file(path: Path) -> dict[str, Any]:
    """The settings of a TOML file with a table per group, by the names that options and keywords have."""
    settings: dict[str, Any] = {}
    for name, table in read_toml(path).items():
        settings |= group_of(ALL_GROUPS, name).read_table(name, table)
    return settings


def available_dataset(folder: str | None = None) -> str:
    """MNIST, or `digits` when no source of MNIST answers."""
    try:
        data.load("mnist", folder=folder)
    except DataUnavailable as error:
        print(f"{error}\nMNIST is unavailable, so this run uses digits instead.", file=sys.stderr)
        return "digits"
    return "mnist"
