"""The question before there is a run: sites of these sizes, a model of this size, so many bytes up: what to set?

Both trust models are answered side by side, with the settings of the recipe as far as the upload allows them. The noise
is estimated as Gaussian, which takes milliseconds and is within a tenth of the plan's; `bqsgd train` plans exactly, and
proves what it plans. Nothing is read or sent.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from bqsgd._src.errors import BqsgdError, Infeasible, InvalidParameter
from bqsgd._src.params import MOST_ONE_IN, check_int, check_positive
from bqsgd._src.planner.recipe import rounds_for
from bqsgd._src.privacy.guarantee import as_given
from bqsgd._src.settings.config import Config
from bqsgd._src.settings.fit import Sizes, fit
from bqsgd._src.settings.outlook import NOTHING, WELL, Outlook, Verdict, figure, verdict_of, with_gaussian_noise
from bqsgd._src.text import one_line, volume

_LEFT_OUT = 4.5
"""|S|^2 over E / (n T), of which `Federation.one_in` says that runs have 3 to 6: what leaving out coordinates adds."""
_FEWEST_ROUNDS = 10
_FEWEST_PARAMETERS = 50
"""A smaller model is no advice."""
_CLOSE = 1.15
_HEADER_BYTES = 100
"""More than the header of any frame or masked vector."""
_LEAST_TRIALS, _TRIALS_PER_CLIENT = 400, 10
"""Trials in a secure sum, as `planner.sums` chooses them; for the estimate of its modulus."""
_MAP_EPSILONS = (0.5, 1.0, 2.0, 4.0, 8.0)
_MAP_PARAMETERS = (10**3, 10**4, 10**5, 10**6, 10**7)
_MARKS = {Verdict.WELL: "well", Verdict.SOMETHING: "some", Verdict.NOTHING: "-"}


@dataclass(frozen=True, kw_only=True)
class SitesOption:
    """Settings for one trust model, and what they lead to.

    noise_to_signal: of the whole run, with what subsets of the coordinates add. bytes_up, bytes_down: of one site over
    the whole run, without the keys of secure sums; a run may send less, because moduli and models shrink on the way.
    """

    secure: bool
    rounds: int
    batch_size: int
    rate: float
    one_in: int
    bits: int
    noise_to_signal: float
    bytes_up: int
    bytes_down: int

    @property
    def verdict(self) -> Verdict:
        """What such a run learns."""
        return verdict_of(self.noise_to_signal)


@dataclass(frozen=True, kw_only=True)
class SitesAnswer:
    """The answer for both trust models. map: (epsilon, parameters, secure) -> verdict.

    >>> answer = plan_sites(sites=[500, 2000, 4000], parameters=1000, epsilon=1.0)
    >>> answer.map[8.0, 1000, False], answer.options[0].rounds
    (<Verdict.WELL: 'learns well'>, 60)
    """

    sites: tuple[int, ...]
    parameters: int
    epsilon: float
    delta: float
    upload: float | None
    options: tuple[SitesOption, ...]
    map: dict[tuple[float, int, bool], Verdict]

    @property
    def title(self) -> str:
        """The question in one line."""
        few, many = min(self.sites), max(self.sites)
        sites = f"{len(self.sites)} sites" if len(self.sites) > 1 else "1 site"
        samples = f"{few:,} to {many:,}" if few < many else f"{few:,}"
        upload = "" if self.upload is None else f", {volume(self.upload)} up per site"
        return (
            f"Plan for {sites} with {samples} samples, {self.parameters:,} parameters, epsilon "
            f"{as_given(self.epsilon)} at delta {self.delta:g}{upload}"
        )

    @property
    def lines(self) -> dict[str, str]:
        """Both trust models, the advice that follows, and the map of verdicts."""
        lines = {}
        for option in self.options:
            name = "secure sums" if option.secure else "each message seen"
            lines[name] = (
                f"the model {option.verdict} (noise to signal {figure(option.noise_to_signal)}); {option.rounds} "
                f"rounds, at most {volume(option.bytes_up)} up and {volume(option.bytes_down)} down per site"
            )
            if option.verdict is not Verdict.NOTHING:
                # Two rows of one name would be one: the second has a blank more, as on the maps.
                lines[f"  settings{' ' * option.secure}"] = (
                    f"--clients {len(self.sites)} --epsilon {as_given(self.epsilon)} --delta {as_given(self.delta)} "
                    f"--rounds {option.rounds} --batch-size {option.batch_size} --one-in {option.one_in}"
                    f"{' --secure' * option.secure}; over Flower also rate={option.rate:.3g}"
                )
        if self.options:
            lines["noise to signal"] = f"well up to {WELL:g}, next to nothing above {NOTHING:g}"
        else:
            lines["result"] = "no message fits: allow more bytes or a smaller model"
        if self.delta > 1 / max(self.sites):
            lines["delta"] = (
                f"{self.delta:g} is above 1/n of the largest site: a method that publishes one sample in full would "
                "meet it; use a smaller delta"
            )
        lines |= {f"advice {number}": text for number, text in enumerate(self._advice(), start=1)}
        lines |= dict(self._map_lines())
        lines["epsilon"] = (
            "of one site, total over all rounds (add/remove one sample); an estimate with Gaussian noise. bqsgd train "
            "plans exactly and proves the guarantee"
        )
        return lines

    def _advice(self) -> Iterator[str]:
        by_trust = {option.secure: option for option in self.options}
        separate, secure = by_trust.get(False), by_trust.get(True)
        if separate and secure and secure.verdict is not separate.verdict:
            yield f"use secure sums: with one noise for all sites the model {secure.verdict}"
        # Noise to signal grows like the root of the number of parameters.
        fewer = {
            option.secure: float(f"{self.parameters * (WELL / option.noise_to_signal) ** 2:.1g}")
            for option in self.options
            if option.verdict is not Verdict.WELL
        }
        useful = [
            f"about {count:,.0f} {'with' if secure else 'without'} secure sums"
            for secure, count in fewer.items()
            if count >= _FEWEST_PARAMETERS
        ]
        if useful:
            yield (
                f"train fewer parameters to learn well ({', '.join(useful)}): a smaller model, a linear model on fixed "
                "features (--features), or only the adapters of a pretrained one"
            )
        if fewer and (not useful or any(option.verdict is Verdict.NOTHING for option in self.options)):
            yield "more samples help most: noise to signal falls in proportion to the samples of all sites"

    def _map_lines(self) -> Iterator[tuple[str, str]]:
        """A picture in words: which verdict for which epsilon and model, without and with secure sums."""
        epsilons = sorted({epsilon for epsilon, _, _ in self.map})
        sizes = sorted({parameters for _, parameters, _ in self.map})
        for secure in (False, True):
            if not any(of_sums is secure for _, _, of_sums in self.map):
                continue
            label = "secure sums" if secure else "each seen"
            yield f"{label}: map", " ".join(f"{_short(size):>7}" for size in sizes) + "  parameters"
            for epsilon in epsilons:
                cells = []
                for size in sizes:
                    verdict = self.map.get((epsilon, size, secure))
                    asked = (epsilon, size) == (self.epsilon, self.parameters)
                    mark = "?" if verdict is None else _MARKS[verdict]
                    cells.append(f"{f'[{mark}]' if asked else mark:>7}")
                # The second map has a blank more.
                yield f"  epsilon {as_given(epsilon)}{' ' * secure}", " ".join(cells)

    def to_dict(self) -> dict[str, Any]:
        """Every figure in full, in plain JSON types."""
        return {
            "sites": list(self.sites),
            "parameters": self.parameters,
            "epsilon": self.epsilon,
            "delta": self.delta,
            "upload": self.upload,
            "options": [asdict(option) | {"verdict": str(option.verdict)} for option in self.options],
            "map": [
                {"epsilon": epsilon, "parameters": parameters, "secure": secure, "verdict": str(verdict)}
                for (epsilon, parameters, secure), verdict in self.map.items()
            ],
        }

    def __str__(self) -> str:
        width = max(map(len, self.lines))
        return "\n".join([self.title, *(f"  {name:<{width}}  {text}" for name, text in self.lines.items())])


def _short(size: int) -> str:
    return f"{size:.1e}".replace("e+0", "e").replace(".0e", "e")


def plan_sites(
    *, sites: Sequence[int], parameters: int, epsilon: float, delta: float = 1e-5, upload: float | None = None
) -> SitesAnswer:
    """What to set, and what to expect, for sites of these sizes, as `bqsgd plan --sites` answers it.

    Args:
        sites: how many samples each site holds.
        parameters: trained parameters of the model.
        epsilon, delta: privacy budget of each site, total over all rounds.
        upload: most bytes that one site may send over the whole run. Default: no limit.

    >>> answer = plan_sites(sites=[300, 1000, 5000], parameters=100_000, epsilon=2.0, upload=20e6)
    >>> [(option.secure, str(option.verdict)) for option in answer.options]
    [(False, 'learns something'), (True, 'learns well')]
    """
    if not sites:
        raise InvalidParameter("sites must name at least one size")
    sizes = tuple(check_int("sites", size, 1, 2**40) for size in sites)
    check_int("parameters", parameters, 1, 2**40)
    if upload is not None:
        check_positive("upload", upload)
    asked = SitesAnswer(
        sites=sizes, parameters=parameters, epsilon=epsilon, delta=delta, upload=upload, options=(), map={}
    )
    chosen = (_best(asked, secure=secure) for secure in _trusts(asked))
    epsilons, parameter_counts = sorted({*_MAP_EPSILONS, epsilon}), sorted({*_MAP_PARAMETERS, parameters})
    return replace(
        asked,
        options=tuple(option for option in chosen if option is not None),
        map=verdicts(asked, epsilons=epsilons, sizes=parameter_counts),
    )


def verdicts(
    asked: SitesAnswer, *, epsilons: Sequence[float], sizes: Sequence[int]
) -> dict[tuple[float, int, bool], Verdict]:
    """(epsilon, parameters, secure) -> verdict, for other budgets and models; without those of which no message fits.

    >>> asked = plan_sites(sites=[5000, 5000], parameters=1000, epsilon=1.0)
    >>> verdicts(asked, epsilons=[8.0], sizes=[100])
    {(8.0, 100, False): <Verdict.WELL: 'learns well'>}
    """
    found = {}
    for epsilon, parameters, secure in product(epsilons, sizes, _trusts(asked)):
        option = _best(replace(asked, epsilon=epsilon, parameters=parameters), secure=secure)
        if option is not None:
            found[epsilon, parameters, secure] = option.verdict
    return found


def _trusts(asked: SitesAnswer) -> tuple[bool, ...]:
    """Whether with secure sums: two sites know each other's part of a sum."""
    return (False, True) if len(asked.sites) > 2 else (False,)


