"""`bqsgd demo`: one gradient of LeNet-5's size through the whole path, vector -> codes -> frame -> vector."""

from __future__ import annotations

from typing import Annotated

import typer

from bqsgd.cli.output import Json, emit

LENET5_DIMENSION = 61_706


def demo(
    levels: Annotated[int, typer.Option(help="Quantisation levels of the mechanism, s.")] = 2,
    trials: Annotated[int, typer.Option(help="Binomial trials of the mechanism, m.")] = 251,
    clients: Annotated[int, typer.Option(help="Clients that send the same gradient.", min=1, max=100_000)] = 100,
    json: Json = False,
) -> None:
    """Encode a gradient of LeNet-5's size, frame it, decode it, and add up the frames of many clients.

    Example: bqsgd demo --levels 2 --trials 251
    """
    import numpy as np

    from bqsgd.codec import Accumulator, decode_frame, encode_frame
    from bqsgd.mechanism.properties import noise_variance
    from bqsgd.noise import privacy_rng
    from bqsgd.params import Mechanism

    mechanism, clip = Mechanism(levels=levels, trials=trials), 0.0015
    # A made-up gradient (its values are not private); the noise comes from the operating system's generator.
    gradient = np.random.default_rng(0).normal(0, clip / 3, LENET5_DIMENSION).astype(np.float32)
    truth = np.clip(gradient, -clip, clip)
    rng, server = privacy_rng(), Accumulator(LENET5_DIMENSION)
    for client in range(clients):
        frame = encode_frame(gradient, mechanism, clip=clip, rng=rng, client=client, round=0, clamp=True)
        server.add(frame, clip=clip, client=client, round=0)
    short = encode_frame(gradient, mechanism, clip=clip, rng=rng, client=0, round=0, coding="entropy", clamp=True)

    def error(values: np.ndarray) -> float:
        """Root mean square error, as a multiple of the clip."""
        return float(np.sqrt(np.mean((values - truth) ** 2)) / clip)

    fields = {
        "coordinates": LENET5_DIMENSION,
        "levels": levels,
        "trials": trials,
        "float32_bytes": gradient.nbytes,
        "frame_bytes": len(frame),
        "bits_per_coordinate": 8 * len(frame) / LENET5_DIMENSION,
        "entropy_frame_bytes": len(short),
        "entropy_bits_per_coordinate": 8 * len(short) / LENET5_DIMENSION,
        "error_one_client": error(decode_frame(frame, clip=clip, dimension=LENET5_DIMENSION)),
        "error_expected_one_client": float(np.sqrt(noise_variance(mechanism))),
        "clients": clients,
        "error_mean_of_clients": error(server.mean()),
    }
    emit(
        fields,
        as_json=json,
        title="One gradient of LeNet-5's size: encode, frame, decode",
        notes=("Errors are root mean square, in multiples of the clip. For privacy see `bqsgd account`.",),
    )
