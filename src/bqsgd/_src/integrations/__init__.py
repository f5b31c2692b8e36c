"""Privacy for apps of other frameworks: translation only. The privacy is in `private.gate` and `private.loop`."""
