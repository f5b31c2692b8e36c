"""Wavelet scattering: a fixed transform of images whose features a linear model separates well.

Order 2 at two scales and eight directions (Bruna and Mallat 2013), as kymatio's `Scattering2D(J=2)` gives it:

    S0 = x * phi,   S1 = |x * psi_1| * phi,   S2 = ||x * psi_1| * psi_2| * phi,

1 + 16 + 64 = 81 channels, each read at every fourth pixel; then each sample is normalised by itself in 27 groups of
three channels (Tramer and Boneh 2021). Nothing is learnt or measured from data: a sample's features depend on that
sample alone, so the transform costs no privacy and a client may apply it before anything else.

Speed: what is subsampled is folded in the Fourier domain before the inverse transform, the Gaussian mean is two small
matrix products, and few images are in hand at a time so that they stay in the cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numba import njit
from torch import Tensor

from bqsgd.data.morlet import DIRECTIONS, REDUCTION, folded, low_pass, wavelet_spectra
from bqsgd.errors import InvalidParameter, NonFiniteInput
from bqsgd.params import check_int

CHANNELS = 1 + 2 * DIRECTIONS + DIRECTIONS**2
GROUPS = 27
_MARGIN = REDUCTION
_MOST_PIXELS = 1 << 20
_PIXEL_SLACK = 1e-4
"""What normalising and undoing it may have rounded."""
_CHUNK = 32
"""Images in hand at a time."""

Floats = npt.NDArray[np.float32]


class Scattering:
    """The transform for one-channel images of one shape.

    >>> Scattering(28, 28)(torch.zeros(2, 28, 28)).shape
    torch.Size([2, 81, 7, 7])
    """

    def __init__(self, height: int, width: int) -> None:
        for name, side in (("height", height), ("width", width)):
            check_int(name, side, REDUCTION, _MOST_PIXELS)
            if side % REDUCTION:
                raise InvalidParameter(
                    f"{name} must be a multiple of {REDUCTION} for the scattering features, got {side}; "
                    "pad or crop the images"
                )
        if height * width > _MOST_PIXELS:
            raise InvalidParameter(f"an image may have at most {_MOST_PIXELS} pixels, got {height} x {width}")
        self.shape = (height, width)
        self._rows, self._columns = (
            torch.from_numpy(np.pad(np.arange(side), _MARGIN, mode="reflect")) for side in self.shape
        )
        padded = (height + 2 * _MARGIN, width + 2 * _MARGIN)
        fine, coarse = (wavelet_spectra(*padded, scale=scale) for scale in (0, 1))
        self._fine, self._coarse = folded(fine, step=1), folded(coarse, step=2)
        self._means = [
            tuple(torch.from_numpy(low_pass(side, scale=scale)).float() for side in padded) for scale in (0, 1)
        ]

    def __call__(self, images: Tensor) -> Tensor:
        """Coefficients (n, 81, height / 4, width / 4) in float32 of images (n, height, width), all at once."""
        if tuple(images.shape[1:]) != self.shape or images.dtype != torch.float32:
            raise InvalidParameter(
                f"images must be float32 of shape (n, {self.shape[0]}, {self.shape[1]}), "
                f"got {images.dtype} {tuple(images.shape)}"
            )
        padded = images[:, self._rows][:, :, self._columns]
        spectrum = torch.fft.fft2(padded)[:, None]
        first_fine = _filtered(spectrum, self._fine)
        first_coarse = _filtered(spectrum, self._coarse)
        second = _filtered(torch.fft.fft2(first_fine), self._coarse)
        return torch.cat(
            [
                self._mean(padded[:, None], scale=0),
                self._mean(first_fine, scale=0),
                self._mean(first_coarse, scale=1),
                self._mean(second, scale=1),
            ],
            dim=1,
        )

    def _mean(self, images: Tensor, *, scale: int) -> Tensor:
        rows, columns = self._means[scale]
        return rows @ (images @ columns.T)


def features(
    images: npt.NDArray[np.float32],
    *,
    mean: float = 0.0,
    deviation: float = 1.0,
    threads: int = 1,
    progress: Callable[[int], Any] = lambda done: None,
) -> Floats:
    """Normalised coefficients (n, 81, height / 4, width / 4) of images (n, height, width) or (n, 1, height, width).

    Args:
        images: float32. Pixels lie in [0, 1], or did so before they became (pixel - mean) / deviation. The scale is
            part of the transform: the group norm adds a constant to each variance, and S0 shares its group.
        threads: chunks of images worked on at once. Their number changes no bit of the result, nor do the images that
            stand beside one.
        progress: called with the number of images that have just been done, from any thread.

    Raises:
        NonFiniteInput, InvalidParameter: before anything is computed.
    """
    check_int("threads", threads, 1, 1024)
    found = images[:, 0] if images.ndim == 4 and images.shape[1] == 1 else images
    if found.ndim != 3 or found.dtype != np.float32:
        raise InvalidParameter(
            f"images must be float32 with one channel, (n, height, width), got {images.dtype} {images.shape}"
        )
    if len(found):
        low, high = float(found.min()) * deviation + mean, float(found.max()) * deviation + mean
        if not (math.isfinite(low) and math.isfinite(high)):
            raise NonFiniteInput("images hold NaN or infinity; clean them before the transform")
        if low < -_PIXEL_SLACK or high > 1 + _PIXEL_SLACK:
            raise InvalidParameter(
                f"pixels must lie in [0, 1], these reach from {low:.4g} to {high:.4g}; "
                "scale them, or give the mean and deviation they were normalised with"
            )
    transform = transform_for(*found.shape[1:])
    height, width = transform.shape
    out = np.empty((len(found), CHANNELS, height // REDUCTION, width // REDUCTION), dtype=np.float32)

    def one(start: int) -> None:
        part = found[start : start + _CHUNK]
        pixels = torch.zeros(_CHUNK, height, width)  # always a whole chunk: the same instructions for every image
        pixels[: len(part)] = torch.from_numpy(part * np.float32(deviation) + np.float32(mean))
        normalised = torch.nn.functional.group_norm(transform(pixels), GROUPS)
        out[start : start + len(part)] = normalised[: len(part)].numpy()
        progress(len(part))

    before = torch.get_num_threads()
    torch.set_num_threads(1)  # the threads are ours
    try:
        with ThreadPoolExecutor(threads, thread_name_prefix="scattering") as pool:
            for _ in pool.map(one, range(0, len(found), _CHUNK)):
                pass
    finally:
        torch.set_num_threads(before)
    return out


@lru_cache(maxsize=4)
def transform_for(height: int, width: int) -> Scattering:
    """The transform for this shape; its filters are made once."""
    return Scattering(height, width)


def _filtered(spectra: Tensor, filters: Floats) -> Tensor:
    """|x * psi| for all spectra (n, channels, ...) and filters: (n, channels x filters, ...), subsampled as `filters`
    were folded."""
    count, step, height, _, double_width = filters.shape
    images = spectra.shape[0] * spectra.shape[1]
    laid_out = torch.view_as_real(spectra.contiguous()).numpy().reshape(images, step, height, step, double_width)
    product = np.empty((images, count, height, double_width), dtype=np.float32)
    (_multiply if step == 1 else _multiply_and_fold)(laid_out, filters, product)
    complex_product = torch.view_as_complex(torch.from_numpy(product).view(images, count, height, -1, 2))
    waves = torch.view_as_real(torch.fft.ifft2(complex_product)).numpy()
    modulus = product.reshape(-1)[: waves.size // 2]  # what was there is spent; fresh memory costs more than the sums
    _modulus(waves.reshape(-1, 2), modulus)
    return torch.from_numpy(modulus).view(len(spectra), -1, height, double_width // 2)


@njit(nogil=True, cache=True, fastmath={"contract"})
def _multiply(spectra, filters, out):  # type: ignore[no-untyped-def]
    for i in range(out.shape[0]):
        for f in range(out.shape[1]):
            for k in range(out.shape[2]):
                for c in range(out.shape[3]):
                    out[i, f, k, c] = spectra[i, 0, k, 0, c] * filters[f, 0, k, 0, c]


@njit(nogil=True, cache=True, fastmath={"contract"})
def _multiply_and_fold(spectra, filters, out):  # type: ignore[no-untyped-def]
    """Subsampling by two in space is the mean of the four quarters of the spectrum."""
    for i in range(out.shape[0]):
        for f in range(out.shape[1]):
            for k in range(out.shape[2]):
                for c in range(out.shape[3]):
                    upper = spectra[i, 0, k, 0, c] * filters[f, 0, k, 0, c]
                    upper += spectra[i, 0, k, 1, c] * filters[f, 0, k, 1, c]
                    lower = spectra[i, 1, k, 0, c] * filters[f, 1, k, 0, c]
                    lower += spectra[i, 1, k, 1, c] * filters[f, 1, k, 1, c]
                    out[i, f, k, c] = upper + lower


@njit(nogil=True, cache=True, fastmath={"contract"})
def _modulus(waves, out):  # type: ignore[no-untyped-def]
    for i in range(len(out)):
        out[i] = np.sqrt(waves[i, 0] * waves[i, 0] + waves[i, 1] * waves[i, 1])
