"""The fixed filters of the scattering transform at two scales: Morlet wavelets in eight directions and a Gaussian.

They are those of kymatio's `Scattering2D(J=2, L=8)` (Andreux et al. 2020), which the tests compare against; nothing
here depends on anybody's data.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Real = npt.NDArray[np.float64]

SCALES = 2
DIRECTIONS = 8
REDUCTION = 2**SCALES
"""How many pixels per side one output position stands for."""
_PERIODS = 5
_PI_OF_KYMATIO = 3.1415
"""In the norm of its Gaussians; kept, so that the coefficients agree."""


def wavelet_spectra(height: int, width: int, *, scale: int) -> Real:
    """Spectra (8, height, width) of psi_{j,theta} on the periodic grid, j = scale; real, as psi(-u) = conj psi(u).

    psi(u) = g(u) (exp(i xi . u) - beta), g an elongated Gaussian of deviation sigma = 0.8 2^j across and 2 sigma along
    the wave fronts, |xi| = 3 pi / (4 2^j), beta such that the mean is zero.
    """
    spectra = []
    for direction in range(DIRECTIONS):
        angle = (DIRECTIONS // 2 - 1 - direction) * np.pi / DIRECTIONS
        sigma, frequency = 0.8 * 2**scale, 0.75 * np.pi / 2**scale
        rows, columns = (np.arange(-2 * n, 3 * n) for n in (height, width))
        across = rows[:, None] * np.cos(angle) + columns * np.sin(angle)
        along = columns * np.cos(angle) - rows[:, None] * np.sin(angle)
        envelope = np.exp(-(across**2 + (along / 2) ** 2) / (2 * sigma**2)) / (4 * _PI_OF_KYMATIO * sigma**2)
        wave, gaussian = (
            part.reshape(_PERIODS, height, _PERIODS, width).sum(axis=(0, 2))
            for part in (envelope * np.exp(1j * frequency * across), envelope)
        )
        spectra.append(np.fft.fft2(wave - wave.sum() / gaussian.sum() * gaussian).real)
    return np.array(spectra)


def low_pass(length: int, *, scale: int) -> Real:
    """Matrix (length / 4 - 2, length / 2^scale): along one axis, the Gaussian mean of a signal that was subsampled by
    2^scale, read at every fourth pixel of the full grid without the first and last of these, which are padding.

    The Gaussian of deviation 1.6 is a product over the two axes, so that two such matrices do the whole low-pass.
    """
    sigma = 0.8 * 2 ** (SCALES - 1)
    positions = np.arange(-2 * length, 3 * length)
    gaussian = np.exp(-(positions**2) / (2 * sigma**2)).reshape(_PERIODS, length).sum(axis=0)
    spectrum = np.fft.fft(gaussian).real / np.sqrt(2 * _PI_OF_KYMATIO * sigma**2)
    if scale > 0:  # the band that the coarser grid holds, folded onto it
        short = length >> scale
        spectrum[short // 2 : short // 2 + length - short] = 0
        spectrum = spectrum.reshape(1 << scale, short).sum(axis=0)
    response: Real = np.fft.ifft(spectrum).real
    step = REDUCTION >> scale
    outputs = np.arange(1, length // REDUCTION - 1)
    matrix: Real = response[(step * outputs[:, None] - np.arange(len(response))) % len(response)]
    return matrix


def folded(spectra: Real, *, step: int) -> npt.NDArray[np.float32]:
    """Spectra (..., height, width) laid out for a product that subsamples by `step` on the way: float32 of shape
    (filters, step, height / step, step, 2 width / step), each value twice (real and imaginary part), over step^2."""
    filters, height, width = spectra.shape
    shape = (filters, step, height // step, step, 2 * width // step)
    return np.ascontiguousarray(np.repeat(spectra / step**2, 2, axis=-1).reshape(shape), dtype=np.float32)