def read_sites(path: Path) -> list[int]:
    """The sizes in a CSV file: the last field of each line. The first line may be a heading; empty lines are skipped.

    Raises:
        InvalidParameter: the file cannot be read, or a line does not end with a size. No site is passed over: the
            answer would be for another federation.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidParameter(f"{path} cannot be read as a list of sites: {error}") from error
    sizes = list[int]()
    for number, line in enumerate(lines):
        fields = [field.strip() for field in line.replace(";", ",").replace("\t", ",").split(",")]
        if fields[-1].replace("_", "").isdecimal():
            sizes.append(int(fields[-1].replace("_", "")))
        elif any(fields) and (number > 0 or any(sign.isdigit() for sign in fields[-1])):
            raise InvalidParameter(
                f"line {number + 1} of {path} is {one_line(line, limit=60)!r}; end each line with the site's number "
                "of samples, in digits alone"
            )
    if not sizes:
        raise InvalidParameter(f"{path} holds no size: write one line per site, with its number of samples at the end")
    return sizes


def read_bytes(text: str) -> float:
    """A number of bytes such as 20MB, 1.5 GB or 300000.

    >>> read_bytes("20MB"), read_bytes("1.5 gb"), read_bytes("300000")
    (20000000.0, 1500000000.0, 300000.0)
    """
    plain = text.strip().upper().removesuffix("B").strip()
    factor = {"K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}.get(plain[-1:], 1.0)
    try:
        return check_positive("upload", float(plain.rstrip("KMGT").strip()) * factor)
    except ValueError:
        raise InvalidParameter(f"--upload must be a number of bytes such as 20MB, got {text!r}") from None


def _best(asked: SitesAnswer, *, secure: bool) -> SitesOption | None:
    """The most rounds within the upload whose noise to signal is close to the least; None if no message fits."""
    rounds, options = rounds_for(sum(asked.sites)), list[SitesOption]()
    while rounds >= _FEWEST_ROUNDS:
        option = _with_rounds(asked, rounds, secure=secure)
        if option is not None:
            options.append(option)
        rounds //= 2
    # Few rounds with large batches have little noise as well, but they leave few steps to learn in.
    least = min((option.noise_to_signal for option in options), default=0.0)
    return next((option for option in options if option.noise_to_signal <= _CLOSE * least), None)


def _with_rounds(asked: SitesAnswer, rounds: int, *, secure: bool) -> SitesOption | None:
    clients, dimension = len(asked.sites), asked.parameters
    given = {
        "clients": clients, "rounds": rounds, "epsilon": asked.epsilon, "delta": asked.delta, "secure": secure,
    }  # fmt: skip
    sizes = Sizes(samples=sum(asked.sites), dimension=dimension, parameters=dimension)
    try:
        config = fit(given, sizes)
        bits = _bits(config, asked)
        if asked.upload is not None:
            kept = int((asked.upload / rounds - _HEADER_BYTES) * 8 / bits)
            if kept < 1:
                return None
            one_in = max(config.clients.one_in, -(-dimension // kept))
            if one_in > min(MOST_ONE_IN, dimension):
                return None
            config = fit(given | {"one_in": one_in}, sizes)
            bits = _bits(config, asked)
    except Infeasible:
        return None  # too few sites for a secure sum
    except BqsgdError as error:
        raise InvalidParameter(str(error)) from error
    one_in = config.clients.one_in
    forecast = _outlook(config, asked).forecast
    messages = rounds * (1 if secure else clients)
    left_out = math.sqrt(1 + _LEFT_OUT * (one_in - 1) / messages)
    frame = math.ceil(config.kept(dimension) * bits / 8) + _HEADER_BYTES
    assert config.privacy.rate is not None
    return SitesOption(
        secure=secure,
        rounds=rounds,
        batch_size=config.privacy.batch_size,
        rate=config.privacy.rate,
        one_in=one_in,
        bits=bits,
        noise_to_signal=forecast.noise_to_signal * left_out,
        bytes_up=rounds * frame,
        bytes_down=rounds * (4 * dimension + _HEADER_BYTES),
    )


def _outlook(config: Config, asked: SitesAnswer) -> Outlook:
    samples = dict(enumerate(asked.sites))
    dimension = config.kept(asked.parameters)
    return with_gaussian_noise(Outlook(config=config, samples=samples, dimension=dimension, learnt=asked.parameters))


def _bits(config: Config, asked: SitesAnswer) -> int:
    """Bits per coordinate: those of the settings, or of the modulus that `planner.sums` would choose."""
    if not config.secure.on:
        return config.privacy.bits
    clients, noise = len(asked.sites), _outlook(config, asked).noise
    assert noise is not None
    trials = max(_LEAST_TRIALS, _TRIALS_PER_CLIENT * clients)
    noise /= math.sqrt(config.clients.one_in)  # of a coordinate of the sum's mean, before it stands for its neighbours
    levels = max(1.0, math.sqrt(trials) * config.range / (2 * clients * noise))
    return math.ceil(math.log2(2 * clients * levels + 2 * trials + 1))
