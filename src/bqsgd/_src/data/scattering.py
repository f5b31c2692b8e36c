"""Wavelet scattering: a fixed transform of images whose features a linear model separates well.

Order 2 at two scales and eight directions (Bruna and Mallat 2013), as kymatio's `Scattering2D(J=2)` gives it:

    S0 = x * phi,   S1 = |x * psi_1| * phi,   S2 = ||x * psi_1| * psi_2| * phi,

1 + 16 + 64 = 81 channels for each channel of the image, read at every fourth pixel; then each kind of coefficient is
brought to one scale by constants, those of the dead-leaves model of natural images, and the channels at each position
are normalised together. A colour image is taken as brightness and two differences of colours, and its features are
averaged with those of its mirror image. Nothing is learnt or measured from data: a sample's features depend on that
sample alone, so the transform costs no privacy and a client may apply it before anything else.

Speed: subsampling happens in the Fourier domain, before the inverse transform, and the Gaussian mean is two small
matrix products. Images are transformed one at a time. In a batch, a library may compute an image differently depending
on how many others there are and where it stands among them; a bit that depends on other samples would be a leak.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from importlib import resources

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bqsgd._src.data.features import Transform
from bqsgd._src.errors import InvalidParameter
from bqsgd._src.params import check_int
from bqsgd._src.runtime.compiling import njit

_SCALES = 2
_DIRECTIONS = 8
REDUCTION = 2**_SCALES
"""How many pixels per side one output position stands for."""
_PERIODS = 5
_PI_OF_KYMATIO = 3.1415
"""kymatio normalises its Gaussians with this value of pi; we use it too, so that the coefficients agree."""
CHANNELS = 1 + 2 * _DIRECTIONS + _DIRECTIONS**2
MEANS = (0.492, 0.0183, 0.0262, 0.00538, 0.00463, 0.00325, 0.00226, 0.00193)
DEVIATIONS = (0.235, 0.0163, 0.0208, 0.00428, 0.00350, 0.00223, 0.00148, 0.00130)
"""Mean and deviation of each kind of coefficient (`kinds`) over images of dead leaves: opaque discs of random grey,
radii from 3 to 30 with density r^-3, laid over one another (Lee, Mumford and Huang 2001). The tests draw such images
and compare."""
OPPONENTS = ((1 / 3, 1 / 3, 1 / 3), (2**0.5, 0.0, -(2**0.5)), ((2 / 3) ** 0.5, -2 * (2 / 3) ** 0.5, (2 / 3) ** 0.5))
"""The three planes that a colour image becomes: the mean of red, green and blue, and two colour differences orthogonal
to it and to each other. The differences are twice as large as a rotation would make them, because natural images vary
less in colour than in brightness."""
MATRIX = resources.files("bqsgd._src.data") / "whitening.npy"
"""81 x 81, symmetric: brings the channels nearer to equal variances, as random strokes and blobs have them.
`experiments.frontier.whitening` makes it."""
_MARGIN = REDUCTION
_MOST_PIXELS = 1 << 20

_Floats = npt.NDArray[np.float32]
_Real = npt.NDArray[np.float64]


class Scattering:
    """The transform for one-channel images of one shape.

    >>> transform = Scattering(28, 28)
    >>> transform.coefficients(transform.padded(torch.zeros(2, 28, 28))).shape
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

    def padded(self, images: Tensor) -> Tensor:
        """Images with a reflected margin. Sides are multiples of 4, so each image starts at a multiple of 64 bytes."""
        return images[:, self._rows][:, :, self._columns]

    def coefficients(self, padded: Tensor) -> Tensor:
        """Coefficients (n, 81, height / 4, width / 4) in float32 of padded images, all at once."""
        count, height, width = padded.shape
        fine = torch.empty(count, 1 + _DIRECTIONS, height, width)  # x and |x * psi_1| on the full grid
        coarse = torch.empty(count, _DIRECTIONS + _DIRECTIONS**2, height // 2, width // 2)
        fine[:, 0] = padded
        spectrum = torch.fft.fft2(padded)[:, None]
        _filtered(spectrum, self._fine, fine[:, 1:])
        _filtered(spectrum, self._coarse, coarse[:, :_DIRECTIONS])
        _filtered(torch.fft.fft2(fine[:, 1:]), self._coarse, coarse[:, _DIRECTIONS:])
        return torch.cat([self._mean(fine, scale=0), self._mean(coarse, scale=1)], dim=1)

    def _mean(self, images: Tensor, *, scale: int) -> Tensor:
        rows, columns = self._means[scale]
        return rows @ (images @ columns.T)


def _output_shape(input_shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of an image's features: (81 * channels, height / 4, width / 4)."""
    if len(input_shape) != 3 or input_shape[0] not in (1, 3):
        raise InvalidParameter(
            f"scattering features need images of one or three channels, (channels, height, width), got {input_shape}"
        )
    height, width = transform_for(*input_shape[1:]).shape
    return CHANNELS * input_shape[0], height // REDUCTION, width // REDUCTION


def _chunk_transform(input_shape: tuple[int, ...]) -> Callable[[_Floats], _Floats]:
    """Normalised coefficients (n, 81 * channels, height / 4, width / 4) of images (n, channels, height, width).

    Each coefficient becomes (coefficient - mean) / deviation with the constants of its kind; then all channels at one
    position are normalised together to mean 0 and deviation 1. A colour image has 3 x 81 channels, those of its
    `OPPONENTS`, and the mean with its mirror image is normalised once more.
    """
    channels, height, width = input_shape
    transform = transform_for(height, width)
    means, deviations = constants(channels)

    def normalised(padded: Tensor) -> Tensor:
        # One plane at a time: with one shape and alignment, a library takes the same path for every image.
        parts = [transform.coefficients(padded[plane : plane + 1]) for plane in range(channels)]
        return each_position((torch.cat(parts, dim=1) - means) / deviations)

    def of_chunk(pixels: _Floats) -> _Floats:
        pixels = opponents(pixels) if channels == 3 else pixels
        views = [pixels, pixels[..., ::-1]] if channels == 3 else [pixels]
        padded_views = [
            transform.padded(torch.from_numpy(np.ascontiguousarray(view).reshape(-1, height, width))) for view in views
        ]
        rows = []
        for row in range(len(pixels)):
            sides = [normalised(view[row * channels : (row + 1) * channels]) for view in padded_views]
            rows.append(sides[0] if channels == 1 else each_position(sides[0] + sides[1]))
        return torch.cat(rows).numpy()

    return of_chunk


SCATTERING = Transform(output_shape=_output_shape, chunk_transform=_chunk_transform)


def _whitened_shape(input_shape: tuple[int, ...]) -> tuple[int, ...]:
    if input_shape[:1] != (1,):
        raise InvalidParameter(f"whitened features need images of one channel, got {input_shape}; use scattering")
    return _output_shape(input_shape)


def _whitened_chunk(input_shape: tuple[int, ...]) -> Callable[[_Floats], _Floats]:
    """The features of `SCATTERING` times the matrix, at each position."""
    of_chunk = _chunk_transform(input_shape)
    with MATRIX.open("rb") as file:
        matrix = torch.from_numpy(np.load(file, allow_pickle=False)).clone()

    def whitened(row: _Floats) -> _Floats:
        # One image at a time, in memory that torch aligns: a library takes the same path for every image.
        return (matrix @ torch.from_numpy(row).clone().reshape(CHANNELS, -1)).reshape(row.shape).numpy()

    return lambda pixels: np.stack([whitened(row) for row in of_chunk(pixels)])


WHITENED = Transform(output_shape=_whitened_shape, chunk_transform=_whitened_chunk)


def kinds() -> list[int]:
    """The kind of each of the 81 channels, as an index into `MEANS` and `DEVIATIONS`.

    S0, S1 at the fine scale, S1 at the coarse scale, then S2 by the angle between its directions, from 0 to 90 degrees.
    """
    turns = [(second - first) % _DIRECTIONS for first in range(_DIRECTIONS) for second in range(_DIRECTIONS)]
    return [0, *[1] * _DIRECTIONS, *[2] * _DIRECTIONS, *(3 + min(turn, _DIRECTIONS - turn) for turn in turns)]


def constants(channels: int) -> tuple[Tensor, Tensor]:
    """Mean and deviation of each channel of coefficients. The mean of a colour difference is zero."""
    means, deviations = (
        torch.tensor([values[kind] for kind in kinds()]).repeat(channels) for values in (MEANS, DEVIATIONS)
    )
    means[CHANNELS::CHANNELS] = 0
    return means[:, None, None], deviations[:, None, None]


def each_position(coefficients: Tensor) -> Tensor:
    """The channels at each position of (n, channels, height, width), normalised to mean 0 and deviation 1."""
    last = coefficients.permute(0, 2, 3, 1).contiguous()
    return torch.nn.functional.layer_norm(last, last.shape[-1:]).permute(0, 3, 1, 2)


def opponents(images: _Floats) -> _Floats:
    """Colour images (n, 3, height, width) as `OPPONENTS`."""
    # Added up by hand: a matrix product may round a pixel differently depending on its neighbours.
    red, green, blue = (images[:, channel] for channel in range(3))
    rows = np.array(OPPONENTS, dtype=np.float32)
    return np.stack([row[0] * red + row[1] * green + row[2] * blue for row in rows], axis=1)


@lru_cache(maxsize=4)
def transform_for(height: int, width: int) -> Scattering:
    """The transform for this shape. Its filters are computed once."""
    return Scattering(height, width)


def _filtered(spectra: Tensor, filters: _Floats, out: Tensor) -> None:
    """out = |x * psi| for all spectra (n, channels, ...) and filters: (n, channels x filters, ...), subsampled as
    `filters` were folded."""
    count, step, height, _, double_width = filters.shape
    images = spectra.shape[0] * spectra.shape[1]
    laid_out = torch.view_as_real(spectra.contiguous()).numpy().reshape(images, step, height, step, double_width)
    product = torch.empty(images, count, height, double_width)  # torch aligns its memory, NumPy may not
    (_multiply if step == 1 else _multiply_and_fold)(laid_out, filters, product.numpy())
    waves = torch.fft.ifft2(torch.view_as_complex(product.view(images, count, height, -1, 2)))
    flat = out.flatten(1).numpy()
    _modulus(torch.view_as_real(waves).numpy().reshape(*flat.shape, 2), flat)


# `contract` lets the compiler fuse a product and a sum, and no more: other fast-math flags would let it reorder sums
# depending on the length of a loop. `nogil` lets threads work at the same time.


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
    for n in range(out.shape[0]):
        for i in range(out.shape[1]):
            out[n, i] = np.sqrt(waves[n, i, 0] * waves[n, i, 0] + waves[n, i, 1] * waves[n, i, 1])


# The fixed filters: those of kymatio's `Scattering2D(J=2, L=8)` (Andreux et al. 2020), which the tests compare against.


def wavelet_spectra(height: int, width: int, *, scale: int) -> _Real:
    """Spectra (8, height, width) of psi_{j,theta} on the periodic grid, j = scale; real, as psi(-u) = conj psi(u).

    psi(u) = g(u) (exp(i xi . u) - beta), g an elongated Gaussian of deviation sigma = 0.8 2^j across and 2 sigma along
    the wave fronts, |xi| = 3 pi / (4 2^j), beta such that the mean is zero.
    """
    spectra = []
    for direction in range(_DIRECTIONS):
        angle = (_DIRECTIONS // 2 - 1 - direction) * np.pi / _DIRECTIONS
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


def low_pass(length: int, *, scale: int) -> _Real:
    """Matrix (length / 4 - 2, length / 2^scale) that takes the Gaussian mean along one axis.

    Its input is a signal subsampled by 2^scale. Its outputs are at every fourth pixel of the full grid, without the
    first and the last of these, which lie in the padding. The Gaussian (deviation 1.6) is a product over the two axes,
    so two such matrices make the whole low-pass.
    """
    sigma = 0.8 * 2 ** (_SCALES - 1)
    positions = np.arange(-2 * length, 3 * length)
    gaussian = np.exp(-(positions**2) / (2 * sigma**2)).reshape(_PERIODS, length).sum(axis=0)
    spectrum = np.fft.fft(gaussian).real / np.sqrt(2 * _PI_OF_KYMATIO * sigma**2)
    if scale > 0:  # keep the band that the coarser grid can represent, and fold it onto that grid
        short = length >> scale
        spectrum[short // 2 : short // 2 + length - short] = 0
        spectrum = spectrum.reshape(1 << scale, short).sum(axis=0)
    response: _Real = np.fft.ifft(spectrum).real
    step = REDUCTION >> scale
    outputs = np.arange(1, length // REDUCTION - 1)
    matrix: _Real = response[(step * outputs[:, None] - np.arange(len(response))) % len(response)]
    return matrix


def folded(spectra: _Real, *, step: int) -> npt.NDArray[np.float32]:
    """Spectra (..., height, width) laid out for a product that subsamples by `step` on the way: float32 of shape
    (filters, step, height / step, step, 2 width / step), each value twice (real and imaginary part), over step^2."""
    filters, height, width = spectra.shape
    shape = (filters, step, height // step, step, 2 * width // step)
    return np.ascontiguousarray(np.repeat(spectra / step**2, 2, axis=-1).reshape(shape), dtype=np.float32)
