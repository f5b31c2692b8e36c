"""The models of the paper's experiments and four small ones: `build(name)` makes one, initialised from a seed.

No model has batch normalisation: it mixes the samples of a batch, so a per-sample clip could not bound what one sample
changes. Below the models, functions turn any model's trainable parameters into one flat float32 vector and back, in the
order of `model.parameters()`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from bqsgd._src.errors import InvalidParameter, NonFiniteInput
from bqsgd._src.params import check_choice, check_finite, check_int

_ACTIVATIONS: dict[str, type[nn.Module]] = {"tanh": nn.Tanh, "relu": nn.ReLU}
"""tanh is bounded and copes with noise; ReLU is there for comparison."""
_Layers = list[nn.Module]


def _lenet5(input_shape: tuple[int, ...], classes: int) -> _Layers:
    """LeNet-5: two convolutions, three dense layers, 61,706 parameters with ten classes."""
    return [
        nn.Conv2d(1, 6, 5, padding=2),
        nn.AvgPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(400, 120),
        nn.Linear(120, 84),
        nn.Linear(84, classes),
    ]


def _cnn(input_shape: tuple[int, ...], classes: int) -> _Layers:
    """The small CNN of DP-SGD tutorials: 26,010 parameters with ten classes.

    Two strided convolutions with overlapping max-pooling and one hidden layer of 32.
    """
    return [
        nn.Conv2d(1, 16, 8, stride=2, padding=3),
        nn.MaxPool2d(2, stride=1),
        nn.Conv2d(16, 32, 4, stride=2),
        nn.MaxPool2d(2, stride=1),
        nn.Flatten(),
        nn.Linear(512, 32),
        nn.Linear(32, classes),
    ]


def _alexnet28(input_shape: tuple[int, ...], classes: int) -> _Layers:
    """AlexNet's five convolutions and three dense layers, narrowed: 1,158,010 parameters with ten classes.

    With these widths a round of 4 x 32 samples with per-sample clipping takes a few tenths of a second on two cores.
    The paper does not say how it adapted AlexNet to 28 x 28 images. There is no dropout and no response normalisation.
    """
    return [
        nn.Conv2d(1, 16, 5, padding=2),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 5, padding=2),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.Conv2d(64, 48, 3, padding=1),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(432, 832),
        nn.Linear(832, 832),
        nn.Linear(832, classes),
    ]


def _mlp(input_shape: tuple[int, ...], classes: int) -> _Layers:
    """One hidden layer of 64 over the flattened input."""
    return [nn.Flatten(), nn.Linear(math.prod(input_shape), 64), nn.Linear(64, classes)]


def _linear(input_shape: tuple[int, ...], classes: int) -> _Layers:
    """One dense layer over the flattened input: 39,700 parameters for scattering features of 28 x 28 images."""
    return [nn.Flatten(), nn.Linear(math.prod(input_shape), classes)]


def _pooled(input_shape: tuple[int, ...], classes: int) -> _Layers:
    """One dense layer over the means of 3 x 3 regions of every channel.

    It has 7,300 parameters for scattering features and ten classes. Fewer coordinates carry less noise in total, which
    matters most for user-level privacy.
    """
    if len(input_shape) != 3:
        raise InvalidParameter(
            f"model pooled takes images, (channels, height, width); the data have shape {input_shape}"
        )
    return [nn.AdaptiveAvgPool2d(3), *_linear((input_shape[0], 3, 3), classes)]


class _OneHot(nn.Module):
    """Codes 0 to codes - 1 to vectors with a one in that place; of anything else, to zeros."""

    codes: torch.Tensor

    def __init__(self, codes: int) -> None:
        super().__init__()
        self.register_buffer("codes", torch.arange(codes, dtype=torch.float32), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        # Compared rather than indexed: no value of a sample can raise an error.
        return torch.eq(inputs[..., None], self.codes).to(inputs.dtype)


def _context(input_shape: tuple[int, ...], classes: int) -> _Layers:
    """One dense layer over the codes before the one to predict: 7,812 parameters for six characters of 36."""
    return [_OneHot(classes), *_linear((math.prod(input_shape), classes), classes)]


_MODELS: dict[str, Callable[[tuple[int, ...], int], _Layers]] = {
    "lenet5": _lenet5,
    "cnn": _cnn,
    "alexnet28": _alexnet28,
    "mlp": _mlp,
    "linear": _linear,
    "pooled": _pooled,
    "context": _context,
}
_FOR_28_BY_28 = ("lenet5", "cnn", "alexnet28")
"""The models for inputs of shape (1, 28, 28); the others adapt to the data."""


def build(name: str, *, input_shape: tuple[int, ...], classes: int, seed: int, activation: str = "tanh") -> nn.Module:
    """Make the model `name` for these inputs, with PyTorch's default initialisation drawn from `seed`.

    An activation follows every convolution and every dense layer but the last. Every client receives the initial model,
    so it is public and its seed does not affect the privacy claim. The state of torch's global generator does not
    change.
    """
    check_int("classes", classes, 2, 2**20)
    check_int("seed", seed, 0, 2**63 - 1)
    check_int("width", math.prod(input_shape), 1, 2**31)
    check_choice("model", name, _MODELS)
    check_choice("activation", activation, _ACTIVATIONS)
    if name in _FOR_28_BY_28 and input_shape != (1, 28, 28):
        raise InvalidParameter(
            f"model {name} takes inputs of shape (1, 28, 28), but the data have shape {input_shape}; try mlp or linear"
        )
    # The layers draw from torch's global generator; fork_rng puts its state back, so that a user's own draws do not
    # depend on whether a model was built.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = _MODELS[name](input_shape, classes)
    model = nn.Sequential()
    for layer in layers:
        model.append(layer)
        if isinstance(layer, (nn.Conv2d, nn.Linear)) and layer is not layers[-1]:
            model.append(_ACTIVATIONS[activation]())
    if name in ("linear", "pooled", "context"):
        # Their loss is convex, so there is no symmetry to break, and random weights would only be noise to unlearn.
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
    return model


def only_layer(model: nn.Module) -> nn.Linear | None:
    """The linear layer that scores two classes or more, if the model is this layer on its flattened inputs.

    None if the model is anything else, or if a parameter of the layer is not trained.
    """
    layers = [layer for layer in model.modules() if not isinstance(layer, (nn.Sequential, nn.Flatten, nn.Identity))]
    plain = isinstance(model, (nn.Sequential, nn.Linear)) and len(layers) == 1
    layer = layers[0] if plain else None
    if not isinstance(layer, nn.Linear) or layer.out_features < 2:
        return None
    return layer if all(parameter.requires_grad for parameter in layer.parameters()) else None


def default_for(input_shape: tuple[int, ...], *, features: str = "none") -> str:
    """The model of a run that names none: `cnn` for 28 x 28 images, `linear` on fixed features, `mlp` otherwise."""
    if features != "none":
        return "linear"
    return "cnn" if input_shape == (1, 28, 28) else "mlp"


_TRAINED = (torch.float32, torch.bfloat16, torch.float16)


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that are trained and sent: at least one, in float32, bfloat16 or float16, all on one device."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise InvalidParameter("the model has no trainable parameters; set requires_grad on those to train")
    for parameter in parameters:
        if parameter.dtype not in _TRAINED:
            raise InvalidParameter(
                f"trained parameters must be float32, bfloat16 or float16, got {parameter.dtype}: convert the model "
                "with model.float() before you make its optimizer"
            )
    device_of(model)
    return parameters


def device_of(model: nn.Module) -> torch.device:
    """The one device on which all parameters and buffers of a model lie."""
    devices = {str(tensor.device): tensor.device for tensor in (*model.parameters(), *model.buffers())}
    if len(devices) > 1:
        raise InvalidParameter(
            f"the model lies on several devices ({', '.join(sorted(devices))}): put all of it on one, with "
            "model.to(device), before you make its optimizer"
        )
    return next(iter(devices.values()), torch.device("cpu"))


def dimension_of(model: nn.Module) -> int:
    """The number of trainable coordinates, d."""
    return sum(parameter.numel() for parameter in trainable(model))


def to_vector(model: nn.Module) -> npt.NDArray[np.float32]:
    """A copy of the trainable parameters as one vector."""
    return np.concatenate([as_numpy(parameter.float()).reshape(-1) for parameter in trainable(model)])


def as_numpy(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """The values as an array on the processor; those of bfloat16, which NumPy has not, in float32."""
    values = tensor.detach().cpu()
    return (values.float() if values.dtype == torch.bfloat16 else values).numpy()


def load_vector(model: nn.Module, vector: npt.ArrayLike) -> None:
    """Copy `vector` into the model's trainable parameters, rounded to their types.

    Raises if its length is wrong, or if a value is not finite or too large for its parameter's type.
    """
    array = np.asarray(vector, dtype=np.float32)
    parameters = trainable(model)
    sizes = [parameter.numel() for parameter in parameters]
    if array.shape != (sum(sizes),):
        raise InvalidParameter(f"the model takes a vector of {sum(sizes)} coordinates, got shape {array.shape}")
    check_finite(array, "the model vector holds NaN or infinity; lower the learning rate and resume")
    # The array may be read-only (a mapped checkpoint), and torch warns about tensors over such memory: hence the copy.
    parts = torch.from_numpy(array.copy()).split_with_sizes(sizes)
    with torch.no_grad():
        for parameter, part in zip(parameters, parts, strict=True):
            # Copied in place, unlike torch's vector_to_parameters, which makes every parameter a view into one vector:
            # the alignment of a parameter's memory can decide which kernel a library takes, and so its last bit.
            parameter.copy_(part.view_as(parameter))
            if parameter.dtype != torch.float32 and not bool(parameter.isfinite().all()):
                raise NonFiniteInput(f"the model vector holds values beyond {parameter.dtype}: use float32 or bfloat16")
