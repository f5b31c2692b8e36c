"""Budget -> Plan: the integer (levels, trials) of least error that keep bits and epsilon within what was asked."""
