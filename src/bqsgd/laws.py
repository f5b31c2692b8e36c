"""Laws of integer noise other than the binomial, for `Mechanism.of(levels=..., noise=...)`.

>>> from bqsgd import Mechanism
>>> Mechanism.of(levels=2, noise=DiscreteGaussian(3.0)).trials  # the largest value of the noise
56
"""

from bqsgd._src.laws import Binomial, DiscreteGaussian, Geometric, Skellam, Sum

__all__ = ["Binomial", "DiscreteGaussian", "Geometric", "Skellam", "Sum"]
