"""Scattering features: the same coefficients as kymatio's, its laws, and what it refuses."""

from functools import partial
from importlib.resources import files
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.special
import torch
from experiments.frontier import whitening
from hypothesis import given, settings
from hypothesis import strategies as st

from bqsgd import data
from bqsgd._src.data.features import compute_features, features_shape, transformed
from bqsgd._src.data.scattering import (
    DEVIATIONS,
    MATRIX,
    MEANS,
    OPPONENTS,
    SCATTERING,
    WHITENED,
    Scattering,
    kinds,
    low_pass,
    wavelet_spectra,
)
from bqsgd._src.errors import InvalidParameter, NonFiniteInput
from bqsgd._src.run import Run
from bqsgd._src.tasks.named import NamedTask, settings_of

features = partial(transformed, SCATTERING)


def coefficients(height, width, pixels):
    transform = Scattering(height, width)
    return transform.coefficients(transform.padded(pixels))


def images(count, *shape, seed=0):
    return np.random.default_rng(seed).random((count, *shape), dtype=np.float32)


@pytest.fixture
def oracle(monkeypatch):
    # kymatio 0.3.0 imports its 3-D part first, which wants this function; SciPy 1.17 has it no more. The 2-D part
    # never calls it.
    monkeypatch.setattr(scipy.special, "sph_harm", None, raising=False)
    from kymatio.torch import Scattering2D

    return Scattering2D


