"""All settings of a run together: one table that config.toml, the command line and Flower's configuration follow.

A setting has a group (`config.privacy.epsilon`) and a name that is the same everywhere outside the group: the option
`--epsilon`, the keyword of `Config.of(epsilon=3)`, the key in Flower's run configuration. In config.toml it stands in
the table of its group.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from bqsgd._src.errors import InvalidParameter
from bqsgd._src.params import check_int
from bqsgd._src.persample.clips import L2, Clip
from bqsgd._src.planner.search import LEAST_FINE_BITS
from bqsgd._src.release import Scheme, Unit
from bqsgd._src.settings.group import Group, by_group, read_tables
from bqsgd._src.settings.groups import (
    CENTRED,
    LEAST_SQUARES,
    ClientSettings,
    ClipSettings,
    Privacy,
    RunSettings,
    SecureSettings,
    ServerSettings,
)


@dataclass(frozen=True, kw_only=True)
class Config:
    """All settings of a run.

    >>> config = Config.of(clients=10, epsilon=2.0, clip="l2")
    >>> config.privacy.epsilon, config.clients.count, config.clip.rule
    (2.0, 10, 'l2')
    """

    privacy: Privacy = field(default_factory=Privacy)
    clip: ClipSettings = field(default_factory=ClipSettings)
    clients: ClientSettings = field(default_factory=ClientSettings)
    server: ServerSettings = field(default_factory=ServerSettings)
    secure: SecureSettings = field(default_factory=SecureSettings)
    run: RunSettings = field(default_factory=RunSettings)

    def __post_init__(self) -> None:
        privacy, clients, server = self.privacy, self.clients, self.server
        together, rounds = clients.cohort or clients.count, self.run.rounds
        groups = self.secure.groups if self.secure.groups > 1 else None
        if server.quorum > together or server.fewest_updates > (groups or together):
            raise InvalidParameter(
                f"{together} clients{f' in {groups} groups' if groups else ''} can never meet quorum={server.quorum} "
                f"and the {server.fewest_updates} updates that {server.aggregation} needs with "
                f"byzantine={server.byzantine}"
            )
        if privacy.unit == Unit.SAMPLE and clients.local_steps > 1:
            raise InvalidParameter(
                f"local_steps={clients.local_steps} clips the client's whole update, so no claim about one sample can "
                "be made: set unit = 'client' (a guarantee for the whole client), or local_steps = 1"
            )
        if privacy.unit == Unit.CLIENT and self.clip.rule == "batch-mean":
            raise InvalidParameter(
                "with unit = 'client' the whole update is clipped: set clip to one that bounds a sample, such as l2"
            )
        for change in privacy.budgets:
            check_int("budgets.client", change.client, 0, clients.count - 1)
            check_int("budgets.from_round", change.from_round, 0, rounds - 1)
            # Raises now for a budget that is invalid, and not in mid-run when it comes into force.
            privacy.budget(client=change.client, round=change.from_round)
            # A client does not know beforehand in which rounds its cohort's turn comes, so it could not plan for them.
            if change.from_round and clients.cohort is not None:
                raise InvalidParameter(
                    "budgets that change in mid-run need clients that answer every round: leave out from_round, or "
                    "the cohort"
                )
        if clients.turns is not None and clients.turns < self._fewest_turns:
            raise InvalidParameter(
                f"{rounds} rounds that ask {self.asked} of {clients.count} clients take {self._fewest_turns} turns of "
                f"each, got turns={clients.turns}"
            )
        # Last, because these checks use the number of clients asked, which is only meaningful for a valid cohort.
        if self.secure.on:
            self._check_secure()
        if self.run.method == LEAST_SQUARES:
            self._check_least_squares()
        if self.run.method == CENTRED:
            self._check_centred()

    def _check_centred(self) -> None:
        """Raise if a setting does not go with a first round of features and later ones of a sample's gradients."""
        rules = (
            (self.run.rounds > 1, "measures the centre in the first of its rounds: set rounds = 2 or more"),
            (self.privacy.unit == Unit.SAMPLE, "hides one sample: set unit = 'sample'"),
            (self.clip.rule in ("dual", "l2"), "scales features to a norm: set clip = 'dual' or 'l2'"),
            (self.server.down_bits is None, "sends the centre in the model, whole: leave out down_bits"),
        )
        _check_rules(CENTRED, rules)

    def _check_least_squares(self) -> None:
        """Raise if a setting needs steps, rounds or gradients, which one message of moments does not have."""
        privacy, server = self.privacy, self.server
        every_sample = privacy.scheme is Scheme.NONE or (privacy.scheme is Scheme.POISSON and privacy.rate == 1)
        rules = (
            (self.run.rounds == 1, "takes one round: set rounds = 1"),
            (every_sample, "takes every sample of a client once: set rate = 1 or sampling = 'none'"),
            (privacy.unit == Unit.SAMPLE, "hides one sample: set unit = 'sample'"),
            (isinstance(self.clip.make(), L2), "scales the moments of a sample to a norm: set clip = 'dual' or 'l2'"),
            (self.clients.one_in == 1, "needs all moments: leave out one_in"),
            (not self.clients.packed_rows, "runs no model over the samples: leave out packed_rows"),
            (server.optimizer == "sgd" and not server.subtract_noise, "takes no steps: leave out the optimizer"),
            (server.average == 0, "has one model and nothing to average: leave out average"),
            (server.aggregation == "mean", "needs to know the noise in the mean: set aggregation = 'mean'"),
            (self.secure.groups == 1, "takes one sum, in full precision: leave out groups"),
            (server.down_bits is None, "does not use the model that is sent down: leave out down_bits"),
        )
        _check_rules(LEAST_SQUARES, rules)

    def _check_secure(self) -> None:
        """Raise if a setting needs single messages, or clients that differ, which a secure sum does not have."""
        privacy, server, clients = self.privacy, self.server, self.clients
        if self.secure.groups > 1 and clients.cohort is not None:
            raise InvalidParameter(
                "groups are the same in every round, so all clients are asked: leave out cohort, or groups"
            )
        self.secure.rules(self.asked)  # raises Infeasible for dropouts and colluders that no sum can bear
        if server.aggregation != "mean" and self.secure.groups == 1:
            raise InvalidParameter(
                f"aggregation = {server.aggregation!r} compares single messages, which the server does not see with "
                "secure sums: set aggregation = 'mean', or groups = 3 or more for a sum over each group"
            )
        if clients.coding != "fixed":
            raise InvalidParameter(
                "coding = 'entropy' makes likely codes short, but under a mask all codes are equally likely: with "
                "secure sums set coding = 'fixed'"
            )
        if server.weights == "size":
            raise InvalidParameter(
                "weights = 'size' needs single messages, and a secure sum adds all clients alike: leave out weights. "
                "With one rate for clients of all sizes, every sample counts alike"
            )
        if privacy.bits < LEAST_FINE_BITS:
            raise InvalidParameter(
                f"bits = {privacy.bits} is reached by coarsening, and the sum of coarse codes does not follow from the "
                "sum of fine ones: secure sums choose their own modulus, which follows the sums; `bqsgd plan "
                f"--secure --bits {privacy.bits}` finds levels and trials of a sum in {privacy.bits} bits"
            )
        if privacy.budgets:
            raise InvalidParameter(
                "secure sums need one budget for all clients, because they share the noise: leave out budgets"
            )
        if clients.ask is not None:
            cohort, ask = clients.cohort or clients.count, clients.ask
            raise InvalidParameter(
                f"the noise of a secure sum is planned for all clients that are asked and for how many of them may be "
                f"missing: instead of cohort={cohort} and ask={ask} set cohort={ask} and dropouts={ask - cohort}"
            )

    @property
    def asked(self) -> int:
        """Clients that are asked in a round."""
        clients = self.clients
        return clients.count if clients.cohort is None else clients.ask or clients.cohort

    @property
    def fewest_clients(self) -> int:
        """Clients without whose replies no round can count."""
        server, secure = self.server, self.secure
        if not secure.on:
            return server.fewest_frames
        sums = server.fewest_updates if secure.groups > 1 else 1
        return max(server.quorum, sums * min(rule.fewest for rule in secure.rules(self.asked)))

    @property
    def sends_sums(self) -> bool:
        """Whether a client that repeats the server's steps is sent sums; of several groups it is sent an estimate."""
        return self.secure.on and self.secure.groups == 1

    @property
    def _fewest_turns(self) -> int:
        """How often a client is asked if all clients are asked equally often, rounded up."""
        return -(-self.run.rounds * self.asked // self.clients.count)

    @property
    def turns(self) -> int:
        """The most messages that one client sends: every round, or as often as it is asked."""
        if self.clients.cohort is None:
            return self.run.rounds
        return min(self.run.rounds, self.clients.turns or self._fewest_turns)

    @property
    def message_clip(self) -> Clip:
        """The clip of what a sample adds to a message: of its gradient, or of the kept part of it."""
        return self.clip.make().of_share(1 / self.clients.one_in)

    @property
    def rotates(self) -> bool:
        """Whether a subset is one of rotated coordinates: a norm of the kept part then tells that of the whole."""
        return self.clients.one_in > 1 and self.clip.scales

    @property
    def shares_subset(self) -> bool:
        """Whether all clients keep the same coordinates, because sums or robust rules need them side by side."""
        return self.secure.on or self.server.aggregation != "mean"

    @property
    def repeats_steps(self) -> bool:
        """Whether clients may be sent a round's aggregate instead of the model, and repeat the server's step.

        All clients must send the same coordinates. The estimate of a robust rule, or from several sums, is in float32,
        so it is smaller than a model only if it holds fewer coordinates.
        """
        smaller = self.sends_sums or (self.shares_subset and self.clients.one_in > 1)
        return smaller and self.server.down_bits is None and self.run.method != LEAST_SQUARES

    def kept(self, dimension: int) -> int:
        """How many of a model's coordinates a message carries."""
        return -(-dimension // self.clients.one_in)

    @property
    def range(self) -> float:
        """R: coordinates are clamped to [-R, R] and encoded there."""
        clip = self.clip
        if clip.range is not None:
            return clip.range
        if self.secure.on:
            # No wider than it must be not to clamp. What it costs is levels, not bits: the modulus follows the sums.
            return self.message_clip.largest
        bound = clip.make().usual_range
        averaged = clip.scales and self.privacy.unit == Unit.SAMPLE
        return min(bound, 4 * clip.norm / self.privacy.batch_size) if averaged else bound

    @property
    def summed(self) -> str:
        """The settings that decide what a client adds to a secure sum, as JSON with sorted names.

        Masks depend on them, as on the model: clients that were sent other ones would stand out in a sum.
        """
        flat = self.flat() | {"range": self.range}
        return json.dumps({name: flat[name] for name in _SUMMED}, sort_keys=True, separators=(",", ":"))

    @classmethod
    def of(cls, **values: Any) -> Config:
        """Build from the settings' own names, whatever their group. An unknown name is refused, never ignored."""
        return cls().but(**values)

    def but(self, **values: Any) -> Config:
        """The same settings with some changed."""
        grouped = by_group(CONFIG_GROUPS, values)
        # Only the groups that change are made anew: all checks of a group run whenever it is made.
        return replace(
            self, **{name: replace(getattr(self, name), **changes) for name, changes in grouped.items() if changes}
        )

    def flat(self) -> dict[str, Any]:
        """Name -> value of every setting, whatever its group."""
        return {
            name: getattr(getattr(self, table), field.name)
            for table, group in CONFIG_GROUPS.items()
            for name, field in group.settings().items()
        }

    def to_dict(self) -> dict[str, Any]:
        """A table per group in plain values. A setting that is None is left out, because TOML has no null."""
        return {name: getattr(self, name).to_table() for name in CONFIG_GROUPS}

    @classmethod
    def from_dict(cls, tables: Mapping[str, Any]) -> Config:
        """Rebuild from the tables of `to_dict`. An unknown name is refused, never ignored."""
        return cls.of(**read_tables(CONFIG_GROUPS, tables))


def _check_rules(method: str, rules: Iterable[tuple[bool, str]]) -> None:
    for holds, text in rules:
        if not holds:
            raise InvalidParameter(f"method = {method!r} {text}")


_SUMMED = (
    "unit", "sampling", "batch_size", "rate", "levels", "clip", "clip_bound", "clip_norm", "range", "local_steps",
    "local_learning_rate", "one_in", "packed_rows", "method",
)  # fmt: skip
CONFIG_GROUPS: dict[str, type[Group]] = {group.name: group.default_factory for group in fields(Config)}  # type: ignore[misc]
"""Table of config.toml -> its group."""
