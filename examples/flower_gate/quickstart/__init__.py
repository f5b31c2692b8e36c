"""An app in the shape of Flower's quickstart; nothing in it is private. The diffs beside it make it private."""
