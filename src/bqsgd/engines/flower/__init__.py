"""The Flower engine: frames over Flower's grid. The apps that use it are in `bqsgd.flower`."""
