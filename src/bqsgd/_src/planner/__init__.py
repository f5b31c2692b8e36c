"""From a budget to a plan: the levels and trials of least error that stay within the bits and the epsilon asked for."""
