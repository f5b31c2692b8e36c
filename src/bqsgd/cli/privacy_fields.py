"""How commands name privacy figures: a guarantee with all that belongs beside it, nominal ones with their caveat."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bqsgd.privacy.guarantee import Guarantee
    from bqsgd.privacy.nominal import NominalPrivacy

NOMINAL_NOTE = "Nominal figures: as published; not a guarantee."


def guarantee_fields(guarantee: Guarantee, *, as_json: bool) -> dict[str, Any]:
    """Everything a guarantee states; for people the epsilon reads as a sentence where it means nothing."""
    fields = {name: value for name, value in guarantee.to_dict().items() if name != "seeded"}  # nothing was sent
    if as_json:
        return fields
    return fields | {"epsilon": guarantee.epsilon_text, "delta_floor": f"{guarantee.delta_floor:.1e}"}


def nominal_fields(nominal: NominalPrivacy, *, totals: bool = True) -> dict[str, Any]:
    """Flat JSON fields of every published privacy figure, with the delta each goes with."""
    per_round = {
        "nominal_epsilon_per_round": nominal.epsilon_per_round,
        "nominal_epsilon_per_round_exact_peak": nominal.epsilon_per_round_exact_peak,
        "nominal_delta": nominal.setting.delta,
        "nominal_dimension": nominal.setting.dimension,
        "nominal_caveat": "as published; not a guarantee",
    }
    if not totals:
        return per_round
    return per_round | {
        "nominal_epsilon_total": nominal.epsilon_total,
        "nominal_epsilon_total_in_text": nominal.epsilon_total_in_text,
        "nominal_delta_total": nominal.delta_total,
        "nominal_strong_composition_epsilon": nominal.strong_epsilon,
        "nominal_strong_composition_delta": nominal.strong_delta,
    }