@pytest.mark.parametrize("shape", [(28, 28), (8, 8), (4, 4), (12, 20), (4, 16), (32, 32)])
def test_coefficients_are_those_of_kymatio(oracle, shape):
    pixels = torch.from_numpy(images(3, *shape))
    expected, found = oracle(J=2, shape=shape)(pixels), coefficients(*shape, pixels)
    assert found.shape == expected.shape == (3, 81, shape[0] // 4, shape[1] // 4)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)
    assert expected.abs().amax(dim=(0, 2, 3)).min() > 1e-4  # every channel says something, far above the tolerance


def scaled_and_normalised(planes):
    """Coefficients by the definition: the constants of each kind, then the channels at each position together."""
    which = np.array(kinds() * (planes.shape[1] // 81))
    means, deviations = (torch.tensor(np.array(values)[which])[:, None, None] for values in (MEANS, DEVIATIONS))
    means[81::81] = 0  # a difference of colours
    return each_position((planes - means) / deviations)


def each_position(planes):
    planes = planes - planes.mean(dim=1, keepdim=True)
    return planes / planes.std(dim=1, keepdim=True, correction=0)


def test_features_are_coefficients_of_the_pixels_at_one_scale_each_position_normalised_by_itself(oracle):
    entry = data.load("digits")
    pixels = torch.from_numpy(entry.test.inputs[:20, 0] * 0.5 + 0.5)
    assert pixels.min() == 0
    assert pixels.max() == 1
    expected = scaled_and_normalised(oracle(J=2, shape=(8, 8))(pixels).double())
    found = compute_features("scattering", entry.test, of=entry)
    np.testing.assert_allclose(found.inputs[:20], expected.numpy(), rtol=0, atol=2e-3)
    np.testing.assert_array_equal(found.labels, entry.test.labels)


def dead_leaves(count, side, *, seed):
    """Discs of random grey over one another, radii with density r^-3 between 3 and 30."""
    rng = np.random.default_rng(seed)
    rows, columns = np.mgrid[:side, :side]
    found = np.empty((count, side, side), dtype=np.float32)
    for image in found:
        image[:] = rng.random()
        radii = (3.0**-2 + rng.random(300) * (30.0**-2 - 3.0**-2)) ** -0.5
        centres = rng.random((300, 2)) * (side + 60) - 30
        for radius, (row, column), grey in zip(radii, centres, rng.random(300), strict=True):
            image[(rows - row) ** 2 + (columns - column) ** 2 <= radius**2] = grey
    return found


def test_the_constants_are_those_of_dead_leaves():
    leaves = coefficients(32, 32, torch.from_numpy(dead_leaves(300, 32, seed=1)))
    for kind, (mean, deviation) in enumerate(zip(MEANS, DEVIATIONS, strict=True)):
        some = leaves[:, [channel for channel, found in enumerate(kinds()) if found == kind]]
        assert float(some.mean()) == pytest.approx(mean, rel=0.1)
        assert float(some.var(dim=(0, 2, 3)).mean().sqrt()) == pytest.approx(deviation, rel=0.1)


@settings(max_examples=20, deadline=None)
@given(level=st.floats(0, 1, width=32))
def test_a_constant_image_has_its_level_in_the_first_channel_and_nothing_elsewhere(level):
    found = coefficients(12, 16, torch.full((1, 12, 16), level))
    gain = 3.141592653589793 / 3.1415  # the norm of the Gaussian is kymatio's
    torch.testing.assert_close(found[:, 0], torch.full((1, 3, 4), level * gain), rtol=0, atol=2e-6)
    assert found[:, 1:].abs().max() < 2e-6


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), down=st.sampled_from([-4, 0, 4]), right=st.sampled_from([-4, 4]))
def test_a_shift_by_four_pixels_shifts_the_output_by_one(seed, down, right):
    # A spot far from the borders: padding sees zeros before and after.
    canvas = np.zeros((1, 48, 48), dtype=np.float32)
    canvas[:, 20:28, 20:28] = images(1, 8, 8, seed=seed)
    here = coefficients(48, 48, torch.from_numpy(canvas))
    there = coefficients(48, 48, torch.from_numpy(np.roll(canvas, (down, right), axis=(1, 2))))
    assert here.abs().max() > 0.01
    torch.testing.assert_close(there, here.roll((down // 4, right // 4), dims=(2, 3)), rtol=0, atol=2e-4)


def test_coefficients_scale_with_the_image():
    pixels = torch.from_numpy(images(2, 8, 8))
    quarter = coefficients(8, 8, pixels * 0.25)
    torch.testing.assert_close(quarter, coefficients(8, 8, pixels) * 0.25, rtol=0, atol=1e-6)


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 12, 20)])
def test_the_features_of_an_image_depend_on_nothing_but_that_image(shape):
    pixels = images(45, *shape)
    together = features(pixels)
    alone = np.concatenate([features(pixels[row : row + 1]) for row in (0, 3, 17, 44)])
    np.testing.assert_array_equal(together[[0, 3, 17, 44]], alone)
    np.testing.assert_array_equal(features(pixels, threads=3), together)
    np.testing.assert_array_equal(features(pixels[::-1])[::-1], together)


def test_torch_threads_are_left_as_they_were_and_progress_counts_every_image():
    before, seen = torch.get_num_threads(), []
    features(images(21, 1, 8, 8), progress=seen.append)
    assert torch.get_num_threads() == before
    assert sum(seen) == 21
    assert features(images(0, 1, 8, 8)).shape == (0, 81, 2, 2)


@pytest.mark.parametrize(
    ("pixels", "error", "message"),
    [
        (images(2, 1, 10, 8), InvalidParameter, "height must be a multiple of 4"),
        (images(2, 1, 8, 2), InvalidParameter, "width"),
        (images(2, 2, 8, 8), InvalidParameter, "one or three channels"),
        (images(2, 8, 8), InvalidParameter, "one or three channels"),
        (images(2, 1, 8, 8) * 2, InvalidParameter, r"pixels must lie in \[0, 1\]"),
        (images(2, 1, 8, 8) - 1, InvalidParameter, r"pixels must lie in \[0, 1\]"),
        (np.full((2, 1, 8, 8), np.nan, np.float32), NonFiniteInput, "NaN"),
        (np.full((2, 1, 8, 8), np.inf, np.float32), NonFiniteInput, "infinity"),
    ],
)
def test_what_is_refused(pixels, error, message):
    with pytest.raises(error, match=message):
        features(pixels)


def test_a_transform_takes_images_of_at_most_a_million_pixels():
    with pytest.raises(InvalidParameter, match="at most"):
        Scattering(2048, 2048)


def test_a_colour_image_is_brightness_and_two_differences_averaged_with_its_mirror_image(oracle):
    pixels = images(3, 3, 12, 8)
    red, green, blue = pixels.transpose(1, 0, 2, 3)
    opponents = [(red + green + blue) / 3, 2**0.5 * (red - blue), (2 / 3) ** 0.5 * (red - 2 * green + blue)]
    seen, mirrored = (
        scaled_and_normalised(oracle(J=2, shape=(12, 8))(torch.from_numpy(view)).reshape(3, 243, 3, 2).double())
        for view in (np.stack(opponents, axis=1), np.stack(opponents, axis=1)[..., ::-1].copy())
    )
    expected = each_position(seen + mirrored)
    np.testing.assert_allclose(features(pixels), expected.numpy(), rtol=0, atol=2e-3)
    np.testing.assert_array_equal(features(pixels[1:2])[0], features(pixels, threads=2)[1])


def test_a_colour_image_and_its_mirror_image_have_the_same_features_and_a_grey_one_has_not():
    pixels = images(2, 3, 8, 12)
    np.testing.assert_array_equal(features(pixels[..., ::-1].copy()), features(pixels))
    grey = pixels[:, :1]
    assert np.abs(features(grey[..., ::-1].copy()) - features(grey)).max() > 0.1


def test_the_differences_of_colours_are_orthogonal_and_zero_on_grey():
    rows = np.array(OPPONENTS)
    product = rows @ rows.T
    np.testing.assert_allclose(product, np.diag([1 / 3, 4, 4]), atol=1e-12)
    np.testing.assert_allclose(rows @ np.ones(3), [1, 0, 0], atol=1e-12)


def test_filters_have_no_mean_and_the_low_pass_keeps_a_constant():
    for scale in (0, 1):
        assert np.abs(wavelet_spectra(36, 20, scale=scale)[:, 0, 0]).max() < 1e-12
        np.testing.assert_allclose(low_pass(36, scale=scale).sum(axis=1), 1, atol=1e-4)
        assert low_pass(36, scale=scale).shape == (7, 36 >> scale)


def test_shape_of_features_and_what_they_refuse():
    assert features_shape("none", (3, 5)) == (3, 5)
    assert features_shape("scattering", (1, 8, 12)) == (81, 2, 3)
    assert features_shape("scattering", (3, 32, 32)) == (243, 8, 8)
    with pytest.raises(InvalidParameter, match="one or three channels"):
        features_shape("scattering", (2, 32, 32))
    with pytest.raises(InvalidParameter, match="colour images"):
        features_shape("imagenet", (1, 28, 28))
    with pytest.raises(InvalidParameter, match="features must be one of none, scattering"):
        features_shape("fourier", (1, 8, 8))
    with pytest.raises(InvalidParameter, match="features must be one of none, scattering"):
        NamedTask.of(features="fourier")
    digits = data.load("digits")
    assert compute_features("none", digits.test, of=digits) is digits.test


def chosen(**settings):
    chosen = {"dataset": "digits", "features": "scattering", "clients": 2, "rounds": 30, "batch_size": 64, "seed": 1}
    return settings_of(**{**chosen, "learning_rate": 2.0, "levels": 100, "trials": 40, "epsilon": 1e6, **settings})


def task_of(client=None, simulated=False, **settings):
    named, config = chosen(**settings)
    return named.task(config, client=client, simulated=simulated)


def test_a_rank_has_the_same_share_as_it_has_among_all():
    everybody = task_of()
    for client in (0, 1):
        own = task_of(client=client)
        assert (own.test is None) == (client == 1)
        assert len(own.shares) == 1
        for alone, among in zip(own.shares[0], everybody.shares[client], strict=True):
            np.testing.assert_array_equal(alone, among)


def test_runs_after_one_another_share_the_features():
    first, second = task_of(), task_of(batch_size=32, learning_rate=1.0)
    assert first.shares[0][0] is second.shares[0][0]
    assert task_of(init_seed=5).shares[0][0] is not first.shares[0][0]


def test_training_end_to_end_on_features():
    task = task_of()
    assert all(float(parameter.detach().abs().max()) == 0 for parameter in task.make_model().parameters())
    assert sum(parameter.numel() for parameter in task.make_model().parameters()) == 81 * 4 * 10 + 10
    with Run.start(task, chosen()[1]) as run:
        assert run.evaluate().accuracy < 0.2
        for record in run.rounds():
            assert record.stepped
        accuracy = run.evaluate().accuracy
    assert accuracy > 0.85


def test_another_model_behind_the_features():
    assert len(list(task_of(model="mlp").make_model().parameters())) == 4
    with pytest.raises(InvalidParameter, match="try mlp or linear"):
        task_of(model="cnn").make_model()


@pytest.mark.parametrize("simulated", [False, True])
def test_the_flower_app_has_the_same_shares_test_data_and_model(simulated):
    app: dict = {}
    template = files("bqsgd._src.flower").joinpath("template", "task.py.in")
    exec(compile(template.read_text(), "task.py", "exec"), app)
    everybody, (named, config) = task_of(), chosen()
    options = vars(named)
    for client, expected in enumerate(everybody.shares):
        own = app["task"](config, SimpleNamespace(client=client, options={}, simulated=simulated), options)
        assert len(own.shares) == 1
        assert (own.shares[0][0] is expected[0]) == simulated  # read once for all
        for alone, among in zip(own.shares[0], expected, strict=True):
            np.testing.assert_array_equal(alone, among)
    server = app["task"](config, None, options)
    assert not server.shares
    for found, expected in zip(server.test, everybody.test, strict=True):
        np.testing.assert_array_equal(found, expected)
    model = server.make_model()
    assert model(torch.from_numpy(everybody.test[0][:3])).shape == (3, 10)
    assert not any(parameter.any() for parameter in model.parameters())


@pytest.mark.parametrize("simulated", [False, True])
def test_a_client_that_is_none_of_the_run_is_refused(simulated):
    with pytest.raises(InvalidParameter, match="client"):
        task_of(client=2, simulated=simulated)


def test_whitened_features_are_the_matrix_times_the_scattering_features_at_each_position():
    pixels = images(40, 1, 8, 12)
    matrix = np.load(str(MATRIX)).astype(np.float64)
    expected = np.einsum("ij,njhw->nihw", matrix, features(pixels).astype(np.float64))
    found = transformed(WHITENED, pixels)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)
    np.testing.assert_array_equal(transformed(WHITENED, pixels[7:8]), found[7:8])
    assert features_shape("whitened", (1, 8, 12)) == found.shape[1:]


@pytest.mark.parametrize("side", [4, 8, 28])
def test_an_image_has_the_same_whitened_features_in_every_place(side):
    """Images of 4 x 4 pixels have features that lie at every alignment, which decides the last bits of a product."""
    found = transformed(WHITENED, np.repeat(images(1, 1, side, side), 40, axis=0))
    np.testing.assert_array_equal(found, found[:1].repeat(40, axis=0))


def test_whitened_features_take_grey_images_only():
    for refused in [(3, 32, 32), (8, 8), ()]:
        with pytest.raises(InvalidParameter, match="one channel"):
            features_shape("whitened", refused)


def test_the_matrix_is_that_of_random_strokes_and_blobs():
    """Of fewer images than in the package's: the entries differ by what the images differ."""
    matrix = np.load(str(MATRIX))
    again = whitening.matrix(150, seed=1)
    assert matrix.dtype == np.float32
    assert abs(np.linalg.norm(again - matrix)) < 0.05 * np.linalg.norm(matrix)
    np.testing.assert_allclose(matrix, matrix.T, rtol=0, atol=1e-5)
