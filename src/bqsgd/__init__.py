"""bqsgd: private, compressed distributed learning. Importing it loads neither torch nor Flower."""

__version__ = "0.1.0"
